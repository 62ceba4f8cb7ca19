"""Every contender on every problem of the grid, and what small calls cost beside their kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .bench import Bench, OnProblem
from .plugin import Found
from .problems import BACKWARD, BOTH, FORWARD, GRID, SMALL, Problem
from .timed import benchmarked

EAGER = 7
"""Times as many rounds of what has the host's noise in it."""


@pytest.fixture(scope="module")
def here(request: pytest.FixtureRequest, bench: Bench) -> Iterator[OnProblem]:
    """The contenders on a problem, for all tests of it."""
    with bench.on(request.param) as those:
        yield those


def _name(of: Any) -> str | None:
    return of.id if isinstance(of, Problem) else None


@pytest.mark.parametrize("step", [FORWARD, BACKWARD])
@pytest.mark.parametrize("here", GRID, ids=_name, indirect=True)
def test_contest(here: OnProblem, step: str, found: Found, rounds: int, benchmark: Any) -> None:
    _held(here, step, "device", found, rounds, benchmark)


@pytest.mark.parametrize("measure", ["eager", "graph"])
@pytest.mark.parametrize("step", [FORWARD, BOTH])
@pytest.mark.parametrize("here", SMALL, ids=_name, indirect=True)
def test_small_contest(
    here: OnProblem, step: str, measure: str, found: Found, rounds: int, benchmark: Any
) -> None:
    _held(here, step, measure, found, rounds * (EAGER if measure == "eager" else 1), benchmark)


def _held(here: OnProblem, step: str, measure: str, found: Found, rounds: int, benchmark: Any) -> None:
    subject = here.bench.subject
    if step != FORWARD and not subject.claims.backward:
        pytest.skip("a backward is not claimed")
    contest = benchmarked(benchmark, here, step, measure, rounds)
    found.contests.append(contest)
    if why := contest.entries[subject.name].absent:
        if why.startswith("not claimed"):
            pytest.skip(why)
        pytest.fail(f"{subject.name}: {why}")
