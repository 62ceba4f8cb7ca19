"""The emulation (`reference.emulation`) as a differentiable function: what it stores is rounded once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from reference import emulation

from ..implementations import EVERY_DENSE_CASE, Implementation, native_path


class _Emulated(torch.autograd.Function):
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


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool) -> Any:
    out, lse = _Emulated.apply(q, k, v, causal, scale)
    return (out, lse) if return_lse else out


def load(name: str) -> Implementation:
    """The implementation, with its tiles."""
    claims = replace(EVERY_DENSE_CASE, devices=("cpu",))
    return Implementation(name, attention, claims, native_path, lambda case, device: emulation.DEFAULT_TILES)
