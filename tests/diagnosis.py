"""What a wrong result looks like: hypotheses about a red comparison, each tried on all of its elements.

A hypothesis is *certain* if every element that can be judged lies within its own hard bound under it, and
some lies outside of the bound of what was asked for; *likely* if nearly all do. Nothing else is said. It
explains and decides nothing: whether a result is right is decided by `judge`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.budget import Dtype
from reference.error_model import Estimate
from reference.oracle import Result

from .cases import Case

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

CERTAIN, LIKELY = "certain", "likely"

NEARLY_ALL = 0.95
"""Of the elements that are judged, and of those that are wrong, how many a likely hypothesis explains."""

TELLING = 16
"""Elements that a factor must explain to be more than a coincidence: for a single one there always is one."""

LARGEST = 2**22
"""Most scores for which other options are tried: each costs an oracle."""

LARGEST_KEPT, MOST_KEPT = 2**13, 64
"""Elements of an earlier call's out, and calls, that are kept to compare with."""

LISTED = 4
"""Rows that are listed; more are counted."""


@dataclass(frozen=True)
class Piece:
    """What one dense call gave, of a ragged batch its sequences of one length.

    Attributes:
        case: dense.
        results: by name, (B, H, S, D); of the lse (B, H, S).
        exact: what they should be.
        under: the exact result if the options (causal, scale, alignment) were others.
        sequences: of a ragged batch, which of its sequences each batch entry is; of a dense one None.
    """

    case: Case
    results: Mapping[str, Array]
    exact: Result
    under: Callable[..., Result]
    sequences: tuple[int, ...] | None = None

    @property
    def entries(self) -> Sequence[int]:
        """What the batch entries are called."""
        return range(self.case.batch) if self.sequences is None else self.sequences

    @property
    def entry(self) -> str:
        return "batch entry" if self.sequences is None else "sequence"

    @cached_property
    def fits(self) -> dict[str, Fit]:
        return {
            name: Fit.of(x, getattr(self.exact, name), self.exact.dtype) for name, x in self.results.items()
        }


@dataclass(frozen=True)
class Fit:
    """Which elements of a tensor are within the hard bounds of exact values, and which can be judged."""

    within: Mask
    judged: Mask

    @classmethod
    def of(cls, x: Array, e: Estimate, dtype: Dtype) -> Fit:
        lse = x.ndim == 3
        rows = ~e.powerless & ~e.nonfinite
        judged = np.broadcast_to(rows if lse else rows[..., None], x.shape)
        overflow = np.inf if lse else dtype.overflow
        with np.errstate(invalid="ignore", over="ignore"):
            within = (x == e.value) | (np.abs(x - e.value) <= e.bound)
            within |= np.isinf(x) & (np.sign(x) * e.value + e.bound >= overflow)
        return cls(within, judged)

    @property
    def wrong(self) -> Mask:
        return self.judged & ~self.within


@dataclass(frozen=True)
class Earlier:
    """A dense call of the same implementation: its case, and what out should have been."""

    case: Case
    out: Estimate
    dtype: Dtype


class Calls:
    """The calls of an implementation whose results it may have kept: the last one, and small ones before."""

    def __init__(self) -> None:
        self._last: Earlier | None = None
        self._small: deque[Earlier] = deque(maxlen=MOST_KEPT)

    def add(self, call: Earlier) -> None:
        self._last = call
        if call.out.value.size <= LARGEST_KEPT:
            self._small.append(call)

    def of_shape(self, shape: tuple[int, ...]) -> Iterator[tuple[str, Earlier]]:
        """What to call each of them, and it; the last first."""
        if self._last is not None and self._last.out.value.shape == shape:
            yield "the call before", self._last
        for call in reversed(self._small):
            if call.out.value.shape == shape and call is not self._last:
                yield "an earlier call", call


def diagnose(pieces: Sequence[Piece], calls: Calls | None = None) -> list[str]:
    """Sentences about a red comparison, what is certain first; none if nothing fits.

    Args:
        pieces: all of it.
        calls: the dense calls before, if they are known.
    """
    if not any(fit.wrong.any() for piece in pieces for fit in piece.fits.values()):
        return []
    hypotheses = (nan_rows, batch_entries, heads, other_options, factor)
    found = [sentence for hypothesis in hypotheses for sentence in hypothesis(pieces)]
    if calls is not None:
        found += earlier_call(pieces, calls)
    return sorted(dict.fromkeys(found), key=lambda sentence: not sentence.startswith(CERTAIN))


# ---------------------------------------------------------------- where it is wrong


