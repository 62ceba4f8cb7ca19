"""Implementations that end their process, hang or lose the GPU: each is named on its case; the rest runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reports import records
from reports.folder import Folder
from reports.records import Record
from tests import isolation
from tests.cases import Case
from tests.comparison import begun
from tests.gpu_paths import SLOT, turned
from tests.implementations import Claims, Implementation
from tests.isolation import CRASH, HANG, UNUSABLE, Isolation, Journal
from tests.known_failures import KnownFailures
from tests.meta.test_command_line import ROOT, Run
from tests.session import BROKE, WRONG_USE

BAD = "tests/meta/bad/by_length.py"
SECONDS = 12
"""After which a call hangs: the first in a process takes two, and this machine may be busy."""
CPU = torch.device("cpu")


def case_of(length: int) -> str:
    return f"b1_h1x1_s{length}x{length}_d16x16_float32_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0"


def cases(*lengths: int) -> list[str]:
    return [word for length in lengths for word in ("--case", case_of(length))]


def suite(reports: Path, function: str, *options: str, file: str = BAD, devices: str = "") -> Run:
    words = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--impl", f"{file}:{function}")
    return Run(reports, *words, *options, CUDA_VISIBLE_DEVICES=devices)


def found_by_length(run: Run) -> dict[int, Record]:
    """The records of a run; each case has one."""
    found = records.read(run.reports / "records.jsonl")
    by_length = {int(re.split(r"_s|x", record.case)[2]): record for record in found}
    assert len(by_length) == len(found), run.output
    return by_length


def left(reports: Path) -> list[str]:
    return sorted(path.name for path in reports.iterdir())


# ---------------------------------------------------------------- each fault


FAULTS = {
    17: (CRASH, "its process was killed by SIGSEGV", "crashes"),
    18: (HANG, f"no result after {SECONDS} s", "waits"),
    19: (HANG, f"no result after {SECONDS} s", "holds_the_lock"),
    20: (CRASH, "ended its process with exit status 0", ""),
    21: ("does not raise", "SystemExit: 0", "leaves"),
}
"""By length: the rule that breaks, the first line of the note, and where it stood."""


def test_each_fault_is_named_on_its_case_with_where_it_stood_and_the_rest_runs(tmp_path: Path) -> None:
    """In one run: each costs a worker."""
    options = ["-n", "2", "--hang-after", str(SECONDS), *cases(*range(16, 23))]
    run = suite(tmp_path, "attention", "tests/test_references.py", *options)
    assert run.status == BROKE, run.output
    found = found_by_length(run)
    statuses = {length: record.status for length, record in found.items()}
    assert statuses == {n: "broken" if n in FAULTS else "held" for n in range(16, 23)}, run.output
    assert "5 failed, 2 passed" in run.output.splitlines()[-1]
    assert run.line("result: ") == "red comparisons: 5"
    assert not any(name.startswith("unfinished") for name in left(run.reports))
    for length, (rule, note, at) in FAULTS.items():
        (verdict,) = found[length].verdicts
        first, *frames = verdict.note.splitlines()
        assert (verdict.held, verdict.rule, first) == (False, rule, note)
        assert bool(frames) == bool(at)
        if at:
            assert any(re.search(rf"by_length\.py:\d+ {at}$", frame) for frame in frames), frames
        assert not any("comparison.py" in frame or "pluggy" in frame for frame in frames), frames
        told = rf"^_+ test_replay\[{case_of(length)}\] _+$(.*?)(?=^__|^==)"
        (explained,) = re.findall(told, run.output, re.MULTILINE | re.DOTALL)
        assert rule in explained
        assert re.search(rf"replay: .* --impl {BAD}:attention --case {case_of(length)}$", explained, re.M)


def test_in_a_law_it_is_named_with_the_law(tmp_path: Path) -> None:
    run = suite(tmp_path, "attention", "tests/test_laws.py", *cases(16, 17))
    assert run.status == BROKE, run.output
    (record,) = records.read(tmp_path / "records.jsonl")
    (verdict,) = record.verdicts
    assert (record.case, record.origin, verdict.rule) == (case_of(17), "law", CRASH)
    assert re.match("its process was killed by SIGSEGV, in law [a-z_]+\n", verdict.note)
    assert "tests/test_laws.py" in record.replay
    assert "1 failed, 1 passed" in run.output.splitlines()[-1]
    assert run.line("result: ") == "red laws: 1"


# ---------------------------------------------------------------- the GPU is lost


def test_a_lost_gpu_ends_the_worker_at_once_and_is_told_once(tmp_path: Path) -> None:
    """Of generated cases the first that loses it is told: no smaller one is looked for in such a process."""
    options = [
        "-p",
        "tests.meta.bad.no_gpu",
        "tests/test_references.py",
        "--examples",
        "2",
        "-k",
        "generated",
    ]
    run = suite(tmp_path, "loses_the_gpu_from_17_on", *options)
    assert run.status == BROKE, run.output
    (record,) = (r for r in records.read(tmp_path / "records.jsonl") if r.status == "broken")
    assert record.reason.startswith("left the GPU unusable")
    assert [(v.rule, v.note.split(",")[0]) for v in record.verdicts] == [
        (UNUSABLE, "RuntimeError: CUDA error: an illegal memory access was encountered")
    ]
    assert len(re.findall(r"^left the GPU unusable", run.output, re.MULTILINE)) == 1
    assert f"--case {record.case}" in run.output
    assert "replacing crashed worker gw0" in run.output


def test_without_isolation_a_lost_gpu_stops_the_run(tmp_path: Path) -> None:
    options = ["-p", "tests.meta.bad.no_gpu", "tests/test_references.py", "-n", "0", *cases(16, 17, 18)]
    run = suite(tmp_path, "loses_the_gpu_from_17_on", *options)
    assert run.status == BROKE, run.output
    assert [record.status for record in found_by_length(run).values()] == ["held", "broken"]
    assert f"the GPU cannot be used after case {case_of(17)}; -n 1 runs the rest" in run.output
    assert "nothing is isolated without -n 1 or more" in run.output


# ---------------------------------------------------------------- one that always crashes


def test_a_run_stops_early_if_everything_crashes_and_says_what_did_not_run(tmp_path: Path) -> None:
    options = ["-p", "tests.meta.bad.few_crashes", "tests/test_references.py", *cases(*range(16, 26))]
    run = suite(tmp_path, "crashes_from_17_on", *options)
    assert run.status == BROKE, run.output
    found = [record.status for record in found_by_length(run).values()]
    assert found.count("broken") == 2
    assert run.line("stopped after ") == "2 crashes and hangs"
    assert run.line("not run: ") == f"{10 - len(found)} of 10 tests: test_replay ({10 - len(found)})"


def test_seconds_that_are_none_are_refused(tmp_path: Path) -> None:
    run = suite(tmp_path, "attention", "--hang-after", "soon")
    assert run.status == WRONG_USE
    assert run.output.strip() == "Exit: --hang-after is 'soon'; it must be a whole number, at least 1"


# ---------------------------------------------------------------- the journal


def record_of(case: Case) -> Record:
    mine = Implementation("mine", lambda: None, Claims(), lambda device: "cpu")
    return begun(case, mine, "cpu", "edge")(status="running")


def test_the_journal_has_a_case_while_it_is_under_way(tmp_path: Path) -> None:
    part = tmp_path / "records-gw0.jsonl"
    journal = Journal(part, None, isolated=False)
    record = record_of(Case())
    with journal.running(record, CPU):
        assert records.read(isolation.running(part)) == [record]
    with pytest.raises(ValueError), journal.running(record, CPU):
        raise ValueError
    assert left(tmp_path) == []


@pytest.mark.parametrize("raised", [None, "CUBLAS_STATUS_INTERNAL_ERROR", "an illegal memory access"])
def test_what_the_device_says_of_a_lost_gpu_is_told_before_what_was_raised(
    raised: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble = RuntimeError("an illegal memory access\nSearch for it")
    monkeypatch.setattr(isolation, "_trouble", lambda device: trouble)
    journal = Journal(tmp_path / "records-main.jsonl", None, isolated=False)
    with pytest.raises(isolation.GpuLost) as lost, journal.running(record_of(Case()), CPU):
        if raised is not None:
            raise RuntimeError(raised)
    (verdict,) = lost.value.record.verdicts
    first, *more = verdict.note.splitlines()
    assert (verdict.rule, first) == (UNUSABLE, "RuntimeError: an illegal memory access")
    assert not any("isolation.py" in line and "Journal" in line for line in more)
    assert ("raised RuntimeError: CUBLAS_STATUS_INTERNAL_ERROR" in more) == ("CUBLAS" in str(raised))
    assert left(tmp_path) == []


def test_the_clock_runs_while_an_implementation_does_and_not_afterwards(tmp_path: Path) -> None:
    """What follows has pytest's own limit."""
    program = (
        "import pathlib, time; from tests.meta.test_isolation import *;"
        f"journal = Journal(pathlib.Path({str(tmp_path)!r}) / 'records.jsonl', 1, False);"
        "exec('with journal.running(record_of(Case()), CPU): pass');"
        "time.sleep(1.5); print('alive', flush=True);"
        "exec('with journal.running(record_of(Case()), CPU): time.sleep(9)')"
    )
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "alive\n"), done.stderr
    assert "Timeout (0:00:01)!" in done.stderr
    assert time.perf_counter() - start > 2


