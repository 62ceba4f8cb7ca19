"""A stand-in for somebody's kernel and its bindings: two functions that write into buffers.

Plain PyTorch, so that the example runs anywhere. All tensors are contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _scores(q: Tensor, k: Tensor, softmax_scale: float, causal: bool) -> Tensor:
    s = softmax_scale * torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float())
    if not causal:
        return s
    last = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device)
    return s.masked_fill(last.triu(1 + s.shape[-1] - s.shape[-2]), float("-inf"))


def forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, out: Tensor, lse: Tensor
) -> None:
    """Writes out (B, Sq, H, D) and lse (B, H, Sq), float32; q, k, v are (B, S, H, D)."""
    assert all(t.is_contiguous() for t in (q, k, v, out, lse))
    s = _scores(q, k, softmax_scale, causal)
    lse.copy_(s.logsumexp(-1))
    out.copy_(torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v.float()))


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    softmax_scale: float, causal: bool, dq: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Writes dq, dk and dv, (B, S, H, D)."""
    assert all(t.is_contiguous() for t in (d_out, q, k, v, out, lse, dq, dk, dv))
    p = (_scores(q, k, softmax_scale, causal) - lse[..., None]).exp()
    delta = (d_out.float() * out.float()).sum(-1).transpose(1, 2)
    dp = torch.einsum("bqhd,bkhd->bhqk", d_out.float(), v.float())
    ds = softmax_scale * p * (dp - delta[..., None])
    dq.copy_(torch.einsum("bhqk,bkhd->bqhd", ds, k.float()))
    dk.copy_(torch.einsum("bhqk,bqhd->bkhd", ds, q.float()))
    dv.copy_(torch.einsum("bhqk,bqhd->bkhd", p, d_out.float()))
