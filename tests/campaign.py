"""A campaign: random cases over several implementations, by several processes that may each die.

Every worker takes some dtypes and head dimensions, so that it compiles few kernels. Where Triton's code for
an older GPU is wanted too, a worker has a companion, which is told so before it imports Triton: it runs our
kernels, and the worker judges what comes of it by the same oracle.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from reports.records import Record

from . import drawing
from .cases import Case

HUNG = 300.0
"""Seconds without a word after which a worker is taken to hang; it may have kernels to compile."""

PATIENCE = 200.0
"""Seconds that a worker waits for its companion."""

GRACE = 30.0
"""Seconds that workers have after the end to finish their last case."""

LOST = 17
"""Exit status of a process whose device no longer answers."""

OVERRIDE = "TRITON_OVERRIDE_ARCH"

UNKNOWN = "?"
"""The implementation, and path, of an exception that is none's alone."""


@dataclass(frozen=True)
class Plan:
    """What a campaign is to do.

    Attributes:
        seed: of its cases.
        cases: how many; the numbers from 0.
        implementations: names, as given to --impl.
        workers: how many processes draw and judge.
        deadline: when the last case is begun, by `time.time`.
        override: what TRITON_OVERRIDE_ARCH is set to for the companions; none if empty.
        pairs: dtypes and head dimensions.
    """

    seed: int
    cases: int
    implementations: tuple[str, ...]
    workers: int
    deadline: float
    override: str
    pairs: tuple[drawing.Pair, ...]

    def numbers(self, worker: int, first: int = 0) -> Iterator[int]:
        """The cases of a worker: of few pairs, all workers together have each case once."""
        pairs = len(self.pairs)
        if self.workers <= pairs:
            mine = (n for n in range(self.cases) if n % pairs % self.workers == worker)
        else:  # several workers share a pair, by turns
            sharing = [w for w in range(self.workers) if w % pairs == worker % pairs]
            rank = sharing.index(worker)
            mine = (
                n
                for n in range(self.cases)
                if n % pairs == worker % pairs and n // pairs % len(sharing) == rank
            )
        return (n for n in mine if n >= first)

    def pair(self, number: int) -> drawing.Pair:
        return self.pairs[number % len(self.pairs)]


class Numbers(msgspec.Struct, frozen=True):
    """What one tensor of a comparison used of its limits: statistic / limit; None where there was none.

    Attributes:
        budget: of the hard bound.
        largest: of the limit of the largest z.
        rms: of that of the root mean square of z, whichever group was closest to it.
        bias: of that of the mean of z.
        emulation: of that of the root mean square against the emulation.
        max_z: the largest z itself.
        elements, judged: how many there are, and how many could be judged.
    """

    budget: float | None
    largest: float | None
    rms: float | None
    bias: float | None
    emulation: float | None
    max_z: float | None
    elements: int
    judged: int


class Sample(msgspec.Struct, frozen=True):
    """What a campaign keeps of a comparison. `status` may also be "refused", see `backends.REFUSED`."""

    case: str
    implementation: str
    path: str
    dtype: str
    values: str
    status: str
    reason: str
    tensors: dict[str, Numbers]
    seconds: dict[str, float]


@dataclass
class Begun:
    number: int
    case: str


@dataclass
class Done:
    number: int
    samples: list[Sample]
    red: list[Record]
    seconds: float


def sample(case: Case, record: Record) -> Sample:
    """The numbers of a record."""
    from .backends import REFUSED

    shares: dict[tuple[str, str], float] = {}
    for verdict in record.verdicts:
        name = _KINDS.get((verdict.reference, verdict.rule))
        if name is not None:
            key = verdict.tensor, name
            shares[key] = max(shares.get(key, 0.0), verdict.margin)
    refused = record.status == "broken" and any(REFUSED in verdict.note for verdict in record.verdicts)
    return Sample(
        record.case,
        record.implementation,
        record.path,
        record.dtype,
        case.values,
        "refused" if refused else record.status,
        record.reason,
        {
            tensor: Numbers(
                budget=shares.get((tensor, "budget")),
                largest=shares.get((tensor, "largest")),
                rms=shares.get((tensor, "rms")),
                bias=shares.get((tensor, "bias")),
                emulation=shares.get((tensor, "emulation")),
                max_z=summary.max_z if summary.judged else None,
                elements=summary.elements,
                judged=summary.judged,
            )
            for tensor, summary in record.tensors.items()
        },
        record.seconds,
    )


_KINDS = {
    ("oracle", "hard bound"): "budget",
    ("oracle", "largest z"): "largest",
    ("oracle", "rms z"): "rms",
    ("oracle", "rms z by row"): "rms",
    ("oracle", "rms z by tile"): "rms",
    ("oracle", "rms z by head"): "rms",
    ("oracle", "bias"): "bias",
    ("emulation", "rms z"): "emulation",
}


