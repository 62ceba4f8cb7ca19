"""Execution: which results are no results, committed by plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from reports.records import Record
from tests.cases import Case
from tests.comparison import compare
from tests.implementations import Claims, Implementation
from tests.meta.plain import (
    CASE,
    CLAIMS,
    CPU,
    FORWARD,
    attention,
)


def compared(function: Any, case: Case = CASE, claims: Claims = CLAIMS) -> Record:
    return compare(case, Implementation("mine", function, claims, lambda device: "cpu"), CPU)


@pytest.mark.parametrize(
    "case", [CASE, FORWARD, replace(CASE, causal=True, grad="kv", dtype="float16")], ids=str
)
def test_a_right_implementation_is_held(case: Case) -> None:
    record = compared(attention, case)
    assert record.status == "held", record.reason
    gradients = [f"d{name}" for name in "qkv" if case.backward and name in case.grad]
    assert list(record.tensors) == ["out", "lse", *gradients]


def changing(**changes: Any) -> Any:
    """The right implementation, with its out or lse replaced by a function of it."""

    def changed(*tensors: Tensor, **options: Any) -> Any:
        out, lse = attention(*tensors, **options)
        return changes.get("out", lambda x: x)(out), changes.get("lse", lambda x: x)(lse)

    return changed


RESULTS = {
    "an out with heads and queries exchanged": (
        changing(out=lambda x: x.transpose(1, 2)), "out", "shape (1, 20, 2, 16), not (1, 2, 20, 16)",
    ),
    "an out without a batch": (changing(out=lambda x: x[0]), "out", "shape (2, 20, 16), not (1, 2, 20, 16)"),
    "an out in float64": (changing(out=lambda x: x.double()), "out", "torch.float64, not torch.float32"),
    "an out elsewhere": (changing(out=lambda x: x.to("meta")), "out", "on meta, not on cpu"),
    "an out in NumPy": (changing(out=lambda x: x.detach().numpy()), "out", "it is a ndarray"),
    "an lse with one more dimension": (
        changing(lse=lambda x: x[..., None]), "lse", "shape (1, 2, 20, 1), not (1, 2, 20)",
    ),
    "an lse in float16": (changing(lse=lambda x: x.half()), "lse", "torch.float16, not torch.float32"),
    "nothing": (lambda *tensors, **options: None, "out", "it is a NoneType"),
    "out alone": (lambda *t, **options: attention(*t, **options)[0], "lse", "it is a NoneType"),
    "three things": (lambda *t, **options: (*attention(*t, **options), 0), "out", "it is a tuple"),
}  # fmt: skip


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("case", [CASE, FORWARD], ids=["backward", "forward"])
def test_what_is_not_the_tensor_asked_for_is_red(result: str, case: Case) -> None:
    function, tensor, note = RESULTS[result]
    record = compared(function, case)
    broken = [v for v in record.verdicts if not v.held]
    assert record.status == "broken"
    assert (broken[0].tensor, broken[0].reference, broken[0].note) == (tensor, "contract", note)
    assert broken[0].rule == "a tensor of the right shape, dtype and device"
    assert tensor not in record.tensors


def test_one_tensor_is_asked_for_where_no_lse_is_claimed() -> None:
    claims = Claims()
    assert compared(attention, FORWARD, claims).status == "held"
    record = compared(lambda *t, **options: (attention(*t, **options), None), FORWARD, claims)
    assert record.reason == "out: a tensor of the right shape, dtype and device"


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_gradient_that_is_none_is_red(name: str) -> None:
    def cut(*tensors: Tensor, **options: Any) -> Any:
        return attention(
            *(t.detach() if n == name else t for n, t in zip("qkv", tensors, strict=True)), **options
        )

    record = compared(cut)
    (broken,) = [v for v in record.verdicts if not v.held]
    assert (broken.tensor, broken.note) == (f"d{name}", "it is a NoneType")
    assert record.status == "broken"


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_input_changed_in_place_is_red(name: str) -> None:
    def scribbling(*tensors: Tensor, **options: Any) -> Any:
        result = attention(*tensors, **options)
        tensors["qkv".index(name)].detach()[0, 1, 19, 3] += 1
        return result

    record = compared(scribbling, FORWARD)
    assert record.reason == f"{name}: input unchanged"
    assert record.status == "broken"


def test_an_exception_is_red_and_says_what_was_raised() -> None:
    def raising(*tensors: Tensor, **options: Any) -> Any:
        raise ZeroDivisionError("no kernel\nfor this GPU")

    record = compared(raising)
    (broken,) = record.verdicts
    assert record.status == "broken"
    assert record.reason == "raised ZeroDivisionError: no kernel"
    assert broken.rule == "does not raise"
    assert broken.note.startswith("ZeroDivisionError: no kernel\nfor this GPU\n  at ")


def test_a_result_without_a_graph_is_red_where_gradients_are_claimed() -> None:
    record = compared(changing(out=Tensor.detach, lse=Tensor.detach))
    assert record.status == "broken"
    assert "does not require grad" in record.reason


def test_a_wrong_option_is_no_way_out() -> None:
    """An implementation that does not take what the convention asks for is red, not skipped."""
    record = compared(lambda q, k, v: q)
    assert record.status == "broken"
    assert "unexpected keyword argument" in record.reason
