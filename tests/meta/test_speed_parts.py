"""The parts of the speed runs that need no GPU: what they count, claim, refuse and print."""

from __future__ import annotations

import math
import os
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from reports import bench, timings
from reports.__main__ import main
from reports.errors import ReportError
from reports.timings import PASSES, Contest, Entry, FirstCall, HostTime, Speed
from tests import backends
from tests.implementations import OURS
from tests.meta.test_command_line import ROOT
from tests.speed import first_call, machine, memory, pairs, problems
from tests.speed.contenders import DEFAULT, OTHERS, AbsentError
from tests.speed.correct import Expected
from tests.speed.memory import exponent, peak
from tests.speed.pairs import CANNOT_TELL, FASTER, SAME, SLOWER, Ratio, ratio, verdict
from tests.speed.problems import BACKWARD, BOTH, FORWARD, GRID, LENGTHS, Problem, parse, tensors

# ---------------------------------------------------------------- memory against T


@pytest.mark.parametrize("slope", [0, 1, 2])
def test_the_exponent_of_a_power_is_that_power(slope: int) -> None:
    lengths = [512, 1024, 2048, 4096, 8192]
    assert exponent(lengths, [7 * n**slope for n in lengths]) == pytest.approx(slope)


def test_the_exponent_is_of_the_longer_half() -> None:
    """Where what grows fastest has overtaken the rest."""
    lengths = [512, 1024, 2048, 4096]
    assert exponent(lengths, [10**9, 10**9, 4 * 2048**2, 4 * 4096**2]) == pytest.approx(2)
    assert exponent(lengths[:3], [10**9, 3 * 1024, 3 * 2048]) == pytest.approx(1)
    assert exponent(lengths[::-1], [4 * 4096**2, 4 * 2048**2, 1, 1]) == pytest.approx(2)


@pytest.mark.parametrize(
    "peaks", [[8, 16], [8, 16, None], [None, None, None], [8, 16, 0], [8, 0, 16], [8, -16, 16, 32, -1]]
)
def test_too_few_points_and_no_memory_have_no_exponent(peaks: list[int | None]) -> None:
    assert exponent([2**n for n in range(len(peaks))], peaks) is None


