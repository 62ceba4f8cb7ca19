"""The end of a run: one file of records, a summary worst first, and the exit status."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from rich.table import Table

from . import records
from .folder import Folder
from .records import Record

if TYPE_CHECKING:
    from tests.known_failures import KnownFailures

RECORDS, SUMMARY, RED_CASES = "records.jsonl", "summary.md", "red-cases.txt"
"""What a run leaves in its folder."""

PART = "attention_records"
"""The file of a worker, in what pytest-xdist hands it."""

WORST = 10
"""Red comparisons that are listed."""

EXECUTED = ("held", "broken", "known failure")
LAW = "law"
"""The origin of records that are no comparisons."""

NOTHING = "nothing was executed"


class Summary:
    """A pytest plugin of the main process: collects what the workers wrote.

    Args:
        config: pytest's.
        folder: where the workers write their records.
        narrowed: ids of cases that were asked for, and of what is run in their place.
        known: failures that are expected.
    """

    def __init__(
        self,
        config: pytest.Config,
        folder: Folder,
        narrowed: Mapping[str, str],
        known: KnownFailures | None = None,
    ) -> None:
        self.config, self.folder, self.narrowed, self.known = config, folder, narrowed, known
        self.found: list[Record] = []
        self.unreadable: list[str] = []
        self.unexpected: Sequence[str] = ()
        self.unmet: Sequence[str] = ()
        self.accepted = ""
        self.reason = "interrupted"

    def pytest_report_header(self) -> list[str]:
        import torch
        import triton

        from conftest import SEED, SESSION
        from tests.session import interpreted

        option = self.config.option
        implementation = self.config.stash[SESSION].implementation
        claiming = f" (claims: {implementation.manifest})" if implementation.manifest else ""
        lines = [
            f"attention: implementation {implementation.name}{claiming}, profile {option.profile},"
            f" seed {os.environ[SEED]}, torch {torch.__version__}, triton {triton.__version__}"
        ]
        if interpreted():
            lines.append("attention: Triton's interpreter on the CPU; no GPU is used")
        elif torch.cuda.is_available():
            override = os.environ.get("TRITON_OVERRIDE_ARCH")
            code = f", code of {override}" if override else ""
            lines.append(f"attention: {torch.cuda.get_device_name()}{code}")
        return lines

    @pytest.hookimpl(tryfirst=True)  # before any worker starts
    def pytest_sessionstart(self) -> None:
        if self.config.option.collectonly:
            return
        try:
            self.folder.begin((RECORDS, SUMMARY, RED_CASES))
        except OSError as error:
            from tests.session import REPORT_DIR, WRONG_USE

            named = REPORT_DIR if os.environ.get(REPORT_DIR) else f"{REPORT_DIR} is not set; the folder"
            pytest.exit(
                f"{named} is {str(self.folder.path)!r}: nothing can be written there ({error})", WRONG_USE
            )

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tells a worker of pytest-xdist where to write."""
        node.workerinput[PART] = str(self.folder.part(node.workerinput["workerid"]))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        read = self._gather()
        if self.known is not None and not self.config.option.collectonly:
            self.unexpected = self.known.unexpected(self.found)
            self.unmet = self.known.unmet(self.found)
        session.exitstatus, self.reason = self._decide(session, exitstatus)
        if not self.config.option.collectonly:
            self.folder.end(self._files() if self.found else {}, read)
            if self.known is not None and self.config.option.accept:
                self._accept(self.known)

    def _accept(self, known: KnownFailures) -> None:
        """Adds what is red to the file of known failures."""
        from tests.known_failures import accept

        file = Path(self.config.option.known_failures)
        try:
            count = accept(file, known, self.found)
            self.accepted = f"{file}: {count} entries added" + ("; write the reason of each" if count else "")
        except OSError as error:
            self.accepted = f"{file}: nothing could be added ({error.strerror})"

    def _gather(self) -> list[Path]:
        """Reads what the workers of this run wrote; returns the files that could be read."""
        read = []
        for part in self.folder.parts():
            try:
                self.found += records.read(part)
                read.append(part)
            except records.RecordError as error:
                self.unreadable.append(str(error))
        return read

    def _files(self) -> dict[str, bytes | None]:
        red = dict.fromkeys(f"{record.case}  # {record.reason}\n" for record in _red(comparisons(self.found)))
        return {
            RECORDS: b"".join(map(records.encode, self.found)),
            SUMMARY: markdown(self.found, self.reason).encode(),
            RED_CASES: "".join(red).encode() if red else None,
        }

    def _decide(self, session: pytest.Session, exitstatus: int) -> tuple[int, str]:
        """The exit status of the run, and why. pytest's own mean other things by the same numbers."""
        from tests.session import HELD, NOTHING_EXECUTED, WRONG_USE, exit_status

        # with pytest-xdist, -x ends as if it were interrupted
        failed = session.testsfailed > 0 or exitstatus == pytest.ExitCode.INTERNAL_ERROR
        if exitstatus == pytest.ExitCode.INTERRUPTED and not failed:
            return exitstatus, "interrupted"
        if exitstatus == pytest.ExitCode.USAGE_ERROR:
            return WRONG_USE, "wrong use"
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            return NOTHING_EXECUTED, NOTHING
        status, reason = exit_status(
            self.found, failed or bool(self.unreadable), self.config.option.require_gpu, self.unexpected
        )
        wanted = any("test_references" in str(arg) for arg in self.config.args)
        if status == HELD and wanted and not self.found:
            return NOTHING_EXECUTED, NOTHING
        return status, reason

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        if self.found:
            terminalreporter.section("attention: comparisons")
            if any(record.status in EXECUTED for record in comparisons(self.found)):
                for line in (*_table(self.found), "", *LEGEND.splitlines(), ""):
                    write(line)
            for line in counts(self.found):
                write(line)
            for asked, ran in self.narrowed.items():
                write(f"{_left_out(asked, ran)}: {asked}")
                write(f"  ran as {ran}")
            red = sorted(_red(self.found), key=_badness)
            if red:
                write("")
                shown = f" ({WORST} of {len(red)})" if len(red) > WORST else ""
                write(f"red, worst first{shown}:", red=True)
            for number, record in enumerate(red[:WORST], 1):
                write(f"{number:3}. {_worst(record)}", red=True)
                write(f"     {record.words}")
                write(f"     replay: {record.replay}")
            if ids := {record.case for record in comparisons(red)}:
                write(f"{len(ids)} ids for tests/corpus.txt: {self._shown(RED_CASES)}")
            from conftest import SESSION

            if untested := self.config.stash[SESSION].implementation.untested():
                write(untested)
            write(f"records: {self._shown(RECORDS)}")
        for said in self.unexpected:
            write(f"known failure that does not fail: {said}", red=True)
        for said in self.unmet:
            write(f"known failure of which nothing ran: {said}")
        if self.accepted:
            write(f"known failures: {self.accepted}")
        for message in self.unreadable:
            write(f"records that cannot be read: {message}", red=True)
        if self.found or self.unreadable or self.reason == NOTHING:
            write(f"result: {self.reason}")

    def _shown(self, name: str) -> str:
        """A file's path as the user would write it from where he stands."""
        path = str(self.folder.path / name)
        return min(path, os.path.relpath(path), key=len)


