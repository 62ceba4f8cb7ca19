"""A contest through pytest-benchmark: its rounds are the subject's GPU times; all others' are kept too."""

from __future__ import annotations

from typing import Any

from reports.timings import Contest

from .bench import OnProblem
from .timer import advance


def benchmarked(benchmark: Any, here: OnProblem, step: str, measure: str, rounds: int) -> Contest:
    """A contest of so many rounds, judged.

    Args:
        benchmark: the fixture of pytest-benchmark, whose clock is `timer.now`.
        here: contenders on a problem.
        step, measure, rounds: of the contest.
    """
    turns = here.in_turns(step, measure)
    benchmark.group = f"{step}, {measure}"
    if turns.here:
        benchmark.pedantic(lambda: advance(turns.round()), rounds=rounds, warmup_rounds=1)
        turns.forget_first()
        turns.judge(lambda: here.expected)
    contest = turns.contest()
    benchmark.extra_info.update(
        problem=contest.problem,
        step=step,
        measure=measure,
        flops=contest.flops,
        rounds={name: entry.seconds for name, entry in contest.entries.items() if entry.seconds},
        absent={name: entry.absent for name, entry in contest.entries.items() if entry.absent},
        control=contest.control,
    )
    return contest
