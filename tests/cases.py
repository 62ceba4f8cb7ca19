"""A case: everything that determines a comparison, in one frozen value with a printable id.

The id decodes back to the whole case, so that one line replays a failure anywhere:

    b2_h4x2_s33x65_d64x32_float16_causal_scale=auto_normal_bshd_grad=qkv_dlse_seed7

reads: batch 2, 4 query heads on 2 KV heads, 33 queries on 65 keys, head dimensions D = 64 and Dv = 32, ...

A ragged batch has the queries x keys of each sequence instead, and the rows that lie past the last one:

    b3_h4x2_r33x65+0x7+5x0_past2x1_d64x32_float16_causal_scale=auto_normal_bshd_grad=qkv_dlse_seed7

Equal neighbours are counted: r2of33x65+5x0 is 33 x 65 twice, then 5 x 0.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

DTYPES = ("float16", "bfloat16", "float32")
GRADIENTS = ("none", "q", "k", "v", "qk", "qv", "kv", "qkv")

REGIMES = {
    "normal": "N(0, 1)",
    "large": "scores of magnitude 16, values of 8",
    "tiny": "inputs of 1/16, values and gradients near float16's subnormal numbers",
    "outliers": "N(0, 1) + N(0, 100) Bernoulli(0.001)",
    "equal": "all keys equal, so that all scores of a row are",
    "near-tied": "keys in pairs a factor of 1 + 2**-10 apart (equal in bfloat16), scores of +-40",
    "negative": "q > 0 and k < 0: every score clearly negative",
    "very-negative": "every score near -60000",
    "growing": "scores that grow with the key: the running maximum changes in every tile",
    "mean": "v and d_out 1 +- 0.1",
    "loud": "every other head 50 times as large: what is taken from the wrong one dominates",
    "exact": "one-hot rows of small integers: the result is exact in every dtype",
}
"""Value regimes and what they are."""

LAYOUTS = {
    "bhsd": "contiguous",
    "bshd": "views of (B, S, H, D)",
    "sbhd": "views of (S, B, H, D)",
    "packed": "slots of one packed (B, S, 3, H, D) buffer each",
    "sliced": "slices along S and D of larger tensors",
    "strided": "last dimension not contiguous",
    "offset": "storage offset of one element",
    "expanded": "k, v and d_out expanded over the heads (stride 0)",
    "gradient": "q, k, v contiguous, the gradients of out and lse views of (B, S, H, D)",
    "odd": "contiguous, odd strides of dimensions of size 1",
}
"""Memory layouts and what they are. All lie in larger buffers; what else is in those must not matter."""

LARGEST_RAGGED = 2**24
"""Most sequences of a ragged batch that an id may name."""

SEED_STEP = 2654435761
"""Between the seeds of the sequences of a ragged batch: odd, so that 2**32 sequences differ."""


@dataclass(frozen=True)
class Case:
    """A comparison's inputs. Values follow from the seed (`values`), memory from the layout (`layouts`).

    Attributes:
        batch, heads_q, heads_kv: B, Hq, Hkv; Hq is a multiple of Hkv.
        len_q, len_k: Sq, Sk; of a ragged batch all rows, total_q and total_k.
        dim, dim_v: D, Dv.
        dtype: "float16", "bfloat16" or "float32".
        causal: aligned at the bottom right.
        scale: of the scores; None is the default D ** -0.5.
        values: a name of `REGIMES`.
        layout: a name of `LAYOUTS`.
        grad: which inputs require a gradient: "none" (forward only), "q", ..., "qkv".
        d_lse: whether a gradient flows into the lse too.
        seed: of the values, 0 to 2**32 - 1.
        lengths: a ragged batch: (Sq, Sk) of each sequence; batch, len_q and len_k then follow from it.
            None: a dense batch.
        past: of a ragged batch, the rows of q and of k behind the last sequence.
    """

    batch: int = 1
    heads_q: int = 1
    heads_kv: int = 1
    len_q: int = 16
    len_k: int = 16
    dim: int = 16
    dim_v: int = 16
    dtype: str = "float16"
    causal: bool = False
    scale: float | None = None
    values: str = "normal"
    layout: str = "bhsd"
    grad: str = "qkv"
    d_lse: bool = False
    seed: int = 0
    lengths: tuple[tuple[int, int], ...] | None = None
    past: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if self.lengths is not None:
            if min((*self.past, *(n for pair in self.lengths for n in pair))) < 0:
                raise ValueError(
                    f"lengths are {self.lengths} and {self.past} past them; none may be negative"
                )
            totals = {
                "batch": len(self.lengths),
                "len_q": sum(q for q, _ in self.lengths) + self.past[0],
                "len_k": sum(k for _, k in self.lengths) + self.past[1],
            }
            for name, value in totals.items():
                object.__setattr__(self, name, value)
        elif self.past != (0, 0):
            raise ValueError(f"past is {self.past}; only a ragged batch has rows past its sequences")
        for name in ("batch", "len_q", "len_k", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        for name in ("heads_q", "heads_kv", "dim", "dim_v"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.heads_q % self.heads_kv:
            raise ValueError(f"heads_q is {self.heads_q}; it must be a multiple of heads_kv, {self.heads_kv}")
        if self.scale is not None and not math.isfinite(self.scale):
            raise ValueError(f"scale is {self.scale}; it must be finite")
        if self.seed >= 2**32:
            raise ValueError(f"seed is {self.seed}; it must be less than 2**32")
        for name, allowed in (
            ("dtype", DTYPES),
            ("values", REGIMES),
            ("layout", LAYOUTS),
            ("grad", GRADIENTS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it may be one of {', '.join(allowed)}")
        if self.d_lse and self.grad == "none":
            raise ValueError("d_lse is True and grad is 'none'; d_lse needs an input with a gradient")

    @property
    def backward(self) -> bool:
        return self.grad != "none"

    @property
    def effective_scale(self) -> float:
        return self.dim**-0.5 if self.scale is None else self.scale

    @property
    def equal_scores(self) -> bool:
        """Whether all scores of a row are equal: P is then the same in rows that see as many keys."""
        return self.values == "equal" or self.effective_scale == 0

    @property
    def few_magnitudes(self) -> bool:
        """Whether the elements of q and k share their magnitude: those of dq and dk are then few, and are
        rounded by the same amount."""
        return self.values in ("exact", "very-negative")

    @property
    def exact(self) -> bool:
        """Whether out, and dv in 16 bit, must come out bit for bit."""
        return self.values == "exact" and self.effective_scale != 0

    @property
    def ragged(self) -> bool:
        return self.lengths is not None

    def sequences(self) -> list[Case]:
        """The sequences of a ragged batch as dense cases of one batch entry: same values, other seeds."""
        assert self.lengths is not None
        return [
            replace(self, lengths=None, past=(0, 0), batch=1, len_q=len_q, len_k=len_k,
                    seed=(self.seed + number * SEED_STEP) % 2**32)
            for number, (len_q, len_k) in enumerate(self.lengths)
        ]  # fmt: skip

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(Sq, Sk) of each sequence; of a dense batch one pair, that of all its entries."""
        return ((self.len_q, self.len_k),) if self.lengths is None else self.lengths

    @property
    def dead_rows(self) -> bool:
        """Whether some query of a sequence sees no key."""
        return any(q > 0 and (k == 0 or (self.causal and q > k)) for q, k in self.pairs)

    @property
    def empty(self) -> bool:
        """Whether there is nothing in the batch, no query or no key, or that in one of its sequences."""
        return self.batch == 0 or any(0 in pair for pair in self.pairs)

    @property
    def id(self) -> str:
        return "_".join(
            (
                f"b{self.batch}",
                f"h{self.heads_q}x{self.heads_kv}",
                f"s{self.len_q}x{self.len_k}"
                if self.lengths is None
                else _ragged_id(self.lengths, self.past),
                f"d{self.dim}x{self.dim_v}",
                self.dtype,
                "causal" if self.causal else "full",
                f"scale={'auto' if self.scale is None else repr(self.scale)}",
                self.values,
                self.layout,
                f"grad={self.grad}",
                "dlse" if self.d_lse else "nodlse",
                f"seed{self.seed}",
            )
        )

    def __repr__(self) -> str:
        return f"<{self.id}>"

    def words(self) -> str:
        """The case for a reader."""
        heads = f"{self.heads_q} heads"
        if self.heads_q != self.heads_kv:
            heads = f"{self.heads_q} query heads on {self.heads_kv} KV heads"
        dims = f"D {self.dim}" + ("" if self.dim == self.dim_v else f", Dv {self.dim_v}")
        scale = "default scale" if self.scale is None else f"scale {self.scale:g}"
        gradients = "forward only" if not self.backward else f"gradients of {', '.join(self.grad)}"
        if self.lengths is None:
            lengths = f"batch {self.batch}, {heads}, {self.len_q} queries on {self.len_k} keys"
        else:
            pairs = ", ".join(
                f"{q} on {k}" + (f" ({count} times)" if count > 1 else "")
                for count, (q, k) in _counted(self.lengths)
            )
            past = f", {self.past[0]} and {self.past[1]} rows past them" if any(self.past) else ""
            lengths = (
                f"ragged batch of {self.batch}, {heads}, queries on keys by sequence: {pairs or 'none'}{past}"
            )
        return (
            f"{self.dtype}, {lengths},"
            f" {dims}, {'causal' if self.causal else 'not causal'}, {scale}; values: {self.values}"
            f" ({REGIMES[self.values]}); memory: {LAYOUTS[self.layout]}; {gradients}"
            f"{', through lse too' if self.d_lse else ''}; seed {self.seed}"
        )


