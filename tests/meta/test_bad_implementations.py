"""Ten bad implementations, run as a user would run them: each is red, and named as what it is.

Three cases each: those that an implementation takes well hold, whatever it did in another.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reports import records
from reports.records import Record
from tests.cases import Case
from tests.meta.test_command_line import ROOT, Run, suite
from tests.session import BROKE

BAD = Path(os.path.relpath(Path(__file__).with_name("bad_attention.py"), ROOT))

TWO = Case(batch=2, len_q=16, len_k=16, grad="none")
CAUSAL = replace(TWO, heads_q=2, heads_kv=2, len_q=33, len_k=33, dtype="float32", causal=True)
ONE = replace(TWO, batch=1, len_q=20, len_k=20)
CASES = {case.id: case for case in (TWO, CAUSAL, ONE)}


def ran(name: str, tmp_path: Path, *options: str, gpus: str = "") -> tuple[Run, dict[str, Record]]:
    """A run of all cases through a bad implementation, and its records by case."""
    of_cases = [word for name in CASES for word in ("--case", name)]
    run = suite(tmp_path, "--impl", f"{BAD}:{name}", *of_cases, *options, CUDA_VISIBLE_DEVICES=gpus)
    assert run.status == BROKE, run.output
    found = {record.case: record for record in records.read(tmp_path / "records.jsonl")}
    assert set(found) == set(CASES), run.output
    assert {record.status for record in found.values()} <= {"held", "broken"}
    return run, found


def red(found: dict[str, Record]) -> set[Case]:
    return {CASES[name] for name, record in found.items() if record.status == "broken"}


EVERY = {TWO, CAUSAL, ONE}
BEFORE = "sees the inputs of this call at [0, 0, 0, 0]; it is the result of the call before, "
SHAPE = "out against contract: a tensor of the right shape, dtype and device; "


@pytest.mark.parametrize(
    ("name", "broken", "says"),
    [
        ("changes_q", EVERY, ["q against contract: input unchanged; 512 of its elements, the first at [0,"]),
        ("keeps_by_shape", EVERY, [BEFORE]),
        (
            "one_call_behind",
            EVERY,
            [BEFORE, f"{SHAPE}shape (2, 1, 16, 16), not (2, 2, 33, 16), but that of the call before"],
        ),
        ("float32_out", {TWO, ONE}, [f"{SHAPE}torch.float32, not torch.float16"]),
        ("heads_last", EVERY, [f"{SHAPE}shape (2, 33, 2, 16), not (2, 2, 33, 16)"]),
        (
            "nan_in_row_7",
            EVERY,
            ["certain: out is NaN in row 7 of batch entry 0, 1, head 1: 2 of 132 rows"],
        ),
        ("first_entry_only", {TWO, CAUSAL}, ["certain: batch entry 0 is right, batch entry 1 is wrong"]),
        ("never_causal", {CAUSAL}, ["certain: out is as with causal=False"]),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_wrong_result_is_named(name: str, broken: set[Case], says: list[str], tmp_path: Path) -> None:
    run, found = ran(name, tmp_path, "-n", "0")
    assert red(found) == broken
    for words in says:
        assert words in run.output


def test_a_crash_is_named_and_the_rest_runs(tmp_path: Path) -> None:
    run, found = ran("crashes", tmp_path)
    assert red(found) == {CAUSAL}
    assert "does not crash" in found[CAUSAL.id].verdicts[0].rule
    assert "does not crash" in run.output


def test_a_hang_is_named_and_the_rest_runs(tmp_path: Path) -> None:
    run, found = ran("hangs", tmp_path, "--hang-after", "15")
    assert red(found) == {CAUSAL}
    assert "does not hang" in found[CAUSAL.id].verdicts[0].rule
    assert "does not hang" in run.output


def test_an_illegal_access_is_named_and_the_rest_runs(gpu: torch.device, tmp_path: Path) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    run, found = ran("reads_anywhere", tmp_path, gpus=visible)
    assert red(found) == {CAUSAL}
    assert "leaves the GPU usable" in found[CAUSAL.id].verdicts[0].rule
    assert "illegal memory access" in run.output
