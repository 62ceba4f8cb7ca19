"""A run of the suite, in this process: which red case is kept, and what if one is not red again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import SEED
from reports import records
from tests import test_references
from tests.cases import LARGEST_RAGGED, Case, parse_case
from tests.implementations import Claims, Implementation
from tests.session import (
    LARGEST_CASE,
    REPORT_DIR,
    ROOT,
    Broke,
    Session,
    case_to_replay,
    report_dir,
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool
) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = scale * q.float() @ k.float().mT
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return (s.softmax(-1) @ v.float()).to(q.dtype)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(REPORT_DIR, str(tmp_path))
    monkeypatch.setenv(SEED, "0")
    return tmp_path


def session_of(function: Any) -> Session:
    """A run with a function under test that nobody named on the command line."""
    session = Session("mine.py:attention", report_dir() / "records.jsonl")
    session.implementation = Implementation("mine.py:attention", function, Claims(), lambda device: "cpu")
    session.device = torch.device("cpu")
    return session


def generate(session: Session) -> str:
    """The explanation of a shard of generated cases that is red."""
    with pytest.raises(pytest.fail.Exception) as failed:
        test_references.test_generated(0, session)
    return str(failed.value)


def broken_records(folder: Path) -> list[records.Record]:
    return [r for r in records.read(folder / "records.jsonl") if r.status == "broken"]


def test_the_smallest_red_case_is_written_and_explained(folder: Path) -> None:
    def wrong_on_long_rows(q: Tensor, *rest: Tensor, **options: Any) -> Tensor:
        return attention(q if q.shape[2] <= 65 else 1.01 * q, *rest, **options)

    explanation = generate(session_of(wrong_on_long_rows))
    (record,) = broken_records(folder)
    case = parse_case(record.case)
    assert 65 < case.len_q <= 128  # simplest in the order of the strategy, which has edges before others
    assert case == Case(len_q=case.len_q, len_k=case.len_q, grad="none")
    assert explanation.startswith(record.reason)
    assert record.words in explanation
    assert record.replay in explanation


def test_only_the_smallest_red_case_is_explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explained: list[str] = []

    def diagnose(pieces: Any, calls: Any) -> list[str]:
        explained.append(pieces[0].case.id)
        return ["likely: something"]

    monkeypatch.setattr("tests.comparison.diagnose", diagnose)
    explanation = generate(session_of(lambda q, *rest, **options: attention(1.01 * q, *rest, **options)))
    (record,) = broken_records(folder)
    assert explained == [record.case]
    assert record.diagnosis == ["likely: something"] and "likely: something" in explanation
    assert {of.tensor for of in record.maps} == {"out"}


def test_a_case_that_is_not_red_again_is_red(folder: Path) -> None:
    calls: list[int] = []

    def wrong_once(q: Tensor, *rest: Tensor, **options: Any) -> Tensor:
        calls.append(q.shape[2])
        return attention(q if len(calls) > 1 else 1.01 * q, *rest, **options)

    explanation = generate(session_of(wrong_once))
    (record,) = broken_records(folder)
    assert record.reason.startswith("not red when it was repeated: out: ")
    assert explanation.startswith(record.reason)
    assert record.replay in explanation


def test_a_fault_of_the_suite_is_no_red_comparison(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def at_fault(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the oracle is at fault")

    monkeypatch.setattr("tests.comparison.judge", at_fault)
    with pytest.raises(AssertionError, match="the oracle is at fault"):
        test_references.test_generated(0, session_of(attention))
    assert not list(folder.iterdir())


def test_a_red_comparison_is_not_written_before_it_is_known_to_be_the_smallest(folder: Path) -> None:
    session = session_of(lambda q, k, v, **options: v)
    case = Case(grad="none", heads_q=2, heads_kv=2)
    with pytest.raises(Broke):
        session.check(case, "edge")
    assert not list(folder.iterdir())
    record = session.write_broken("edge")
    assert record is not None and broken_records(folder) == [record]
    assert session.write_broken("edge") is None


def test_what_held_and_what_was_not_claimed_is_written_at_once(folder: Path) -> None:
    session = session_of(attention)
    found = [session.check(case, "edge") for case in (Case(grad="none"), Case(len_k=3, grad="none"))]
    assert [record.status for record in found] == ["held", "not claimed"]
    assert records.read(folder / "records.jsonl") == found


# ---------------------------------------------------------------- what a user names


def test_results_go_into_the_checkout_unless_a_variable_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(REPORT_DIR, raising=False)
    assert report_dir() == ROOT / "reports" / "out"
    monkeypatch.setenv(REPORT_DIR, "")
    assert report_dir() == ROOT / "reports" / "out"
    monkeypatch.setenv(REPORT_DIR, "mine")
    assert report_dir() == tmp_path / "mine"


ID = "b{}_h1x1_{}_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0"


@pytest.mark.parametrize(
    ("batch", "lengths"),
    [
        ("1", "s999999999999x33"),
        ("1", "s33x999999999999"),
        ("1", f"s{2**16}x{2**16}"),
        ("999999999999", "s16x16"),
        ("999999999999", "s0x0"),
        ("1", "s" + "9" * 18 + "x1"),
        ("1", "s" + "9" * 19 + "x1"),
        ("1", "s" + "9" * 5000 + "x1"),
        ("100663296", "r" + "+".join(["16777216of0x0"] * 6) + "_past0x0"),
        ("1", "r99999999999x1_past0x0"),
        ("1", "r1x1_past99999999999x0"),
        ("999999999999", "r999999999999of1x1_past0x0"),
        ("2", "r999999999999of1x1_past0x0"),
    ],
)
def test_a_case_that_no_machine_holds_is_refused(batch: str, lengths: str) -> None:
    with pytest.raises(ValueError, match=f"{LARGEST_CASE}|{LARGEST_RAGGED} sequences|must look like"):
        case_to_replay(ID.format(batch, lengths))


@pytest.mark.parametrize(
    ("batch", "lengths"), [("1", "s4099x33"), ("1", "s60000x60000"), ("70000", "r70000of1x1_past0x0")]
)
def test_a_large_case_is_not(batch: str, lengths: str) -> None:
    text = ID.format(batch, lengths)
    assert case_to_replay(text) == parse_case(text)