class Allocator:
    """What PyTorch's says, by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = self.peak = 1000
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "memory_stats", self.stats)

    def reset(self) -> None:
        self.peak = self.current

    def stats(self) -> dict[str, int]:
        return {"requested_bytes.all.current": self.current, "requested_bytes.all.peak": self.peak}

    def take(self, size: int) -> None:
        self.current += size
        self.peak = max(self.peak, self.current)

    def free(self, size: int) -> None:
        self.current -= size


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return Allocator(monkeypatch)


def test_the_peak_is_beyond_what_was_there_and_what_is_returned(allocator: Allocator) -> None:
    def call() -> Tensor:
        out = torch.zeros(100, dtype=torch.float16)
        allocator.take(200 + 32)  # out, and what is saved beside it
        allocator.take(5000)
        allocator.free(5000)
        return out

    assert peak(call) == 32 + 5000


def test_what_is_freed_before_the_peak_and_what_was_set_up_before_do_not_count(allocator: Allocator) -> None:
    workspaces = [10**6]

    def call() -> None:
        allocator.take(workspaces.pop() if workspaces else 0)
        for _ in range(3):
            allocator.take(700)
            allocator.free(700)

    assert peak(call) == 700


def test_each_storage_of_the_results_counts_once_and_inputs_are_none(allocator: Allocator) -> None:
    given = torch.zeros(64)

    def call() -> Any:
        one, other = torch.zeros(10), torch.zeros(20)
        allocator.take(4 * 30 + 8)
        return {"a": (one, one[3:], one.view(2, 5)), "b": [other[:1], given[2:], None]}

    assert peak(call, [given]) == 8


class Turns:
    """A contest of one, as far as a curve asks."""

    def __init__(self, name: str, absent: str) -> None:
        self.name, self.absent, self.rounds, self.judged = name, absent, 0, False
        self.here = not absent or absent.startswith("wrong")

    def round(self) -> None:
        self.rounds += 1

    def forget_first(self) -> None:
        self.rounds -= 1

    def judge(self, expected: Any) -> None:
        self.judged = True

    def contest(self) -> Contest:
        wrong = self.absent if self.judged else ""
        entry = Entry(absent=wrong) if wrong else Entry(seconds=[*range(1, self.rounds), 100.0])
        return contest({self.name: entry})


class FakeBench:
    """Has one contender, whose peak is T**2 bytes until there is not enough memory."""

    def __init__(self, why: Mapping[int, str]) -> None:
        self.contenders: dict[str, Any] = {"mine": SimpleNamespace(), "other": "is not installed"}
        self.why = why
        self.judged: dict[int, Turns] = {}

    @contextmanager
    def on(self, problem: Problem, names: list[str]) -> Iterator[Any]:
        why = self.why.get(problem.length, "")

        def step(name: str) -> int:
            if why == "no memory":
                raise torch.OutOfMemoryError
            return problem.length**2

        x = SimpleNamespace(leaves=(), d_out=None)
        calls = SimpleNamespace(of=SimpleNamespace(chosen=nullcontext), x=x, step=step)
        self.judged[problem.length] = turns = Turns("mine", why if why != "no memory" else "")
        refused = why == "no tensors"
        yield SimpleNamespace(
            calls={"mine": why if refused else calls}, in_turns=lambda step: turns, expected=None
        )


@pytest.mark.parametrize("why", ["no memory", "no tensors", "raised RuntimeError: it takes no more"])
def test_a_curve_ends_where_there_is_no_memory_or_the_contender_refuses(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "peak", lambda call, inputs: call)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    made: Any = FakeBench({1024: why})
    found = memory.curve(made, "mine", FORWARD, [64, 128, 256, 1024, 2048], checked=128)
    assert found.lengths == [64, 128, 256, 1024] and found.peak == [64**2, 128**2, 256**2, None]
    assert found.seconds == [4.0, 4.0, 4.0, None]  # the median of 7: 1 to 6 and 100
    assert found.exponent == pytest.approx(2) and (found.heads, found.dim) == (8, 64)
    assert [n for n, turns in made.judged.items() if turns.judged] == [64, 128]


def test_a_curve_has_no_figure_where_the_result_is_wrong_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "peak", lambda call, inputs: call)
    made: Any = FakeBench({128: "wrong: out is off"})
    found = memory.curve(made, "mine", FORWARD, [64, 128, 256])
    assert found.peak == [64**2, None, 256**2] and found.seconds == [4.0, None, 4.0]
    assert found.exponent is None
    for name, why in {"other": "is not installed", "third": "'third' is not among the contenders"}.items():
        with pytest.raises(AbsentError, match=why):
            memory.curve(made, name, FORWARD)


# ---------------------------------------------------------------- the first call


def test_compilations_are_told_from_what_the_cache_had() -> None:
    counted = first_call.Compilations()
    for hit in (False, False, True, False):
        counted(src=None, metadata={}, metadata_group={}, times=None, cache_hit=hit)
    assert (counted.compiled, counted.from_cache) == (3, 1)


COMPILES = """
import sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tests.speed.first_call import Compilations

@triton.jit
def one(x):
    tl.store(x, 1.0)

counted = triton.knobs.compilation.listener = Compilations()
for _ in range(3):
    triton.compile(ASTSource(one, {"x": "*fp32"}, {}), target=GPUTarget("cuda", 80, 32))
print(counted.compiled, counted.from_cache)
"""


def alone(**changes: str) -> dict[str, str]:
    """The environment of a user's process that sees no GPU."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "PYTEST_", "COV_"))}
    return environment | {"CUDA_VISIBLE_DEVICES": ""} | changes


def test_this_triton_tells_its_listener(tmp_path: Path) -> None:
    program = tmp_path / "compiles.py"  # Triton reads the source
    program.write_text(COMPILES)
    environment = alone(TRITON_CACHE_DIR=str(tmp_path / "cache"), PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "2"], done.stderr


FIRST = FirstCall(cache="cold", imported=2.5, first=4.0, second=5e-4, compiled=4, from_cache=0)


