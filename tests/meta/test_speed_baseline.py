"""Baselines of speed: unchanged is green in many checks, a tenth slower is red; all without a GPU."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from reports import kept, speed_baseline, timings
from reports.__main__ import main
from reports.error_baseline import Target
from reports.errors import ReportError
from reports.kept import Difference, Key
from reports.speed_baseline import (
    LEAST,
    REFERENCE,
    RUNS,
    SLOWER,
    WIDE,
    Ratios,
    baseline,
    differences,
    doubtful,
    expected,
    figures,
    red,
)
from reports.timings import Contest, Entry, Speed
from tests.meta.test_command_line import ROOT
from tests.speed import ratios
from tests.speed.problems import GRID

RATIOS = 2 * len(GRID)

KEY = Key("speed", "mine", "NVIDIA X", "2.11.0+cu130", "3.6.0", "sm90")
NAMES = expected()
FIRST = NAMES[0]

ROUNDS = 15
BETWEEN, WITHIN = 0.005, 0.01
"""Standard deviations of the logarithm: of a ratio between runs, of a time between rounds."""

STEP = 2e-8
"""Seconds between two times of a run without noise, which would seem to be a step of the clock."""


class Machine:
    """Makes runs of a kernel up.

    Args:
        seed: of the noise.
        between: by problem and step, where it is not `BETWEEN`.
        step: seconds of the clock's steps; 0 if it has none.
    """

    def __init__(self, seed: int, between: Mapping[str, float] | None = None, step: float = 0.0) -> None:
        self.generator = np.random.default_rng(seed)
        self.between, self.step = between or {}, step
        self.ratios = {name: 0.8 + 0.02 * i for i, name in enumerate(NAMES)}
        self.seconds = {name: 1e-5 * 1.1**i for i, name in enumerate(NAMES)}

    def run(self, slower: float = 0.0, only: Sequence[str] = NAMES) -> Speed:
        """One run of a kernel that takes so much longer, of these problems and steps."""
        return speed([self.contest(name, slower) for name in only])

    def contest(self, name: str, slower: float = 0.0) -> Contest:
        drawn = self.generator.normal
        of_run = math.exp(self.between.get(name, BETWEEN) * drawn())
        ours = (1 + slower) * self.seconds[name] * of_run
        theirs = self.seconds[name] * self.ratios[name]
        times = [self._read(t * np.exp(WITHIN * drawn(size=ROUNDS))) for t in (ours, theirs, ours)]
        return contest(name, *times)

    def _read(self, t: np.ndarray) -> list[float]:
        if self.step:
            t = np.floor(t / self.step + self.generator.random(ROUNDS)) * self.step
        return list(map(float, t))

    def baseline(self) -> Ratios:
        return baseline(KEY, [self.run() for _ in range(RUNS)])

    def check(self, committed: Ratios, slower: float = 0.0) -> list[Difference]:
        """As the command does: what looks worse is measured again."""
        found = self.run(slower)
        worse = doubtful(committed, found)
        return differences(committed, found, self.run(slower, worse) if worse else None)


def contest(name: str, ours: list[float], theirs: list[float], control: list[float]) -> Contest:
    problem, _, step = name.partition(" ")
    entries = {"mine": Entry(seconds=ours), REFERENCE: Entry(seconds=theirs)}
    return Contest(problem=problem, step=step, measure="device", flops=1.0, entries=entries, control=control)


def steady(ratio: float = 1.0, name: str = FIRST) -> Contest:
    """Without any noise."""
    ours = [1e-3] * (ROUNDS - 1) + [1e-3 + STEP]
    return contest(name, ours, [ratio * t for t in ours], ours)


def restless(name: str = FIRST) -> Contest:
    return contest(name, [1e-3] * ROUNDS, [1e-3] * ROUNDS, [1.2e-3] * ROUNDS)


def without(who: str, why: str, name: str = FIRST) -> Contest:
    found = steady(name=name)
    return msgspec.structs.replace(found, entries={**found.entries, who: Entry(absent=why)})


def speed(contests: Sequence[Contest], **others: Any) -> Speed:
    return Speed(
        implementation="mine", device=KEY.device, path=KEY.path, torch=KEY.torch, triton=KEY.triton,
        contests=list(contests), **others,
    )  # fmt: skip


def all_steady(*instead: Contest, ratio: float = 1.0) -> Speed:
    """The whole grid without noise, but for these."""
    here = {f"{of.problem} {of.step}": of for of in instead}
    return speed([here.get(name) or steady(ratio, name) for name in NAMES])


def reds(found: Sequence[Difference]) -> list[str]:
    return [difference.what for difference in found if difference.red]


@pytest.fixture(scope="module")
def committed() -> Ratios:
    return baseline(KEY, [all_steady()] * RUNS)


# ---------------------------------------------------------------- noise


@pytest.mark.parametrize("step", [0.0, 32e-9, 1.024e-6])
def test_an_unchanged_kernel_is_green_in_200_checks(step: float) -> None:
    """Of two ratios of each problem, against 10 baselines."""
    for seed in range(10):
        machine = Machine(seed, step=step)
        made = machine.baseline()
        assert len(made.entries) + len(made.left_out) == len(NAMES) == 2 * len(GRID)
        assert len(made.left_out) <= (1 if step else 0)
        for _ in range(20):
            assert reds(machine.check(made)) == []


def test_a_tenth_slower_is_red_wherever_the_baseline_does_not_say_otherwise() -> None:
    found, coarse = 0, 0
    for seed in range(10):
        machine = Machine(seed)
        made = machine.baseline()
        coarse += len(made.coarse)
        for _ in range(5):
            told = reds(machine.check(made, slower=SLOWER))
            assert {" ".join(what.split(":")[0].split()) for what in told} >= set(NAMES) - set(made.coarse)
            found += len(told)
    assert coarse < 10 * 0.1 * len(NAMES)
    assert found > 50 * 0.95 * len(NAMES)


def test_a_noisy_entry_is_not_red_and_said_to_be_coarse() -> None:
    noisy = NAMES[7]
    named = 0
    for seed in range(10):
        machine = Machine(seed, between={noisy: 0.04})
        made = machine.baseline()
        named += noisy in made.coarse
        for _ in range(5):
            assert reds(machine.check(made)) == []
    assert named >= 8


def test_a_clock_of_steps_that_the_runs_have_not_shown_widens_the_band() -> None:
    """A time of 10 steps which is at times 11."""
    step = 1e-6

    def run(ours: int) -> Speed:
        def timed(name: str, ours: int, theirs: int) -> Contest:
            return contest(name, [ours * step] * ROUNDS, [theirs * step] * ROUNDS, [ours * step] * ROUNDS)

        return speed([timed(FIRST, ours, 13), *(timed(name, 1000, 1001) for name in NAMES[1:])])

    made = baseline(KEY, [run(10)] * RUNS)
    assert made.entries[FIRST].allowed == pytest.approx(LEAST + 1 / 10 + 1 / 13, rel=1e-3)
    assert made.entries[NAMES[1]].allowed == pytest.approx(LEAST, abs=0.003)
    assert made.coarse == [FIRST]
    assert differences(made, run(11)) == []


# ---------------------------------------------------------------- bands


def test_a_band_is_as_wide_as_the_noise() -> None:
    control = contest(NAMES[1], [1e-3] * ROUNDS, [1e-3] * ROUNDS, [1.02e-3] * ROUNDS)
    runs = [all_steady(steady(ratio), control) for ratio in (1.0, 1.04, 0.99)]
    made = baseline(KEY, runs)
    assert made.noise == 0
    assert made.entries[FIRST].spread == pytest.approx(0.04)
    assert made.entries[FIRST].allowed == pytest.approx(WIDE * 0.04, abs=1e-3)
    assert made.entries[NAMES[1]].control == pytest.approx(0.02)
    assert made.entries[NAMES[1]].allowed == pytest.approx(WIDE * 0.02, abs=1e-3)
    assert made.entries[NAMES[2]].allowed == pytest.approx(LEAST, abs=1e-3)
    assert made.entries[NAMES[2]].ms == pytest.approx(1.0)
    assert made.coarse == [FIRST, NAMES[1]]


def test_three_runs_that_agree_by_chance_have_the_noise_of_the_others() -> None:
    others = [all_steady(steady(1.0), ratio=ratio) for ratio in (1.0, 1.03, 0.97)]
    made = baseline(KEY, others)
    assert made.noise == pytest.approx(0.03)
    assert made.entries[FIRST].spread == 0
    assert made.entries[FIRST].allowed == pytest.approx(WIDE * 0.03, abs=1e-3)


def test_the_ratio_is_the_median_of_the_runs() -> None:
    made = baseline(KEY, [all_steady(steady(ratio)) for ratio in (1.02, 1.5, 1.0)])
    assert made.entries[FIRST].ratio == pytest.approx(1.02)
    of = figures(all_steady(steady(1.5)))[FIRST]
    assert isinstance(of, speed_baseline.Figure)
    assert of.ratio == pytest.approx(1.5) and of.control == 0
    assert of.tick == pytest.approx(STEP / 1e-3 + STEP / 1.5e-3, rel=1e-3)
    assert of.seconds == pytest.approx(1e-3)


# ---------------------------------------------------------------- what a check tells


def test_what_is_as_fast_is_green(committed: Ratios) -> None:
    assert differences(committed, all_steady()) == []
    assert differences(committed, all_steady(ratio=1 - LEAST + 0.001)) == []


def test_what_is_worse_twice_is_red(committed: Ratios) -> None:
    found = all_steady(steady(0.9))
    assert doubtful(committed, found) == [FIRST]
    (difference,) = differences(committed, found, speed([steady(0.91)]))
    assert difference.red
    assert difference.what == (
        f"{FIRST}: 0.900 times as fast as sdpa-flash, 1.000 in the baseline: 10.0% less, and up to 3.0% may"
        " be noise; measured again it is 0.910"
    )
    (difference,) = differences(committed, found)
    assert difference.red


@pytest.mark.parametrize(
    ("again", "is_red", "what"),
    [
        ([steady(0.99)], False, "; measured again it is 0.990"),
        ([restless()], False, "; measured again: cannot tell: not quiet, its ratio to itself is 1.2"),
        ([], True, "; it was not measured again"),
    ],
)
def test_what_is_worse_once_only_is_told(
    committed: Ratios, again: list[Contest], is_red: bool, what: str
) -> None:
    (difference,) = differences(committed, all_steady(steady(0.9)), speed(again))
    assert difference.red == is_red
    assert what in difference.what


def test_what_is_better_is_told_and_not_red(committed: Ratios) -> None:
    (difference,) = differences(committed, all_steady(steady(1.2)))
    assert not difference.red
    assert difference.what.endswith(": 20.0% more: the baseline may be updated")


@pytest.mark.parametrize("why", ["wrong: out is off by 7 times its bound", "raised RuntimeError: no",
                                 "not enough memory", "no kernel like '^attention_forward' ran"])  # fmt: skip
def test_a_subject_without_a_right_result_is_red(committed: Ratios, why: str) -> None:
    found = all_steady(without("mine", why))
    assert reds(differences(committed, found)) == [f"{FIRST}: {why}"]
    assert red([all_steady(), found]).endswith(f"the first {FIRST}: {why}")
    with pytest.raises(ReportError, match=r"1 contests in 2 runs have no right result"):
        baseline(KEY, [all_steady(), found])


def test_a_result_that_is_wrong_when_measured_again_is_red(committed: Ratios) -> None:
    again = speed([steady(0.99), without("mine", "wrong: dq", NAMES[1])])
    assert reds(differences(committed, all_steady(steady(0.9)), again)) == [f"{NAMES[1]}: wrong: dq"]


def test_what_flash_cannot_run_has_no_ratio_and_must_be_right(committed: Ratios) -> None:
    found = all_steady(without(REFERENCE, "takes no grouped heads"))
    made = baseline(KEY, [found] * RUNS)
    assert made.left_out == {FIRST: "sdpa-flash: takes no grouped heads"}
    assert FIRST not in made.entries
    assert differences(made, found) == []
    (told,) = differences(committed, found)
    assert told == Difference(f"{FIRST}: not compared: sdpa-flash: takes no grouped heads", False)
    assert reds(differences(made, all_steady(without("mine", "wrong: out")))) == [f"{FIRST}: wrong: out"]
    (told,) = differences(made, all_steady())
    assert told == Difference(f"1 are not in the baseline, the first {FIRST}", False)


def test_without_flash_there_is_no_baseline() -> None:
    found = speed([without(REFERENCE, "not installed", name) for name in NAMES])
    assert red([found] * RUNS) == "there is no ratio to sdpa-flash: sdpa-flash: not installed"


def test_where_the_machine_is_not_quiet_nothing_is_claimed(committed: Ratios) -> None:
    (told,) = differences(committed, all_steady(restless()))
    assert not told.red and f"{FIRST}: not compared: cannot tell: not quiet" in told.what
    made = baseline(KEY, [all_steady(), all_steady(restless()), all_steady()])
    assert FIRST in made.entries
    made = baseline(KEY, [all_steady(), all_steady(restless()), all_steady(restless())])
    assert made.left_out.keys() == {FIRST}
    nowhere = speed([restless(name) for name in NAMES])
    assert reds(differences(committed, nowhere)) == ["nothing was compared"]


def test_a_check_of_less_than_half_is_none() -> None:
    committed = baseline(KEY, [all_steady() for _ in range(RUNS)])
    half = len(NAMES) // 2
    assert reds(differences(committed, all_steady(*map(restless, NAMES[:half])))) == []
    most = all_steady(*map(restless, NAMES[: half + 1]))
    assert reds(differences(committed, most)) == [
        f"{half + 1} of {len(NAMES)} could not be compared: that is no check; measure again"
    ]


def test_few_rounds_tell_nothing(committed: Ratios) -> None:
    few = contest(FIRST, [1e-3] * 6, [1e-3] * 6, [1e-3] * 6)
    (told,) = differences(committed, all_steady(few))
    assert told == Difference(f"{FIRST}: not compared: cannot tell: fewer than 7 rounds", False)


def test_what_was_not_measured_is_red(committed: Ratios) -> None:
    found = speed(all_steady().contests[:-2])
    assert reds(differences(committed, found)) == [f"2 were not measured, the first {NAMES[-2]}"]
    assert red([all_steady(), found]) == f"run 2 has not measured 2 of the grid, the first {NAMES[-2]}"


def test_what_is_not_claimed_is_told_and_not_red(committed: Ratios) -> None:
    found = all_steady(*(without("mine", "not claimed: ragged batches", name) for name in NAMES[-3:]))
    assert differences(committed, found) == [Difference("3 are not claimed, hence not compared", False)]
    assert len(baseline(KEY, [found] * RUNS).left_out) == 3


def test_others_on_the_gpu_are_told(committed: Ratios) -> None:
    found = speed(all_steady().contests, others_busy="processes 7 are on this GPU too")
    assert differences(committed, found) == [Difference("not alone: processes 7 are on this GPU too", False)]


# ---------------------------------------------------------------- files


def test_a_baseline_is_read_as_it_was_written_a_line_for_each_entry(tmp_path: Path) -> None:
    made = Machine(0).baseline()
    path = tmp_path / made.key.name
    path.write_bytes(kept.encode(made))
    assert kept.decode(path, Ratios, speed_baseline.VERSION) == made
    lines = path.read_text().splitlines()
    assert all(sum(f'"{name}": ' in line for line in lines) == 1 for name in NAMES)


def test_another_gpu_has_another_file() -> None:
    others = [
        KEY,
        replace(KEY, device="NVIDIA Y"),
        replace(KEY, torch="2.13.0"),
        replace(KEY, triton="3.7.1"),
        replace(KEY, path="sm80-override"),
        replace(KEY, implementation="other"),
    ]
    assert len({key.name for key in others}) == len(others)
    assert KEY.name == "speed-mine-nvidia-x-torch2.11.0-triton3.6.0-sm90.json"


# ---------------------------------------------------------------- a run


def fake_python(folder: Path, left: Speed | None, status: int) -> str:
    """An interpreter that leaves a run, says something, and ends with a status."""
    if left is not None:
        timings.write(left, folder / "left.json")
    program = folder / "python"
    copied = "" if left is None else f'cp {folder}/left.json "$4"\n'
    said = "echo first $TRITON_OVERRIDE_ARCH >&2; echo last >&2"
    program.write_text(f"#!/bin/sh\n{copied}{said}; exit {status}\n")
    program.chmod(0o755)
    return str(program)


def test_a_run_that_ended_early_leaves_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = all_steady()
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, left, 9))
    assert speed_baseline.executed(Target()) == left
    assert f"tests.speed.ratios ended with 9, and left {RATIOS} contests: last" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (2, ReportError, r"no speed was measured; tests.speed.ratios ended with 2:\nfirst sm80\nlast"),
        (3, speed_baseline.NotHereError, r"^last$"),
        (0, ReportError, r"no speed was measured; tests.speed.ratios wrote nothing"),
    ],
)
def test_a_run_that_measured_nothing_is_told(
    status: int, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, None, status))
    with pytest.raises(error, match=message):
        speed_baseline.executed(Target(override="sm80"))


class FakeBench:
    """Its contests have been measured already."""

    def __init__(self, subject: str | None, others: Sequence[str], manifest: str | None) -> None:
        assert (subject, others, manifest) == (None, (REFERENCE,), None)
        self.subject = SimpleNamespace(name="mine")

    @contextmanager
    def on(self, problem: Any, names: Sequence[str]) -> Iterator[Any]:
        assert names == ("mine", REFERENCE)
        yield SimpleNamespace(contest=lambda step: steady(1.25, f"{problem.id} {step}"))


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, instead in {
        "why_not_here": lambda: "",
        "begun": lambda implementation, arguments: speed([], arguments=list(arguments)),
        "warm": lambda: None,
        "others_busy": lambda: "",
        "Bench": FakeBench,
    }.items():
        monkeypatch.setattr(ratios, name, instead)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_run_writes_after_every_problem_and_prints_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "speed.json"
    lengths = []
    write = timings.write

    def spied(found: Speed, path: Path) -> None:
        write(found, path)
        lengths.append(len(timings.read(path).contests))

    monkeypatch.setattr(timings, "write", spied)
    assert ratios.main(["--out", str(out)]) == 0
    assert lengths == [*range(0, len(NAMES) + 1, 2), len(NAMES)]
    assert list(figures(timings.read(out))) == NAMES
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(GRID)
    assert lines[0] == f"{GRID[0].id}: forward 1.250  backward 1.250"
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.usefixtures("on_a_gpu")
def test_a_run_measures_the_problems_that_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "speed.json"
    assert ratios.main(["--out", str(out), "--problems", GRID[3].id, GRID[-1].id]) == 0
    assert [of.problem for of in timings.read(out).contests[::2]] == [GRID[3].id, GRID[-1].id]
    assert ratios.main(["--out", str(out), "--problems"]) == 0
    assert timings.read(out).contests == []
    assert ratios.main(["--out", str(out), "--grid", "quick"]) == 0
    assert 4 <= len(timings.read(out).contests) < len(NAMES)
    assert ratios.main(["--out", str(out), "--problems", "b1"]) == 2
    assert ratios.main(["--out", str(out), "--impl", "nothing:here"]) == 2
    said = capsys.readouterr().err
    assert "'b1' is no problem" in said and "importing nothing failed" in said
    assert ratios.main(["--out", str(out), "--impl", "emulation"]) == 3
    assert "emulation runs on the CPU only" in capsys.readouterr().err


# ---------------------------------------------------------------- the command


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The command with runs that have been made up: what is given, over and over."""

    def given(*runs: Speed) -> None:
        left = list(runs)

        def executed(target: Target, problems: Sequence[str] | None = None) -> Speed:
            return speed([]) if problems == [] else left.pop(0) if len(left) > 1 else left[0]

        monkeypatch.setattr(speed_baseline, "executed", executed)

    monkeypatch.setattr(speed_baseline, "targets", lambda *options: [Target()])
    return given


