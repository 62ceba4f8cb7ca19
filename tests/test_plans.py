"""A call made again: what is kept of the first, and when it must not be used."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from kernels import attention, flash_attention, launch, plans
from kernels.plans import Launch, Plan, kept, key_of, known, launched, record, recorded

from .calls import assert_same_bits, attend, every, inputs_of
from .layouts import place
from .session import interpreted


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_plans", {})
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


class Kernel:
    """Stands for kernels: adds its tensors up into the last of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.pre_run_hooks: list[Any] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)
        *terms, total = (x for x in arguments if isinstance(x, Tensor))
        total.copy_(torch.stack(terms).sum(0))


def call(kernel: Kernel, a: Tensor, b: Tensor, factor: int = 3) -> tuple[Tensor]:
    """a + (a + b), through memory of its own."""
    between, result = a.new_empty(a.shape), a.new_empty(a.shape)
    for arguments in ((a, 7, b, between), (a, between, factor, result)):
        kernel(*arguments)
        record(Launch(kernel, arguments, kernel))
    return (result,)


def test_a_plan_puts_other_tensors_into_the_places_of_the_first() -> None:
    kernel = Kernel()
    a, b, c, d = (torch.randn(4, 4) for _ in range(4))
    key = key_of((a, b), "option")
    assert known(key) is None
    (first,) = kept(key, (a, b), lambda: call(kernel, a, b))
    plan = known(key_of((c, d), "option"))
    assert plan is not None
    (second,) = plan((c, d))
    assert torch.equal(first, a + (a + b)) and torch.equal(second, c + (c + d))
    assert torch.equal(first, a + (a + b))  # and is memory of its own
    (_, seven, _, between), (_, also, three, _) = kernel.calls[2:]
    assert (seven, three) == (7, 3) and between is also and between is not kernel.calls[0][3]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t(),
        lambda t: torch.randn(4, 5),
        lambda t: t.double(),
        lambda t: t.expand(2, 4, 4)[0].clone()[:, :3],
        lambda t: t.to("meta"),
    ],
    ids=["strides", "shape", "dtype", "a slice", "device"],
)
def test_what_decides_a_launch_decides_the_plan(change: Any) -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    kept(key_of((a, b), 1), (a, b), lambda: call(Kernel(), a, b))
    assert known(key_of((a, b), 1)) is not None
    assert known(key_of((a, change(b)), 1)) is None
    assert known(key_of((a, None), 1)) is None
    assert known(key_of((a, b), 2)) is None


def test_each_device_has_plans_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    kept(key_of((a, b)), (a, b), lambda: call(Kernel(), a, b))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert known(key_of((a, b))) is None


def test_an_address_that_kernels_were_not_compiled_for_is_left_to_others() -> None:
    kernel = Kernel()
    a, b = torch.randn(16), torch.randn(16)
    kept(key_of((a, b)), (a, b), lambda: call(kernel, a, b))
    off = torch.randn(17)[1:]
    plan = known(key_of((a, off)))
    assert plan is not None and plan((a, off)) is None
    assert len(kernel.calls) == 2


class Elsewhere(Tensor):
    """On a GPU that is not the current one."""

    is_cuda = property(lambda t: True)
    device = property(lambda t: torch.device("cuda", 1))


def test_a_device_that_is_not_the_current_one_is_left_to_others() -> None:
    kernel = Kernel()
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    kept(key_of((a, b)), (a, b), lambda: call(kernel, a, b))
    plan = known(key_of((a, b)))
    assert plan is not None and plan((a, b)) is not None
    assert plan((a.as_subclass(Elsewhere), b)) is None
    assert len(kernel.calls) == 4


@pytest.mark.parametrize(
    ("of", "knob", "value"), [("runtime", "debug", True), ("compilation", "instrumentation_mode", "x")]
)
def test_what_triton_is_told_beside_is_left_to_it(of: str, knob: str, value: Any) -> None:
    kernel = Kernel()
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    kept(key_of((a, b)), (a, b), lambda: call(kernel, a, b))
    plan = known(key_of((a, b)))
    assert plan is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(getattr(triton.knobs, of), knob, value)
        assert plan((a, b)) is None
    assert plan((a, b)) is not None
    kernel.pre_run_hooks.append(print)
    assert plan((a, b)) is None


def test_a_call_like_one_before_is_not_made() -> None:
    kernel, made = Kernel(), 0

    def call_of(a: Tensor, b: Tensor) -> tuple[Tensor]:
        nonlocal made
        made += 1
        return call(kernel, a, b)

    def of(a: Tensor, b: Tensor) -> Tensor:
        (found,) = launched((a, b), ("option",), lambda: call_of(a, b))
        return found

    a, b, c, d = (torch.randn(4, 4) for _ in range(4))
    assert torch.equal(of(a, b), a + (a + b)) and torch.equal(of(c, d), c + (c + d))
    assert made == 1
    kernel.pre_run_hooks.append(print)  # Triton is to do more: the plan is left alone
    assert torch.equal(of(c, b), c + (c + b))
    assert made == 2


