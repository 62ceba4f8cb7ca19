"""At least three times as fast as naive attention; and what the verdicts are worth."""

from __future__ import annotations

from typing import Any

import pytest

from . import gates
from .bench import Bench
from .gates import GATES, Asked
from .pairs import CANNOT_TELL, SLOWER
from .plugin import Found
from .problems import FORWARD
from .timed import benchmarked


@pytest.mark.parametrize("asked", GATES, ids=lambda asked: asked.name)
def test_gate(asked: Asked, bench: Bench, found: Found, rounds: int, strict: bool, benchmark: Any) -> None:
    if asked.other not in bench.contenders:
        pytest.skip(f"{asked.other} is not among the contenders")
    if asked.step != FORWARD and not bench.subject.claims.backward:
        pytest.skip("a backward is not claimed")
    with bench.on(asked.problem, [bench.subject.name, asked.other]) as here:
        contest = benchmarked(benchmark, here, asked.step, asked.measure, 2 * rounds)
    found.contests.append(contest)
    try:
        gate = gates.gate(asked, contest, bench.subject.name)
    except ValueError as error:
        pytest.fail(str(error))
    found.gates.append(gate)
    told = f"{gate.ratio:.3g} times ({gate.low:.3g} to {gate.high:.3g}); at least {gate.least:g}"
    print(f"{gate.name}: {told}: {gate.verdict}")
    assert gate.verdict != SLOWER, told
    assert gate.verdict != CANNOT_TELL or not strict, f"cannot tell: {told}"


def test_the_same_thing_differs_in_none_of_200_comparisons(bench: Bench, found: Found) -> None:
    found.noise = gates.noise(bench)
    assert gates.false_verdicts(found.noise) == 0, found.noise.verdicts


def test_what_is_10_percent_slower_is_found(found: Found, strict: bool) -> None:
    if found.noise is None:
        pytest.skip("the comparisons of the same thing have not run")
    share = found.noise.found / found.noise.slowed
    assert share >= 0.95, f"found in {found.noise.found} of {found.noise.slowed} comparisons"
