"""Execution: which results are no results, and each fault with memory, committed by plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reports.records import Record, Verdict
from tests.cases import LAYOUTS, Case
from tests.comparison import compare
from tests.execution import BESIDE, REPEATS, UNCHANGED, Execution, run
from tests.implementations import Claims, Implementation, load
from tests.layouts import GUARD, whole_memory
from tests.values import Inputs, make_inputs

CPU = torch.device("cpu")
INFINITE, PLAIN = REPEATS


# ---------------------------------------------------------------- results that are no results


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool) -> Any:
    """Differentiable attention in float32 by its definition, for square cases."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = scale * q.float() @ k.float().mT
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    out = (s.softmax(-1) @ v.float()).to(q.dtype)
    return (out, s.logsumexp(-1)) if return_lse else out


CLAIMS = Claims(backward=True, lse=True, lse_grad=True)
CASE = Case(heads_q=2, heads_kv=2, len_q=20, len_k=20, d_lse=True, dtype="float32")
FORWARD = replace(CASE, grad="none", d_lse=False)


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


# ---------------------------------------------------------------- faults with memory

DETERMINISTIC = replace(CLAIMS, strided=True, deterministic=True, deterministic_backward=True)
TENSORS = ["out", "lse", "dq", "dk", "dv"]


def executed(
    function: Any, case: Case = CASE, claims: Claims = DETERMINISTIC, hostile: bool = True
) -> Execution:
    return run(
        Implementation("mine", function, claims, lambda device: "cpu"), case, make_inputs(case), CPU, hostile
    )


def red(execution: Execution) -> dict[tuple[str, str], Verdict]:
    return {(v.tensor, v.rule): v for v in execution.verdicts if not v.held}


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


def beside(t: Tensor, past_last: int = 1) -> Tensor:
    """An element past a contiguous tensor's last."""
    return t.as_strided((1,), (1,), int(t.storage_offset()) + t.numel() - 1 + past_last)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [attention, by_hand()], ids=["autograd", "by hand"])
def test_a_right_implementation_breaks_nothing_in_any_layout(function: Any, layout: str) -> None:
    case = replace(CASE, layout=layout)
    execution = executed(function, case)
    assert not red(execution)
    rules = [(v.tensor, v.rule) for v in execution.verdicts]
    assert len(rules) == len(set(rules)) == 5 + 5 + 1 + 2 * 5
    inputs = [(name, UNCHANGED) for name in ("q", "k", "v", "d_out", "d_lse")]
    same = [(name, rule) for rule in REPEATS for name in TENSORS]
    assert {*inputs, ("memory", BESIDE), *same} < set(rules)
    assert list(execution.repeats) == list(REPEATS)
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


INPUTS = ("q", "k", "v", "d_out", "d_lse")


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
    assert {rule for tensor, rule in broken if tensor == name} == set(REPEATS)
    assert {tensor for tensor, _ in broken} <= {name, "dq", "dk"}, "out enters dq and dk"


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


# ---------------------------------------------------------------- ragged batches

