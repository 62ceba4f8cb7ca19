"""Calls of our own functions on the tensors of a case, and results compared bit for bit.

For what numbers against references do not show: the references themselves judge in `comparison`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kernels import effective_architecture, flash_attention, flash_attention_varlen
from kernels.tiles import choose_tiles

from .cases import Case
from .values import Inputs, make_inputs

DIM = 32
"""Head dimension of a case that names none."""


def largest_tile(device: torch.device, dtype: str = "float16", dim: int = DIM) -> tuple[int, int]:
    """The most query rows and keys that one tile of any of the three kernels holds."""
    arch = effective_architecture(device)
    tiles = choose_tiles(arch, dim, dim, getattr(torch, dtype).itemsize)
    chosen = (tiles.forward, tiles.dkdv, tiles.dq)
    return max(tile.BM for tile in chosen), max(tile.BN for tile in chosen)


def case_of(device: torch.device, **changes: Any) -> Case:
    """A case of two query heads on one KV head, a little longer than a tile both ways, but for changes."""
    dims = {"dim": DIM, "dim_v": changes.get("dim", DIM)}
    BM, BN = largest_tile(device, changes.get("dtype", "float16"), changes.get("dim", DIM))
    some = {"heads_q": 2, "heads_kv": 1, "len_q": BM + 1, "len_k": BN + 3, "d_lse": True}
    return Case(**(some | dims | changes))


def inputs_of(device: torch.device, **changes: Any) -> Inputs:
    """The tensors of such a case on the device, contiguous."""
    return every(make_inputs(case_of(device, **changes)), lambda _, t: t.to(device))


def every(x: Inputs, change: Callable[[str, Tensor], Tensor]) -> Inputs:
    """Inputs made of each tensor and its name."""
    changed: dict[str, Any] = {name: t if t is None else change(name, t) for name, t in vars(x).items()}
    return Inputs(**changed)


def with_exact_delta(x: Inputs) -> Inputs:
    """The same, but v in [1/2, 1] and whole numbers in d_out.

    out then has few bits in 16-bit dtypes, and delta = rowsum(d_out out) is exact in float32 in
    whatever order it is summed. (The order may follow from how memory is read.)
    """
    assert x.d_out is not None
    return replace(x, v=x.v.abs().clamp(max=4) / 8 + 0.5, d_out=x.d_out.round())


def attend(
    x: Inputs,
    offsets: Offsets | None = None,
    *,
    wanted: str = "qkv",
    through: str = "out lse",
    attention: Callable[..., Any] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """out and lse, and dq, dk, dv as far as wanted, where gradients flow in through out, lse or both.

    With `offsets` of a ragged batch; through another function than ours with `attention`.
    """
    leaves = {name: getattr(x, name).detach().requires_grad_(name in wanted) for name in "qkv"}
    attention = attention or (flash_attention if offsets is None else flash_attention_varlen)
    where = () if offsets is None else tuple(vars(offsets).values())
    out, lse = attention(*leaves.values(), *where, return_lse=True, **options)
    results = {"out": out.detach(), "lse": lse.detach()}
    if wanted:
        given = [(y, dy) for name, y, dy in (("out", out, x.d_out), ("lse", lse, x.d_lse)) if name in through]
        outputs, gradients = zip(*given, strict=True)
        found = torch.autograd.grad(outputs, [leaves[name] for name in wanted], gradients)
        results |= {f"d{name}": gradient for name, gradient in zip(wanted, found, strict=True)}
    return results


Lengths = Sequence[tuple[int, int]]
"""Queries and keys of each sequence of a ragged batch."""


@dataclass(frozen=True)
class Offsets:
    """Where the sequences of a ragged batch lie: the arguments of `flash_attention_varlen` behind q, k, v."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def of(cls, lengths: Lengths, device: torch.device) -> Offsets:
        sides = [[pair[side] for pair in lengths] for side in (0, 1)]
        q, k = (torch.tensor([0, *accumulate(side)], dtype=torch.int32, device=device) for side in sides)
        return cls(q, k, *(max(side, default=0) for side in sides))


def ragged_inputs_of(
    device: torch.device, lengths: Lengths, past: tuple[int, int] = (0, 0), **changes: Any
) -> Inputs:
    """The tensors of a ragged case as the function takes them: (total, H, .), d_lse (H, total).

    Contiguous; rows past the last sequence are NaN.
    """
    case = case_of(device, **changes, lengths=tuple(lengths), past=past)
    return every(make_inputs(case), lambda name, t: as_ragged(name, t).to(device).contiguous())


def as_ragged(name: str, t: Tensor) -> Tensor:
    """(1, H, S, .) as (S, H, .), and of the lse (1, H, S) as (H, S)."""
    return t[0] if t.ndim == 3 else t[0].transpose(0, 1)


def sequence_of(x: Inputs, offsets: Offsets, number: int) -> Inputs:
    """One sequence as a dense batch of one entry; views."""
    (q0, q1), (k0, k1) = (
        cu[number : number + 2].tolist() for cu in (offsets.cu_seqlens_q, offsets.cu_seqlens_k)
    )

    def dense(name: str, t: Tensor) -> Tensor:
        if name == "d_lse":
            return t[None, :, q0:q1]
        return (t[k0:k1] if name in "kv" else t[q0:q1]).transpose(0, 1)[None]

    return every(x, dense)


def bits(t: Tensor) -> Tensor:
    """The tensor's memory as integers, dense."""
    return t.detach().contiguous().view({2: torch.int16, 4: torch.int32}[t.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Fails at the first tensor that differs in shape, dtype or any bit."""
    assert found.keys() == expected.keys()
    for name, b in expected.items():
        a = found[name]
        assert a.shape == b.shape and a.dtype == b.dtype, (
            f"{name}: {a.dtype} {a.shape}, not {b.dtype} {b.shape}"
        )
        differ = (bits(a) != bits(b)).nonzero()
        assert not len(differ), (
            f"{name}: {len(differ)} of {a.numel()} elements differ, the first at {differ[0].tolist()}:"
            f" {a[tuple(differ[0])].item()}, not {b[tuple(differ[0])].item()}"
        )
