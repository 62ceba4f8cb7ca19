"""Layouts: the values are right, they lie as the name says, and everything beside them is NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cases import DTYPES, LAYOUTS
from tests.layouts import EXPANDED, place

CPU = torch.device("cpu")
B, H, S, D = 2, 3, 5, 4

# strides of (B, H, S, D) and of (B, H, S); where the first element is
STRIDES = {
    "bhsd": ((60, 20, 4, 1), (15, 5, 1), (0, 0)),
    "bshd": ((60, 4, 12, 1), (15, 1, 3), (0, 0)),
    "sbhd": ((12, 4, 24, 1), (3, 1, 6), (0, 0)),
    "packed": ((180, 4, 36, 1), (45, 1, 9), (12, 3)),
    "sliced": ((216, 72, 9, 1), (24, 8, 1), (21, 2)),
    "strided": ((120, 40, 8, 2), (30, 10, 2), (0, 0)),
    "offset": ((60, 20, 4, 1), (15, 5, 1), (1, 1)),
    "expanded": ((20, 0, 4, 1), (15, 5, 1), (0, 0)),
}
GAPS = {"packed", "sliced", "strided", "offset"}


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


def equal_heads(x: Tensor) -> Tensor:
    return x[:, :1].expand(x.shape).contiguous()


def test_every_layout_is_known_here() -> None:
    assert set(STRIDES) == set(LAYOUTS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_those_given(layout: str, dtype: str) -> None:
    x = equal_heads(numbered(B, H, S, D, dtype=getattr(torch, dtype)))
    for name in ("q", "k", "v", "d_out"):
        assert torch.equal(place(name, x, layout, CPU), x)
    d_lse = numbered(B, H, S)
    assert torch.equal(place("d_lse", d_lse, layout, CPU), d_lse)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_as_named(layout: str) -> None:
    of_four, of_three, (offset, offset_of_three) = STRIDES[layout]
    k = place("k", numbered(B, H, S, D), layout, CPU)
    assert (k.stride(), k.storage_offset()) == (of_four, offset)
    d_lse = place("d_lse", numbered(B, H, S), layout, CPU)
    assert (d_lse.stride(), d_lse.storage_offset()) == (of_three, offset_of_three)


@pytest.mark.parametrize("name", ["q", "k", "v", "d_out", "d_lse"])
def test_only_what_may_repeat_over_the_heads_is_expanded(name: str) -> None:
    x = numbered(B, H, S) if name == "d_lse" else numbered(B, H, S, D)
    assert (
        (place(name, x, "expanded", CPU).stride(1) == 0)
        == (name in {"k", "v", "d_out"})
        == (name in EXPANDED)
    )


@pytest.mark.parametrize("shape", [(B, H, S, D), (B, H, S)], ids=["4-dimensions", "3-dimensions"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_beside_the_values_is_nan(layout: str, shape: tuple[int, ...]) -> None:
    view = place("q", numbered(*shape), layout, CPU)
    memory = torch.empty(0).set_(view.untyped_storage())
    places = torch.arange(len(memory)).as_strided(view.shape, view.stride(), view.storage_offset())
    beside = torch.ones(len(memory), dtype=torch.bool)
    beside[places.flatten()] = False
    assert beside.any() == (layout in GAPS)
    assert memory[beside].isnan().all()
    assert memory[~beside].isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_on_the_device_asked_for(layout: str) -> None:
    view = place("k", numbered(B, H, S, D), layout, torch.device("meta"))
    assert view.device.type == "meta"
    assert view.stride() == STRIDES[layout][0]


@pytest.mark.parametrize("shape", [(0, H, S, D), (B, H, 0, D), (0, H, 0, D), (0, H, S), (B, H, 0)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_can_be_placed_too(layout: str, shape: tuple[int, ...]) -> None:
    view = place("k" if len(shape) == 4 else "d_lse", numbered(*shape), layout, CPU)
    assert view.shape == shape
