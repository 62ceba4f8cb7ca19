"""What may be permuted, flipped, scaled or moved in memory, and what then changes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..cases import LAYOUTS, Case
from ..magnitudes import Problem
from .registry import law, of_two, with_backward
from .trial import GRADIENTS, NotApplicable, NotClaimed, Trial, copied

FACTOR = 2.0
"""Of the gradients that flow in; a power of two."""

DEEPEST = -40.0
"""Smallest s - lse at which no product on the way to a gradient comes near float32's subnormal numbers."""


def _taken(p: Problem, dim: int, order: Tensor, names: str) -> Problem:
    """Some tensors of a problem, reordered along a dimension."""
    chosen = {name: getattr(p, name) for name in names.split()}
    return copied(p, **{name: t.index_select(dim, order) for name, t in chosen.items() if t is not None})


def _not_causal_square(case: Case) -> Case:
    """Two keys or more that all queries see."""
    return replace(case, causal=False)


@law(_not_causal_square)
def permuted_keys(t: Trial) -> None:
    """Permuting keys that all queries see, with V, leaves out, lse and dq and permutes dk and dv.

    Causal: the keys j <= Sk - Sq. To rounding: the sums run in another order.
    """
    chosen = [i for i, p in enumerate(t.problems) if _seen_by_all(p) >= 2]
    orders = {}
    for i in chosen:
        p = t.problems[i]
        n = _seen_by_all(p)
        orders[i] = torch.cat((t.order(1, n), torch.arange(n, p.Sk, device=t.device)))
    found = t.call([_taken(t.problems[i], 2, orders[i], "k v") for i in chosen])
    for i, x in zip(chosen, found, strict=True):
        base, bound, note = t.base[i], t.bounds[i], t.about(i)
        for name, y in x.items():
            expected, limit = base[name], 2 * bound[name]
            if name in ("dk", "dv"):
                expected, limit = expected[:, :, orders[i]], limit[:, :, orders[i]]
            t.near(name, y, expected, limit, note)


def _seen_by_all(p: Problem) -> int:
    """How many keys, from the first, every query sees."""
    return min(p.Sk, max(0, p.diagonal + 1)) if p.causal else p.Sk


@law(of_two)
def permuted_entries(t: Trial) -> None:
    """Permuting batch entries, or the sequences of a ragged batch, permutes all results.

    Bitwise where claimed: each is computed in the same order wherever it stands.
    """
    if t.case.ragged:
        order = t.order(2, len(t.problems)).tolist()
        if len(order) < 2:
            raise NotApplicable("one sequence")
        for i, x in zip(order, t.call([t.problems[i] for i in order]), strict=True):
            t.as_the_case(i, x, elsewhere=True)
        return
    (p,) = t.problems
    if len(p.q) < 2:
        raise NotApplicable("one batch entry")
    moved = t.order(2, len(p.q))
    (x,) = t.call([_taken(p, 0, moved, "q k v d_out d_lse")])
    t.as_the_case(0, x, lambda _, y: y[moved], elsewhere=True)


@law(lambda case: case if case.heads_kv > 1 else replace(case, heads_q=2 * case.heads_q, heads_kv=2))
def permuted_kv_heads(t: Trial) -> None:
    """Permuting KV heads together with their groups of query heads permutes all results.

    Bitwise where claimed.
    """
    Hkv, G = t.case.heads_kv, t.case.heads_q // t.case.heads_kv
    if Hkv < 2:
        raise NotApplicable("one KV head")
    of_k = t.order(3, Hkv)
    of_q = (of_k[:, None] * G + torch.arange(G, device=t.device)).flatten()
    moved = [_taken(_taken(p, 1, of_k, "k v"), 1, of_q, "q d_out d_lse") for p in t.problems]
    for i, x in enumerate(t.call(moved)):
        t.as_the_case(i, x, lambda name, y: y[:, of_k if name in ("dk", "dv") else of_q], elsewhere=True)


@law(lambda case: case if case.heads_q > case.heads_kv else replace(case, heads_q=2 * case.heads_kv))
def permuted_heads_of_a_group(t: Trial) -> None:
    """Permuting the query heads of a group permutes out, lse and dq and leaves dk and dv.

    Bitwise where claimed, but for dk and dv, whose sums run in another order.
    """
    Hkv, G = t.case.heads_kv, t.case.heads_q // t.case.heads_kv
    if G < 2:
        raise NotApplicable("groups of one query head")
    order = (torch.arange(Hkv, device=t.device)[:, None] * G + t.order(4, G)).flatten()
    for i, x in enumerate(t.call([_taken(p, 1, order, "q d_out d_lse") for p in t.problems])):
        of_rows = {name: y for name, y in x.items() if name not in ("dk", "dv")}
        t.as_the_case(i, of_rows, lambda _, y: y[:, order], elsewhere=True)
        for name in x.keys() - of_rows.keys():
            t.near(name, x[name], t.base[i][name], 2 * t.bounds[i][name], t.about(i))


@law()
def flipped_coordinate_of_q_and_k(t: Trial) -> None:
    """Flipping the sign of one coordinate of q and k flips it in dq and dk and leaves everything else.

    Bitwise where claimed: all products and sums are the same.
    """
    _flipped(t, "q k", "dq dk", t.case.dim)


@law(with_backward)
def flipped_coordinate_of_v(t: Trial) -> None:
    """Flipping the sign of one coordinate of v and dO flips it in out and dv and leaves everything else.

    Bitwise where claimed.
    """
    _flipped(t, "v d_out", "out dv", t.case.dim_v)


