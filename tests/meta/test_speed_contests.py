"""Contests without a GPU: contenders are little functions on the CPU, and the timer says what it is told."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from reports.timings import Contest
from tests.implementations import Claims
from tests.speed import bench, contest
from tests.speed.bench import OnProblem
from tests.speed.contenders import AbsentError, Contender, Kernels
from tests.speed.contest import FEW, LONG, NO_MEMORY, kernels_of
from tests.speed.problems import BACKWARD, BOTH, FORWARD, Problem, Tensors, tensors
from tests.speed.timer import REPLAYED

PROBLEM = Problem(1, 2, 2, 33, 16)
CLAIMS, ANY = Claims(backward=True), Kernels()
ROUNDS = 15
Function = Callable[[Tensor, Tensor, Tensor], Any]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, in float32, rounded once."""
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    scores = (q.shape[-1] ** -0.5 * q.float() @ k.float().mT).masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def raises(error: Exception) -> Callable[..., Any]:
    def function(*given: Any) -> Any:
        raise error

    return function


class Scene:
    """Contenders, and a timer that knows by who was chosen whose turn it is.

    Attributes:
        seconds: that a call of a contender takes; each later one 2**-30 more.
        trouble: what a contender raises when it is timed for the nth time, by name: (n, error).
        ran: the kernels of contenders.
        turns: who was timed, in order.
        given: the tensors that a contender was prepared with.
        released: how often memory was given back.
        chosen: whose turn it is.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.trouble: dict[str, tuple[int, Exception]] = {}
        self.ran: dict[str, list[str]] = {}
        self.turns: list[str] = []
        self.given: dict[str, list[Tensors]] = {}
        self.released = 0
        self.timer: Any = SimpleNamespace(device=self.device, eager=lambda call: 7 * self.device(call))
        self.chosen = ""

    def contender(
        self, name: str, function: Function = attention, claims: Claims = CLAIMS, kernels: Kernels = ANY
    ) -> Contender:
        def prepare(problem: Problem, x: Tensors) -> Callable[[], Any]:
            self.given.setdefault(name, []).append(x)
            return lambda: function(*x.leaves)

        @contextmanager
        def chosen() -> Iterator[None]:
            before, self.chosen = self.chosen, name
            yield
            self.chosen = before

        return Contender(name, claims, prepare, "cpu", kernels, chosen)

    def on(self, *contenders: Contender | str) -> OnProblem:
        """The contenders on the problem; the first is the subject, and words are why one is absent."""
        made: Any = SimpleNamespace(timer=self.timer)
        return OnProblem(made, PROBLEM, {c if isinstance(c, str) else c.name: c for c in contenders})

    def device(self, call: Callable[[], Any]) -> float:
        name = self.chosen
        assert name, "a contender was called that had not been chosen"
        self.turns.append(name)
        nth, error = self.trouble.get(name, (0, None))
        if error is not None and self.turns.count(name) == nth:
            raise error
        call()
        return self.seconds.get(name, 2.0**-13) + 2.0**-30 * len(self.turns)

    def kernels_of(self, call: Callable[[], Any]) -> list[str]:
        call()
        return self.ran.get(self.chosen, ["attention_forward"])

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene()
    monkeypatch.setattr(bench, "tensors", functools.partial(tensors, device="cpu"))
    monkeypatch.setattr(contest, "kernels_of", made.kernels_of)
    monkeypatch.setattr(contest, "release", made.release)
    return made


def absent(found: Contest) -> dict[str, str]:
    return {name: entry.absent for name, entry in found.entries.items() if entry.absent}


def rounds(found: Contest) -> dict[str, int]:
    return {name: len(entry.seconds) for name, entry in found.entries.items()}


# ---------------------------------------------------------------- turns

NAMES = ("mine", "one", "two")


def orders(scene: Scene, step: str = FORWARD) -> list[tuple[str, ...]]:
    """Of the turns of each round of a contest."""
    turns = scene.on(*map(scene.contender, NAMES)).in_turns(step)
    found = []
    for _ in range(ROUNDS):
        scene.turns.clear()
        turns.round()
        found.append(tuple(scene.turns))
    return found


def test_everybody_has_a_turn_in_each_round_and_the_subject_two(scene: Scene) -> None:
    assert {tuple(sorted(order)) for order in orders(scene)} == {("mine", "mine", "one", "two")}


def test_chance_decides_the_order_anew_in_each_round_and_alike_in_each_run(scene: Scene) -> None:
    found = orders(scene)
    assert len(set(found)) > 5 and {order[0] for order in found} == set(NAMES)
    assert orders(scene) == found != orders(scene, BACKWARD)


def test_a_round_is_kept_as_it_was_timed_and_tells_the_time_of_the_subject(scene: Scene) -> None:
    turns = scene.on(scene.contender("mine"), scene.contender("other")).in_turns(FORWARD)
    told = [turns.round() for _ in range(ROUNDS)]
    found = turns.contest()
    assert found.entries["mine"].seconds == told
    times = [*told, *found.control, *found.entries["other"].seconds]
    assert sorted(times) == [2.0**-13 + 2.0**-30 * (n + 1) for n in range(3 * ROUNDS)]
    later = [control > time for time, control in zip(told, found.control, strict=True)]
    assert 0 < sum(later) < ROUNDS  # the control has no place of its own
    turns.forget_first()
    rest = turns.contest()
    assert (
        rest.entries["mine"].seconds == told[1:]
        and [len(rest.control), *rounds(rest).values()] == [ROUNDS - 1] * 3
    )


def test_who_takes_long_has_few_rounds_unless_it_is_the_subject(scene: Scene) -> None:
    scene.seconds = {"mine": 2 * LONG, "long": 2 * LONG, "short": LONG / 2}
    here = scene.on(*map(scene.contender, scene.seconds))
    assert rounds(here.contest(FORWARD, rounds=ROUNDS)) == {"mine": ROUNDS, "long": FEW, "short": ROUNDS}
    assert rounds(here.contest(FORWARD, rounds=FEW - 2)) == dict.fromkeys(scene.seconds, FEW - 2)


@pytest.mark.parametrize(("measure", "factor"), [("device", 1), ("eager", 7)])
@pytest.mark.parametrize("step", [FORWARD, BACKWARD, BOTH])
def test_a_contest_tells_what_was_measured(step: str, measure: str, factor: float, scene: Scene) -> None:
    scene.ran["mine"] = ["a", "b", "c", "d"]
    found = scene.on(scene.contender("mine")).contest(step, measure, 3)
    told = found.problem, found.step, found.measure, found.flops
    assert told == (PROBLEM.id, step, measure, PROBLEM.flops(step))
    mine = found.entries["mine"]
    assert mine.kernels == ["a", "b", "c"] and not mine.absent
    assert mine.seconds == pytest.approx([factor * 2.0**-13] * 3, rel=1e-3)


def test_kernels_are_named_once_the_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [("long", 3), ("cudaLaunchKernel", 0), ("several", 2), ("short", 1), ("several", 2)]
    events = [SimpleNamespace(key=key, self_device_time_total=time) for key, time in times]
    called: list[str] = []

    @contextmanager
    def profile(activities: Any) -> Iterator[Any]:
        called.append("profiled")
        yield SimpleNamespace(key_averages=lambda: events)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: called.append("idle"))
    monkeypatch.setattr(contest, "profile", profile)
    assert kernels_of(lambda: called.append("called")) == ["several", "long", "short"]
    assert called == ["idle", "profiled", "called", "idle"]


# ---------------------------------------------------------------- who is absent

RAISED = (
    (RuntimeError("no such tile\nmore"), "raised RuntimeError: no such tile"),
    (NotImplementedError(), "raised NotImplementedError: "),
    (torch.OutOfMemoryError("CUDA out of memory"), NO_MEMORY),
    (AbsentError("it takes no such thing"), "it takes no such thing"),
)


@pytest.mark.parametrize("who", ["mine", "other"])
@pytest.mark.parametrize(("error", "why"), RAISED)
def test_who_raises_at_its_first_call_is_absent_and_others_go_on(
    error: Exception, why: str, who: str, scene: Scene
) -> None:
    functions = {"mine": attention, "other": attention, "third": attention} | {who: raises(error)}
    turns = scene.on(*(scene.contender(*each) for each in functions.items())).in_turns(FORWARD)
    assert turns.here == (who != "mine")
    assert [turns.round() > 0 for _ in range(3)] == [turns.here] * 3
    found = turns.contest()
    assert absent(found) == {who: why} and bool(scene.released) == (why == NO_MEMORY)
    assert rounds(found) == dict.fromkeys(functions, 3) | {who: 0}
    assert len(found.control) == (3 if turns.here else 0)


@pytest.mark.parametrize("who", ["mine", "other"])
@pytest.mark.parametrize("nth", [1, 2, 6])
@pytest.mark.parametrize(("error", "why"), RAISED[::2], ids=["raises", "no memory"])
def test_who_raises_in_a_later_round_is_absent_and_others_go_on(
    error: Exception, why: str, nth: int, who: str, scene: Scene
) -> None:
    scene.trouble[who] = nth, error
    here = scene.on(*map(scene.contender, ("mine", "other", "third")))
    found = here.contest(FORWARD, rounds=7)
    assert absent(found) == {who: why}
    assert rounds(found) == {"mine": 7, "other": 7, "third": 7} | {who: 0}
    assert len(found.control) == (0 if who == "mine" else 7)
    assert scene.turns.count(who) == nth and bool(scene.released) == (why == NO_MEMORY)


def test_who_is_refused_or_cannot_be_prepared_is_absent(scene: Scene) -> None:
    here = scene.on(
        scene.contender("mine"),
        scene.contender("full", claims=Claims(masks=("full",))),
        Contender("large", CLAIMS, raises(torch.OutOfMemoryError()), "cpu"),
        "is not installed",
    )
    why = {"full": "not claimed: a causal mask", "large": NO_MEMORY, "is not installed": "is not installed"}
    assert absent(here.contest(FORWARD, rounds=1)) == why
    assert "full" not in scene.given


def test_who_claims_no_backward_has_a_forward_only(scene: Scene) -> None:
    here = scene.on(scene.contender("mine"), scene.contender("forward", claims=Claims()))
    assert absent(here.contest(FORWARD, rounds=1)) == {}
    for found in (here.contest(BACKWARD, rounds=1), here.contest(BOTH, rounds=1)):
        assert absent(found) == {"forward": "not claimed: a backward"} and rounds(found)["mine"] == 1


def test_who_runs_the_kernels_of_something_else_is_absent(scene: Scene) -> None:
    kernels = Kernels({FORWARD: ("^fused_forward",), BACKWARD: ("^fused_backward",)}, ("gemm",))
    for name in ("mine", "other"):
        scene.ran[name] = ["fused_forward", "fill", "copy", "add", "fused_backward"]
    here = scene.on(*(scene.contender(name, kernels=kernels) for name in scene.ran))
    assert absent(here.contest(BOTH, rounds=1)) == {}
    scene.ran["other"] = ["fused_forward"]
    assert absent(here.contest(FORWARD, rounds=1)) == {}
    for step in (BACKWARD, BOTH):
        assert absent(here.contest(step, rounds=1)) == {"other": "no kernel like '^fused_backward' ran"}
    scene.ran = {"mine": ["a_gemm", "fused_forward"], "other": ["fused_forward"]}
    found = here.contest(FORWARD, rounds=1)
    assert absent(found) == {"mine": "a kernel of something else ran: a_gemm"} and not found.control
    assert rounds(found) == {"mine": 0, "other": 1}


# ---------------------------------------------------------------- who is wrong


def one_head_off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attention(q, k, v)
    return torch.cat([out[:, :-1], 1.1 * out[:, -1:]], 1)


def dk_off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, 1.1 * k - 0.1 * k.detach(), v)


@pytest.mark.parametrize("measure", ["device", "eager"])
@pytest.mark.parametrize("who", ["mine", "other"])
@pytest.mark.parametrize(
    ("step", "function", "why"),
    [
        (FORWARD, one_head_off, "wrong: out is off by "),
        (FORWARD, lambda *x: attention(*x).mT, "wrong: out is of shape (1, 2, 16, 33), not (1, 2, 33, 16)"),
        (FORWARD, lambda *x: attention(*x).float(), "wrong: out is of torch.float32, not float16"),
        (BACKWARD, dk_off, "wrong: dk is off by "),
        (BOTH, dk_off, "wrong: dk is off by "),
        (FORWARD, dk_off, ""),
    ],
)
def test_who_is_wrong_has_no_figure(
    step: str, function: Function, why: str, who: str, measure: str, scene: Scene
) -> None:
    functions: dict[str, Function] = {"mine": attention, "other": attention} | {who: function}
    here = scene.on(*(scene.contender(*each) for each in functions.items()))
    found = here.contest(step, measure, 3)
    assert found.entries[who].absent.startswith(why) and set(absent(found)) == ({who} if why else set())
    assert rounds(found) == dict.fromkeys(functions, 3) | {who: 0 if why else 3}
    assert len(found.control) == (0 if why and who == "mine" else 3)


def test_memory_that_was_not_written_holds_nan(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last row is right by luck, of the call before, until memory is filled with something else."""
    freed: list[Tensor] = []
    full_like = torch.full_like

    def filled(t: Tensor, value: float) -> Tensor:
        freed.append(full_like(t, value))
        return freed[-1]

    def leaves_a_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v).detach()
        memory = freed.pop() if freed else out
        return torch.cat([out[:, :, :-1], memory[:, :, -1:]], 2)

    monkeypatch.setattr(torch, "full_like", filled)
    found = scene.on(scene.contender("mine", leaves_a_row)).contest(FORWARD, rounds=3)
    assert absent(found) == {"mine": "wrong: out has elements that are not finite"}


