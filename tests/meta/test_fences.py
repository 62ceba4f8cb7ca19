"""Fences: what each way to allocate gives, what is left alone, what is found, and that nothing stays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.fences import INITIALISED, UNINITIALISED, fenced
from tests.layouts import GUARD, whole_memory

CPU = torch.device("cpu")
X = torch.arange(6.0).view(2, 3)

EMPTY: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(2, 3),
    "empty_like": lambda: torch.empty_like(X),
    "empty_strided": lambda: torch.empty_strided((2, 3), (1, 2)),
    "empty_permuted": lambda: torch.empty_permuted((2, 3), (1, 0)),
    "new_empty": lambda: X.new_empty((2, 3)),
    "new_empty_strided": lambda: X.new_empty_strided((2, 3), (3, 1)),
}
FILLED: dict[str, tuple[Callable[[], Tensor], float]] = {
    "zeros": (lambda: torch.zeros((2, 3)), 0),
    "zeros_like": (lambda: torch.zeros_like(X), 0),
    "ones": (lambda: torch.ones(2, 3), 1),
    "ones_like": (lambda: torch.ones_like(X), 1),
    "full": (lambda: torch.full((2, 3), 7.0), 7),
    "full_like": (lambda: torch.full_like(X, fill_value=-inf), -inf),
    "new_zeros": (lambda: X.new_zeros(2, 3), 0),
    "new_ones": (lambda: X.new_ones((2, 3)), 1),
    "new_full": (lambda: X.new_full((2, 3), 2.5), 2.5),
}


def test_every_function_is_tested() -> None:
    assert [name for names in UNINITIALISED.values() for name in names] == list(EMPTY)
    assert [name for names in INITIALISED.values() for name in names] == list(FILLED)


@pytest.mark.parametrize("poison", [nan, inf])
@pytest.mark.parametrize("name", EMPTY)
def test_fresh_memory_is_poisoned_and_fenced(name: str, poison: float) -> None:
    plain = EMPTY[name]()
    with fenced(CPU, poison) as fences:
        x = EMPTY[name]()
    assert (x.shape, x.stride(), x.dtype) == (plain.shape, plain.stride(), plain.dtype)
    assert fences.holds(x) and not fences.holds(plain)
    memory = whole_memory(x).view(torch.float32)
    assert len(memory) == 6 + 2 * GUARD and x.storage_offset() == GUARD
    assert memory.isnan().all() if poison != poison else (memory == poison).all()
    x.fill_(1)
    assert fences.violations() == []


@pytest.mark.parametrize("name", FILLED)
def test_filled_memory_is_filled_and_fenced(name: str) -> None:
    make, value = FILLED[name]
    with fenced(CPU) as fences:
        x = make()
    assert x.shape == (2, 3) and (x == value).all()
    memory = whole_memory(x).view(torch.float32)
    assert memory[:GUARD].isnan().all() and memory[-GUARD:].isnan().all() and len(memory) == 6 + 2 * GUARD
    assert fences.holds(x) and fences.violations() == []


@pytest.mark.parametrize("name", [*EMPTY, *FILLED])
def test_what_is_written_beside_is_found(name: str) -> None:
    with fenced(CPU) as fences:
        x = EMPTY[name]() if name in EMPTY else FILLED[name][0]()
        x.as_strided((2,), (1,), GUARD + 6).fill_(0)
        x.as_strided((1,), (1,), GUARD - 3).fill_(0)
    assert fences.violations() == [
        "float32 (2, 3): 1 element before it, the nearest 3 before its first;"
        " 2 elements after it, the nearest 1 past its last"
    ]
    assert fences.violations({"y": X, "out": x, "lse": None})[0].startswith("out, float32 (2, 3): 1 ")


@pytest.mark.parametrize("poison", [nan, inf])
def test_poison_of_other_bits_is_found(poison: float) -> None:
    with fenced(CPU, poison) as fences:
        x = torch.zeros(4)
        x.as_strided((1,), (1,), GUARD + 4).neg_()
    assert len(fences.violations()) == 1


def test_gaps_between_rows_are_guarded_too() -> None:
    with fenced(CPU) as fences:
        x = torch.empty_strided((2, 3), (5, 1))
        x.fill_(0)
        assert fences.violations() == []
        x.as_strided((1,), (1,), GUARD + 3).fill_(0)
    assert fences.violations() == ["float32 (2, 3): 1 element between its rows, the first 3 past its first"]


DTYPES: dict[torch.dtype, Any] = {
    torch.float16: nan, torch.bfloat16: nan, torch.float64: nan, torch.complex64: nan, torch.float8_e5m2: nan,
    torch.int64: 2**31 - 1, torch.int32: 2**31 - 1, torch.int16: 2**15 - 1, torch.uint8: 255,
    torch.bool: True,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_has_its_poison_and_its_alignment(dtype: torch.dtype) -> None:
    with fenced(CPU) as fences:
        x = torch.empty(3, dtype=dtype)
    values = (x.float() if dtype == torch.float8_e5m2 else x).tolist()
    assert all(
        value == DTYPES[dtype] or (value != value and DTYPES[dtype] != DTYPES[dtype]) for value in values
    )
    assert x.storage_offset() * x.element_size() % 512 == 0
    assert fences.violations() == []
    memory = whole_memory(x)
    memory[-1] ^= 1
    assert len(fences.violations()) == 1


def test_integers_have_a_poison_of_their_own() -> None:
    with fenced(CPU, inf, -(2**31)):
        assert torch.empty(1, dtype=torch.int32).item() == -(2**31)
        assert torch.empty(1, dtype=torch.int64).item() == -(2**31)
        assert torch.empty(1, dtype=torch.int8).item() == -128
        assert torch.empty(1, dtype=torch.uint8).item() == 0


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3), ()], ids=str)
def test_any_shape_can_be_fenced(shape: tuple[int, ...]) -> None:
    with fenced(CPU) as fences:
        x = torch.zeros(shape)
        x += 1
        assert fences.violations() == []
        whole_memory(x)[0] = 1
    assert len(fences.violations()) == 1


def test_to_autograd_it_is_fresh_memory() -> None:
    with fenced(CPU):
        x = torch.zeros(3, requires_grad=True)
        y = torch.empty(3)
        with torch.inference_mode():
            assert torch.empty(3).is_inference()
    assert x.is_leaf and x.requires_grad and not x._is_view()
    assert not y.requires_grad and not y._is_view()
    (x * 2).sum().backward()
    assert x.grad is not None and (x.grad == 2).all()


@triton.jit
def copy_whole_tiles(x, y, N, TILE: tl.constexpr):
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(y + places, tl.load(x + places, mask=places < N, other=0.0))


@pytest.mark.parametrize("n", [100, 128])
def test_a_kernel_that_stores_whole_tiles_is_found(n: int, device: torch.device) -> None:
    x = torch.arange(float(n), device=device)
    with fenced(device) as fences:
        y = torch.empty_like(x)
        copy_whole_tiles[(2,)](x, y, n, TILE=64)
    assert torch.equal(x, y)
    assert len(fences.allocations) == 1, "the launch allocates for itself, and that is left alone"
    past = "float32 (100,): 28 elements after it, the nearest 1 past its last"
    assert fences.violations() == ([past] if n == 100 else [])


def test_the_backward_is_fenced(device: torch.device) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            dx = torch.empty_like(dy)
            dx.as_strided((1,), (1,), int(dx.storage_offset()) + dx.numel()).fill_(0)
            return dx

    x = torch.ones(3, device=device, requires_grad=True)
    with fenced(device) as fences:
        Doubled.apply(x).sum().backward()
    assert x.grad is not None and x.grad.isnan().all()
    assert len(fences.violations()) == 1


# ---------------------------------------------------------------- what is left alone


class Tagged(Tensor):
    """A subclass, as distributed and quantised tensors are."""


def given(x: Tensor) -> Tensor:
    return torch.zeros(2, 3, out=x)


LEFT_ALONE: dict[str, Callable[[], Tensor]] = {
    "another device": lambda: torch.empty(3, device="meta"),
    "another device by default": lambda: _by_default("meta"),
    "memory that is given": lambda: given(torch.rand(2, 3)),
    "a sparse tensor": lambda: torch.empty((2, 3), layout=torch.sparse_coo),
    "a subclass": lambda: X.as_subclass(Tagged).new_empty(3),
    "a dtype without NaN": lambda: torch.empty(3, dtype=torch.float8_e8m0fnu),
    "PyTorch's own": lambda: torch.autograd.functional.jacobian(lambda x: 2 * x, torch.rand(2)),
}


def _by_default(device: str) -> Tensor:
    with torch.device(device):
        return torch.empty(3)


@pytest.mark.parametrize("what", LEFT_ALONE)
def test_other_memory_is_left_alone(what: str) -> None:
    with fenced(CPU) as fences:
        LEFT_ALONE[what]()
    assert not fences.allocations


def test_the_calls_of_tritons_interpreter_are_left_alone() -> None:
    """It makes an empty tensor for each argument and lets it share the argument's memory."""
    caller = {"__name__": "triton.runtime.interpreter", "x": X}
    with fenced(CPU) as fences:
        exec("y = x.new_empty(0, device='cpu')", caller)
        exec("y = x.new_empty(0, device='cpu')", {**caller, "__name__": "tritonic"})
    assert len(fences.allocations) == 1


