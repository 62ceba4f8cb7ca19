"""Execution of ragged batches: how they are handed over, and their faults with memory."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cases import LAYOUTS, Case
from tests.execution import UNCHANGED, Execution, run
from tests.implementations import Implementation
from tests.layouts import GUARD, whole_memory
from tests.meta.plain import (
    CPU,
    DETERMINISTIC,
    INFINITE,
    INPUTS,
    PLAIN,
    attention,
    beside,
    red,
)
from tests.values import make_inputs

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
