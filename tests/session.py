"""A run of the suite: where it writes, what is under test, on which device; and its exit status."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec
import torch

from reports import records
from reports.records import Record
from reports.repeats import NOT_AGAIN

from .cases import Case, parse_case
from .comparison import begun, compare
from .error_maps import MOST_RECORDS
from .implementations import Implementation, load
from .isolation import Journal
from .known_failures import LAW, RAN, KnownFailures

ROOT = Path(__file__).resolve().parent.parent
REPORT_DIR = "FA_REPORT_DIR"

GENERATED = "generated"
"""The origin of cases that are shrunk."""

HELD, BROKE, WRONG_USE, NOTHING_EXECUTED = 0, 1, 2, 3
"""Exit statuses: every claim that could run here held; something broke; wrong use; nothing was executed
or a required GPU is missing."""


LARGEST_CASE = 2**32
"""Most elements of a case to replay, those of its scores included. PyTorch's own attention keeps all scores:
in float64 these are 32 GiB, several times over, and more than that no usual machine can hold."""


class Broke(AssertionError):
    """A comparison is red; says by which rules."""


def report_dir() -> Path:
    """Where runs write their records and summaries: of this checkout, wherever the user stands, or as the
    variable says, relative to where he stands."""
    return Path(os.environ.get(REPORT_DIR) or ROOT / "reports" / "out").absolute()


def case_to_replay(text: str) -> Case:
    """The case of an id that somebody typed.

    Raises:
        ValueError: if it is not an id of a case, or no machine could hold it.
    """
    case = parse_case(text)
    entries = 1 if case.ragged else case.batch
    rows = entries * (case.len_q + case.len_k)
    scores = entries * sum(len_q * len_k for len_q, len_k in case.pairs)
    elements = case.heads_q * (case.batch + rows * (case.dim + case.dim_v) + scores)
    if elements > LARGEST_CASE:
        raise ValueError(
            f"case id is {text!r}: its tensors and scores have more than {LARGEST_CASE} elements, the most"
            " that one machine is taken to hold: the references keep all of them in float64"
        )
    return case


@dataclass
class Session:
    """What all tests of one process share.

    Attributes:
        spec: the implementation, as `--impl` gave it; None: the manifest names it.
        part: the file that this process writes its records into.
        manifest: what the implementation claims, as `--manifest` gave it.
        known: failures that are expected.
        journal: of what the implementation has under way, for when it ends the process.
        lost: whether the GPU is of no use to this process any more.
        written: records of the test that runs.
        pictured: records so far that have pictures of where they are wrong.
    """

    spec: str | None
    part: Path
    manifest: str | None = None
    known: KnownFailures = field(default_factory=KnownFailures)
    journal: Journal | None = None
    lost: bool = False
    written: list[Record] = field(default_factory=list)
    pictured: int = 0
    broken: dict[str, Record] = field(default_factory=dict)

    @cached_property
    def implementation(self) -> Implementation:
        return load(self.spec, self.manifest)

    @cached_property
    def device(self) -> torch.device:
        """The GPU, if the implementation may run on one and Triton does not interpret; else the CPU."""
        if interpreted():
            return torch.device("cpu")
        claims = self.implementation.claims
        if "cuda" in claims.devices and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def tile(self, case: Case) -> tuple[int, int]:
        """Largest query and key tiles that the implementation uses for a case; a guess if not known."""
        if self.implementation.tiles is None:
            return self.implementation.tile
        return self.implementation.tiles(case, self.device).largest

    def check(self, case: Case, origin: str) -> Record:
        """Compares, and records unless the record is red, by what is not known to fail.

        Raises:
            Broke: if it is. It is not written yet: Hypothesis may find a smaller case.
        """
        # of a generated case smaller ones are looked for: only the smallest is worth an explanation
        record = self._compared(case, origin, explained=origin != GENERATED)
        if record.status == "broken":
            self.broken[origin] = record
            raise Broke(record.reason)
        self.write(record)
        return record

    def _compared(self, case: Case, origin: str, explained: bool) -> Record:
        path = self.implementation.path(self.device)
        guard = self.guard(begun(case, self.implementation, path, origin)(status="running"))
        record = compare(case, self.implementation, self.device, origin, guard=guard, explained=explained)
        return self.known.settled(record)

    def guard(self, record: Record) -> AbstractContextManager[None]:
        """What belongs around a call of the implementation.

        Args:
            record: of what is known before.
        """
        return nullcontext() if self.journal is None else self.journal.running(record, self.device)

    def write_broken(self, origin: str, told: str = "") -> Record | None:
        """Writes the last red record, if there is one: after a shrink, that of the smallest case.

        Args:
            origin: of the case.
            told: before its reason.
        """
        record = self.broken.pop(origin, None)
        if record is not None:
            if origin == GENERATED and not told:
                again = self._compared(parse_case(record.case), origin, explained=True)
                record, told = (again, "") if again.status == "broken" else (record, NOT_AGAIN)
            record = msgspec.structs.replace(record, reason=told + record.reason)
            self.write(record)
        return record

    def write(self, record: Record) -> None:
        """Adds a record to those of this process, without its pictures if enough have some."""
        if record.maps:
            self.pictured += 1
            if self.pictured > MOST_RECORDS:
                record = msgspec.structs.replace(record, maps=[])
        records.append(self.part, record)
        self.written.append(record)


def interpreted() -> bool:
    """Whether Triton interprets its kernels instead of compiling them."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def exit_status(
    found: list[Record], tests_failed: bool, require_gpu: bool, unexpected: Sequence[str] = ()
) -> tuple[int, str]:
    """The status of a run and why, from the records of all its workers.

    Args:
        found: all records.
        tests_failed: whether any test was red; tests of the suite itself count too.
        require_gpu: whether nothing may have been interpreted.
        unexpected: known failures that did not fail.
    """
    executed = [r for r in found if r.status in RAN]
    red = [r for r in executed if r.status == "broken"]
    laws = [r for r in red if r.origin == LAW]
    counts = {"red comparisons": len(red) - len(laws), "red laws": len(laws),
              "known failures that do not fail": len(unexpected)}  # fmt: skip
    if any(counts.values()) or tests_failed:
        return BROKE, ", ".join(f"{what}: {n}" for what, n in counts.items() if n) or "a test failed"
    if require_gpu and any(r.path in ("interpreter", "cpu") for r in executed):
        return BROKE, "--require-gpu was given, and comparisons ran without a GPU"
    if found and not executed:
        return NOTHING_EXECUTED, "nothing was executed"
    return HELD, "every claim that could run here held"