def nan_rows(pieces: Sequence[Piece]) -> Iterator[str]:
    """Rows that hold NaN and should not."""
    for name in _tensors(pieces):
        places: list[tuple[int, int, int]] = []
        rows = 0
        for piece in pieces:
            x, fit = piece.results[name], piece.fits[name]
            wrong = np.isnan(x) & fit.wrong
            of_rows = wrong if name == "lse" else wrong.any(-1)
            places += [(piece.entries[b], int(h), int(i)) for b, h, i in np.argwhere(of_rows)]
            rows += of_rows.size
        if not places:
            continue
        if len(places) == rows:
            yield f"{CERTAIN}: {name} is NaN in every row"
            continue
        numbers = sorted({row for *_, row in places})
        if len(numbers) <= LISTED:
            which = f"row{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        else:
            which = f"rows {numbers[0]} to {numbers[-1]}, {len(numbers)} of them"
        entries, of_heads = (sorted({place[axis] for place in places}) for axis in (0, 1))
        where = f"of {pieces[0].entry} {_listed(entries)}, head {_listed(of_heads)}"
        yield f"{CERTAIN}: {name} is NaN in {which} {where}: {len(places)} of {rows} rows"


def batch_entries(pieces: Sequence[Piece]) -> Iterator[str]:
    """Batch entries, or sequences, that are right throughout while others are not."""
    wrong: dict[int, bool] = {}
    for piece in pieces:
        for number, entry in enumerate(piece.entries):
            fits = [(fit.wrong[number].any(), fit.judged[number].any()) for fit in piece.fits.values()]
            if any(judged for _, judged in fits):
                wrong[entry] = any(is_wrong for is_wrong, _ in fits)
    yield from _partly(pieces[0].entry, wrong)


def heads(pieces: Sequence[Piece]) -> Iterator[str]:
    """Query heads that are right throughout while others are not; of groups, by their place in the group."""
    of_queries = [name for name in _tensors(pieces) if name in ("out", "lse", "dq")]
    case = pieces[0].case
    group = case.heads_q // case.heads_kv
    wrong: dict[int, bool] = {}
    in_group: dict[int, list[bool]] = {}
    for head in range(case.heads_q):
        fits = [piece.fits[name] for piece in pieces for name in of_queries]
        if any(fit.judged[:, head].any() for fit in fits):
            wrong[head] = any(fit.wrong[:, head].any() for fit in fits)
            in_group.setdefault(head % group, []).append(wrong[head])
    right = [place for place, found in in_group.items() if not any(found)]
    if len(right) == 1 < group and all(all(found) or not any(found) for found in in_group.values()):
        yield f"{CERTAIN}: only head {right[0]} of each group of {group} query heads is right"
        return
    yield from _partly("head", wrong)


def _partly(what: str, wrong: Mapping[int, bool]) -> Iterator[str]:
    """One that is right, or wrong, alone among several."""
    right = [number for number, is_wrong in wrong.items() if not is_wrong]
    bad = [number for number, is_wrong in wrong.items() if is_wrong]
    if len(right) == 1 and bad:
        others = f"{what} {bad[0]} is" if len(bad) == 1 else "all others are"
        yield f"{CERTAIN}: {what} {right[0]} is right, {others} wrong"
    elif len(bad) == 1 and right:
        yield f"{CERTAIN}: only {what} {bad[0]} is wrong"


# ---------------------------------------------------------------- what it is instead


def other_options(pieces: Sequence[Piece]) -> Iterator[str]:
    """Results that are right for other options than those that were given."""
    if sum(piece.case.batch * piece.case.heads_q * piece.case.len_q * piece.case.len_k
           for piece in pieces) > LARGEST:  # fmt: skip
        return
    for words, changes in _options([piece.case for piece in pieces]):
        exact = [piece.under(**changes) for piece in pieces]
        tried = [
            {name: Fit.of(x, getattr(other, name), other.dtype) for name, x in piece.results.items()}
            for piece, other in zip(pieces, exact, strict=True)
        ]
        # where what is right fits them too, they tell nothing
        vague = {name for name in _tensors(pieces) if _alike(name, pieces, exact)}
        yield from _explained(pieces, tried, f"as with {words}", vague)


def _alike(name: str, pieces: Sequence[Piece], others: Sequence[Result]) -> bool:
    """Whether the right values of a tensor would do for other exact ones too, in most of what is wrong."""
    would_do = [
        Fit.of(getattr(piece.exact, name).value, getattr(other, name), other.dtype).within[
            piece.fits[name].wrong
        ]
        for piece, other in zip(pieces, others, strict=True)
    ]
    found = _joined(would_do)
    return bool(found.size) and bool(found.mean() > 0.5)


def _options(cases: Sequence[Case]) -> Iterator[tuple[str, dict[str, Any]]]:
    case = cases[0]
    if case.causal:
        yield "causal=False", {"causal": False}
        if any(each.len_q != each.len_k for each in cases):
            yield "a causal mask aligned at the top left", {"alignment": "top-left"}
    else:
        yield "causal=True", {"causal": True}
    if case.scale is None:
        yield "scale=1", {"scale": 1.0}
    else:
        yield "the default scale", {"scale": None}


