"""Conventions: each adapter on a few lines of PyTorch that are called so, against SDPA MATH in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import sdpa as reference
from tests import conventions
from tests.cases import Case
from tests.conventions import guess, missing, native
from tests.execution import run
from tests.implementations import Claims, Implementation
from tests.values import make_inputs

CPU = torch.device("cpu")
SQUARE = Case(batch=2, heads_q=2, heads_kv=2, len_q=7, len_k=7, d_lse=True, dtype="float32")
CASES = [
    SQUARE,
    replace(SQUARE, causal=True),
    replace(SQUARE, len_k=11, causal=True, dim_v=24),
    replace(SQUARE, heads_q=6, scale=-0.3),
    replace(SQUARE, heads_q=6, len_q=9, causal=True, scale=0.1),  # rows that see no key
    replace(SQUARE, batch=0),
    replace(SQUARE, len_q=0),
    replace(SQUARE, len_k=0),
]
CLAIMS = Claims(
    equal_dims=False,
    gqa=True,
    cross_lengths=True,
    dead_rows=True,
    empty=True,
    backward=True,
    lse=True,
    lse_grad=True,
)


# ---------------------------------------------------------------- stand-ins


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """out and lse of (B, H, S, D) tensors, in their dtype."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    s = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT
    visible = torch.ones(s.shape[-2:], dtype=torch.bool)
    if causal:
        visible = visible.tril(k.shape[2] - q.shape[2])
    s = s.masked_fill(~visible, -torch.inf)
    live = visible.any(-1)[:, None]
    p = s.masked_fill(~live, 0.0).softmax(-1).masked_fill(~live, 0.0)
    lse = s.masked_fill(~live, 0.0).logsumexp(-1).masked_fill(~live[:, 0], -torch.inf)
    return p @ v, lse


def like_native(q, k, v, *, causal, scale, return_lse):
    out, lse = by_definition(q, k, v, causal, scale)
    return (out, lse) if return_lse else out


