"""Edges of the judge: values that float32 flushes, and the unit of FlashAttention-2's rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import oracle
from reports.records import Record
from tests.cases import Case, parse_case
from tests.comparison import compare
from tests.implementations import Claims, Implementation
from tests.judge import _Tensor
from tests.values import make_inputs

CPU = torch.device("cpu")
EXACT = "b1_h1x1_s33x33_d80x80_float32_full_scale=auto_exact_bhsd_grad=none_nodlse_seed0"


def in_float64(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool
) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = scale * q.double() @ k.double().mT
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return (s.softmax(-1) @ v.double()).to(q.dtype)


def record_of(case: Case, function: Any) -> Record:
    claims = Claims(dtypes=("float16", "bfloat16", "float32"))
    return compare(case, Implementation("mine", function, claims, lambda device: "cpu"), CPU)


# ---------------------------------------------------------------- what float32 flushes


def test_a_softmax_in_float64_rounded_once_is_right() -> None:
    case = parse_case(EXACT)
    inputs = make_inputs(case)
    out = in_float64(inputs.q, inputs.k, inputs.v, causal=False, scale=None, return_lse=False)
    assert ((out != 0) & (out.abs() < 2.0**-126)).any()  # else this shows nothing
    record = record_of(case, in_float64)
    assert record.status == "held", record.reason


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_zero_is_right_there_too(dtype: str) -> None:
    def flushed(*tensors: Tensor, **options: Any) -> Tensor:
        out = in_float64(*tensors, **options)
        return torch.where(out.abs() < 2.0**-126, 0.0, out)

    record = record_of(parse_case(EXACT.replace("float32", dtype)), flushed)
    assert record.status == "held", record.reason


@pytest.mark.parametrize("factor", [-1.0, 2.0, 1e3])
def test_any_other_value_there_is_wrong(factor: float) -> None:
    def wrong(*tensors: Tensor, **options: Any) -> Tensor:
        out = in_float64(*tensors, **options)
        return torch.where(out.abs() < 2.0**-126, factor * out, out)

    assert record_of(parse_case(EXACT), wrong).reason == "out: exactly representable"


def test_of_what_nothing_contributes_to_only_zero_is_right() -> None:
    def tiny(*tensors: Tensor, **options: Any) -> Tensor:
        out = in_float64(*tensors, **options)
        out[..., 0] = 1e-45  # v is 0 there
        return out

    def without(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        v = v.clone()
        v[..., 0] = 0
        return tiny(q, k, v, **options)

    assert "exactly representable" in record_of(parse_case(EXACT), without).reason


# ---------------------------------------------------------------- FlashAttention-2's rule


def tensor_of(name: str, case: Case, off_by: float, p_off_by: float) -> float | None:
    """The number of a tensor whose largest error is one thing and SDPA's another."""
    tensors: dict[str, Any] = {
        n: None if t is None else t.double().numpy() for n, t in vars(make_inputs(case)).items()
    }
    exact = oracle.attention(
        tensors["q"], tensors["k"], tensors["v"], tensors["d_out"], tensors["d_lse"],
        causal=case.causal, scale=case.scale, dtype=case.dtype,
    )  # fmt: skip
    value = getattr(exact, name).value
    x, p = value.copy(), value.copy()
    x.flat[0] += off_by
    p.flat[0] += p_off_by
    return _Tensor(name, x, getattr(exact, name), case, exact).summary(p).fa2


def test_an_error_is_measured_by_that_of_pytorch() -> None:
    assert tensor_of("out", Case(), 0.3, 0.1) == pytest.approx(3)


def test_where_that_is_exact_by_half_an_ulp_of_the_largest_value() -> None:
    largest = np.abs(make_inputs(Case(len_k=1, values="mean")).v.double().numpy()).max()
    assert tensor_of("out", Case(len_k=1, values="mean"), largest * 2.0**-10, 0.0) == pytest.approx(2)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_where_the_value_cancels_by_half_an_ulp_of_what_is_summed(dtype: str) -> None:
    """With one visible key dS is P (dP - delta) = 0: SDPA may have just that."""
    number = tensor_of("dq", Case(len_k=1, dtype=dtype), 1e-6, 0.0)
    assert number is not None and 0 < number < 10


def test_what_nothing_contributes_to_has_no_unit() -> None:
    dead = Case(len_q=4, len_k=0)
    assert tensor_of("out", dead, 0.0, 0.0) == 0
    assert tensor_of("out", dead, 1.0, 0.0) is None
