"""`python -m tests.speed`: the runner, and pytest with its benchmark plugin on a bench without a GPU."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from reports import timings
from tests import gpu_paths
from tests.gpu_paths import GIB, CodePath, Gpu, Machine
from tests.meta.test_command_line import ROOT
from tests.speed import __main__ as program
from tests.speed.problems import FORWARD, Problem

PROBLEM = Problem(1, 2, 2, 33, 16)

# ---------------------------------------------------------------- python -m tests.speed

A100, H200 = Gpu("A100", (8, 0), 40 * GIB), Gpu("H200", (9, 0), 141 * GIB)


def test_the_command_is_pytest_in_one_process_with_the_clock_of_the_gpu(tmp_path: Path) -> None:
    words = program.command(["-k", "gate", "--strict", "--ignore=bench_x.py", "--impl", "a.py:f"], tmp_path)
    assert words[:3] == [sys.executable, "-m", "pytest"] and "--noconftest" in words
    asked = list(itertools.pairwise(words))
    assert ("-p", "no:xdist") in asked and ("-p", "tests.speed.plugin") in asked
    assert ("--impl", "a.py:f") in asked and ("-k", "gate") in asked
    assert "--benchmark-timer=tests.speed.timer.now" in words
    assert f"--benchmark-json={tmp_path / 'benchmark.json'}" in words
    assert "--strict-verdicts" in words and "--strict" not in words
    assert "--asked=-k gate --strict --ignore=bench_x.py --impl a.py:f" in words
    modules = [Path(word) for word in words if word.endswith(".py") and word[0] != "-"]
    assert [path.name for path in modules] == list(program.MODULES) and all(p.is_file() for p in modules)


@pytest.mark.parametrize("given", ["tests/speed/bench_table.py", "tests/speed/bench_gates.py::test_gate"])
def test_modules_that_are_given_stand_in_the_place_of_all(given: str, tmp_path: Path) -> None:
    words = program.command([given, "--impl=bench_me.py:f"], tmp_path)
    words.remove(f"--asked={given} --impl=bench_me.py:f")
    assert [word for word in words if ".py" in word] == [given, "--impl=bench_me.py:f"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[CodePath]:
    """On a machine with an H200: paths that were run."""
    found: list[CodePath] = []

    def run(path: CodePath, command: Sequence[str], reports: Path, defaults: object) -> int:
        assert command == program.command(["-x"], reports / path.name) and (reports / path.name).is_dir()
        found.append(path)
        return {"native": gpu_paths.HELD, "sm80": gpu_paths.BROKE, "sm86": gpu_paths.NOTHING_RAN}[path.name]

    for variable in ("TRITON_INTERPRET", "TRITON_OVERRIDE_ARCH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("FA_REPORT_DIR", str(tmp_path))
    monkeypatch.setattr(program, "ask_machine", lambda: Machine("2.13.0", "13.0", (H200,)))
    monkeypatch.setattr(program, "run", run)
    return found


@pytest.mark.parametrize(
    ("gpu", "override", "names", "status"),
    [
        (H200, None, ["native", "sm80"], 1),
        (A100, None, ["native"], 0),
        (H200, "sm86", ["sm86"], 3),
    ],
)
def test_every_path_runs_and_the_worst_status_counts(
    gpu: Gpu, override: str | None, names: list[str], status: int, ran: list[CodePath],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(program, "ask_machine", lambda: Machine("2.13.0", "13.0", (gpu,)))
    if override:
        monkeypatch.setenv("TRITON_OVERRIDE_ARCH", override)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert program.main(["-x"]) == status
    assert [path.name for path in ran] == names
    said = capsys.readouterr().out
    assert said.startswith(f"bench: {gpu}; PyTorch 2.13.0, CUDA 13.0\n")
    words = {"native": "every gate that could be judged was reached (0)", "sm80": "something broke (1)",
             "sm86": "nothing was executed (3)"}  # fmt: skip
    assert said.endswith("".join(f"bench: path {name}: {words[name]}\n" for name in names))


@pytest.mark.parametrize(
    "words", [["-n", "4"], ["-n4"], ["--numprocesses=2"], ["--dist=load"], ["--tx", "x"]]
)
def test_several_processes_are_wrong_use(
    words: list[str], ran: list[CodePath], capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["-k", "gate", *words]) == 2 and not ran
    assert "runs in one process" in capsys.readouterr().err


def test_where_nothing_can_be_timed_the_status_is_3_and_the_reason_is_told(
    ran: list[CodePath], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "ask_machine", lambda: Machine("2.13.0", "13.0", trouble="No CUDA GPUs"))
    assert program.main([]) == 3
    assert capsys.readouterr().err == "bench: no GPU is visible (No CUDA GPUs). Nothing was timed.\n"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert program.main([]) == 3 and not ran
    assert "the interpreter is never timed" in capsys.readouterr().err


# ---------------------------------------------------------------- pytest with its benchmark plugin

FAKE = '''
"""A bench on the CPU; its timer says how long a call of whom took, in numbers that add up exactly."""
import functools
from contextlib import contextmanager

import torch

from reports.timings import Speed
from tests.implementations import Claims
from tests.meta.test_speed_contests import attention
from tests.speed import bench, contest, machine, problems
from tests.speed.contenders import Contender

chosen = ""


class Timer:
    turns = 0

    def device(self, call):
        call()
        self.turns += 1
        return {"mine": 2.0**-10, "other": 2.0**-9, "late": 2.0**-8}[chosen] + 2.0**-20 * self.turns


class Bench(bench.Bench):
    def __init__(self, subject, others, manifest):
        assert (subject, others, manifest) == ("triton", ("flex", "xformers"), None)
        self.timer = Timer()

        def made(name):
            @contextmanager
            def entered():
                global chosen
                before, chosen = chosen, name
                yield
                chosen = before

            def prepare(problem, x):
                def call():
                    over = self.timer.turns >= 8 * 4  # the warm-up, 7 rounds; the control
                    return attention(*x.leaves) * (1.5 if name == "late" and over else 1)

                return call

            return Contender(name, Claims(), prepare, "sm90", chosen=entered)

        self.subject = made("mine")
        self.contenders = {
            "mine": self.subject, "other": made("other"), "late": made("late"), "third": "is not installed"
        }


bench.Bench = Bench
bench.tensors = functools.partial(problems.tensors, device="cpu")
contest.kernels_of = lambda call: ["a_kernel"]
machine.described = lambda name, path, arguments, seconds: Speed(
    implementation=name, device="NVIDIA X", path=path, torch="2.13.0", triton="3.7.1", arguments=arguments
)
'''

TESTS = """
from tests.speed.problems import Problem
from tests.speed.timed import benchmarked


