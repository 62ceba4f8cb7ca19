"""The command line as a user meets it: real runs of the suite on a few lines of PyTorch, and their status."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from reports import records
from tests.cases import parse_case
from tests.session import BROKE, HELD, NOTHING_EXECUTED, WRONG_USE

ROOT = Path(__file__).parents[2]
TEST = "tests/test_references.py"
SOME = ["--examples", "20", "-k", "generated"]
HELD_CASE = "b1_h1x1_s16x16_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0"
NOT_CLAIMED = "b1_h1x1_s16x16_d16x16_bfloat16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0"

LEFT = ["records.jsonl", "report.html", "report.json", "run.json", "summary.md"]
"""By a run in which nothing broke."""

MINE = """
import torch

def attention(q, k, v, *, causal, scale, return_lse):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = scale * q.float() @ k.float().mT
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return (s.softmax(-1) @ v.float()).to(q.dtype)

def a_percent_off(q, k, v, *, causal, scale, return_lse):
    return attention(1.01 * q, k, v, causal=causal, scale=scale, return_lse=return_lse)
"""


class Run:
    """One run of the suite, in a process of its own that sees no GPU.

    Attributes:
        status: its exit status.
        output: everything that it printed.
        reports: the folder that it wrote into.
    """

    def __init__(self, reports: Path, *words: str, cwd: Path = ROOT, **variables: str) -> None:
        self.reports = reports
        outer = ("PYTEST_", "FA_", "TRITON_", "COV_")  # a run is a user's, whatever runs this test
        environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "FA_REPORT_DIR": str(reports)} | variables
        # the replay line says `python`: the one that runs this
        environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"]))
        done = subprocess.run(
            words, cwd=cwd, env=environment, timeout=300, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.status, self.output = done.returncode, done.stdout

    def line(self, beginning: str) -> str:
        """What follows the beginning of the only line that begins so."""
        (found,) = re.findall(rf"^\s*{re.escape(beginning)}(.*)$", self.output, re.MULTILINE)
        return found


def suite(reports: Path, *options: str, test: str = TEST, cwd: Path = ROOT, **variables: str) -> Run:
    words = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test, *options)
    return Run(reports, *words, cwd=cwd, **variables)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    return tmp_path / "reports"


# ---------------------------------------------------------------- 0 and 1


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one-process", "workers"])
def test_status_0_if_every_claim_held_from_wherever_one_stands(
    workers: list[str], mine: Path, reports: Path
) -> None:
    (reports / "red-cases.txt").parent.mkdir()
    (reports / "red-cases.txt").write_text("of an earlier run")
    options = ["--impl", "mine.py:attention", "--examples", "40", "-k", "generated", *workers]
    run = suite(reports, *options, test=str(ROOT / TEST), cwd=mine.parent)
    assert run.status == HELD, run.output
    found = records.read(reports / "records.jsonl")
    assert len(found) == 40
    assert {record.status for record in found} == {"held"}
    assert {(record.implementation, record.path) for record in found} == {("mine.py:attention", "cpu")}
    assert {record.dtype for record in found} == {"float16", "float32"}
    assert sorted(path.name for path in reports.iterdir()) == LEFT
    assert run.line("comparisons executed: ") == "40, of which with a backward: 0"
    assert run.line("result: ") == "every claim that could run here held"


def test_status_1_if_a_claim_broke_and_the_replay_is_red_again(mine: Path, reports: Path) -> None:
    run = suite(reports, "--impl", f"{mine}:a_percent_off", *SOME)
    assert run.status == BROKE, run.output
    (record,) = (r for r in records.read(reports / "records.jsonl") if r.status == "broken")
    assert (reports / "red-cases.txt").read_text() == f"{record.case}  # {record.reason}\n"
    assert "rms z" in record.reason
    assert record.replay in (reports / "summary.md").read_text()
    assert run.line("red: ") == "1"
    assert run.line("result: ") == "red comparisons: 1"
    replay = run.output.rpartition("replay: ")[2].splitlines()[0]

    again = Run(reports.with_name("again"), "sh", "-c", replay)
    assert again.status == BROKE, again.output
    (repeated,) = records.read(again.reports / "records.jsonl")
    assert (repeated.status, repeated.case) == ("broken", record.case)
    assert all(verdict in repeated.verdicts for verdict in record.verdicts)  # more: a replay runs it again
    assert "1 failed" in again.output.splitlines()[-1]
    assert " passed" not in again.output


def test_status_1_if_a_run_stops_at_the_first_that_breaks(mine: Path, reports: Path) -> None:
    """pytest-xdist calls that an interruption, which pytest reports by the status of wrong use."""
    run = suite(reports, "--impl", f"{mine}:a_percent_off", *SOME, "-x", "-n", "1")
    assert run.status == BROKE, run.output
    assert run.line("result: ") == "red comparisons: 1"


# ---------------------------------------------------------------- 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--impl", "none.py:attention"], "--impl is 'none.py:attention': there is no file "),
        (["--impl", "none.py:attention", "-n", "2"], "--impl is 'none.py:attention': there is no file "),
        (["--case", "b1_h1x1"], "--case: case id is 'b1_h1x1'; it must look like b1_h1x1_s16x16_"),
        (["--profile", "quick"], "--profile is 'quick'; it may be dev, ci, nightly, thorough"),
        (["--examples", "0"], "--examples is '0'; it must be a whole number, at least 1"),
        (
            ["--case", HELD_CASE.replace("s16", "s999999999999")],
            "--case: case id is 'b1_h1x1_s999999999999x16",
        ),
    ],
    ids=["impl", "impl-with-workers", "case", "profile", "examples", "case-too-large"],
)
def test_status_2_and_one_line_if_the_use_is_wrong(options: list[str], message: str, reports: Path) -> None:
    run = suite(reports, *options)
    assert run.status == WRONG_USE, run.output
    assert run.output.strip().startswith(f"Exit: {message}")
    assert len(run.output.strip().splitlines()) == 1
    assert not reports.exists()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FA_SEED": "many"}, "FA_SEED is 'many'; it must be a whole number"),
        (
            {"FA_REPORT_DIR": "/dev/null/reports"},
            "FA_REPORT_DIR is '/dev/null/reports': nothing can be written",
        ),
    ],
    ids=["seed", "report-dir"],
)
@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one-process", "workers"])
def test_status_2_and_nothing_runs_if_a_variable_is_wrong(
    workers: list[str], variables: Any, message: str, mine: Path, reports: Path
) -> None:
    run = suite(reports, "--impl", f"{mine}:attention", "--case", HELD_CASE, *workers, **variables)
    assert run.status == WRONG_USE, run.output
    assert run.output.strip().startswith(f"Exit: {message}")
    assert len(run.output.strip().splitlines()) <= 2  # pytest repeats it if a run has begun


def test_status_2_if_a_file_is_not_there(reports: Path) -> None:
    run = suite(reports, test="tests/test_reference.py")
    assert run.status == WRONG_USE, run.output
    assert "ERROR: file or directory not found: tests/test_reference.py" in run.output


def test_status_2_if_an_option_is_unknown(reports: Path) -> None:
    """By the entry that tox uses: pytest's own has a status of its own for that."""
    run = Run(reports, sys.executable, "-m", "tests", TEST, "--cases", HELD_CASE)
    assert run.status == WRONG_USE, run.output
    assert "unrecognized arguments: --cases" in run.output


