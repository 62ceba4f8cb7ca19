"""Execution amid hostile memory: each fault with memory, committed by plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cases import LAYOUTS, Case
from tests.execution import (
    BESIDE,
    FOLLOWS,
    NEGATED,
    OWN_MEMORY,
    REPEATS,
    SHAPE,
    UNCHANGED,
    Execution,
    run,
)
from tests.implementations import Claims, Implementation, load
from tests.meta.plain import (
    CASE,
    CLAIMS,
    CPU,
    DETERMINISTIC,
    FORWARD,
    INFINITE,
    INPUTS,
    PLAIN,
    attention,
    beside,
    red,
)
from tests.values import Inputs, make_inputs

TENSORS = ["out", "lse", "dq", "dk", "dv"]


def executed(
    function: Any, case: Case = CASE, claims: Claims = DETERMINISTIC, hostile: bool = True
) -> Execution:
    return run(
        Implementation("mine", function, claims, lambda device: "cpu"), case, make_inputs(case), CPU, hostile
    )


class AttentionByHand(torch.autograd.Function):
    """Non-causal attention into memory that it allocates itself; `fault` may spoil a tensor of it."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, fault: Fault
    ) -> tuple[Tensor, Tensor]:
        s = scale * q @ k.mT
        p = s.softmax(-1)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
        out.copy_(p @ v)
        lse.copy_(s.logsumexp(-1))
        for name, t in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse)):
            fault(name, t)
        ctx.save_for_backward(q, k, v, p, out)
        ctx.scale, ctx.fault = scale, fault
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> Any:
        q, k, v, p, out = ctx.saved_tensors
        delta = torch.zeros(q.shape[:-1], dtype=q.dtype)
        delta += (d_out * out).sum(-1) - d_lse
        ds = p * (d_out @ v.mT - delta[..., None])
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), v.new_empty(v.shape)
        dq.copy_(ctx.scale * ds @ k)
        dk.copy_(ctx.scale * ds.mT @ q)
        dv.copy_(p.mT @ d_out)
        for name, t in (("d_out", d_out), ("d_lse", d_lse), ("delta", delta),
                        ("dq", dq), ("dk", dk), ("dv", dv)):  # fmt: skip
            ctx.fault(name, t)
        return dq, dk, dv, None, None


Fault = Callable[[str, Tensor], object]


def by_hand(fault: Fault = lambda name, t: None) -> Any:
    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool
    ) -> Any:
        return AttentionByHand.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, fault)

    return attention


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [attention, by_hand()], ids=["autograd", "by hand"])
def test_a_right_implementation_breaks_nothing_in_any_layout(function: Any, layout: str) -> None:
    case = replace(CASE, layout=layout)
    execution = executed(function, case)
    assert not red(execution)
    rules = [(v.tensor, v.rule) for v in execution.verdicts]
    assert len(rules) == len(set(rules)) == 5 + 5 + 2 + 1 + 3 * 5
    inputs = [(name, UNCHANGED) for name in ("q", "k", "v", "d_out", "d_lse")]
    same = [(name, rule) for rule in (*REPEATS, FOLLOWS) for name in TENSORS]
    own = [(name, OWN_MEMORY) for name in ("out", "lse")]
    assert {*inputs, *own, ("memory", BESIDE), *same} < set(rules)
    assert list(execution.repeats) == [*REPEATS, FOLLOWS]
    assert all(list(repeat) == TENSORS for repeat in execution.repeats.values())
    assert {name: x.shape for name, x in execution.results.items()} == {
        name: tuple(t.shape) for name, t in zip(TENSORS, _like_results(make_inputs(case)), strict=True)
    }


def _like_results(x: Inputs) -> tuple[Tensor, ...]:
    assert x.d_out is not None and x.d_lse is not None
    return x.d_out, x.d_lse, x.q, x.k, x.v


def test_one_run_where_no_more_is_asked_for() -> None:
    calls = []
    execution = executed(by_hand(lambda name, t: calls.append(name)), FORWARD, hostile=False)
    assert calls.count("out") == 1 and not execution.repeats and not red(execution)
    assert [v.rule for v in execution.verdicts if v.tensor == "memory"] == [BESIDE]