RAGGED = Case(
    heads_q=2, heads_kv=2, lengths=((5, 5), (0, 3), (3, 3)), past=(2, 1), d_lse=True, dtype="float32",
    layout="bshd",
)  # fmt: skip


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Differentiable attention of ragged batches, sequence by sequence."""
    options["return_lse"] = True
    outs, lses = [], []
    for i in range(len(cu_seqlens_q) - 1):
        of_q, of_k = (slice(int(cu[i]), int(cu[i + 1])) for cu in (cu_seqlens_q, cu_seqlens_k))
        part = (t.transpose(0, 1)[None] for t in (q[of_q], k[of_k], v[of_k]))
        out, lse = attention(*part, **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    past = len(q) - int(cu_seqlens_q[-1])
    outs.append(q.new_zeros((past, q.shape[1], v.shape[2])))
    lses.append(q.new_full((q.shape[1], past), -inf))
    return torch.cat(outs), torch.cat(lses, 1)


def executed_ragged(function: Any = varlen, case: Case = RAGGED) -> Execution:
    claims = replace(DETERMINISTIC, ragged=True)
    implementation = Implementation("mine", attention, claims, lambda device: "cpu", None, function)
    return run(implementation, case, make_inputs(case), CPU)


def test_a_ragged_batch_is_handed_over_by_rows() -> None:
    seen: dict[str, Any] = {}

    def looking(*args: Any, **options: Any) -> Any:
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        if not seen:
            seen.update(zip(names, args, strict=True), **options)
        return varlen(*args, **options)

    x = make_inputs(RAGGED)
    execution = executed_ragged(looking)
    assert not red(execution)
    assert [tuple(seen[name].shape) for name in "qkv"] == [(10, 2, 16), (12, 2, 16), (12, 2, 16)]
    assert torch.equal(seen["q"][:8], x.q[0].transpose(0, 1)[:8])
    assert seen["k"].is_contiguous()
    assert seen["q"][8:].isnan().all() and seen["v"][11:].isnan().all(), "rows past the sequences"
    assert seen["cu_seqlens_q"].tolist() == [0, 5, 5, 8]
    assert seen["cu_seqlens_k"].tolist() == [0, 5, 8, 11]
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        assert seen[name].dtype == torch.int32
        assert (whole_memory(seen[name]).view(torch.int32)[:GUARD] == 2**31 - 1).all()
    assert (seen["max_seqlen_q"], seen["max_seqlen_k"]) == (5, 5)
    assert (seen["causal"], seen["scale"], seen["return_lse"]) == (False, None, True)
    assert {name: r.shape for name, r in execution.results.items()} == {
        "out": (1, 2, 10, 16), "lse": (1, 2, 10),
        "dq": (1, 2, 10, 16), "dk": (1, 2, 12, 16), "dv": (1, 2, 12, 16),
    }  # fmt: skip
    assert {v.tensor for v in execution.verdicts if v.rule == UNCHANGED} == {
        *INPUTS, "cu_seqlens_q", "cu_seqlens_k"
    }  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_ragged_batch_gives_what_its_sequences_give(layout: str) -> None:
    case = replace(RAGGED, layout=layout)
    x = make_inputs(case)
    execution = executed_ragged(case=case)
    assert not red(execution)
    of_last = (x.q[:, :, 5:8], x.k[:, :, 8:11], x.v[:, :, 8:11])
    out, lse = attention(*of_last, causal=False, scale=None, return_lse=True)
    np.testing.assert_allclose(execution.results["out"][:, :, 5:8], out.double(), atol=1e-6)
    np.testing.assert_allclose(execution.results["lse"][:, :, 5:8], lse.double(), atol=1e-6)


@pytest.mark.parametrize("lengths", [(), ((0, 0),), ((0, 4),)], ids=["no sequence", "empty", "no query"])
def test_a_ragged_batch_of_nothing_can_be_run(lengths: tuple[tuple[int, int], ...]) -> None:
    longest: list[int] = []

    def zeros(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        longest.extend(rest[2:])
        return q * 0, q.new_zeros(q.shape[1], len(q))

    execution = executed_ragged(
        zeros, replace(RAGGED, lengths=lengths, past=(0, 0), grad="none", d_lse=False)
    )
    assert not red(execution)
    assert execution.results["out"].shape == (1, 2, 0, 16)
    assert longest[:2] == [0, max((k for _, k in lengths), default=0)]


def test_faults_of_ragged_batches_are_red() -> None:
    def changing_cu(*args: Any, **options: Any) -> Any:
        result = varlen(*args, **options)
        args[4][1] += 1
        return result

    (broken,) = red(executed_ragged(changing_cu)).values()
    assert (broken.tensor, broken.rule) == ("cu_seqlens_k", UNCHANGED)
    assert broken.note == "1 of its elements, the first at [1]"

    def reading_rows_past(*args: Any, **options: Any) -> Any:
        out, lse = varlen(*args, **options)
        return out + 0 * args[2][-1].sum(), lse

    assert ("out", PLAIN) in red(executed_ragged(reading_rows_past))

    def reading_past_cu(*args: Any, **options: Any) -> Any:
        out, lse = varlen(*args, **options)
        return out + 0 * float(beside(args[3]) == 0), lse + float(beside(args[3]) < 0)

    assert set(red(executed_ragged(reading_past_cu))) == {("lse", INFINITE)}

    def by_heads(*args: Any, **options: Any) -> Any:
        out, lse = varlen(*args, **options)
        return out, lse.mT

    (broken,) = red(executed_ragged(by_heads)).values()
    assert (broken.tensor, broken.note) == ("lse", "shape (10, 2), not (2, 10)")