def _counted(lengths: tuple[tuple[int, int], ...]) -> list[tuple[int, tuple[int, int]]]:
    """Equal neighbours once, with how many there are: an id of 70,000 sequences must fit a command line."""
    return [(len(list(equal)), pair) for pair, equal in groupby(lengths)]


def _ragged_id(lengths: tuple[tuple[int, int], ...], past: tuple[int, int]) -> str:
    pairs = "+".join(f"{count}of{q}x{k}" if count > 1 else f"{q}x{k}" for count, (q, k) in _counted(lengths))
    return f"r{pairs}_past{past[0]}x{past[1]}"


_N = "[0-9]{1,18}"
_RUN = rf"([1-9][0-9]{{0,17}}of)?{_N}x{_N}"
_PATTERN = re.compile(
    rf"b(?P<batch>{_N})_h(?P<heads_q>{_N})x(?P<heads_kv>{_N})_"
    rf"(s(?P<len_q>{_N})x(?P<len_k>{_N})|r(?P<lengths>({_RUN}(\+{_RUN})*)?)_past(?P<past>{_N}x{_N}))"
    rf"_d(?P<dim>{_N})x(?P<dim_v>{_N})_(?P<dtype>[a-z0-9]+)_(?P<causal>causal|full)"
    r"_scale=(?P<scale>[-+.e0-9a-z]+)_(?P<values>[-a-z]+)_(?P<layout>[a-z]+)_grad=(?P<grad>[a-z]+)"
    rf"_(?P<d_lse>dlse|nodlse)_seed(?P<seed>{_N})"
)


