"""What the public functions refuse, in words that name the argument, what it was and what it may be."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SMALLEST_HEAD_DIM, LARGEST_HEAD_DIM = 16, 256
LARGEST_TOTAL = 2**31 - 1
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.3586e38
"""In magnitude. Times log2 e, which the kernels multiply it by, the largest is still a finite float32; below
the smallest Triton would pass a float64 to kernels that are written for float32."""


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Types, dtypes, devices and shapes of dense inputs, (B, H, S, D).

    Raises:
        TypeError: not a tensor, or a dtype that is not supported or not the same.
        ValueError: shapes that do not fit, head dimensions out of range, devices that differ.
    """
    _check_kind({"q": q, "k": k, "v": v}, ("batch", "heads", "sequence", "head dimension"))
    for name, t in (("k", k), ("v", v)):
        if t.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch size {t.shape[0]} and q {q.shape[0]}; they must be the same")
    _check_heads(q, k, v, rows=2)


def check_ragged_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Types, dtypes, devices and shapes of ragged inputs, (total, H, D). Raises as `check_tensors` does."""
    _check_kind({"q": q, "k": k, "v": v}, ("rows of all sequences", "heads", "head dimension"))
    _check_heads(q, k, v, rows=0)
    for name, t in (("q", q), ("k", k)):
        if t.shape[0] > LARGEST_TOTAL:
            raise ValueError(
                f"{name} has {t.shape[0]} rows; it may have {LARGEST_TOTAL}, as int32 counts them"
            )


def _check_kind(named: Mapping[str, Tensor], dimensions: tuple[str, ...]) -> None:
    q = named["q"]
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
        if t.layout != torch.strided or t.is_nested:
            layout = "nested" if t.is_nested else t.layout
            raise TypeError(f"{name} has layout {layout}; it must be torch.strided")
        if t.ndim != len(dimensions):
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}; it must have {len(dimensions)} dimensions:"
                f" {', '.join(dimensions)}"
            )


def check_no_tangents(**tensors: Tensor) -> None:
    """Raises RuntimeError under forward-mode differentiation, which has no formula here.

    PyTorch would take the tangents of the results to be 0 without a word.
    """
    if torch.compiler.is_compiling():
        return
    for name, t in tensors.items():
        if forward_ad.unpack_dual(t).tangent is not None:
            raise RuntimeError(
                f"{name} has a tangent; it must have none: there are gradients (backward), but no"
                " forward-mode derivatives (jvp)"
            )


def _check_heads(q: Tensor, k: Tensor, v: Tensor, rows: int) -> None:
    """Heads, keys and head dimensions. Heads are the second dimension; `rows` says which the keys are."""
    Hq, Hkv, Sk, D = q.shape[1], k.shape[1], k.shape[rows], q.shape[-1]
    if k.shape[-1] != D:
        raise ValueError(
            f"k has head dimension {k.shape[-1]} and q {D}; they must be the same (v's may differ)"
        )
    if v.shape[1] != Hkv or v.shape[rows] != Sk:
        raise ValueError(
            f"v has {v.shape[1]} heads of {v.shape[rows]} keys and k {Hkv} of {Sk}; they must be the same"
        )
    if Hq == 0 or Hkv == 0 or Hq % Hkv:
        raise ValueError(f"q has {Hq} heads and k, v have {Hkv}; q must have one or a multiple of as many")
    for name, dim in (("q", D), ("v", v.shape[-1])):
        if not SMALLEST_HEAD_DIM <= dim <= LARGEST_HEAD_DIM:
            raise ValueError(
                f"{name} has head dimension {dim}; it may be {SMALLEST_HEAD_DIM} to {LARGEST_HEAD_DIM}"
            )


def check_cu_seqlens(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q: Tensor) -> None:
    """What of the offsets can be seen without waiting for the device: all but their values.

    Raises:
        TypeError: not a tensor, or not int32.
        ValueError: another device than q's, a shape that is not (B + 1,), gaps between the elements.
    """
    for name, t in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}; it must be a torch.Tensor")
        if t.dtype != torch.int32:
            raise TypeError(f"{name} is {t.dtype}; it must be torch.int32")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device} and q on {q.device}; they must be the same")
        if t.ndim != 1 or t.shape[0] == 0:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}; it must have one dimension, of an element more than"
                " there are sequences"
            )
        if not t.is_contiguous():
            raise ValueError(f"{name} has stride {t.stride(0)}; it must be contiguous")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k has {cu_seqlens_k.shape[0]} elements and cu_seqlens_q {cu_seqlens_q.shape[0]};"
            " they must be the same"
        )


def checked_max_seqlen(name: str, length: int) -> int:
    """The longest length, as an int of 64 bits: no sequence is longer than `LARGEST_TOTAL`.

    Raises:
        TypeError: not a whole number (one of NumPy's is).
        ValueError: negative.
    """
    if isinstance(length, bool) or not isinstance(length, numbers.Integral | torch.SymInt):
        raise TypeError(f"{name} is {length!r}; it must be a whole number")
    if torch.compiler.is_compiling():  # it may be known to the device alone as yet
        return length
    if length < 0:
        raise ValueError(f"{name} is {length}; it must not be negative")
    return min(int(length), LARGEST_TOTAL)


def check_lengths(name: str, cu_seqlens: Tensor, total: int, max_seqlen: int) -> None:
    """The values of the offsets. Waits for the device.

    Args:
        name: "q" or "k".
        total: rows of the tensor that they point into.
        max_seqlen: what no sequence may be longer than.

    Raises:
        ValueError: if they do not begin with 0, decrease, point past the tensor, or a sequence is
            longer than `max_seqlen`.
    """
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens_{name} begins with {offsets[0]}; it must begin with 0")
    lengths = [end - start for start, end in itertools.pairwise(offsets)]
    for s, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"cu_seqlens_{name} goes from {offsets[s]} to {offsets[s + 1]} at sequence {s}; it must not"
                " decrease"
            )
    if offsets[-1] > total:
        raise ValueError(f"cu_seqlens_{name} ends with {offsets[-1]}; {name} has only {total} rows")
    longest = max(lengths, default=0)
    if longest > max_seqlen:
        raise ValueError(
            f"max_seqlen_{name} is {max_seqlen}, and sequence {lengths.index(longest)} has {longest} rows;"
            " it must be at least that"
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