@pytest.mark.parametrize("name", ["out", "lse", "delta", "dq", "dk", "dv"])
def test_a_write_beside_what_was_allocated_is_red(name: str) -> None:
    execution = executed(by_hand(lambda which, t: beside(t).fill_(0) if which == name else None))
    (broken,) = red(execution).values()
    assert (broken.tensor, broken.reference, broken.rule) == ("memory", "contract", BESIDE)
    shape = (1, 2, 20) if name in ("lse", "delta") else (1, 2, 20, 16)
    who = f"float32 {shape}" if name == "delta" else f"{name}, float32 {shape}"
    assert broken.note == f"{who}: 1 element after it, the nearest 1 past its last"
    assert list(execution.results) == TENSORS
    assert not execution.repeats, "in plain memory the next run would write into what is not its own"


def test_many_writes_beside_are_cut_short() -> None:
    execution = executed(by_hand(lambda name, t: beside(t).fill_(0) if name not in INPUTS else None))
    (broken,) = red(execution).values()
    assert broken.note.count("past its last") == 3 and broken.note.endswith(". And 3 more")


@pytest.mark.parametrize("name", INPUTS)
def test_a_write_beside_an_input_is_red(name: str) -> None:
    """One of the same value as amid zeros: seen since the judged run is amid NaN."""
    execution = executed(by_hand(lambda which, t: beside(t, 3).fill_(0) if which == name else None))
    (broken,) = red(execution).values()
    assert (broken.tensor, broken.rule) == (name, UNCHANGED)
    assert broken.note == "1 element after it, the nearest 3 past its last"


@pytest.mark.parametrize("name", INPUTS)
def test_a_changed_input_is_red_and_told_where(name: str) -> None:
    execution = executed(by_hand(lambda which, t: t[0, 1, 7].neg_() if which == name else None))
    (broken,) = red(execution).values()
    assert (broken.tensor, broken.rule) == (name, UNCHANGED)
    count, index = (1, [0, 1, 7]) if name == "d_lse" else (16, [0, 1, 7, 0])
    assert broken.note == f"{count} of its elements, the first at {index}"


def test_an_input_changed_and_put_back_counts_as_unchanged() -> None:
    assert not red(executed(by_hand(lambda name, t: t.neg_().neg_() if name == "q" else None)))


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_memory_taken_for_zeros_is_red(name: str) -> None:
    """The classic: a sum that starts from torch.empty. NaN for the judge, and another result each time."""
    for new in (lambda t: torch.empty_like(t), lambda t: t.new_empty(t.shape)):
        execution = executed(
            by_hand(lambda which, t, new=new: t.add_(new(t)) if which == name else None)  # type: ignore[misc]
        )
        assert np.isnan(execution.results[name]).all()
        assert not np.isfinite(execution.repeats[INFINITE][name]).any()
        broken = red(execution)[name, INFINITE]
        rows, D = 40, 1 if name == "lse" else 16
        assert broken.where == (0,) * (3 if name == "lse" else 4)
        assert broken.note == f"{rows * D} elements differ, the first inf there, nan amid NaN"


def test_rows_that_are_never_written_are_red() -> None:
    def unwritten(name: str, t: Tensor) -> None:
        if name == "out":
            whole = torch.empty_like(t)
            t[:, :, 13:] = whole[:, :, 13:]

    execution = executed(by_hand(unwritten), FORWARD)
    out = execution.results["out"]
    assert np.isnan(out[:, :, 13:]).all() and np.isfinite(out[:, :, :13]).all()
    assert red(execution)["out", INFINITE].where == (0, 0, 13, 0)


@pytest.mark.parametrize("name", ["q", "k", "v", "d_out"])
def test_a_read_beside_an_input_is_red_even_if_it_counts_for_nothing(name: str) -> None:
    """0 x what lies there: invisible amid numbers."""

    def peeping(which: str, t: Tensor) -> None:
        if which == name:
            peeping.seen = 0 * beside(t)  # type: ignore[attr-defined]
        if which == ("dv" if name == "d_out" else "out"):
            t += peeping.seen  # type: ignore[attr-defined]

    execution = executed(by_hand(peeping))
    spoiled = "dv" if name == "d_out" else "out"
    broken = red(execution)
    assert np.isnan(execution.results[spoiled]).all()
    assert np.isfinite(execution.repeats[PLAIN][spoiled]).all()
    assert (spoiled, PLAIN) in broken
    assert (spoiled, INFINITE) not in broken, "0 x inf is NaN too: the same"


