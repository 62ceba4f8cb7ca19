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
from .layouts import place

GUARD = 2**14
"""NaNs before and after a fenced tensor: more than a tile of rows."""


def fenced(x: Tensor) -> Tensor:
    """The same values, contiguous and as aligned as before, in the middle of NaN."""
    buffer = torch.full((x.numel() + 2 * GUARD,), math.nan, dtype=x.dtype, device=x.device)
    view = buffer[GUARD : GUARD + x.numel()].view(x.shape)
    view.copy_(x)
    return view


# ---------------------------------------------------------------- layouts

DIMS = [(64, 64), (40, 24), (33, 17)]
"""Rows that can be read 16 bytes at a time and fill a tile; that can and do not; that cannot."""


@pytest.mark.parametrize("dims", DIMS, ids=lambda dims: f"d{dims[0]}x{dims[1]}")
@pytest.mark.parametrize("layout", LAYOUTS)
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
    assert_same_bits(attend(every(x, lambda _, t: fenced(t)), causal=causal), attend(x, causal=causal))


@pytest.mark.parametrize("lengths", [{}, {"len_q": 1, "len_k": 1}], ids=["two tiles", "one row"])
def test_strides_of_dimensions_of_size_one_do_not_matter(
    lengths: dict[str, int], device: torch.device
) -> None:
    x = inputs_of(device, heads_q=1, **lengths)

    def with_odd_strides(_: str, t: Tensor) -> Tensor:
        odd = (1_000_003, 77, 5, 3)
        strides = [odd[i] if n == 1 else t.stride(i) for i, n in enumerate(t.shape)]
        return t.as_strided(t.shape, strides)

    assert_same_bits(attend(every(x, with_odd_strides)), attend(x))


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
    x = with_exact_delta(inputs_of(device, heads_kv=2, batch=2, len_q=5, len_k=7))
    placed = place(gradient, getattr(x, gradient).cpu(), layout, device)
    assert_same_bits(attend(replace(x, **{gradient: placed})), attend(x))


# ---------------------------------------------------------------- fresh memory


class Fences:
    """Every tensor that the launch code allocates: NaN at first, and fenced by NaN."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.buffers: list[tuple[Tensor, Tensor]] = []
        new_empty = Tensor.new_empty

        def fenced_new_empty(t: Tensor, size: Any, **options: Any) -> Tensor:
            if "device" in options:  # the interpreter's own
                return new_empty(t, size, **options)
            return self._new(t, size, options.get("dtype"))

        monkeypatch.setattr(Tensor, "new_empty", fenced_new_empty)
        monkeypatch.setattr(torch, "empty_like", lambda t: self._new(t, t.shape, t.dtype))

    def _new(self, like: Tensor, size: Any, dtype: torch.dtype | None) -> Tensor:
        count = math.prod(size)
        buffer = torch.full((count + 2 * GUARD,), math.nan, dtype=dtype or like.dtype, device=like.device)
        inside = buffer[GUARD : GUARD + count].view(size)
        self.buffers.append((buffer, inside))
        return inside

    def assert_intact(self) -> None:
        for buffer, inside in self.buffers:
            untouched = bits(torch.full_like(buffer[:GUARD], math.nan))
            around = {"before": buffer[:GUARD], "after": buffer[-GUARD:]}
            for side, guard in around.items():
                written = (bits(guard) != untouched).nonzero()
                assert not len(written), (
                    f"memory {side} a tensor of {tuple(inside.shape)}: {written.tolist()}"
                )


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
def test_outputs_are_written_whole_and_nothing_beside_them(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, causal = ALLOCATING[name]
    x = inputs_of(device, **changes)
    fences = Fences(monkeypatch)
    found = attend(x, causal=causal)
    monkeypatch.undo()

    inside = {view.data_ptr() for _, view in fences.buffers}
    assert all(t.data_ptr() in inside for t in found.values()), "an output was allocated some other way"
    fences.assert_intact()
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
