"""Records: what is written is read back, and a file that is not one of records is refused by line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from reports import records
from reports.records import Record, RecordError, TensorSummary, Verdict


def record(**changes: object) -> Record:
    base = Record(
        case="b1_...",
        words="float16, scores of ±40",
        origin="edge",
        implementation="path/mine.py:attention",
        path="sm80-override",
        status="broken",
        reason="out: hard bound",
        dtype="float16",
        backward=True,
        verdicts=[
            Verdict("out", "oracle", "hard bound", False, 1.5, 1.0, (0, 1, 2, 3), "got 1, exact 2"),
            Verdict("dq", "contract", "input unchanged", True),
        ],
        tensors={
            "out": TensorSummary(60, 58, 1.5, 7.25, 1.1, 2.0),
            "dq": TensorSummary(60, 0, 0.0, 0.0, 0.0),
        },
        seconds={"oracle": 0.125},
        replay="TRITON_OVERRIDE_ARCH=sm80 python -m pytest",
    )
    return msgspec.structs.replace(base, **changes)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file of three records."""
    path = tmp_path / "new folder" / "records.jsonl"
    for number in range(3):
        records.append(path, record(case=str(number)))
    return path


def test_records_are_read_back_in_order(written: Path) -> None:
    assert records.read(written) == [record(case=str(number)) for number in range(3)]


def test_a_file_is_lines_of_json_with_a_version(written: Path) -> None:
    lines = [json.loads(line) for line in written.read_text(encoding="utf-8").splitlines()]
    assert [(line["version"], line["case"]) for line in lines] == [(records.VERSION, c) for c in "012"]


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_what_is_not_finite_is_read_back_as_none(number: float, tmp_path: Path) -> None:
    verdict = Verdict("out", "sdpa", "references agree", False, number, 1e-12)
    summary = TensorSummary(1, 1, number, number, number, number)
    records.append(tmp_path / "records.jsonl", record(verdicts=[verdict], tensors={"out": summary}))
    (found,) = records.read(tmp_path / "records.jsonl")
    assert found.tensors["out"] == TensorSummary(1, 1, None, None, None, None)
    assert found.verdicts[0].statistic is None
    assert found.verdicts[0].margin == verdict.margin == math.inf


def test_an_empty_file_has_no_records(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").touch()
    assert records.read(tmp_path / "records.jsonl") == []


@pytest.mark.parametrize("cut", [1, 2, 100])
def test_a_truncated_file_is_refused(written: Path, cut: int) -> None:
    whole = written.read_bytes().rstrip()
    written.write_bytes(whole[:-cut])
    with pytest.raises(RecordError, match=rf"^{written}, line 3: not a record \("):
        records.read(written)


@pytest.mark.parametrize(
    "line",
    [
        b"\x89PNG\x1a\x00\xff\xfe",
        b"not json",
        b"",
        b"[1, 2]",
        b'"version"',
        b"{}",
        b'{"version": "1"}',
        b'{"version": 1}',
        b'{"version": 1, "case": 7}',
    ],
    ids=repr,
)
def test_a_line_of_something_else_is_refused(written: Path, line: bytes) -> None:
    first, *rest = written.read_bytes().splitlines()
    written.write_bytes(b"\n".join([first, line, *rest]))
    with pytest.raises(RecordError, match=rf"^{written}, line 2: not a record \("):
        records.read(written)


@pytest.mark.parametrize("version", [0, records.VERSION + 1])
def test_a_record_of_another_version_is_refused_whatever_else_it_holds(tmp_path: Path, version: int) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({"version": version, "unheard": "of"}))
    with pytest.raises(
        RecordError, match=rf"^{path}, line 1: a record of version {version}; this reads version 1"
    ):
        records.read(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=rf"^{tmp_path}/none: No such file"):
        records.read(tmp_path / "none")
    with pytest.raises(RecordError, match=rf"^{tmp_path}: Is a directory"):
        records.read(tmp_path)


@pytest.mark.parametrize(
    ("statistic", "limit", "held", "margin"),
    [
        (1.0, 2.0, True, 0.5),
        (3.0, 2.0, False, 1.5),
        (0.0, 0.0, True, 0.0),
        (3.0, 0.0, False, math.inf),
        (math.nan, 2.0, False, math.inf),
        (None, None, True, 0.0),
        (None, None, False, math.inf),
        (None, 2.0, False, math.inf),
    ],
)
def test_margin_is_over_one_where_a_verdict_does_not_hold(
    statistic: float | None, limit: float | None, held: bool, margin: float
) -> None:
    assert Verdict("out", "oracle", "rule", held, statistic, limit).margin == margin


def test_the_worst_verdict_is_a_broken_one() -> None:
    close = Verdict("out", "oracle", "close", True, 0.99, 1.0)
    red = Verdict("dq", "oracle", "red", False, 1.5, 1.0)
    redder = Verdict("dk", "contract", "redder", False)
    assert record(verdicts=[]).worst is None
    assert record(verdicts=[close]).worst == close
    assert record(verdicts=[red, close]).worst == red
    assert record(verdicts=[red, redder, close]).worst == redder
