"""PyTorch's scaled_dot_product_attention, one implementation for each of its kernels.

What each claims is what PyTorch documents, or checks before it chooses a backend
(`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from reference.budget import Rounding

from ..cases import DTYPES
from ..implementations import Claims, Implementation, native_path

HALF = ("float16", "bfloat16")

REFUSED = "No available kernel"
"""In what PyTorch raises where the only backend allowed does not take a case."""

# is_causal is aligned at the top left
_ALL = Claims(
    dtypes=HALF,
    devices=("cuda",),
    positive_scale=True,
    cross_lengths=True,
    causal_alignment="top-left",
    backward=True,
    deterministic=True,
)
# with enable_gqa, which EFFICIENT does not know
_GROUPED: dict[str, Any] = {"gqa": True, "rounding": Rounding(heads_rounded_before_group_sum=True)}


@dataclass(frozen=True)
class _Backend:
    kind: SDPBackend
    claims: Claims


BACKENDS = {
    # PyTorch pads head dimensions to multiples of 8; beyond 192 there is no backward on sm_86 and sm_89
    "sdpa-flash": _Backend(SDPBackend.FLASH_ATTENTION, replace(_ALL, **_GROUPED)),
    # Its float32 products are three of TF32's: operands are split into two parts, and what a third would
    # hold is lost. With one visible key out is v truncated to TF32 plus the rest rounded to it, bit for
    # bit, off by up to 2**-22. `Rounding` has no word for that yet
    "sdpa-efficient": _Backend(
        SDPBackend.EFFICIENT_ATTENTION,
        replace(_ALL, dims_multiple_of=8, equal_dims=False, rounding=Rounding(p_rounded_before_ds=True)),
    ),
    "sdpa-cudnn": _Backend(
        SDPBackend.CUDNN_ATTENTION,
        replace(_ALL, largest_dim=128, dims_multiple_of=8, fewest_keys=2, **_GROUPED),
    ),
    # in float32 throughout; takes any scale and any strides, as the operations that it is made of do
    "sdpa-math": _Backend(
        SDPBackend.MATH,
        replace(
            _ALL,
            dtypes=DTYPES,
            devices=("cpu", "cuda"),
            positive_scale=False,
            equal_dims=False,
            gqa=True,
            strided=True,
        ),
    ),
}


def load(name: str) -> Implementation:
    """The implementation of a name of `BACKENDS`."""
    backend = BACKENDS[name]
    return Implementation(name, _through(backend.kind), backend.claims, native_path)


def _through(kind: SDPBackend) -> Callable[..., Tensor]:
    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool
    ) -> Tensor:
        if return_lse:
            raise ValueError("return_lse is True; scaled_dot_product_attention has no lse")
        gqa = q.shape[1] != k.shape[1]
        with sdpa_kernel(kind):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa)

    return attention
