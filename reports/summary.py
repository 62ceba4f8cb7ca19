"""The end of a run: one file of records, a summary worst first, and the exit status."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from . import records
from .records import Record

RED_CASES = "red-cases.txt"
WORST = 10
"""Red comparisons that are listed."""


class Summary:
    """A pytest plugin of the main process: collects what the workers wrote.

    Args:
        config: pytest's.
        folder: where the workers write their records.
    """

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.found: list[Record] = []
        self.reason = ""

    def pytest_report_header(self) -> list[str]:
        import torch
        import triton

        from tests.session import interpreted

        lines = [
            f"attention: implementation {self.config.option.impl}, torch {torch.__version__},"
            f" triton {triton.__version__}"
        ]
        if interpreted():
            lines.append("attention: Triton's interpreter on the CPU; no GPU is used")
        elif torch.cuda.is_available():
            import os

            override = os.environ.get("TRITON_OVERRIDE_ARCH")
            code = f", code of {override}" if override else ""
            lines.append(f"attention: {torch.cuda.get_device_name()}{code}")
        return lines

    def pytest_sessionstart(self) -> None:
        for old in (*self.folder.glob("records*.jsonl"), self.folder / "summary.md", self.folder / RED_CASES):
            old.unlink(missing_ok=True)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        from tests.session import BROKE, HELD, NOTHING_EXECUTED, exit_status

        parts = sorted(self.folder.glob("records-*.jsonl"))
        self.found = [record for part in parts for record in records.read(part)]
        for record in self.found:
            records.append(self.folder / "records.jsonl", record)
        for part in parts:
            part.unlink()
        red = [record for record in self.found if record.status == "broken"]
        if red:
            lines = dict.fromkeys(f"{record.case}  # {record.reason}" for record in red)
            (self.folder / RED_CASES).write_text("\n".join(lines) + "\n")
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            failed = exitstatus == pytest.ExitCode.TESTS_FAILED
            status, self.reason = exit_status(self.found, failed, self.config.option.require_gpu)
            wanted_comparisons = any("test_references" in str(arg) for arg in self.config.args)
            if status == HELD and wanted_comparisons and not self.found:
                status, self.reason = NOTHING_EXECUTED, "no comparison was executed"
            session.exitstatus = status
            assert status != HELD or not failed, BROKE
        elif exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus, self.reason = NOTHING_EXECUTED, "no test was executed"
        if self.found:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "summary.md").write_text(_markdown(self.found, self.reason))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.found:
            return
        terminalreporter.section("attention: comparisons")
        console = Console(
            file=terminalreporter._tw._file, highlight=False, width=max(terminalreporter._tw.fullwidth, 120)
        )
        console.print(_table(self.found))
        status = Counter(record.status for record in self.found)
        counts = ", ".join(f"{n} {name}" for name, n in sorted(status.items()))
        backward = sum(record.backward and record.status in ("held", "broken") for record in self.found)
        terminalreporter.write_line(f"{len(self.found)} comparisons: {counts}; {backward} with a backward")
        for reason, n in Counter(r.reason for r in self.found if r.status == "not claimed").most_common():
            terminalreporter.write_line(f"not claimed, not tested: {reason} ({n})")
        red = [record for record in self.found if record.status == "broken"]
        for record in sorted(red, key=_badness)[:WORST]:
            terminalreporter.write_line(f"broken: {record.reason}", red=True)
            terminalreporter.write_line(f"        {record.replay}")
        if red:
            terminalreporter.write_line(f"ids for tests/corpus.txt: {self.folder / RED_CASES}")
        terminalreporter.write_line(f"records: {self.folder / 'records.jsonl'}")
        if self.reason:
            terminalreporter.write_line(f"result: {self.reason}")


def _badness(record: Record) -> float:
    worst = record.worst
    return -(worst.margin if worst else 0.0)


def _rows(found: list[Record]) -> list[tuple[str, ...]]:
    """By dtype and tensor, worst first: comparisons, budget use, z, and the case that came closest."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in found:
        for tensor in record.tensors:
            groups.setdefault((record.path, record.dtype, tensor), []).append(record)
    rows = []
    for (path, dtype, tensor), group in groups.items():
        summaries = [record.tensors[tensor] for record in group]
        margins = [
            (verdict.margin, verdict.rule, record.case)
            for record in group for verdict in record.verdicts
            if verdict.tensor == tensor and verdict.limit
        ]  # fmt: skip
        margin, rule, case = max(margins, default=(0.0, "", ""))
        rows.append((margin, (
            path, dtype, tensor, str(len(group)),
            f"{max(s.budget_use for s in summaries):.3f}",
            f"{max(s.max_z for s in summaries):.2f}",
            f"{max((s.fa2 or 0.0) for s in summaries):.2f}",
            f"{margin:.2f} of {rule}", case,
        )))  # fmt: skip
    return [row for _, row in sorted(rows, key=lambda item: -item[0])]


HEADINGS = (
    "path",
    "dtype",
    "tensor",
    "comparisons",
    "budget",
    "max z",
    "FA2 rule",
    "closest to a limit",
    "case",
)


def _table(found: list[Record]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS[:-1]:
        table.add_column(
            heading, justify="right" if heading in ("comparisons", "budget", "max z") else "left"
        )
    for row in _rows(found):
        table.add_row(*row[:-1])
    return table


def _markdown(found: list[Record], reason: str) -> str:
    status = Counter(record.status for record in found)
    lines = [
        f"### Attention: {reason or 'interrupted'}",
        "",
        f"{len(found)} comparisons: " + ", ".join(f"{n} {name}" for name, n in sorted(status.items())),
        "",
    ]
    for record in sorted((r for r in found if r.status == "broken"), key=_badness)[:WORST]:
        lines.append(f"- **broken**: {record.reason}<br>`{record.replay}`")
    lines += ["", "| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(found)]
    return "\n".join(lines) + "\n"
