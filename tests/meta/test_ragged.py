"""Ragged batches: taken apart and put together, and that a fault in one sequence, or behind all, is red."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reports.records import Record, TensorSummary, Verdict
from tests.cases import DTYPES, Case
from tests.comparison import compare, explain
from tests.implementations import Claims, Implementation
from tests.ragged import Part, parts, past_rows, total, worst
from tests.values import make_inputs

CPU = torch.device("cpu")
LENGTHS = ((5, 7), (0, 3), (4, 6), (5, 7), (0, 0))
CASE = Case(heads_q=4, heads_kv=2, dim=24, dim_v=16, lengths=LENGTHS, past=(2, 3), layout="bshd", d_lse=True)

# ---------------------------------------------------------------- taken apart


def test_a_dense_batch_is_its_only_part() -> None:
    case = Case(batch=2)
    (part,) = parts(case)
    x = np.zeros((2, 1, 16, 16))
    verdict = Verdict("out", "oracle", "hard bound", True, 0.5, 1.0, (1, 0, 3, 4), "a note")
    assert part.case is case
    assert part.of("q", x) is x
    assert part.located(verdict) is verdict


def test_sequences_of_equal_lengths_are_one_part() -> None:
    found = parts(CASE)
    assert [part.sequences for part in found] == [(0, 3), (1,), (2,), (4,)]
    assert [part.rows_q for part in found] == [(0, 9), (5,), (5,), (14,)]
    assert [part.rows_k for part in found] == [(0, 16), (7,), (10,), (23,)]
    for part in found:
        of_sequence = CASE.sequences()[part.sequences[0]]  # type: ignore[index]
        assert part.case == replace(of_sequence, batch=len(part.sequences))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_of_the_inputs_is_what_its_sequences_have(dtype: str) -> None:
    case = replace(CASE, dtype=dtype)
    inputs = make_inputs(case)
    alone = [make_inputs(sequence) for sequence in case.sequences()]
    for part in parts(case):
        for name, x in vars(inputs).items():
            wanted = torch.cat([getattr(alone[number], name) for number in part.sequences or ()])
            assert torch.equal(part.of(name, x), wanted)
            assert np.array_equal(part.of(name, x.double().numpy()), wanted.double().numpy())


def test_every_row_is_in_one_part() -> None:
    rows = np.arange(16.0).reshape(1, 1, 16, 1) + np.zeros((1, 4, 1, 16))
    keys = np.arange(26.0).reshape(1, 1, 26, 1) + np.zeros((1, 2, 1, 24))
    for name, x, count in (("out", rows, 14), ("lse", rows[..., 0], 14), ("dq", rows, 14), ("dk", keys, 23)):
        found = np.concatenate([part.of(name, x).ravel() for part in parts(CASE)])
        assert sorted(set(found)) == list(range(count))
        assert len(found) == x.size // x.shape[2] * count


def test_without_a_sequence_there_is_no_part() -> None:
    assert parts(replace(CASE, lengths=())) == []


# ---------------------------------------------------------------- put together

SOME = Part(replace(CASE.sequences()[0], batch=2), (0, 3), (0, 9), (0, 16))
ONE = Part(CASE.sequences()[2], (2,), (5,), (10,))


@pytest.mark.parametrize(
    ("part", "tensor", "where", "expected", "note"),
    [
        (SOME, "out", (1, 3, 4, 9), (13, 3, 9), "sequence 3: 5 queries on 7 keys"),
        (SOME, "out", (0, 3, 4, 9), (4, 3, 9), "sequence 0: 5 queries on 7 keys"),
        (SOME, "dq", (1, 0, 0, 0), (9, 0, 0), "sequence 3: 5 queries on 7 keys"),
        (SOME, "dk", (1, 1, 6, 2), (22, 1, 2), "sequence 3: 5 queries on 7 keys"),
        (ONE, "dv", (0, 1, 5, 2), (15, 1, 2), "sequence 2: 4 queries on 6 keys"),
        (ONE, "lse", (0, 2, 3), (2, 8), "sequence 2: 4 queries on 6 keys"),
        (ONE, "out", None, None, "sequence 2: 4 queries on 6 keys"),
        (SOME, "out", None, None, "2 sequences: 5 queries on 7 keys"),
    ],
)
def test_a_verdict_says_where_in_the_ragged_tensor_and_in_which_sequence(
    part: Part, tensor: str, where: Any, expected: Any, note: str
) -> None:
    verdict = Verdict(tensor, "oracle", "hard bound", False, 2.0, 1.0, where, "got 1, exact 2")
    found = part.located(verdict)
    assert found == Verdict(
        tensor, "oracle", "hard bound", False, 2.0, 1.0, expected, f"{note}; got 1, exact 2"
    )


def verdict(held: bool, statistic: float | None, note: str, tensor: str = "out", reference: str = "oracle",
            rule: str = "largest z") -> Verdict:  # fmt: skip
    limit = None if statistic is None else 1.0
    return Verdict(tensor, reference, rule, held, statistic, limit, note=note)


def test_of_each_rule_the_worst_is_kept() -> None:
    found = [
        verdict(True, 0.5, "a"),
        verdict(True, 0.7, "the closest"),
        verdict(True, 0.6, "c"),
        verdict(True, 0.9, "of another tensor", tensor="dq"),
        verdict(True, 0.1, "of another reference", reference="sdpa"),
        verdict(True, 0.2, "of another rule", rule="rms z"),
    ]
    assert [v.note for v in worst(found)] == [
        "the closest",
        "of another tensor",
        "of another reference",
        "of another rule",
    ]
    broken = [verdict(False, 2.0, "d"), verdict(False, 3.0, "the worst"), verdict(True, 0.99, "held")]
    assert [v.note for v in worst([*found[:3], *broken, *found[:3]])] == ["the worst"]


def test_what_has_no_number_is_the_worst_if_it_failed_and_the_best_if_not() -> None:
    assert worst([verdict(False, 9.0, "a"), verdict(False, math.nan, "b")])[0].note == "b"
    assert worst([verdict(False, 0.5, "a"), verdict(True, 0.9, "b")])[0].note == "a"
    assert worst([verdict(True, None, "a"), verdict(True, 0.1, "b")])[0].note == "b"


def test_a_summary_is_the_largest_and_the_mean_square_over_what_was_judged() -> None:
    found = total(
        [
            TensorSummary(elements=40, judged=30, budget_use=0.5, max_z=3.0, rms_z=1.0),
            TensorSummary(elements=20, judged=10, budget_use=0.7, max_z=2.0, rms_z=2.0, fa2=1.5),
            TensorSummary(elements=8, judged=0, budget_use=0.0, max_z=0.0, rms_z=0.0),
        ]
    )
    assert found == TensorSummary(68, 40, 0.7, 3.0, math.sqrt(70 / 40), 1.5)
    assert total([]) == TensorSummary(0, 0, 0.0, 0.0, 0.0)
    nan = total([TensorSummary(1, 1, math.nan, 1.0, 1.0), TensorSummary(1, 1, 0.5, 1.0, 1.0)]).budget_use
    assert nan is not None and math.isnan(nan)


# ---------------------------------------------------------------- rows past the last sequence


def results() -> dict[str, np.ndarray]:
    """Of CASE, right past the last sequence."""
    found = {
        "out": np.ones((1, 4, 16, 16)),
        "lse": np.ones((1, 4, 16)),
        "dq": np.ones((1, 4, 16, 24)),
        "dk": np.ones((1, 2, 26, 24)),
        "dv": np.ones((1, 2, 26, 16)),
    }
    for name, x in found.items():
        x[:, :, 23 if name in ("dk", "dv") else 14 :] = -math.inf if name == "lse" else 0.0
    return found


def test_right_rows_past_the_last_sequence_hold() -> None:
    found = past_rows(CASE, results())
    assert [(v.tensor, v.reference, v.rule, v.held) for v in found] == [
        (name, "contract", f"rows past the last sequence: {'-inf' if name == 'lse' else '0'}", True)
        for name in results()
    ]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [(name, wrong) for name in ("out", "dq", "dk", "dv") for wrong in (-0.0, math.nan, 2.0**-149)]
    + [("lse", wrong) for wrong in (0.0, math.inf, math.nan, -1e38)],
)
def test_a_wrong_one_is_red_with_its_place(name: str, wrong: float) -> None:
    found = results()
    last = {"dk": 25, "dv": 25}.get(name, 15)
    found[name][0, 1, last, ...] = wrong
    (broken,) = (v for v in past_rows(CASE, found) if not v.held)
    assert broken.tensor == name
    assert broken.where == ((1, last) if name == "lse" else (last, 1, 0))
    assert broken.statistic == found[name][0, 1, last].size


def test_where_there_are_none_there_is_no_such_rule() -> None:
    none, of_keys = (past_rows(replace(CASE, past=past), results()) for past in ((0, 0), (0, 1)))
    assert none == []
    assert [v.tensor for v in of_keys] == ["dk", "dv"]


# ---------------------------------------------------------------- compared


def alone(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out (Hq, Sq, Dv) and lse (Hq, Sq) of one sequence; every query sees a key."""
    group = q.shape[0] // k.shape[0]
    k, v = (x.float().repeat_interleave(group, 0) for x in (k, v))
    s = scale * q.float() @ k.mT
    if causal:
        visible = torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[2] - s.shape[1])
        s = s.masked_fill(~visible, -math.inf)
    return (s.softmax(-1) @ v).to(q.dtype), s.logsumexp(-1)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_q: int, max_k: int, *,
    causal: bool, scale: float | None, return_lse: bool,
    each: Callable[[list[tuple[Tensor, Tensor]]], list[tuple[Tensor, Tensor]]] = list, past: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Ragged attention by its definition.

    Args:
        each: changes the results of the sequences.
        past: what is added to the results past the last of them.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    ends = zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True)
    begin = next(ends)
    found = []
    for end in ends:
        of_q, of_k = (slice(b, e) for b, e in zip(begin, end, strict=True))
        heads_first = (x.transpose(0, 1) for x in (q[of_q], k[of_k], v[of_k]))
        found.append(alone(*heads_first, causal=causal, scale=scale))
        begin = end
    rest = q.shape[0] - begin[0]
    connected = sum(x[:0].float().sum() for x in (q, k, v))  # 0, and differentiable without any sequence
    zeros = q.new_zeros(q.shape[1], rest, v.shape[2]) + past + connected.to(q.dtype)  # type: ignore[union-attr]
    nothing = torch.full((q.shape[1], rest), -math.inf) + past + connected
    found = [*each(found), (zeros, nothing)]
    out, lse = (torch.cat(x, 1) for x in zip(*found, strict=True))
    return out.transpose(0, 1), lse


