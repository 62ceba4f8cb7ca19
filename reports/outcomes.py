"""What a run came to, one line a comparison; and what has become of the comparisons of an earlier run.

The file stays until the next run into the same folder, which then tells what is newly broken and what is
mended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from . import versioned
from .records import Record
from .run import Run
from .summary import EXECUTED, comparisons

VERSION = 1
"""Of the format. Raised whenever a field changes its meaning or goes."""

REPORT, PREVIOUS = "report.json", "previous-report.json"
"""The files: of the run, and of the one before it in the same folder."""


FINITE = "finite where it should be"
"""The rule of what is NaN or infinite and should not be; such elements have no z."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of a comparison.

    Attributes:
        case, path, origin, dtype, status, reason: of its record.
        largest_z, budget_use: over its tensors; None if that is not finite, or something is not that should
            be, or there is none.
        words, replay: of its record, if it is red.
    """

    case: str
    path: str
    origin: str
    dtype: str
    status: str
    reason: str = ""
    largest_z: float | None = None
    budget_use: float | None = None
    words: str = ""
    replay: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run with its comparisons.

    Attributes:
        version: of this format.
        run: what it was; None if it did not come to its end.
        implementation: its name.
        outcomes: by comparison.
    """

    version: int = VERSION
    implementation: str
    run: Run | None
    outcomes: list[Outcome]


def report(found: Sequence[Record], run: Run | None) -> Report:
    """What the records of a run came to."""
    names = {record.implementation for record in found}
    name = run.implementation if run else ", ".join(sorted(names)) or "unknown"
    return Report(implementation=name, run=run, outcomes=[outcome(record) for record in comparisons(found)])


def outcome(record: Record) -> Outcome:
    red = record.status == "broken"
    infinite = any(v.rule == FINITE and not v.held for v in record.verdicts)
    summaries = [] if infinite else list(record.tensors.values())
    return Outcome(
        record.case, record.path, record.origin, record.dtype, record.status, record.reason,
        worst_of([t.max_z for t in summaries]),
        worst_of([t.budget_use for t in summaries]),
        record.words if red else "",
        record.replay if red else "",
    )  # fmt: skip


def worst_of(numbers: Sequence[float | None]) -> float | None:
    """The largest of some numbers to five digits; None if one is not finite, or there are none."""
    if not numbers or any(x is None or not math.isfinite(x) for x in numbers):
        return None
    return float(f"{max(x for x in numbers if x is not None):.5g}")


def read(path: Path) -> Report:
    """The report of a file.

    Raises:
        ReportError: if it is missing, of another version, or no such file.
    """
    return versioned.read(path, Report, VERSION, "report")


@dataclass(frozen=True)
class Changes:
    """A run beside an earlier one.

    Attributes:
        label: which that was, in words.
        incomparable: why nothing can be compared; empty if it can.
        broken, mended: red now and not then; red then and not now, as they are now.
        red: in both.
        shared, new, gone: comparisons that both executed, only this one, only that one.
    """

    label: str
    incomparable: str = ""
    broken: tuple[Outcome, ...] = ()
    mended: tuple[Outcome, ...] = ()
    red: int = 0
    shared: int = 0
    new: int = 0
    gone: int = 0


def changes(now: Report, then: Report, label: str) -> Changes:
    """What has changed; of another implementation or other code nothing."""
    if now.implementation != then.implementation:
        return Changes(label, f"it was of {then.implementation}, not of {now.implementation}")
    ours, theirs = _by_case(now.outcomes), _by_case(then.outcomes)
    paths = [", ".join(sorted({path for _, path in of})) for of in (ours, theirs)]
    if ours and theirs and not set(p for _, p in ours) & set(p for _, p in theirs):
        return Changes(label, f"it ran as {paths[1]}, not as {paths[0]}")
    both = ours.keys() & theirs.keys()
    pairs = [(ours[key], theirs[key]) for key in ours if key in both]
    return Changes(
        label,
        broken=tuple(a for a, b in pairs if a.status == "broken" != b.status),
        mended=tuple(a for a, b in pairs if a.status != "broken" == b.status),
        red=sum(a.status == "broken" == b.status for a, b in pairs),
        shared=len(both),
        new=len(ours.keys() - both),
        gone=len(theirs.keys() - both),
    )


def _by_case(found: Iterable[Outcome]) -> dict[tuple[str, str], Outcome]:
    """What was executed; of a case that several lists have, red if any is."""
    kept: dict[tuple[str, str], Outcome] = {}
    for one in found:
        key = one.case, one.path
        if one.status in EXECUTED and (key not in kept or one.status == "broken"):
            kept[key] = one
    return kept