def factor(pieces: Sequence[Piece]) -> Iterator[str]:
    """Results that are the right ones times a constant."""
    for name in _tensors(pieces):
        if name == "lse" or not any(piece.fits[name].wrong.any() for piece in pieces):
            continue
        x = _joined(piece.results[name] for piece in pieces)
        value, bound = (
            _joined(getattr(getattr(piece.exact, name), field) for piece in pieces)
            for field in ("value", "bound")
        )
        judged = _joined(piece.fits[name].judged for piece in pieces)
        wrong = _joined(piece.fits[name].wrong for piece in pieces)
        chosen = judged & np.isfinite(x) & np.isfinite(value)
        if chosen.sum() < TELLING:
            continue
        large = chosen & (np.abs(value) >= np.median(np.abs(value[chosen]), keepdims=True)) & (value != 0)
        if wrong.sum() < TELLING or large.sum() < TELLING:
            continue
        c = float(np.median(x[large] / value[large]))
        if not x[chosen].any():
            yield from _sure(chosen, judged, wrong, f"{name} is 0 everywhere")
            continue
        fits = chosen & (np.abs(x - c * value) <= max(abs(c), 1.0) * bound)
        words = "has the opposite sign" if abs(c + 1) < 1e-3 else f"is off by a constant factor of {c:.4g}"
        if abs(c) > 1e-3:  # less is noise
            yield from _sure(fits, judged, wrong, f"{name} {words}")


def earlier_call(pieces: Sequence[Piece], calls: Calls) -> Iterator[str]:
    """A result that is right for the inputs of an earlier call. (Its last run may have had v negated.)"""
    if len(pieces) != 1 or "out" not in pieces[0].results:
        return
    (piece,) = pieces
    x, wrong = piece.results["out"], piece.fits["out"].wrong
    for which, call in calls.of_shape(x.shape):
        if call.case.dtype != piece.case.dtype or _same_numbers(call.case, piece.case):
            continue
        signed = [Fit.of(sign * call.out.value, piece.exact.out, call.dtype) for sign in (1, -1)]
        if any(fit.within.all() for fit in signed):
            continue  # of the same inputs: that would tell nothing
        for sign in (1, -1):
            fit = Fit.of(sign * x, call.out, call.dtype)
            words = f"out is the result of {which} ({call.case.id})"
            if sentences := list(_sure(fit.within | ~fit.judged, fit.judged & wrong, wrong, words)):
                yield from sentences
                return


def _same_numbers(one: Case, other: Case) -> bool:
    """Whether two cases have the same inputs, whatever is asked of them."""
    asked = {name: getattr(other, name) for name in ("causal", "scale", "layout", "grad", "d_lse")}
    return replace(one, **asked) == other


# ---------------------------------------------------------------- how sure that is


def _explained(
    pieces: Sequence[Piece], tried: Sequence[Mapping[str, Fit]], words: str, vague: Container[str]
) -> Iterator[str]:
    """The tensors that a hypothesis explains, but for some, as one sentence for each degree of certainty."""
    found: dict[str, list[str]] = {}
    for name in _tensors(pieces):
        if name in vague:
            continue
        wrong = _joined(piece.fits[name].wrong for piece in pieces)
        within = _joined(fits[name].within | ~fits[name].judged for fits in tried)
        judged = _joined(fits[name].judged for fits in tried)
        if (wrong & ~judged).any():  # with those options nothing could be said about what is wrong
            continue
        if how := _how_sure(within, judged, wrong):
            found.setdefault(how, []).append(name)
    for how, names in found.items():
        yield f"{how}: {', '.join(names)} {'are' if len(names) > 1 else 'is'} {words}"


def _sure(fits: Mask, judged: Mask, wrong: Mask, words: str) -> Iterator[str]:
    if how := _how_sure(fits, judged, wrong):
        yield f"{how}: {words}"


def _how_sure(fits: Mask, judged: Mask, wrong: Mask) -> str:
    """How sure a hypothesis is that fits these elements; empty if it explains nothing or little."""
    if not wrong.any():
        return ""
    if fits[judged].all():
        return CERTAIN
    return LIKELY if min(fits[judged].mean(), fits[wrong].mean()) >= NEARLY_ALL else ""


def _joined(arrays: Iterable[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate([array.ravel() for array in arrays])


def _tensors(pieces: Sequence[Piece]) -> list[str]:
    """The tensors that every piece has."""
    return [name for name in pieces[0].results if all(name in piece.results for piece in pieces)]


def _listed(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - LISTED} more" if len(numbers) > LISTED else ""
    return ", ".join(map(str, numbers[:LISTED])) + more