def test_a_maximum_over_what_lies_beside_is_red_amid_infinities() -> None:
    """NaN may be ignored, by fmax or a comparison; inf is not."""

    def greedy(name: str, t: Tensor) -> None:
        if name == "q":
            greedy.most = torch.fmax(beside(t), t.max())  # type: ignore[attr-defined]
        if name == "out":
            t *= greedy.most  # type: ignore[attr-defined]

    execution = executed(by_hand(greedy), FORWARD)
    assert np.isfinite(execution.results["out"]).all()
    assert set(red(execution)) == {("out", INFINITE)}


@pytest.mark.parametrize("name", TENSORS)
def test_state_kept_between_calls_is_red(name: str) -> None:
    calls = {name: 0}

    def counting(which: str, t: Tensor) -> None:
        if which == name:
            t += calls[name]
            calls[name] += 1

    broken = red(executed(by_hand(counting)))
    assert {rule for tensor, rule in broken if tensor == name} == {*REPEATS, FOLLOWS}
    assert "it is not " in broken[name, FOLLOWS].note
    assert {tensor for tensor, _ in broken} <= {name, "dq", "dk"}, "out enters dq and dk"


Keep = Callable[..., Any]


def by_shape(calls: dict[Any, Any], q: Tensor, right: Keep) -> Any:
    return calls.setdefault(q.shape, right())


def by_address(calls: dict[Any, Any], q: Tensor, right: Keep) -> Any:
    return calls.setdefault((q.data_ptr(), q.shape), right())


def one_behind(calls: dict[Any, Any], q: Tensor, right: Keep) -> Any:
    found = right()
    before = calls.get("before", found)
    calls["before"] = found
    return before


