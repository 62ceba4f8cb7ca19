"""What a correct kernel may return instead of the exact value: the error of every element.

The roundings of `budget` followed through the formulas of `oracle`, twice: as a hard bound and as a
standard deviation. Where a rounding acts in step on many elements it is no noise, and widens the
interval of legal alternatives instead:

    delta is taken from the rounded output; P and dS may be rounded at different places;
    tensor cores truncate their sums.

Where it acts in step and its size is not known, the squares of what it does to the sums are added instead:
the error of delta, and that of the P of equal scores (`_rows_in_step`).

What depends on the implementation, its output and where it rounds, comes after all that does not:
`given_score_gradients`, `dq` and `dk` after `score_gradients`, `exact_dq` and `exact_dk`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from .budget import (
    C_EXP,
    FLOAT32,
    FLUSHED,
    TF32,
    A,
    Array,
    Dtype,
    Rounding,
    flip_variance,
    sum_bound,
    sum_sigma,
    truncation,
)

SAME = 1e-12
"""Relative difference of float64 numbers that are equal but for the order of their sums."""


class Block(SimpleNamespace):
    """A rectangle of S, R rows by C columns, for N KV heads, and everything computed about it.

    From the oracle, (N, R, C) unless said:
        q (N, R, D), k (N, C, D), v (N, C, Dv), d_out (N, R, Dv), d_lse (N, R), out_given (N, R, Dv)
        visible (R, C); S; P; dP; pull = dP - delta + dlse; dS; n_rows, n_keys of the whole problem
        row: statistics of its rows (N, R): live (R,), one_key (R,), m, l, lse, out (N, R, Dv), delta, deltas
        tainted, tainted_lse (N, 1), sees_nan, sees_bad_value (N, R): non-finite values, see the oracle
    From the error model: S_sigma, S_bound, h, rel_sigma, p_sigma, dS_variance, ... as named there.
    """


@dataclass
class Estimate:
    """One tensor: its exact value and what a correct implementation may return instead.

    All arrays are float64 in the shape of the tensor unless said.

    Attributes:
        value: the exact value.
        bound: hard bound on |x - value| of a correct result x.
        sigma: standard deviation of the rounding error of a correct result.
        low, high: the legal alternatives, (hypotheses, *shape): for each hypothesis an interval, about
            whose ends the error is noise. More than one hypothesis only for dq and dk, when the
            implementation's own output is known: delta from the exact or from the given output.
        sigma_emulation: the same against an emulation that rounds P and dS where the kernel does.
        drift_low, drift_high: how far below and above such an emulation, which sums to nearest, the
            truncation of tensor cores may move all elements in step; low <= 0 <= high.
        magnitude: sum of the magnitudes of the terms that make up the value.
        concentration: largest eigenvalue of the correlation of the errors within a row, divided by
            the row's length; shape of the tensor without its last dimension (lse: the full shape).
        powerless: rows in which nothing can be judged (same shape as concentration).
        nonfinite: rows that must not be finite (same shape as concentration).
    """

    value: Array
    bound: Array
    sigma: Array
    low: Array
    high: Array
    sigma_emulation: Array
    drift_low: Array
    drift_high: Array
    magnitude: Array
    concentration: Array
    powerless: NDArray[np.bool_]
    nonfinite: NDArray[np.bool_]


class ErrorModel:
    """The errors of a correct kernel of one dtype.

    Args:
        dtype: of the inputs and outputs.
        rounding: where the kernel rounds.
        scale: of the scores.
    """

    def __init__(self, dtype: Dtype, rounding: Rounding, scale: float) -> None:
        self.dtype, self.rounding, self.scale = dtype, rounding, scale
        # what P and dS are rounded to on their way into a product; None: not at all
        self.operand = dtype if dtype is not FLOAT32 else TF32 if rounding.products == "tf32" else None
        self.cut_off = 2 if self.operand is TF32 else 1  # half steps that a cut-off operand may lose

    # ------------------------------------------------------------------ forward

    def scores(self, t: Block) -> None:
        """Errors of S."""
        D = t.q.shape[2]
        t.S_terms = abs(self.scale) * (np.abs(t.q) @ _T(np.abs(t.k)))
        t.S_sigma = sum_sigma(D) * t.S_terms + 2 * A * np.abs(t.S)
        t.S_bound = A * (D + 2) * t.S_terms + 4 * A * np.abs(t.S)

    def softmax(self, t: Block) -> None:
        """Errors of P in whole rows: its rounding h, and what the scores and the exponential add."""
        r = t.row
        # P enters the product rounded and not yet normalised: e is at most 1, its step hangs on the
        # running maximum, hence u e and not h(e).
        e = t.P * r.l[..., None]
        u, eta = self._operand_rounding()
        t.h = np.where(t.visible, np.maximum(u * e, eta), 0.0) / r.l[..., None]
        t.P_operands = [place / r.l[..., None] for place in self._operands(e)]
        distance = np.where(t.visible, np.abs(t.S - r.m[..., None]), 0.0)
        t.rel_sigma = t.S_sigma + 2 * C_EXP + A * distance
        t.rel_bound = np.expm1(np.minimum(t.S_bound + 4 * C_EXP + 2 * A * distance, 40.0))
        r.powerless = ((t.S_bound > 1) & t.visible).any(-1) | t.tainted
        least = np.where(t.visible, t.S, np.inf).min(-1, initial=np.inf)
        r.equal_scores = r.live & (r.m - least <= SAME * (1 + np.abs(r.m)))

    def _operand_rounding(self) -> tuple[float, float]:
        """u and eta of P and dS on their way into a product."""
        return (0.0, 0.0) if self.operand is None else (self.operand.u, self.operand.eta)

    def _operand_step(self, x: Array) -> Array:
        return np.zeros_like(x) if self.operand is None else self.operand.half_step(x)

    def _operands(self, x: Array, error: Array | float = 0.0) -> list[Array]:
        """x as it may enter a product, where that acts in step.

        Cut off, what is exactly a number of the operand's dtype loses a whole step if it comes out a little
        low: the P of a row that sees one key is 1 or 1 - 2^-11.

        Args:
            x: exact.
            error: standard deviation of what is cut off.
        """
        if self.operand is None:
            return []
        places = [self.operand.rounded(x)]
        if self.operand is TF32:
            low = np.copysign(np.maximum(np.abs(x) - error, 0.0), x)
            places += [TF32.truncated(x), TF32.truncated(low)]
        return [np.where(np.isfinite(place), place, x) for place in places]

    def _beta(self, n: int) -> float:
        """Truncation of a sum of n products; IEEE float32 products do not go through tensor cores."""
        return 0.0 if self.operand is None else truncation(n)

    def out(self, t: Block) -> SimpleNamespace:
        r, n, d = t.row, t.n_keys, self.dtype
        out, V, V2 = r.out, np.abs(t.v), t.v**2
        rounded = t.h**2 / 3
        scores = (t.P * t.rel_sigma + FLUSHED) ** 2
        terms = t.P @ V
        # A rounded P moves out by v; an error of the score also moves l, hence by v - out.
        from_scores = scores @ V2 - 2 * out * (scores @ t.v) + out**2 * scores.sum(-1)[..., None]
        from_p = rounded @ V2
        if self.rounding.l_from_rounded_p:
            from_p += -2 * out * (rounded @ t.v) + out**2 * rounded.sum(-1)[..., None]
        summed = ((sum_sigma(n) + 4 * A) * terms) ** 2
        last = d.half_step(out) ** 2 / 3
        variance = np.maximum(from_p + from_scores, 0) + summed + last
        weight = self.cut_off * t.h + t.P * t.rel_bound + FLUSHED
        b0 = weight @ V + weight.sum(-1)[..., None] * np.abs(out) + sum_bound(n) * terms
        flips = flip_variance(t.h, t.P * t.rel_sigma + FLUSHED)
        alternatives = [out, *(P @ t.v for P in t.P_operands)]
        truncated = -self._beta(n) * out
        low, high = _hull(alternatives, truncated)
        r.out_bound = b0 + d.u * (np.abs(out) + b0) + d.eta
        return SimpleNamespace(
            value=out,
            bound=r.out_bound,
            sigma=np.sqrt(variance),
            low=low[None],
            high=high[None],
            sigma_emulation=np.sqrt(flips @ V2 + 2 * summed + last),
            **_drift(truncated),
            magnitude=terms,
            concentration=_concentration(rounded + scores, t.v, variance),
            powerless=r.powerless & ~(r.one_key & ~t.tainted),
            nonfinite=t.sees_nan | t.sees_bad_value,
        )

    def lse(self, t: Block) -> SimpleNamespace:
        r, n = t.row, t.n_keys
        lse = np.where(r.live, r.lse, 0.0)
        mean = (t.P * np.abs(t.S)).sum(-1)
        variance = (
            ((t.P * t.S_sigma) ** 2).sum(-1)
            + (2 * A * mean) ** 2
            + (A * lse) ** 2
            + (A * r.m) ** 2
            + (sum_sigma(n) + C_EXP) ** 2
        )
        bound = (t.P * t.S_bound).sum(-1) + A * (2 * np.abs(lse) + 2 * np.abs(r.m) + 2 * mean + n + 12)
        if self.rounding.l_from_rounded_p:
            variance += (t.h**2).sum(-1) / 3
            bound += self.cut_off * t.h.sum(-1)
        r.lse_sigma, r.lse_bound = np.sqrt(variance), bound
        truncated = np.where(r.live, -self._beta(t.q.shape[2]) * (t.P * t.S).sum(-1), 0.0)
        low, high = _hull([r.lse], truncated)
        return SimpleNamespace(
            value=r.lse,
            bound=bound,
            sigma=r.lse_sigma,
            low=low[None],
            high=high[None],
            sigma_emulation=r.lse_sigma * 2**0.5,
            **_drift(truncated),
            magnitude=mean + np.abs(lse) + np.abs(r.m) + 1,
            concentration=np.ones_like(lse),
            powerless=((t.S_bound > 1) & t.visible).any(-1) | t.tainted_lse,
            nonfinite=t.sees_nan,
        )

    # ------------------------------------------------------------------ backward

    def deltas(self, t: Block) -> None:
        """Errors of delta in whole rows."""
        r, Dv = t.row, t.v.shape[2]
        r.delta_terms = (np.abs(t.d_out) * np.abs(r.out)).sum(-1)
        rounding = A * (np.abs(r.delta) + np.abs(t.d_lse))
        # taken from out, delta has the errors of P if that is given; taken from P and dP, here
        apart = np.where(t.visible, t.dP - r.delta[..., None], 0.0)
        from_p = np.sqrt(((t.P * t.rel_sigma * apart) ** 2).sum(-1))
        r.delta_sigma = sum_sigma(Dv) * r.delta_terms + rounding + from_p
        from_out = (np.abs(t.d_out) * r.out_bound).sum(-1)
        r.delta_bound = sum_bound(Dv) * r.delta_terms + from_out + rounding

    def score_gradients(self, t: Block) -> None:
        """Errors of dS as far as they do not depend on the given output."""
        r, Dv = t.row, t.v.shape[2]
        lse = np.where(r.live, r.lse, 0.0)
        dP_terms = np.abs(t.d_out) @ _T(np.abs(t.v))
        # errors of P, relative
        size = np.abs(t.S) + np.abs(lse)[..., None]
        t.p_sigma = t.S_sigma + C_EXP + 2 * A * size + r.lse_sigma[..., None]
        exponent = t.S_bound + 4 * C_EXP + 4 * A * size + r.lse_bound[..., None]
        t.p_bound = np.expm1(np.minimum(exponent, 40.0))
        t.hP = np.where(t.visible, self._operand_step(t.P), 0.0)
        # errors of dP - delta + dlse, in units of dS
        small = A * (np.abs(t.dP) + (np.abs(r.delta) + np.abs(t.d_lse))[..., None])
        t.flushed = FLUSHED * (dP_terms + r.delta_terms[..., None])
        t.pull_variance = (t.P * (sum_sigma(Dv) * dP_terms + small) + t.flushed) ** 2
        t.pull_bound = (
            t.P * (1 + t.p_bound) * (sum_bound(Dv) * dP_terms + r.delta_bound[..., None] + 2 * small)
        )
        t.dS_terms = t.P * (dP_terms + (r.delta_terms + np.abs(t.d_lse))[..., None])
        # the tensor core's truncation of dP moves all of dS in step
        t.dS_truncation = -self._beta(Dv) * t.P * t.dP
        t.dS_error = np.hypot(t.p_sigma * t.dS, np.sqrt(t.pull_variance))
        t.exact_alternatives = self._dS_alternatives(t.dS, t.dS_error)
        t.in_step = self._rows_in_step(t)

    def _rows_in_step(self, t: Block) -> list[tuple[int, NDArray[np.intp]]]:
        """Rows whose P is one and the same number, with one and the same error: (head, rows).

        The scores of such a row are equal, and its lse is that of the others. Only in float32: in 16 bit
        what P is off by vanishes in its own rounding, which `alternatives` know.
        """
        r = t.row
        if self.dtype is not FLOAT32 or not r.equal_scores.any():
            return []
        found = []
        for n in range(len(r.equal_scores)):
            rows = np.flatnonzero(r.equal_scores[n])
            alike = np.round(r.lse[n, rows] / SAME).astype(np.int64)
            _, group = np.unique(alike, return_inverse=True)
            found += [(n, rows[group == g]) for g in range(group.max(initial=-1) + 1)]
        return found

    def given_score_gradients(self, t: Block) -> None:
        """Errors of dS, and its legal roundings under each hypothesis of delta."""
        r, scale = t.row, self.scale
        pulls = [t.dP - (delta - t.d_lse)[..., None] for delta in r.deltas[1:]]
        given = [t.P * pull for pull in pulls]
        # errors of dS, absolute; of the larger dS where the given delta makes one: on a one-hot row the
        # exact dS is nearly 0, that from a rounded output is not, and is rounded as what it is
        t.size = np.abs(t.dS)
        for dS in given:
            t.size = np.maximum(t.size, np.abs(dS))
        t.h_dS = np.where(t.visible, self._operand_step(t.size), 0.0)
        after = self._operand_step(scale * t.size) / abs(scale) if scale else 0 * t.dS
        after = np.where(t.visible, after, 0.0)
        before_rounding = (t.p_sigma * t.size) ** 2 + t.pull_variance
        t.dS_variance = np.maximum(t.h_dS, after) ** 2 / 3 + before_rounding
        t.dS_bound = self.cut_off * (t.h_dS + after) + t.p_bound * t.size + t.flushed + t.pull_bound
        if self.rounding.p_rounded_before_ds:
            t.dS_variance += (t.hP * t.pull) ** 2 / 3
            t.dS_bound += self.cut_off * t.hP * np.abs(t.pull)
        t.dS_flips = flip_variance(t.h_dS, np.sqrt(before_rounding), t.dS_truncation)
        # fp16: beyond this a rounded dS is infinite
        reach = max(1.0, abs(scale)) * (t.size + t.dS_bound)
        t.overflows = reach >= self.dtype.overflow
        t.given_alternatives = [self._dS_alternatives(dS, t.dS_error) for dS in given]
        t.p_first = [[], *([] for _ in given)]  # what rounding P before dS adds to each hypothesis
        if self.rounding.p_rounded_before_ds:
            for P in self._operands(t.P, t.P * t.p_sigma):
                for added, pull in zip(t.p_first, [t.pull, *pulls], strict=True):
                    added.append(P * pull)

    def _dS_alternatives(self, dS: Array, error: Array) -> list[Array]:
        places = [dS, *self._operands(dS, error)]
        if self.scale:
            scaled = self._operands(self.scale * dS, abs(self.scale) * error)
            places += [place / self.scale for place in scaled]
        return places

    def exact_dq(self, t: Block) -> None:
        """What of dq's errors does not depend on the given output."""
        x = t.of_dq = SimpleNamespace(K=np.abs(t.k), K2=t.k**2)
        x.common = (t.row.delta_sigma[..., None] * (t.P @ t.k)) ** 2  # the error of delta, in step
        x.truncated = self.scale * (t.dS_truncation @ t.k), -self._beta(t.n_keys) * t.dq
        x.places = [self.scale * (dS @ t.k) for dS in t.exact_alternatives]
        x.magnitude = abs(self.scale) * (t.dS_terms @ x.K)

    def dq(self, t: Block) -> SimpleNamespace:
        r, n, scale, d = t.row, t.n_keys, self.scale, self.dtype
        x, dq = t.of_dq, t.dq
        terms = t.size @ x.K
        summed = (sum_sigma(n) * terms) ** 2
        from_lse = (r.lse_sigma[..., None] * dq) ** 2
        for head, rows in t.in_step:
            from_lse[head, rows] += (t.p_sigma[head, rows].max(-1, keepdims=True) * dq[head, rows]) ** 2
        last = d.half_step(dq) ** 2 / 3
        variance = scale**2 * (t.dS_variance @ x.K2 + x.common + summed) + from_lse + last
        b0 = abs(scale) * (t.dS_bound @ x.K + sum_bound(n) * ((t.size + t.dS_bound) @ x.K))
        b0 += 2 * A * np.abs(dq)
        sides = self._sides(t, x, lambda dS: scale * (dS @ t.k))
        return SimpleNamespace(
            value=dq,
            bound=b0 + d.u * (np.abs(dq) + b0) + d.eta,
            sigma=np.sqrt(variance),
            low=np.stack([low for low, _ in sides]),
            high=np.stack([high for _, high in sides]),
            sigma_emulation=np.sqrt(
                scale**2 * (t.dS_flips @ x.K2 + 2 * x.common + 2 * summed) + 2 * from_lse + last
            ),
            **_drift(*x.truncated),
            magnitude=x.magnitude,
            concentration=_concentration(scale**2 * t.dS_variance, t.k, variance),
            powerless=r.powerless | t.overflows.any(-1),
            nonfinite=np.zeros_like(r.powerless),
        )

    def _sides(
        self, t: Block, x: SimpleNamespace, product: Callable[[Array], Array]
    ) -> list[tuple[Array, Array]]:
        """The interval of a gradient of the scores under each hypothesis of delta."""
        places = [x.places, *([product(dS) for dS in dSs] for dSs in t.given_alternatives)]
        return [
            _hull([*of_delta, *(product(dS) for dS in added)], *x.truncated)
            for of_delta, added in zip(places, t.p_first, strict=True)
        ]

    def exact_dk(self, t: Block) -> None:
        """What of dk's errors does not depend on the given output."""
        x = t.of_dk = SimpleNamespace(Q=np.abs(t.q), Q2=t.q**2)
        x.common = (t.P * t.row.delta_sigma[..., None]) ** 2
        x.by_head = self._by_head(t, self.scale * t.dS, t.q)
        x.truncated = self.scale * (_T(t.dS_truncation) @ t.q), -self._beta(t.n_rows) * t.dk, x.by_head.shift
        x.places = [self.scale * (_T(dS) @ t.q) for dS in t.exact_alternatives]
        x.magnitude = abs(self.scale) * (_T(t.dS_terms) @ x.Q)

    def dk(self, t: Block) -> SimpleNamespace:
        n, scale, d = t.n_rows, self.scale, self.dtype
        x, dk = t.of_dk, t.dk
        terms = _T(t.size) @ x.Q
        per_row = _T(t.dS_variance + x.common)
        summed = (sum_sigma(n) * terms) ** 2
        for head, rows in t.in_step:
            summed[head] += (_T((t.p_sigma * t.dS)[head, rows]) @ t.q[head, rows]) ** 2
        last = d.half_step(dk) ** 2 / 3 + x.by_head.variance
        variance = scale**2 * (per_row @ x.Q2 + summed) + last
        b0 = abs(scale) * (
            _T(t.dS_bound) @ x.Q + sum_bound(n) * (_T(t.size + t.dS_bound) @ x.Q)
        ) + 2 * A * np.abs(dk)
        b0 = x.by_head.bound(b0)
        sides = self._sides(t, x, lambda dS: scale * (_T(dS) @ t.q))
        return SimpleNamespace(
            value=dk,
            bound=b0 + d.u * (np.abs(dk) + b0) + d.eta,
            sigma=np.sqrt(variance),
            low=np.stack([low for low, _ in sides]),
            high=np.stack([high for _, high in sides]),
            sigma_emulation=np.sqrt(
                scale**2 * ((_T(t.dS_flips) + 2 * _T(x.common)) @ x.Q2 + 2 * summed) + last
            ),
            **_drift(*x.truncated),
            magnitude=x.magnitude,
            concentration=_concentration(scale**2 * per_row, t.q, variance),
            powerless=self._powerless_keys(t, t.overflows),
            nonfinite=np.zeros(t.k.shape[:2], bool),
        )

    def dv(self, t: Block) -> SimpleNamespace:
        n, d = t.n_rows, self.dtype
        dO, dO2 = np.abs(t.d_out), t.d_out**2
        dv = t.dv
        terms = _T(t.P) @ dO
        per_row = _T(t.hP**2 / 3 + (t.P * t.p_sigma + FLUSHED) ** 2)
        summed = (sum_sigma(n) * terms) ** 2
        for head, rows in t.in_step:
            summed[head] += (_T((t.p_sigma * t.P)[head, rows]) @ t.d_out[head, rows]) ** 2
        by_head = self._by_head(t, t.P, t.d_out)
        last = d.half_step(dv) ** 2 / 3 + by_head.variance
        variance = per_row @ dO2 + summed + last
        error = self.cut_off * t.hP + t.P * t.p_bound + FLUSHED
        b0 = by_head.bound(_T(error) @ dO + sum_bound(n) * (_T(t.P + error) @ dO))
        alternatives = [dv, *(_T(P) @ t.d_out for P in self._operands(t.P, t.P * t.p_sigma))]
        truncated = -self._beta(n) * dv, by_head.shift
        low, high = _hull(alternatives, *truncated)
        flips = flip_variance(t.hP, t.P * t.p_sigma + FLUSHED)
        return SimpleNamespace(
            value=dv,
            bound=b0 + d.u * (np.abs(dv) + b0) + d.eta,
            sigma=np.sqrt(variance),
            low=low[None],
            high=high[None],
            sigma_emulation=np.sqrt(_T(flips) @ dO2 + 2 * summed + last),
            **_drift(*truncated),
            magnitude=terms,
            concentration=_concentration(per_row, t.d_out, variance),
            powerless=self._powerless_keys(t, np.zeros(t.P.shape, bool)),
            nonfinite=np.zeros(t.k.shape[:2], bool),
        )

    def _by_head(self, t: Block, weights: Array, rows: Array) -> _ByHead:
        """What rounding the sums of single query heads adds to their sum (N, C, D), if that is done."""
        N, R, C = weights.shape
        if not self.rounding.heads_rounded_before_group_sum or t.group == 1 or R == 0:
            return _ByHead(self.dtype, np.zeros((N, 0, C, rows.shape[2])))
        shape = (N, t.group, R // t.group, -1)
        return _ByHead(self.dtype, _T(weights.reshape(shape)) @ rows.reshape(shape))

    def _powerless_keys(self, t: Block, overflows: NDArray[np.bool_]) -> NDArray:
        """Keys to which a row without power adds."""
        return ((t.row.powerless[..., None] & t.visible) | overflows).any(1) | t.tainted


class _ByHead:
    """The sums of single query heads (N, G, C, D), each rounded before they are added up; G = 0: not so.

    Attributes:
        shift: (N, C, D) by how much this moves the sum, if all that is rounded is exact.
        variance: (N, C, D) of the errors.
    """

    def __init__(self, dtype: Dtype, sums: Array) -> None:
        self.dtype, self.sums = dtype, sums
        rounded = dtype.rounded(sums)
        self.shift = (np.where(np.isfinite(rounded), rounded, sums) - sums).sum(1)
        self.variance = (dtype.half_step(sums) ** 2 / 3).sum(1)

    def bound(self, before: Array) -> Array:
        """Hard bound of the sum's error from that of the unrounded sum; each head's is at most that."""
        errors = self.dtype.u * (np.abs(self.sums) + before[:, None]) + self.dtype.eta
        return before + errors.sum(1)


def _T(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def _hull(alternatives: list[Array], *shifts: Array) -> tuple[Array, Array]:
    """The interval over the alternatives, each of which may further move by any part of the shifts."""
    low = high = alternatives[0]
    for x in alternatives[1:]:
        low, high = np.minimum(low, x), np.maximum(high, x)
    for shift in shifts:
        low, high = low + np.minimum(shift, 0), high + np.maximum(shift, 0)
    return low, high


def _drift(*shifts: Array) -> dict[str, Array]:
    """The fields of an `Estimate` that say how far the shifts may move an element."""
    low, high = _hull([np.zeros_like(shifts[0])], *shifts)
    return {"drift_low": low, "drift_high": high}


def _concentration(weights: Array, vectors: Array, variance: Array) -> Array:
    """Largest eigenvalue of the correlation of the errors along a row, divided by its length.

    The errors of row r are sum_j sqrt(weights_rj) eps_j vectors_j plus independent ones that make up
    the rest of the variance. Three power iterations from the heaviest vector; at least 1 / length,
    which is what independent errors have.

    Args:
        weights: (N, R, C) variances of the common factors eps_j.
        vectors: (N, C, D).
        variance: (N, R, D) total.
    """
    N, R, C = weights.shape
    D = vectors.shape[2]
    if min(N, R, C, D) == 0:
        return np.full((N, R), 1.0 if D == 0 else 1 / D)
    sigma = np.sqrt(variance)
    rest = np.maximum(variance - weights @ vectors**2, 0) / variance
    heaviest = weights.argmax(-1)
    x = np.take_along_axis(vectors, heaviest[..., None], 1) / sigma + 1e-3
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    for _ in range(3):
        y = (weights * ((x / sigma) @ _T(vectors))) @ vectors / sigma + rest * x
        eigenvalue = np.linalg.norm(y, axis=-1)
        x = y / np.maximum(eigenvalue, 1e-300)[..., None]
    return np.clip(eigenvalue / D, 1 / D, 1.0)
