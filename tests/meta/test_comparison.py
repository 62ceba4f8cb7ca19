"""A comparison: what an implementation that raises leaves in its record, and where differences are."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from reports.records import Record, Verdict
from tests import comparison
from tests.cases import Case
from tests.comparison import FRAMES, TEXT, compare, explain
from tests.execution import Execution
from tests.implementations import Claims, Implementation

CPU = torch.device("cpu")
CASE = Case(grad="none")


def record_of(function: Any) -> Record:
    return compare(CASE, Implementation("mine", function, Claims(), lambda device: "cpu"), CPU)


def deep(depth: int, *tensors: Tensor) -> Tensor:
    if depth == 0:
        raise ValueError(f"no such thing\nas {'this ' * TEXT}")
    return deep(depth - 1, *tensors)


def test_an_exception_names_the_lines_that_led_to_it() -> None:
    def attention(*tensors: Tensor, **options: Any) -> Tensor:
        return deep(2, *tensors)

    record = record_of(attention)
    assert (record.status, record.reason) == ("broken", "raised ValueError: no such thing")
    (verdict,) = record.verdicts
    text, *frames = re.split(r"\n  at ", verdict.note)
    assert text.startswith("ValueError: no such thing\nas this this")
    assert len(text) < TEXT + 10
    where = [re.fullmatch(r"(?:.*/)?test_comparison\.py:\d+ (.*)", frame) for frame in frames]
    assert [match and match[1].rpartition(".")[2] for match in where] == ["attention", *["deep"] * 3]
    assert re.search(r"^      +at .*test_comparison\.py:\d+ deep$", explain(record), re.MULTILINE)


def test_of_a_long_traceback_the_innermost_lines_are_kept() -> None:
    record = record_of(lambda *tensors, **options: deep(3 * FRAMES, *tensors))
    assert record.verdicts[0].note.count("\n  at ") == FRAMES
    assert record.verdicts[0].note.endswith(" deep")


def test_what_caused_an_exception_is_told_too() -> None:
    """Triton's interpreter raises its own exception from that of a kernel."""

    def kernel() -> None:
        raise IndexError("out of range")

    def attention(*tensors: Tensor, **options: Any) -> None:
        try:
            kernel()
        except IndexError as error:
            raise RuntimeError("in a kernel") from error

    note = record_of(attention).verdicts[0].note
    assert note.startswith("RuntimeError: in a kernel\ncaused by IndexError: out of range\n  at ")
    assert note.endswith("kernel")


def test_an_implementation_that_ends_the_process_is_broken() -> None:
    record = record_of(lambda *tensors, **options: sys.exit(0))
    assert (record.status, record.reason) == ("broken", "raised SystemExit: 0")


def test_an_interruption_is_none_of_the_implementation() -> None:
    def attention(*tensors: Tensor, **options: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_of(attention)


def test_differences_in_a_ragged_batch_are_where_they_are_in_its_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [
        Verdict("dk", "contract", "the same", False, where=(0, 1, 20, 3)),
        Verdict("lse", "contract", "the same", False, where=(0, 1, 20)),
        Verdict("memory", "contract", "nothing beside", False),
    ]
    monkeypatch.setattr(comparison, "run", lambda *_: Execution({}, found))
    claims = Claims(ragged=True)
    mine = Implementation("mine", print, claims, lambda device: "cpu", varlen=print)
    ragged = replace(CASE, lengths=((16, 16), (16, 16)), heads_q=2, heads_kv=2, layout="bshd")
    assert [verdict.where for verdict in compare(ragged, mine, CPU).verdicts] == [(20, 1, 3), (1, 20), None]
    dense = Case(heads_q=2, heads_kv=2, grad="none")
    assert [verdict.where for verdict in compare(dense, mine, CPU).verdicts] == [v.where for v in found]