@pytest.mark.parametrize("claims", [DETERMINISTIC, CLAIMS], ids=["deterministic", "not"])
@pytest.mark.parametrize("kept", [by_shape, by_address, one_behind])
def test_a_result_that_was_kept_is_red_and_named(kept: Keep, claims: Claims) -> None:
    calls: dict[Any, Any] = {}

    def attention_of(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return kept(calls, q, lambda: tuple(t.detach() for t in attention(q, k, v, **options)))

    claims = replace(claims, backward=False, lse_grad=False)
    broken = red(executed(attention_of, FORWARD, claims))
    assert set(broken) == {("out", FOLLOWS)}
    assert broken["out", FOLLOWS].note.startswith("it is the result of the call before, ")


def test_gradients_that_were_kept_are_red_and_named() -> None:
    kept: dict[str, Tensor] = {}

    def keeping(name: str, t: Tensor) -> None:
        if name == "dv":
            t.copy_(kept.setdefault(name, t.clone()))

    broken = red(executed(by_hand(keeping)))
    assert set(broken) == {("dv", FOLLOWS)}
    assert broken["dv", FOLLOWS].note.startswith("it is the result of the call before, ")


def test_of_what_need_not_repeat_the_last_run_is_handed_on_with_the_sign_of_the_first() -> None:
    execution = executed(by_hand(), claims=CLAIMS)
    assert not red(execution) and not [v for v in execution.verdicts if v.rule == FOLLOWS]
    for name, x in execution.repeats[FOLLOWS].items():
        np.testing.assert_array_equal(x, execution.results[name])
    assert NEGATED.isdisjoint({"lse", "dq", "dk", "q", "k", "d_lse"})


def test_a_result_of_the_shape_of_the_call_before_is_told() -> None:
    calls: dict[Any, Any] = {}

    def late(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return one_behind(calls, q, lambda: attention(q, k, v, **options).detach())

    claims = Claims()
    executed(late, FORWARD, claims, hostile=False)
    (broken,) = red(executed(late, replace(FORWARD, len_q=9, len_k=9), claims, hostile=False)).values()
    assert (broken.tensor, broken.rule) == ("out", SHAPE)
    assert broken.note == "shape (1, 2, 20, 16), not (1, 2, 9, 16), but that of the call before"


@pytest.mark.parametrize(
    ("spoiled", "note"),
    [
        (lambda q, out, lse: (q.copy_(out), lse), "it shares memory with q"),
        (lambda q, out, lse: (out, lse[:, :, :1].expand(lse.shape)), "its own elements share memory: "),
        (lambda q, out, lse: (out, out[..., 0]), "it shares memory with out"),
        (lambda q, out, lse: (out.as_strided(out.shape, (640, 320, 15, 1)), lse), "its own elements share"),
    ],
    ids=["input", "expanded", "each other", "overlapping"],
)
def test_memory_that_is_not_its_own_is_red(spoiled: Any, note: str) -> None:
    def attention_of(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return spoiled(q, *attention(q, k, v, **options))

    claims = replace(CLAIMS, backward=False, lse_grad=False)
    found = [v for v in red(executed(attention_of, FORWARD, claims)).values() if v.rule == OWN_MEMORY]
    assert found and all(v.tensor in ("out", "lse") for v in found)
    assert found[-1].note.startswith(note)


def test_dimensions_that_interleave_are_no_overlap() -> None:
    def attention_of(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        out, lse = attention(q, k, v, **options)
        return out.transpose(1, 2).contiguous().transpose(1, 2), lse.mT.contiguous().mT

    assert not red(executed(attention_of, FORWARD, replace(CLAIMS, backward=False, lse_grad=False)))


def test_what_is_not_claimed_to_be_deterministic_is_handed_on() -> None:
    calls = [0]

    def noisy(name: str, t: Tensor) -> None:
        if name in ("out", "dv"):
            calls[0] += 1
            t *= 1 + calls[0] * 2.0**-20

    forward_only = replace(DETERMINISTIC, deterministic_backward=False)
    assert {tensor for tensor, _ in red(executed(by_hand(noisy), claims=forward_only))} == {"out"}
    execution = executed(by_hand(noisy), claims=CLAIMS)
    assert not red(execution)
    for repeat in execution.repeats.values():
        assert (repeat["dv"] != execution.results["dv"]).any()


def test_nan_is_nan_whatever_its_bits_are() -> None:
    calls = [0]

    def invalid(name: str, t: Tensor) -> None:
        if name == "out":
            calls[0] += 1
            t[0, 0, 0, 0] = -nan if calls[0] % 2 else nan
            t.view(torch.int32)[0, 0, 0, 0] += calls[0]

    assert not red(executed(by_hand(invalid), FORWARD))


def test_a_zero_of_the_other_sign_is_another_result() -> None:
    calls = [0]

    def signed(name: str, t: Tensor) -> None:
        if name == "out":
            t[0, 0, 3, 0] = -0.0 if calls[0] else 0.0
            calls[0] += 1

    broken = red(executed(by_hand(signed), FORWARD))
    assert broken["out", PLAIN].where == (0, 0, 3, 0)


def test_a_contract_broken_in_a_further_run_is_red() -> None:
    calls = [0]

    def later(name: str, t: Tensor) -> None:
        calls[0] += name == "out"
        if name == "v" and calls[0] == 1:
            t[0, 0, 0, 0] = 7

    (broken,) = red(executed(by_hand(later), FORWARD)).values()
    assert (broken.tensor, broken.rule) == ("v", UNCHANGED)
    assert broken.note == "amid infinities: 1 of its elements, the first at [0, 0, 0, 0]"


def test_a_result_that_is_none_is_not_run_again() -> None:
    calls = []
    execution = executed(lambda *t, **options: calls.append(1), FORWARD)
    assert len(calls) == 1 and not execution.repeats


def test_an_exception_leaves_nothing_behind() -> None:
    def raising(*t: Tensor, **options: Any) -> Any:
        assert torch.empty(1).isnan()
        raise ZeroDivisionError

    before = torch.empty, torch.zeros_like, Tensor.new_empty
    with pytest.raises(ZeroDivisionError):
        executed(raising)
    assert (torch.empty, torch.zeros_like, Tensor.new_empty) == before
    assert "new_empty" not in vars(Tensor)


OURS = {
    "dense": Case(heads_q=2, len_q=40, len_k=37, causal=True, d_lse=True, layout="gradient"),
    "ragged": Case(heads_q=2, lengths=((33, 20), (0, 5), (7, 0)), past=(2, 1), d_lse=True, layout="bshd"),
}


@pytest.mark.parametrize("case", OURS.values(), ids=OURS)
def test_our_own_kernels_break_nothing(case: Case, device: torch.device) -> None:
    execution = run(load("triton"), case, make_inputs(case), device)
    assert not red(execution)
    assert list(execution.repeats[PLAIN]) == TENSORS
    assert all(not np.isnan(x).any() for x in execution.results.values())
