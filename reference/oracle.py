"""Attention in NumPy float64, its gradients in closed form, and the rounding budget of every element.

    S_ij = scale q_i . k_j                      over the visible keys of row i
    P    = softmax_j(S),   out = P V,   lse_i = log sum_j exp(S_ij)

    dP   = dO V^T,   delta_i = dO_i . out_i
    dS   = P (dP - delta + dlse)
    dq   = scale dS K,   dk = scale dS^T q,   dv = P^T dO

(Dao et al., FlashAttention, 2022, section 2 and appendix B; the term dlse because gradients also flow
through lse.) Next to the exact value stands what a correct kernel may be off by: a hard bound, a
standard deviation sigma, and the interval of legal alternatives. `budget` names the roundings.

Shapes inside: the query heads that share a KV head are stacked as rows, so that every array is
(N, M, Sk) with N = B Hkv and M = Hq / Hkv * Sq; row r stands at position r mod Sq. Work goes by
rectangles of at most `BLOCK` elements, so that memory stays bounded: once by rows (out, lse, dq),
once by columns (dk, dv).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .budget import (
    C_EXP,
    DTYPES,
    FLOAT32,
    FLUSHED,
    A,
    Array,
    Dtype,
    Rounding,
    flip_variance,
    sum_bound,
    sum_sigma,
    truncation,
)

BLOCK = 2**19
"""Most elements of one rectangle of S; some thirty arrays of that size live at once."""

ALIGNMENTS = ("bottom-right", "top-left")


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
    magnitude: Array
    concentration: Array
    powerless: NDArray[np.bool_]
    nonfinite: NDArray[np.bool_]


@dataclass
class Result:
    """What `attention` returns; dq, dk, dv are None if no gradient was asked for.

    Attributes:
        out, lse, dq, dk, dv: see `Estimate`; out (B, Hq, Sq, Dv), lse (B, Hq, Sq), gradients as inputs.
        visible_keys: number of keys that each query row sees, int64 (B, Hq, Sq).
        score_terms: largest |scale| sum_d |q_id k_jd| of all scores: the size of what cancels in them.
        dtype: the dtype whose rounding is modelled.
    """

    out: Estimate
    lse: Estimate
    dq: Estimate | None
    dk: Estimate | None
    dv: Estimate | None
    visible_keys: NDArray[np.int64]
    score_terms: float
    dtype: Dtype


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    d_out: ArrayLike | None = None,
    d_lse: ArrayLike | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    dtype: str = "float32",
    alignment: str = "bottom-right",
    out_given: ArrayLike | None = None,
    rounding: Rounding | None = None,
) -> Result:
    """Exact attention with the rounding budget of a correct kernel.

    Args:
        q: (B, Hq, Sq, D), values already rounded to `dtype`; taken to float64.
        k: (B, Hkv, Sk, D); Hq is a multiple of Hkv, query head h reads KV head h // (Hq // Hkv).
        v: (B, Hkv, Sk, Dv).
        d_out: (B, Hq, Sq, Dv), gradient of out; zero if only d_lse is given.
        d_lse: (B, Hq, Sq), gradient of lse; zero if only d_out is given.
        causal: key j is visible to query i iff j <= i + Sk - Sq ("top-left": j <= i).
        scale: of the scores; D ** -0.5 if None. Any finite number.
        dtype: "float16", "bfloat16" or "float32": whose rounding the budget models.
        alignment: "bottom-right" or "top-left".
        out_given: (B, Hq, Sq, Dv), the implementation's own output, from which it takes delta.
        rounding: where the implementation rounds, if not where ours does.

    Returns:
        A `Result`.

    Raises:
        ValueError: if a shape does not fit or an option has none of its values; names it.
    """
    x = _Problem.of(q, k, v, d_out, d_lse, causal, scale, dtype, alignment, out_given, rounding)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
        return x.solve()


@dataclass
class _Problem:
    """The arguments, stacked by KV head, and the constants of the budget."""

    q: Array  # (N, M, D)
    k: Array  # (N, Sk, D)
    v: Array  # (N, Sk, Dv)
    d_out: Array | None  # (N, M, Dv)
    d_lse: Array | None  # (N, M)
    out_given: Array | None  # (N, M, Dv)
    scale: float
    last_key: NDArray[np.int64]  # (M,) the last key that a row may see; -1: none
    dtype: Dtype
    rounding: Rounding
    heads: tuple[int, int, int]  # B, Hq, Hkv
    tainted: NDArray[np.bool_] = field(init=False)  # (N,): a non-finite value in q, k, v

    @classmethod
    def of(cls, q, k, v, d_out, d_lse, causal, scale, dtype, alignment, out_given, rounding) -> _Problem:
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}; it may be one of {', '.join(DTYPES)}")
        if alignment not in ALIGNMENTS:
            raise ValueError(f"alignment is {alignment!r}; it may be one of {', '.join(ALIGNMENTS)}")
        q, k, v = (np.asarray(t, np.float64) for t in (q, k, v))
        for name, t in (("q", q), ("k", k), ("v", v)):
            if t.ndim != 4:
                raise ValueError(f"{name} has shape {t.shape}; it must have 4 dimensions")
        (B, Hq, Sq, D), (_, Hkv, Sk, _), Dv = q.shape, k.shape, v.shape[3]
        if Hkv == 0 or Hq % Hkv:
            raise ValueError(f"q has {Hq} heads and k has {Hkv}; Hq must be a multiple of Hkv")
        wants = {
            "k": (k, (B, Hkv, Sk, D)),
            "v": (v, (B, Hkv, Sk, Dv)),
            "d_out": (d_out, (B, Hq, Sq, Dv)),
            "d_lse": (d_lse, (B, Hq, Sq)),
            "out_given": (out_given, (B, Hq, Sq, Dv)),
        }
        for name, (t, shape) in wants.items():
            if t is not None and np.shape(t) != shape:
                raise ValueError(f"{name} has shape {np.shape(t)}; it must be {shape}")
        scale = D**-0.5 if scale is None else float(scale)
        if not np.isfinite(scale):
            raise ValueError(f"scale is {scale}; it must be finite")

        N, M = B * Hkv, Hq // Hkv * Sq

        def stacked(t: ArrayLike | None, rows: int) -> Array | None:
            if t is None:
                return None
            t = np.asarray(t, np.float64)
            return t.reshape((N, rows, *t.shape[3:]))

        gradient = d_out is not None or d_lse is not None
        if gradient:
            d_out = np.zeros((B, Hq, Sq, Dv)) if d_out is None else d_out
            d_lse = np.zeros((B, Hq, Sq)) if d_lse is None else d_lse
        position = np.arange(M) % max(Sq, 1)
        shift = Sk - Sq if alignment == "bottom-right" else 0
        last_key = np.minimum(position + shift, Sk - 1) if causal else np.full(M, Sk - 1)
        x = cls(
            q=q.reshape(N, M, D),
            k=k.reshape(N, Sk, D),
            v=v.reshape(N, Sk, Dv),
            d_out=stacked(d_out, M),
            d_lse=stacked(d_lse, M),
            out_given=stacked(out_given, M),
            scale=scale,
            last_key=np.maximum(last_key, -1),
            dtype=DTYPES[dtype],
            rounding=rounding or Rounding(),
            heads=(B, Hq, Hkv),
        )
        x._set_aside_nonfinite_values()
        return x

    def _set_aside_nonfinite_values(self) -> None:
        """Zero them, and remember where they were: their rows are not judged by value.

        A row that sees a NaN must not be finite. All else in that KV head is left open: inside a tile
        the value may also reach rows that do not see it (0 inf), and exp(-inf) may hide an infinity.
        """
        self.nan_query = np.isnan(self.q).any(-1)  # (N, M)
        self.bad_key = np.isnan(self.k).any(-1)  # (N, Sk)
        self.bad_value = ~np.all(np.isfinite(self.v), axis=-1)  # (N, Sk)
        bad_qk = ~np.all(np.isfinite(self.q), axis=(1, 2)) | ~np.all(np.isfinite(self.k), axis=(1, 2))
        self.tainted_lse = bad_qk
        self.tainted = bad_qk | np.any(self.bad_value, axis=1)
        if self.tainted.any():
            self.q, self.k, self.v = (np.where(np.isfinite(t), t, 0.0) for t in (self.q, self.k, self.v))

    # ------------------------------------------------------------------ the whole, by rectangles

    def solve(self) -> Result:
        N, M, _ = self.q.shape
        Sk = self.k.shape[1]
        step = max(1, BLOCK // max(1, M * Sk))
        parts = [self._solve_heads(slice(n, n + step)) for n in range(0, N, step)]
        if not parts:
            parts = [self._solve_heads(slice(0, 0))]
        B, Hq, Hkv = self.heads
        Sq = M * Hkv // Hq
        joined: dict[str, Any] = {}
        for name in ("out", "lse", "dq", "dk", "dv"):
            pieces = [part[name] for part in parts if name in part]
            heads = (B, Hkv, Sk) if name in ("dk", "dv") else (B, Hq, Sq)
            joined[name] = _joined(pieces, heads, scalar=name == "lse") if pieces else None
        visible_keys = np.broadcast_to(self.last_key + 1, (N, M)).reshape(B, Hq, Sq)
        score_terms = max(part["score_terms"] for part in parts)
        return Result(**joined, visible_keys=visible_keys, score_terms=score_terms, dtype=self.dtype)

    def _solve_heads(self, heads: slice) -> dict[str, Any]:
        g = SimpleNamespace(
            **{
                name: None if getattr(self, name) is None else getattr(self, name)[heads]
                for name in ("q", "k", "v", "d_out", "d_lse", "out_given", "nan_query", "bad_key",
                             "bad_value", "tainted", "tainted_lse")
            }
        )  # fmt: skip
        M, Sk = g.q.shape[1], g.k.shape[1]
        rows = max(1, min(M, BLOCK // max(1, Sk)))
        columns = max(1, min(Sk, BLOCK // max(1, M)))
        found: dict[str, list[SimpleNamespace]] = {}
        whole = None
        starts = range(0, M, rows) if M else (0,)
        statistics = []
        score_terms = 0.0
        for i in starts:
            block = self._scores(g, slice(i, i + rows), slice(None))
            score_terms = max(score_terms, float(block.S_terms.max(initial=0.0)))
            self._softmax(block)
            found.setdefault("out", []).append(self._out(block))
            found.setdefault("lse", []).append(self._lse(block))
            if g.d_out is not None:
                self._row_gradients(block)
                self._score_gradients(block)
                found.setdefault("dq", []).append(self._dq(block))
                statistics.append(block.row)
            whole = block if rows >= M else None
        if g.d_out is not None:
            row = _stacked_rows(statistics)
            for j in range(0, Sk, columns) if Sk else (0,):
                if whole is None:  # the rectangle of the row pass is not this one
                    block = self._scores(g, slice(None), slice(j, j + columns))
                    block.row = row
                    self._probabilities(block)
                    self._score_gradients(block)
                else:
                    block = whole
                found.setdefault("dk", []).append(self._dk(block))
                found.setdefault("dv", []).append(self._dv(block))
                if whole is not None:
                    break
        tensors = {name: _stacked_rows(pieces) for name, pieces in found.items()}
        return {**tensors, "score_terms": score_terms}

    # ------------------------------------------------------------------ forward

    def _scores(self, g: SimpleNamespace, rows: slice, columns: slice) -> SimpleNamespace:
        """S of a rectangle, which keys are visible in it, and the error of S."""
        q, k, D = g.q[:, rows], g.k[:, columns], g.q.shape[2]
        key = np.arange(g.k.shape[1])[columns]
        t = SimpleNamespace(q=q, k=k, v=g.v[:, columns], row=SimpleNamespace())
        t.visible = key[None, :] <= self.last_key[rows, None]  # (R, C)
        t.S = self.scale * (q @ _T(k))
        t.S_terms = abs(self.scale) * (np.abs(q) @ _T(np.abs(k)))
        t.S_sigma = sum_sigma(D) * t.S_terms + 2 * A * np.abs(t.S)
        t.S_bound = A * (D + 2) * t.S_terms + 4 * A * np.abs(t.S)
        t.n_keys, t.n_rows, t.D = g.k.shape[1], g.q.shape[1], D
        if g.d_out is not None:
            t.d_out, t.d_lse = g.d_out[:, rows], g.d_lse[:, rows]
            t.out_given = None if g.out_given is None else g.out_given[:, rows]
        t.tainted, t.tainted_lse = g.tainted[:, None], g.tainted_lse[:, None]
        t.sees_nan = g.nan_query[:, rows] & (self.last_key[rows] >= 0)
        t.sees_nan = t.sees_nan | np.any(g.bad_key[:, None, columns] & t.visible, axis=-1)
        t.sees_bad_value = (g.bad_value[:, None, columns] & t.visible).any(-1)
        return t

    def _softmax(self, t: SimpleNamespace) -> None:
        """m, l, P, out and lse of whole rows; dead rows are 0 and -inf."""
        r = t.row
        r.live = t.visible.any(-1)  # (R,)
        S = np.where(t.visible, t.S, -np.inf)
        m = S.max(-1, keepdims=True, initial=-np.inf)
        r.m = np.where(np.isneginf(m), 0.0, m)[..., 0]  # (N, R)
        e = np.exp(S - r.m[..., None])  # 0 where not visible
        total = e.sum(-1)
        r.l = np.where(total == 0, 1.0, total)
        r.lse = np.where(r.live, r.m + np.log(r.l), -np.inf)
        t.P = e / r.l[..., None]
        r.out = t.P @ t.v
        # P enters the product rounded and not yet normalised: e is at most 1, its step hangs on the
        # running maximum, hence u e and not h(e).
        u, eta = self._operand_rounding()
        t.h = np.where(t.visible, np.maximum(u * e, eta), 0.0) / r.l[..., None]
        t.e_rounded = self._operand(e) / r.l[..., None]
        distance = np.where(t.visible, np.abs(t.S - r.m[..., None]), 0.0)
        t.rel_sigma = t.S_sigma + 2 * C_EXP + A * distance
        t.rel_bound = np.expm1(np.minimum(t.S_bound + 4 * C_EXP + 2 * A * distance, 40.0))
        r.powerless = ((t.S_bound > 1) & t.visible).any(-1) | t.tainted
        r.one_key = t.visible.sum(-1) == 1  # P is 1, whatever the score

    def _operand_rounding(self) -> tuple[float, float]:
        """u and eta of P and dS on their way into a product; float32 is not rounded there."""
        return (0.0, 0.0) if self.dtype is FLOAT32 else (self.dtype.u, self.dtype.eta)

    def _operand(self, x: Array) -> Array:
        return x if self.dtype is FLOAT32 else self.dtype.rounded(x)

    def _operand_step(self, x: Array) -> Array:
        return np.zeros_like(x) if self.dtype is FLOAT32 else self.dtype.half_step(x)

    def _beta(self, n: int) -> float:
        """Truncation of a sum of n products; IEEE float32 products do not go through tensor cores."""
        return 0.0 if self.dtype is FLOAT32 else truncation(n)

    def _out(self, t: SimpleNamespace) -> SimpleNamespace:
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
        weight = t.h + t.P * t.rel_bound + FLUSHED
        b0 = weight @ V + weight.sum(-1)[..., None] * np.abs(out) + sum_bound(n) * terms
        flips = flip_variance(t.h, t.P * t.rel_sigma + FLUSHED)
        alternatives = [out] if d is FLOAT32 else [out, t.e_rounded @ t.v]
        low, high = _hull(alternatives, -self._beta(n) * out)
        r.out_bound = b0 + d.u * (np.abs(out) + b0) + d.eta
        return SimpleNamespace(
            value=out,
            bound=r.out_bound,
            sigma=np.sqrt(variance),
            low=low[None],
            high=high[None],
            sigma_emulation=np.sqrt(flips @ V2 + 2 * summed + last),
            magnitude=terms,
            concentration=_concentration(rounded + scores, t.v, variance),
            powerless=r.powerless & ~(r.one_key & ~t.tainted),
            nonfinite=t.sees_nan | t.sees_bad_value,
        )

    def _lse(self, t: SimpleNamespace) -> SimpleNamespace:
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
            bound += t.h.sum(-1)
        r.lse_sigma, r.lse_bound = np.sqrt(variance), bound
        low, high = _hull([r.lse], np.where(r.live, -self._beta(t.D) * (t.P * t.S).sum(-1), 0.0))
        return SimpleNamespace(
            value=r.lse,
            bound=bound,
            sigma=r.lse_sigma,
            low=low[None],
            high=high[None],
            sigma_emulation=r.lse_sigma * 2**0.5,
            magnitude=mean + np.abs(lse) + np.abs(r.m) + 1,
            concentration=np.ones_like(lse),
            powerless=((t.S_bound > 1) & t.visible).any(-1) | t.tainted_lse,
            nonfinite=t.sees_nan,
        )

    # ------------------------------------------------------------------ backward

    def _row_gradients(self, t: SimpleNamespace) -> None:
        """delta of whole rows, once from the exact output and once from the given one."""
        r, Dv = t.row, t.v.shape[2]
        r.delta = (t.d_out * r.out).sum(-1)
        r.deltas = [r.delta]
        if t.out_given is not None:
            given = (t.d_out * np.where(np.isfinite(t.out_given), t.out_given, 0.0)).sum(-1)
            r.deltas.append(given)
        r.delta_terms = (np.abs(t.d_out) * np.abs(r.out)).sum(-1)
        rounding = A * (np.abs(r.delta) + np.abs(t.d_lse))
        r.delta_sigma = sum_sigma(Dv) * r.delta_terms + rounding
        r.delta_bound = sum_bound(Dv) * r.delta_terms + (np.abs(t.d_out) * r.out_bound).sum(-1) + rounding

    def _probabilities(self, t: SimpleNamespace) -> None:
        """P of a rectangle from the statistics of its rows.

        From m and l, not from the lse: where that is 1e4, its last bit is worth 1e-12 of P.
        """
        m, l = t.row.m[..., None], t.row.l[..., None]
        t.P = np.where(t.visible, np.exp(t.S - m) / l, 0.0)

    def _score_gradients(self, t: SimpleNamespace) -> None:
        """dS of a rectangle, its error, and its legal roundings under each hypothesis of delta."""
        r, Dv, scale = t.row, t.v.shape[2], self.scale
        lse = np.where(r.live, r.lse, 0.0)
        t.dP = t.d_out @ _T(t.v)
        dP_terms = np.abs(t.d_out) @ _T(np.abs(t.v))
        t.pull = t.dP - (r.delta - t.d_lse)[..., None]
        t.dS = t.P * t.pull
        # errors of P, relative
        size = np.abs(t.S) + np.abs(lse)[..., None]
        t.p_sigma = t.S_sigma + C_EXP + 2 * A * size + r.lse_sigma[..., None]
        exponent = t.S_bound + 4 * C_EXP + 4 * A * size + r.lse_bound[..., None]
        t.p_bound = np.expm1(np.minimum(exponent, 40.0))
        t.hP = np.where(t.visible, self._operand_step(t.P), 0.0)
        # errors of dS, absolute; of the larger dS where the given delta makes one: on a one-hot row the
        # exact dS is nearly 0, that from a rounded output is not, and is rounded as what it is
        t.size = np.abs(t.dS)
        for delta in r.deltas[1:]:
            t.size = np.maximum(t.size, np.abs(t.P * (t.dP - (delta - t.d_lse)[..., None])))
        t.h_dS = np.where(t.visible, self._operand_step(t.size), 0.0)
        after = self._operand_step(scale * t.size) / abs(scale) if scale else 0 * t.dS
        after = np.where(t.visible, after, 0.0)
        small = A * (np.abs(t.dP) + (np.abs(r.delta) + np.abs(t.d_lse))[..., None])
        flushed = FLUSHED * (dP_terms + r.delta_terms[..., None])
        before_rounding = (t.p_sigma * t.size) ** 2 + (
            t.P * (sum_sigma(Dv) * dP_terms + small) + flushed
        ) ** 2
        t.dS_variance = np.maximum(t.h_dS, after) ** 2 / 3 + before_rounding
        t.dS_bound = (
            t.h_dS
            + after
            + t.p_bound * t.size
            + flushed
            + t.P * (1 + t.p_bound) * (sum_bound(Dv) * dP_terms + r.delta_bound[..., None] + 2 * small)
        )
        if self.rounding.p_rounded_before_ds:
            t.dS_variance += (t.hP * t.pull) ** 2 / 3
            t.dS_bound += t.hP * np.abs(t.pull)
        t.dS_flips = flip_variance(t.h_dS, np.sqrt(before_rounding))
        t.dS_terms = t.P * (dP_terms + (r.delta_terms + np.abs(t.d_lse))[..., None])
        # the tensor core's truncation of dP moves all of dS in step
        t.dS_truncation = -self._beta(Dv) * t.P * t.dP
        # fp16: beyond this a rounded dS is infinite
        reach = np.maximum(1, abs(scale)) * t.size + t.dS_bound
        t.overflows = reach >= self.dtype.overflow
        t.alternatives = [self._dS_alternatives(t, delta) for delta in r.deltas]

    def _dS_alternatives(self, t: SimpleNamespace, delta: Array) -> list[Array]:
        pull = t.dP - (delta - t.d_lse)[..., None]
        dS = t.P * pull
        if self.dtype is FLOAT32:
            return [dS]
        places = [dS, self.dtype.rounded(dS)]
        if self.scale:
            places.append(self.dtype.rounded(self.scale * dS) / self.scale)
        if self.rounding.p_rounded_before_ds:
            places.append(self.dtype.rounded(t.P) * pull)
        return [np.where(np.isfinite(place), place, dS) for place in places]

    def _dq(self, t: SimpleNamespace) -> SimpleNamespace:
        r, n, scale, d = t.row, t.n_keys, self.scale, self.dtype
        K, K2 = np.abs(t.k), t.k**2
        dq = scale * (t.dS @ t.k)
        terms = t.size @ K
        common = (r.delta_sigma[..., None] * (t.P @ t.k)) ** 2  # the error of delta, in step
        summed = (sum_sigma(n) * terms) ** 2
        from_lse = (r.lse_sigma[..., None] * dq) ** 2
        last = d.half_step(dq) ** 2 / 3
        variance = scale**2 * (t.dS_variance @ K2 + common + summed) + from_lse + last
        b0 = abs(scale) * (t.dS_bound @ K + sum_bound(n) * ((t.size + t.dS_bound) @ K)) + 2 * A * np.abs(dq)
        moved = scale * (t.dS_truncation @ t.k)
        sides = [
            _hull([scale * (dS @ t.k) for dS in places], moved, -self._beta(n) * dq)
            for places in t.alternatives
        ]
        return SimpleNamespace(
            value=dq,
            bound=b0 + d.u * (np.abs(dq) + b0) + d.eta,
            sigma=np.sqrt(variance),
            low=np.stack([low for low, _ in sides]),
            high=np.stack([high for _, high in sides]),
            sigma_emulation=np.sqrt(
                scale**2 * (t.dS_flips @ K2 + 2 * common + 2 * summed) + 2 * from_lse + last
            ),
            magnitude=abs(scale) * (t.dS_terms @ K),
            concentration=_concentration(scale**2 * t.dS_variance, t.k, variance),
            powerless=r.powerless | t.overflows.any(-1),
            nonfinite=np.zeros_like(r.powerless),
        )

    def _dk(self, t: SimpleNamespace) -> SimpleNamespace:
        r, n, scale, d = t.row, t.n_rows, self.scale, self.dtype
        Q, Q2 = np.abs(t.q), t.q**2
        dk = scale * (_T(t.dS) @ t.q)
        terms = _T(t.size) @ Q
        per_row = _T(t.dS_variance + (t.P * r.delta_sigma[..., None]) ** 2)
        summed = (sum_sigma(n) * terms) ** 2
        last = self._stored_heads() * d.half_step(dk) ** 2 / 3
        variance = scale**2 * (per_row @ Q2 + summed) + last
        b0 = abs(scale) * (
            _T(t.dS_bound) @ Q + sum_bound(n) * (_T(t.size + t.dS_bound) @ Q)
        ) + 2 * A * np.abs(dk)
        moved = scale * (_T(t.dS_truncation) @ t.q)
        sides = [
            _hull([scale * (_T(dS) @ t.q) for dS in places], moved, -self._beta(n) * dk)
            for places in t.alternatives
        ]
        delta = _T((t.P * r.delta_sigma[..., None]) ** 2)
        return SimpleNamespace(
            value=dk,
            bound=b0 + self._stored_heads() * (d.u * (np.abs(dk) + b0) + d.eta),
            sigma=np.sqrt(variance),
            low=np.stack([low for low, _ in sides]),
            high=np.stack([high for _, high in sides]),
            sigma_emulation=np.sqrt(scale**2 * ((_T(t.dS_flips) + 2 * delta) @ Q2 + 2 * summed) + last),
            magnitude=abs(scale) * (_T(t.dS_terms) @ Q),
            concentration=_concentration(scale**2 * per_row, t.q, variance),
            powerless=self._powerless_keys(t, t.overflows),
            nonfinite=np.zeros(t.k.shape[:2], bool),
        )

    def _dv(self, t: SimpleNamespace) -> SimpleNamespace:
        n, d = t.n_rows, self.dtype
        dO, dO2 = np.abs(t.d_out), t.d_out**2
        dv = _T(t.P) @ t.d_out
        terms = _T(t.P) @ dO
        per_row = _T(t.hP**2 / 3 + (t.P * t.p_sigma + FLUSHED) ** 2)
        summed = (sum_sigma(n) * terms) ** 2
        last = self._stored_heads() * d.half_step(dv) ** 2 / 3
        variance = per_row @ dO2 + summed + last
        error = t.hP + t.P * t.p_bound + FLUSHED
        b0 = _T(error) @ dO + sum_bound(n) * (_T(t.P + error) @ dO)
        alternatives = [dv] if d is FLOAT32 else [dv, _T(d.rounded(t.P)) @ t.d_out]
        low, high = _hull(alternatives, -self._beta(n) * dv)
        flips = flip_variance(t.hP, t.P * t.p_sigma + FLUSHED)
        return SimpleNamespace(
            value=dv,
            bound=b0 + self._stored_heads() * (d.u * (np.abs(dv) + b0) + d.eta),
            sigma=np.sqrt(variance),
            low=low[None],
            high=high[None],
            sigma_emulation=np.sqrt(_T(flips) @ dO2 + 2 * summed + last),
            magnitude=terms,
            concentration=_concentration(per_row, t.d_out, variance),
            powerless=self._powerless_keys(t, np.zeros_like(t.overflows)),
            nonfinite=np.zeros(t.k.shape[:2], bool),
        )

    def _stored_heads(self) -> int:
        """How many times dk and dv are rounded: per query head of the group, or once."""
        _, Hq, Hkv = self.heads
        return Hq // Hkv if self.rounding.heads_rounded_before_group_sum else 1

    def _powerless_keys(self, t: SimpleNamespace, overflows: NDArray[np.bool_]) -> NDArray:
        """Keys to which a row without power adds."""
        return ((t.row.powerless[..., None] & t.visible) | overflows).any(1) | t.tainted


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


def _stacked_rows(pieces: list[SimpleNamespace]) -> SimpleNamespace:
    """Blocks of rows put one behind the other; `low`, `high` have the hypotheses in front."""
    if len(pieces) == 1:
        return pieces[0]
    joined: dict[str, Any] = {}
    for name, first in vars(pieces[0]).items():
        parts = [getattr(piece, name) for piece in pieces]
        if isinstance(first, list):
            joined[name] = [np.concatenate(column, 1) for column in zip(*parts, strict=True)]
        else:
            axis = 2 if name in ("low", "high") else 0 if first.ndim == 1 else 1
            joined[name] = np.concatenate(parts, axis)
    return SimpleNamespace(**joined)


def _joined(pieces: list[SimpleNamespace], heads: tuple[int, int, int], scalar: bool) -> Estimate:
    """KV heads put one behind the other and unstacked to (B, H, S, ...)."""
    whole = {}
    for f in fields(Estimate):
        parts = [getattr(piece, f.name) for piece in pieces]
        alternatives = f.name in ("low", "high")
        x = np.concatenate(parts, 1 if alternatives else 0)
        lead = x.shape[:1] if alternatives else ()
        tail = () if scalar or f.name in ("concentration", "powerless", "nonfinite") else x.shape[-1:]
        whole[f.name] = x.reshape((*lead, *heads, *tail))
    return Estimate(**whole)