def _left_out(asked: str, ran: str) -> str:
    """In what a case that ran differs from the one that was asked for, by their ids."""
    from tests.cases import parse_case

    if parse_case(asked).layout == parse_case(ran).layout:
        return "without the gradients that are not claimed"
    return "as contiguous as is claimed, without gradients that are not"


def _red(found: Iterable[Record]) -> list[Record]:
    return [record for record in found if record.status == "broken"]


def comparisons(found: Iterable[Record]) -> list[Record]:
    return [record for record in found if record.origin != LAW]


def _badness(record: Record) -> float:
    worst = record.worst
    return -(worst.margin if worst else 0.0)


def _worst(record: Record) -> str:
    """What was worst in a red record, in one line."""
    from tests.comparison import describe

    return describe(record.worst).splitlines()[0] if record.worst else record.reason


def counts(found: Sequence[Record]) -> list[str]:
    """How many comparisons were executed and how many were not, and why; what is red and what is known."""
    executed = [record for record in comparisons(found) if record.status in EXECUTED]
    backward = sum(record.backward for record in executed)
    red = _red(found)
    laws = len(red) - len(comparisons(red))
    lines = [
        f"comparisons executed: {len(executed)}, of which with a backward: {backward}",
        f"red: {len(red)}" + (f", of which laws: {laws}" if laws else ""),
    ]
    known = Counter(record.reason for record in found if record.status == "known failure")
    if known:
        each = "; ".join(f"{reason} ({n})" for reason, n in known.most_common())
        lines.append(f"known failures: {known.total()}, by reason: {each}")
    for status, because in (("no power", ""), ("not claimed", "they would need ")):
        left_out = [record for record in found if record.status == status]
        reasons = Counter(reason for record in left_out for reason in record.reason.split(", "))
        if left_out:
            each = ", ".join(f"{reason} ({n})" for reason, n in reasons.most_common())
            lines.append(f"{status}, so not executed: {len(left_out)}; {because}{each}")
    return lines


