"""What an implementation may say of its roundings (`Rounding`): true it holds, untrue it is red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from reference.budget import Rounding
from reports.records import Record
from tests.cases import Case
from tests.comparison import compare
from tests.implementations import EVERY_DENSE_CASE, Implementation

Step = Callable[[Tensor], Tensor]
CPU = torch.device("cpu")


def cut_off(x: Tensor) -> Tensor:
    """float32 as a tensor core takes it that ignores the last 13 bits."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def rounded(x: Tensor) -> Tensor:
    """The same rounded to nearest, ties away from zero."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def to_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def as_it_is(x: Tensor) -> Tensor:
    return x


class ByHand(torch.autograd.Function):
    """softmax(scale q k^T) v and its gradients in float32, `operand` of everything that enters a product,
    `of_head` of what a query head adds to dk and dv, `of_p` of P when it is computed again."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float,
        operand: Step, of_head: Step, of_p: Step,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        group = q.shape[1] // k.shape[1]
        Q, K, V = (x.float() for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        S = scale * (operand(Q) @ operand(K).mT)
        Sq, Sk = S.shape[-2:]
        if causal:
            hidden = torch.ones(Sq, Sk, dtype=torch.bool).triu(Sk - Sq + 1)
            S = S.masked_fill(hidden, -torch.inf)
        lse = S.logsumexp(-1)
        P = (S - lse[..., None]).exp()
        e = (S - S.amax(-1, keepdim=True)).exp()
        out = (operand(e) @ operand(V) / e.sum(-1, keepdim=True)).to(q.dtype)
        ctx.save_for_backward(Q, K, V, of_p(P), out)
        ctx.group, ctx.scale, ctx.operand, ctx.of_head, ctx.dtype = group, scale, operand, of_head, q.dtype
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        Q, K, V, P, out = ctx.saved_tensors
        operand = ctx.operand
        dO, d_lse = gradients[0].float(), gradients[1]
        delta = (dO * out.float()).sum(-1) - (0 if d_lse is None else d_lse)
        dS = P * (operand(dO) @ operand(V).mT - delta[..., None])
        dq = ctx.scale * (operand(dS) @ operand(K))
        dk, dv = ctx.scale * (operand(dS).mT @ operand(Q)), operand(P).mT @ operand(dO)
        dk, dv = (ctx.of_head(x).unflatten(1, (-1, ctx.group)).float().sum(2) for x in (dk, dv))
        return *(x.to(ctx.dtype) for x in (dq, dk, dv)), *[None] * 5


def compared(
    case: Case,
    rounding: Rounding,
    operand: Step = as_it_is,
    of_head: Step = as_it_is,
    spoilt: Step = as_it_is,
    of_p: Step = as_it_is,
) -> Record:
    def function(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool
    ) -> Any:
        scale = q.shape[3] ** -0.5 if scale is None else scale
        return ByHand.apply(q, spoilt(k), v, causal, scale, operand, of_head, of_p)

    claims = replace(EVERY_DENSE_CASE, dead_rows=False, rounding=rounding)
    return compare(case, Implementation("mine", function, claims, lambda device: "cpu"), CPU)


TF32 = Rounding(products="tf32")
BASE = Case(heads_q=4, heads_kv=2, len_q=70, len_k=150, dim=64, dim_v=64, dtype="float32", d_lse=True)
CASES = [
    BASE,
    replace(BASE, causal=True, values="mean"),
    replace(BASE, causal=True, values="growing", len_q=130),
    replace(BASE, values="loud"),
    replace(BASE, values="equal", dim_v=32),
    replace(BASE, values="near-tied", scale=-0.3, seed=3),
    replace(BASE, values="exact", len_q=33),
    replace(BASE, len_q=1, len_k=1),
]


@pytest.mark.parametrize("operand", [rounded, cut_off])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_products_of_tf32_hold_where_they_are_declared(case: Case, operand: Step) -> None:
    record = compared(case, TF32, operand)
    assert record.status == "held", record.reason


def half_a_little_low(P: Tensor) -> Tensor:
    """As a GPU's exp2 gives it: every other row one float32 below."""
    low = torch.nextafter(P, torch.zeros_like(P))
    return torch.where(torch.arange(P.shape[-2])[:, None] % 2 == 0, low, P)


@pytest.mark.parametrize("values", ["mean", "equal", "exact"])
@pytest.mark.parametrize("len_k", [1, 4])
def test_what_is_exactly_one_may_lose_a_step_if_it_is_cut_off(len_k: int, values: str) -> None:
    """P of a row that sees one key, or of equal scores: 1 or 1/4, and cut off 2^-11 of it less."""
    case = Case(
        batch=3, heads_q=6, heads_kv=2, len_q=65, len_k=len_k, dtype="float32", scale=1.0, values=values
    )
    record = compared(case, TF32, cut_off, of_p=half_a_little_low)
    assert record.status == "held", record.reason


@pytest.mark.parametrize("operand", [rounded, cut_off])
def test_products_of_tf32_are_red_where_they_are_not(operand: Step) -> None:
    record = compared(BASE, Rounding(), operand)
    assert {v.tensor for v in record.verdicts if not v.held} >= {"out", "lse", "dq", "dk", "dv"}


def test_products_of_bfloat16_are_not_of_tf32() -> None:
    record = compared(BASE, TF32, to_bfloat16)
    assert {v.tensor for v in record.verdicts if not v.held} >= {"out", "lse", "dq", "dk", "dv"}


def test_a_key_off_by_a_thousandth_is_seen_through_tf32() -> None:
    def longer(k: Tensor) -> Tensor:
        return k * 1.001

    assert compared(BASE, TF32, rounded, spoilt=longer).status == "broken"


GROUPS = [
    replace(BASE, heads_q=8, heads_kv=1, dtype=dtype, values=values, causal=causal)
    for dtype in ("float16", "bfloat16")
    for values in ("normal", "mean", "equal", "tiny")
    for causal in (False, True)
]


def half(dtype: str) -> Step:
    return lambda x: x.to(getattr(torch, dtype))


@pytest.mark.parametrize("case", GROUPS, ids=lambda case: case.id)
def test_heads_rounded_one_by_one_hold_where_that_is_declared(case: Case) -> None:
    record = compared(case, Rounding(heads_rounded_before_group_sum=True), of_head=half(case.dtype))
    assert record.status == "held", record.reason


def test_heads_rounded_one_by_one_are_red_where_it_is_not() -> None:
    case = replace(GROUPS[0], values="tiny")  # elsewhere it is no more than the roundings that there are
    record = compared(case, Rounding(), of_head=half(case.dtype))
    assert {v.tensor for v in record.verdicts if not v.held} == {"dv"}


def test_what_has_to_be_declared_is_said() -> None:
    case = replace(GROUPS[0], values="tiny")
    undeclared = compared(case, Rounding(), of_head=half(case.dtype))
    assert (
        "likely: it holds if a manifest declares heads_rounded_before_group_sum = true"
        in undeclared.diagnosis
    )
    assert not any("manifest" in said for said in compared(BASE, TF32, to_bfloat16).diagnosis)


def test_products_that_do_not_exist_are_named() -> None:
    with pytest.raises(ValueError, match="products is 'fp8'; it may be ieee or tf32"):
        Rounding(products="fp8")
