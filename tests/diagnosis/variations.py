"""Attention in float64 with a fault that is asked for: a key left out, another head, no delta.

    S_ij = scale q_i . k_j,   P = exp(S - lse) over the visible keys,   out = P V
    dS   = P (dP - delta + dlse),   dq = scale dS K,   dk = scale dS^T q,   dv = P^T dO

It has no budget of its own and judges nothing: what is right is the oracle's affair. It is written for small
problems, and keeps all scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Attention:
    """A dense problem. K and V are those of each query head.

    Attributes:
        q, k, v: (B, Hq, Sq, D), (B, Hq, Sk, D), (B, Hq, Sk, Dv).
        d_out, d_lse: (B, Hq, Sq, Dv), (B, Hq, Sq); None without gradients. 0 in rows that see no key.
        scale: of the scores.
        visible: (Sq, Sk).
        heads_kv: Hkv.
    """

    q: Array
    k: Array
    v: Array
    d_out: Array | None
    d_lse: Array | None
    scale: float
    visible: Mask
    heads_kv: int

    @classmethod
    def of(cls, q: Array, k: Array, v: Array, d_out: Array | None, d_lse: Array | None, *,
           causal: bool, scale: float) -> Attention:  # fmt: skip
        """K and V as they are given, (B, Hkv, Sk, .); scale a number."""
        (B, Hq, Sq, _), (Hkv, Sk, Dv) = q.shape, v.shape[1:]
        i, j = np.arange(Sq)[:, None], np.arange(Sk)[None, :]
        visible = j <= i + Sk - Sq if causal else np.ones((Sq, Sk), bool)
        if d_out is not None or d_lse is not None:
            dead = ~np.logical_or.reduce(visible, axis=-1)[:, None]
            d_out = np.zeros((B, Hq, Sq, Dv)) if d_out is None else np.where(dead, 0.0, d_out)
            d_lse = np.zeros((B, Hq, Sq)) if d_lse is None else np.where(dead[:, 0], 0.0, d_lse)
        group = Hq // Hkv
        return cls(q, k.repeat(group, 1), v.repeat(group, 1), d_out, d_lse, scale, visible, Hkv)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.heads_kv

    @cached_property
    def products(self) -> Array:
        """q . k of all pairs, (B, Hq, Sq, Sk)."""
        return self.q @ np.swapaxes(self.k, -1, -2)

    @cached_property
    def maximum(self) -> Array:
        """The largest score of each row, (B, Hq, Sq); -inf if it sees no key."""
        scores = np.where(self.visible, self.scale * self.products, -np.inf)
        largest: Array = scores.max(-1, initial=-np.inf)
        return largest

    @property
    def live(self) -> Mask:
        return np.isfinite(self.maximum)

    @cached_property
    def right(self) -> tuple[Array, Array]:
        """out and lse without a fault."""
        return self.forward()

    # ------------------------------------------------------------------ the forward

    def forward(self, visible: Mask | None = None, *, scale: float | None = None, k: Array | None = None,
                v: Array | None = None) -> tuple[Array, Array]:  # fmt: skip
        """out and lse.

        Args:
            visible: other keys than those that a row should see.
            scale: another one.
            k, v: others, also of more keys.
        """
        scale = self.scale if scale is None else scale
        visible = self.visible if visible is None else visible
        products = self.products if k is None else self.q @ np.swapaxes(k, -1, -2)
        v = self.v if v is None else v
        with np.errstate(all="ignore"):
            S = np.where(visible, scale * products, -np.inf)
            m = S.max(-1, keepdims=True, initial=-np.inf)
            P = np.where(visible, np.exp(S - np.where(np.isfinite(m), m, 0.0)), 0.0)
            l = P.sum(-1, keepdims=True)
            out = np.where(l > 0, P @ v / l, np.where(np.isnan(l), np.nan, 0.0))
            return out, (m + np.log(l))[..., 0]

    def online(self, keys: int, *, rescale_acc: bool = True, rescale_l: bool = True, newest: bool = False,
               base: float = 1.0) -> tuple[Array, Array]:  # fmt: skip
        """out and lse by the online softmax, tile by tile of so many keys.

        Args:
            rescale_acc, rescale_l: whether what earlier tiles gave gets the weight of the new maximum.
            newest: whether the newest tile's contribution is rescaled along with the earlier ones.
            base: of what the exponent of that weight is multiplied by.
        """
        S_all = np.where(self.visible, self.scale * self.products, -np.inf)
        m = np.full((*S_all.shape[:-1], 1), -np.inf)
        l, acc = np.zeros_like(m), np.zeros((*m.shape[:-1], self.v.shape[-1]))
        with np.errstate(all="ignore"):
            for n in range(0, S_all.shape[-1], keys):
                S = S_all[..., n : n + keys]
                m_new = np.maximum(m, S.max(-1, keepdims=True))
                finite = np.where(np.isfinite(m_new), m_new, 0.0)
                P = np.exp(S - finite)
                alpha = np.where(np.isfinite(m), np.exp(base * (m - finite)), 0.0)
                given = P @ self.v[..., n : n + keys, :]
                l = (l * alpha if rescale_l else l) + P.sum(-1, keepdims=True)
                kept = acc * alpha if rescale_acc else acc
                acc = (acc + given) * alpha if newest else kept + given
                m = m_new
            out = np.where(np.isfinite(m), acc / l, 0.0)
            return out, (m + np.log(l))[..., 0]

    # ------------------------------------------------------------------ the backward

    def backward(
        self,
        visible: Mask | None = None,
        *,
        scale: float | None = None,
        k: Array | None = None,
        v: Array | None = None,
        lse: Array | None = None,
        delta: float = 1.0,
        d_lse: float = 1.0,
        heads: Callable[[Array], Array] | None = None,
        forward: tuple[Array, Array] | None = None,
    ) -> dict[str, Array]:
        """dq, dk and dv from an out and an lse that are right.

        Args:
            visible: other keys than those that a row should see.
            scale, k, v: others than in the forward.
            lse: what is taken for it.
            delta, d_lse: factors of these two in dS.
            heads: what is taken for delta, and d_lse with it, by query head.
            forward: an out and an lse that are wrong themselves.
        """
        assert self.d_out is not None and self.d_lse is not None
        scale = self.scale if scale is None else scale
        visible = self.visible if visible is None else visible
        products = self.products if k is None else self.q @ np.swapaxes(k, -1, -2)
        k, v = self.k if k is None else k, self.v if v is None else v
        out, right_lse = self.right if forward is None else forward
        lse = right_lse if lse is None else lse
        with np.errstate(all="ignore"):
            P = np.where(
                visible & np.isfinite(lse)[..., None], np.exp(scale * products - lse[..., None]), 0.0
            )
            dP = self.d_out @ np.swapaxes(v, -1, -2)
            subtracted = delta * (self.d_out * out).sum(-1) - d_lse * self.d_lse
            subtracted = subtracted if heads is None else heads(subtracted)
            dS = P * (dP - subtracted[..., None])
            return {
                "dq": scale * dS @ k,
                "dk": self.by_kv_head(scale * np.swapaxes(dS, -1, -2) @ self.q),
                "dv": self.by_kv_head(np.swapaxes(P, -1, -2) @ self.d_out),
            }

    @cached_property
    def by_query_head(self) -> dict[str, Array]:
        """dk and dv that each query head gives, (B, Hq, Sk, .)."""
        alone = Attention(self.q, self.k, self.v, self.d_out, self.d_lse, self.scale, self.visible,
                          self.q.shape[1])  # fmt: skip
        return alone.backward()

    @cached_property
    def score_gradients(self) -> tuple[Array, Array]:
        """dS and dP - delta, (B, Hq, Sq, Sk), of which the latter is not masked."""
        assert self.d_out is not None and self.d_lse is not None
        out, lse = self.right
        with np.errstate(all="ignore"):
            P = np.where(self.visible, np.exp(self.scale * self.products - lse[..., None]), 0.0)
            rest = self.d_out @ np.swapaxes(self.v, -1, -2)
            rest = rest - ((self.d_out * out).sum(-1) - self.d_lse)[..., None]
            return np.where(self.visible, P * rest, 0.0), rest

    def by_kv_head(self, x: Array) -> Array:
        """(B, Hq, Sk, .) added up over the query heads of each KV head."""
        B, Hq, Sk, D = x.shape
        return x.reshape(B, self.heads_kv, Hq // self.heads_kv, Sk, D).sum(2)
