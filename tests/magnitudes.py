"""How far a correct kernel may be from the exact result: the error scale of the laws.

A law compares two calls of an implementation with each other; no reference says what they should be. Each
call has a hard bound per element, of first order, made of sums in which nothing cancels. With A the
magnitudes, a = 2^-24, u and eta as in `reference.budget` (what the terms stand for: tests/laws, and the
chain in `reference.error_model`, from which no code is shared):

    bS   = a (D + 2) |scale| |q||k| + 4 a |s|                     of a score
    rel  = bS + exp's 16 a + 2 a |s - m|                          of P, relatively
    out    (u P + P rel + eta / l) (|V| + |out|) + a (n + 12) A_out, stored: + u (|out| + that) + eta
           A_out = P |V|
    lse    P bS + a (2 |lse| + 2 |m| + 2 P|s| + n + 12),          A_lse = 1 + |lse| + P |s|
    M    = P (|dO||V|^T + |dO||out| + |dlse|), the magnitude of dS; its error is
           2 (u |dS| + eta), before the scale and after it, + rel |dS|
           + P (a (Dv + 12) |dO||V|^T + error of delta + 2 a (|dO||V|^T + |dO||out| + |dlse|))
    delta  a (Dv + 12) |dO||out| + |dO| error of out + a (|dO||out| + |dlse|)
    dq     |scale| (error of dS + a (n + 12) |dS|) |K|, stored,   A_dq = |scale| M |K|
    dk     the same with its transpose and |Q|, summed over the heads of a group
    dv     (u P + P rel + eta)^T |dO| + a (n + 12) A_dv, stored,  A_dv = P^T |dO|

The scores are never stored: rows are taken in chunks, in float64 on a CPU and in float32 on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reference.budget import C_EXP, FLUSHED, TF32, A, Rounding
from reference.budget import DTYPES as BUDGETS

INF = math.inf
CHUNK = 2**24
"""Scores that are held at once on a GPU; some ten tensors of that size."""
CHUNK_CPU = 2**18

IN_FLOAT64 = 2e-13
"""Relative to the magnitudes: within this every law holds in float64."""


@dataclass(frozen=True)
class Problem:
    """One dense call.

    Attributes:
        q, k, v: (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv).
        d_out, d_lse: (B, Hq, Sq, Dv), (B, Hq, Sq), or None: nothing flows in there.
        causal, scale: as `kernels.flash_attention` takes them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor | None
    d_lse: Tensor | None
    causal: bool
    scale: float | None

    @property
    def Sq(self) -> int:
        return self.q.shape[2]

    @property
    def Sk(self) -> int:
        return self.k.shape[2]

    @property
    def diagonal(self) -> int:
        """Query i sees key j iff j <= i + this, if causal."""
        return self.Sk - self.Sq

    @property
    def group(self) -> int:
        return self.q.shape[1] // max(1, self.k.shape[1])

    @property
    def factor(self) -> float:
        """The scale as a number."""
        return self.q.shape[3] ** -0.5 if self.scale is None else self.scale

    @property
    def live(self) -> Tensor:
        """Which queries see a key, bool (Sq,)."""
        rows = torch.arange(self.Sq, device=self.q.device)
        return (rows + self.diagonal >= 0 if self.causal else rows >= 0) & (self.Sk > 0)

    def per_group(self, x: Tensor) -> Tensor:
        """(B, Hq, ...) as (B, Hkv, G, ...)."""
        return x.unflatten(1, (self.k.shape[1], self.group))


@dataclass(frozen=True)
class Bounds:
    """Of one call, by tensor ("out", "lse", "dq", "dk", "dv"), each in that tensor's shape.

    Attributes:
        magnitude: A.
        bound: hard bound on the error; infinite where a correct kernel may give anything (the score's own
            error exceeds 1, float16 overflows): no power.
        deepest: the smallest s - lse of any score.
    """

    magnitude: dict[str, Tensor] = field(default_factory=dict)
    bound: dict[str, Tensor] = field(default_factory=dict)
    deepest: float = 0.0

    def __getitem__(self, tensor: str) -> Tensor:
        return self.bound[tensor]


def bounds(p: Problem, rounding: Rounding | None = None) -> Bounds:
    """The magnitudes and bounds of a call; of the gradients if something flows in.

    Args:
        p: float16, bfloat16, float32; or float64, for which a bound is `IN_FLOAT64` times the magnitude.
        rounding: where the implementation rounds.
    """
    with torch.no_grad(), _ieee_products(p.q.device):
        return _Call(p, rounding or Rounding()).bounds()