def test_the_child_is_asked_with_the_cache_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], env: dict[str, str], **_: Any) -> Any:
        asked.append((command, env))
        Path(env["TRITON_CACHE_DIR"], "kernel").touch()
        said = msgspec.json.encode(FIRST).decode()
        return SimpleNamespace(returncode=0, stdout=f"a library says something\n{said}\n", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert first_call.first_calls() == [FIRST, FIRST]
    assert [command[-1] for command, _ in asked] == ["cold", "warm"]
    assert asked[0][1]["TRITON_CACHE_DIR"] == asked[1][1]["TRITON_CACHE_DIR"]
    assert "TRITON_INTERPRET" not in asked[0][1]
    with pytest.raises(ValueError, match="is to be the warm cache, and is empty"):
        first_call.measure("warm", tmp_path)
    (tmp_path / "kernel").touch()
    with pytest.raises(ValueError, match="is to be the cold cache, and is not empty"):
        first_call.measure("cold", tmp_path)


def test_what_a_failing_child_said_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=1, stdout="", stderr="RuntimeError: wrong: dq is off\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="exit status 1: RuntimeError: wrong: dq is off"):
        first_call.measure("cold", tmp_path)


def test_the_tables_of_first_calls_and_host_times() -> None:
    assert first_call.first_calls_table([FIRST])[1] == ["cold", "2.50", "4.000", "0.500", "4", "0"]
    times = [
        HostTime(contender="triton", problem="p", step=FORWARD, seconds=20e-6),
        HostTime(contender="triton", problem="p", step=BOTH, seconds=90e-6),
        HostTime(contender="other", problem="p", step=FORWARD, seconds=25.04e-6),
    ]
    assert first_call.host_times_table(times) == [
        ["problem", "contender", "forward us", "forward + backward us"],
        ["p", "triton", "20.0", "90.0"],
        ["p", "other", "25.0", "-"],
    ]


def test_nothing_is_timed_through_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert first_call.main([]) == 3
    assert "TRITON_INTERPRET is '1'" in capsys.readouterr().err
    assert main(["bench"]) == 3
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("python -m reports bench: TRITON_INTERPRET is '1'")


# ---------------------------------------------------------------- python -m reports bench


def test_modes_are_all_contenders_by_short_and_full_names() -> None:
    emulated = {backends.EMULATION}  # on the CPU only
    assert {*bench.MODES.values(), "pytorch"} == {*backends.BUILT_IN, DEFAULT} - emulated
    assert {*OTHERS, DEFAULT, "triton"} == set(bench.MODES.values())
    assert all(bench.spec("--mode", name) in (*backends.BUILT_IN, DEFAULT) for name in bench.NAMES)
    assert bench.spec("--mode", "naive") == "sdpa-math" and bench.spec("--mode", "a.py:f") == "a.py:f"
    with pytest.raises(ReportError, match=r"--ref is 'fast'; it may be custom, sdpa, naive, .*:callable"):
        bench.spec("--ref", "fast")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mode", "fast"], "--mode is 'fast'; it may be custom, sdpa, naive"),
        (["--ref", "fast"], "--ref is 'fast'; it may be custom, sdpa, naive"),
        (["--ref", "custom"], "--ref is 'custom', and that is named already"),
        (["--ref", "flash", "--ref", "sdpa-flash"], "--ref is 'sdpa-flash', and that is named already"),
        (["--length", "0"], "--length is '0'; it may be a whole number, at least 1"),
        (["--heads", "-8"], "--heads is '-8'; it may be a whole number, at least 1"),
        (["--kv-heads", "3"], "--kv-heads is 3; it may be a divisor of --heads, which is 8"),
        (["--rounds", "6"], "--rounds is '6'; it may be a whole number, at least 7"),
        (["--manifest", "m.toml"], "--manifest is 'm.toml', and --mode is 'custom'"),
        (["--json", "/"], "--json is /; it must be a file in a folder that exists"),
        (["--json", "/nowhere/at/all"], "--json is /nowhere/at/all; it must be a file in a folder"),
    ],
)
def test_wrong_use_names_the_option_what_it_was_and_what_it_may_be(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--dtype", "float64"], ["--full", "--causal"], ["more"]])
def test_what_argparse_refuses_is_wrong_use_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *words])
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mode", "nowhere.py:f"], "--mode is 'nowhere.py:f': there is no file"),
        (["--ref", "nowhere.py:f"], "--ref is 'nowhere.py:f': there is no file"),
        (["--mode", "os.path:join"], "--mode is 'os.path:join': it does not take"),
        (["--ref", "flash"], "--ref is 'flash', which needs a GPU"),
    ],
)
def test_what_cannot_be_loaded_is_wrong_use(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "why_not_here", lambda: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_the_status_is_3_and_nothing_is_printed() -> None:
    command = [sys.executable, "-m", "reports", "bench", "--mode", "custom", "--ref", "sdpa"]
    done = subprocess.run(command, cwd=ROOT, env=alone(), capture_output=True, text=True)
    assert done.returncode == 3 and done.stdout == ""
    assert re.fullmatch(r"python -m reports bench: .*(CUDA|GPU).*\n", done.stderr)


def contest(entries: dict[str, Entry], **changes: Any) -> Contest:
    fields: dict[str, Any] = {
        "problem": PROBLEM.id, "step": FORWARD, "measure": "device", "flops": 1e9, "entries": entries
    }  # fmt: skip
    return Contest(**{**fields, **changes})


PROBLEM = Problem(1, 8, 8, 1024, 64)
LABELS = {"triton": "custom", "sdpa": "sdpa", "sdpa-math": "naive"}


def noisy(seconds: float, seed: int, sigma: float = 0.002, rounds: int = 15) -> list[float]:
    rng = random.Random(seed)
    return [seconds * rng.lognormvariate(0, sigma) for _ in range(rounds)]


def part(step: str = FORWARD, control: float = 1.0, sdpa: str = "", ours: str = "") -> bench.Part:
    def made(measure: str, times: tuple[float, float, float]) -> Contest:
        triton, other, naive = times
        entries = {
            "triton": Entry(absent=ours) if ours else Entry(seconds=noisy(triton, 0)),
            "sdpa": Entry(absent=sdpa) if sdpa else Entry(seconds=noisy(other, 1)),
            "sdpa-math": Entry(seconds=noisy(naive, 2)),
        }
        return contest(entries, step=step, measure=measure, control=noisy(control * triton, 3))

    peaks = {"triton": 32 * 1024, "sdpa": None if sdpa else 2**20, "sdpa-math": 2**26}
    return bench.Part(made("eager", (5e-5, 5e-5, 4e-4)), made("device", (1e-5, 2e-5, 2e-4)), peaks)


def test_the_table_has_latency_memory_and_rate_of_each_mode() -> None:
    head, ours, sdpa, naive = bench.rows(part(), LABELS)
    assert head == ["mode", "eager ms", "device ms", "peak MiB", "TFLOP/s of device"]
    assert [row[0] for row in (ours, sdpa, naive)] == ["custom (triton)", "sdpa", "naive (sdpa-math)"]
    seconds = noisy(5e-5, 0)
    mean, deviation = statistics.fmean(seconds), statistics.stdev(seconds)
    assert ours[1] == f"{1e3 * mean:.4f} ± {1e3 * deviation:.4f}" and ours[1].startswith("0.05")
    assert ours[2:4] == ["0.0100", "0.031"] and naive[3] == "64.000"
    assert float(ours[4]) == pytest.approx(1e9 / 1e-5 / 1e12, rel=0.01)
    lines = bench.aligned([head, ours, sdpa, naive]).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[2].startswith("sdpa  ")


def test_ratios_are_told_with_their_verdicts() -> None:
    said = bench.claims(part(), LABELS)
    assert re.fullmatch(r"sdpa / custom, eager: 1 \(.* to .*, 15 pairs\): the same", said[0])
    assert re.fullmatch(r"sdpa / custom, device: 2 \(\S+ to 2\S*, 15 pairs\): custom is faster", said[1])
    assert [line.partition(":")[0] for line in said[2:]] == [
        "naive / custom, eager",
        "naive / custom, device",
    ]
    restless = bench.claims(part(control=1.3), LABELS)
    assert all(line.endswith("cannot tell, the machine is not quiet") for line in restless)
    slower = bench.claims(part(), {"sdpa-math": "naive", "sdpa": "sdpa"})
    assert slower[0].startswith("sdpa / naive, eager: 0.125 (")  # the control is not naive's: no verdict


def test_who_is_absent_has_no_figure_a_reason_and_status_1() -> None:
    wrong = part(sdpa="wrong: dq is off")
    assert bench.rows(wrong, LABELS)[2] == ["sdpa", "-", "-", "-", "-"]
    said = bench.claims(wrong, LABELS)
    assert said[0] == "sdpa: wrong: dq is off" and not any(line.startswith("sdpa /") for line in said)
    assert bench.status([part()]) == 0 and bench.status([part(), wrong]) == 1
    ours = part(ours="raised RuntimeError: no")
    assert bench.claims(ours, LABELS) == ["custom: raised RuntimeError: no"] and bench.status([ours]) == 1


SPEED = Speed(implementation="triton", device="NVIDIA X", path="sm90", torch="2.11.0", triton="3.6.0",
              cudnn="9.19.0", driver="570.1")  # fmt: skip


@pytest.mark.parametrize(("sdpa", "expected"), [("", 0), ("wrong: out is off", 1)])
def test_the_command_from_the_beginning_to_the_file(
    sdpa: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    asked: list[Any] = []

    class Those:
        calls: Any = dict.fromkeys(LABELS, "nothing to call")

        def contest(self, step: str, measure: str, rounds: int) -> Contest:
            asked.append((step, measure, rounds))
            made = part(step, sdpa=sdpa)
            return made.eager if measure == "eager" else made.device

    class Made:
        subject = SimpleNamespace(name="triton")

        @contextmanager
        def on(self, problem: Problem, names: list[str]) -> Iterator[Those]:
            asked.append((problem, names))
            yield Those()

    monkeypatch.setattr(machine, "why_not_here", lambda: "")
    monkeypatch.setattr(bench, "_bench", lambda *_: Made())
    monkeypatch.setattr(bench, "speed", lambda *_: SPEED)
    path = tmp_path / "speed.json"
    words = ["--ref", "sdpa", "--ref", "naive", "--kv-heads", "2", "--full", "--backward", "--rounds", "9"]
    assert main(["bench", *words, "--json", str(path)]) == expected
    assert asked == [
        (Problem(1, 8, 2, 1024, 64, False), list(LABELS)),
        *((step, measure, 9) for step in (FORWARD, BOTH) for measure in ("eager", "device")),
    ]
    said = capsys.readouterr().out
    assert said.startswith("D 64, full, B 1, T 1024, H 8 on 2\n\nforward\n\nmode ")
    assert "\nforward + backward\n\nmode " in said and timings.CONVENTION in said
    assert "NVIDIA X, sm90; torch 2.11.0, Triton 3.6.0, cuDNN 9.19.0, driver 570.1" in said
    assert timings.read(path) == SPEED


def test_peaks_are_kept_as_curves_of_one_length() -> None:
    ours, sdpa, naive = bench._curves(PROBLEM, [part()])
    assert (ours.contender, ours.heads, ours.dim, ours.lengths, ours.peak) == (
        "triton",
        8,
        64,
        [1024],
        [32768],
    )
    assert naive.seconds[0] == pytest.approx(2e-4, rel=0.01) and sdpa.exponent is None


@pytest.mark.parametrize(
    ("number", "text"), [(91_900, "9.19.0"), (90_101, "9.1.1"), (8902, "8.9.2"), (None, "")]
)
def test_the_version_of_cudnn_is_read_from_its_number(number: int | None, text: str) -> None:
    assert machine.version_of_cudnn(number) == text


# ---------------------------------------------------------------- ratios of pairs


@pytest.mark.parametrize(("n", "k"), [(7, 1), (10, 1), (11, 1), (15, 2), (30, 6), (100, 34)])
def test_the_interval_is_the_widest_whose_error_is_at_most_alpha(n: int, k: int) -> None:
    def error(k: int) -> float:
        return 2 * sum(math.comb(n, i) for i in range(k)) / 2**n

    assert pairs.rank(n) == k
    assert error(k) <= pairs.ALPHA or k == 1
    assert error(k + 1) > pairs.ALPHA


def test_a_ratio_is_the_median_with_order_statistics() -> None:
    theirs = [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    found = ratio([2.0] * 7, theirs[::-1])
    assert found == Ratio(median=4.0, low=1.0, high=7.0, spread=3.0 / 4.0, pairs=7)
    many = ratio([1.0] * 15, [float(n) for n in range(1, 16)])
    assert (many.median, many.low, many.high) == (8.0, 2.0, 14.0)
    assert ratio([1.0] * 20, [3.0] * 7).pairs == 7  # the others have no partners
    assert str(found) == "4 (1 to 7, 7 pairs)"


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ([1.0] * 6, [1.0] * 15, "6 pairs; a ratio needs at least 7"),
        ([1.0] * 6 + [0.0], [1.0] * 7, "a time is not a number greater than 0"),
        ([1.0] * 7, [1.0] * 6 + [math.nan], "a time is not a number greater than 0"),
        ([1.0] * 7, [1.0] * 6 + [math.inf], "a time is not a number greater than 0"),
    ],
)
def test_no_ratio_of_too_few_pairs_or_of_what_is_no_time(
    ours: list[float], theirs: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ratio(ours, theirs)


def claimed(
    true: float, sigma: float, rounds: int = 15, least: float = 1.0, draws: int = 2000
) -> dict[str, int]:
    """How often each verdict is given if another takes so many times as long; noise is lognormal."""
    rng = random.Random(f"{true} {sigma} {rounds}")
    counts = dict.fromkeys(pairs.VERDICTS, 0)
    for _ in range(draws):
        drift = [rng.lognormvariate(0, 0.2) for _ in range(rounds)]  # of the machine: hits both of a pair
        ours, control, theirs = ([t * rng.lognormvariate(0, sigma) for t in drift] for _ in range(3))
        theirs = [true * t for t in theirs]
        counts[verdict(ratio(ours, theirs), ratio(ours, control), least)] += 1
    return counts


@pytest.mark.parametrize("sigma", [0.01, 0.05])
def test_nobody_is_faster_than_himself(sigma: float) -> None:
    found = claimed(1.0, sigma)
    assert found[FASTER] == found[SLOWER] == 0
    assert found[SAME] > 1800 or sigma > 0.01


def test_a_tenth_is_found_on_a_quiet_machine() -> None:
    assert claimed(1.1, 0.01)[FASTER] == claimed(1 / 1.1, 0.01)[SLOWER] == 2000


def test_a_gate_is_a_ratio_to_what_it_asks_for() -> None:
    assert claimed(3.3, 0.01, least=3, draws=200)[FASTER] == 200
    assert claimed(3.0, 0.005, least=3, draws=200)[SAME] == 200
    assert claimed(2.7, 0.01, least=3, draws=200)[SLOWER] == 200


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (Ratio(1.02, 1.005, 1.025, 0.004, 15), FASTER),
        (Ratio(0.98, 0.975, 0.995, 0.004, 15), SLOWER),
        (Ratio(1.009, 1.005, 1.02, 0.001, 15), SAME),  # under 1 %
        (Ratio(1.02, 1.005, 1.025, 0.02, 15), SAME),  # under twice its spread
        (Ratio(1.05, 1.005, 1.09, 0.03, 15), CANNOT_TELL),
        (Ratio(1.05, 0.99, 1.09, 0.01, 15), CANNOT_TELL),  # 1 is in the interval
    ],
)
def test_what_is_claimed_of_a_ratio(of: Ratio, expected: str) -> None:
    quiet = Ratio(1.0, 0.99, 1.01, 0.005, 15)
    assert verdict(of) == verdict(of, quiet) == expected
    three = Ratio(3 * of.median, 3 * of.low, 3 * of.high, of.spread, of.pairs)
    assert verdict(three, quiet, least=3) == expected


