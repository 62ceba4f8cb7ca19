"""What two runs found, compared: what is newly broken, what is mended, whose errors have grown."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from . import records
from .errors import ReportError
from .outcomes import Changes, changes, report
from .records import Record, TensorSummary
from .run import RUN, Run
from .run import read as read_run
from .summary import EXECUTED, LAW, RECORDS, comparisons

DESCRIPTION = """\
Compares two runs by their records: A is the one before, B the one after. Each is a folder that a run wrote
(reports/out), or a file of records. A comparison is the same if its case and code path are.

Printed are the comparisons that are newly broken, those that are mended, those that only one of them has
(by number), and for each path, dtype and tensor the largest use of the hard bound, the largest z and the root
mean square of z in both, over the comparisons that both have.

A law that is red in B and was not in A is newly broken too, and so is what is red in B and did not run in A.

Exit status: 0 nothing is newly broken; 1 something is; 2 wrong use; 3 the two have nothing in common.
"""

SAME, NEWLY_BROKEN, NOTHING = 0, 1, 3

LISTED = 20
"""Comparisons that are listed; more are counted."""


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


def compared(before: Sequence[Record], after: Sequence[Record]) -> tuple[Changes, list[Growth]]:
    """What has become of the comparisons of a run in another, whatever the implementations are called.

    A record of a law is no comparison.
    """
    then, now = report(before, None), report(after, None)
    found = changes(now, msgspec.structs.replace(then, implementation=now.implementation), "A")
    return found, _growth(before, after)


def _growth(before: Sequence[Record], after: Sequence[Record]) -> list[Growth]:
    old = {(record.path, record.case): record for record in comparisons(before)}
    groups: dict[tuple[str, str, str], list[tuple[TensorSummary, TensorSummary]]] = {}
    for record in {(record.path, record.case): record for record in comparisons(after)}.values():
        tensors = old[record.path, record.case].tensors if (record.path, record.case) in old else {}
        for tensor in tensors.keys() & record.tensors.keys():
            pair = tensors[tensor], record.tensors[tensor]
            groups.setdefault((record.path, record.dtype, tensor), []).append(pair)
    found = []
    for name, pairs in sorted(groups.items()):
        sides = list(zip(*pairs, strict=True))
        budget, largest, rms = (
            (how([getattr(x, field) for x in sides[0]]), how([getattr(x, field) for x in sides[1]]))
            for field, how in (("budget_use", _largest), ("max_z", _largest), ("rms_z", _root_mean_square))
        )
        found.append(Growth(*name, len(pairs), budget, largest, rms))
    return found


def _largest(numbers: Sequence[float | None]) -> float:
    return max(math.inf if x is None else x for x in numbers)


def _root_mean_square(numbers: Sequence[float | None]) -> float:
    return math.sqrt(sum(math.inf if x is None else x * x for x in numbers) / len(numbers))


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", type=Path, help="folder or file of records of the run before")
    parser.add_argument("after", metavar="B", type=Path, help="of the run after")


def main(args: argparse.Namespace) -> int:
    before, after = read(args.before), read(args.after)
    found, growth = compared(before, after)
    more = only_now(before, after)
    show(args.before, args.after, found, growth, more)
    if found.broken or more:
        return NEWLY_BROKEN
    return SAME if found.shared else NOTHING


def only_now(before: Sequence[Record], after: Sequence[Record]) -> list[Record]:
    """Red laws that were not red before, and red comparisons that were not executed before."""

    def name(record: Record) -> tuple[str, ...]:
        laws = [v.rule for v in record.verdicts if not v.held] if record.origin == LAW else []
        return record.path, record.case, record.origin if record.origin == LAW else "", *laws

    there = {name(record) for record in before if record.origin == LAW or record.status in EXECUTED}
    return [record for record in after if record.status == "broken" and name(record) not in there]


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


def show(before: Path, after: Path, found: Changes, growth: Sequence[Growth], more: Sequence[Record]) -> None:
    """Prints what has changed."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    for letter, path in (("A", before), ("B", after)):
        note = read_run(path / RUN) if path.is_dir() else None
        say(f"{letter}: {path}" + (f", {_words(note)}" if note else ""))
    if found.incomparable:
        say(f"nothing can be compared: A {found.incomparable.removeprefix('it ')}")
    say(f"comparisons in both: {found.shared}; only in A: {found.gone}; only in B: {found.new}")
    say(f"newly broken: {len(found.broken)}; mended: {len(found.mended)}; broken in both: {found.red}")
    for what, listed in (("newly broken", found.broken), ("mended", found.mended)):
        for one in listed[:LISTED]:
            say(f"  {what}: {one.case}" + (f" ({one.reason})" if one.reason else ""))
            if one.status == "broken":
                say(f"    replay: {one.replay}")
        if len(listed) > LISTED:
            say(f"  {what}: {len(listed) - LISTED} more")
    laws = sum(record.origin == LAW for record in more)
    say(f"red only in B: {len(more) - laws} comparisons that A has not, {laws} laws")
    for record in more[:LISTED]:
        say(f"  red: {record.case} ({record.reason})")
        say(f"    replay: {record.replay}")
    if len(more) > LISTED:
        say(f"  red: {len(more) - LISTED} more")
    if not growth:
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
    for of in growth:
        numbers = [f"{x:.3f}" for pair in (of.budget_use, of.max_z, of.rms_z) for x in pair]
        table.add_row(of.path, of.dtype, of.tensor, str(of.comparisons), *numbers)
    console.print(table)


def _words(note: Run) -> str:
    return (
        f"{note.implementation} on {note.machine}, torch {note.torch}, triton {note.triton}:"
        f" {note.reason} ({note.status})"
    )