def _flipped(t: Trial, inputs: str, results: str, dim: int) -> None:
    chosen = int(t.random(5, 1, dim))

    def flip(x: Tensor) -> Tensor:
        x = x.clone()
        x[..., chosen] = -x[..., chosen]
        return x

    flipped = []
    for p in t.problems:
        given = {name: getattr(p, name) for name in inputs.split()}
        flipped.append(copied(p, **{name: flip(x) for name, x in given.items() if x is not None}))
    for i, x in enumerate(t.call(flipped)):
        back = {name: flip(y) if name in results.split() else y for name, y in x.items()}
        t.as_the_case(i, back)


@law(with_backward)
def scaled_gradients(t: Trial) -> None:
    """(dO, dlse) twice as large make dq, dk and dv twice as large.

    Bitwise where claimed and no intermediate value is subnormal: in float16 dS often is, and only a dv
    beyond the smallest normal number, which a subnormal one may round to, is compared bit for bit.
    """
    changed = []
    for p in t.problems:
        if p.d_out is None:
            raise NotClaimed("a backward")
        d_out, d_lse = FACTOR * p.d_out, None if p.d_lse is None else FACTOR * p.d_lse
        if not bool(d_out.isfinite().all()):
            raise NotApplicable("twice dO overflows")
        changed.append(copied(p, d_out=d_out, d_lse=d_lse))
    smallest = torch.finfo(t.dtype).tiny if t.dtype is torch.float16 else 1e-30
    for i, (p, x) in enumerate(zip(changed, t.call(changed), strict=True)):
        bound, scaled, note = t.bounds[i], t.bounds_of(p), t.about(i)
        for name in GRADIENTS:
            once, limit = t.base[i][name], FACTOR * bound[name] + scaled[name]
            t.near(name, x[name], FACTOR * once.double(), limit, note)
            exact = name == "dv" or (t.dtype is not torch.float16 and bound.deepest > DEEPEST)
            exact = exact and bound.deepest > 2 * DEEPEST
            if exact and t.claims.repeatable(name):
                normal = (once.abs() > smallest) & limit.isfinite()
                t.equal(name, x[name].double() * normal, FACTOR * once.double() * normal, note)


# ---------------------------------------------------------------- memory, neighbours, repetition


def _spread(case: Case) -> Case:
    names = [name for name in LAYOUTS if name != "bhsd"]
    return case if case.layout != "bhsd" else replace(case, layout=names[case.seed % len(names)])


@law(_spread)
def layouts(t: Trial) -> None:
    """Results do not depend on where the tensors lie: not on strides, offsets or what is beside them.

    Bitwise where claimed. In float32 dq and dk to rounding only: the sum delta = rowsum(dO out) may run in
    the order in which memory is read; in 16 bit the inputs are such that it is exact.
    """
    layout = t.case.layout
    contiguous = "bshd" if t.case.ragged else "bhsd"
    if layout == contiguous:
        raise NotApplicable("the layout is contiguous")
    if not t.claims.strided:
        raise NotClaimed("inputs that are not contiguous")
    problems = [_with_exact_delta(p, one_head=layout == "expanded") for p in t.problems]
    plain, found = t.call(problems), t.call(problems, layout=layout)
    for i, (p, x, expected) in enumerate(zip(problems, found, plain, strict=True)):
        bound = None if t.claims.invariant("out") and not t.claims.backward else t.bounds_of(p)
        for name, y in x.items():
            if bound is None or (t.claims.invariant(name) and not (
                name in ("dq", "dk") and t.dtype.itemsize > 2
            )):  # fmt: skip
                t.equal(name, y, expected[name], t.about(i))
            else:
                t.near(name, y, expected[name], 2 * bound[name], t.about(i))


def _with_exact_delta(p: Problem, one_head: bool) -> Problem:
    """v in [1/2, 1] and whole dO up to 8: out then has few bits, and delta is exact in float32.

    Args:
        p: a problem.
        one_head: k, v and dO are the first head's in all heads: expanded ones.
    """

    def of_one(x: Tensor) -> Tensor:
        return x[:, :1].expand(x.shape) if one_head else x

    d_out = None if p.d_out is None else of_one(p.d_out.round().clamp(-8, 8))
    return copied(p, k=of_one(p.k), v=of_one(p.v.abs().clamp(max=4) / 8 + 0.5), d_out=d_out)


@law(of_two)
def neighbours(t: Trial) -> None:
    """Results of a batch entry or sequence do not depend on the others: those may as well be NaN.

    Bitwise where claimed.
    """
    if t.case.ragged:
        if len(t.problems) < 2:
            raise NotApplicable("one sequence")
        kept = int(t.random(6, 1, len(t.problems)))
        others = [p if i == kept else _all_nan(p, slice(None)) for i, p in enumerate(t.problems)]
        t.as_the_case(kept, t.call(others)[kept])
        return
    (p,) = t.problems
    if len(p.q) < 2:
        raise NotApplicable("one batch entry")
    kept = int(t.random(6, 1, len(p.q)))
    rest = torch.tensor([i for i in range(len(p.q)) if i != kept], device=t.device)
    (x,) = t.call([_all_nan(p, rest)])
    t.as_the_case(0, {name: y[kept : kept + 1] for name, y in x.items()}, lambda _, y: y[kept : kept + 1])


def _all_nan(p: Problem, entries: slice | Tensor) -> Problem:
    filled = {name: x.clone() for name, x in vars(p).items() if isinstance(x, Tensor)}
    for x in filled.values():
        x[entries] = torch.nan
    return copied(p, **filled)


@law()
def repetition(t: Trial) -> None:
    """The same call again, after one with other values, gives the same results.

    Bitwise where claimed.
    """
    assert t.base  # the first call
    t.call([copied(p, q=p.q.flip(3), k=-p.k, v=p.v.flip(2)) for p in t.problems])
    for i, x in enumerate(t.call(t.problems)):
        t.as_the_case(i, x)