def _pair(text: str) -> tuple[int, int]:
    first, second = text.split("x")
    return int(first), int(second)


def _run_of_pairs(text: str) -> tuple[int, tuple[int, int]]:
    """One part of a ragged id: 2of33x65 is (33, 65) twice, 2 and (33, 65)."""
    count, _, pair = text.rpartition("of")
    return int(count or 1), _pair(pair)


def parse_case(text: str) -> Case:
    """The case that an id stands for.

    Raises:
        ValueError: if it is not an id of a case; says what one looks like, or which part is wrong.
    """
    match = _PATTERN.fullmatch(text.strip().strip("<>"))
    if match is None:
        ragged = Case(lengths=((33, 65), (0, 7)), past=(2, 1))
        raise ValueError(f"case id is {text!r}; it must look like {Case().id} or {ragged.id}")
    part = match.groupdict()
    names = ["batch", "heads_q", "heads_kv", "dim", "dim_v", "seed"]
    numbers: dict[str, Any] = {}
    if part["lengths"] is None:
        names += ["len_q", "len_k"]
    else:
        runs = [_run_of_pairs(run) for run in filter(None, part["lengths"].split("+"))]
        sequences = sum(count for count, _ in runs)
        if sequences > LARGEST_RAGGED:  # they are laid out one by one
            raise ValueError(f"case id is {text!r}: {LARGEST_RAGGED} sequences are the most")
        if sequences != int(part["batch"]):
            raise ValueError(f"case id is {text!r}: b{part['batch']}, but there are {sequences} sequences")
        numbers["lengths"] = tuple(pair for count, pair in runs for _ in range(count))
        numbers["past"] = _pair(part["past"])
    numbers |= {name: int(part[name]) for name in names}
    try:
        scale = None if part["scale"] == "auto" else float(part["scale"])
        return Case(
            **numbers,
            dtype=part["dtype"],
            causal=part["causal"] == "causal",
            scale=scale,
            values=part["values"],
            layout=part["layout"],
            grad=part["grad"],
            d_lse=part["d_lse"] == "dlse",
        )
    except ValueError as error:
        raise ValueError(f"case id is {text!r}: {error}") from None