SAID = """\
Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3/threading.py", line 331 in wait

{current}hread 0x00007f02 (most recent call first):
  File "/mine/kernel.py", line 9 in launch
  File "/mine/kernel.py", line 30 in attention
  File "{execution}", line 127 in _call
  File "{comparison}", line 135 in execute
  File "/pluggy.py", line 1 in call
"""


@pytest.mark.parametrize("current", ["Current t", "T"])
def test_of_a_stack_the_lines_of_the_implementation_are_told(current: str) -> None:
    files = {name: str(ROOT / "tests" / f"{name}.py") for name in ("execution", "comparison")}
    lines = isolation.frames(SAID.format(current=current, **files))
    assert [line.rpartition("/")[2] for line in lines] == ["kernel.py:30 attention", "kernel.py:9 launch"]


def test_of_no_stack_nothing_is_told() -> None:
    assert isolation.frames("") == []
    assert isolation.frames("Current thread 0x01 (most recent call first):\n  <no Python frame>\n") == []


# ---------------------------------------------------------------- workers and GPUs


@pytest.mark.parametrize(
    ("given", "there", "expected"),
    [
        (None, 0, [None, None]),
        (None, 1, [None, None]),
        (None, 3, ["0,1,2", "1,2,0", "2,0,1", "0,1,2"]),
        ("", 0, [None]),
        ("5", 1, [None, None]),
        ("5, 3", 2, ["5,3", "3,5", "5,3"]),
        ("1,0,7", 2, ["1,0", "0,1"]),
        ("GPU-a,GPU-b", 2, ["GPU-a,GPU-b", "GPU-b,GPU-a"]),
        ("MIG-a,MIG-b", -1, ["MIG-a,MIG-b", "MIG-b,MIG-a"]),
    ],
)
def test_each_worker_begins_with_another_gpu_of_those_that_are_allowed(
    given: str | None, there: int, expected: list[str | None]
) -> None:
    assert [turned(given, lambda: there, worker) for worker in range(len(expected))] == expected


