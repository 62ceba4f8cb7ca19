"""Where results are wrong: batch entries, heads, rows and columns, by their place among the tiles.

What is said here is true by what it counts; it is *certain* if all of the place is wrong and nothing else,
*likely* if something of it is right.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .piece import CERTAIN, LIKELY, Mask, Piece, wrong_tensors

OF_QUERIES = ("out", "lse", "dq")

SEEN = 0.5
"""Of the relative error elsewhere: bounds that are no wider would have shown it."""

MOST = 0.6
"""Of all rows, how many a place may have: what most rows are is no place."""


def batch_entries(pieces: Sequence[Piece]) -> Iterator[str]:
    """Batch entries, or sequences, that are right throughout while others are not."""
    yield from _partly(pieces[0].entry, _states(pieces, wrong_tensors(pieces), 0))


def heads(pieces: Sequence[Piece]) -> Iterator[str]:
    """Query heads that are right throughout while others are not; of groups, by their place in the group."""
    names = [name for name in wrong_tensors(pieces) if name in OF_QUERIES]
    case = pieces[0].case
    group = case.heads_q // case.heads_kv
    states = _states(pieces, names, 1)
    in_group: dict[int, set[str]] = {}
    for head, state in states.items():
        in_group.setdefault(head % group, set()).add(state)
    right = [place for place, found in in_group.items() if found == {RIGHT}]
    if len(right) == 1 < group and all(found in ({RIGHT}, {WRONG}) for found in in_group.values()):
        yield f"{CERTAIN}: only head {right[0]} of each group of {group} query heads is right"
        return
    yield from _partly("head", states)


def kv_heads(pieces: Sequence[Piece]) -> Iterator[str]:
    """KV heads of dk and dv that are right throughout while others are not."""
    names = [name for name in wrong_tensors(pieces) if name in ("dk", "dv")]
    yield from _partly("KV head", _states(pieces, names, 1))


RIGHT, WRONG, UNKNOWN = "right", "wrong", "unknown"


@dataclass
class _Place:
    """What is known of a tensor in a batch entry or head.

    Attributes:
        judged, wrong: whether anything can be judged, and is wrong.
        errors, values, bounds: sums of squares.
        elements: how many.
    """

    judged: bool = False
    wrong: bool = False
    errors: float = 0.0
    values: float = 0.0
    bounds: float = 0.0
    elements: int = 0


def _states(pieces: Sequence[Piece], names: Sequence[str], axis: int) -> dict[int, str]:
    """Of each batch entry (axis 0) or head (axis 1) whether it is right in all of some tensors.

    What is within its bounds is right only if an error as large as elsewhere, in terms of the values, would
    have been seen; where bounds are wide nothing is known.
    """
    found: dict[str, dict[int, _Place]] = {name: {} for name in names}
    for piece in pieces:
        for name in names:
            x, e, fit = piece.results[name], getattr(piece.exact, name), piece.fits[name]
            rest = tuple(n for n in range(x.ndim) if n != axis)
            with np.errstate(all="ignore"):
                error = np.where(fit.judged, np.abs(x - e.value), 0.0)
                error = np.nan_to_num(error, nan=np.inf, posinf=np.inf)
                value = np.ones_like(x) if name == "lse" else np.nan_to_num(e.value, posinf=0.0, neginf=0.0)
                bound = np.where(fit.judged, np.nan_to_num(e.bound, posinf=0.0), 0.0)
                sums = [(t**2).sum(rest) for t in (error, value, bound)]
            bad, judged = (np.asarray(mask.any(rest)) for mask in (fit.suspect, fit.judged))
            for number, label in enumerate(piece.entries if axis == 0 else range(x.shape[1])):
                place = found[name].setdefault(label, _Place())
                place.judged |= bool(judged[number])
                place.wrong |= bool(bad[number])
                place.errors += float(sums[0][number])
                place.values += float(sums[1][number])
                place.bounds += float(sums[2][number])
                place.elements += x.size // x.shape[axis]
    return {
        label: state
        for label in dict.fromkeys(label for places in found.values() for label in places)
        if (state := _state([(places, places[label]) for places in found.values() if label in places]))
    }


def _state(of_tensors: Sequence[tuple[Mapping[int, _Place], _Place]]) -> str:
    """Empty if nothing can be judged."""
    judged = [(places, place) for places, place in of_tensors if place.judged]
    if any(place.wrong for _, place in judged):
        return WRONG
    for places, place in judged:
        wrong = [other for other in places.values() if other.wrong]
        errors, values = (sum(getattr(other, field) for other in wrong) for field in ("errors", "values"))
        relative = np.inf if not values else np.sqrt(errors / values)
        if wrong and not np.sqrt(place.bounds) <= SEEN * relative * np.sqrt(place.values):
            return UNKNOWN
    return RIGHT if judged else ""


def _partly(what: str, states: Mapping[int, str]) -> Iterator[str]:
    """One that is right, or wrong, alone among several of which all is known."""
    right, bad = ([number for number, state in states.items() if state == of] for of in (RIGHT, WRONG))
    if len(right) + len(bad) < len(states):
        return
    if len(right) == 1 and bad:
        others = f"{what} {bad[0]} is" if len(bad) == 1 else "all others are"
        yield f"{CERTAIN}: {what} {right[0]} is right, {others} wrong"
    elif len(bad) == 1 and right:
        yield f"{CERTAIN}: only {what} {bad[0]} is wrong"


# ---------------------------------------------------------------- rows and columns


def rows(pieces: Sequence[Piece], explained: Container[str]) -> Iterator[str]:
    """Rows, or keys, or columns, outside of which nothing is wrong, by tensors that share the place.

    Args:
        pieces: all of it.
        explained: tensors of which all elements are explained, the right ones too.
    """
    found: dict[str, list[str]] = {}
    for name in wrong_tensors(pieces):
        if name in explained:
            continue
        sentence = _of_rows(pieces, name) or _of_columns(pieces, name)
        if sentence:
            found.setdefault(sentence, []).append(name)
    for sentence, names in found.items():
        how, words = sentence.split(": ", 1)
        yield f"{how}: {', '.join(names)} {'are' if len(names) > 1 else 'is'} wrong only in {words}"


def _of_rows(pieces: Sequence[Piece], name: str) -> str:
    """The smallest place among the rows of a tensor that has all that is wrong; empty if there is none."""
    best: tuple[float, int, str] | None = None
    candidates: dict[str, list[Mask | None]] = {}
    for number, piece in enumerate(pieces):
        for words, place in _places(piece, name):
            candidates.setdefault(words, [None] * len(pieces))[number] = place
    for order, (words, of_pieces) in enumerate(candidates.items()):
        inside = wrong_inside = judged_inside = judged = 0
        holds = True
        for piece, chosen in zip(pieces, of_pieces, strict=True):
            fit = piece.fits[name]
            bad, can = fit.suspect, fit.judged
            if bad.ndim == 4:
                bad, can = (np.logical_or.reduce(elements, axis=-1) for elements in (bad, can))
            mask = np.zeros(bad.shape[2], bool) if chosen is None else chosen
            holds = holds and not bad[:, :, ~mask].any()
            if not bad.any():
                continue
            inside += mask.sum() * bad.shape[0] * bad.shape[1]
            wrong_inside += int(bad[:, :, mask].sum())
            judged_inside += int(can[:, :, mask].sum())
            judged += int(can.sum())
        if (
            not holds
            or not judged_inside
            or judged_inside > MOST * judged
            or wrong_inside * 4 < judged_inside
        ):
            continue
        if best is None or inside < best[0]:
            how = CERTAIN if wrong_inside == judged_inside else LIKELY
            best = inside, order, f"{how}: {words}"
    return best[2] if best else ""


def _places(piece: Piece, name: str) -> Iterator[tuple[str, Mask]]:
    """Places among the rows of a tensor (keys of dk and dv): what to call them, and which rows they are."""
    of_queries = name in OF_QUERIES
    case = piece.case
    length, others = (case.len_q, case.len_k) if of_queries else (case.len_k, case.len_q)
    what = "row" if of_queries else "key"
    number = np.arange(length)
    if case.causal:
        offset = case.len_k - case.len_q
        seen = number + offset + 1 if of_queries else case.len_q - np.maximum(number - offset, 0)
        sees = np.clip(seen, 0, others)
        across = piece.tile_of(name)[1 if of_queries else 0]
        if of_queries:
            yield "rows that see no key", sees == 0
            yield "the first row that sees a key", (sees > 0) & (np.cumsum(sees > 0) == 1)
            yield "rows that do not see every key", sees < others
            yield f"rows that see no more than one tile of {across} keys", (sees > 0) & (sees <= across)
            yield f"rows that see more than one tile of {across} keys", sees > across
            yield f"rows whose keys fill whole tiles of {across}", (sees > 0) & (sees % across == 0)
        else:
            yield "keys that no row sees", sees == 0
            yield "keys that some rows do not see", sees < others
    own = piece.tile_of(name)[0 if of_queries else 1]
    if piece.tiles is None:  # what is true whatever they are comes first
        yield from _extent(piece, name, what)
    sizes = dict.fromkeys([own] if piece.tiles is not None else [own, 16, 32, 64, 128])
    for tile in sizes:
        tiles = -(-length // tile)
        if tiles < 2:
            continue
        start = (tiles - 1) * tile
        full = "" if length % tile == 0 else ", which is not full"
        end = length - 1
        span = f"{what} {start}" if start == end else f"{what}s {start} to {end}"
        yield f"the last tile of {tile} {what}s{full} ({span})", number >= start
        yield f"the first tile of {tile} {what}s", number < tile
        yield f"tiles of {tile} {what}s after the first", number >= tile
        yield f"the first {what} of each tile of {tile}", number % tile == 0
        yield f"the last {what} of each tile of {tile}", (number % tile == tile - 1)
        yield (
            f"the last {what} of each tile of {tile}, full or not",
            ((number % tile == tile - 1) | (number == length - 1)),
        )
        if tiles > 2:
            yield f"every other tile of {tile} {what}s, from the first on", number // tile % 2 == 0
            yield f"every other tile of {tile} {what}s, from the second on", number // tile % 2 == 1
    if piece.tiles is not None:
        yield from _extent(piece, name, what)


def _extent(piece: Piece, name: str, what: str) -> Iterator[tuple[str, Mask]]:
    """From the first row that is wrong to the last."""
    number = np.arange(piece.results[name].shape[2])
    wrong = piece.fits[name].suspect
    bad = np.flatnonzero(wrong.any((0, 1, 3) if wrong.ndim == 4 else (0, 1)))
    if bad.size and not np.isnan(piece.results[name][wrong]).all():  # NaN is listed by `memory`
        first, last = int(bad[0]), int(bad[-1])
        words = f"{what} {first}" if first == last else f"{what}s {first} to {last}"
        yield f"{words} of {len(number)}", (number >= first) & (number <= last)


def _of_columns(pieces: Sequence[Piece], name: str) -> str:
    """Columns outside of which nothing is wrong."""
    if name == "lse":
        return ""
    wrong = np.any([piece.fits[name].suspect.any((0, 1, 2)) for piece in pieces], axis=0)
    bad = np.flatnonzero(wrong)
    first, last = int(bad[0]), int(bad[-1])
    if last - first + 1 > MOST * wrong.size:
        return ""
    how = CERTAIN if wrong[first : last + 1].all() else LIKELY
    words = f"column {first}" if first == last else f"columns {first} to {last}"
    return f"{how}: {words} of {wrong.size}"
