"""Attention in NumPy float64, its gradients in closed form, and the rounding budget of every element.

    S_ij = scale q_i . k_j                      over the visible keys of row i
    P    = softmax_j(S),   out = P V,   lse_i = log sum_j exp(S_ij)

    dP   = dO V^T,   delta_i = dO_i . out_i
    dS   = P (dP - delta + dlse)
    dq   = scale dS K,   dk = scale dS^T q,   dv = P^T dO

(Dao et al., FlashAttention, 2022, section 2 and appendix B; the term dlse because gradients also flow
through lse.) Next to the exact value stands what a correct kernel may be off by: a hard bound, a
standard deviation sigma, and the interval of legal alternatives, from `error_model`.

Shapes inside: the query heads that share a KV head are stacked as rows, so that every array is
(N, M, Sk) with N = B Hkv and M = Hq / Hkv * Sq; row r stands at position r mod Sq. Work goes by
rectangles of at most `BLOCK` elements, so that memory stays bounded: once by rows (out, lse, dq),
once by columns (dk, dv).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .budget import DTYPES, TF32, Array, Dtype, Rounding
from .error_model import Block, ErrorModel, Estimate

BLOCK = 2**19
"""Most elements of one rectangle of S; some thirty arrays of that size live at once."""

ALIGNMENTS = ("bottom-right", "top-left")

OPERANDS: dict[str, Callable[[Array], Array]] = {
    "as they are": lambda x: x,
    "rounded": TF32.rounded,
    "rounded, ties away": TF32.rounded_away,
    "cut off": TF32.truncated,
}


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
    problem = Problem.of(q, k, v, d_out, d_lse, causal=causal, scale=scale, dtype=dtype, alignment=alignment)
    return problem.result(out_given, rounding)


@dataclass
class Problem:
    """A problem whose exact values are computed once, whatever number of implementations is judged by them.

    The arguments are stacked by KV head. What does not depend on an implementation is kept if all scores
    are one rectangle, and computed anew each time if not: memory stays bounded.
    """

    q: Array  # (N, M, D)
    k: Array  # (N, Sk, D)
    v: Array  # (N, Sk, Dv)
    d_out: Array | None  # (N, M, Dv)
    d_lse: Array | None  # (N, M)
    scale: float
    last_key: NDArray[np.int64]  # (M,) the last key that a row may see; -1: none
    dtype: Dtype
    heads: tuple[int, int, int]  # B, Hq, Hkv
    d_out_of_delta: Array | None  # (N, M, Dv) the same, not made an operand of a product
    tainted: NDArray[np.bool_] = field(init=False)  # (N,): a non-finite value in q, k, v
    kept: dict[Any, Block] = field(init=False, default_factory=dict)  # by what it hangs on

    @classmethod
    def of(
        cls,
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
        operands: str = "as they are",
    ) -> Problem:
        """Arguments and errors are those of `attention`.

        Args:
            operands: what enters a product of q, k, v, d_out: they "as they are"; or TF32, to which they are
                "rounded", "rounded, ties away" or "cut off". delta, no product of a tensor core, is taken
                from d_out as it is.
        """
        if operands not in OPERANDS:
            raise ValueError(f"operands is {operands!r}; it may be one of {', '.join(OPERANDS)}")
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
        }
        for name, (given, shape) in wants.items():
            _check_shape(name, given, shape)
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
        entering = OPERANDS[operands]
        q, k, v = entering(q), entering(k), entering(v)
        operand = None if d_out is None else entering(np.asarray(d_out, np.float64))
        position = np.arange(M) % max(Sq, 1)
        shift = Sk - Sq if alignment == "bottom-right" else 0
        last_key = np.minimum(position + shift, Sk - 1) if causal else np.full(M, Sk - 1)
        x = cls(
            q=q.reshape(N, M, D),
            k=k.reshape(N, Sk, D),
            v=v.reshape(N, Sk, Dv),
            d_out=stacked(operand, M),
            d_out_of_delta=stacked(d_out, M),
            d_lse=stacked(d_lse, M),
            scale=scale,
            last_key=np.maximum(last_key, -1),
            dtype=DTYPES[dtype],
            heads=(B, Hq, Hkv),
        )
        x._set_aside_nonfinite_values()
        if (
            x.d_out is not None and x.d_lse is not None and x.d_out_of_delta is not None
        ):  # a dead row adds nothing, whatever they hold there
            live = x.last_key >= 0
            x.d_out = np.where(live[:, None], x.d_out, 0.0)
            x.d_out_of_delta = np.where(live[:, None], x.d_out_of_delta, 0.0)
            x.d_lse = np.where(live, x.d_lse, 0.0)
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

    def result(self, out_given: ArrayLike | None = None, rounding: Rounding | None = None) -> Result:
        """Exact values and the budget of an implementation with this output and these roundings.

        Args:
            out_given, rounding: as of `attention`.

        Raises:
            ValueError: if the output's shape does not fit.
        """
        N, M, _ = self.q.shape
        Sk, Dv = self.v.shape[1:]
        B, Hq, Hkv = self.heads
        Sq = M * Hkv // Hq
        given = None
        if out_given is not None:
            _check_shape("out_given", out_given, (B, Hq, Sq, Dv))
            given = np.asarray(out_given, np.float64).reshape(N, M, Dv)
        model = ErrorModel(self.dtype, rounding or Rounding(), self.scale)
        step = max(1, BLOCK // max(1, M * Sk))
        with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
            parts = [self._solve_heads(slice(n, n + step), given, model) for n in range(0, N, step)]
            if not parts:
                parts = [self._solve_heads(slice(0, 0), given, model)]
        joined: dict[str, Any] = {}
        for name in ("out", "lse", "dq", "dk", "dv"):
            pieces = [part[name] for part in parts if name in part]
            heads = (B, Hkv, Sk) if name in ("dk", "dv") else (B, Hq, Sq)
            joined[name] = _joined(pieces, heads, scalar=name == "lse") if pieces else None
        visible_keys = np.broadcast_to(self.last_key + 1, (N, M)).reshape(B, Hq, Sq)
        score_terms = max(part["score_terms"] for part in parts)
        return Result(**joined, visible_keys=visible_keys, score_terms=score_terms, dtype=self.dtype)

    def _solve_heads(self, heads: slice, given: Array | None, model: ErrorModel) -> dict[str, Any]:
        g = SimpleNamespace(
            **{
                name: None if getattr(self, name) is None else getattr(self, name)[heads]
                for name in ("q", "k", "v", "d_out", "d_out_of_delta", "d_lse", "nan_query", "bad_key",
                             "bad_value", "tainted", "tainted_lse")
            }
        )  # fmt: skip
        given = None if given is None else given[heads]
        M, Sk = g.q.shape[1], g.k.shape[1]
        rows = max(1, min(M, BLOCK // max(1, Sk)))
        columns = max(1, min(Sk, BLOCK // max(1, M)))
        if rows >= M:
            return self._solve_whole(g, given, model)
        found: dict[str, list[SimpleNamespace]] = {}
        statistics = []
        score_terms = 0.0
        for i in range(0, M, rows):
            block = self._block(g, slice(i, i + rows), slice(None), model)
            score_terms = max(score_terms, float(block.S_terms.max(initial=0.0)))
            self._forward(block, model)
            found.setdefault("out", []).append(block.of_out)
            found.setdefault("lse", []).append(block.of_lse)
            if g.d_out is not None:
                self._delta(block, model)
                self._score_gradients(block, model)
                self._by_rows(block, model)
                self._given(block, None if given is None else given[:, i : i + rows])
                model.given_score_gradients(block)
                found.setdefault("dq", []).append(model.dq(block))
                statistics.append(block.row)
        if g.d_out is not None:
            row = _stacked_rows(statistics)
            for j in range(0, Sk, columns):
                block = self._block(g, slice(None), slice(j, j + columns), model)
                block.row = row
                self._probabilities(block)
                self._score_gradients(block, model)
                self._by_columns(block, model)
                model.given_score_gradients(block)
                found.setdefault("dk", []).append(model.dk(block))
                found.setdefault("dv", []).append(block.of_dv)
        tensors = {name: _stacked_rows(pieces) for name, pieces in found.items()}
        return {**tensors, "score_terms": score_terms}

    def _solve_whole(self, g: SimpleNamespace, given: Array | None, model: ErrorModel) -> dict[str, Any]:
        """Heads whose scores are one rectangle."""
        where = model.rounding
        key = where.l_from_rounded_p, where.heads_rounded_before_group_sum, where.products
        block = self.kept.get(key)
        if block is None:
            block = self._block(g, slice(None), slice(None), model)
            self._forward(block, model)
            if g.d_out is not None:
                self._delta(block, model)
                self._score_gradients(block, model)
                self._by_rows(block, model)
                self._by_columns(block, model)
            if len(g.q) == len(self.q):
                self.kept[key] = block
        block = Block(**{**vars(block), "row": SimpleNamespace(**vars(block.row))})
        found = {"out": block.of_out, "lse": block.of_lse}
        if g.d_out is not None:
            self._given(block, given)
            model.given_score_gradients(block)
            found |= {"dq": model.dq(block), "dk": model.dk(block), "dv": block.of_dv}
        return {**found, "score_terms": float(block.S_terms.max(initial=0.0))}

    # ------------------------------------------------------------------ the formulas

    def _block(self, g: SimpleNamespace, rows: slice, columns: slice, model: ErrorModel) -> Block:
        """The inputs of a rectangle, which keys are visible in it, S and dP."""
        t = Block(q=g.q[:, rows], k=g.k[:, columns], v=g.v[:, columns], row=SimpleNamespace())
        t.n_keys, t.n_rows = g.k.shape[1], g.q.shape[1]
        t.group = self.heads[1] // self.heads[2]
        key = np.arange(t.n_keys)[columns]
        t.visible = key[None, :] <= self.last_key[rows, None]  # (R, C)
        t.S = self.scale * (t.q @ _T(t.k))
        if g.d_out is not None:
            t.d_out, t.d_lse = g.d_out[:, rows], g.d_lse[:, rows]
            t.d_out_of_delta = g.d_out_of_delta[:, rows]
            t.dP = t.d_out @ _T(t.v)
        t.tainted, t.tainted_lse = g.tainted[:, None], g.tainted_lse[:, None]
        t.sees_nan = g.nan_query[:, rows] & (self.last_key[rows] >= 0)
        t.sees_nan = t.sees_nan | np.any(g.bad_key[:, None, columns] & t.visible, axis=-1)
        t.sees_bad_value = (g.bad_value[:, None, columns] & t.visible).any(-1)
        model.scores(t)
        return t

    def _forward(self, t: Block, model: ErrorModel) -> None:
        """m, l, P, out and lse of whole rows; dead rows are 0 and -inf."""
        r = t.row
        r.live = t.visible.any(-1)  # (R,)
        r.one_key = t.visible.sum(-1) == 1  # P is 1, whatever the score
        S = np.where(t.visible, t.S, -np.inf)
        m = S.max(-1, initial=-np.inf)
        r.m = np.where(np.isneginf(m), 0.0, m)  # (N, R)
        e = np.exp(S - r.m[..., None])  # 0 where not visible
        total = e.sum(-1)
        r.l = np.where(total == 0, 1.0, total)
        r.lse = np.where(r.live, r.m + np.log(r.l), -np.inf)
        t.P = e / r.l[..., None]
        r.out = t.P @ t.v
        model.softmax(t)
        t.of_out, t.of_lse = model.out(t), model.lse(t)

    def _delta(self, t: Block, model: ErrorModel) -> None:
        """delta of whole rows."""
        r = t.row
        r.delta = (t.d_out * r.out).sum(-1)
        r.deltas = [r.delta]
        model.deltas(t)

    def _given(self, t: Block, out: Array | None) -> None:
        """delta of whole rows once more, from the given output (N, R, Dv)."""
        if out is not None:
            finite = np.where(np.isfinite(out), out, 0.0)
            t.row.deltas = [t.row.delta, (t.d_out_of_delta * finite).sum(-1)]

    def _probabilities(self, t: Block) -> None:
        """P of a rectangle from the statistics of its rows.

        From m and l, not from the lse: where that is 1e4, its last bit is worth 1e-12 of P.
        """
        m, l = t.row.m[..., None], t.row.l[..., None]
        t.P = np.where(t.visible, np.exp(t.S - m) / l, 0.0)

    def _score_gradients(self, t: Block, model: ErrorModel) -> None:
        """dS of a rectangle."""
        t.pull = t.dP - (t.row.delta - t.d_lse)[..., None]
        t.dS = t.P * t.pull
        model.score_gradients(t)

    def _by_rows(self, t: Block, model: ErrorModel) -> None:
        t.dq = self.scale * (t.dS @ t.k)
        model.exact_dq(t)

    def _by_columns(self, t: Block, model: ErrorModel) -> None:
        t.dk = self.scale * (_T(t.dS) @ t.q)
        t.dv = _T(t.P) @ t.d_out
        model.exact_dk(t)
        t.of_dv = model.dv(t)


def _check_shape(name: str, t: ArrayLike | None, shape: tuple[int, ...]) -> None:
    if t is not None and np.shape(t) != shape:
        raise ValueError(f"{name} has shape {np.shape(t)}; it must be {shape}")


def _T(x: Array) -> Array:
    return x.swapaxes(-1, -2)


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
