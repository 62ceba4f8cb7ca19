"""Attention through PyTorch's own `scaled_dot_product_attention`, gradients by autograd.

One of three independent references. It calls the MATH backend with an explicit boolean mask;
SDPA's `is_causal` is aligned top-left and would be wrong wherever Sq != Sk.
"""

import math
import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Result(NamedTuple):
    out: Tensor  # (B, Hq, Sq, Dv)
    lse: Tensor  # (B, Hq, Sq), natural logarithm
    dq: Tensor | None  # (B, Hq, Sq, D)
    dk: Tensor | None  # (B, Hkv, Sk, D)
    dv: Tensor | None  # (B, Hkv, Sk, Dv)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor | None = None,
    d_lse: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Result:
    """softmax(scale * q kᵀ) v, its logsumexp, and the gradients of Σ out·d_out + Σ lse·d_lse.

    q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), d_out (B, Hq, Sq, Dv) and
    d_lse (B, Hq, Sq), of any floating dtype, strides and device. Query head h reads KV head
    h // (Hq // Hkv); a causal mask is aligned bottom-right; scale defaults to D ** -0.5.

    All of it is computed in `dtype`. With `dtype=q.dtype` the result is PyTorch's own in the
    precision of the inputs: the `p` of FlashAttention-2's rule |x - r| <= c·|p - r|
    (flash-attention, tests/test_flash_attn.py). out, dq, dk and dv are in `dtype`, lse is in
    float64 if `dtype` is and in float32 otherwise. Without d_out and d_lse there are no gradients.

    Raises TypeError for the wrong kind or dtype of an argument, ValueError for a wrong shape,
    number of heads, device or a scale that is not finite; each names the argument.
    """
    _check(q, k, v, d_out, d_lse, scale, dtype)
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    sq, sk = q.shape[2], k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)

    # The rows that see no key are always the first ones. They are cut off, not masked: a softmax
    # over nothing but -inf is NaN, which not every version of PyTorch keeps out of the gradients.
    dead = sq if sk == 0 else max(0, sq - sk) if causal else 0
    mask = torch.ones(sq - dead, sk, dtype=torch.bool, device=q.device)
    if causal:
        mask = mask.tril(diagonal=dead + sk - sq)

    with torch.enable_grad():
        live = q[:, :, dead:]
        with sdpa_kernel(SDPBackend.MATH), _math_in_input_precision():
            out = scaled_dot_product_attention(live, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        out = pad(out, (0, 0, dead, 0))
        lse = pad(_logsumexp(live, k, mask, scale), (dead, 0), value=-math.inf)

    given = [(y, dy) for y, dy in ((out, d_out), (lse, d_lse)) if dy is not None]
    if not given:
        return Result(out.detach(), lse.detach(), None, None, None)
    dq, dk, dv = torch.autograd.grad(
        [y for y, _ in given],
        [q, k, v],
        [dy.to(y.dtype) for y, dy in given],
        materialize_grads=True,  # lse does not depend on v
    )
    return Result(out.detach(), lse.detach(), dq, dk, dv)


def _logsumexp(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """log Σ_j exp(scale * q·k_j) over the visible keys: SDPA keeps it to itself. (B, Hq, rows)"""
    if q.dtype != torch.float64:
        q, k = q.float(), k.float()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = scale * (q @ k.mT)
    return scores.masked_fill(~mask, -math.inf).logsumexp(dim=-1)


@contextmanager
def _math_in_input_precision() -> Iterator[None]:
    """Left alone, MATH computes float16 and bfloat16 in float32 and rounds only at the end."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    scale: float | None,
    dtype: torch.dtype,
) -> None:
    if dtype not in DTYPES:
        raise TypeError(f"dtype was {dtype!r}, may be {', '.join(map(str, DTYPES))}")
    gradients = {"d_out": d_out, "d_lse": d_lse}
    tensors = {"q": q, "k": k, "v": v} | {n: x for n, x in gradients.items() if x is not None}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} was a {type(x).__name__}, may be a torch.Tensor")
        if not x.is_floating_point():
            raise TypeError(f"{name}.dtype was {x.dtype}, may be any floating-point dtype")
        if x.device != q.device:
            raise ValueError(f"{name}.device was {x.device}, may be {q.device}, as that of q")
        if x.ndim != 4 and name != "d_lse":
            raise ValueError(f"{name}.shape was {tuple(x.shape)}, may be of 4 dimensions")

    batch, heads_q, len_q, dim = q.shape
    heads_kv, len_k, dim_v = k.shape[1], k.shape[2], v.shape[3]
    if dim == 0:
        raise ValueError(f"q.shape was {tuple(q.shape)}, its head dimension may be 1 or more")
    if heads_kv == 0 or heads_q % heads_kv:
        raise ValueError(f"k had {heads_kv} heads, may have a divisor of the {heads_q} of q")
    shapes = {
        "q": (batch, heads_q, len_q, dim),
        "k": (batch, heads_kv, len_k, dim),
        "v": (batch, heads_kv, len_k, dim_v),
        "d_out": (batch, heads_q, len_q, dim_v),
        "d_lse": (batch, heads_q, len_q),
    }
    for name, x in tensors.items():
        if tuple(x.shape) != shapes[name]:
            raise ValueError(f"{name}.shape was {tuple(x.shape)}, may be {shapes[name]}")

    if scale is None:
        return
    if not isinstance(scale, numbers.Real):
        raise TypeError(f"scale was {scale!r}, may be None or a real number")
    if not math.isfinite(scale):
        raise ValueError(f"scale was {scale!r}, may be any finite number")