@pytest.mark.parametrize(
    "control", [Ratio(1.06, 1.05, 1.07, 0.01, 15), Ratio(0.94, 0.9, 1, 0.01, 15), Ratio(1, 0.8, 1.2, 0.2, 15)]
)
def test_of_a_restless_machine_nothing_is_claimed(control: Ratio) -> None:
    assert not pairs.is_quiet(control)
    for of in (Ratio(2.0, 1.9, 2.1, 0.01, 15), Ratio(1.0, 0.99, 1.01, 0.01, 15)):
        assert verdict(of, control) == CANNOT_TELL
        assert verdict(of) != CANNOT_TELL


# ---------------------------------------------------------------- problems


def test_ids_are_read_back() -> None:
    assert len({problem.id for problem in GRID}) == len(GRID)
    for problem in (*GRID, replace(PROBLEM, dtype="bfloat16", causal=False)):
        assert parse(problem.id) == problem
        assert problem.case.causal == problem.causal and problem.case.heads_kv == problem.heads_kv


@pytest.mark.parametrize(
    "text",
    [
        "",
        "b8_h32x32_s2048_d64_float16",
        "b8_h32x32_s2048_d64_float16_causal_lognormal",  # dense
        "r64_h16x16_s16384_d64_float16_causal",  # of which lengths?
        "r64_h16x16_s16384_d64_float16_causal_uniform",
        "b8_h32_s2048_d64_float16_causal",
        "b-8_h32x32_s2048_d64_float16_causal",
        " b8_h32x32_s2048_d64_float16_causal",
    ],
)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no problem; one reads b8_h32x32_s2048_d64_float16_causal"):
        parse(text)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 17])
