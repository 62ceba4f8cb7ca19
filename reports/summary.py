"""The end of a run: one file of records, a summary worst first, and the exit status."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from . import records
from .records import Record

RED_CASES = "red-cases.txt"
WORST = 10
"""Red comparisons that are listed."""

EXECUTED = ("held", "broken")
NOTHING = "nothing was executed"


class Summary:
    """A pytest plugin of the main process: collects what the workers wrote.

    Args:
        config: pytest's.
        folder: where the workers write their records.
    """

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.found: list[Record] = []
        self.unreadable: list[str] = []
        self.reason = "interrupted"

    def pytest_report_header(self) -> list[str]:
        import torch
        import triton

        from conftest import SEED
        from tests.session import interpreted

        option = self.config.option
        lines = [
            f"attention: implementation {option.impl}, profile {option.profile}, seed {os.environ[SEED]},"
            f" torch {torch.__version__}, triton {triton.__version__}"
        ]
        if interpreted():
            lines.append("attention: Triton's interpreter on the CPU; no GPU is used")
        elif torch.cuda.is_available():
            override = os.environ.get("TRITON_OVERRIDE_ARCH")
            code = f", code of {override}" if override else ""
            lines.append(f"attention: {torch.cuda.get_device_name()}{code}")
        return lines

    def pytest_sessionstart(self) -> None:
        for old in (*self.folder.glob("records*.jsonl"), self.folder / "summary.md", self.folder / RED_CASES):
            old.unlink(missing_ok=True)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._gather()
        session.exitstatus, self.reason = self._decide(session, exitstatus)
        if self.found:
            (self.folder / "summary.md").write_text(markdown(self.found, self.reason))

    def _gather(self) -> None:
        """One file of what the workers wrote; what cannot be read is kept beside it."""
        for part in sorted(self.folder.glob("records-*.jsonl")):
            try:
                found = records.read(part)
            except records.RecordError as error:
                self.unreadable.append(str(error))
                continue
            for record in found:
                records.append(self.folder / "records.jsonl", record)
            self.found += found
            part.unlink()
        red = _red(self.found)
        if red:
            lines = dict.fromkeys(f"{record.case}  # {record.reason}" for record in red)
            (self.folder / RED_CASES).write_text("\n".join(lines) + "\n")

    def _decide(self, session: pytest.Session, exitstatus: int) -> tuple[int, str]:
        """The exit status of the run, and why. pytest's own mean other things by the same numbers."""
        from tests.session import HELD, NOTHING_EXECUTED, exit_status

        # with pytest-xdist, -x ends as if it were interrupted
        failed = session.testsfailed > 0 or exitstatus == pytest.ExitCode.INTERNAL_ERROR
        if exitstatus == pytest.ExitCode.INTERRUPTED and not failed:
            return exitstatus, "interrupted"
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            return NOTHING_EXECUTED, NOTHING
        status, reason = exit_status(
            self.found, failed or bool(self.unreadable), self.config.option.require_gpu
        )
        wanted = any("test_references" in str(arg) for arg in self.config.args)
        if status == HELD and wanted and not self.found:
            return NOTHING_EXECUTED, NOTHING
        return status, reason

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        if self.found:
            terminalreporter.section("attention: comparisons")
            if any(record.status in EXECUTED for record in self.found):
                for line in (*_table(self.found), "", *LEGEND.splitlines(), ""):
                    write(line)
            for line in _counts(self.found):
                write(line)
            red = sorted(_red(self.found), key=_badness)
            if red:
                write("")
                shown = f" ({WORST} of {len(red)})" if len(red) > WORST else ""
                write(f"red, worst first{shown}:", red=True)
            for number, record in enumerate(red[:WORST], 1):
                write(f"{number:3}. {_worst(record)}", red=True)
                write(f"     {record.words}")
                write(f"     replay: {record.replay}")
            if red:
                write(f"{len(red)} ids for tests/corpus.txt: {self.folder / RED_CASES}")
            write(f"records: {self.folder / 'records.jsonl'}")
        for message in self.unreadable:
            write(f"records that cannot be read: {message}", red=True)
        if self.found or self.unreadable or self.reason == NOTHING:
            write(f"result: {self.reason}")


def _red(found: list[Record]) -> list[Record]:
    return [record for record in found if record.status == "broken"]


def _badness(record: Record) -> float:
    worst = record.worst
    return -(worst.margin if worst else 0.0)


def _worst(record: Record) -> str:
    """What was worst in a red record, in one line."""
    from tests.comparison import describe

    return describe(record.worst).splitlines()[0] if record.worst else record.reason


def _counts(found: list[Record]) -> list[str]:
    """How many comparisons were executed and how many were not, and why."""
    executed = [record for record in found if record.status in EXECUTED]
    backward = sum(record.backward for record in executed)
    lines = [
        f"comparisons executed: {len(executed)}, of which with a backward: {backward}",
        f"red: {len(_red(found))}",
    ]
    for status, because in (("no power", ""), ("not claimed", "they would need ")):
        left_out = [record for record in found if record.status == status]
        reasons = Counter(reason for record in left_out for reason in record.reason.split(", "))
        if left_out:
            each = ", ".join(f"{reason} ({n})" for reason, n in reasons.most_common())
            lines.append(f"{status}, so not executed: {len(left_out)}; {because}{each}")
    return lines


def _largest(numbers: Iterable[float | None], digits: int) -> str:
    """The largest of some numbers, None being infinite."""
    found = [float("inf") if number is None else number for number in numbers]
    return f"{max(found):.{digits}f}" if found else "-"


def _rows(found: list[Record]) -> list[tuple[str, ...]]:
    """By path, dtype and tensor, worst first: the largest of each number, and what came closest to red."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in found:
        broken = [verdict.tensor for verdict in record.verdicts if not verdict.held]
        for tensor in dict.fromkeys((*record.tensors, *broken)):
            groups.setdefault((record.path, record.dtype, tensor), []).append(record)
    rows = []
    for (path, dtype, tensor), group in groups.items():
        summaries = [record.tensors[tensor] for record in group if tensor in record.tensors]
        verdicts = [(v, record.case) for record in group for v in record.verdicts if v.tensor == tensor]
        badness, rule, case = max(
            (((not v.held, v.margin), v.rule, case) for v, case in verdicts), default=((False, 0.0), "", "")
        )
        times = f"{badness[1]:.3g} x its limit" if badness[1] < float("inf") else "broken"
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
    lines = [f"### Attention: {reason}", "", *(f"- {line}" for line in _counts(found)), ""]
    for record in sorted(_red(found), key=_badness)[:WORST]:
        lines.append(f"1. **{_worst(record)}**<br>{record.words}<br>`{record.replay}`")
    lines += ["", "| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(found)]
    lines += ["", *LEGEND.splitlines()]
    return "\n".join(lines) + "\n"
