"""What results are in terms of the right ones: a factor, other places, another tensor, fewer digits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations

import numpy as np

from reference.budget import BFLOAT16, FLOAT16, Dtype

from ..cases import Case
from .piece import (
    CERTAIN,
    Array,
    Fit,
    Mask,
    Piece,
    are,
    how_sure,
    joined,
    sure,
    tensors_of,
    wrong_tensors,
)

TELLING = 16
"""Elements that a factor must explain to be more than a coincidence: for a single one there always is one."""

LARGEST_MOVED = 2**18
"""Most elements of a tensor whose places are tried in another order."""


# ---------------------------------------------------------------- a factor


def factor(pieces: Sequence[Piece]) -> Iterator[str]:
    """Results that are the right ones times a constant."""
    for name in wrong_tensors(pieces):
        if name == "lse":
            continue
        x = joined(piece.results[name] for piece in pieces)
        value, bound = (
            joined(getattr(getattr(piece.exact, name), field) for piece in pieces)
            for field in ("value", "bound")
        )
        judged = joined(piece.fits[name].judged for piece in pieces)
        wrong = joined(piece.fits[name].wrong for piece in pieces)
        chosen = judged & np.isfinite(x) & np.isfinite(value)
        if chosen.sum() < TELLING:
            continue
        large = chosen & (np.abs(value) >= np.median(np.abs(value[chosen]), keepdims=True)) & (value != 0)
        if wrong.sum() < TELLING or large.sum() < TELLING:
            continue
        if not x[chosen].any():
            yield from sure(chosen, judged, wrong, f"{name} is 0 everywhere")
            continue
        c = float(np.median(x[large] / value[large]))

        def fits(
            c: float, chosen: Mask = chosen, x: Array = x, value: Array = value, bound: Array = bound
        ) -> Mask:
            within: Mask = chosen & (np.abs(x - c * value) <= max(abs(c), 1.0) * bound)
            return within

        if abs(c) <= 1e-3 or f"{c:.4g}" == "1":  # less is noise
            continue
        if np.median(np.abs(c * value[large]) / np.maximum(bound[large] * max(abs(c), 1.0), 1e-300)) < 4:
            continue  # bounds as large as the values would let anything be a factor
        if wrong[large].mean() < 0.5:
            continue  # most are right: no factor
        if abs(c + 1) < 1e-3:
            yield from sure(fits(c), judged, wrong, f"{name} has the opposite sign")
            continue
        # what is known about c: the factors that fit as well as the median does
        named = [
            words
            for words, known in _factors(pieces[0].case).items()
            if abs(c / known - 1) < 0.02
            and how_sure(fits(known), judged, wrong) == how_sure(fits(c), judged, wrong)
        ]
        words = f"{name} is off by a constant factor of {c:.4g}"
        yield from sure(fits(c), judged, wrong, words + (f": {' or '.join(named)}" if named else ""))


def _factors(case: Case) -> dict[str, float]:
    """Factors that have a name, but for 1 and -1."""
    scale, group = case.effective_scale, case.heads_q // case.heads_kv
    known = {
        "ln 2": math.log(2),
        "1 / ln 2": 1 / math.log(2),
        "the scale": scale,
        "1 / scale": 1 / scale if scale else 1.0,
        "the scale squared": scale**2,
        "scale / ln 2, the scale of an exponent of 2": scale / math.log(2),
        "the group of query heads on a KV head": float(group),
        "1 / the group of query heads on a KV head": 1 / group,
        "the number of KV heads": float(case.heads_kv),
        "1 / the number of KV heads": 1 / case.heads_kv,
    }
    return {words: c for words, c in known.items() if c and abs(abs(c) - 1) > 0.01}


# ---------------------------------------------------------------- the same numbers in other places


def moved(pieces: Sequence[Piece]) -> Iterator[str]:
    """Results that are right for another place: another batch entry or head, other rows, another order."""
    for name in wrong_tensors(pieces):
        if sum(piece.results[name].size for piece in pieces) > LARGEST_MOVED:
            continue
        wrong = joined(piece.fits[name].wrong for piece in pieces)
        judged = joined(piece.fits[name].judged for piece in pieces)
        if wrong.sum() < TELLING:
            continue
        found: dict[str, list[str]] = {}
        for words, others in _elsewhere(pieces, name):
            near, as_right = [], []
            for piece, (value, bound) in zip(pieces, others, strict=True):
                e = getattr(piece.exact, name)
                limit = np.maximum(bound, e.bound)
                with np.errstate(invalid="ignore"):
                    near.append(
                        (piece.results[name] == value) | (np.abs(piece.results[name] - value) <= limit)
                    )
                    as_right.append((e.value == value) | (np.abs(e.value - value) <= limit))
                    as_right[-1] |= np.abs(value) <= limit  # what is near 0 is anywhere the same
            if joined(as_right)[wrong].mean() > 0.5:
                continue  # what is right is no different there
            if how := how_sure(joined(near), judged, wrong):
                found.setdefault(how, []).append(words)
        for how, all_words in found.items():
            if how == CERTAIN or CERTAIN not in found:
                yield f"{how}: {name} is {all_words[0]}"


def _elsewhere(pieces: Sequence[Piece], name: str) -> Iterator[tuple[str, list[tuple[Array, Array]]]]:
    """Where results may have come from: in words, and the right values and bounds that would then be here."""
    for words, move in _moves(pieces, name):
        estimates = [getattr(piece.exact, name) for piece in pieces]
        yield words, [(move(e.value), move(e.bound)) for e in estimates]


def _moves(pieces: Sequence[Piece], name: str) -> Iterator[tuple[str, Callable[[Array], Array]]]:
    shape = pieces[0].results[name].shape
    for axis, what in ((0, pieces[0].entry), (1, "head")):
        n = shape[axis]
        if n < 2 or (axis == 0 and len(pieces) > 1):
            continue
        for other in dict.fromkeys((*range(min(n, 8)), n - 1)):
            yield f"that of {what} {other} throughout", partial(_repeated, axis=axis, number=other)
        yield f"that of the {what}s in reverse order", partial(np.flip, axis=axis)
        yield f"that of the next {what}", partial(np.roll, shift=-1, axis=axis)
        if n > 2:
            yield f"that of the {what} before", partial(np.roll, shift=1, axis=axis)
        for parts in (k for k in range(2, n) if n % k == 0):
            order = np.arange(n).reshape(parts, -1).T.ravel()
            words = f"that of other {what}s: their numbers are transposed, {parts} x {n // parts}"
            yield words, partial(np.take, indices=order, axis=axis)
    tile = pieces[0].tile_of(name)[0 if name in ("out", "lse", "dq") else 1]
    for by in dict.fromkeys((1, -1, tile, -tile)):
        if all(abs(by) < piece.results[name].shape[2] for piece in pieces):
            words = (
                f"that of {abs(by)} row{'s' if abs(by) > 1 else ''} {'further on' if by > 0 else 'before'}"
            )
            yield words, partial(np.roll, shift=-by, axis=2)
    if len(pieces) == 1:
        dimensions = ("batch", "heads", "rows", "columns")[: len(shape)]
        for axes in permutations(range(len(shape))):
            moved_axes = [axis for axis in axes if shape[axis] > 1]
            if moved_axes != sorted(moved_axes):
                order_of = ", ".join(dimensions[axis] for axis in axes)
                yield f"transposed: it lies in memory as ({order_of})", partial(_transposed, axes=axes)


def _repeated(x: Array, axis: int, number: int) -> Array:
    return np.repeat(x.take([number], axis), x.shape[axis], axis)


def _transposed(x: Array, axes: tuple[int, ...]) -> Array:
    return x.transpose(axes).reshape(x.shape)


def swapped(pieces: Sequence[Piece]) -> Iterator[str]:
    """A result that is another tensor's."""
    names = tensors_of(pieces)
    for name in wrong_tensors(pieces):
        for other in names:
            if other == name or any(p.results[other].shape != p.results[name].shape for p in pieces):
                continue
            estimates = [getattr(p.exact, other) for p in pieces]
            fits = [Fit.of(p.results[name], e, p.exact.dtype) for p, e in zip(pieces, estimates, strict=True)]
            wrong = joined(p.fits[name].wrong for p in pieces)
            if (wrong & joined(np.abs(e.value) > e.bound for e in estimates)).sum() >= TELLING:
                judged = joined(p.fits[name].judged for p in pieces)
                yield from sure(
                    joined(fit.within for fit in fits), judged, wrong, f"{name} is what {other} should be"
                )


