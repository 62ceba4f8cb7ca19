"""Layouts: values are right, lie as the name says, and amid what was asked for; what changes is found."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import pytest
import torch
from torch import Tensor

from tests.cases import DTYPES, LAYOUTS
from tests.layouts import EXPANDED, GUARD, difference, own_places, place, whole_memory

CPU = torch.device("cpu")
B, H, S, D = 2, 3, 5, 4

# strides of (B, H, S, D) and of (B, H, S); where the first element is, past the guard
STRIDES = {
    "bhsd": ((60, 20, 4, 1), (15, 5, 1), (0, 0)),
    "bshd": ((60, 4, 12, 1), (15, 1, 3), (0, 0)),
    "sbhd": ((12, 4, 24, 1), (3, 1, 6), (0, 0)),
    "packed": ((180, 4, 36, 1), (45, 1, 9), (12, 3)),
    "sliced": ((216, 72, 9, 1), (24, 8, 1), (21, 2)),
    "strided": ((120, 40, 8, 2), (30, 10, 2), (0, 0)),
    "offset": ((60, 20, 4, 1), (15, 5, 1), (1, 1)),
    "expanded": ((20, 0, 4, 1), (15, 5, 1), (0, 0)),
    "gradient": ((60, 20, 4, 1), (15, 1, 3), (0, 0)),
    "odd": ((60, 20, 4, 1), (15, 5, 1), (0, 0)),
}
INPUTS = ("q", "k", "v", "d_out", "d_lse")


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
    assert (k.stride(), k.storage_offset()) == (of_four, GUARD + offset)
    d_lse = place("d_lse", numbered(B, H, S), layout, CPU)
    assert (d_lse.stride(), d_lse.storage_offset()) == (of_three, GUARD + offset_of_three)


@pytest.mark.parametrize("name", INPUTS)
def test_only_what_may_repeat_over_the_heads_is_expanded(name: str) -> None:
    x = numbered(B, H, S) if name == "d_lse" else numbered(B, H, S, D)
    assert (
        (place(name, x, "expanded", CPU).stride(1) == 0)
        == (name in {"k", "v", "d_out"})
        == (name in EXPANDED)
    )


@pytest.mark.parametrize("name", INPUTS)
def test_only_gradients_are_views_in_the_layout_that_is_about_them(name: str) -> None:
    x = numbered(B, H, S) if name == "d_lse" else numbered(B, H, S, D)
    assert place(name, x, "gradient", CPU).is_contiguous() == (name in "qkv")


def test_dimensions_of_size_one_have_odd_strides() -> None:
    assert place("q", numbered(1, 1, S, D), "odd", CPU).stride() == (1_000_003, 77, 4, 1)
    assert place("q", numbered(1, H, 1, 1), "odd", CPU).stride() == (1_000_003, 1, 5, 3)
    assert place("d_lse", numbered(1, 1, 1), "odd", CPU).stride() == (1_000_003, 77, 5)


@pytest.mark.parametrize("surroundings", [nan, inf, 0.0])
@pytest.mark.parametrize("shape", [(B, H, S, D), (B, H, S), (1, 1, S, 1), (0, H, S)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_beside_the_values_is_as_asked(
    layout: str, shape: tuple[int, ...], surroundings: float
) -> None:
    view = place("q", numbered(*shape), layout, CPU, surroundings)
    memory = whole_memory(view).view(torch.float32)
    places = torch.arange(len(memory)).as_strided(view.shape, view.stride(), view.storage_offset())
    beside = torch.ones(len(memory), dtype=torch.bool)
    beside[places.flatten()] = False
    assert torch.equal(own_places(view), ~beside)
    assert beside[:GUARD].all() and beside[-GUARD:].all()
    assert memory[beside].equal(torch.full_like(memory[beside], surroundings)) or (
        surroundings != surroundings and memory[beside].isnan().all()
    )
    assert memory[~beside].gt(0).all()


@pytest.mark.parametrize("dtype", [*DTYPES, "int32", "int64", "uint8"])
def test_memory_is_as_aligned_as_fresh_memory(dtype: str) -> None:
    """Multiples of 512 bytes, as PyTorch gives them out on a GPU, but for layouts that begin further on."""
    x = numbered(B, H, S, D, dtype=getattr(torch, dtype))
    aligned = {layout for layout in LAYOUTS
               if place("q", x, layout, CPU, 1).storage_offset() * x.element_size() % 512 == 0}  # fmt: skip
    assert aligned == set(LAYOUTS) - {"offset", "sliced", "packed"}


@pytest.mark.parametrize("surroundings", [2**31 - 1, -(2**31)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_dimension_of_integers_has_no_layout(layout: str, surroundings: int) -> None:
    view = place("cu_seqlens_q", torch.tensor([0, 3, 7], dtype=torch.int32), layout, CPU, surroundings)
    assert view.dtype == torch.int32 and view.is_contiguous()
    memory = whole_memory(view).view(torch.int32)
    assert memory[GUARD:-GUARD].tolist() == [0, 3, 7]
    assert (memory[:GUARD] == surroundings).all() and (memory[-GUARD:] == surroundings).all()


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
    before = whole_memory(view).clone()
    assert difference(view, before) == ""
    whole_memory(view)[-1] = 1
    assert "after it" in difference(view, before)


# ---------------------------------------------------------------- what changed


def element(view: Tensor, past_first: int) -> Tensor:
    """One element of the memory that a view lies in."""
    return view.as_strided((1,), (1,), int(view.storage_offset()) + past_first)


LAST = B * H * S * D - 1
CHANGES: dict[str, tuple[str, Callable[[Tensor], object], str]] = {
    "its last element": (
        "bhsd", lambda x: x[1, 2, 4, 3].fill_(-1), "1 of its elements, the first at [1, 2, 4, 3]",
    ),
    "two elements of a transposed view": (
        "sbhd", lambda x: x[1, :2, 0, 2].fill_(-1), "2 of its elements, the first at [1, 0, 0, 2]",
    ),
    "memory shared by all heads": (
        "expanded", lambda x: x[0, 1, 2, 3].fill_(-1), "3 of its elements, the first at [0, 0, 2, 3]",
    ),
    "the element before it": (
        "bhsd", lambda x: element(x, -1).fill_(1), "1 element before it, the nearest 1 before its first",
    ),
    "the second element after it": (
        "bhsd", lambda x: element(x, LAST + 2).fill_(1), "1 element after it, the nearest 2 past its last",
    ),
    "the ends of its memory": (
        "bhsd",
        lambda x: (whole_memory(x)[0].fill_(1), whole_memory(x)[-1].fill_(1)),
        f"1 element before it, the nearest {GUARD} before its first;"
        f" 1 element after it, the nearest {GUARD} past its last",
    ),
    "a gap": (
        "strided", lambda x: element(x, 1).fill_(1), "1 element between its rows, the first 1 past its first",
    ),
    "a slot beside it": (
        "packed",
        lambda x: element(x, H * D).fill_(0),
        "1 element between its rows, the first 12 past its first",
    ),
    "a zero where minus zero was, and a gap": (
        "strided",
        lambda x: (x[0, 0, 0, 0].neg_(), element(x, 3).fill_(-0.0)),
        "1 of its elements, the first at [0, 0, 0, 0];"
        " 1 element between its rows, the first 3 past its first",
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_found_and_told_where(change: str, dtype: str) -> None:
    layout, commit, told = CHANGES[change]
    x = equal_heads(numbered(B, H, S, D, dtype=getattr(torch, dtype)))
    x[:, :, 0, 0] = 0
    view = place("k", x, layout, CPU)
    before = whole_memory(view).clone()
    assert difference(view, before) == ""
    commit(view)
    assert difference(view, before) == told