def test_who_cannot_be_judged_for_lack_of_memory_has_no_figure(scene: Scene) -> None:
    turns = scene.on(scene.contender("mine"), scene.contender("other")).in_turns(FORWARD)
    turns.round()
    turns.judge(raises(torch.OutOfMemoryError()))
    assert absent(turns.contest()) == {"mine": NO_MEMORY, "other": NO_MEMORY}


# ---------------------------------------------------------------- graphs


class Graph:
    """A captured call, as far as a contest sees: what it gives lies where it lay before."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.result = call()

    def __call__(self) -> None:
        with torch.enable_grad():
            found = self.call()
        with torch.no_grad():
            for t, new in zip(contest._tuple(self.result), contest._tuple(found), strict=True):
                t.copy_(new)


@pytest.mark.parametrize("step", [FORWARD, BACKWARD, BOTH])
def test_a_replay_is_of_several_calls_with_leaves_of_its_own(
    step: str, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "Replay", Graph)
    found = scene.on(scene.contender("mine"), scene.contender("wrong", one_head_off)).contest(
        step, "graph", 3
    )
    assert list(absent(found)) == ["wrong"] and "is off by" in absent(found)["wrong"]
    times = [*found.entries["mine"].seconds, *found.control]
    assert times == pytest.approx([2.0**-13 / REPLAYED] * 6, rel=1e-3)
    for old, new in zip(*(x.leaves for x in scene.given["mine"]), strict=True):
        assert new is not old and new.is_leaf and new.requires_grad and torch.equal(old, new)


def test_what_a_replay_does_not_write_is_nan(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []

    def leaves_a_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v).detach()
        if not kept:
            kept.append(out.clone())
        kept[0][:, :, :-1] = out[:, :, :-1]
        return kept[0]

    monkeypatch.setattr(contest, "Replay", Graph)
    found = scene.on(scene.contender("mine", leaves_a_row)).contest(FORWARD, "graph", 3)
    assert absent(found) == {"mine": "wrong: out has elements that are not finite"}


def test_who_cannot_be_captured_is_absent(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    no = "operation not permitted when stream is capturing"

    class Captured(Graph):
        def __init__(self, call: Callable[[], Any]) -> None:
            if scene.chosen == "other":
                raise RuntimeError(f"{no}\nmore")
            super().__init__(call)

    monkeypatch.setattr(contest, "Replay", Captured)
    found = scene.on(scene.contender("mine"), scene.contender("other")).contest(FORWARD, "graph", 1)
    assert absent(found) == {"other": f"not captured: raised RuntimeError: {no}"} and rounds(found) == {
        "mine": 1,
        "other": 0,
    }
