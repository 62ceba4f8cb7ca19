"""Which calls are timed: problems with ids, their FLOPs, their tensors.

The table is that of most publications: 16,384 tokens, and as many heads as make H D = 2048, from short
sequences to long ones. Beside it stand head dimensions that are no power of two, grouped heads, ragged
batches of heavy-tailed lengths, and calls that are over before the host has launched them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from reports.roofline import attention_bytes, attention_flops, visible_pairs
from reports.timings import PASSES

from ..cases import Case

FORWARD, BACKWARD, BOTH = PASSES

BACKWARD_FLOPS = 2.5
"""Of the backward, in those of the forward: five products to two."""

TOKENS = 16_384
SEQUENCES = 64
DENSE = 2048
"""Length of the sequences of the dense batch whose work a ragged one is to have."""

LENGTHS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "lognormal": lambda generator: generator.lognormal(0, 1.5, SEQUENCES),
    "pareto": lambda generator: generator.pareto(1.1, SEQUENCES) + 0.05,
}
"""Distributions of the lengths of ragged batches: sigma 1.5, and alpha 1.1."""


@functools.cache
def drawn(kind: str) -> tuple[int, ...]:
    """Lengths of `SEQUENCES` sequences, `TOKENS` together: the first draw of about the dense batch's work."""
    return next(draws(kind))


