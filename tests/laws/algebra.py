"""What softmax and a product are: hulls, linearity, shifts, and problems with a closed form."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..cases import Case
from ..magnitudes import Problem
from .registry import law, with_backward
from .trial import NotApplicable, NotClaimed, Trial, copied

STEPS = 64
"""A grid's steps from 0 to its largest value: sums and shifts up to 4 times that are exact in bfloat16."""


def _on_grid(x: Tensor) -> Tensor:
    """x on a grid of each head, at most `STEPS` steps of a power of two from 0; float64."""
    x = x.double()
    if not x.numel():
        return x
    largest = x.abs().amax((2, 3), keepdim=True)
    step = torch.exp2(torch.log2(largest.clamp(min=2.0**-100)).ceil()) / STEPS
    return (x / step).round() * step


def _shift(t: Trial, x: Tensor, salt: int) -> Tensor:
    """A vector for each head, (B, H, 1, .), in steps of the grid of x, half its largest value at most."""
    B, H, S, D = x.shape
    if not S:
        return x.new_zeros(B, H, 1, D)
    largest = x.abs().amax((2, 3), keepdim=True)
    step = torch.exp2(torch.log2(largest.clamp(min=2.0**-100)).ceil()) / STEPS
    steps = t.random(salt, B * H * D, STEPS // 2 + 1, -STEPS // 2).view(B, H, 1, D)
    return steps * step


def _stored(t: Trial, x: Tensor) -> Tensor:
    """Values that the dtype holds exactly."""
    stored = x.to(t.dtype)
    if not torch.equal(stored.double(), x):
        raise NotApplicable("the changed values are not exact in the dtype")
    return stored


@law()
def hull_of_values(t: Trial) -> None:
    """Every live row of out lies between the smallest and the largest visible v, in each coordinate."""
    for i, (p, x) in enumerate(zip(t.problems, t.base, strict=True)):
        live = p.live.nonzero().flatten()
        if not len(live):
            continue
        v = p.v.double()
        low, high = v.cummin(2).values, v.cummax(2).values  # of the keys up to each
        last = (live + p.diagonal).clamp(max=p.Sk - 1) if p.causal else torch.full_like(live, p.Sk - 1)
        low, high = (y[:, :, last].repeat_interleave(p.group, 1) for y in (low, high))
        out = x["out"][:, :, live].double()
        nearest = out.maximum(low).minimum(high)
        t.near("out", out, nearest, t.bounds[i]["out"][:, :, live], t.about(i) + "outside of the hull: ")


@law()
def values_of_one(t: Trial) -> None:
    """V = 1 gives out = 1 in every live row, and dq = dk = 0 where nothing flows into the lse."""
    problems = [copied(p, v=torch.ones_like(p.v), d_lse=None) for p in t.problems]
    for i, (p, x) in enumerate(zip(problems, t.call(problems), strict=True)):
        bound, note = t.bounds_of(p), t.about(i)
        t.near("out", x["out"], p.live.double()[:, None], bound["out"], note)
        for name in ("dq", "dk"):
            if name in x:
                t.near(name, x[name], 0.0, bound[name], note)


@law()
def linear_in_values(t: Trial) -> None:
    """out is linear in V: out(V) + out(W) = out(V + W)."""
    sides: list[list[Problem]] = [[], [], []]
    for p in t.problems:
        V = _on_grid(p.v)
        W = -V.roll(1, 2).flip(3)
        for side, v in zip(sides, (V, W, V + W), strict=True):
            side.append(replace(copied(p, v=_stored(t, v)), d_out=None, d_lse=None))
    found = [t.call(side) for side in sides]
    for i in range(len(t.problems)):
        v, w, both = (x[i]["out"].double() for x in found)
        limit = sum(t.bounds_of(side[i])["out"].double() for side in sides)
        assert isinstance(limit, Tensor)
        t.near("out", v + w, both, limit, t.about(i))


@law(with_backward)
def shifted_values(t: Trial) -> None:
    """V + c shifts out by c in every live row and leaves lse, dq, dk and dv."""
    before = [copied(p, v=_stored(t, _on_grid(p.v))) for p in t.problems]
    shifts = [_shift(t, p.v.double(), 7) for p in before]
    after = [copied(p, v=_stored(t, p.v.double() + c)) for p, c in zip(before, shifts, strict=True)]
    for i, (p, p2, c, x, y) in enumerate(
        zip(before, after, shifts, t.call(before), t.call(after), strict=True)
    ):
        of_p, of_p2 = t.bounds_of(p), t.bounds_of(p2)
        for name in x:
            expected = x[name].double()
            if name == "out":
                expected = expected + c.repeat_interleave(p.group, 1) * p.live[:, None]
            t.near(name, y[name], expected, of_p[name].double() + of_p2[name], t.about(i))


@law(with_backward)
def shifted_keys(t: Trial) -> None:
    """K + c shifts lse by scale q·c and dq by scale dlse c and leaves out, dk and dv."""
    before = [copied(p, k=_stored(t, _on_grid(p.k))) for p in t.problems]
    shifts = [_shift(t, p.k.double(), 8) for p in before]
    after = [copied(p, k=_stored(t, p.k.double() + c)) for p, c in zip(before, shifts, strict=True)]
    for i, (p, p2, c, x, y) in enumerate(
        zip(before, after, shifts, t.call(before), t.call(after), strict=True)
    ):
        c = c.repeat_interleave(p.group, 1)  # (B, Hq, 1, D)
        of_p, of_p2 = t.bounds_of(p), t.bounds_of(p2)
        for name in x:
            expected = x[name].double()
            if name == "lse":
                expected = expected + p.factor * (p.q.double() * c).sum(-1)
            if name == "dq" and p.d_lse is not None:
                expected = expected + p.factor * p.d_lse.double()[..., None] * c * p.live[:, None]
            t.near(name, y[name], expected, of_p[name].double() + of_p2[name], t.about(i))


@law(lambda case: replace(case, causal=False))
def doubled_keys(t: Trial) -> None:
    """Not causal, every key twice leaves out and dq, adds ln 2 to lse and halves dk and dv."""
    if t.case.causal:
        raise NotApplicable("the case is causal")
    problems = [copied(p, k=torch.cat((p.k, p.k), 2), v=torch.cat((p.v, p.v), 2)) for p in t.problems]
    for i, (p, x) in enumerate(zip(problems, t.call(problems), strict=True)):
        once, of_once, of_twice, note = t.base[i], t.bounds[i], t.bounds_of(p), t.about(i)
        for name, y in x.items():
            expected, limit = once[name].double(), of_once[name].double()
            if name == "lse":
                expected = expected + math.log(2)
            if name in ("dk", "dv"):
                expected, limit = torch.cat((expected, expected), 2) / 2, torch.cat((limit, limit), 2) / 2
            t.near(name, y, expected, limit + of_twice[name], note)


@law()
def one_visible_key(t: Trial) -> None:
    """With one visible key out = v, bit for bit, and dq = scale dlse k.

    On the first key alone, and in the causal row that sees one.
    """
    try:
        problems = t.problems_with_d_lse
    except NotClaimed:  # dq is 0
        problems = t.problems
    if all(0 in (p.Sq, p.Sk) for p in problems):
        raise NotApplicable("there is no query or no key")
    for i, p in enumerate(problems):  # part of the case's own call, which needs no further claim
        row = -p.diagonal
        if p.causal and 0 <= row < p.Sq and p.Sk:
            out = t.base[i]["out"][:, :, row]
            t.equal("out", out, p.v[:, :, 0].repeat_interleave(p.group, 1), t.about(i) + f"row {row}: ")
    alone = [copied(replace(p, causal=False), k=p.k[:, :, :1], v=p.v[:, :, :1]) for p in problems]
    chosen = [i for i, p in enumerate(alone) if p.Sk and p.Sq]
    for i, x in zip(chosen, t.call([alone[i] for i in chosen]), strict=True):
        p, note = alone[i], t.about(i)
        k, v = (y.repeat_interleave(p.group, 1) for y in (p.k, p.v))
        t.equal("out", x["out"], v.expand(x["out"].shape), note)
        if "dq" in x:
            zero = torch.zeros((), dtype=torch.float64, device=t.device)
            d_lse = zero if p.d_lse is None else p.d_lse.double()[..., None]
            t.near("dq", x["dq"], p.factor * d_lse * k.double(), t.bounds_of(p)["dq"], note)


def _equal_dims(case: Case) -> Case:
    return replace(with_backward(case), dim_v=case.dim, d_lse=True)


@law(_equal_dims)
def values_are_keys(t: Trial) -> None:
    """dO = 0 and V = K give dq = scale dlse out: the gradient of the lse is the mean of the keys."""
    if t.case.dim != t.case.dim_v:
        raise NotApplicable("Dv != D")
    problems = []
    for p in t.problems_with_d_lse:
        assert p.d_out is not None
        problems.append(copied(p, v=p.k, d_out=torch.zeros_like(p.d_out)))
    for i, (p, x) in enumerate(zip(problems, t.call(problems), strict=True)):
        assert p.d_lse is not None
        bound, factor = t.bounds_of(p), p.factor * p.d_lse.double()[..., None]
        limit = bound["dq"] + factor.abs() * bound["out"]
        t.near("dq", x["dq"], factor * x["out"].double(), limit, t.about(i))