# ---------------------------------------------------------------- a worker


class Worker:
    """Draws, runs and judges cases in this process."""

    def __init__(self, plan: Plan) -> None:
        import torch

        from .implementations import OWN, load

        torch.set_num_threads(1)
        self.plan = plan
        self.device = device()
        self.implementations = [load(name) for name in plan.implementations]
        self.ours = max((i.claims for i in self.implementations), key=lambda c: (c.ragged, c.lse, c.gqa))
        self.own = next((i for i in self.implementations if i.name == OWN), None)

    @cached_property
    def companion(self) -> Companion | None:
        return Companion(self.plan) if self.plan.override and self.own is not None else None

    def forget_companion(self) -> None:
        """Its next answer would be that to a question before."""
        if self.companion is not None:
            self.companion.end()

    def case(self, number: int) -> Case:
        plan = self.plan
        pair = plan.pair(number)
        of_all = drawing.common((i.claims for i in self.implementations), pair)
        return drawing.draw(plan.seed, number, pair, self.ours, of_all)

    def compare(self, number: int) -> tuple[list[Sample], list[Record], bool]:
        """A case through all implementations.

        Returns:
            A sample of each comparison, the records of those that were red, and whether the device is lost.
        """
        from . import comparison

        case = self.case(number)
        companion = self.companion
        if companion is not None:
            companion.ask(case)
        prepared = comparison.Prepared(case, fa2=False)
        samples: list[Sample] = []
        red: list[Record] = []

        def keep(record: Record) -> None:
            if record.status == "not claimed":
                return
            samples.append(sample(case, record))
            if record.status == "broken":
                red.append(record)

        lost = False
        for implementation in self.implementations:
            claims = implementation.claims
            if drawing.is_free(self.plan.seed, number) and not claims.gqa:
                continue  # it would refuse most of these
            own = case
            if not claims.strided and not case.ragged and case.layout != "expanded":
                own = replace(case, layout=claims.contiguous)  # of the same values
            keep(comparison.compare(own, implementation, self.device, "campaign", prepared, hostile=False))
            if samples and samples[-1].status == "broken" and device_is_lost(self.device):
                lost = True
                break
        if companion is not None and self.own is not None:
            outcome = companion.answer()
            keep(comparison.judged(case, self.own, outcome, prepared, "campaign"))
        return samples, red, lost


def device() -> Any:
    """The GPU, if there is one and Triton does not interpret."""
    import torch

    from .interpreter import patch_once_per_launch
    from .session import interpreted

    if interpreted():
        patch_once_per_launch()
    elif torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_is_lost(device: Any) -> bool:
    """Whether a device no longer computes: after an illegal access no call to it succeeds."""
    if device.type != "cuda":
        return False
    import torch

    try:
        return bool(torch.ones(2, device=device).sum().item() != 2)
    except Exception:
        return True


def work(plan: Plan, index: int, first: int, connection: Connection) -> None:
    """The main function of a worker's process."""
    try:
        worker = Worker(plan)
        for number in plan.numbers(index, first):
            if time.time() > plan.deadline:
                break
            start = time.perf_counter()
            begun = Begun(number, worker.case(number).id)
            connection.send(begun)
            try:
                samples, red, lost = worker.compare(number)
            except Exception:  # the suite's own; the campaign goes on
                found = exceptional(begun, f"the suite raised:\n{traceback.format_exc()}")
                samples, red, lost = found.samples, found.red, device_is_lost(worker.device)
                worker.forget_companion()
            connection.send(Done(number, samples, red, time.perf_counter() - start))
            if lost:
                os._exit(LOST)  # an orderly end would wait for the device
        connection.send(None)
    except (BrokenPipeError, EOFError):
        pass  # nobody listens any more
    except Exception:
        connection.send(traceback.format_exc())
        raise


def exceptional(begun: Begun, what: str) -> Done:
    """A case that came to nothing: red, of no implementation that is known."""
    from .cases import parse_case

    case = parse_case(begun.case)
    reason = what.splitlines()[0]
    if what.count("\n"):
        reason += " " + what.splitlines()[-1]
    record = Record(
        case=case.id, words=case.words(), origin="campaign", implementation=UNKNOWN, path=UNKNOWN,
        status="broken", reason=what, dtype=case.dtype, backward=case.backward,
    )  # fmt: skip
    found = Sample(case.id, UNKNOWN, UNKNOWN, case.dtype, case.values, "broken", reason, {}, {})
    return Done(begun.number, [found], [record], 0.0)