def like_sdpa(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return by_definition(q, k, v, is_causal, scale)[0]


def like_flash_attn_2(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, return_attn_probs=False):
    assert all(t.is_contiguous() for t in (q, k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = by_definition(q, k, v, causal, softmax_scale)
    out, lse = out.transpose(1, 2), torch.where(lse == -torch.inf, -lse, lse)  # its mark of a dead row
    return (out, lse, None) if return_attn_probs else out


def like_flash_attn_4(q, k, v, softmax_scale=None, causal=False):
    return like_flash_attn_2(q, k, v, 0.0, softmax_scale, causal, True)[:2]


def like_later_flash_attn_4(q, k, v, softmax_scale=None, causal=False, return_lse=False):
    out, lse = like_flash_attn_4(q, k, v, softmax_scale, causal)
    return out, lse if return_lse else None


def like_flash_attn_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, return_attn_probs=False,
):  # fmt: skip
    assert all(t.is_contiguous() for t in (q, k, v))
    sides = [cu.tolist() for cu in (cu_seqlens_q, cu_seqlens_k)]
    longest = [[b - a for a, b in pairwise(cu)] for cu in sides]
    assert not longest[0] or list(map(max, longest)) == [max_seqlen_q, max_seqlen_k]
    nothing = 0 * (q.sum() + k.sum() + v.sum())
    outs, lses = [], []
    for (q0, q1), (k0, k1) in zip(*map(pairwise, sides), strict=True):
        rows, keys, values = (t.transpose(0, 1)[None] for t in (q[q0:q1], k[k0:k1], v[k0:k1]))
        out, lse = by_definition(rows, keys, values, causal, softmax_scale)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    out = torch.cat(outs) if outs else q.new_zeros(0, q.shape[1], v.shape[2]) + nothing
    lse = torch.cat(lses, 1) if lses else q.new_zeros(q.shape[1], 0) + nothing
    return (out, lse, None) if return_attn_probs else out


def to_base_2(function: Callable[..., Any]) -> Callable[..., Any]:
    def attention(*tensors: Any, **options: Any) -> Any:
        returned = function(*tensors, **options)
        if isinstance(returned, Tensor) or returned[1] is None:
            return returned
        return (returned[0], returned[1] / math.log(2), *returned[2:])

    attention.__signature__ = conventions.inspect.signature(function)  # type: ignore[attr-defined]
    return attention


STAND_INS: dict[str, Callable[..., Any]] = {
    "native": like_native,
    "sdpa": like_sdpa,
    "flash_attn": like_flash_attn_2,
    "flash_attn, FA4": like_flash_attn_4,
    "flash_attn, later FA4": like_later_flash_attn_4,
    "flash_attn_varlen": like_flash_attn_varlen,
}


def tensors_of(case: Case, layout: str) -> dict[str, Tensor]:
    """The inputs in float64, (B, H, S, D) as views of the layout."""
    found = {name: t.double() for name, t in vars(make_inputs(case)).items() if t is not None}
    if layout == "bshd":
        found = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in found.items()}
    return found


def assert_right(attention: Callable[..., Any], case: Case, layout: str, lse: bool) -> None:
    x = tensors_of(case, layout)
    q, k, v = leaves = [x[name].requires_grad_() for name in "qkv"]
    returned = attention(q, k, v, causal=case.causal, scale=case.scale, return_lse=lse)
    outputs = returned if lse else (returned,)
    d_out, d_lse = x["d_out"], x["d_lse"] if lse else None
    gradients = torch.autograd.grad(outputs, leaves, [d_out, d_lse][: len(outputs)], allow_unused=True)
    want = reference.attention(q, k, v, d_out, d_lse, causal=case.causal, scale=case.scale)
    expected = (want.out, want.lse) if lse else (want.out,)
    names = (*("out", "lse")[: len(outputs)], "dq", "dk", "dv")
    for name, found, right in zip(
        names, (*outputs, *gradients), (*expected, want.dq, want.dk, want.dv), strict=True
    ):
        assert found is not None and right is not None and found.shape == right.shape, name
        assert torch.allclose(found, right, rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("base2", [False, True], ids=["natural", "base2"])
@pytest.mark.parametrize("name", STAND_INS)
def test_every_convention_becomes_the_native_one(name: str, base2: bool, case: Case) -> None:
    convention, lse = name.partition(",")[0], name != "sdpa"
    function = to_base_2(STAND_INS[name]) if base2 else STAND_INS[name]
    attention, ragged = native(function, convention, CLAIMS, base2)
    assert (ragged is None) == (convention != "flash_attn_varlen")
    layout = conventions.LAYOUT.get(convention, "bhsd")
    assert_right(attention, case, layout, lse)
    assert_right(attention, case, layout, False)


def test_a_ragged_batch_is_handed_over_as_it_is() -> None:
    case = Case(lengths=((5, 7), (0, 2), (9, 9)), heads_q=2, dtype="float32", causal=True, layout="bshd")
    claims = replace(CLAIMS, ragged=True)
    _, ragged = native(like_flash_attn_varlen, "flash_attn_varlen", claims)
    implementation = Implementation("mine", like_native, claims, lambda device: "cpu", varlen=ragged)
    execution = run(implementation, case, make_inputs(case), CPU, hostile=False)
    assert [verdict for verdict in execution.verdicts if not verdict.held] == []
    assert execution.results["out"].shape == (1, 2, 14, 16)
    assert execution.results["lse"].shape == (1, 2, 14)


def test_what_is_contiguous_to_it_reaches_a_kernel_so() -> None:
    """The stand-ins refuse anything else; so does this one for the gradients."""

    class Hooked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out, lse):
            return out.clone(), lse.clone()

        @staticmethod
        def backward(ctx, *gradients):
            assert all(t.is_contiguous() for t in gradients)
            return gradients

    def strict(q, k, v, softmax_scale=None, causal=False):
        return Hooked.apply(*like_flash_attn_4(q, k, v, softmax_scale, causal))

    claims = replace(CLAIMS, contiguous="bshd")
    attention, _ = native(strict, "flash_attn", claims)
    implementation = Implementation("mine", attention, claims, lambda device: "cpu")
    case = claims.narrowed(replace(SQUARE, heads_kv=1))
    assert case.layout == "bshd" and claims.narrowed(case) == case
    execution = run(implementation, case, make_inputs(case), CPU)
    assert [verdict for verdict in execution.verdicts if not verdict.held] == []
    assert set(execution.results) == {"out", "lse", "dq", "dk", "dv"}


def test_the_gradient_of_v_alone_is_no_matter_of_the_lse() -> None:
    """Autograd knows that the lse does not depend on v: it then has no gradient to flow into."""
    implementation = Implementation("mine", like_native, CLAIMS, lambda device: "cpu")
    for grad, names in (("v", {"dv"}), ("kv", {"dk", "dv"})):
        case = replace(SQUARE, grad=grad)
        execution = run(implementation, case, make_inputs(case), CPU, hostile=False)
        assert [verdict for verdict in execution.verdicts if not verdict.held] == []
        assert set(execution.results) == {"out", "lse"} | names


# ---------------------------------------------------------------- keywords


def recording(calls: list[dict[str, Any]], *named: str) -> Callable[..., Any]:
    """A function whose signature names some keywords, and which keeps those that it gets."""
    scope: dict[str, Any] = {"calls": calls}
    exec(f"def f(q, k, v, {', '.join(named)}):\n    calls.append({{**locals()}})\n    return q", scope)
    return scope["f"]


@pytest.mark.parametrize(
    ("convention", "named", "expected"),
    [
        ("sdpa", ["is_causal", "scale=None"], {"is_causal": True, "scale": 0.5}),
        ("sdpa", ["attn_mask", "dropout_p", "is_causal", "scale"],
         {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "scale": 0.5}),
        ("sdpa", ["**options"], {"options": {"is_causal": True, "scale": 0.5, "enable_gqa": True}}),
        ("flash_attn", ["dropout_p", "softmax_scale", "causal"],
         {"dropout_p": 0.0, "softmax_scale": 0.5, "causal": True}),
        ("flash_attn", ["causal", "scale"], {"causal": True, "scale": 0.5}),
        ("flash_attn", ["causal", "softmax_scale", "deterministic=False"],
         {"causal": True, "softmax_scale": 0.5, "deterministic": False}),
        ("flash_attn", ["causal", "softmax_scale", "return_attn_probs=False"],
         {"causal": True, "softmax_scale": 0.5, "return_attn_probs": True}),
        ("flash_attn", ["**options"],
         {"options": {"causal": True, "softmax_scale": 0.5, "return_attn_probs": True}}),
    ],
)  # fmt: skip
def test_a_keyword_is_passed_if_it_is_taken(
    convention: str, named: list[str], expected: dict[str, Any]
) -> None:
    calls: list[dict[str, Any]] = []
    attention, _ = native(recording(calls, *named), convention, CLAIMS)
    q, k = torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4)
    attention(q, k, k, causal=True, scale=0.5, return_lse=True)
    assert {name: value for name, value in calls[0].items() if name not in ("q", "k", "v")} == expected