def test_contest(bench, found, rounds, strict, benchmark):
    assert strict
    with bench.on(Problem(1, 2, 2, 33, 16)) as here:
        found.contests.append(benchmarked(benchmark, here, "forward", "device", rounds))


def test_refused(bench, found, rounds, benchmark):
    with bench.on(Problem(1, 2, 2, 33, 16, dtype="bfloat16")) as here:
        found.contests.append(benchmarked(benchmark, here, "forward", "device", rounds))


def test_nothing(bench):
    pass
"""


class Run:
    """pytest as `python -m tests.speed` starts it, on three tests with a bench on the CPU."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        (folder / "fake_speed.py").write_text(FAKE)
        tests = folder / "bench_fake.py"
        tests.write_text(TESTS)
        outer = ("PYTEST_", "FA_", "TRITON_", "COV_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
        environment |= {
            "CUDA_VISIBLE_DEVICES": "", "FA_REPORT_DIR": str(folder / "out"), "PYTHONPATH": str(folder),
        }  # fmt: skip
        self.asked = ["-p", "no:cacheprovider", *words, str(tests)]
        command = program.command(self.asked, folder)
        done = subprocess.run(
            command, cwd=ROOT, env=environment, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.status, self.output = done.returncode, done.stdout


FAKED = ("-p", "fake_speed", "--contenders", " flex,xformers,", "--rounds", "7")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("speed"), *FAKED, "--strict")
    assert run.status == 0, run.output
    return run


def test_pytest_benchmark_keeps_the_seconds_of_the_subject(measured: Run) -> None:
    one, *more = json.loads((measured.folder / "benchmark.json").read_text())["benchmarks"]
    assert not more and one["name"] == "test_contest" and one["group"] == "forward, device"
    info = one["extra_info"]
    assert one["stats"]["data"] == info["rounds"]["mine"] and one["stats"]["rounds"] == 7
    assert {name: len(seconds) for name, seconds in info["rounds"].items()} == {"mine": 7, "other": 7}
    assert (info["problem"], info["step"], info["measure"]) == (PROBLEM.id, "forward", "device")
    assert info["flops"] == PROBLEM.flops(FORWARD)
    mine, other, control = info["rounds"]["mine"], info["rounds"]["other"], info["control"]
    # of turns 5 to 32, those before are of the round that is forgotten; the rest is of who was wrong
    turns = [round((t - base) * 2**20) for seconds, base in ((mine, 2.0**-10), (other, 2.0**-9),
             (control, 2.0**-10)) for t in seconds]  # fmt: skip
    assert len(set(turns)) == 21 and set(turns) < set(range(5, 33))


def test_who_is_wrong_after_the_last_round_is_absent(measured: Run) -> None:
    one, _ = timings.read(measured.folder / "out" / timings.SPEED).contests
    absent = {name: entry.absent for name, entry in one.entries.items() if entry.absent}
    assert absent.keys() == {"late", "third"} and absent["third"] == "is not installed"
    assert absent["late"].startswith("wrong: out is off by ")
    info = json.loads((measured.folder / "benchmark.json").read_text())["benchmarks"][0]["extra_info"]
    assert info["absent"] == absent


def test_without_the_subject_nothing_is_timed(measured: Run) -> None:
    _, refused = timings.read(measured.folder / "out" / timings.SPEED).contests
    assert not any(entry.seconds for entry in refused.entries.values()) and not refused.control
    assert refused.entries["mine"].absent == "not claimed: dtype bfloat16"


def test_a_run_leaves_its_figures_and_shows_them(measured: Run) -> None:
    out = measured.folder / "out"
    found = timings.read(out / timings.SPEED)
    assert (found.implementation, found.path, found.device) == ("mine", "sm90", "NVIDIA X")
    assert found.arguments == measured.asked and found.matmul == found.copy == 0
    written = [out / name for name in ("speed.json", "speed.md", "speed.html")]
    assert all(path.stat().st_size for path in written)
    table = written[1].read_text()
    assert table.strip() and table.strip() in measured.output
    assert f"written: {', '.join(map(str, written))}" in measured.output


def test_a_run_that_measures_nothing_is_not_green(tmp_path: Path) -> None:
    run = Run(tmp_path, *FAKED, "-k", "nothing")
    assert "1 passed" in run.output and run.status == 3, run.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "3"], "--rounds is '3'; it must be a whole number, at least 7"),
        (
            ["--contenders", "flex,nonsense"],
            "--contenders has 'nonsense'; it may have sdpa-math, sdpa-flash, ",
        ),
        (["-p", "no:benchmark"], "pytest-benchmark is not installed, or switched off: nothing is timed"),
    ],
)
def test_wrong_use_is_told(words: list[str], message: str, tmp_path: Path) -> None:
    run = Run(tmp_path, *words)
    assert message in run.output and gpu_paths.suite_status(run.status) == 2, run.output