def test_flops_are_four_times_d_for_each_visible_pair(length: int, causal: bool) -> None:
    problem = Problem(3, 4, 2, length, 16, causal)
    seen = sum(j <= i or not causal for i in range(length) for j in range(length))
    assert problem.pairs == 3 * seen
    assert problem.flops(FORWARD) == 3 * 4 * seen * 4 * 16
    assert [problem.flops(step) / problem.flops(FORWARD) for step in PASSES] == [1, 2.5, 3.5]


@pytest.mark.parametrize("kind", LENGTHS)
def test_a_ragged_batch_has_all_tokens_and_about_the_work_of_a_dense_one(kind: str) -> None:
    (problem,) = (p for p in GRID if p.kind == kind and p.dim == 64)
    assert len(problem.lengths) == problem.batch and sum(problem.lengths) == problem.length
    seen = sum(i + 1 for n in problem.lengths for i in range(n))
    assert problem.pairs == seen and problem.flops(FORWARD) == 16 * seen * 4 * 64
    dense = Problem(8, 16, 16, 2048, 64)
    assert problem.flops(BACKWARD) / dense.flops(BACKWARD) == pytest.approx(1, abs=0.1)


def test_least_bytes_are_inputs_and_outputs_once() -> None:
    problem = Problem(2, 8, 2, 100, 64)
    rows = 2 * 100
    assert problem.least_bytes == rows * (2 * 8 * 64 * 2 + 2 * 2 * 64 * 2 + 8 * 4)