def test_a_deterministic_backward_is_asked_for_where_it_is_claimed() -> None:
    calls: list[dict[str, Any]] = []
    claims = replace(CLAIMS, deterministic_backward=True)
    attention, _ = native(recording(calls, "causal", "scale", "deterministic=False"), "flash_attn", claims)
    q = torch.ones(1, 2, 3, 4)
    attention(q, q, q, causal=False, scale=None, return_lse=False)
    assert calls[0]["deterministic"] is True


def test_a_builtin_has_no_signature_and_takes_what_is_needed() -> None:
    attention, _ = native(torch.nn.functional.scaled_dot_product_attention, "sdpa", CLAIMS)
    case = replace(SQUARE, heads_q=4, heads_kv=2, scale=0.3, causal=True, d_lse=False)
    assert_right(attention, case, "bhsd", False)


@pytest.mark.parametrize("returned", [None, torch.ones(3), (torch.ones(2, 3), "lse")], ids=repr)
@pytest.mark.parametrize("convention", conventions.CONVENTIONS)
def test_what_is_no_result_is_for_the_judge_to_see(convention: str, returned: Any) -> None:
    attention, _ = native(lambda *tensors, **options: returned, convention, CLAIMS, base2=True)
    q = torch.ones(1, 2, 3, 4)
    found = attention(q, q, q, causal=False, scale=None, return_lse=convention != "sdpa")
    out = found[0] if isinstance(found, tuple) else found
    assert out is (returned[0] if isinstance(returned, tuple) and convention != "sdpa" else out)


# ---------------------------------------------------------------- signatures


@pytest.mark.parametrize(
    ("function", "convention"),
    [
        (like_native, "native"),
        (like_sdpa, "sdpa"),
        (like_flash_attn_2, "flash_attn"),
        (like_flash_attn_4, "flash_attn"),
        (like_flash_attn_varlen, "flash_attn_varlen"),
        (torch.nn.functional.scaled_dot_product_attention, "sdpa"),
        (lambda q, k, v, sm_scale: q, None),
        (torch.nn.Identity(), None),
        (max, None),
    ],
)
def test_a_convention_is_guessed_from_the_signature(function: Any, convention: str | None) -> None:
    assert guess(function) == convention


@pytest.mark.parametrize(
    ("function", "convention", "claims", "expected"),
    [
        (like_native, "native", CLAIMS, ""),
        (like_sdpa, "native", CLAIMS, "causal, return_lse"),
        (torch.nn.Identity(), "native", CLAIMS, ""),
        (like_sdpa, "sdpa", CLAIMS, ""),
        (like_native, "sdpa", CLAIMS, "is_causal"),
        (lambda q, k, v: q, "sdpa", CLAIMS, "is_causal, scale"),
        (lambda q, k, v: q, "sdpa", replace(CLAIMS, masks=("full",), default_scale=True), ""),
        (like_flash_attn_4, "flash_attn", CLAIMS, ""),
        (like_native, "flash_attn", CLAIMS, ""),  # it calls the scale so, too
        (like_sdpa, "flash_attn", CLAIMS, "causal"),
        (like_flash_attn_varlen, "flash_attn_varlen", CLAIMS, ""),
        (like_flash_attn_2, "flash_attn_varlen", CLAIMS, "cu_seqlens_q, cu_seqlens_k"),
    ],
)
def test_keywords_without_which_the_claims_mean_nothing(
    function: Any, convention: str, claims: Claims, expected: str
) -> None:
    assert missing(function, convention, claims) == expected