FIXED = 10_000
"""Larger numbers are written with an exponent: a column is no wider for them."""


def _largest(numbers: Iterable[float | None], digits: int) -> str:
    """The largest of some numbers, None being infinite."""
    found = [float("inf") if number is None else number for number in numbers]
    if not found:
        return "-"
    largest = max(found)
    return f"{largest:.{digits}f}" if largest < FIXED else f"{largest:.3g}"


def _rows(found: list[Record]) -> list[tuple[str, ...]]:
    """By path, dtype and tensor, worst first: the largest of each number, and what came closest to red."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in comparisons(found):
        broken = [verdict.tensor for verdict in record.verdicts if not verdict.held]
        for tensor in dict.fromkeys((*record.tensors, *broken)):
            groups.setdefault((record.path, record.dtype, tensor), []).append(record)
    rows = []
    for (path, dtype, tensor), group in groups.items():
        summaries = [record.tensors[tensor] for record in group if tensor in record.tensors]
        verdicts = [(v, record) for record in group for v in record.verdicts if v.tensor == tensor]
        badness, rule, case, status = max(
            (((not v.held, v.margin), v.rule, record.case, record.status) for v, record in verdicts),
            default=((False, 0.0), "", "", ""),
        )
        times = f"{badness[1]:.3g} x its limit" if badness[1] < float("inf") else "broken"
        times += ", known" if status == "known failure" and badness[0] else ""
        rows.append((badness, (
            path, dtype, tensor, str(len(group)),
            _largest((s.budget_use for s in summaries), 3),
            _largest((s.max_z for s in summaries), 2),
            _largest((s.fa2 for s in summaries if s.fa2 is not None), 2),
            f"{rule}: {times}", case,
        )))  # fmt: skip
    return [row for _, row in sorted(rows, key=lambda item: item[0], reverse=True)]


HEADINGS = ("path", "dtype", "tensor", "comparisons", "budget", "max z", "FA2", "closest to red", "case")
LEGEND = """\
budget, max z: the largest error, in units of its hard bound and of its standard deviation.
FA2: the largest error, in units of that of PyTorch's own attention in the same dtype (FlashAttention-2's rule
of at most 2 for out and 3 for gradients; for information)."""


def _table(found: list[Record]) -> list[str]:
    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS[:-1]:
        number = heading in ("comparisons", "budget", "max z", "FA2")
        table.add_column(heading, justify="right" if number else "left")
    for row in _rows(found):
        table.add_row(*row[:-1])
    console = Console(file=StringIO(), highlight=False, width=160)
    with console.capture() as printed:
        console.print(table)
    return [line.rstrip() for line in printed.get().splitlines()]


def markdown(found: list[Record], reason: str) -> str:
    """The summary as a page: counts, red comparisons worst first, the table."""
    lines = [f"### Attention: {reason}", "", *(f"- {line}" for line in counts(found)), ""]
    for record in sorted(_red(found), key=_badness)[:WORST]:
        lines.append(f"1. **{_worst(record)}**<br>{record.words}<br>`{record.replay}`")
    lines += ["", "| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(found)]
    lines += ["", *LEGEND.splitlines()]
    return "\n".join(lines) + "\n"