class Companion:
    """A process that runs our kernels as Triton compiles them for another GPU."""

    def __init__(self, plan: Plan) -> None:
        self.override = plan.override
        self.process: BaseProcess | None = None
        self.sent = 0.0

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        before = os.environ.get(OVERRIDE)
        os.environ[OVERRIDE] = self.override  # the child inherits it before it imports anything
        try:
            self.process = context.Process(target=accompany, args=(theirs,), daemon=True)
            self.process.start()
        finally:
            if before is None:
                del os.environ[OVERRIDE]
            else:
                os.environ[OVERRIDE] = before
        theirs.close()

    def ask(self, case: Case) -> None:
        if self.process is None or not self.process.is_alive():
            self._start()
        with suppress(OSError):  # if it has died, that is seen when it should answer
            self.connection.send(case.id)
        self.sent = time.time()

    def end(self) -> None:
        if self.process is not None and self.process.is_alive():
            self.process.kill()
        self.process = None

    def answer(self) -> Any:
        """What came of the last case that it was asked for; of a process that died, that."""
        from .comparison import Outcome

        path = f"{self.override}-override"
        process = self.process
        assert process is not None
        try:
            if self.connection.poll(max(1.0, self.sent + PATIENCE - time.time())):
                return self.connection.recv()
            how = f"did not answer for {PATIENCE:.0f} s"
        except (EOFError, OSError):
            process.join(5)
            how = f"died with exit status {process.exitcode}"
        self.end()
        return Outcome(path, raised=f"ProcessError: the process of this path {how}")


def accompany(connection: Connection) -> None:
    """The main function of a companion's process: case ids in, outcomes out, until nobody asks."""
    import torch

    from .cases import parse_case
    from .comparison import execute
    from .implementations import OWN, load
    from .values import make_inputs

    torch.set_num_threads(1)
    own = load(OWN)
    where = device()
    while True:
        try:
            case = parse_case(connection.recv())
        except (EOFError, OSError):
            return
        outcome = execute(case, own, where, make_inputs(case), hostile=False)
        try:
            connection.send(outcome)
        except (BrokenPipeError, OSError):
            return
        if outcome.raised and device_is_lost(where):
            os._exit(LOST)


# ---------------------------------------------------------------- all workers


@dataclass
class _Running:
    """A worker's process; the case that it is at, and the one from which on nothing has been done."""

    process: BaseProcess
    connection: Connection
    at: Begun | None = None
    ahead: int = 0
    heard: float = field(default_factory=time.time)
    trouble: str = ""


def conduct(plan: Plan, take: Callable[[Done], None], say: Callable[[str], None]) -> bool:
    """Runs a campaign.

    A worker that dies or hangs is an exception with the id of the case that it was at; another takes over
    from the next case on.

    Args:
        plan: what to do.
        take: gets what came of each case.
        say: gets what a reader should know at once.

    Returns:
        Whether all cases were compared.
    """
    context = multiprocessing.get_context("spawn")
    running: dict[int, _Running] = {}
    finished: set[int] = set()
    in_vain = 0

    def start(index: int, first: int) -> None:
        mine, theirs = context.Pipe()
        # not a daemon, which may have no children
        process = context.Process(target=work, args=(plan, index, first, theirs), name=f"worker {index}")
        process.start()
        theirs.close()
        running[index] = _Running(process, mine, ahead=first)

    def gone(index: int, how: str) -> None:
        """A worker's process has ended before its time."""
        nonlocal in_vain
        state = running.pop(index)
        if state.process.is_alive():
            state.process.kill()
        state.process.join(10)
        state.connection.close()
        at = f" at {state.at.case}" if state.at else ""
        say(f"worker {index} {how}{at}" + (f"\n{state.trouble}" if state.trouble else ""))
        if state.at is not None:
            state.ahead = state.at.number + 1
            take(exceptional(state.at, f"the process {how}"))
        elif state.trouble:
            in_vain += 1
        if next(plan.numbers(index, state.ahead), None) is None:
            finished.add(index)
        elif in_vain > plan.workers:
            say(f"worker {index} is not started again: that was in vain {in_vain} times")
        elif time.time() < plan.deadline:
            start(index, state.ahead)

    for index in range(plan.workers):
        start(index, 0)
    while running and time.time() < plan.deadline + GRACE:
        ready = wait([state.connection for state in running.values()], timeout=1.0)
        for index, state in list(running.items()):
            if state.connection in ready:
                try:
                    message = state.connection.recv()
                except (EOFError, OSError):
                    state.process.join(10)
                    lost = state.process.exitcode == LOST
                    gone(index, "lost its device" if lost else f"died, exit status {state.process.exitcode}")
                    continue
                state.heard = time.time()
                if message is None:
                    finished.add(index)
                    state.process.join(10)
                    if state.process.is_alive():
                        state.process.kill()
                    del running[index]
                elif isinstance(message, str):
                    state.trouble = message.strip()
                elif isinstance(message, Begun):
                    state.at = message
                else:
                    state.at, state.ahead = None, message.number + 1
                    take(message)
            elif time.time() - state.heard > HUNG:
                gone(index, f"said nothing for {HUNG:.0f} s")
    for state in running.values():
        state.process.kill()
    return len(finished) == plan.workers and time.time() < plan.deadline
