"""Which of the case space a run has executed, as tables of counts: a hole shows as an empty cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .capabilities import parsed
from .records import Record
from .summary import EXECUTED, comparisons

TILE = (64, 64)
"""Of an implementation whose tiles are not known: the commonest."""

Claims = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """Counts by two properties of a case.

    Attributes:
        title: a sentence.
        corner: what the rows are, and the columns.
        columns: their names.
        rows: name, and in each column how many; None where the implementation claims no such case.
        note: how to read it.
    """

    title: str
    corner: str
    columns: list[str]
    rows: list[tuple[str, list[int | None]]]
    note: str

    @property
    def holes(self) -> int:
        """Cells that are claimed and empty."""
        return sum(count == 0 for _, counts in self.rows for count in counts)

    @property
    def largest(self) -> int:
        return max((count or 0 for _, counts in self.rows for count in counts), default=0)


def tables(found: Sequence[Record], claims: Claims) -> list[Table]:
    """The tables of a run.

    Args:
        found: its records; those that were not executed do not count.
        claims: of the implementation; none: all is taken to be claimed.
    """
    executed = [record for record in comparisons(found) if record.status in EXECUTED]
    if not executed:
        return []
    return [_lengths(executed, claims), _masks(executed, claims), *_kinds(executed, claims)]


def _table(
    title: str,
    corner: str,
    rows: Sequence[str],
    columns: Sequence[str],
    seen: Iterator[tuple[str, str]],
    claimed: Callable[[str, str], bool],
    note: str,
) -> Table:
    counts = Counter(seen)

    def cell(row: str, column: str) -> int | None:
        return counts[row, column] if counts[row, column] or claimed(row, column) else None

    return Table(
        title, corner, list(columns), [(row, [cell(row, column) for column in columns]) for row in rows], note
    )


LENGTHS = ("0", "1", "below a tile", "whole tiles", "1 more", "1 less", "between")


def _lengths(found: Sequence[Record], claims: Claims) -> Table:
    def seen() -> Iterator[tuple[str, str]]:
        for record in found:
            rows, keys = record.tile or TILE
            pairs = {(_length(q, rows), _length(k, keys)) for q, k in parsed(record.case).pairs}
            yield from sorted(pairs)

    cross, empty = (not claims or bool(claims.get(name)) for name in ("cross_lengths", "empty"))
    known = any(record.tile for record in found)
    tiles = (
        "the implementation's own, the largest of its passes"
        if known
        else "taken to be {} x {}".format(*TILE)
    )
    return _table(
        "Lengths, by where they end in a tile.",
        "queries \\ keys", LENGTHS, LENGTHS, seen(),
        lambda q, k: (cross or q == k) and (empty or "0" not in (q, k)),
        f"Comparisons with a sequence of such lengths. Tiles are {tiles}.",
    )  # fmt: skip


def _length(n: int, tile: int) -> str:
    if n <= 1:
        return str(n)
    if n < tile - 1 or (n < tile and tile <= 2):
        return "below a tile"
    return {0: "whole tiles", 1: "1 more", tile - 1: "1 less"}.get(n % tile, "between")


RELATIONS = ("Sq < Sk", "Sq = Sk", "Sq > Sk", "one is 0")
HEADS = ("1 head", "a KV head each", "groups", "one KV head")


def _masks(found: Sequence[Record], claims: Claims) -> Table:
    def seen() -> Iterator[tuple[str, str]]:
        for record in found:
            case = parsed(record.case)
            mask = "causal" if case.causal else "full"
            heads = HEADS[
                0 if case.heads_q == 1
                else 1 if case.heads_q == case.heads_kv
                else 3 if case.heads_kv == 1
                else 2
            ]  # fmt: skip
            for relation in sorted({_relation(q, k) for q, k in case.pairs}):
                yield f"{mask}, {relation}", heads

    def claimed(row: str, heads: str) -> bool:
        if not claims:
            return True
        mask, relation = row.split(", ")
        return (
            mask in claims.get("masks", (mask,))
            and (relation == "Sq = Sk" or bool(claims.get("empty" if "0" in relation else "cross_lengths")))
            and (heads in HEADS[:2] or bool(claims.get("gqa")))
        )

    rows = [f"{mask}, {relation}" for mask in ("full", "causal") for relation in RELATIONS]
    return _table(
        "Mask and lengths, by heads.", "mask, lengths \\ heads", rows, HEADS, seen(), claimed,
        "Comparisons with a sequence of that kind; groups: several query heads on each of several KV heads.",
    )  # fmt: skip


def _relation(q: int, k: int) -> str:
    return RELATIONS[3 if 0 in (q, k) else 1 if q == k else 0 if q < k else 2]


def _kinds(found: Sequence[Record], claims: Claims) -> Iterator[Table]:
    """Values and memory, each by dtype."""
    from tests.cases import DTYPES, LAYOUTS, REGIMES

    dtypes = claims.get("dtypes") or DTYPES
    contiguous = claims.get("contiguous", "bhsd")
    yield _table(
        "Values, by dtype.", "values", tuple(REGIMES), DTYPES,
        ((parsed(record.case).values, record.dtype) for record in found),
        lambda _, dtype: dtype in dtypes,
        "Comparisons.",
    )  # fmt: skip
    yield _table(
        "Memory, by dtype.", "layout", tuple(LAYOUTS), DTYPES,
        ((parsed(record.case).layout, record.dtype) for record in found),
        lambda layout, dtype: dtype in dtypes
        and (not claims or bool(claims.get("strided")) or layout == contiguous),
        "Comparisons.",
    )  # fmt: skip
