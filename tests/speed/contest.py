"""Contenders in turns on one problem, and whether what they computed is right.

In each round everybody is timed once, in an order that chance decides anew, the subject twice: the second
time is the control. What was timed is judged afterwards; who was wrong has no figure. A contender that must
not be compared (refused, no memory, the kernels of something else) is out from the start.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from reports.timings import Contest, Entry

from .contenders import AbsentError, Call, Contender
from .correct import Expected
from .problems import BACKWARD, BOTH, FORWARD, Problem, Tensors
from .timer import REPLAYED, Replay, Timer

ROUNDS = 15
LONG, FEW = 0.01, 11
"""A contender that is not the subject and takes so many seconds has so many rounds: the fewest whose interval
is as sure as that of many (`pairs.ALPHA`)."""

NO_MEMORY = "not enough memory"

LONGEST_KERNELS = 3
"""Names that are kept."""


class Calls:
    """What a contender does with a problem, by step.

    Args:
        of: the contender.
        problem: what is computed.
        x: in the contender's layout.

    Raises:
        AbsentError: if it does not take the problem.
    """

    def __init__(self, of: Contender, problem: Problem, x: Tensors) -> None:
        if why := of.refusal(problem):
            raise AbsentError(f"not claimed: {why}")
        self.of, self.problem, self.x = of, problem, x
        with of.chosen():
            self.forward = of.prepare(problem, x)
        self._out: Tensor | None = None

    def step(self, step: str) -> Call:
        """The call of a step; the forward of a backward is done once, before."""
        if step == FORWARD:
            return self.forward
        if not self.of.claims.backward:
            raise AbsentError("not claimed: a backward")
        leaves, d_out = list(self.x.leaves), self.x.d_out
        if step == BOTH:
            return lambda: torch.autograd.grad(self.forward(), leaves, d_out)
        if self._out is None:
            with self.of.chosen():
                self._out = self.forward()
        out = self._out
        return lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True)


@dataclass(eq=False)
class _Turn:
    """A contender in a contest."""

    name: str
    calls: Calls
    call: Call
    kernels: list[str]
    seconds: list[float] = field(default_factory=list)


class InTurns:
    """One contest, round by round.

    Args:
        problem, step, measure: as of `reports.timings.Contest`.
        calls: of each contender, by name, or why it is absent; the first is the subject.
        timer: measures.

    Attributes:
        subject: its name.
        absent: why contenders have no figure.
    """

    def __init__(
        self,
        problem: Problem,
        step: str,
        calls: Mapping[str, Calls | str],
        timer: Timer,
        measure: str = "device",
    ) -> None:
        self.problem, self.step, self.measure, self.timer = problem, step, measure, timer
        self.subject = next(iter(calls))
        self.absent: dict[str, str] = {}
        self.control: list[float] = []
        self._order = random.Random(f"{problem.id} {step} {measure}")
        self._turns: list[_Turn] = []
        for name, made in calls.items():
            if isinstance(made, str):
                self.absent[name] = made
                continue
            try:
                self._turns.append(self._turn(made))
            except Exception as error:
                self.absent[name] = why_absent(error)

    def _turn(self, calls: Calls) -> _Turn:
        one = calls.of
        if self.measure == "graph":  # leaves that no call has seen: autograd ties them to its stream
            calls = Calls(one, self.problem, calls.x.fresh())
        with one.chosen():
            call = calls.step(self.step)
            call()  # what is compiled, loaded, tuned is now
            ran = kernels_of(call)
            for step in (FORWARD, BACKWARD) if self.step == BOTH else (self.step,):
                if why := one.kernels.missing(step, ran):
                    raise AbsentError(why)
            if self.measure == "graph":
                try:
                    call = Replay(call)
                except Exception as error:
                    raise AbsentError(f"not captured: {why_absent(error)}") from error
                call()
        return _Turn(one.name, calls, call, ran[:LONGEST_KERNELS])

    @property
    def here(self) -> bool:
        """Whether the subject is."""
        return any(turn.name == self.subject for turn in self._turns)

    def round(self) -> float:
        """Times everybody once; returns the seconds of the subject, 0 if it is absent."""
        last = 0.0
        turns: list[tuple[_Turn, list[float]]] = [(turn, turn.seconds) for turn in self._turns]
        if self.here:
            subject = next(turn for turn in self._turns if turn.name == self.subject)
            turns.append((subject, self.control))
        self._order.shuffle(turns)
        for turn, seconds in turns:
            long = turn.seconds and turn.seconds[0] > LONG and turn.name != self.subject
            if turn.name in self.absent or (long and len(turn.seconds) > FEW):  # the first is forgotten
                continue
            with turn.calls.of.chosen():
                try:
                    taken = self._time(turn.call)
                except Exception as error:
                    self.absent[turn.name] = why_absent(error)
                    self._turns.remove(turn)
                    continue
            seconds.append(taken)
            if seconds is turn.seconds and turn.name == self.subject:
                last = taken
        return last

    def _time(self, call: Call) -> float:
        if self.measure == "eager":
            return self.timer.eager(call)
        taken = self.timer.device(call)
        return taken / REPLAYED if self.measure == "graph" else taken

    def forget_first(self) -> None:
        """Forgets the first round, in which clocks rise and pauses are found."""
        for turn in self._turns:
            del turn.seconds[:1]
        del self.control[:1]

    def judge(self, expected: Callable[[], Expected]) -> None:
        """Leaves out whose results are wrong, of one more call. Memory that they lie in held NaN before.

        Args:
            expected: what they must be; who cannot be judged, for lack of memory, has no figure either.
        """
        for turn in list(self._turns):
            try:
                found = self._results(turn)
                why = expected().wrong(found, turn.calls.of.claims.rounding)
            except Exception as error:
                why = why_absent(error)
            if why:
                self.absent[turn.name] = why if why == NO_MEMORY else f"wrong: {why}"
                self._turns.remove(turn)

    def _results(self, turn: _Turn) -> dict[str, Tensor]:
        names = ("out",) if self.step == FORWARD else ("dq", "dk", "dv")
        call = turn.call
        with turn.calls.of.chosen(), torch.no_grad() if self.measure == "graph" else nullcontext():
            if isinstance(call, Replay):
                for t in _tuple(call.result):
                    t.fill_(math.nan)
                call()
                found = call.result
            else:
                _poisoned_cache(turn.calls.x)
                found = call()
        return {name: t.detach() for name, t in zip(names, _tuple(found), strict=True)}

    def contest(self) -> Contest:
        """What came of it."""
        entries = {turn.name: Entry(seconds=turn.seconds, kernels=turn.kernels) for turn in self._turns}
        entries |= {name: Entry(absent=why) for name, why in self.absent.items()}
        return Contest(
            problem=self.problem.id,
            step=self.step,
            measure=self.measure,
            flops=self.problem.flops(self.step),
            entries=entries,
            control=self.control if self.here else [],
        )


def _tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _poisoned_cache(x: Tensors) -> None:
    """Fills memory that PyTorch keeps for the next tensors of such sizes with NaN."""
    held = [torch.full_like(t, math.nan) for t in (*x.leaves, *x.leaves)]
    held.append(torch.full(x.q.shape[:-1], math.nan, dtype=torch.float32, device=x.q.device))
    del held


def kernels_of(call: Call) -> list[str]:
    """The names of the kernels that a call runs, the longest first."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    taken: dict[str, float] = {}
    for event in found.key_averages():
        if event.self_device_time_total > 0:
            taken[event.key] = taken.get(event.key, 0.0) + event.self_device_time_total
    return sorted(taken, key=lambda name: -taken[name])


def why_absent(error: Exception) -> str:
    """What is told of a contender that raised."""
    if isinstance(error, AbsentError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        release()
        return NO_MEMORY
    # of a compiler, a library: each has its own kinds
    first = (str(error).strip().splitlines() or [""])[0]
    return f"raised {type(error).__name__}: {first[:160]}"


def release() -> None:
    """Gives memory that nobody uses back."""
    gc.collect()
    torch.cuda.empty_cache()
