"""What JUnit tells of a test that compares: the case, the largest z, the largest use of the budget.

pytest writes the properties of a test into the file of `--junitxml`; they survive pytest-xdist.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from .outcomes import Outcome, outcome
from .records import Record
from .summary import EXECUTED

NOT_PASSED = ("not claimed", "no power", "known failure")
"""Statuses of comparisons of which nothing is proved."""

NUMBERS = ("largest_z", "budget_use")
"""Properties that are numbers; "inf" if something is not finite that should be, or nothing came."""


class Properties:
    """A pytest plugin of a process that runs tests.

    Args:
        written: the records of the test that runs; emptied before each.
    """

    def __init__(self, written: list[Record]) -> None:
        self.written = written

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.written.clear()
        try:
            return (yield)
        finally:
            item.user_properties += properties(self.written)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """What was not executed is skipped in JUnit, which knows no other word for it."""
        report: pytest.TestReport = yield
        status = dict(report.user_properties).get("comparison")
        if report.when == "call" and report.passed and status in NOT_PASSED:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {status}")
        return report


def properties(written: Sequence[Record]) -> list[tuple[str, object]]:
    """Of several comparisons, as of a test that generates them, the red one, or else the one of largest z."""
    if not written:
        return []
    worst = max(map(outcome, written), key=_badness)
    told: list[tuple[str, object]] = [("case", worst.case)]
    if worst.status in EXECUTED:
        told += [(name, "inf" if (x := getattr(worst, name)) is None else x) for name in NUMBERS]
    return told


def _badness(one: Outcome) -> tuple[bool, float]:
    largest = one.largest_z if one.largest_z is not None else math.inf if one.status in EXECUTED else -1.0
    return one.status == "broken", largest
