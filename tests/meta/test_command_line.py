"""The command line as a user meets it: real runs of the suite on a few lines of PyTorch, and their status."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from reports import records
from tests.cases import parse_case
from tests.session import BROKE, HELD, NOTHING_EXECUTED, WRONG_USE

ROOT = Path(__file__).parents[2]
TEST = "tests/test_references.py"
SOME = ["--examples", "20", "-k", "generated"]
NOT_CLAIMED = "b1_h1x1_s16x16_d16x16_bfloat16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0"

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
    assert sorted(path.name for path in reports.iterdir()) == ["records.jsonl", "summary.md"]
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
    assert (repeated.status, repeated.case, repeated.verdicts) == ("broken", record.case, record.verdicts)
    assert "1 failed, " in again.output
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
    ],
    ids=["impl", "impl-with-workers", "case", "profile", "examples"],
)
def test_status_2_and_one_line_if_the_use_is_wrong(options: list[str], message: str, reports: Path) -> None:
    run = suite(reports, *options)
    assert run.status == WRONG_USE, run.output
    assert run.output.strip().startswith(f"Exit: {message}")
    assert len(run.output.strip().splitlines()) == 1
    assert not reports.exists()


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