def test_another_architecture_has_plans_of_its_own() -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    kept(key_of((a, b)), (a, b), lambda: call(Kernel(), a, b))
    with triton.knobs.runtime.scope():  # which leaves the variable of the environment as it was
        triton.knobs.runtime.override_arch = "sm87"
        assert known(key_of((a, b))) is None
    assert known(key_of((a, b))) is not None


def test_a_call_within_another_is_no_part_of_its_plan() -> None:
    first, within, last = (Launch(print, (i,), Kernel()) for i in range(3))
    with recorded() as outer:
        record(first)
        with recorded() as inner:
            record(within)
        record(last)
    assert (outer, inner) == ([first, last], [within])


def test_one_tensor_in_two_places_makes_no_plan() -> None:
    a, b = torch.randn(4), torch.randn(4)
    kept(key_of((a, a)), (a, a), lambda: call(Kernel(), a, a))
    assert known(key_of((a, b))) is None


def test_what_was_not_launched_directly_makes_no_plan() -> None:
    a, b = torch.randn(4), torch.randn(4)

    def not_directly() -> tuple[Tensor]:
        found = call(Kernel(), a, b)
        record(None)
        return found

    kept(key_of((a, b)), (a, b), not_directly)
    kept(key_of((b, a), "nothing"), (b, a), lambda: (a,))
    assert plans._plans == {}


def test_an_error_ends_a_recording() -> None:
    a, b = torch.randn(4), torch.randn(4)

    def wrong() -> tuple[Tensor]:
        call(Kernel(), a, b)
        raise ValueError

    with pytest.raises(ValueError):
        kept(key_of((a, b)), (a, b), wrong)
    record(Launch(Kernel(), (), Kernel()))  # nobody listens
    assert plans._plans == {} and plans._recording.launches is None


def test_there_are_not_more_plans_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MOST", 3)
    a, b = torch.randn(4), torch.randn(4)
    for option in range(7):
        kept(key_of((a, b), option), (a, b), lambda: call(Kernel(), a, b))
        assert len(plans._plans) <= 3
    assert known(key_of((a, b), 6)) is not None


# ---------------------------------------------------------------- on a GPU

on_a_gpu = pytest.mark.skipif(interpreted(), reason="Triton interprets: nothing is compiled, or planned")


@on_a_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d_lse", [False, True])
def test_a_plan_gives_the_bits_of_the_first_call(causal: bool, d_lse: bool, device: torch.device) -> None:
    x, y = (inputs_of(device, seed=seed, d_lse=d_lse) for seed in (0, 1))
    through = "out lse" if d_lse else "out"
    expected = attend(y, causal=causal, through=through)
    plans._plans.clear()
    for _ in range(3):  # compiles, launches directly, makes plans
        attend(x, causal=causal, through=through)
    assert len(plans._plans) == 2
    assert_same_bits(attend(y, causal=causal, through=through), expected)


@on_a_gpu
def test_plans_are_used(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs_of(device)
    expected = [attend(x) for _ in range(3)][-1]
    for name in ("forward", "backward"):
        monkeypatch.setattr(launch, name, None)  # nobody asks
    assert_same_bits(attend(x), expected)


def placed_as(layout: str, name: str, t: Tensor) -> Tensor:
    return place(name, t.cpu(), layout, t.device)


@on_a_gpu
def test_other_layouts_and_options_are_not_taken_for_it(device: torch.device) -> None:
    x = inputs_of(device)
    for _ in range(3):
        attend(x)
    for layout in ("bshd", "offset", "strided"):
        placed = every(x, partial(placed_as, layout))
        assert_same_bits(attend(placed), attend(x))
    scaled = attend(x, scale=0.1)
    plans._plans.clear()
    assert_same_bits(attend(x, scale=0.1), scaled)


@on_a_gpu
def test_what_is_refused_is_refused_with_a_plan_too(device: torch.device) -> None:
    x = inputs_of(device)
    for _ in range(3):
        flash_attention(x.q, x.k, x.v)
    assert plans._plans
    with pytest.raises(TypeError, match="causal is 0"):
        flash_attention(x.q, x.k, x.v, causal=0)  # type: ignore[call-overload]
    with pytest.raises(RuntimeError, match="q has a tangent"):
        torch.func.jvp(lambda q: flash_attention(q, x.k, x.v), (x.q,), (torch.ones_like(x.q),))
    assert attention is not None
    assert isinstance(next(iter(plans._plans.values())), Plan)
