"""Diagnoses: each hypothesis on a result that it explains, and silence where nothing does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import nan
from typing import Any

import pytest
import torch
from torch import Tensor

from reference.emulation import Tiles
from reports.records import Record
from tests.backends import plain
from tests.cases import Case
from tests.comparison import compare, explain
from tests.implementations import EVERY_CASE, Implementation

CPU = torch.device("cpu")
CASE = Case(batch=3, heads_q=4, heads_kv=2, len_q=33, len_k=40, causal=True, scale=0.3, d_lse=True)
FORWARD = replace(CASE, grad="none", d_lse=False)


def record_of(
    spoil: Callable[..., Any], case: Case = CASE, tiles: Tiles | None = None, hostile: bool = False
) -> Record:
    """Of the definition in PyTorch, spoiled: `spoil` is given the right function, q, k, v and the options.

    Args:
        spoil, case: as above.
        tiles: what it says that it has.
        hostile: whether it runs amid other memory too.
    """

    def dense(*tensors: Tensor, **options: Any) -> Any:
        return spoil(plain.attention, *tensors, **options)

    def ragged(*tensors: Any, **options: Any) -> Any:
        def right(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
            return plain.attention_varlen(q, k, v, *tensors[3:], **options)

        return spoil(right, *tensors[:3], **options)

    mine = Implementation(
        f"mine {spoil}",
        dense,
        EVERY_CASE,
        lambda device: "cpu",
        tiles=None if tiles is None else lambda case, device: tiles,
        varlen=ragged,
    )
    return compare(case, mine, CPU, hostile=hostile)


def out_times(factor: Any) -> Callable[..., Any]:
    def spoil(right: Any, *tensors: Tensor, **options: Any) -> Any:
        out, lse = right(*tensors, **options)
        return out * factor(out) if callable(factor) else out * factor, lse

    return spoil


def of_one(axis: int, number: int, wrong: bool) -> Callable[[Tensor], Tensor]:
    """A factor of 1, and -2 at one place along an axis, or everywhere else."""

    def factor(out: Tensor) -> Tensor:
        at = torch.arange(out.shape[axis]) == number
        return (
            torch.where(at == wrong, -2.0, 1.0)
            .view([-1 if i == axis else 1 for i in range(out.ndim)])
            .to(out)
        )

    return factor


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (out_times(of_one(0, 0, False)), "certain: batch entry 0 is right, all others are wrong"),
        (out_times(of_one(0, 1, True)), "certain: only batch entry 1 is wrong"),
        (out_times(of_one(1, 2, True)), "certain: only head 2 is wrong"),
        (
            out_times(lambda out: torch.tensor([1.0, 0, 1, 0])[:, None, None].to(out)),
            "certain: only head 0 of each group of 2 query heads is right",
        ),
        (out_times(1.5), "certain: out is off by a constant factor of 1.5"),
        (out_times(-1), "certain: out has the opposite sign"),
        (out_times(0), "certain: out is 0 everywhere"),
        (
            lambda right, *tensors, **options: right(*tensors, **{**options, "causal": False}),
            "certain: out, lse are as with causal=False",
        ),
        (
            lambda right, *tensors, **options: right(*tensors, **{**options, "scale": None}),
            "certain: out, lse are as with the default scale",
        ),
    ],
    ids=["first entry", "one entry", "one head", "groups", "factor", "sign", "zero", "causal", "scale"],
)  # fmt: skip
def test_a_hypothesis_that_fits_is_certain(spoil: Callable[..., Any], says: str) -> None:
    record = record_of(spoil, FORWARD)
    assert record.status == "broken"
    assert says in record.diagnosis
    assert all(" wherever it is wrong" in said for said in record.diagnosis if said != says)
    assert f"\n  {says}\n" in explain(record)


def test_gradients_are_explained_too() -> None:
    record = record_of(lambda right, *tensors, **options: right(*tensors, **{**options, "causal": False}))
    assert record.diagnosis == ["certain: out, lse, dq, dk, dv are as with causal=False"]


def test_a_mask_at_the_top_left_is_told() -> None:
    def top_left(right: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return right(q, k[:, :, : q.shape[2]], v[:, :, : q.shape[2]], **options)

    (says,) = record_of(top_left, FORWARD).diagnosis
    assert says == "certain: out, lse are as with a causal mask aligned at the top left"


def spoiled_rows(*rows: int) -> Callable[..., Any]:
    def spoil(right: Any, *tensors: Tensor, **options: Any) -> Any:
        out, lse = right(*tensors, **options)
        out[..., list(rows), 3] = nan
        return out, lse

    return spoil


def test_rows_that_are_nan_are_listed() -> None:
    single = replace(FORWARD, batch=1, heads_q=2)
    assert record_of(spoiled_rows(7), single).diagnosis == [
        "certain: out is NaN in row 7 of batch entry 0, head 0, 1: 2 of 66 rows",
        "certain: out is wrong only in column 3 of 16",
    ]
    says, _ = record_of(spoiled_rows(*range(3, 30)), single).diagnosis
    assert (
        says == "certain: out is NaN in rows 3 to 29, 27 of them of batch entry 0, head 0, 1: 54 of 66 rows"
    )
    assert "certain: out is NaN in every row" in record_of(out_times(nan), single).diagnosis


def test_of_a_ragged_batch_sequences_are_named() -> None:
    case = Case(lengths=((20, 20), (5, 5), (20, 20)), grad="none", layout="bshd")

    def middle(right: Any, *tensors: Tensor, **options: Any) -> Any:
        out, lse = right(*tensors, **options)
        rows = torch.arange(len(out))
        return out * torch.where((rows >= 20) & (rows < 25), 3.0, 1.0)[:, None, None].to(out), lse

    assert record_of(middle, case).diagnosis == ["certain: only sequence 1 is wrong"]


def test_the_result_of_the_call_before_is_told() -> None:
    kept: list[Any] = []

    def behind(right: Any, *tensors: Tensor, **options: Any) -> Any:
        kept.append(right(*tensors, **options))
        return kept[max(0, len(kept) - 2)]

    assert record_of(behind, FORWARD).status == "held"
    record = record_of(behind, replace(FORWARD, seed=1))
    assert record.diagnosis == [f"certain: out is the result of the call before ({FORWARD.id})"]


def test_the_result_of_an_earlier_call_of_the_shape_is_told() -> None:
    kept: dict[Any, Any] = {}

    def by_shape(right: Any, *tensors: Tensor, **options: Any) -> Any:
        return kept.setdefault(tensors[0].shape, right(*tensors, **options))

    first, other = replace(FORWARD, len_q=30, seed=5), replace(FORWARD, len_q=10)
    assert [record_of(by_shape, case).status for case in (first, other)] == ["held", "held"]
    record = record_of(by_shape, replace(first, seed=6))
    assert record.diagnosis == [f"certain: out is the result of an earlier call ({first.id})"]


def test_the_same_numbers_in_another_dtype_or_at_another_scale_are_no_call_before() -> None:
    """A result that is a little off is near what it was there: that is no cache."""

    def hundredth(right: Any, *tensors: Tensor, **options: Any) -> Any:
        out, lse = right(*tensors, **options)
        return (out * 1.01 if out.dtype is torch.float32 else out), lse

    assert record_of(hundredth, replace(FORWARD, dtype="bfloat16")).status == "held"
    assert record_of(hundredth, replace(FORWARD, dtype="float16", scale=0.301)).status == "held"
    record = record_of(hundredth, replace(FORWARD, dtype="float32"))
    assert record.status == "broken" and not any("call" in said for said in record.diagnosis)


def test_options_with_which_nothing_can_be_judged_explain_nothing() -> None:
    """With scale 1 these scores' own errors are beyond 1."""

    def last_column(right: Any, *tensors: Tensor, **options: Any) -> Any:
        out, lse = right(*tensors, **options)
        out[..., -1] *= 1.5
        return out, lse

    record = record_of(last_column, replace(FORWARD, values="very-negative", scale=None, causal=False))
    assert record.status == "broken" and not any("scale=1" in said for said in record.diagnosis)