# ---------------------------------------------------------------- 3


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one-process", "workers"])
def test_status_3_if_nothing_that_is_claimed_was_asked_for(
    workers: list[str], mine: Path, reports: Path
) -> None:
    run = suite(reports, "--impl", f"{mine}:attention", "--case", NOT_CLAIMED, *workers)
    assert run.status == NOTHING_EXECUTED, run.output
    (record,) = records.read(reports / "records.jsonl")
    assert (record.status, record.case) == ("not claimed", parse_case(NOT_CLAIMED).id)
    assert run.line("not claimed, so not executed: ") == "1; they would need dtype bfloat16 (1)"
    assert run.line("result: ") == "nothing was executed"
    assert re.search(r"\b1 not claimed\b", run.output.splitlines()[-1])
    assert "passed" not in run.output.splitlines()[-1]


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one-process", "workers"])
def test_status_3_if_a_gpu_is_required_and_there_is_none(workers: list[str], reports: Path) -> None:
    run = suite(reports, "--require-gpu", *workers)
    assert run.status == NOTHING_EXECUTED, run.output
    assert "--require-gpu was given, and torch " in run.output
    assert "finds no usable GPU" in run.output


def test_status_3_if_a_gpu_is_required_and_triton_interprets(reports: Path) -> None:
    run = suite(reports, "--require-gpu", TRITON_INTERPRET="1")
    assert run.status == NOTHING_EXECUTED, run.output
    assert "--require-gpu was given, and TRITON_INTERPRET is set" in run.output


