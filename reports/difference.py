"""What two runs found, compared: what is newly broken, what is mended, whose errors have grown."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from . import records
from .errors import ReportError
from .records import Record
from .run import RUN, Run
from .run import read as read_run
from .summary import RECORDS

DESCRIPTION = """\
Compares two runs by their records: A is the one before, B the one after. Each is a folder that a run wrote
(reports/out), or a file of records. A comparison is the same if its case, implementation and code path are.

Printed are the comparisons that are newly broken, those that are mended, those that only one of them has
(by number), and for each path, dtype and tensor the largest use of the hard bound, the largest z and the root
mean square of z in both, over the comparisons that both have.

Exit status: 0 nothing is newly broken; 1 something is; 2 wrong use.
"""

SAME, NEWLY_BROKEN = 0, 1

LISTED = 20
"""Comparisons that are listed; more are counted."""

Name = tuple[str, str, str]
"""Of a comparison: its implementation, path and case."""


class Growth(msgspec.Struct, frozen=True):
    """How far a tensor was off, before and after, over the comparisons that both runs have.

    Attributes:
        path, dtype, tensor: which.
        comparisons: how many.
        budget_use, max_z, rms_z: before and after; infinite where a number was not finite.
    """

    path: str
    dtype: str
    tensor: str
    comparisons: int
    budget_use: tuple[float, float]
    max_z: tuple[float, float]
    rms_z: tuple[float, float]


class RunDifference(msgspec.Struct, frozen=True):
    """Two runs.

    Attributes:
        newly_broken, mended: records of the run after, of comparisons that both have.
        still_broken: how many are broken in both.
        only_before, only_after: how many comparisons only one has.
        both: how many both have.
        growth: by path, dtype and tensor.
    """

    newly_broken: list[Record]
    mended: list[Record]
    still_broken: int
    only_before: int
    only_after: int
    both: int
    growth: list[Growth]


def compared(before: Iterable[Record], after: Iterable[Record]) -> RunDifference:
    """What has become of the comparisons of a run in another.

    A record of a law is no comparison, but may be newly broken or mended too; where there is none, the law
    held.
    """
    old, new = _by_name(before), _by_name(after)
    both = [name for name in new if name in old]
    broken = {name: (old[name].status == "broken", new[name].status == "broken") for name in both}
    return RunDifference(
        newly_broken=[new[name] for name in both if broken[name] == (False, True)],
        mended=[new[name] for name in both if broken[name] == (True, False)],
        still_broken=sum(pair == (True, True) for pair in broken.values()),
        only_before=len(old.keys() - new.keys()),
        only_after=len(new.keys() - old.keys()),
        both=len(both),
        growth=_growth([(old[name], new[name]) for name in both]),
    )


def _by_name(found: Iterable[Record]) -> dict[Name, Record]:
    """The comparisons that were executed; of one that is there twice, the worse."""
    by_name: dict[Name, Record] = {}
    for record in found:
        if record.status == "not claimed" or record.origin == "law":
            continue
        name = record.implementation, record.path, record.case
        if name not in by_name or by_name[name].status != "broken":
            by_name[name] = record
    return by_name


def _growth(pairs: Sequence[tuple[Record, Record]]) -> list[Growth]:
    groups: dict[tuple[str, str, str], list[tuple[Record, Record]]] = {}
    for old, new in pairs:
        for tensor in old.tensors.keys() & new.tensors.keys():
            groups.setdefault((new.path, new.dtype, tensor), []).append((old, new))
    found = []
    for (path, dtype, tensor), group in sorted(groups.items()):
        sides = [[record.tensors[tensor] for record in side] for side in zip(*group, strict=True)]
        budget, largest, rms = (
            tuple(_over([getattr(summary, name) for summary in side], how) for side in sides)
            for name, how in (("budget_use", max), ("max_z", max), ("rms_z", _root_mean_square))
        )
        found.append(Growth(path, dtype, tensor, len(group), budget, largest, rms))  # type: ignore[arg-type]
    return found


def _over(numbers: Sequence[float | None], how: object) -> float:
    assert callable(how)
    return float(how([float("inf") if x is None else x for x in numbers]))


def _root_mean_square(numbers: Sequence[float]) -> float:
    return float((sum(x * x for x in numbers) / len(numbers)) ** 0.5)


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", type=Path, help="folder or file of records of the run before")
    parser.add_argument("after", metavar="B", type=Path, help="of the run after")


def main(args: argparse.Namespace) -> int:
    found = compared(read(args.before), read(args.after))
    show(args.before, args.after, found)
    return NEWLY_BROKEN if found.newly_broken else SAME


def read(path: Path) -> list[Record]:
    """The records of a run, from its folder or from the file itself.

    Raises:
        ReportError: if there are none that can be read.
    """
    file = path / RECORDS if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        runs = sorted(other.parent.name for other in path.glob(f"*/{RECORDS}"))
        hint = f"; its folders {', '.join(runs)} have" if runs else ""
        raise ReportError(f"{path} has no {RECORDS}: no run has written there{hint}")
    return records.read(file)


def show(before: Path, after: Path, found: RunDifference, console: Console | None = None) -> None:
    """Prints what has changed."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(file=console.file, highlight=False, width=160)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    for letter, path in (("A", before), ("B", after)):
        note = read_run(path / RUN) if path.is_dir() else None
        say(f"{letter}: {path}" + (f", {_words(note)}" if note else ""))
    say(f"comparisons in both: {found.both}; only in A: {found.only_before}; only in B: {found.only_after}")
    say(f"newly broken: {len(found.newly_broken)}; mended: {len(found.mended)}; broken in both:"
        f" {found.still_broken}")  # fmt: skip
    for what, listed in (("newly broken", found.newly_broken), ("mended", found.mended)):
        for record in listed[:LISTED]:
            say(f"  {what}: {record.case}" + (f" ({record.reason})" if record.reason else ""))
            if record.status == "broken":
                say(f"    replay: {record.replay}")
        if len(listed) > LISTED:
            say(f"  {what}: {len(listed) - LISTED} more")
    if not found.growth:
        return
    table = Table(box=None, pad_edge=False)
    for heading in (
        "path",
        "dtype",
        "tensor",
        "comparisons",
        "budget A",
        "B",
        "max z A",
        "B",
        "rms z A",
        "B",
    ):
        table.add_column(heading, justify="left" if heading in ("path", "dtype", "tensor") else "right")
    for of in found.growth:
        numbers = [f"{x:.3f}" for pair in (of.budget_use, of.max_z, of.rms_z) for x in pair]
        table.add_row(of.path, of.dtype, of.tensor, str(of.comparisons), *numbers)
    console.print(table)


def _words(note: Run) -> str:
    return (
        f"{note.implementation} on {note.machine}, torch {note.torch}, triton {note.triton}:"
        f" {note.reason} ({note.status})"
    )
