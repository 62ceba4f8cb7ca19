"""Attention of other packages, by name: flash-attn, its version in CuTe, and xFormers.

What each claims is what it documents. They are imported when they are loaded, never before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from reference.budget import Rounding

from .. import conventions
from ..implementations import Claims, Implementation, native_path
from .sdpa import HALF

# FlashAttention-2: "If the row of the mask is all zero, the output will be zero"; "The forward pass is always
# deterministic", and so is the backward if it is asked for. dk and dv of each query head are stored before a
# group's are added up.
FLASH_ATTN = Claims(
    dtypes=HALF,
    devices=("cuda",),
    dims_multiple_of=8,
    positive_scale=True,
    gqa=True,
    cross_lengths=True,
    dead_rows=True,
    backward=True,
    lse=True,
    contiguous="bshd",
    ragged=True,
    past_rows=False,
    deterministic=True,
    deterministic_backward=True,
    rounding=Rounding(heads_rounded_before_group_sum=True),
)

# Its README names head dimensions up to 128, Hopper and Blackwell; nothing about rows that see no key.
FLASH_ATTN_4 = replace(
    FLASH_ATTN,
    largest_dim=128,
    dead_rows=False,
    lse=False,
    deterministic=False,
    deterministic_backward=False,
)

# K and V of other head dimensions, and dead rows, hang on the kernel that it picks; some round P before dS.
XFORMERS = Claims(
    dtypes=HALF,
    devices=("cuda",),
    largest_dim=128,
    dims_multiple_of=8,
    positive_scale=True,
    cross_lengths=True,
    backward=True,
    contiguous="bshd",
    rounding=Rounding(p_rounded_before_ds=True),
)


def flash_attn(name: str) -> Implementation:
    """FlashAttention-2, or what the package of that name is."""
    dense, ragged = _both(importlib.import_module("flash_attn"), FLASH_ATTN)
    return Implementation(name, dense, FLASH_ATTN, native_path, varlen=ragged)


def flash_attn_4(name: str) -> Implementation:
    """FlashAttention in CuTe."""
    dense, ragged = _both(importlib.import_module("flash_attn.cute"), FLASH_ATTN_4)
    return Implementation(name, dense, FLASH_ATTN_4, native_path, varlen=ragged)


def xformers(name: str) -> Implementation:
    """xFormers' memory-efficient attention, whichever kernel it picks."""
    memory_efficient_attention = importlib.import_module("xformers.ops").memory_efficient_attention
    masks = importlib.import_module("xformers.ops.fmha.attn_bias")

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool
    ) -> Tensor:
        bias = masks.LowerTriangularFromBottomRightMask() if causal else None
        rows = (t.transpose(1, 2) for t in (q, k, v))
        return memory_efficient_attention(*rows, attn_bias=bias, scale=scale).transpose(1, 2)

    return Implementation(name, attention, XFORMERS, native_path)


def _both(package: Any, claims: Claims) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Its functions for dense and for ragged batches, as native ones."""
    dense, _ = conventions.native(package.flash_attn_func, "flash_attn", claims)
    _, ragged = conventions.native(package.flash_attn_varlen_func, "flash_attn_varlen", claims)
    assert ragged is not None
    return dense, ragged
