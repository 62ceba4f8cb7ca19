"""Whether what was timed is right, at any length, on the GPU.

Some heads of a call are computed exactly, in float64, and each element of the result is held against the
hard bound of `tests.magnitudes`. The heads are the first of the first batch entry or sequence, the last of
the last, and some between by chance; a group of query heads belongs together. All else must be finite.

    S = scale Q K^T,  P = softmax(S),  out = P V,  dS = P (dO V^T - rowsum(dO out))
    dq = scale dS K,  dk = scale dS^T Q,  dv = P^T dO
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import torch
from torch import Tensor

from reference.budget import Rounding

from ..magnitudes import Bounds, bounds
from ..magnitudes import Problem as Call
from .problems import Problem, Tensors

HEADS = 4
"""KV heads that are looked at, with their groups."""

CHUNK = 2**24
"""Scores in float64 that are held at once."""

Results = Mapping[str, Tensor]


class Expected:
    """What calls of a problem must give, on tensors of these values.

    Args:
        problem: what is computed.
        x: contiguous or not; only values count.
        backward: whether gradients are looked at.
    """

    def __init__(self, problem: Problem, x: Tensors, backward: bool = True) -> None:
        self.problem, self.backward = problem, backward
        entries = len(problem.lengths)
        chosen = {(0, 0), (entries - 1, problem.heads_kv - 1)}
        if problem.kind:  # the longest sequence too
            chosen.add((problem.lengths.index(max(problem.lengths)), 0))
        some = random.Random(problem.id)
        most = min(HEADS, entries * problem.heads_kv)
        while len(chosen) < most:
            chosen.add((some.randrange(entries), some.randrange(problem.heads_kv)))
        self.calls = {where: self._call(x, *where) for where in sorted(chosen)}
        self.exact = {where: _exact(call, backward) for where, call in self.calls.items()}
        self._bounds: dict[Rounding, dict[tuple[int, int], Bounds]] = {}

    def wrong(self, found: Results, rounding: Rounding) -> str:
        """What is wrong with results; empty if nothing is.

        Args:
            found: by name, "out", and "dq", "dk", "dv" if gradients are looked at.
            rounding: where who made them rounds.
        """
        if rounding not in self._bounds:
            self._bounds[rounding] = {where: bounds(call, rounding) for where, call in self.calls.items()}
        shapes = self._shapes()
        if not found:
            return "it gave nothing"
        for name, t in found.items():
            if str(t.dtype) != f"torch.{self.problem.dtype}":
                return f"{name} is of {t.dtype}, not {self.problem.dtype}"
            if tuple(t.shape) != shapes[name]:
                return f"{name} is of shape {tuple(t.shape)}, not {shapes[name]}"
            if not torch.isfinite(t).all():
                return f"{name} has elements that are not finite"
            for where, exact in self.exact.items():
                part = self._part(t, name, *where)[None].double()
                limit = self._bounds[rounding][where][name].double()
                beyond = (part - exact[name]).abs() / limit
                if not (worst := float(beyond.max())) <= 1:
                    there = f"batch entry {where[0]}, KV head {where[1]}"
                    return f"{name} is off by {worst:.3g} times its bound in {there}"
        return ""

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        of = self.problem
        heads = {"out": of.heads_q, "dq": of.heads_q, "dk": of.heads_kv, "dv": of.heads_kv}
        if of.kind:
            return {name: (of.length, h, of.dim) for name, h in heads.items()}
        return {name: (of.batch, h, of.length, of.dim) for name, h in heads.items()}

    def _part(self, t: Tensor, name: str, entry: int, head: int) -> Tensor:
        """(heads of the group or 1, S, D) of a batch entry or sequence."""
        of = self.problem
        group = of.heads_q // of.heads_kv if name in ("q", "out", "dq", "d_out") else 1
        heads = slice(head * group, (head + 1) * group)
        if not of.kind:
            return t[entry, heads]
        begin = sum(of.lengths[:entry])
        return t[begin : begin + of.lengths[entry], heads].transpose(0, 1)

    def _call(self, x: Tensors, entry: int, head: int) -> Call:
        parts = {name: self._part(getattr(x, name).detach(), name, entry, head)[None]
                 for name in ("q", "k", "v", "d_out")}  # fmt: skip
        d_out = parts["d_out"] if self.backward else None
        return Call(parts["q"], parts["k"], parts["v"], d_out, None, self.problem.causal, None)


def _exact(call: Call, backward: bool) -> dict[str, Tensor]:
    """Of one KV head and its group, float64: out, and dq, dk, dv."""
    Q, K, V = (t[0].double() for t in (call.q, call.k, call.v))  # (G, S, D), (1, S, D)
    G, S = Q.shape[:2]
    found = {"out": torch.zeros_like(Q)}
    if backward:
        assert call.d_out is not None
        dO = call.d_out[0].double()
        found |= {"dq": torch.zeros_like(Q), "dk": torch.zeros_like(K), "dv": torch.zeros_like(V)}
    rows = max(1, CHUNK // (G * S))
    for i0 in range(0, S, rows):
        i = slice(i0, min(i0 + rows, S))
        scores = call.factor * (Q[:, i] @ K.mT)
        if call.causal:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=Q.device).triu(i0 + 1)
            scores.masked_fill_(hidden, -math.inf)
        P = scores.softmax(-1)
        out = P @ V
        found["out"][:, i] = out
        if backward:
            dS = P * (dO[:, i] @ V.mT - (dO[:, i] * out).sum(-1, keepdim=True))
            found["dq"][:, i] = call.factor * (dS @ K)
            found["dk"] += call.factor * (dS.mT @ Q[:, i]).sum(0)
            found["dv"] += (P.mT @ dO[:, i]).sum(0)
    return {name: t[None] for name, t in found.items()}