def test_status_3_if_triton_may_not_interpret_and_there_is_no_gpu(reports: Path) -> None:
    run = suite(reports, "--case", HELD_CASE, TRITON_INTERPRET="0")
    assert run.status == NOTHING_EXECUTED, run.output
    assert run.output.startswith("Exit: TRITON_INTERPRET is '0', and torch ")
    assert len(run.output.strip().splitlines()) == 1


@pytest.mark.parametrize("entry", ["pytest", "tests"])
def test_status_3_if_nothing_is_collected(entry: str, mine: Path, reports: Path) -> None:
    words = (sys.executable, "-m", entry, TEST, "--impl", f"{mine}:attention", "-k", "nothing_of_that_name")
    run = Run(reports, *words)
    assert run.status == NOTHING_EXECUTED, run.output


# ---------------------------------------------------------------- --case


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one-process", "workers"])
def test_a_case_is_run_once_and_less_the_gradients_that_are_not_claimed(
    workers: list[str], mine: Path, reports: Path
) -> None:
    wanted = HELD_CASE.replace("grad=none_nodlse", "grad=qkv_dlse")
    ids = [HELD_CASE, f" {HELD_CASE}", f"<{HELD_CASE}>", wanted, wanted.replace("seed0", "seed1")]
    options = [word for name in ids for word in ("--case", name)]
    run = suite(reports, "--impl", f"{mine}:attention", *options, *workers)
    assert run.status == HELD, run.output
    found = records.read(reports / "records.jsonl")
    ran = [HELD_CASE, HELD_CASE.replace("seed0", "seed1")]
    assert sorted(record.case for record in found) == ran
    assert f"without the gradients that are not claimed: {wanted}\n  ran as {HELD_CASE}\n" in run.output
    assert f"  ran as {ran[1]}\n" in run.output


def test_a_scale_that_float32_does_not_hold_is_not_claimed(mine: Path, reports: Path) -> None:
    case = HELD_CASE.replace("scale=auto", "scale=1e39")
    run = suite(reports, "--impl", f"{mine}:attention", "--case", case)
    assert run.status == NOTHING_EXECUTED, run.output
    assert run.line("not claimed, so not executed: ") == "1; they would need a scale beyond 3.4028e+38 (1)"


# ---------------------------------------------------------------- two runs in one folder

SLOW = """
import pathlib, time
from mine import attention as right

def attention(*tensors, **options):
    \"\"\"Lets the other run begin, and waits until that has ended.\"\"\"
    here = pathlib.Path(__file__).parent
    (here / "under way").touch()
    for _ in range(600):
        if (here / "ended").exists():
            return right(*tensors, **options)
        time.sleep(0.1)
"""


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["one-process", "workers"])
def test_runs_that_share_a_folder_have_records_of_their_own(
    workers: list[str], mine: Path, reports: Path
) -> None:
    """One that is green lasts as long as one that is red: neither takes the other's records."""
    slow = mine.with_name("slow.py")
    slow.write_text(SLOW)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(suite, reports, "--impl", f"{slow}:attention", "--case", HELD_CASE, *workers)
        while not (mine.parent / "under way").exists() and not first.done():
            time.sleep(0.1)
        second = suite(reports, "--impl", f"{mine}:a_percent_off", "--case", HELD_CASE, *workers)
        left = sorted(path.name for path in reports.iterdir() if not path.name.startswith("unfinished-"))
        (red,) = records.read(reports / "records.jsonl")
        (mine.parent / "ended").touch()
        run = first.result()
    assert second.status == BROKE, second.output
    assert second.line("red: ") == "1"
    assert (red.status, left) == ("broken", sorted([*LEFT, "red-cases.txt"]))
    assert run.status == HELD, run.output
    assert run.line("comparisons executed: ") == "1, of which with a backward: 0"
    (green,) = records.read(reports / "records.jsonl")
    assert green.status == "held"
    assert sorted(path.name for path in reports.iterdir()) == LEFT