class _Call:
    """One evaluation; K, V (B, Hkv, 1, Sk, .), rows of Q, dO, ... (B, Hkv, G, rows, .)."""

    def __init__(self, p: Problem, rounding: Rounding) -> None:
        self.p, self.rounding = p, rounding
        self.computed = torch.float64 if p.q.device.type == "cpu" else torch.float32
        self.exact = p.q.dtype == torch.float64
        budget = BUDGETS.get(str(p.q.dtype).removeprefix("torch."), BUDGETS["float32"])
        self.u, self.eta, self.overflow = budget.u, budget.eta, budget.overflow
        self.u_operand, self.eta_operand = (0.0, 0.0) if budget.name == "float32" else (self.u, self.eta)
        self.u_product = 0.0  # what an operand of float32 may lose on its way into a product
        if rounding.products == "tf32" and p.q.dtype == torch.float32:
            self.u_operand = self.u_product = 2 * TF32.u  # cut off
            self.eta_operand = 2 * TF32.eta
        self.K, self.V = (x.to(self.computed).unsqueeze(2) for x in (p.k, p.v))
        self.scale = abs(p.factor)
        self.deepest = 0.0

    def bounds(self) -> Bounds:
        p, (B, Hq, Sq, D), Dv = self.p, self.p.q.shape, self.p.v.shape[3]
        backward = p.d_out is not None or p.d_lse is not None
        names = {"out": (B, Hq, Sq, Dv), "lse": (B, Hq, Sq)}
        if backward:
            names |= {"dq": (B, Hq, Sq, D), "dk": p.k.shape, "dv": p.v.shape}
        # a row that sees nothing, and a key that nothing sees, has exact zeros
        magnitude = {name: p.q.new_zeros(shape, dtype=self.computed) for name, shape in names.items()}
        bound = {name: torch.zeros_like(x) for name, x in magnitude.items()}
        self.value = {name: torch.zeros_like(x) for name, x in bound.items() if name in ("dk", "dv")}
        found = Bounds(magnitude, bound, 0.0)
        first = 0 if not p.causal else max(0, -p.diagonal)  # rows before see no key
        if 0 in (B, Hq, p.Sk):
            return found
        limit = CHUNK if p.q.device.type == "cuda" else CHUNK_CPU
        step = max(1, limit // (B * Hq * p.Sk))
        for i0 in range(first, Sq, step):
            self._rows(i0, min(i0 + step, Sq), magnitude, bound)
        for name in ("dk", "dv") if backward else ():  # the last rounding
            b0 = bound[name]
            bound[name] = b0 + self.u * (self.value[name].abs() + b0) + self.eta
        for name in bound:
            if self.exact:
                bound[name] = IN_FLOAT64 * magnitude[name] + 1e-300
            elif name != "lse":
                beyond = magnitude[name] + bound[name] >= self.overflow
                bound[name] = bound[name].masked_fill_(beyond, INF)
        return Bounds(magnitude, bound, self.deepest)

    def _rows(self, i0: int, i1: int, magnitude: dict[str, Tensor], bound: dict[str, Tensor]) -> None:
        """Everything about the rows i0 to i1: theirs is stored, that of the keys is added up."""
        p, D, n = self.p, self.p.q.shape[3], self.p.Sk
        keys = min(p.Sk, i1 + p.diagonal) if p.causal else p.Sk  # the rest no row here sees
        K, V = self.K[..., :keys, :], self.V[..., :keys, :]
        Q = self._given(p.q, i0, i1)
        visible = torch.ones(i1 - i0, keys, dtype=torch.bool, device=Q.device)
        if p.causal:
            i = torch.arange(i0, i1, device=Q.device)[:, None]
            visible = torch.arange(keys, device=Q.device) <= i + p.Sk - p.Sq
        S = p.factor * (Q @ K.mT)
        bS = (A * (D + 2) + 2 * self.u_product) * self.scale * (Q.abs() @ K.abs().mT) + 4 * A * S.abs()
        hidden = S.masked_fill(~visible, -INF)
        m, lse = hidden.amax(-1, keepdim=True), hidden.logsumexp(-1, keepdim=True)
        del hidden
        deep = (S - lse).masked_fill_(~visible, 0.0)
        self.deepest = min(self.deepest, float(deep.min()))
        P = deep.exp_().masked_fill_(~visible, 0.0)
        rel = torch.expm1((bS + 4 * C_EXP + 2 * A * (S - m).abs()).clamp_(max=40.0))
        if self.computed is torch.float32:
            P = P * (1 + rel)  # this P is in error too
        blind = ((bS > 1) & visible).any(-1, keepdim=True)  # rows without power
        least = self.eta_operand * (m - lse).exp()  # of a rounded P: half a subnormal step, over l

        # out: P rounded, its score and exponential, then the sum, then the store
        weight = P * (self.u_operand + rel) + (least + FLUSHED) * visible
        A_out, out = P @ V.abs(), P @ V
        b = weight @ V.abs() + weight.sum(-1, keepdim=True) * out.abs()
        b = b + (A * (n + 12) + self.u_product) * A_out
        B_out = b + self.u * (out.abs() + b) + self.eta
        self._store("out", i0, i1, A_out, B_out.masked_fill(blind, INF), magnitude, bound)

        mean = (P * S.abs()).sum(-1, keepdim=True)
        B_lse = (P * bS).sum(-1, keepdim=True) + A * (2 * lse.abs() + 2 * m.abs() + 2 * mean + n + 12)
        if self.rounding.l_from_rounded_p:
            B_lse = B_lse + self.u_operand + n * least
        A_lse = 1 + lse.abs() + mean
        stored = B_lse.masked_fill(blind, INF)
        self._store("lse", i0, i1, A_lse[..., 0], stored[..., 0], magnitude, bound)
        if "dq" not in bound:
            return

        dO = torch.zeros_like(A_out) if p.d_out is None else self._given(p.d_out, i0, i1)
        d_lse = torch.zeros_like(m) if p.d_lse is None else self._given(p.d_lse, i0, i1)[..., None]
        # P again, from the stored lse
        of_p = bS + 4 * C_EXP + 4 * A * (S.abs() + lse.abs()) + B_lse
        of_p = torch.expm1(of_p.clamp_(max=40.0))
        del bS, S, rel, weight
        # delta, and its error: of its sum, of the stored out, of d_lse
        row = (dO.abs() * out.abs()).sum(-1, keepdim=True)
        Dv = dO.shape[-1]
        of_row = A * (Dv + 12) * row + (dO.abs() * B_out).sum(-1, keepdim=True) + A * (row + d_lse.abs())
        dP = dO.abs() @ V.abs().mT
        pull = dP + row + d_lse.abs()
        M = P * pull
        dS = P * (dO @ V.mT - (dO * out).sum(-1, keepdim=True) + d_lse)
        size = dS.abs() + P * of_row  # of the dS that a kernel forms
        rounded = 2 * self.u_operand * size  # before the scale or after it
        rounded += self.eta_operand * (1 + (1 / self.scale if self.scale else 0.0)) * visible
        if self.rounding.p_rounded_before_ds:
            rounded += (self.u_operand * P + self.eta_operand * visible) * pull
        of_dS = (
            rounded
            + of_p * size
            + FLUSHED * (dP + row) * visible
            + P * (1 + of_p) * ((A * (Dv + 12) + 2 * self.u_product) * dP + of_row + 2 * A * pull)
        )
        overflows = max(1.0, self.scale) * (size + of_dS) >= self.overflow
        if self.exact:
            overflows = torch.zeros_like(overflows)
        del rounded, pull, dP

        A_dq = self.scale * (M @ K.abs())
        summed = A * (n + 12) + self.u_product
        b = self.scale * ((of_dS + summed * (size + of_dS)) @ K.abs()) + 2 * A * A_dq
        B_dq = b + self.u * (self.scale * (dS @ K).abs() + b) + self.eta
        nothing = blind | overflows.any(-1, keepdim=True)
        self._store("dq", i0, i1, A_dq, B_dq.masked_fill(nothing, INF), magnitude, bound)

        n_rows = p.Sq * p.group
        blind_keys = (blind & visible).any(-2)  # (B, Hkv, G, keys)
        self.value["dk"][..., :keys, :] += self.scale * (dS.mT @ Q).sum(2)
        self.value["dv"][..., :keys, :] += (P.mT @ dO).sum(2)
        Q, dO = Q.abs(), dO.abs()
        A_dk, A_dv = self.scale * (M.mT @ Q), P.mT @ dO
        summed = A * (n_rows + 12) + self.u_product
        b = self.scale * ((of_dS + summed * (size + of_dS)).mT @ Q) + 2 * A * A_dk
        b = self._by_head(b, A_dk).masked_fill((blind_keys | overflows.any(-2))[..., None], INF)
        magnitude["dk"][..., :keys, :] += A_dk.sum(2)
        bound["dk"][..., :keys, :] += b.sum(2)
        of_p = P * (self.u_operand + of_p) + (self.eta_operand + FLUSHED) * visible
        b = (of_p + summed * (P + of_p)).mT @ dO
        b = self._by_head(b, A_dv).masked_fill(blind_keys[..., None], INF)
        magnitude["dv"][..., :keys, :] += A_dv.sum(2)
        bound["dv"][..., :keys, :] += b.sum(2)

    def _by_head(self, b: Tensor, largest: Tensor) -> Tensor:
        """The bound of what a query head adds to a group's sum, of that magnitude at most."""
        if not self.rounding.heads_rounded_before_group_sum:
            return b
        return b + self.u * (largest + b) + self.eta

    def _given(self, x: Tensor, i0: int, i1: int) -> Tensor:
        return self.p.per_group(x[:, :, i0:i1].to(self.computed))

    @staticmethod
    def _store(
        name: str, i0: int, i1: int, A_x: Tensor, B_x: Tensor,
        magnitude: dict[str, Tensor], bound: dict[str, Tensor],
    ) -> None:  # fmt: skip
        magnitude[name][:, :, i0:i1] = A_x.flatten(1, 2)
        bound[name][:, :, i0:i1] = B_x.flatten(1, 2)


@contextmanager
def _ieee_products(device: torch.device) -> Iterator[None]:
    """No TF32 on a GPU, whatever the process allows."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "ieee"
        yield
    finally:
        matmul.fp32_precision = before