def test_tensors_have_the_same_values_in_each_layout() -> None:
    problem = Problem(2, 4, 2, 5, 16)
    one, other = (tensors(problem, layout, device="cpu") for layout in ("bhsd", "bshd"))
    assert one.k.shape == (2, 2, 5, 16) and all(t.is_leaf and t.requires_grad for t in other.leaves)
    assert all(
        torch.equal(a, b) for a, b in zip((*one.leaves, one.d_out), (*other.leaves, other.d_out), strict=True)
    )
    assert one.q.is_contiguous() and other.q.transpose(1, 2).is_contiguous()
    assert not torch.equal(one.q, tensors(problem, seed=1, device="cpu").q)


# ---------------------------------------------------------------- right results


def by_definition(problem: Problem, x: problems.Tensors) -> dict[str, Tensor]:
    """out, dq, dk, dv in float32, rounded once."""
    group = problem.heads_q // problem.heads_kv
    q, k, v = (t.detach().float().requires_grad_() for t in x.leaves)
    outs = []
    begin = 0
    for n in problem.lengths if problem.kind else [problem.length]:
        rows = slice(begin, begin + n)
        Q, K, V = ((t[rows].transpose(0, 1)[None] if problem.kind else t) for t in (q, k, v))
        K, V = (t.repeat_interleave(group, 1) for t in (K, V))
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1) & problem.causal
        scores = (problem.dim**-0.5 * Q @ K.mT).masked_fill(hidden, -math.inf)
        out = scores.softmax(-1) @ V
        outs.append(out[0].transpose(0, 1) if problem.kind else out)
        begin += n
    joined = torch.cat(outs)
    gradients = torch.autograd.grad(joined, (q, k, v), x.d_out.float())
    found = zip(("out", "dq", "dk", "dv"), (joined.detach(), *gradients), strict=True)
    return {name: t.to(x.q.dtype) for name, t in found}