def draws(kind: str) -> Iterator[tuple[int, ...]]:
    """Draws whose work, causal, is within a tenth of that of a dense batch of `TOKENS` tokens."""
    work = visible_pairs(DENSE, DENSE, True) * (TOKENS // DENSE)
    for seed in range(10_000):
        x = LENGTHS[kind](np.random.default_rng(seed))
        n = np.maximum(1, np.floor(x / x.sum() * TOKENS)).astype(int)
        n[n.argmax()] += TOKENS - n.sum()
        if 0.9 < sum(visible_pairs(length, length, True) for length in n) / work < 1.1:
            yield tuple(map(int, n))


@dataclass(frozen=True)
class Problem:
    """A call.

    Attributes:
        batch, heads_q, heads_kv, length, dim: B, Hq, Hkv, Sq = Sk, D = Dv; of a ragged batch `batch` is the
            number of sequences and `length` all rows.
        causal, dtype: the mask, a dtype's name.
        kind: of `LENGTHS`: how the lengths of a ragged batch are distributed; empty for a dense batch.
    """

    batch: int
    heads_q: int
    heads_kv: int
    length: int
    dim: int
    causal: bool = True
    dtype: str = "float16"
    kind: str = ""

    def __post_init__(self) -> None:
        if self.kind and (
            self.kind not in LENGTHS or (self.batch, self.length) != (len(self.lengths), sum(self.lengths))
        ):
            raise ValueError(
                f"kind is {self.kind!r}, of {self.batch} sequences and {self.length} rows; it may be"
                f" {', '.join(LENGTHS)}, of {SEQUENCES} and {TOKENS}"
            )
        _ = self.case  # which refuses what is no call

    @property
    def id(self) -> str:
        batch = f"{'r' if self.kind else 'b'}{self.batch}"
        mask = "causal" if self.causal else "full"
        heads = f"h{self.heads_q}x{self.heads_kv}"
        words = (batch, heads, f"s{self.length}", f"d{self.dim}", self.dtype, mask, self.kind)
        return "_".join(filter(None, words))

    @property
    def title(self) -> str:
        """For a reader."""
        heads = f"H {self.heads_q}"
        if self.heads_kv != self.heads_q:
            heads += f" on {self.heads_kv}"
        mask = "causal" if self.causal else "full"
        if self.kind:
            length = f"{self.batch} sequences, {self.kind} lengths, {self.length:,} tokens"
        else:
            length = f"B {self.batch}, T {self.length}"
        return f"D {self.dim}, {mask}, {length}, {heads}" + (f", {self.dtype}" * (self.dtype != "float16"))

    @property
    def pairs(self) -> int:
        """Visible pairs of a head, of all sequences."""
        return sum(visible_pairs(n, n, self.causal) for n in self.lengths)

    def flops(self, step: str) -> float:
        """Of a step of `PASSES`."""
        forward = sum(
            attention_flops(1, self.heads_q, n, n, self.dim, causal=self.causal) for n in self.lengths
        )
        return forward * {FORWARD: 1.0, BACKWARD: BACKWARD_FLOPS, BOTH: 1 + BACKWARD_FLOPS}[step]

    @property
    def least_bytes(self) -> int:
        """That the forward moves: each input read once, each output written once."""
        size = getattr(torch, self.dtype).itemsize
        rows = sum(self.lengths)
        return attention_bytes(1, self.heads_q, rows, rows, self.dim, heads_kv=self.heads_kv, itemsize=size)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of each sequence."""
        return drawn(self.kind) if self.kind else (self.length,) * self.batch

    @property
    def case(self) -> Case:
        """The same for whoever knows cases."""
        lengths = tuple((n, n) for n in self.lengths) if self.kind else None
        return Case(
            self.batch, self.heads_q, self.heads_kv, self.length, self.length, self.dim, self.dim, self.dtype,
            self.causal, layout="bshd" if self.kind else "bhsd", lengths=lengths,
        )  # fmt: skip


_ID = re.compile(
    r"(?P<form>[br])(?P<batch>\d+)_h(?P<heads_q>\d+)x(?P<heads_kv>\d+)_s(?P<length>\d+)_d(?P<dim>\d+)"
    r"_(?P<dtype>[a-z]+\d+)_(?P<mask>causal|full)(?:_(?P<kind>[a-z]+))?"
)


def parse(text: str) -> Problem:
    """The problem of an id.

    Raises:
        ValueError: if it is none.
    """
    match = _ID.fullmatch(text)
    kind = (match["kind"] or "") if match else ""
    if match is None or (match["form"] == "r") != bool(kind) or (kind and kind not in LENGTHS):
        raise ValueError(
            f"{text!r} is no problem; one reads b8_h32x32_s2048_d64_float16_causal, or of a ragged batch"
            f" r{SEQUENCES}_h16x16_s{TOKENS}_d128_float16_causal_{'|'.join(LENGTHS)}"
        )
    numbers = {name: int(match[name]) for name in ("batch", "heads_q", "heads_kv", "length", "dim")}
    return Problem(**numbers, causal=match["mask"] == "causal", dtype=match["dtype"], kind=kind)


# ---------------------------------------------------------------- which


def _table(dim: int, lengths: tuple[int, ...], heads: int | None = None, group: int = 1) -> list[Problem]:
    heads = heads or 2048 // dim
    return [Problem(TOKENS // length, heads, heads // group, length, dim, causal)
            for causal in (False, True) for length in lengths]  # fmt: skip


TABLE = (
    *_table(64, (512, 2048, 8192, 16_384)),
    *_table(128, (512, 2048, 8192, 16_384)),
    *_table(256, (4096,)),
)
OTHERS = (
    *_table(96, (2048, 8192), heads=16),
    Problem(8, 16, 16, DENSE, 80),
    Problem(8, 10, 10, DENSE, 192),
    Problem(8, 32, 4, DENSE, 64),
    Problem(8, 32, 4, DENSE, 128),
    *(Problem(SEQUENCES, 16, 16, TOKENS, dim, kind=kind) for dim in (64, 128) for kind in LENGTHS),
    Problem(SEQUENCES, 16, 2, TOKENS, 128, kind="lognormal"),
)
SMALL = (Problem(1, 8, 8, 1024, 64), Problem(1, 8, 8, 2048, 64))
GATE = SMALL[1]
"""The notebook's shape, at twice its length: that of the gates."""

GRID = (*TABLE, *OTHERS, *SMALL)
"""What the table, and the regression baseline, are of."""

# ---------------------------------------------------------------- tensors


@dataclass(frozen=True)
class Tensors:
    """Of a call: leaves q, k, v (B, H, S, D) or (total, H, D), and what flows back.

    Attributes:
        q, k, v: N(0, 1), requiring gradients.
        d_out: N(0, 1).
        offsets: cu_seqlens of a ragged batch, int32 (B + 1,).
        longest: rows of its longest sequence.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    offsets: Tensor | None = None
    longest: int = 0

    def fresh(self) -> Tensors:
        """The same with leaves of their own."""
        q, k, v = (t.detach().requires_grad_() for t in self.leaves)
        return replace(self, q=q, k=k, v=v)

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def tensors(problem: Problem, layout: str = "bhsd", seed: int = 0, device: str = "cuda") -> Tensors:
    """The tensors of a call, the same values in each layout.

    Args:
        problem: what is computed.
        layout: of a dense batch: "bhsd", contiguous, or "bshd", views of (B, S, H, D).
        seed: of the values.
        device: where.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, problem.dtype)

    def normal(heads: int) -> Tensor:
        shape = (problem.batch, heads, problem.length, problem.dim)
        if problem.kind:
            shape = (problem.length, heads, problem.dim)  # type: ignore[assignment]
        x = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if layout == "bshd" and not problem.kind else x

    heads_q, heads_kv = problem.heads_q, problem.heads_kv
    q, k, v = (normal(heads).requires_grad_() for heads in (heads_q, heads_kv, heads_kv))
    d_out = normal(heads_q)
    if not problem.kind:
        return Tensors(q, k, v, d_out)
    begin = [0, *accumulate(problem.lengths)]
    offsets = torch.tensor(begin, dtype=torch.int32, device=device)
    return Tensors(q, k, v, d_out, offsets, max(problem.lengths))