CLAIMS = Claims(
    dtypes=DTYPES, equal_dims=False, gqa=True, cross_lengths=True, empty=True, backward=True, lse=True,
    lse_grad=True, strided=True, ragged=True,
)  # fmt: skip


def compared(case: Case, **changes: Any) -> Record:
    """The record of `varlen`, changed by its last two arguments."""
    function: Any = varlen

    def dense(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a ragged batch went to the function for dense ones")

    return compare(
        case,
        Implementation("mine", dense, CLAIMS, lambda device: "cpu", None, partial(function, **changes)),
        CPU,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("lengths", "past"),
    [
        (LENGTHS, (2, 3)),
        (LENGTHS, (0, 0)),
        (((17, 33), (17, 33), (1, 1), (0, 9)), (0, 1)),
        (((0, 5), (0, 1)), (1, 0)),
        (((0, 0), (0, 0)), (0, 0)),
        (((0, 0),), (4, 4)),
        ((), (0, 0)),
        ((), (3, 2)),
        (((1, 1),) * 64, (0, 0)),
    ],
    ids=str,
)
def test_a_right_implementation_is_held(
    lengths: tuple[tuple[int, int], ...], past: tuple[int, int], causal: bool, dtype: str
) -> None:
    record = compared(replace(CASE, lengths=lengths, past=past, causal=causal, dtype=dtype))
    assert record.status == "held", explain(record)
    assert list(record.tensors) == ["out", "lse", "dq", "dk", "dv"]
    rows = {"out": 4 * 16, "lse": 4, "dq": 4 * 24, "dk": 2 * 24, "dv": 2 * 16}
    for name, size in rows.items():
        of_keys = name in ("dk", "dv")
        assert record.tensors[name].elements == size * sum(pair[of_keys] for pair in lengths)
    rules = [(v.tensor, v.reference, v.rule) for v in record.verdicts]
    assert len(set(rules)) == len(rules)


def test_one_sequence_is_judged_as_the_dense_case_is() -> None:
    case = replace(CASE, lengths=((17, 33),), past=(0, 0))

    def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = alone(q[0], k[0], v[0], causal=options["causal"], scale=q.shape[-1] ** -0.5)
        return out[None], lse[None]

    (sequence,) = case.sequences()
    ragged = compared(case)
    other = compare(sequence, Implementation("mine", dense, CLAIMS, lambda device: "cpu", varlen=varlen), CPU)
    numbers = [
        [
            (v.tensor, v.reference, v.rule, v.statistic, v.limit)
            for v in r.verdicts
            if v.reference != "contract"
        ]
        for r in (ragged, other)
    ]
    assert numbers[0] == numbers[1]
    for name, summary in ragged.tensors.items():
        assert summary.rms_z == pytest.approx(other.tensors[name].rms_z, rel=1e-12)


def broken(record: Record) -> list[Verdict]:
    assert record.status == "broken"
    return [v for v in record.verdicts if not v.held]


Found = list[tuple[Tensor, Tensor]]


@pytest.mark.parametrize("past", [math.nan, 1.0])
def test_a_wrong_row_past_the_last_sequence_is_red(past: float) -> None:
    case = replace(CASE, past=(2, 0), dtype="float32")
    found = broken(compared(case, past=past))
    assert {(v.tensor, v.rule) for v in found} >= {("out", "rows past the last sequence: 0")}
    (of_out,) = (v for v in found if v.tensor == "out" and "past" in v.rule)
    assert of_out.where == (14, 0, 0)


def test_two_sequences_exchanged_are_red_and_no_other() -> None:
    def exchanged(found: Found) -> Found:
        return [found[0], found[2], found[1], *found[3:]]

    case = replace(CASE, lengths=((5, 7), (9, 6), (9, 6), (9, 6)), past=(0, 0))
    found = broken(compared(case, each=exchanged))
    assert {v.tensor for v in found} == {"out", "lse", "dq", "dk", "dv"}
    for v in found:
        if v.where is not None and v.reference == "oracle":
            row = v.where[1] if v.tensor == "lse" else v.where[0]
            first, last = (7, 19) if v.tensor in ("dk", "dv") else (5, 23)
            assert first <= row < last
            assert v.note.startswith(("sequence 1: 9 queries on 6 keys", "sequence 2: 9 queries on 6 keys"))


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_of_one_sequence_that_lean_to_one_side_are_red(dtype: str, number: int) -> None:
    """By about a step of the dtype each, towards zero, as if they were truncated."""
    factor = 1 - torch.finfo(getattr(torch, dtype)).eps

    def leaning(found: Found) -> Found:
        out, lse = found[number]
        return [*found[:number], (out * factor, lse), *found[number + 1 :]]

    lengths = ((17, 19), (33, 40), (20, 21))
    case = replace(CASE, lengths=lengths, past=(1, 1), dtype=dtype, grad="none", d_lse=False)
    assert compared(case).status == "held"
    found = broken(compared(case, each=leaning))
    note = f"sequence {number}: {lengths[number][0]} queries on {lengths[number][1]} keys"
    assert "bias" in {v.rule for v in found}
    for v in found:
        assert (v.tensor, v.note.split(";")[0]) == ("out", note)


def test_what_cannot_be_judged_in_any_sequence_is_no_power() -> None:
    case = replace(CASE, scale=1e10, values="normal", grad="none", d_lse=False, past=(0, 0))
    assert compared(case).status == "no power"
    some = replace(case, lengths=(*LENGTHS, (1, 1)))
    record = compared(some)
    assert record.status == "held", explain(record)
    assert 0 < record.tensors["out"].judged < record.tensors["out"].elements


def test_a_red_one_is_explained_by_sequence_and_replayed_by_its_id() -> None:
    record = compared(CASE, each=lambda found: [(2 * out, lse) for out, lse in found])
    text = explain(record)
    assert "ragged batch of 5, 4 query heads on 2 KV heads, queries on keys by sequence: 5 on 7, " in text
    assert "sequence 2: 4 queries on 6 keys; got " in text or "sequence 0: 5 queries on 7 keys; got " in text
    assert record.replay.endswith(f" --case {CASE.id}")


def test_a_ragged_case_is_not_claimed_by_default() -> None:
    implementation = Implementation("mine", lambda: None, Claims(), lambda device: "cpu")
    record = compare(Case(lengths=((3, 3),), layout="bshd", grad="none"), implementation, CPU)
    assert (record.status, record.reason) == ("not claimed", "ragged batches")
