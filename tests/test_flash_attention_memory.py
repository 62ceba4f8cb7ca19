"""Where tensors lie changes no bit, and what lies beside them is neither read nor written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import flash_attention

from .calls import assert_same_bits, attend, bits, every, inputs_of, with_exact_delta
from .cases import LAYOUTS
from .fences import fenced
from .layouts import place

# ---------------------------------------------------------------- layouts

DIMS = [(64, 64), (40, 24), (33, 17)]
"""Rows that can be read 16 bytes at a time and fill a tile; that can and do not; that cannot."""


@pytest.mark.parametrize("dims", DIMS, ids=lambda dims: f"d{dims[0]}x{dims[1]}")
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "odd"])
def test_any_layout_gives_the_bits_of_the_contiguous_one(
    layout: str, dims: tuple[int, int], device: torch.device
) -> None:
    # several tiles of queries, of keys, or neither: what it costs in the interpreter adds up
    lengths = {(64, 64): {"len_k": 7}, (40, 24): {"len_q": 5}, (33, 17): {"len_q": 5, "len_k": 7}}[dims]
    x = inputs_of(device, batch=2, heads_kv=2, dim=dims[0], dim_v=dims[1], layout=layout, **lengths)
    x = with_exact_delta(x)
    placed = every(x, lambda name, t: place(name, t.cpu(), layout, device))
    assert_same_bits(attend(placed), attend(x))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_nan_on_all_sides_reaches_no_result(causal: bool, dtype: str, device: torch.device) -> None:
    x = inputs_of(device, dtype=dtype, dim=40)
    placed = every(x, lambda name, t: place(name, t.cpu(), "bhsd", device))
    assert_same_bits(attend(placed, causal=causal), attend(x, causal=causal))


@pytest.mark.parametrize("lengths", [{}, {"len_q": 1, "len_k": 1}], ids=["two tiles", "one row"])
def test_strides_of_dimensions_of_size_one_do_not_matter(
    lengths: dict[str, int], device: torch.device
) -> None:
    x = inputs_of(device, heads_q=1, **lengths)
    placed = every(x, lambda name, t: place(name, t.cpu(), "odd", device))
    assert placed.q.stride(1) != x.q.stride(1)
    assert_same_bits(attend(placed), attend(x))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_pending_negation_is_carried_out(device: torch.device) -> None:
    x = with_exact_delta(inputs_of(device))

    def negated(_: str, t: Tensor) -> Tensor:
        lazy = torch.complex(torch.zeros_like(t), -t).conj().imag
        assert lazy.is_neg()  # the memory holds -t
        return lazy

    assert_same_bits(attend(every(x, negated)), attend(x))


# ---------------------------------------------------------------- layouts of the gradients alone


def test_a_sum_sends_back_an_expanded_gradient(device: torch.device) -> None:
    """D2."""
    x = with_exact_delta(inputs_of(device))
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    out, lse = flash_attention(*leaves, return_lse=True)
    found = torch.autograd.grad((out.sum(), lse.sum()), leaves)
    assert x.d_out is not None and x.d_lse is not None
    ones = replace(x, d_out=torch.ones_like(x.d_out), d_lse=torch.ones_like(x.d_lse))
    expected = attend(ones)
    assert_same_bits(dict(zip(("dq", "dk", "dv"), found, strict=True)),
                     {name: expected[name] for name in ("dq", "dk", "dv")})  # fmt: skip


@pytest.mark.parametrize("gradient", ["d_out", "d_lse"])
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "sliced", "strided", "offset"])
def test_a_gradient_in_any_layout(layout: str, gradient: str, device: torch.device) -> None:
    """D1."""
    x = with_exact_delta(inputs_of(device, heads_kv=2, batch=2, len_q=5, len_k=7))
    placed = place(gradient, getattr(x, gradient).cpu(), layout, device)
    assert_same_bits(attend(replace(x, **{gradient: placed})), attend(x))


# ---------------------------------------------------------------- fresh memory


ALLOCATING: dict[str, tuple[dict[str, Any], bool]] = {
    "two tiles": ({}, False),
    "two tiles, causal": ({}, True),
    "rows that see no key": ({"len_k": 7}, True),
    "Dv wider than D": ({"dim": 24, "dim_v": 40, "batch": 2}, False),
    "Dv narrower than D": ({"dim": 72, "dim_v": 17}, False),
    "a group of five heads": ({"heads_q": 5, "len_q": 3, "len_k": 5}, False),
    "float32": ({"dtype": "float32"}, False),
    "bfloat16": ({"dtype": "bfloat16"}, False),
    "no queries": ({"len_q": 0}, False),
    "no keys": ({"len_k": 0}, False),
    "no batch": ({"batch": 0}, False),
}


@pytest.mark.parametrize("name", ALLOCATING)
def test_outputs_are_written_whole_and_nothing_beside_them(name: str, device: torch.device) -> None:
    """A4, A5, A10."""
    changes, causal = ALLOCATING[name]
    x = inputs_of(device, **changes)
    with fenced(device) as fences:
        found = attend(x, causal=causal)

    assert all(map(fences.holds, found.values())), "an output was allocated some other way"
    assert fences.violations(found) == []
    assert not any(t.isnan().any() for t in found.values())
    assert_same_bits(found, attend(x, causal=causal))


@pytest.fixture
def uninitialised_is_nan() -> Iterator[None]:
    """PyTorch's own poison: its deterministic mode fills all fresh memory with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("uninitialised_is_nan")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_empty_inputs(causal: bool, device: torch.device) -> None:
    assert torch.empty(3, device=device).isnan().all()  # else this shows little

    no_queries = attend(inputs_of(device, len_q=0), causal=causal)
    assert no_queries["out"].numel() == no_queries["lse"].numel() == no_queries["dq"].numel() == 0
    for name in ("dk", "dv"):
        assert no_queries[name].numel() and not bits(no_queries[name]).any(), name

    no_keys = attend(inputs_of(device, len_k=0), causal=causal)
    assert no_keys["dk"].numel() == no_keys["dv"].numel() == 0
    for name in ("out", "dq"):
        assert no_keys[name].numel() and not bits(no_keys[name]).any(), name
    assert no_keys["lse"].numel() and (no_keys["lse"] == -math.inf).all()

    x = inputs_of(device, batch=0)
    no_batch = attend(x, causal=causal)
    shapes = {name: tuple(t.shape) for name, t in no_batch.items()}
    expected = {"out": x.d_out, "lse": x.d_lse, "dq": x.q, "dk": x.k, "dv": x.v}
    assert shapes == {name: tuple(t.shape) for name, t in expected.items() if t is not None}


@pytest.mark.usefixtures("uninitialised_is_nan")
def test_deterministic_mode_of_pytorch_changes_nothing(device: torch.device) -> None:
    x = inputs_of(device, len_k=7)
    found = attend(x, causal=True)
    torch.use_deterministic_algorithms(False)
    assert_same_bits(found, attend(x, causal=True))
