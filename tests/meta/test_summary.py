"""The end of a run: its exit status from its records, and a summary in which nothing red looks green."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from reports import records
from reports.folder import Folder
from reports.records import Record, TensorSummary, Verdict
from reports.summary import Summary, markdown
from tests.session import BROKE, HELD, NOTHING_EXECUTED, WRONG_USE, exit_status


def record(status: str, *verdicts: Verdict, **changes: object) -> Record:
    base = Record(
        case="b1_...",
        words="float16, batch 1",
        origin="edge",
        implementation="mine",
        path="sm80",
        status=status,
        dtype="float16",
        backward=False,
        verdicts=list(verdicts),
        replay="pytest ...",
    )
    return msgspec.structs.replace(base, **changes)


held, broken, no_power, not_claimed = map(record, ("held", "broken", "no power", "not claimed"))


@pytest.mark.parametrize(
    ("found", "tests_failed", "require_gpu", "expected"),
    [
        pytest.param([held], False, False, HELD, id="held"),
        pytest.param([held, not_claimed, no_power], False, False, HELD, id="held-and-others-not-executed"),
        pytest.param([], False, False, HELD, id="no-comparison-was-asked-for"),
        pytest.param([held, broken], True, False, BROKE, id="broken"),
        pytest.param([broken], False, False, BROKE, id="broken-in-a-worker-that-died"),
        pytest.param([held], True, False, BROKE, id="another-test-failed"),
        pytest.param([not_claimed], True, False, BROKE, id="a-test-failed-and-nothing-was-executed"),
        pytest.param([not_claimed, no_power], False, False, NOTHING_EXECUTED, id="nothing-executed"),
        pytest.param([held], False, True, HELD, id="all-on-the-required-GPU"),
        pytest.param([held, record("held", path="interpreter")], False, True, BROKE, id="interpreted"),
        pytest.param([held, record("held", path="cpu")], False, True, BROKE, id="on-the-CPU"),
        pytest.param([not_claimed], False, True, NOTHING_EXECUTED, id="nothing-on-the-required-GPU"),
    ],
)
def test_the_exit_status_follows_from_the_records(
    found: list[Record], tests_failed: bool, require_gpu: bool, expected: int
) -> None:
    assert exit_status(found, tests_failed, require_gpu)[0] == expected


@pytest.mark.parametrize(
    ("ended", "tests_failed", "expected"),
    [
        (pytest.ExitCode.OK, 0, HELD),
        (pytest.ExitCode.TESTS_FAILED, 1, BROKE),
        (pytest.ExitCode.INTERRUPTED, 1, BROKE),
        (pytest.ExitCode.INTERRUPTED, 0, pytest.ExitCode.INTERRUPTED),
        (pytest.ExitCode.INTERNAL_ERROR, 0, BROKE),
        (pytest.ExitCode.USAGE_ERROR, 0, WRONG_USE),
        (pytest.ExitCode.NO_TESTS_COLLECTED, 0, NOTHING_EXECUTED),
    ],
    ids=str,
)
def test_the_exit_status_is_ours_however_pytest_ended(
    ended: int, tests_failed: int, expected: int, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    folder = Folder(tmp_path)
    records.append(folder.part("gw0"), held)
    assert finish(Summary(pytestconfig, folder, {}), ended, tests_failed) == expected


def finish(summary: Summary, ended: int, tests_failed: int = 0) -> int:
    """The exit status that a summary makes of a run."""
    session: Any = SimpleNamespace(testsfailed=tests_failed, exitstatus=ended)
    summary.pytest_sessionfinish(session, ended)
    return session.exitstatus


def test_records_of_all_workers_become_one_file(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    folder = Folder(tmp_path)
    for worker, found in {"gw1": [held, broken], "gw0": [not_claimed]}.items():
        for one in found:
            records.append(folder.part(worker), one)
    assert finish(Summary(pytestconfig, folder, {}), pytest.ExitCode.OK) == BROKE
    assert records.read(tmp_path / "records.jsonl") == [not_claimed, held, broken]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "records.jsonl",
        "red-cases.txt",
        "summary.md",
    ]


def test_records_that_a_dying_worker_cut_short_are_red_and_kept(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    folder = Folder(tmp_path)
    whole, cut = folder.part("gw0"), folder.part("gw1")
    records.append(whole, held)
    cut.write_bytes(whole.read_bytes()[:-9])
    summary = Summary(pytestconfig, folder, {})
    assert finish(summary, pytest.ExitCode.OK) == BROKE
    assert summary.unreadable[0].startswith(f"{cut}, line 1: not a record")
    assert cut.exists()
    assert records.read(tmp_path / "records.jsonl") == [held]


FINE = Verdict("out", "oracle", "rms z", True, 0.5, 1.0)
NEAR = Verdict("dq", "oracle", "hard bound", True, 0.9, 1.0)
RED = Verdict("out", "oracle", "largest z", False, 9.0, 6.0, (0, 0, 1, 2))
NANS = Verdict("dv", "oracle", "finite where it should be", False, 7.0, 0.0, (0, 0, 0, 0), "7 elements")


def of_tensor(z: float | None = 1.0) -> TensorSummary:
    return TensorSummary(60, 60, 0.25, z, 0.5, 1.5)


FOUND = [
    record("held", FINE, tensors={"out": of_tensor()}),
    record(
        "held", FINE, NEAR, tensors={"out": of_tensor(3.5), "dq": of_tensor()}, dtype="float32", backward=True
    ),
    record("broken", RED, tensors={"out": of_tensor(9.0)}, reason="out: largest z", case="b2_..."),
    record("broken", NANS, tensors={"dv": of_tensor(0.0)}, reason="dv: finite", case="b3_...", backward=True),
    record("no power", reason="rounding errors everywhere"),
    record("not claimed", reason="Sq != Sk, a backward"),
    record("not claimed", reason="a backward"),
]


def rows(text: str) -> list[list[str]]:
    """The cells of the table, below its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_has_the_worst_first_and_the_largest_of_each_number() -> None:
    assert [row[1:6] + row[7:] for row in rows(markdown(FOUND, "red"))] == [
        ["float16", "dv", "1", "0.250", "0.00", "finite where it should be: broken", "b3_..."],
        ["float16", "out", "2", "0.250", "9.00", "largest z: 1.5 x its limit", "b2_..."],
        ["float32", "dq", "1", "0.250", "1.00", "hard bound: 0.9 x its limit", "b1_..."],
        ["float32", "out", "1", "0.250", "3.50", "rms z: 0.5 x its limit", "b1_..."],
    ]