def test_what_nearly_all_of_it_fits_is_likely() -> None:
    def mostly(right: Any, *tensors: Tensor, **options: Any) -> Any:
        out, lse = right(*tensors, **options)
        out = 1.5 * out
        out[0, 0, 5, 2] += 40
        return out, lse

    assert record_of(mostly, FORWARD).diagnosis == ["likely: out is off by a constant factor of 1.5"]


def test_nothing_is_said_of_noise_or_of_what_is_right() -> None:
    torch.manual_seed(0)
    record = record_of(out_times(lambda out: 1 + torch.randn(out.shape).to(out)), FORWARD)
    assert record.status == "broken" and record.diagnosis == []
    assert record_of(out_times(1)).diagnosis == []


def test_opposite_signs_of_one_case_are_not_taken_for_the_call_before() -> None:
    assert record_of(out_times(1), FORWARD).status == "held"
    assert record_of(out_times(-1), FORWARD).diagnosis == ["certain: out has the opposite sign"]


def test_a_single_element_proves_no_factor() -> None:
    def one(right: Any, *tensors: Tensor, **options: Any) -> Any:
        out, lse = right(*tensors, **options)
        out[0, 0, 0, 0] += 50
        return out, lse

    says = record_of(one, Case(len_q=1, len_k=16, grad="none")).diagnosis
    assert not [sentence for sentence in says if "factor" in sentence]
