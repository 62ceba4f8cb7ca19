"""Launches the kernels: grids, strides, tiles, outputs. No argument is checked here (see `checks`)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backward as of_backward
from . import forward as of_forward
from . import ragged as of_ragged
from .architecture import Architecture, effective_architecture
from .launcher import Launcher
from .ragged import FIELDS, SEQUENCES
from .tiles import WHOLE, Tile, choose_tiles

attention_forward = Launcher(of_forward.attention_forward)
attention_delta = Launcher(of_backward.attention_delta)
attention_backward_dkdv = Launcher(of_backward.attention_backward_dkdv)
attention_backward_dq = Launcher(of_backward.attention_backward_dq)
list_tiles = Launcher(of_ragged.list_tiles)

LARGEST_GRID = 2**31 - 1

DELTA_ROWS = 32
"""Query rows of one program of the delta kernel, which only streams."""


@dataclass(frozen=True)
class Ragged:
    """Where the sequences of a ragged batch begin: int32 (B + 1,), contiguous, on the device of q."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, allow_tf32: bool,
    ragged: Ragged | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out in q's dtype and lse in float32, contiguous.

    Dense: q (B, Hq, Sq, D), k, v (B, Hkv, Sk, .), out (B, Hq, Sq, Dv), lse (B, Hq, Sq).
    Ragged: q (total_q, Hq, D), k, v (total_k, Hkv, .), out (total_q, Hq, Dv), lse (Hq, total_q).
    """
    arch = effective_architecture(q.device)
    out, lse = new_results(q, v)
    if lse.numel() == 0:
        return out, lse
    tile = choose_tiles(arch, q.shape[-1], v.shape[-1], q.element_size()).forward
    sizes = _sizes(q, k)
    with _device_of(q):
        tiles, grid = _programs("q", q, sizes, tile.BM, ragged)
        attention_forward[grid](
            q, k, v, out, lse, tiles,
            *_strides(q), *_strides(k), *_strides(v), *_strides(out), *_lse_strides(lse),
            scale, sizes.Hq, sizes.group, sizes.Sq, sizes.Sk, BM=tile.BM, BN=tile.BN, CAUSAL=causal,
            SIGN=(scale > 0) - (scale < 0), RAGGED=ragged is not None, VECTOR=_vector(q, k, v, out),
            **_dims(q, v, tile), **_arithmetic(arch, q, allow_tf32), **_compilation(arch, q, tile),
        )  # fmt: skip
    return out, lse


def backward(
    d_out: Tensor | None, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, causal: bool, scale: float, allow_tf32: bool, need_dq: bool, need_dkdv: bool,
    ragged: Ragged | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the shapes and dtype of q, k, v, contiguous; those not needed have no elements."""
    arch = effective_architecture(q.device)
    dq, dk, dv = new_gradients(q, k, v, need_dq, need_dkdv)
    if d_out is None:
        d_out = q.new_zeros(()).expand(out.shape)
    tiles = choose_tiles(arch, q.shape[-1], v.shape[-1], q.element_size())
    delta = torch.empty_like(lse)
    sequences = ragged.cu_seqlens_q.numel() - 1 if ragged is not None else 0
    sizes, arithmetic = _sizes(q, k), _arithmetic(arch, q, allow_tf32)
    with _device_of(q):
        if lse.numel():
            attention_delta[_grid("q", sizes.B * sizes.Hq, sizes.Sq, DELTA_ROWS)](
                out, d_out, d_lse if d_lse is not None else delta, delta,
                ragged.cu_seqlens_q if ragged is not None else delta,
                *_strides(out), *_strides(d_out),
                *(_d_lse_strides(d_lse) if d_lse is not None else (0, 0, 0)), *_lse_strides(delta),
                sizes.Hq, sizes.Sq, sequences, DV=v.shape[-1], WIDTH=WHOLE, BM=DELTA_ROWS,
                HAS_DLSE=d_lse is not None, RAGGED=ragged is not None, VECTOR=_vector(out, d_out),
                EMULATE_BF16=arithmetic["EMULATE_BF16"],
            )  # fmt: skip
        if dk.numel() or dv.numel():
            tile = tiles.dkdv
            listed, grid = _programs("k", k, sizes, tile.BN, ragged)
            attention_backward_dkdv[grid](
                q, k, v, d_out, lse, delta, dk, dv, listed,
                *_strides(q), *_strides(k), *_strides(v), *_strides(d_out), *_strides(dk), *_strides(dv),
                *_lse_strides(lse), scale, sizes.Hkv, sizes.group, sizes.Sq, sizes.Sk,
                BM=tile.BM, BN=tile.BN, CAUSAL=causal, RAGGED=ragged is not None,
                VECTOR=_vector(q, k, v, d_out, dk, dv), **_dims(q, v, tile), **arithmetic,
                **_compilation(arch, q, tile),
            )  # fmt: skip
        if dq.numel():
            tile = tiles.dq
            listed, grid = _programs("q", q, sizes, tile.BM, ragged)
            attention_backward_dq[grid](
                q, k, v, d_out, lse, delta, dq, listed,
                *_strides(q), *_strides(k), *_strides(v), *_strides(d_out), *_strides(dq),
                *_lse_strides(lse), scale, sizes.Hq, sizes.group, sizes.Sq, sizes.Sk,
                BM=tile.BM, BN=tile.BN, CAUSAL=causal, RAGGED=ragged is not None,
                VECTOR=_vector(q, k, v, d_out, dq), **_dims(q, v, tile), **arithmetic,
                **_compilation(arch, q, tile),
            )  # fmt: skip
    return dq, dk, dv


