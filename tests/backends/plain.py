"""Attention in plain PyTorch by its definition: computed in float32, rounded once, on any device.

    S = scale Q K^T,   P = softmax(S),   out = P V,   lse = log sum exp(S)
    dS = P (dO V^T - delta + dlse),   dq = scale dS K,   dk = scale dS^T Q,   dv = P^T dO

All scores are kept. Products are IEEE's in float32 unless the caller has allowed PyTorch others.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        Q, K, V = _computed(q), _per_query_head(k, q), _per_query_head(v, q)
        Sq, Sk = q.shape[2], k.shape[2]
        S = scale * (Q @ K.mT)
        if causal:
            i, j = (torch.arange(n, device=q.device) for n in (Sq, Sk))
            S.masked_fill_(j > i[:, None] + Sk - Sq, -math.inf)
        m = S.amax(-1, keepdim=True) if Sk else S.new_full((*S.shape[:-1], 1), -math.inf)
        m = m.masked_fill(m == -math.inf, 0.0)  # of rows that see no key
        P = (S - m).exp()
        l = P.sum(-1, keepdim=True)
        lse = (m + l.log())[..., 0]
        P = P / l.masked_fill(l == 0, 1.0)
        out = P @ V
        ctx.save_for_backward(q, k, v, P, out)
        ctx.scale = scale
        return out.to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, P, out = ctx.saved_tensors
        Q, K, V = _computed(q), _per_query_head(k, q), _per_query_head(v, q)
        dO, d_lse = map(_computed, gradients)
        delta = (dO * out).sum(-1)
        dS = P * (dO @ V.mT - (delta - d_lse)[..., None])
        dq = ctx.scale * (dS @ K)
        dk, dv = ctx.scale * (dS.mT @ Q), P.mT @ dO
        dk, dv = (t.unflatten(1, (k.shape[1], -1)).sum(2) for t in (dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _computed(t: Tensor) -> Tensor:
    """In float32 and in memory of its own: how a product is summed may hang on strides."""
    return t.to(torch.float32, memory_format=torch.contiguous_format, copy=True)


def _per_query_head(t: Tensor, q: Tensor) -> Tensor:
    return _computed(t).repeat_interleave(q.shape[1] // t.shape[1], dim=1)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool) -> Any:
    """Differentiable attention, causal masks aligned at the bottom right.

    Args:
        q, k, v: (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv); Hq is a multiple of Hkv.
        causal: query i sees the keys j <= i + Sk - Sq.
        scale: of the scores; D ** -0.5 if None.
        return_lse: whether lse (B, Hq, Sq), float32, comes after out (B, Hq, Sq, Dv).
    """
    out, lse = _Attention.apply(q, k, v, causal, q.shape[-1] ** -0.5 if scale is None else scale)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, causal: bool, scale: float | None, return_lse: bool,
) -> Any:  # fmt: skip
    """The same of a ragged batch, sequence by sequence: q (total_q, Hq, D), lse (Hq, total_q)."""
    outs, lses = [], []
    begin_q, begin_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for (q0, q1), (k0, k1) in zip(pairwise(begin_q), pairwise(begin_k), strict=True):
        sequence = (t.transpose(0, 1)[None] for t in (q[q0:q1], k[k0:k1], v[k0:k1]))
        out, lse = attention(*sequence, causal=causal, scale=scale, return_lse=True)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    past = len(q) - begin_q[-1]
    nothing = sum(t[:0].sum() for t in (q, k, v))  # 0, with gradients even if there is no sequence
    outs.append(q.new_zeros((past, q.shape[1], v.shape[2])) + nothing)
    lses.append(torch.full((q.shape[1], past), -math.inf, device=q.device) + nothing)
    out, lse = torch.cat(outs), torch.cat(lses, 1)
    return (out, lse) if return_lse else out