def words(action: str, folder: Path) -> list[str]:
    return ["baseline", action, "--kind", "speed", "--baseline-dir", str(folder)]


def test_update_writes_and_check_compares(
    tmp_path: Path, measured: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    measured(all_steady())
    assert main(words("check", tmp_path)) == 3
    said = capsys.readouterr().out
    assert "speed: no baseline of mine on NVIDIA X on path sm90 with torch 2.11.0+cu130, triton 3.6.0" in said
    assert f"python -m reports baseline update --kind speed --baseline-dir {tmp_path}" in said
    assert main(words("update", tmp_path)) == 0
    assert (
        f"of {RATIOS} ratios, 0 left out; a kernel that takes 10% longer is found" in capsys.readouterr().out
    )
    assert main(words("check", tmp_path)) == 0
    assert f"{KEY.name}: {RATIOS} of {RATIOS} ratios compared, as kept" in capsys.readouterr().out


def test_check_measures_again_what_looks_worse(
    tmp_path: Path, measured: Callable[..., None], capsys: pytest.CaptureFixture[str], committed: Ratios
) -> None:
    (tmp_path / KEY.name).write_bytes(kept.encode(committed))
    measured(all_steady(steady(0.9)), speed([steady(0.9)]))
    assert main(words("check", tmp_path)) == 1
    said = capsys.readouterr().out
    assert "1 ratios look worse, measured again:" in said and f"  worse: {FIRST}: 0.900" in said
    measured(all_steady(steady(0.9)), speed([steady(1.0)]))
    assert main(words("check", tmp_path)) == 0
    assert f"  other: {FIRST}: 0.900" in capsys.readouterr().out


def test_update_of_what_is_wrong_writes_nothing(
    tmp_path: Path, measured: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    measured(all_steady(without("mine", "wrong: out")))
    assert main(words("update", tmp_path)) == 1
    assert "not written: 3 contests in 3 runs have no right result" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_check_against_another_implementation(
    tmp_path: Path, measured: Callable[..., None], committed: Ratios
) -> None:
    (tmp_path / replace(KEY, implementation="other").name).write_bytes(kept.encode(committed))
    measured(all_steady())
    assert main(words("check", tmp_path)) == 3
    assert main([*words("check", tmp_path), "--as", "other"]) == 0
    assert main([*words("check", tmp_path), "--as", "nobody"]) == 2


def test_a_file_that_is_none_ends_with_wrong_use(
    tmp_path: Path, measured: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / KEY.name).write_text("{}")
    measured(all_steady())
    assert main(words("check", tmp_path)) == 2
    assert re.search(r"speed-mine-\S+: not a baseline", capsys.readouterr().err)


def test_without_a_gpu_speed_cannot_be_compared(tmp_path: Path) -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "reports", *words("check", tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "speed: needs a GPU: not compared\n"), done.stderr


@pytest.mark.parametrize(("action", "done"), [("check", "compared"), ("update", "written")])
def test_all_kinds_without_a_gpu_leave_speed_out(
    action: str, done: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from reports import baseline as command

    def no_gpu(*options: Any) -> list[Target]:
        raise speed_baseline.NotHereError("needs a GPU")

    monkeypatch.setattr(speed_baseline, "targets", no_gpu)
    monkeypatch.setattr(command, "_errors", lambda args: [0])
    monkeypatch.setattr(command, "_resources_apart", lambda args: 0)
    assert main(["baseline", action]) == 0
    assert capsys.readouterr().out == f"speed: needs a GPU: not {done}\n"
    monkeypatch.setattr(command, "_errors", lambda args: [1])
    assert main(["baseline", action, "--kind", "all"]) == 1
