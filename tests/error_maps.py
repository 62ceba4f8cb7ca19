"""Where a broken comparison is wrong: each of its tensors as a small picture and its marginals.

z is the judge's own (`judge.deviation`). What is kept is bounded whatever the tensor's size: a cell of a
picture stands for a block of elements, and shows the worst of them, so that a single wrong element is seen.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.emulation import Tiles
from reports.records import LONGEST, ErrorMap

from .diagnosis import Piece
from .judge import Deviation, deviation

Array = NDArray[np.float64]

MOST_ROWS, MOST_COLUMNS = 96, 64
"""Cells of a picture."""

MOST_RECORDS = 10
"""Records of one process that keep their pictures: a run that is all red stays small."""

LARGEST_Z = 60_000.0
"""Larger ones are drawn as this: float16 ends soon after."""

ALLOWED, MISSING, MINUS, PLUS, NAN = 1, 2, 3, 4, 5
"""Numbers in `reports.records.NONFINITE`."""


def error_maps(pieces: Sequence[Piece], tensors: Collection[str], tiles: Tiles | None) -> list[ErrorMap]:
    """The pictures of some tensors, each of the batch entry, or sequence, and head that is worst.

    Args:
        pieces: all of a comparison.
        tensors: by name; those that the comparison has not are left out.
        tiles: of the implementation, if they are known.
    """
    return [_of_tensor(name, found, _tile(name, tiles)) for name in ("out", "lse", "dq", "dk", "dv")
            if name in tensors and (found := list(_deviations(name, pieces)))]  # fmt: skip


def _deviations(name: str, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Deviation]]:
    for piece in pieces:
        x = piece.results.get(name)
        if x is not None and x.size:
            yield piece, deviation(piece.case, name, x, piece.exact)


def _tile(name: str, tiles: Tiles | None) -> int | None:
    """Rows of a tile of the pass that writes a tensor."""
    if tiles is None:
        return None
    return {"out": tiles.forward[0], "lse": tiles.forward[0], "dq": tiles.dq[0]}.get(name, tiles.dkdv[1])


def _of_tensor(name: str, found: Sequence[tuple[Piece, Deviation]], tile: int | None) -> ErrorMap:
    badness = [np.where(d.misplaced, np.inf, np.abs(d.z)) for _, d in found]
    number = int(np.argmax([of.max() for of in badness]))
    (piece, shown), bad = found[number], badness[number]
    entry, head, row, column = (int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
    x = piece.results[name]
    x = x[..., None] if name == "lse" else x
    columns = x.shape[1 if name == "lse" else 3]
    step = _power_of_two(x.shape[2], MOST_ROWS), -(-columns // MOST_COLUMNS)
    part = _Part(name, entry, head)
    z = _pooled(np.clip(part.of(shown.z), -LARGEST_Z, LARGEST_Z), step)
    kinds = _nonfinite(x, shown)
    wrong = part.of(shown.beyond | shown.misplaced)
    which = piece.entries[entry] if piece.sequences is not None else None
    dimensions = 3 if name == "lse" else 4
    return ErrorMap(
        tensor=name,
        shape=x.shape[:dimensions],
        entry=entry,
        head=head,
        sequence=which,
        tile=tile,
        limit=shown.limit,
        step=step,
        cells=(z.shape[0], z.shape[1]),
        z=zlib.compress(z.astype("<f2").tobytes()),
        nonfinite=zlib.compress(_pooled(part.of(kinds), step).tobytes()) if (kinds > 0).any() else b"",
        by_batch=_marginal(_by_entry(found, badness)),
        by_head=_marginal(np.max([of.max((0, 2, 3)) for of in badness], axis=0)),
        by_row=_marginal(bad.max((0, 1, 3))),
        rows=_extent(wrong, 0),
        columns=_extent(wrong, 1),
        wrong=sum(int((d.beyond | d.misplaced).sum()) for _, d in found),
        elements=sum(int(d.judged.sum()) for _, d in found),
        first=_first(found, dimensions),
        worst=((entry if which is None else which), head, row, column)[:dimensions],
        worst_z=_number(float(shown.z[entry, head, row, column]) if np.isfinite(bad.max()) else np.inf),
    )


@dataclass(frozen=True)
class _Part:
    """Of a tensor what a picture shows: rows x head dimension of one head, of the lse rows x heads."""

    tensor: str
    entry: int
    head: int

    def of(self, x: NDArray[Any]) -> NDArray[Any]:
        return x[self.entry, :, :, 0].T if self.tensor == "lse" else x[self.entry, self.head]


def _extent(wrong: NDArray[np.bool_], axis: int) -> tuple[int, int, int] | None:
    """Of the rows, or the columns: the first with something wrong, the last, and how many there are."""
    found = np.unique(np.nonzero(wrong)[axis])
    return (int(found[0]), int(found[-1]), len(found)) if found.size else None


def _power_of_two(n: int, most: int) -> int:
    """The smallest power of two of which n takes no more than so many: tiles then end where cells do."""
    return 1 << max(0, (-(-n // most) - 1).bit_length())


def _pooled(x: NDArray[Any], step: tuple[int, int]) -> NDArray[Any]:
    """Of each block the element that is largest, sign aside."""
    rows, columns = (-(-n // s) for n, s in zip(x.shape, step, strict=True))
    padded = np.zeros((rows * step[0], columns * step[1]), x.dtype)
    padded[: x.shape[0], : x.shape[1]] = x
    blocks = padded.reshape(rows, step[0], columns, step[1]).swapaxes(1, 2).reshape(rows, columns, -1)
    return np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]


def _nonfinite(x: Array, d: Deviation) -> NDArray[np.uint8]:
    """What of each element that is not finite, or should not be, is to be told."""
    kinds = np.zeros(x.shape, np.uint8)
    kinds[~np.isfinite(x)] = ALLOWED
    wrong = d.misplaced
    kinds[wrong & np.isfinite(x)] = MISSING
    for kind, those in ((MINUS, np.isneginf(x)), (PLUS, np.isposinf(x)), (NAN, np.isnan(x))):
        kinds[wrong & those] = kind
    return kinds


def _by_entry(found: Sequence[tuple[Piece, Deviation]], badness: Sequence[Array]) -> Array:
    """The largest of each batch entry, or sequence; 0 of those that have no such row."""
    largest: dict[int, float] = {}
    for (piece, _), of in zip(found, badness, strict=True):
        largest |= zip(piece.entries, of.max((1, 2, 3)).tolist(), strict=True)
    by = np.zeros(max(largest) + 1)
    by[list(largest)] = list(largest.values())
    return by


def _marginal(x: Array) -> list[float | None]:
    """At most `LONGEST` numbers."""
    step = -(-len(x) // LONGEST)
    return [_number(float(x[i : i + step].max())) for i in range(0, len(x), step)]


def _number(x: float) -> float | None:
    return float(f"{x:.4g}") if np.isfinite(x) else None


def _first(found: Sequence[tuple[Piece, Deviation]], dimensions: int) -> tuple[int, ...] | None:
    """The first wrong element, in the order of batch entries, or sequences."""
    places = []
    for piece, d in found:
        wrong = d.beyond | d.misplaced
        if wrong.any():
            entry, *rest = (int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
            places.append((piece.entries[entry], *rest)[:dimensions])
    return min(places, default=None)