def test_red_comparisons_are_listed_worst_first_with_what_and_how_to_replay() -> None:
    text = markdown(FOUND, "red comparisons: 2")
    assert text.startswith("### Attention: red comparisons: 2\n")
    first, second = (line for line in text.splitlines() if line.startswith("1. "))
    assert first.startswith("1. **dv against oracle: finite where it should be")
    assert second.startswith("1. **out against oracle: largest z: 9, at most 6 (1.5 x) at [0, 0, 1, 2]")
    assert "float16, batch 1<br>`pytest ...`" in second


def test_what_was_executed_and_what_was_not_is_counted_with_its_reasons() -> None:
    text = markdown(FOUND, "red")
    for line in (
        "comparisons executed: 4, of which with a backward: 2",
        "red: 2",
        "no power, so not executed: 1; rounding errors everywhere (1)",
        "not claimed, so not executed: 2; they would need a backward (2), Sq != Sk (1)",
    ):
        assert f"- {line}\n" in text


def test_a_tensor_that_never_came_has_a_row() -> None:
    raised = Verdict("out", "contract", "does not raise", False, note="RuntimeError: a\nb")
    text = markdown([record("broken", raised, reason="raised RuntimeError: a")], "red")
    (row,) = rows(text)
    assert row[2:8] == ["out", "1", "-", "-", "-", "does not raise: broken"]
    assert re.search(r"^1\. \*\*.*does not raise; RuntimeError: a\*\*", text, re.MULTILINE)


@pytest.mark.parametrize("z", [None, math.inf])
def test_a_number_that_is_not_finite_is_the_largest(z: float | None) -> None:
    found = [record("held", FINE, tensors={"out": of_tensor(x)}) for x in (1.0, z, 2.0)]
    (row,) = rows(markdown(found, "held"))
    assert row[5] == "inf"


def test_a_large_number_is_no_wider_than_a_small_one() -> None:
    found = [record("held", FINE, tensors={"out": TensorSummary(60, 60, 3.4e38, 12345.678, 0.5, 9999.5)})]
    (row,) = rows(markdown(found, "held"))
    assert row[4:7] == ["3.4e+38", "1.23e+04", "9999.50"]
