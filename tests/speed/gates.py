"""Ratios that must be reached, and what the verdicts are worth: the same thing against itself, and slowed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reports.timings import Contest, Gate, Noise

from . import pairs
from .bench import Bench
from .contenders import NAIVE
from .pairs import SLOWER, Ratio
from .problems import BACKWARD, BOTH, FORWARD, GATE, Problem

LEAST = 3.0
"""Times as fast as naive attention."""


@dataclass(frozen=True)
class Asked:
    """A gate that has not been measured: its name, and what is compared."""

    name: str
    step: str
    measure: str = "device"
    problem: Problem = GATE
    other: str = NAIVE
    least: float = LEAST


GATES = (
    Asked("triton_fa2_at_least_3x_naive", FORWARD),
    Asked("triton_fa2_at_least_3x_naive_forward_and_backward", BOTH),
)
"""Of the notebook that this project grew from: B 1, H 8, T 2048, D 64, float16, causal."""


def ratio_of(contest: Contest, subject: str, other: str) -> tuple[Ratio, Ratio]:
    """Of another's time to the subject's, and of the control to the subject.

    Raises:
        ValueError: if one of them is absent, or has too few rounds.
    """
    for name in (subject, other):
        if name not in contest.entries:
            raise ValueError(f"{name} is not among the contenders")
        if why := contest.entries[name].absent:
            raise ValueError(f"{name} is absent: {why}")
    ours = contest.entries[subject].seconds
    return pairs.ratio(ours, contest.entries[other].seconds), pairs.ratio(ours, contest.control)


def gate(asked: Asked, contest: Contest, subject: str) -> Gate:
    """What a contest says of a gate.

    Raises:
        ValueError: if one of the two has no figure.
    """
    found, control = ratio_of(contest, subject, asked.other)
    return Gate(
        name=asked.name,
        problem=contest.problem,
        step=contest.step,
        measure=contest.measure,
        subject=subject,
        other=asked.other,
        least=asked.least,
        ratio=found.median,
        low=found.low,
        high=found.high,
        pairs=found.pairs,
        verdict=pairs.verdict(found, control, asked.least),
    )


# ---------------------------------------------------------------- what verdicts are worth

COMPARISONS = 200
DELAY = 0.1
"""Of the time, that a call is made longer by to be found."""

PAIRS = 15
NOISE_PROBLEMS = (
    *(Problem(tokens // length, heads, heads, length, dim, causal)
      for dim, heads in ((64, 8), (128, 8))
      for tokens, length in ((2048, 2048), (8192, 1024), (16_384, 4096))
      for causal in (False, True)),
    GATE,
)  # fmt: skip


def noise(
    bench: Bench, comparisons: int = COMPARISONS, problems: Sequence[Problem] = NOISE_PROBLEMS
) -> Noise:
    """The subject against itself, in forwards and backwards, and against itself with a pause behind it."""
    verdicts: Counter[str] = Counter()
    ratios: list[float] = []
    slowed = found = 0
    steps = (FORWARD, BACKWARD) if bench.subject.claims.backward else (FORWARD,)
    each = -(-comparisons // (len(problems) * len(steps)))
    for problem in problems:
        with bench.on(problem, [bench.subject.name]) as here:
            calls = here.calls[bench.subject.name]
            if isinstance(calls, str):
                raise ValueError(f"{bench.subject.name} is absent on {problem.id}: {calls}")
            with calls.of.chosen():
                for step in steps:
                    call = calls.step(step)
                    for _ in range(3):
                        usual = bench.timer.device(call)
                    slow = _slowed(bench, call, DELAY * usual)
                    for _ in range(each):
                        a, b, c, d = _in_turns(bench, [call, call, call, slow])
                        control = pairs.ratio(a, c)
                        same = pairs.ratio(a, b)
                        if len(ratios) < comparisons:
                            verdicts[pairs.verdict(same, control)] += 1
                            ratios.append(same.median)
                        slowed += 1
                        # of the slowed one as the subject: the other's time over its own
                        found += pairs.verdict(pairs.ratio(d, b), control) == SLOWER
    return Noise(
        comparisons=len(ratios), verdicts=dict(verdicts), ratios=sorted(ratios), delay=DELAY, slowed=slowed,
        found=found,
    )  # fmt: skip


def _slowed(bench: Bench, call: Callable[[], Any], seconds: float) -> Callable[[], Any]:
    def slow() -> Any:
        result = call()
        bench.timer.sleep(seconds)
        return result

    return slow


def _in_turns(bench: Bench, calls: Sequence[Callable[[], Any]]) -> list[list[float]]:
    taken: list[list[float]] = [[] for _ in calls]
    order = list(range(len(calls)))
    for number in range(PAIRS):
        random.Random(number).shuffle(order)
        for which in order:
            taken[which].append(bench.timer.device(calls[which]))
    return taken


def false_verdicts(of: Noise) -> int:
    """How many A/A comparisons were said to differ."""
    return sum(n for word, n in of.verdicts.items() if word in (pairs.FASTER, SLOWER))
