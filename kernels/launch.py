"""Launches the kernels: grids, strides, tiles, outputs. No argument is checked here (see `checks`)."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from .architecture import Architecture, effective_architecture
from .backward import attention_backward_dkdv, attention_backward_dq, attention_delta
from .forward import attention_forward
from .tiles import Tile, choose_tiles, padded_head_dim

LARGEST_GRID = 2**31 - 1

DELTA_ROWS = 32
"""Query rows of one program of the delta kernel, which only streams."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, allow_tf32: bool
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) in q's dtype and lse (B, Hq, Sq) in float32, both contiguous."""
    (B, Hq, Sq, _), (_, Hkv, Sk, _), Dv = q.shape, k.shape, v.shape[3]
    arch = effective_architecture(q.device)
    out = q.new_empty((B, Hq, Sq, Dv))
    lse = q.new_empty((B, Hq, Sq), dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    tile = choose_tiles(arch, q.shape[3], Dv, q.element_size()).forward
    with _device_of(q):
        attention_forward[_grid("q", B * Hq, Sq, tile.BM)](
            q, k, v, out, lse, *q.stride(), *k.stride(), *v.stride(), *out.stride(),
            scale, Hq, Hq // Hkv, Sq, Sk, BM=tile.BM, BN=tile.BN, CAUSAL=causal,
            VECTOR=_vector(q, k, v, out), **_dims(q, v), **_arithmetic(arch, q, allow_tf32),
            **_compilation(arch, tile),
        )  # fmt: skip
    return out, lse


def backward(
    d_out: Tensor | None, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, causal: bool, scale: float, allow_tf32: bool, need_dq: bool, need_dkdv: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the shapes and dtype of q, k, v, contiguous; those not needed have no elements."""
    (B, Hq, Sq, _), (_, Hkv, Sk, _) = q.shape, k.shape
    arch = effective_architecture(q.device)
    dq = q.new_empty(q.shape if need_dq else (0,))
    dk = k.new_empty(k.shape if need_dkdv else (0,))
    dv = v.new_empty(v.shape if need_dkdv else (0,))
    if d_out is None:
        d_out = q.new_zeros(()).expand(out.shape)
    tiles = choose_tiles(arch, q.shape[3], v.shape[3], q.element_size())
    delta = torch.empty_like(lse)
    group, dims, arithmetic = Hq // Hkv, _dims(q, v), _arithmetic(arch, q, allow_tf32)
    with _device_of(q):
        if lse.numel():
            attention_delta[_grid("q", B * Hq, Sq, DELTA_ROWS)](
                out, d_out, d_lse if d_lse is not None else delta, delta,
                *out.stride(), *d_out.stride(),
                *(d_lse.stride() if d_lse is not None else (0, 0, 0)),
                Hq, Sq, DV=dims["DV"], BLOCK_DV=dims["BLOCK_DV"], BM=DELTA_ROWS,
                HAS_DLSE=d_lse is not None, VECTOR=_vector(out, d_out),
                EMULATE_BF16=arithmetic["EMULATE_BF16"],
            )  # fmt: skip
        if dk.numel() or dv.numel():
            tile = tiles.dkdv
            attention_backward_dkdv[_grid("k", B * Hkv, Sk, tile.BN)](
                q, k, v, d_out, lse, delta, dk, dv,
                *q.stride(), *k.stride(), *v.stride(), *d_out.stride(), *dk.stride(), *dv.stride(),
                scale, Hkv, group, Sq, Sk, BM=tile.BM, BN=tile.BN, CAUSAL=causal,
                VECTOR=_vector(q, k, v, d_out, dk, dv), **dims, **arithmetic, **_compilation(arch, tile),
            )  # fmt: skip
        if dq.numel():
            tile = tiles.dq
            attention_backward_dq[_grid("q", B * Hq, Sq, tile.BM)](
                q, k, v, d_out, lse, delta, dq,
                *q.stride(), *k.stride(), *v.stride(), *d_out.stride(), *dq.stride(),
                scale, Hq, group, Sq, Sk, BM=tile.BM, BN=tile.BN, CAUSAL=causal,
                VECTOR=_vector(q, k, v, d_out, dq), **dims, **arithmetic, **_compilation(arch, tile),
            )  # fmt: skip
    return dq, dk, dv


def _grid(name: str, heads: int, length: int, rows: int) -> tuple[int]:
    """One program for each tile of `rows` rows of each head of each batch entry."""
    programs = heads * -(-length // rows)
    if programs > LARGEST_GRID:
        raise ValueError(
            f"{name} has {heads} heads in all, of {length} rows each: {programs} tiles of {rows};"
            f" a launch takes at most {LARGEST_GRID}"
        )
    return (programs,)


def _dims(q: Tensor, v: Tensor) -> dict[str, int]:
    D, Dv = q.shape[3], v.shape[3]
    return {
        "D": D,
        "DV": Dv,
        "BLOCK_D": padded_head_dim(D),
        "BLOCK_DV": padded_head_dim(Dv),
    }


def _vector(*tensors: Tensor) -> int:
    """Elements of a 16-byte access if every row of every tensor allows one, else 1."""
    width = 16 // tensors[0].element_size()
    for t in tensors:
        *strides, last = t.stride()
        gaps = any(s % width for s, n in zip(strides, t.shape, strict=False) if n > 1)
        if last != 1 or gaps or t.data_ptr() % 16:
            return 1
    return width


def _arithmetic(arch: Architecture, q: Tensor, allow_tf32: bool) -> dict[str, Any]:
    tf32 = allow_tf32 and q.dtype == torch.float32
    return {
        "PRECISION": "tf32" if tf32 else "ieee",
        "EMULATE_BF16": arch.interpreted and q.dtype == torch.bfloat16,
    }


def _compilation(arch: Architecture, tile: Tile) -> dict[str, int]:
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if 80 <= arch.capability < 90:
        # ptxas was seen to cap the registers of these targets at 128 and less, and to spill kilobytes
        options["maxnreg"] = 255
    return options


def _device_of(t: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's device current, which is where Triton launches; costs nothing if it is."""
    if t.device.type != "cuda" or t.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(t.device)