def test_a_tensor_that_is_resized_may_grow_into_its_guards() -> None:
    with fenced(CPU) as fences:
        x = torch.empty(0)
        torch.mul(X, 2, out=x)
        y = torch.empty(2, 3).resize_(4, 5).fill_(1)
    assert torch.equal(x, 2 * X) and y.shape == (4, 5)
    assert fences.violations() == []


def test_fake_and_transformed_tensors_are_left_alone() -> None:
    with fenced(CPU) as fences:
        with FakeTensorMode() as mode:
            torch.empty(3)
            mode.from_tensor(X).new_zeros(4)
        batched = torch.func.vmap(lambda x: x.new_zeros(3) + x)(X)
    assert not fences.allocations
    assert torch.equal(batched, X)


def test_a_function_is_compiled_within_and_after() -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.empty(3)
        y.copy_(x)
        return torch.zeros_like(x) + y + x.new_full((3,), 2)

    expected = torch.full((3,), 3.0)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with fenced(CPU) as fences:
        assert torch.equal(compiled(torch.ones(3)), expected)
    assert fences.violations() == []
    assert torch.equal(compiled(torch.ones(3)), expected)


def test_wrong_calls_are_refused_as_ever() -> None:
    with fenced(CPU) as fences:
        with pytest.raises(RuntimeError, match="negative dimension"):
            torch.empty(-1)
        with pytest.raises(TypeError):
            X.new_full((2, 3))  # type: ignore[call-arg]
    assert not fences.allocations


