"""The one place that decides whether a result is right.

Every element x is judged against its own budget from the float64 oracle: a hard bound B on |x - r|, a
standard deviation sigma, and an interval of legal alternatives to r (`reference.oracle.Estimate`).
z is the distance to that interval in units of sigma. All limits are those of `thresholds`, which names
the law that each follows from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from reference.budget import FLOAT32, FLUSHED
from reference.error_model import Estimate
from reference.oracle import Result
from reports.records import Z_END, Z_STEP, TensorSummary, Verdict

from . import thresholds
from .cases import Case
from .thresholds import AGREEMENT, FALSE_ALARM, RESOLVED, ROWS_FOR_EMULATION, TILE_ROWS

Array = NDArray[np.float64]


def judge(
    case: Case,
    results: Mapping[str, Array],
    oracle: Result,
    sdpa: Mapping[str, Array],
    emulation: Mapping[str, Array] | None,
    same_tiles: bool = True,
    own_precision: Mapping[str, Array] | None = None,
) -> tuple[list[Verdict], dict[str, TensorSummary]]:
    """Judges all tensors of a comparison against all references.

    Args:
        case: decides which special rules apply (ties, exact problems).
        results: the implementation's tensors by name ("out", "lse", "dq", "dk", "dv"), float64.
        oracle: exact values and budget.
        sdpa: the same tensors from SDPA MATH in float64.
        emulation: the same from the emulation, before the last rounding; None leaves it out.
        same_tiles: whether it had the implementation's own tiles and roundings.
        own_precision: the same from SDPA MATH in the dtype of the inputs, for FlashAttention-2's rule.

    Returns:
        The verdicts and a summary by tensor.
    """
    verdicts: list[Verdict] = []
    summaries: dict[str, TensorSummary] = {}
    for name, x in results.items():
        tensor = _Tensor(name, x, getattr(oracle, name), case, oracle)
        verdicts += tensor.verdicts()
        verdicts += tensor.against_sdpa(sdpa[name])
        if emulation is not None:
            verdicts += tensor.against_emulation(emulation[name], same_tiles)
        p = own_precision[name] if own_precision is not None else None
        summaries[name] = tensor.summary(p)
    return verdicts, summaries


def judge_again(case: Case, again: Mapping[str, Array], oracle: Result, rule: str) -> list[Verdict]:
    """Whether a further run of a case, which need not give the same bits, is within the hard bound too.

    Args:
        case, oracle: as of `judge`.
        again: the tensors of that run.
        rule: what it is called: how that run differs from the one that is judged.
    """
    found = []
    for name, x in again.items():
        found += _Tensor(name, x, getattr(oracle, name), case, oracle).within_budget()
    return [msgspec.structs.replace(v, rule=f"{rule}: {v.rule}") for v in found]


@dataclass(frozen=True)
class Deviation:
    """How far each element of a tensor is off, as it is judged.

    Attributes:
        z: signed distance to the legal values in standard deviations, (B, H, S, D), of the lse (B, H, S, 1).
        limit: of the largest |z|.
        beyond: outside of the hard bound, or beyond that limit.
        misplaced: not finite where it should be, or finite where it must not be.
        judged: where something can be said.
    """

    z: Array
    limit: float
    beyond: NDArray[np.bool_]
    misplaced: NDArray[np.bool_]
    judged: NDArray[np.bool_]


def deviation(case: Case, name: str, x: Array, oracle: Result) -> Deviation:
    """What the verdicts about one tensor follow from, element by element; for pictures of it.

    Args:
        case, oracle: as of `judge`.
        name, x: the implementation's tensor.
    """
    tensor = _Tensor(name, x, getattr(oracle, name), case, oracle)
    limit = float(thresholds.largest_z(max(int(tensor.compared.sum()), 1), FALSE_ALARM))
    beyond = tensor.error > thresholds.HARD_BOUND * tensor.rows.bound
    beyond |= np.abs(tensor.z) > limit
    return Deviation(tensor.z, limit, beyond, tensor.misplaced(), tensor.judged)


class _Tensor:
    """One tensor of a comparison; rows are its leading three dimensions."""

    def __init__(self, name: str, x: Array, e: Estimate, case: Case, oracle: Result) -> None:
        self.name, self.case, self.oracle = name, case, oracle
        if name == "lse":  # a row of one element
            e = Estimate(**{
                field: v if field in ("concentration", "powerless", "nonfinite") else v[..., None]
                for field, v in vars(e).items()
            })  # fmt: skip
            x = x[..., None]
        self.cells, self.rows = x, e
        # equal scores have one lse, and one P, whose float32 error 16-bit operands do not show
        gradient = case.dtype == "float32" and name in ("dq", "dk", "dv")
        in_step = case.equal_scores and (name == "lse" or gradient)
        self.one_error = case.few_magnitudes or in_step
        self.concentration = np.where(self.one_error, 1.0, e.concentration)
        self.judged = np.broadcast_to(~e.powerless[..., None] & ~e.nonfinite[..., None], x.shape)
        finite = np.isfinite(x) & np.isfinite(e.value)
        self.compared = self.judged & finite
        with np.errstate(invalid="ignore", over="ignore"):
            self.error = np.where(self.compared, np.abs(x - e.value), 0.0)
            self.z = self._z()
            self.repetition = self._repetition()

    def _z(self) -> Array:
        """Signed distance to the legal alternatives in sigmas, under the better hypothesis by head."""
        x, e = self.cells, self.rows
        above, below = np.maximum(x - e.high, 0), np.maximum(e.low - x, 0)
        z = np.where(self.compared, (above - below) / e.sigma, 0.0)  # (hypotheses, B, H, S, D)
        better = (z**2).sum((-1, -2)).argmin(0)  # (B, H)
        return np.take_along_axis(z, better[None, :, :, None, None], 0)[0]

    def _repetition(self) -> Array:
        """How much the errors of different rows of a head are one error, repeated: 0 to 1, (B, H).

        Values that lie within a step of each other are rounded by the same amount. For values that
        differ by N(0, 2 s^2) steps the correlation of the errors is exp(-4 pi^2 s^2), the first term
        of the Fourier series of a rounding error; it counts by the last rounding's share in the variance.
        """
        heads = self.cells.shape[:2]
        if self.one_error:
            return np.ones(heads)
        e, dtype = self.rows, self.oracle.dtype
        if self.name == "lse" or not self.compared.any():
            return np.zeros(heads)
        seen = self.compared.astype(float)
        count = np.maximum(seen.sum(2), 1)  # (B, H, D)
        value = np.where(self.compared, e.value, 0.0)
        half_step = dtype.half_step(value)
        mean = value.sum(2) / count
        spread = np.sqrt((seen * (value - mean[:, :, None]) ** 2).sum(2) / count)
        step = 2 * (seen * half_step).sum(2) / count
        share = (seen * half_step**2 / 3 / e.sigma**2).sum(2) / count
        correlation = np.exp(-((2 * np.pi * spread / np.maximum(step, 1e-300)) ** 2)) * np.minimum(share, 1)
        return np.where(seen.sum(2) > 1, correlation, 0.0).max(-1)

    # ------------------------------------------------------------------ verdicts

    def verdicts(self) -> list[Verdict]:
        found = self.within_budget()
        if self.compared.any():
            found += [self._largest(), *self._root_mean_squares()]
            found += self._bias()
        found += self._exact()
        return found

    def within_budget(self) -> list[Verdict]:
        """The rules that need no more than the hard bound."""
        return [self._finite(), *([self._bound()] if self.compared.any() else [])]

    def _verdict(self, rule: str, statistic: float, limit: float, flat: int | None,
                 reference: str = "oracle", note: str = "") -> Verdict:  # fmt: skip
        return Verdict(
            self.name, reference, rule, bool(statistic <= limit), float(statistic), float(limit),
            self._where(flat), note,
        )  # fmt: skip

    def _where(self, flat: int | None) -> tuple[int, ...] | None:
        if flat is None:  # of the whole tensor
            return None
        index = tuple(int(i) for i in np.unravel_index(flat, self.cells.shape))
        return index[:-1] if self.name == "lse" else index

    def misplaced(self) -> NDArray[np.bool_]:
        """Where NaN and inf are and do not belong, or the reverse.

        They belong to overflow, the lse of dead rows, rows that see a NaN.
        """
        x, e = self.cells, self.rows
        dtype = self.oracle.dtype
        overflow = np.inf if self.name == "lse" else dtype.overflow
        with np.errstate(invalid="ignore"):
            may_be_finite = np.abs(e.value) - e.bound < overflow
            may_be_plus, may_be_minus = e.value + e.bound >= overflow, e.value - e.bound <= -overflow
        wrong = np.isnan(x) | (np.isfinite(x) & ~may_be_finite)
        wrong |= (np.isposinf(x) & ~may_be_plus) | (np.isneginf(x) & ~may_be_minus)
        wrong &= self.judged
        hidden = e.nonfinite & np.isfinite(x).all(-1)
        wrong |= hidden[..., None]
        return wrong

    def _finite(self) -> Verdict:
        """NaN and inf exactly where they belong."""
        x, e = self.cells, self.rows
        wrong = self.misplaced()
        count = int(wrong.sum())
        note = ""
        if count:
            first = int(wrong.argmax())
            note = f"{count} elements; the first is {x.flat[first]}, expected {e.value.flat[first]:.6g}"
        return Verdict(
            self.name, "oracle", "finite where it should be", not count, float(count), 0.0,
            self._where(int(wrong.argmax())) if count else None, note,
        )  # fmt: skip

    def _bound(self) -> Verdict:
        use = self.error / self.rows.bound
        worst = int(use.argmax())
        return self._verdict(
            "hard bound", use.flat[worst], thresholds.HARD_BOUND, worst, note=self._values(worst)
        )

    def _values(self, flat: int) -> str:
        return f"got {self.cells.flat[flat]:.8g}, exact {self.rows.value.flat[flat]:.8g}"

    def _largest(self) -> Verdict:
        z = np.abs(self.z)
        worst = int(z.argmax())
        n = int(self.compared.sum())
        limit = thresholds.largest_z(n, FALSE_ALARM)
        return self._verdict("largest z", z.flat[worst], limit, worst, note=self._values(worst))

    def _root_mean_squares(self) -> list[Verdict]:
        """z by row, by tile of rows, by head, over the tensor: faults that are small but everywhere."""
        B, H, S, D = self.z.shape
        count = self.compared.sum(-1)  # (B, H, S)
        total = (self.z**2).sum(-1)
        weighted = np.where(count > 0, self.concentration, 0.0)
        tiles = np.arange(0, S, TILE_ROWS)
        repeats = self.repetition[:, :, None]
        groups = {
            "rms z by row": (total, count, weighted, repeats),
            "rms z by tile": (*(
                reduce.reduceat(a, tiles, axis=2) for reduce, a in
                ((np.add, total), (np.add, count), (np.maximum, weighted))
            ), repeats),
            "rms z by head": (total.sum(2), count.sum(2), weighted.max(2), self.repetition),
            "rms z": (total.sum(), count.sum(), weighted.max(), self.repetition.max()),
        }  # fmt: skip
        found = []
        for rule, (squares, n, largest, repetition) in groups.items():
            squares, n, largest = np.atleast_1d(squares, n, largest)
            rows = np.maximum(n / max(D, 1), 1)
            share = largest * np.maximum(1 / rows, repetition)  # lambda of the group
            limit = thresholds.rms_z((n > 0).sum(), share, FALSE_ALARM)
            statistic = np.sqrt(squares / np.maximum(n, 1))
            worst = int((statistic / limit).argmax())
            place = [int(i) for i in np.unravel_index(worst, statistic.shape)]
            if "tile" in rule:
                place[2] *= TILE_ROWS
            first = None
            if "z by" in rule:
                first = int(np.ravel_multi_index((*place, *(0 for _ in range(4 - len(place)))), (B, H, S, D)))
            found.append(self._verdict(rule, statistic.flat[worst], limit.flat[worst], first))
        return found

    def _bias(self) -> list[Verdict]:
        """Mean of z towards or away from zero: truncation, a scale off by a little."""
        resolved = self.compared & (np.abs(self.rows.value) >= RESOLVED * self.oracle.dtype.eta)
        seen = resolved.any(-1)
        repeated = self.case.equal_scores or self.case.few_magnitudes  # the errors of rows are one error
        if repeated or seen.sum() < 2:
            return []
        count = resolved.sum(-1)[seen]  # by row
        eigenvalue = np.minimum(count, self.concentration[seen] * self.z.shape[-1])
        of_row = count * eigenvalue  # variance of a row's sum of z, at most
        variance = max(of_row.sum(), self.repetition.max() * np.sqrt(of_row).sum() ** 2)
        limit = thresholds.bias(variance, count.sum(), FALSE_ALARM)
        mean = float(np.where(resolved, self.z * np.sign(self.rows.value), 0.0).sum() / count.sum())
        note = "away from zero" if mean > 0 else "towards zero"
        return [self._verdict("bias", abs(mean), limit, None, note=note)]

    def _exact(self) -> list[Verdict]:
        """What must come out bit for bit."""
        found = []
        # an exact value is one of float32's; what float64 has left of exp(-104) is not part of it, and
        # may yet come out rounded once if an implementation computes in float64
        flushed = np.abs(self.rows.value) < FLUSHED
        value = np.where(flushed, 0.0, self.rows.value)
        different = self.judged & (self.cells != self.oracle.dtype.rounded(value))
        different &= ~(flushed & (self.cells == self._rounded_once(self.rows.value)))
        if self.name == "out":
            one_key = (self.oracle.visible_keys == 1)[..., None] & self.judged
            if one_key.any():
                found.append(self._count("one visible key: out = v", different & one_key))
            dead = (self.oracle.visible_keys == 0)[..., None] & self.judged
            if dead.any():
                found.append(self._count("no visible key: 0", different & dead))
        # P recomputed in the backward is 1 but for its last bits, which rounding to 16 bit removes
        exact = self.name == "out" or (self.name == "dv" and self.case.dtype != "float32")
        if self.case.exact and exact and self.judged.any():
            found.append(self._count("exactly representable", different))
        if self.name in ("dq", "dk", "dv"):
            none = self.judged & (self.rows.magnitude == 0)
            if none.any():
                found.append(self._count("no contribution: 0", different & none))
        return found

    def _rounded_once(self, x: Array) -> Array:
        """x below FLUSHED as the dtype's subnormal numbers have it."""
        if self.oracle.dtype is not FLOAT32:
            return self.oracle.dtype.rounded(x)
        step = float(np.finfo(np.float32).smallest_subnormal)  # Dtype's is what a GPU may flush
        return np.rint(x / step) * step

    def _count(self, rule: str, wrong: NDArray[np.bool_]) -> Verdict:
        count = int(wrong.sum())
        first = int(wrong.argmax())
        return Verdict(
            self.name, "oracle", rule, not count, float(count), 0.0,
            self._where(first) if count else None,
            f"{count} elements differ; the first: {self._values(first)}" if count else "",
        )  # fmt: skip

    # ------------------------------------------------------------------ the other references

    def against_sdpa(self, sdpa: Array) -> list[Verdict]:
        """The bound again, about SDPA's float64 value, and the two references about each other."""
        r = sdpa[..., None] if self.name == "lse" else sdpa
        e = self.rows
        both = np.isfinite(e.value) & np.isfinite(r) & self.judged
        largest = e.magnitude.max((-1, -2), keepdims=True, initial=0.0)  # by head
        terms = 1 + self.oracle.score_terms / 64
        with np.errstate(invalid="ignore"):
            apart = np.where(both, np.abs(r - e.value), 0.0) / np.maximum(largest * terms, 1e-300)
            differ = self.judged & (np.isfinite(e.value) != np.isfinite(r))
        apart = np.where(differ, np.inf, apart)
        if apart.size == 0:
            return []
        worst = int(apart.argmax())
        note = "the references disagree: the suite, not the implementation, is at fault"
        found = [
            self._verdict("references agree", apart.flat[worst], AGREEMENT, worst, "sdpa",
                          note if apart.flat[worst] > AGREEMENT else "")
        ]  # fmt: skip
        if self.compared.any():
            with np.errstate(invalid="ignore"):
                use = np.where(self.compared & both, np.abs(self.cells - r), 0.0) / e.bound
            worst = int(use.argmax())
            found.append(self._verdict("hard bound", use.flat[worst], thresholds.SDPA_BOUND, worst, "sdpa"))
        return found

    def against_emulation(self, emulated: Array, same_tiles: bool) -> list[Verdict]:
        """Twice the hard bound about a value that was computed as the kernel does, but for the last rounding.

        In 16 bit, if P and dS were rounded in the same tiles, also the root mean square over the tensor:
        what remains is the last rounding, P or dS that fell on the other side of a midpoint, and what
        tensor cores truncate, which the emulation does not. A row counts only so much
        (`thresholds.FLIPPED`).
        """
        r = emulated[..., None] if self.name == "lse" else emulated
        known = self.compared & np.isfinite(r)
        rows = int(known.any(-1).sum())
        if rows == 0:
            return []
        with np.errstate(invalid="ignore"):
            use = np.where(known, np.abs(self.cells - r), 0.0) / self.rows.bound
        worst = int(use.argmax())
        limit = thresholds.EMULATION_BOUND
        found = [self._verdict("twice the hard bound", use.flat[worst], limit, worst, "emulation")]
        if not same_tiles or self.name == "lse" or self.case.dtype == "float32" or rows < ROWS_FOR_EMULATION:
            return found
        with np.errstate(invalid="ignore"):
            apart = self.cells - r
            beyond = apart - np.clip(apart, self.rows.drift_low, self.rows.drift_high)
            z = np.where(known, beyond / self.rows.sigma_emulation, 0.0)
        count = known.sum(-1)
        of_row = np.minimum((z**2).sum(-1) / np.maximum(count, 1), thresholds.FLIPPED)
        statistic = np.sqrt(of_row[count > 0].mean())
        limit = thresholds.rms_z_emulation(1 / max(1 / rows, self.repetition.max()), FALSE_ALARM)
        return [*found, self._verdict("rms z", statistic, limit, int(np.abs(z).argmax()), "emulation")]

    # ------------------------------------------------------------------ summary

    def summary(self, p: Array | None) -> TensorSummary:
        n = int(self.compared.sum())
        return TensorSummary(
            elements=self.cells.size,
            judged=int(self.judged.sum()),
            budget_use=float((self.error / self.rows.bound).max()) if n else 0.0,
            max_z=float(np.abs(self.z).max()) if n else 0.0,
            rms_z=float(np.sqrt((self.z**2).sum() / n)) if n else 0.0,
            fa2=self._fa2(p) if p is not None and n else None,
            histogram=self._histogram() if n else (),
        )

    def _histogram(self) -> tuple[int, ...]:
        """Elements by z, as `TensorSummary` has them."""
        z = self.z[self.compared]
        bins = int(2 * Z_END / Z_STEP)
        counts, _ = np.histogram(z, bins, (-Z_END, Z_END))
        legal = int((z == 0).sum())
        counts[bins // 2] -= legal
        return (int((z < -Z_END).sum()), *counts.tolist(), int((z > Z_END).sum()), legal)

    def _fa2(self, p: Array) -> float | None:
        """The largest error in units of p's, for FlashAttention-2's rule; None if there is no unit.

        p may be exact, so the rule needs a floor: half an ulp of the largest value. FlashAttention's tests
        add the like of it, the rounding error of r + 0.3 with 0.3 for the size of what is summed. Here
        that size is known, and takes the place of the value where this is lost in its rounding: what cancels
        to 0 has no ulp that an error could be measured in.
        """
        p = p[..., None] if self.name == "lse" else p
        dtype = FLOAT32 if self.name == "lse" else self.oracle.dtype
        with np.errstate(invalid="ignore"):
            theirs = np.where(self.compared & np.isfinite(p), np.abs(p - self.rows.value), 0.0).max()
        value = np.where(self.compared, np.abs(self.rows.value), 0.0).max()
        summed = np.where(self.compared, self.rows.magnitude, 0.0).max()
        unit = max(theirs, dtype.u * (value if value > dtype.u * summed else summed))
        if unit > 0:
            unit = max(unit, dtype.eta)  # the steps of small numbers are no smaller
        largest = self.error.max()
        return float(largest / unit) if unit > 0 else None if largest > 0 else 0.0
