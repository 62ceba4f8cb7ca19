"""Attention that others have proved, by name: PyTorch's own kernels, and the emulation, as implementations.

What each claims is what PyTorch documents, or checks before it chooses a backend
(`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from reference import emulation
from reference.budget import Rounding

from .cases import DTYPES
from .implementations import EVERY_DENSE_CASE, Claims, Implementation, native_path

HALF = ("float16", "bfloat16")

# is_causal is aligned at the top left. Several query heads a KV head are claimed only where dk and dv of each
# are not rounded before they are added up, as FlashAttention's are: `Rounding` has no word for that yet.
_SDPA: dict[str, Any] = {
    "positive_scale": True,
    "cross_lengths": True,
    "causal_alignment": "top-left",
    "backward": True,
    "deterministic": True,
}


@dataclass(frozen=True)
class _Backend:
    kind: SDPBackend
    claims: Claims


_BACKENDS = {
    # PyTorch pads head dimensions to multiples of 8; beyond 192 there is no backward on sm_86 and sm_89
    "sdpa-flash": _Backend(
        SDPBackend.FLASH_ATTENTION, Claims(dtypes=HALF, devices=("cuda",), largest_dim=256, **_SDPA)
    ),
    "sdpa-cudnn": _Backend(
        SDPBackend.CUDNN_ATTENTION,
        Claims(dtypes=HALF, devices=("cuda",), largest_dim=128, dims_multiple_of=8, **_SDPA),
    ),
    # Its float32 products are three of TF32's: operands are split into two parts, and what a third would
    # hold is lost. With one visible key out is v truncated to TF32 plus the rest rounded to it, bit for
    # bit, off by up to 2**-22. `Rounding` has no word for that yet
    "sdpa-efficient": _Backend(
        SDPBackend.EFFICIENT_ATTENTION,
        Claims(
            dtypes=HALF,
            devices=("cuda",),
            dims_multiple_of=8,
            equal_dims=False,
            rounding=Rounding(p_rounded_before_ds=True),
            **_SDPA,
        ),
    ),
    # in float32 throughout; takes any scale and any strides, as the operations that it is made of do
    "sdpa-math": _Backend(
        SDPBackend.MATH,
        Claims(
            dtypes=DTYPES,
            equal_dims=False,
            gqa=True,
            strided=True,
            **{**_SDPA, "positive_scale": False},
        ),
    ),
}

EMULATION = "emulation"
NAMES = (*_BACKENDS, EMULATION)

REFUSED = "No available kernel"
"""In what PyTorch raises where the only backend allowed does not take a case."""


def load(name: str) -> Implementation:
    """The implementation of a name of `NAMES`."""
    if name == EMULATION:
        claims = replace(EVERY_DENSE_CASE, devices=("cpu",))
        return Implementation(
            name, _emulated, claims, native_path, lambda case, device: emulation.DEFAULT_TILES
        )
    backend = _BACKENDS[name]
    return Implementation(name, _sdpa(backend.kind), backend.claims, native_path)


def _sdpa(kind: SDPBackend) -> Callable[..., Tensor]:
    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool
    ) -> Tensor:
        if return_lse:
            raise ValueError("return_lse is True; scaled_dot_product_attention has no lse")
        gqa = q.shape[1] != k.shape[1]
        with sdpa_kernel(kind):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa)

    return attention


class _Emulated(torch.autograd.Function):
    """The emulation as a differentiable function: what it stores is rounded to the dtype of q."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Any:
        found = emulation.attention(q, k, v, causal=causal, scale=scale)
        out = found.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out)
        ctx.options = {"causal": causal, "scale": scale}
        return out, found.lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, out = ctx.saved_tensors
        found = emulation.attention(q, k, v, *gradients, **ctx.options, out_given=out)
        dq, dk, dv = (t.to(q.dtype) for t in found[2:] if t is not None)
        return dq, dk, dv, None, None


def _emulated(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool) -> Any:
    out, lse = _Emulated.apply(q, k, v, causal, scale)
    return (out, lse) if return_lse else out
