"""Pictures of where a broken comparison is wrong: the fault is where it was planted, and nothing else is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from reports import records
from reports.plots_of_errors import cells, headline, kinds
from reports.records import NONFINITE, ErrorMap, Record
from tests.cases import Case, parse_case
from tests.comparison import Prepared, compare
from tests.error_maps import MOST_COLUMNS, MOST_RECORDS, MOST_ROWS
from tests.implementations import Claims, Implementation
from tests.judge import deviation
from tests.meta.plain import CPU, attention, spoiled
from tests.session import Session

CASE = Case(batch=2, heads_q=4, heads_kv=4, len_q=40, len_k=40, dim=32, dim_v=32, grad="qkv", seed=3)


def of(spoil: Callable[[Tensor], Any], which: str = "out", case: Case = CASE) -> ErrorMap:
    """The map of the tensor that was spoiled; of no other is there one."""
    if which in ("out", "lse"):
        case = replace(case, grad="none")
    record = compare(case, spoiled(spoil, which), CPU, hostile=False)
    assert record.status == "broken"
    assert msgspec.json.decode(records.encode(record), type=Record).maps == record.maps
    (found,) = record.maps
    assert found.tensor == which
    return found


def test_a_comparison_that_holds_has_none() -> None:
    record = compare(CASE, spoiled(lambda x: None), CPU, hostile=False)
    assert (record.status, record.maps) == ("held", [])


def test_one_element_is_found_and_nothing_beside_it() -> None:
    found = of(lambda x: x[1, 2, 7, 5].add_(1))
    assert (found.entry, found.head, found.rows, found.columns) == (1, 2, (7, 7, 1), (5, 5, 1))
    assert found.first == found.worst == (1, 2, 7, 5)
    assert (found.wrong, found.elements, found.shape) == (1, 2 * 4 * 40 * 32, (2, 4, 40, 32))
    z = cells(found)
    assert z.shape == (40, 32)
    assert z[7, 5] > found.limit
    assert (np.abs(np.delete(z.ravel(), 7 * 32 + 5)) < found.limit).all()
    assert headline(found) == (
        "out of batch entry 1, head 2 is wrong in only query row 7, of 40; only column 5, of 32"
    )


def test_the_marginals_have_it_once_each() -> None:
    found = of(lambda x: x[1, 2, 7, 5].add_(1))
    for marginal, place in ((found.by_batch, 1), (found.by_head, 2), (found.by_row, 7)):
        over = [n for n, z in enumerate(marginal) if z is None or z > found.limit]
        assert over == [place]
        assert marginal[place] == pytest.approx(abs(found.worst_z or 0), rel=1e-3)


@pytest.mark.parametrize("which", ["dq", "dk", "dv"])
def test_rows_of_gradients_are_queries_or_keys(which: str) -> None:
    found = of(lambda x: x[0, 3, 32:].mul_(2), which)
    assert (found.rows, found.entry, found.head) == ((32, 39, 8), 0, 3)
    assert f"{'query' if which == 'dq' else 'key'} rows 32 to 39, of 40" in headline(found)


def test_of_the_lse_all_heads_are_shown() -> None:
    found = of(lambda x: x[0, 3, 8:16].add_(1), "lse")
    z = cells(found)
    assert z.shape == (40, 4)
    assert (np.argwhere(np.abs(z) > found.limit) == [(row, 3) for row in range(8, 16)]).all()
    assert found.worst is not None and len(found.worst) == 3
    assert headline(found).endswith("is wrong in query rows 8 to 15, of 40; only head 3, of 4")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_a_map_of_its_own(value: float) -> None:
    found = of(lambda x: x[1, 0, 9].fill_(value))
    those = kinds(found)
    assert those is not None
    assert (np.argwhere(those)[:, 0] == 9).all() and (
        those[9] == NONFINITE.index(str(value).replace("nan", "NaN"))
    ).all()
    assert np.isfinite(cells(found)).all()
    assert (found.worst_z, found.by_row[9], found.by_batch[1], found.by_head[0]) == (None,) * 4
    assert found.by_row[8] is not None
    assert (found.wrong, found.rows) == (32, (9, 9, 1))


def test_z_is_that_of_the_judge() -> None:
    case = replace(CASE, batch=1, heads_q=1, heads_kv=1, grad="none")
    seen: list[Tensor] = []

    def wrong(x: Tensor) -> None:
        x[0, 0, 3] *= 1.5
        seen.append(x)

    found = of(wrong, case=case)
    ((_, references),) = Prepared(case).parts
    x = seen[0].double().numpy()
    z = deviation(case, "out", x, references.problem.result(x)).z
    np.testing.assert_allclose(cells(found), z[0, 0], rtol=2e-3, atol=1e-3)


def test_a_large_tensor_has_a_small_map_in_which_nothing_is_lost() -> None:
    case = replace(
        CASE, batch=1, heads_q=1, heads_kv=1, len_q=700, len_k=700, dim=160, dim_v=160, grad="none"
    )
    found = of(lambda x: x[0, 0, 699, 159].add_(1), case=case)
    assert found.step == (8, 3)
    assert found.cells[0] <= MOST_ROWS and found.cells[1] <= MOST_COLUMNS
    assert np.argwhere(np.abs(cells(found)) > found.limit).tolist() == [[87, 53]]
    assert found.rows == (699, 699, 1)
    assert len(found.by_row) <= records.LONGEST
    assert len(records.encode(compare(case, spoiled(lambda x: x.mul_(2)), CPU, hostile=False))) < 60_000


def test_of_a_ragged_batch_the_worst_sequence_is_shown() -> None:
    case = parse_case(
        "b4_h2x2_r20x20+30x30+20x20+8x8_past0x0_d16x16_float16_full_scale=auto_normal_bshd_grad=none_nodlse_seed1"
    )

    def function(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *_: int, **options: Any) -> Any:
        parts = []
        for i in range(4):
            of_this = (t[cu_q[i] : cu_q[i + 1]].transpose(0, 1)[None] for t in (q, k, v))
            parts.append(attention(*of_this, **{**options, "return_lse": False})[0].transpose(0, 1))
        out = torch.cat(parts)
        out[50 + 12, 1] += 1  # row 12 of sequence 2
        return out

    claims = Claims(ragged=True)
    implementation = Implementation("mine.py:a", function, claims, lambda device: "cpu", varlen=function)
    record = compare(case, implementation, CPU, hostile=False)
    (found,) = record.maps
    assert (found.sequence, found.head, found.rows) == (2, 1, (12, 12, 1))
    assert found.first == (2, 1, 12, 0)
    assert [n for n, z in enumerate(found.by_batch) if z is None or z > found.limit] == [2]
    assert len(found.by_batch) == 4
    assert headline(found) == "out of sequence 2, head 1 is wrong in only query row 12, of 20"


def test_a_process_keeps_so_many_and_no_more(tmp_path: Any) -> None:
    session = Session("mine.py:attention", tmp_path / "records.jsonl")
    record = compare(CASE, spoiled(lambda x: x.mul_(2)), CPU, hostile=False)
    for _ in range(MOST_RECORDS + 3):
        session.write(record)
    found = records.read(session.part)
    assert [bool(r.maps) for r in found] == [True] * MOST_RECORDS + [False] * 3


def test_the_histogram_counts_every_element_once() -> None:
    spoil = spoiled(lambda x: x[0, 0, 0, :3].add_(1), "dv")
    record = compare(CASE, spoil, CPU, hostile=False)
    for name, summary in record.tensors.items():
        assert sum(summary.histogram) == summary.judged, name
    assert record.tensors["dv"].histogram[-2] == 3
    assert sum(record.tensors["dq"].histogram[i] for i in (0, -2)) == 0


def test_rows_that_are_wrong_throughout_are_counted_and_scattered_elements_are_not() -> None:
    case = replace(CASE, grad="none")
    stripes = of(lambda x: x[0, 0, ::2].add_(1), case=case)
    assert headline(stripes) == "out of batch entry 0, head 0 is wrong in 20 of the 40 query rows"
    few = of(lambda x: x[0, 0, ::8, ::5].add_(1), case=case)
    assert headline(few) == "out of batch entry 0, head 0 is wrong here and there"
