"""What the public functions refuse, in words that name the argument, what it was and what it may be."""

from __future__ import annotations

import numbers
from collections.abc import Mapping

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SMALLEST_HEAD_DIM, LARGEST_HEAD_DIM = 16, 256
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.3586e38
"""In magnitude. Times log2 e, which the kernels multiply it by, the largest is still a finite float32; below
the smallest Triton would pass a float64 to kernels that are written for float32."""


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Types, dtypes, devices and shapes of dense inputs.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported or not the same.
        ValueError: shapes that do not fit, head dimensions out of range, devices that differ.
    """
    named: Mapping[str, Tensor] = {"q": q, "k": k, "v": v}
    for name, t in named.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}; it must be a torch.Tensor")
    for name, t in named.items():
        if t.dtype not in DTYPES:
            raise TypeError(f"{name} is {t.dtype}; it may be float16, bfloat16 or float32")
        if t.dtype != q.dtype:
            raise TypeError(f"{name} is {t.dtype} and q is {q.dtype}; they must be the same")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device} and q on {q.device}; they must be the same")
        if t.layout != torch.strided:
            raise TypeError(f"{name} has layout {t.layout}; it must be torch.strided")
        if t.ndim != 4:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}; it must have 4 dimensions: batch, heads,"
                " sequence, head dimension"
            )
    B, Hq, _, D = q.shape
    Hkv, Sk = k.shape[1], k.shape[2]
    for name, t in (("k", k), ("v", v)):
        if t.shape[0] != B:
            raise ValueError(f"{name} has batch size {t.shape[0]} and q {B}; they must be the same")
    if k.shape[3] != D:
        raise ValueError(
            f"k has head dimension {k.shape[3]} and q {D}; they must be the same (v's may differ)"
        )
    if v.shape[1] != Hkv or v.shape[2] != Sk:
        raise ValueError(
            f"v has {v.shape[1]} heads of {v.shape[2]} keys and k {Hkv} of {Sk}; they must be the same"
        )
    if Hq == 0 or Hkv == 0 or Hq % Hkv:
        raise ValueError(f"q has {Hq} heads and k, v have {Hkv}; q must have one or a multiple of as many")
    for name, dim in (("q", D), ("v", v.shape[3])):
        if not SMALLEST_HEAD_DIM <= dim <= LARGEST_HEAD_DIM:
            raise ValueError(
                f"{name} has head dimension {dim}; it may be {SMALLEST_HEAD_DIM} to {LARGEST_HEAD_DIM}"
            )


def checked_scale(scale: float | None, head_dim: int) -> float:
    """The scale of the scores, D ** -0.5 if None; 0 if below float32's normal numbers, as GPUs have it.

    Raises:
        TypeError: not a number.
        ValueError: not finite, or too large for the float32 that the kernels compute with.
    """
    if scale is None:
        return float(head_dim**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real | torch.SymFloat | torch.SymInt):
        raise TypeError(f"scale is {scale!r}; it must be a number or None")
    if not abs(scale) <= LARGEST_SCALE:  # nor is NaN
        raise ValueError(f"scale is {scale}; it must be finite, and at most {LARGEST_SCALE} in magnitude")
    return float(scale) if abs(scale) >= SMALLEST_SCALE else 0.0


def check_flags(**flags: bool) -> None:
    """Raises TypeError if an option that is yes or no is neither."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; it must be True or False")
