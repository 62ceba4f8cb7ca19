"""A bench: contenders and a timer on the GPU that is there, and the contests between them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from reports.timings import Contest

from ..implementations import OWN
from .contenders import OTHERS, AbsentError, Contender, contender
from .contest import ROUNDS, Calls, InTurns, release, why_absent
from .correct import Expected
from .problems import Problem, Tensors, tensors
from .timer import Timer


class Bench:
    """The contenders that can be here, and why others cannot.

    Args:
        subject: the implementation that others are compared with, as --impl.
        manifest: of it.
        others: names.

    Attributes:
        subject: its contender.
        contenders: by name, the subject first; or why one is absent.
        timer: measures.

    Raises:
        ImplementationError: if there is no such implementation.
        AbsentError: if the subject cannot run here.
    """

    def __init__(
        self, subject: str | None = OWN, others: Sequence[str] = OTHERS, manifest: str | None = None
    ) -> None:
        self.subject = contender(subject if subject or manifest else OWN, manifest)
        self.contenders: dict[str, Contender | str] = {self.subject.name: self.subject}
        for name in (OWN, *others) if self.subject.name != OWN else others:
            if name in self.contenders:
                continue
            try:
                self.contenders[name] = contender(name)
            except AbsentError as error:
                self.contenders[name] = str(error)
        self.timer = Timer()

    @contextmanager
    def on(self, problem: Problem, names: Sequence[str] | None = None) -> Iterator[OnProblem]:
        """The contenders on a problem; their memory is given back at the end."""
        chosen = {n: c for n, c in self.contenders.items() if names is None or n in names}
        made = OnProblem(self, problem, chosen)
        try:
            yield made
        finally:
            made.close()

    def contest(
        self, problem: Problem, step: str, measure: str = "device", rounds: int = ROUNDS,
        names: Sequence[str] | None = None,
    ) -> Contest:  # fmt: skip
        """One contest, from the beginning to the judgement."""
        with self.on(problem, names) as those:
            return those.contest(step, measure, rounds)


class OnProblem:
    """Contenders on one problem: tensors, exact results and forwards are made once for all its steps."""

    def __init__(self, bench: Bench, problem: Problem, contenders: dict[str, Contender | str]) -> None:
        self.bench, self.problem = bench, problem
        self._tensors: dict[str, Tensors] = {}
        self.calls: dict[str, Calls | str] = {}
        for name, one in contenders.items():
            if isinstance(one, str):
                self.calls[name] = one
                continue
            try:
                self.calls[name] = Calls(one, problem, self._in(one.layout))
            except Exception as error:
                self.calls[name] = why_absent(error)

    def _in(self, layout: str) -> Tensors:
        if layout not in self._tensors:
            self._tensors[layout] = tensors(self.problem, layout)
        return self._tensors[layout]

    @functools.cached_property
    def expected(self) -> Expected:
        return Expected(self.problem, self._in("bhsd"))

    def in_turns(self, step: str, measure: str = "device") -> InTurns:
        """A contest that has not begun."""
        return InTurns(self.problem, step, self.calls, self.bench.timer, measure)

    def contest(self, step: str, measure: str = "device", rounds: int = ROUNDS) -> Contest:
        """A contest of so many rounds, judged."""
        turns = self.in_turns(step, measure)
        for _ in range(rounds + 1):
            turns.round()
        turns.forget_first()
        turns.judge(lambda: self.expected)
        return turns.contest()

    def close(self) -> None:
        self.calls.clear()
        self._tensors.clear()
        self.__dict__.pop("expected", None)
        release()
