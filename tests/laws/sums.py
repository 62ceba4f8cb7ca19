"""What gradients add up to, in each batch entry and KV head.

Errors add up as well: a sum's bound is the sum of its terms' bounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..magnitudes import Bounds, Problem
from .registry import law, with_backward
from .trial import NotClaimed, Results, Trial


def _backward(t: Trial) -> Iterator[tuple[Problem, Results, Bounds, str]]:
    """Every problem of the case with its results, in float64, and bounds."""
    if not t.claims.backward or not t.case.backward:
        raise NotClaimed("a backward")
    for i, (p, x, bound) in enumerate(zip(t.problems, t.base, t.bounds, strict=True)):
        yield p, {name: y.double() for name, y in x.items()}, bound, t.about(i)


def _by_group(p: Problem, x: Tensor) -> Tensor:
    """(B, Hq, Sq, ...) summed over rows and the heads of a group: (B, Hkv, ...)."""
    return p.per_group(x).sum((2, 3))


@law(with_backward)
def sum_of_dv(t: Trial) -> None:
    """The sum of dv over the keys is that of dO over the live queries: the rows of P add up to 1."""
    for p, x, bound, note in _backward(t):
        assert p.d_out is not None
        expected = _by_group(p, p.d_out.double() * p.live[:, None])
        t.near("dv", x["dv"].sum(2), expected, bound["dv"].double().sum(2), note + "sum over keys: ")


@law(with_backward)
def sum_of_dk(t: Trial) -> None:
    """The sum of dk over the keys is scale times the sum of dlse q over the queries.

    The rows of dS add up to dlse.
    """
    for p, x, bound, note in _backward(t):
        q = p.q.double()
        d_lse = torch.zeros_like(q[..., 0]) if p.d_lse is None else p.d_lse.double() * p.live
        expected = p.factor * _by_group(p, d_lse[..., None] * q)
        t.near("dk", x["dk"].sum(2), expected, bound["dk"].double().sum(2), note + "sum over keys: ")


@law(with_backward)
def dq_q_is_dk_k(t: Trial) -> None:
    """The sum of dq·q over the queries is that of dk·k over the keys: both are that of dS s."""
    for p, x, bound, note in _backward(t):
        q, k = p.q.double(), p.k.double()
        of_q = _by_group(p, (x["dq"] * q).sum(-1))
        of_k = (x["dk"] * k).sum((2, 3))
        limit = _by_group(p, _product(bound["dq"], q).sum(-1)) + _product(bound["dk"], k).sum((2, 3))
        t.near("dq", of_q, of_k, limit, note + "dq·q and dk·k: ")


@law(with_backward)
def d_out_out_is_dv_v(t: Trial) -> None:
    """The sum of dO·out over the queries is that of dv·v over the keys: both are that of P dP."""
    for p, x, bound, note in _backward(t):
        assert p.d_out is not None
        dO, v = p.d_out.double(), p.v.double()
        of_rows = _by_group(p, (dO * x["out"]).sum(-1))
        of_keys = (x["dv"] * v).sum((2, 3))
        limit = _by_group(p, _product(bound["out"], dO).sum(-1)) + _product(bound["dv"], v).sum((2, 3))
        t.near("dv", of_keys, of_rows, limit, note + "dv·v and dO·out: ")


def _product(bound: Tensor, x: Tensor) -> Tensor:
    """The error of a product; of one with 0 none, whatever the bound."""
    return torch.where(x == 0, 0.0, bound.double() * x.abs())