SMALL: dict[str, Callable[[], Problem]] = {
    "dense": lambda: Problem(2, 2, 2, 33, 16),
    "full": lambda: Problem(1, 2, 2, 16, 16, causal=False),
    "grouped": lambda: Problem(2, 4, 2, 40, 32, dtype="bfloat16"),
    "ragged": lambda: Problem(4, 4, 2, 51, 16, kind="lognormal"),
}


@pytest.fixture(params=SMALL)
def judged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A problem, what it must give, and right results."""
    monkeypatch.setattr(problems, "drawn", lambda kind: (5, 33, 1, 12))
    problem = SMALL[request.param]()
    x = tensors(problem, device="cpu")
    return problem, Expected(problem, x), by_definition(problem, x)


def test_right_results_are_right(judged: Any) -> None:
    _, expected, found = judged
    assert expected.wrong(found, OURS) == ""
    assert expected.wrong({"out": found["out"]}, OURS) == ""


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_one_head_that_is_wrong_is_found(judged: Any, name: str) -> None:
    """Of the last entry: its last head."""
    problem, expected, found = judged
    t = found[name].clone()
    if problem.kind:
        t[-problem.lengths[-1] :, -1] *= 1.1
    else:
        t[-1, -1] *= 1.1
    why = expected.wrong({**found, name: t}, OURS)
    entry = len(problem.lengths) - 1
    assert re.fullmatch(rf"{name} is off by .* in batch entry {entry}, KV head {problem.heads_kv - 1}", why)


def test_gradients_that_are_transposed_exchanged_or_of_other_heads_are_found(judged: Any) -> None:
    _, expected, found = judged
    assert expected.wrong({**found, "dk": found["dv"], "dv": found["dk"]}, OURS).startswith("dk is off")
    flipped = found["dk"].flip(1)
    assert expected.wrong({**found, "dk": flipped}, OURS).startswith("dk is off")
    transposed = found["dk"].mT
    why = expected.wrong({**found, "dk": transposed}, OURS)
    square = transposed.shape == found["dk"].shape
    assert why.startswith("dk is off" if square else f"dk is of shape {tuple(transposed.shape)}, not ")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_found_in_any_head(judged: Any, value: float) -> None:
    _, expected, found = judged
    for name, t in found.items():
        broken = t.clone(memory_format=torch.contiguous_format)
        broken.view(-1)[broken.numel() // 2] = value
        why = expected.wrong({**found, name: broken}, OURS)
        assert why == f"{name} has elements that are not finite"


def test_a_mask_that_is_left_out_is_found(judged: Any) -> None:
    problem, expected, _ = judged
    x = tensors(problem, device="cpu")
    other = by_definition(replace(problem, causal=not problem.causal), x)
    assert expected.wrong(other, OURS).startswith("out is off by")


def test_nothing_is_claimed_under_twice_what_the_control_is_off() -> None:
    ours, again, other = ([t] * 15 for t in (1e-4, 1.045e-4, 1.02e-4))
    control = ratio(ours, again)
    assert pairs.is_quiet(control)
    assert verdict(ratio(ours, other), control) not in (FASTER, SLOWER)
    assert verdict(ratio(ours, [1.1e-4] * 15), control) == FASTER
    assert verdict(ratio(ours, [0.9e-4] * 15), control) == SLOWER