def test_a_worker_that_replaces_one_has_its_place(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    plugin = Isolation(pytestconfig, Folder(tmp_path), KnownFailures())

    def begin(name: str) -> Any:
        node: Any = SimpleNamespace(gateway=SimpleNamespace(id=name), workerinput={"workerid": name})
        plugin.pytest_configure_node(node)
        return node

    nodes = [begin(name) for name in ("gw0", "gw1", "gw2")]
    assert [node.workerinput[SLOT] for node in nodes] == [0, 1, 2]
    plugin.pytest_testnodedown(nodes[1], "Not properly terminated")
    assert begin("gw3").workerinput[SLOT] == 1
    plugin.pytest_testnodedown(nodes[0], None)
    assert begin("gw4").workerinput[SLOT] == 0
    assert plugin.deaths == 1


# ---------------------------------------------------------------- on a GPU


def test_what_a_kernel_does_to_the_gpu_is_named_on_its_case_and_the_rest_runs(
    gpu: torch.device, tmp_path: Path
) -> None:
    """An access to nowhere, a kernel that never ends, an index out of range."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    options = ["tests/test_references.py", "--hang-after", "20", *cases(*range(16, 21))]
    run = suite(tmp_path, "attention", *options, file="tests/meta/bad/on_gpu.py", devices=devices)
    assert run.status == BROKE, run.output
    found = found_by_length(run)
    assert {n: record.status for n, record in found.items()} == {
        16: "held", 17: "broken", 18: "broken", 19: "broken", 20: "held"
    }, run.output  # fmt: skip
    rules = {n: [verdict.rule for verdict in found[n].verdicts] for n in (17, 18, 19)}
    assert rules == {17: [UNUSABLE], 18: [HANG], 19: [UNUSABLE]}
    assert "illegal memory access" in found[17].verdicts[0].note
    assert "device-side assert" in found[19].verdicts[0].note
    assert all(record.path.startswith("sm") for record in found.values())
    assert "3 failed, 2 passed" in run.output.splitlines()[-1]
