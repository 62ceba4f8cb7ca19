"""Diagnoses that say where: tiles, their first and last rows, what the mask hides, columns; and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from reference.emulation import Tiles
from tests.cases import Case
from tests.meta.test_diagnosis import record_of

TILES = Tiles((16, 16), (16, 16), (16, 16))
CASE = Case(heads_q=4, heads_kv=2, len_q=37, len_k=40, dim=16, dim_v=24, grad="none")


def elsewhere(of: Callable[[Tensor], Tensor], tensor: int = 0) -> Callable[..., Any]:
    """The right result, and far off at the rows of a tensor (out 0, lse 1) that are chosen by number."""

    def spoil(right: Any, *tensors: Tensor, **options: Any) -> Any:
        results = right(*tensors, **options)
        x = results[tensor]
        rows = of(torch.arange(x.shape[2]))
        spoiled = x + torch.where(rows, 3.0, 0.0).to(x).view(-1, *(1,) * (x.ndim - 3))
        return tuple(spoiled if n == tensor else y for n, y in enumerate(results))

    return spoil


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (lambda i: i >= 32, "the last tile of 16 rows, which is not full (rows 32 to 36)"),
        (lambda i: i < 16, "the first tile of 16 rows"),
        (lambda i: i % 16 == 0, "the first row of each tile of 16"),
        (lambda i: i % 16 == 15, "the last row of each tile of 16"),
        (lambda i: i // 16 == 1, "every other tile of 16 rows, from the second on"),
        (lambda i: (i > 4) & (i < 9), "rows 5 to 8 of 37"),
    ],
    ids=["last tile", "first tile", "first rows", "last rows", "every other tile", "some rows"],
)
def test_rows_are_named_by_their_place_in_the_tiles(rows: Callable[[Tensor], Tensor], says: str) -> None:
    for tensor, name in enumerate(("out", "lse")):
        record = record_of(elsewhere(rows, tensor), CASE, TILES)
        assert record.diagnosis == [f"certain: {name} is wrong only in {says}"]


def test_without_known_tiles_usual_ones_are_tried() -> None:
    (says,) = record_of(elsewhere(lambda i: i % 32 == 0), replace(CASE, len_q=100)).diagnosis
    assert says == "certain: out is wrong only in the first row of each tile of 32"


def test_a_place_that_is_not_wrong_throughout_is_likely() -> None:
    def spoil(right: Any, *tensors: Tensor, **options: Any) -> Any:
        out, lse = right(*tensors, **options)
        out[:, :2, 32:] += 3
        return out, lse

    (says,) = record_of(spoil, CASE, TILES).diagnosis
    assert says.startswith("likely: out is wrong only in the last tile of 16 rows")


def test_rows_that_see_no_key_are_told() -> None:
    case = replace(CASE, len_q=50, causal=True)
    (says,) = record_of(elsewhere(lambda i: i < 10), case, TILES).diagnosis
    assert says == "certain: out is wrong only in rows that see no key"


def test_columns_are_told() -> None:
    def spoil(right: Any, *tensors: Tensor, **options: Any) -> Any:
        out, lse = right(*tensors, **options)
        out[..., 16:] += 3
        return out, lse

    assert record_of(spoil, CASE, TILES).diagnosis == ["certain: out is wrong only in columns 16 to 23 of 24"]


def test_a_kv_head_is_told() -> None:
    class Spoiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, k: Tensor) -> Tensor:
            return k.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            spoiled = gradients[0].clone()
            spoiled[:, 1, :, ::2] += 5
            return spoiled

    def spoil(right: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return right(q, Spoiled.apply(k), v, **options)

    record = record_of(spoil, replace(CASE, grad="qkv"), TILES)
    assert record.diagnosis == ["certain: KV head 0 is right, KV head 1 is wrong"]


# ---------------------------------------------------------------- memory


def test_rows_that_are_not_written_are_told() -> None:
    def spoil(right: Any, *tensors: Tensor, **options: Any) -> Any:
        out, lse = right(*tensors, **options)
        mine = torch.empty(out.shape, dtype=out.dtype)
        mine[:, :, :32] = out[:, :, :32]
        return mine, lse

    said = record_of(spoil, CASE, TILES, hostile=True).diagnosis
    assert any(s.startswith("likely: out has rows that are not written") for s in said)
    assert any(s.startswith("certain: out is wrong only in the last tile of 16 rows") for s in said)


def test_what_lies_beside_the_tensors_is_told() -> None:
    def spoil(right: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        out, lse = right(q, k, v, **options)
        behind = torch.as_strided(v, (1,), (1,), v.storage_offset() + v.numel())
        return out + 0 * behind.detach(), lse

    said = record_of(spoil, CASE, TILES, hostile=True).diagnosis
    assert any(s.startswith("certain: out is right in plain memory, and wrong amid NaN") for s in said)


def test_zeros_are_told() -> None:
    def spoil(right: Any, *tensors: Tensor, **options: Any) -> Any:
        out, lse = right(*tensors, **options)
        out[:, :, ::16] = 0
        return out, lse

    assert record_of(spoil, CASE, TILES).diagnosis == [
        "certain: out is 0 wherever it is wrong",
        "certain: out is wrong only in the first row of each tile of 16",
    ]


# ---------------------------------------------------------------- what cannot be told is not told


def without_scale_in_dk(right: Any, *tensors: Tensor, **options: Any) -> Any:
    q, k, v = tensors
    out, lse = right(q, _Times.apply(k, q.shape[3] ** 0.5), v, **options)
    return out, lse


class _Times(torch.autograd.Function):
    """The same forward, and the gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_heads_are_compared_in_tensors_that_are_wrong_only(dtype: str) -> None:
    """A quiet head beside a loud one; dk is wrong in both, and nothing else is."""
    case = Case(heads_q=2, heads_kv=2, len_q=129, len_k=129, dim=32, dim_v=32, dtype=dtype, values="loud")
    says = record_of(without_scale_in_dk, case).diagnosis
    assert "certain: dk is off by a constant factor of 5.657: 1 / scale" in says
    assert not any("right" in sentence or "only" in sentence for sentence in says)


def test_a_head_of_which_nothing_can_be_told_is_not_called_right() -> None:
    """The last key is left out in every head; where bounds are wide that is not seen in all of them."""

    def spoil(right: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return right(q, k[:, :, :-1], v[:, :, :-1], **options)

    for length, seed in ((65, 0), (129, 0), (129, 1)):
        case = Case(
            heads_q=2, heads_kv=2, len_q=length, len_k=length, dim=32, dim_v=32, values="very-negative",
            grad="none", seed=seed,
        )  # fmt: skip
        says = record_of(spoil, case).diagnosis
        assert not any(sentence.startswith("certain: head") for sentence in says), says


def test_where_bounds_are_wide_a_hypothesis_has_to_fit_closely() -> None:
    """Scores near -60000: scale taken twice is no change of sign, though that is within the bounds."""

    def twice(right: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        scale = options.pop("scale") or q.shape[3] ** -0.5
        return right(q, k, v, scale=scale / q.shape[3] ** 0.5, **options)

    case = Case(
        heads_q=2, heads_kv=2, len_q=65, len_k=65, dim=64, dim_v=64, values="very-negative", grad="none"
    )
    assert not any("opposite sign" in sentence for sentence in record_of(twice, case).diagnosis)
    plain = record_of(twice, replace(case, values="normal")).diagnosis
    assert "certain: out, lse are as if the scores were multiplied by scale twice" in plain
