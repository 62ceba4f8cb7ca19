"""Results that hold what memory held: NaN rows, what was not written, what lies beside the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .piece import CERTAIN, LIKELY, LISTED, Fit, Mask, Piece, are, listed, tensors_of, wrong_tensors

INFINITIES, PLAIN = "the same amid infinities", "the same in plain memory"
"""The further runs: what is not written there holds inf, and what was there before."""


def nan_rows(pieces: Sequence[Piece]) -> Iterator[str]:
    """Rows that hold NaN and should not."""
    for name in tensors_of(pieces):
        places: list[tuple[int, int, int]] = []
        rows = 0
        for piece in pieces:
            of_rows = _rows(np.isnan(piece.results[name]) & piece.fits[name].wrong)
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
        where = f"of {pieces[0].entry} {listed(entries)}, head {listed(of_heads)}"
        yield f"{CERTAIN}: {name} is NaN in {which} {where}: {len(places)} of {rows} rows"


def not_written(pieces: Sequence[Piece]) -> Iterator[str]:
    """Rows that hold what memory was filled with: NaN amid NaN, inf amid infinities."""
    names = []
    for name in wrong_tensors(pieces):
        poison = [_whole(np.isnan(p.results[name])) & _rows(p.fits[name].wrong) for p in pieces]
        if not any(rows.any() for rows in poison):
            continue
        again = [p.repeats.get(INFINITIES, {}).get(name) for p in pieces]
        if all(x is not None and bool((_whole(x == np.inf) | ~rows).all())
               for x, rows in zip(again, poison, strict=True)):  # fmt: skip
            names.append(name)
    if names:
        yield (
            f"{LIKELY}: {', '.join(names)} {'have' if len(names) > 1 else 'has'} rows that are not written:"
            " they hold NaN where memory held NaN, inf where it held inf"
        )


def beside(pieces: Sequence[Piece]) -> Iterator[str]:
    """Results that are right in plain memory, and wrong only where NaN lies beside the tensors."""
    names = []
    for name in wrong_tensors(pieces):
        plain = [piece.repeats.get(PLAIN, {}).get(name) for piece in pieces]
        if not all(
            x is not None
            and not np.isfinite(piece.results[name][piece.fits[name].wrong]).any()
            and not Fit.of(x, getattr(piece.exact, name), piece.exact.dtype).wrong.any()
            for x, piece in zip(plain, pieces, strict=True)
        ):
            continue
        names.append(name)
    if names:
        yield (
            f"{CERTAIN}: {are(names)} right in plain memory, and wrong amid NaN:"
            " what lies beside the tensors, or what nobody wrote, gets into it"
        )


def zeros(pieces: Sequence[Piece]) -> Iterator[str]:
    """All that is wrong is 0, or infinite, and more than a row of it."""
    for name in wrong_tensors(pieces):
        values = np.concatenate([p.results[name][p.fits[name].wrong] for p in pieces])
        everywhere = all(not p.results[name].any() for p in pieces)
        if everywhere or values.size < 2:
            continue  # `factor` says it
        for words, holds in (("0", values == 0), ("inf", values == np.inf), ("-inf", values == -np.inf)):
            if holds.all():
                yield f"{CERTAIN}: {name} is {words} wherever it is wrong"


def _rows(elements: Mask) -> Mask:
    """Which rows hold such an element, (B, H, S)."""
    rows: Mask = elements if elements.ndim == 3 else np.logical_or.reduce(elements, axis=-1)
    return rows


def _whole(elements: Mask) -> Mask:
    """Which rows hold nothing else, (B, H, S)."""
    rows: Mask = elements if elements.ndim == 3 else np.logical_and.reduce(elements, axis=-1)
    return rows
