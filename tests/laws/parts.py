"""A problem's parts, computed apart: pieces of the keys, the first queries, the sequences of a batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from reference.budget import DTYPES as BUDGETS
from reference.budget import A

from ..cases import Case
from ..magnitudes import Problem, bounds
from .registry import law
from .trial import GRADIENTS, NotApplicable, NotClaimed, Results, Trial, copied


def _splittable(case: Case) -> Case:
    """With a key that all queries see, and another."""
    if case.ragged or not case.causal or case.len_k > case.len_q:
        return case
    return replace(case, len_k=case.len_k + case.len_q + 1)


@law(_splittable)
def split_keys(t: Trial) -> None:
    """Attention to the keys before a and to the rest, merged by lse, is attention to all of them.

    Causal: the first part is not, and a <= Sk - Sq + 1. With w_s = exp(lse_s - lse): out is the sum of
    w_s out_s; part s of the backward gets dO w_s and dlse_s = w_s (dO·(out_s - out) + dlse), its dq
    add up, its dk and dv are those of its keys.
    """
    if not t.claims.lse:
        raise NotClaimed("an lse")
    where: dict[int, int] = {}
    for i, p in enumerate(t.problems):
        largest = p.Sk - 1
        if p.causal:
            largest = min(largest, p.diagonal + int(t.claims.dead_rows))
        if largest >= 1 and p.Sq:
            where[i] = 1 + int(t.random(9 + i, 1, largest))
    chosen = list(where)
    halves = [[_keys(t.problems[i], 0, where[i]) for i in chosen],
              [_keys(t.problems[i], where[i], None) for i in chosen]]  # fmt: skip
    forwards = [t.call([replace(p, d_out=None, d_lse=None) for p in half]) for half in halves]
    merged = [_Merged(t, i, [half[n] for half in halves], [x[n] for x in forwards])
              for n, i in enumerate(chosen)]  # fmt: skip
    for m in merged:
        m.forward()
    if not t.claims.backward or not t.claims.lse_grad or t.problems[chosen[0]].d_out is None:
        return
    backwards = [t.call([m.given[s] for m in merged]) for s in (0, 1)]
    for n, m in enumerate(merged):
        m.backward([x[n] for x in backwards])


def _keys(p: Problem, first: int, last: int | None) -> Problem:
    """Some of the keys; the first ones are seen by all queries."""
    kept = slice(first, last)
    return copied(replace(p, causal=p.causal and last is None), k=p.k[:, :, kept], v=p.v[:, :, kept])


class _Merged:
    """Two parts of a problem: what they make together, and how far that may be from the whole.

    The errors of the weights and of what flows into the parts are bounded too: what flows in is rounded to
    the dtype, and made of results that are in error themselves. A gradient is linear in what flows in, so
    that error in it makes no more than its own magnitudes, A(error).
    """

    def __init__(self, t: Trial, i: int, parts: list[Problem], found: list[Results]) -> None:
        self.t, self.i, self.p, self.parts, self.found = t, i, t.problems[i], parts, found
        self.bounds = [t.bounds_of(replace(part, d_out=None, d_lse=None)) for part in parts]
        budget = BUDGETS.get(str(t.dtype).removeprefix("torch."), BUDGETS["float32"])
        exact = t.dtype is torch.float64
        self.u, self.eta, self.a = (0.0, 0.0, 0.0) if exact else (budget.u, budget.eta, A)
        lse = torch.stack([x["lse"].double() for x in found])  # (2, B, Hq, Sq)
        self.lse = lse.logsumexp(0)
        dead = self.lse == -torch.inf
        self.w = (lse - self.lse.masked_fill(dead, 0.0)).exp()[..., None]  # (2, B, Hq, Sq, 1)
        of_lse = sum(torch.where(x["lse"] == -torch.inf, 0.0, b["lse"].double())
                     for x, b in zip(found, self.bounds, strict=True))  # fmt: skip
        assert isinstance(of_lse, Tensor)
        self.of_lse = of_lse  # of the difference of the two lse, hence of log w
        self.of_w = torch.expm1(of_lse.clamp(max=40.0))[..., None]  # relative
        self.outs = torch.stack([x["out"].double() for x in found])
        self.out = (self.w * self.outs).sum(0)
        self.of_outs = torch.stack([b["out"].double() for b in self.bounds])
        spread = (self.outs[0] - self.outs[1]).abs()
        self.of_out = (self.w * self.of_outs).sum(0) + self.w.prod(0) * self.of_w * (
            spread + self.of_outs.sum(0)
        )

    def forward(self) -> None:
        t, base, bound, note = self.t, self.t.base[self.i], self.t.bounds[self.i], self.t.about(self.i)
        t.near("lse", self.lse, base["lse"].double(), self.of_lse + bound["lse"], note)
        t.near("out", self.out, base["out"].double(), self.of_out + bound["out"], note)

    @property
    def given(self) -> list[Problem]:
        """The parts with what flows into them."""
        dO, d_lse = self._gradients()
        found = []
        for part, w, out in zip(self.parts, self.w, self.outs, strict=True):
            pulled = w[..., 0] * ((dO * (out - self.out)).sum(-1) + d_lse)
            exact = torch.float64 if self.t.dtype is torch.float64 else torch.float32
            found.append(copied(part, d_out=(dO * w).to(self.t.dtype), d_lse=pulled.to(exact)))
        return found

    def _gradients(self) -> tuple[Tensor, Tensor]:
        p = self.p
        assert p.d_out is not None
        return p.d_out.double(), torch.zeros_like(self.lse) if p.d_lse is None else p.d_lse.double()

    def backward(self, found: list[Results]) -> None:
        t, base, bound, note = self.t, self.t.base[self.i], self.t.bounds[self.i], self.t.about(self.i)
        limits = []
        for s, part in enumerate(self.given):
            of_dO, of_d_lse = self._of_given(s)
            unseen = replace(part, d_out=of_dO, d_lse=of_d_lse)
            given, error = t.bounds_of(part), bounds(_finite(unseen))
            limits.append({
                name: (given[name].double() + error.magnitude[name].double()) for name in GRADIENTS
            })  # fmt: skip
        a, b = ({name: x[name].double() for name in GRADIENTS} for x in found)
        joined = {"dq": a["dq"] + b["dq"], "dk": torch.cat((a["dk"], b["dk"]), 2),
                  "dv": torch.cat((a["dv"], b["dv"]), 2)}  # fmt: skip
        of_a, of_b = limits
        limit = {"dq": of_a["dq"] + of_b["dq"], "dk": torch.cat((of_a["dk"], of_b["dk"]), 2),
                 "dv": torch.cat((of_a["dv"], of_b["dv"]), 2)}  # fmt: skip
        for name in GRADIENTS:
            t.near(name, joined[name], base[name].double(), limit[name] + bound[name], note)

    def _of_given(self, s: int) -> tuple[Tensor, Tensor]:
        """Bounds on the errors of what flows into part s."""
        dO, d_lse = self._gradients()
        w, dO = self.w[s], dO.abs()
        of_dO = dO * w * (self.of_w + self.u * (1 + self.of_w)) + self.eta
        pull = (dO * (self.outs[s] - self.out).abs()).sum(-1) + d_lse.abs()
        of_pull = (dO * (self.of_outs[s] + self.of_out)).sum(-1)
        relative = self.of_w[..., 0] * (1 + self.a) + self.a
        return of_dO, w[..., 0] * (relative * (pull + of_pull) + of_pull)


def _finite(p: Problem) -> Problem:
    """Where an error may be anything the bounds beside it are infinite already."""
    clean = {name: torch.nan_to_num(x, nan=0.0, posinf=0.0)
             for name, x in vars(p).items() if name in ("d_out", "d_lse")}  # fmt: skip
    return copied(p, **clean)


@law(lambda case: replace(case, causal=True))
def prefix_of_queries(t: Trial) -> None:
    """Causal: the first m queries over the first m + Sk - Sq keys have the longer problem's out, lse and dq.

    And its dk and dv, if nothing flows into the queries beyond; those of the keys beyond are then 0.
    """
    if not t.case.causal:
        raise NotApplicable("the case is not causal")
    whole, first, rows = [], [], []
    for i, p in enumerate(t.problems):
        least = max(1, 1 - p.diagonal)
        if p.Sq <= least:
            continue
        m = least + int(t.random(11 + i, 1, p.Sq - least))
        keys = m + p.diagonal
        d_out, d_lse = (None if x is None else x.clone() for x in (p.d_out, p.d_lse))
        for x in (d_out, d_lse):
            if x is not None:
                x[:, :, m:] = 0
        whole.append(replace(p, d_out=d_out, d_lse=d_lse))
        d_out, d_lse = (None if x is None else x[:, :, :m] for x in (d_out, d_lse))
        first.append(copied(p, q=p.q[:, :, :m], k=p.k[:, :, :keys], v=p.v[:, :, :keys], d_out=d_out,
                            d_lse=d_lse))  # fmt: skip
        rows.append((i, m, keys))
    calls = zip(t.call(whole), t.call(first), strict=True)
    for (i, m, keys), p, p1, (longer, shorter) in zip(rows, whole, first, calls, strict=True):
        of_p, of_p1, note = t.bounds_of(p), t.bounds_of(p1), t.about(i) + f"first {m} queries: "
        for name, y in shorter.items():
            n = keys if name in ("dk", "dv") else m
            t.near(
                name, y, longer[name][:, :, :n].double(), of_p1[name].double() + of_p[name][:, :, :n], note
            )
            if name in GRADIENTS:
                beyond = longer[name][:, :, n:]
                t.near(name, beyond, 0.0, of_p[name][:, :, n:], note + "beyond them: ")


@law()
def ragged_is_separate(t: Trial) -> None:
    """One ragged call gives what separate calls of its sequences give.

    A dense case's batch entries are taken as sequences.
    """
    if not t.claims.ragged:
        raise NotClaimed("ragged batches")
    if t.case.ragged:
        together = t.base
        apart = [t.call([p], ragged=False)[0] for p in t.problems]
        limits = t.bounds
    else:
        (p,), (x,), (bound,) = t.problems, t.base, t.bounds
        count = len(p.q)
        entries = [
            copied(p, **{name: y[n : n + 1] for name, y in vars(p).items() if isinstance(y, Tensor)})
            for n in range(count)
        ]
        together = t.call(entries, ragged=True)
        apart = [{name: y[n : n + 1] for name, y in x.items()} for n in range(count)]
        limits = [
            replace(bound, bound={name: y[n : n + 1] for name, y in bound.bound.items()})
            for n in range(count)
        ]
    for i, (one, other, limit) in enumerate(zip(together, apart, limits, strict=True)):
        for name, y in one.items():
            t.near(name, y, other[name].double(), 2 * limit[name], f"sequence {i}: ")