# ---------------------------------------------------------------- shapes, dense and ragged


class _Sizes(NamedTuple):
    """Of a ragged batch B is 1, and Sq, Sk are the rows of all sequences."""

    B: int
    Hq: int
    Hkv: int
    Sq: int
    Sk: int

    @property
    def group(self) -> int:
        return self.Hq // self.Hkv


def _sizes(q: Tensor, k: Tensor) -> _Sizes:
    if q.ndim == 3:
        return _Sizes(1, q.shape[1], k.shape[1], q.shape[0], k.shape[0])
    return _Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])


def new_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for out and lse; for the fake operators too."""
    rows = (q.shape[1], q.shape[0]) if q.ndim == 3 else q.shape[:3]
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(rows, dtype=torch.float32)


def new_gradients(
    q: Tensor, k: Tensor, v: Tensor, need_dq: bool, need_dkdv: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for dq, dk, dv; none for those that are not needed. For the fake operators too."""
    return (
        q.new_empty(q.shape if need_dq else (0,)),
        k.new_empty(k.shape if need_dkdv else (0,)),
        v.new_empty(v.shape if need_dkdv else (0,)),
    )


def _strides(t: Tensor) -> tuple[int, ...]:
    """Of batch entry, head, row, dimension. A sequence of a ragged batch begins at a row."""
    if t.ndim == 3:
        row, head, dim = t.stride()
        return row, head, row, dim
    return t.stride()


def _lse_strides(lse: Tensor) -> tuple[int, int]:
    """Of batch entry and head; rows are contiguous."""
    return (1, lse.stride(0)) if lse.ndim == 2 else (lse.stride(0), lse.stride(1))


def _d_lse_strides(d_lse: Tensor) -> tuple[int, ...]:
    """Of batch entry, head, row."""
    return (d_lse.stride(1), *d_lse.stride()) if d_lse.ndim == 2 else d_lse.stride()


# ---------------------------------------------------------------- which programs


def _programs(
    name: str, t: Tensor, sizes: _Sizes, rows: int, ragged: Ragged | None
) -> tuple[Tensor, tuple[int]]:
    """The table of the tiles of q or of k (for a dense batch any tensor: nobody reads it), and the grid."""
    heads, length = (sizes.Hq, sizes.Sq) if name == "q" else (sizes.Hkv, sizes.Sk)
    if ragged is None:
        return t, _grid(name, sizes.B * heads, length, rows)
    if name == "q":
        tiles = _listed(ragged.cu_seqlens_q, ragged.cu_seqlens_k, sizes.Sq, sizes.Sk, rows, last_first=True)
    else:
        tiles = _listed(ragged.cu_seqlens_k, ragged.cu_seqlens_q, sizes.Sk, sizes.Sq, rows, last_first=False)
    return tiles, _grid(name, heads, len(tiles) * rows, rows)


def _listed(own: Tensor, other: Tensor, total: int, total_other: int, rows: int, last_first: bool) -> Tensor:
    """The table of tiles of `ragged.list_tiles`, as long as it can get."""
    batch = own.numel() - 1
    n_tiles = total // rows + min(batch + 1, total)
    tiles = own.new_empty((n_tiles, FIELDS.value))
    list_tiles[batch + 1,](tiles, own, other, batch, total, total_other, n_tiles,
                           ROWS=rows, LAST_FIRST=last_first, BLOCK=SEQUENCES)  # fmt: skip
    return tiles


def _grid(name: str, heads: int, length: int, rows: int) -> tuple[int]:
    """One program for each tile of `rows` rows of each head of each batch entry."""
    programs = heads * -(-length // rows)
    if programs > LARGEST_GRID:
        raise ValueError(
            f"{name} has {heads} heads in all, of {length} rows each: {programs} tiles of {rows};"
            f" a launch takes at most {LARGEST_GRID}"
        )
    return (programs,)


def _dims(q: Tensor, v: Tensor, tile: Tile) -> dict[str, int]:
    return {"D": q.shape[-1], "DV": v.shape[-1], "WIDTH": tile.width}


def _vector(*tensors: Tensor) -> int:
    """Elements of a 16-byte access if every row of every tensor allows one, else 1."""
    width = 16 // tensors[0].element_size()
    for t in tensors:
        *strides, last = t.stride()
        if last != 1 or t.data_ptr() % 16:
            return 1
        for stride, size in zip(strides, t.shape, strict=False):
            if stride % width and size > 1:
                return 1
    return width


def _arithmetic(arch: Architecture, q: Tensor, allow_tf32: bool) -> dict[str, Any]:
    tf32 = allow_tf32 and q.dtype == torch.float32
    return {
        "PRECISION": "tf32" if tf32 else "ieee",
        "EMULATE_BF16": arch.interpreted and q.dtype == torch.bfloat16,
    }


def _compilation(arch: Architecture, q: Tensor, tile: Tile) -> dict[str, int]:
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if 80 <= arch.capability < 90 or (arch.capability == 90 and q.dtype == torch.float32):
        # ptxas was seen to cap the registers of these targets at 128 and less, and to spill
        options["maxnreg"] = 255
    return options


def _device_of(t: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's device current, which is where Triton launches; costs nothing if it is."""
    if t.device.type != "cuda" or t.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(t.device)