# ---------------------------------------------------------------- standing and falling


def originals() -> list[Any]:
    return [
        getattr(owner, name)
        for functions in (UNINITIALISED, INITIALISED)
        for owner, names in functions.items()
        for name in names
    ]


@pytest.fixture(autouse=True)
def nothing_stays() -> Any:
    before = originals()
    yield
    assert originals() == before
    assert not {"new_empty", "new_zeros"} & set(vars(Tensor)), "inherited, as before"
    with torch.device("meta"):  # PyTorch's list of its own functions was not made of ours
        assert torch.empty(1).device.type == "meta"


def test_fences_fall_with_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), fenced(CPU):
        raise ZeroDivisionError


def test_of_several_fences_the_innermost_counts() -> None:
    with fenced(CPU) as outer:
        torch.empty(1)
        with fenced(CPU, inf) as inner:
            assert torch.empty(2).isinf().all()
        assert torch.empty(3).isnan().all()
    assert [tuple(a.tensor.shape) for a in outer.allocations] == [(1,), (3,)]
    assert [tuple(a.tensor.shape) for a in inner.allocations] == [(2,)]


def test_fences_that_fall_in_another_order_fall() -> None:
    first, second = fenced(CPU), fenced(CPU, inf)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.empty(1).isinf()
    second.__exit__(None, None, None)


def test_all_threads_are_fenced() -> None:
    """The backward of CUDA tensors runs in a thread of its own."""
    found: list[Tensor] = []
    with fenced(CPU) as fences:
        thread = threading.Thread(target=lambda: found.append(torch.empty(3)))
        thread.start()
        thread.join()
    assert found[0].isnan().all() and fences.holds(found[0])
