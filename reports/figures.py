"""Figures that tests measure, printed at the end of a run, green or red.

A test hands one over with `record_property("figure", "text")`: that survives pytest-xdist and reaches
JUnit too.
"""

from __future__ import annotations

import pytest

PROPERTY = "figure"


class Figures:
    """A pytest plugin of the main process."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.found += [
                (report.nodeid, str(text)) for name, text in report.user_properties if name == PROPERTY
            ]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.found:
            terminalreporter.section("attention: figures")
        for node, text in self.found:
            terminalreporter.write_line(f"{node.rpartition('::')[2]}: {text}")