# ---------------------------------------------------------------- fewer digits


def digits(pieces: Sequence[Piece]) -> Iterator[str]:
    """Results that are all numbers of a lower precision than they are stored in."""
    found: dict[str, list[str]] = {}
    for name in tensors_of(pieces):
        stored = "float32" if name == "lse" else pieces[0].case.dtype
        x = joined(piece.results[name] for piece in pieces)
        right, bound, magnitude = (
            joined(getattr(getattr(piece.exact, name), field) for piece in pieces)
            for field in ("value", "bound", "magnitude")
        )
        for dtype in _lower(stored):
            # noise about 0, and float16's subnormal numbers, have few digits anyway
            large = (np.abs(right) > 4 * bound) & (np.abs(x) >= 2.0**-14)
            known = np.isfinite(x) & large & np.isfinite(right) & (np.abs(right) < dtype.largest)
            with np.errstate(invalid="ignore"):
                near = np.abs(x - right) <= bound + 8 * dtype.u * magnitude
            if not near[known].all():  # something else is wrong
                continue
            digits = 3 if (stored, dtype.name) == ("float16", "bfloat16") else 13
            if known.sum() * digits < 39:  # by chance each has them with a probability of 2^-digits
                continue
            # right values that have few digits themselves, as of exact problems, tell nothing
            few = dtype.rounded(right[known]) == right[known]
            if few.mean() < 0.5 and (dtype.rounded(x[known]) == x[known]).all():
                found.setdefault(dtype.name, []).append(name)
                break
    for dtype_name, names in found.items():
        yield f"{CERTAIN}: {are(names)} rounded to {dtype_name}: no element has more digits"


def _lower(stored: str) -> list[Dtype]:
    return {"float32": [BFLOAT16, FLOAT16], "float16": [BFLOAT16], "bfloat16": []}[stored]
