"""A call made again: what is kept of the first, and when it must not be used."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import attention, flash_attention, launch, plans
from kernels.plans import Launch, Plan, kept, key_of, known, latest, launched, record, recorded

from .calls import assert_same_bits, attend, every, inputs_of
from .layouts import place
from .session import interpreted


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(plans, "_latest", {})
    if not torch.cuda.is_available():
        monkeypatch.setattr(plans, "current_device", lambda: 0)


class Kernel:
    """Stands for kernels: adds its tensors up into the last of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.streams: list[int] = []
        self.pre_run_hooks: list[Any] = []

    def __call__(self, stream: int, arguments: Sequence[Any]) -> None:
        self.streams.append(stream)
        self.calls.append(tuple(arguments))
        if any(isinstance(x, int) and x > 2**16 for x in arguments):
            return  # addresses
        *terms, total = (x for x in arguments if isinstance(x, Tensor))
        total.copy_(torch.stack(terms).sum(0))


def call(kernel: Kernel, a: Tensor, b: Tensor, factor: int = 3, by_address: bool = False) -> tuple[Tensor]:
    """a + (a + b), through memory of its own."""
    between, result = a.new_empty(a.shape), a.new_empty(a.shape)
    for arguments in ((a, 7, b, between), (a, between, factor, result)):
        kernel(0, arguments)
        record(Launch(kernel, arguments, kernel, by_address))
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
    assert known(key_of((a,), 1)) is None
    assert known(key_of((a, b), 2)) is None


def test_each_device_has_plans_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    kept(key_of((a, b)), (a, b), lambda: call(Kernel(), a, b))
    monkeypatch.setattr(plans, "current_device", lambda: 1)
    assert known(key_of((a, b))) is None


def test_an_address_that_kernels_were_not_compiled_for_is_left_to_others() -> None:
    kernel = Kernel()
    a, b = torch.randn(16), torch.randn(16)
    kept(key_of((a, b)), (a, b), lambda: call(kernel, a, b))
    off = torch.randn(17)[1:]
    plan = known(key_of((a, off)))
    assert plan is not None and plan((a, off)) is None
    assert len(kernel.calls) == 2


def test_a_device_that_is_not_the_current_one_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    kept(key_of((a, b)), (a, b), lambda: call(kernel, a, b))
    plan = known(key_of((a, b)))
    assert plan is not None and plan((a, b)) is not None
    plan.device = 0
    monkeypatch.setattr(plans, "current_stream", lambda _: 0)
    assert plan((a, b)) is not None
    monkeypatch.setattr(plans, "current_device", lambda: 1)
    assert plan((a, b)) is None
    assert len(kernel.calls) == 6


def test_kernels_are_given_addresses_and_the_stream_that_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    kept(key_of((a, b)), (a, b), lambda: call(kernel, a, b, by_address=True))
    plan = known(key_of((a, b)))
    assert plan is not None
    plan.device = 0
    for stream in (0, 11, 12):
        monkeypatch.setattr(plans, "current_stream", lambda device, stream=stream: stream + 100 * device)
        (result,) = plan((a, b))
        (*_, first), (*_, last) = kernel.calls[-2:]
        assert kernel.streams[-2:] == [stream, stream]
        assert kernel.calls[-2] == (a.data_ptr(), 7, b.data_ptr(), first)
        assert kernel.calls[-1] == (a.data_ptr(), first, 3, last) and last == result.data_ptr()


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


@pytest.mark.parametrize("when", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_that_is_installed_later_is_triton_s_to_call(when: str) -> None:
    """A profiler may begin after the plan was made."""
    kernel = Kernel()
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    kept(key_of((a, b)), (a, b), lambda: call(kernel, a, b))
    plan = known(key_of((a, b)))
    assert plan is not None and plan((a, b)) is not None
    hooks = getattr(triton.knobs.runtime, when)
    hooks.add(print)
    try:
        assert plan((a, b)) is None
    finally:
        hooks.remove(print)
    assert plan((a, b)) is not None
    with triton.knobs.runtime.scope():
        for hook, left in ((None, False), (print, True)):  # instead of a chain of them
            setattr(triton.knobs.runtime, when, hook)
            assert (plan((a, b)) is None) is left


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


# ---------------------------------------------------------------- the latest call


def remembered(a: Tensor, b: Tensor) -> Plan:
    """Made, and made again by a plan."""
    for _ in range(2):
        launched((a, b), ("option",), partial(call, Kernel(), a, b))
    plan = known(key_of((a, b), "option"))
    assert plan is not None and plan.again is not None
    return plan


def found(*inputs: Any) -> Plan | None:
    """What the latest call with this option was made by, if it was like this."""
    again = latest(("option",), inputs)
    return None if again is None else again.plan


def test_a_call_like_the_latest_is_known_without_a_key() -> None:
    plan = remembered(torch.randn(4, 4), torch.randn(4, 4))
    c, d = torch.randn(4, 4), torch.randn(4, 4)
    assert found(c, d) is plan
    assert latest(("other",), (c, d)) is None and found(c) is None and found(c, d, d) is None


def test_the_latest_call_of_a_plan_may_differ_in_what_needs_no_other_plan() -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    plan = remembered(a, b)
    leaf = a.clone().requires_grad_()
    for inputs, differentiable in (((leaf, b), True), ((a, b), False)):
        with torch.no_grad():
            launched(inputs, ("option",), partial(call, Kernel(), *inputs))
        again = latest(("option",), inputs)
        assert again is not None and again.plan is plan and again.differentiable is differentiable


UNLIKE: dict[str, Callable[[Tensor], Any]] = {
    "strides": lambda t: t.t(),
    "shape": lambda t: torch.randn(4, 5),
    "fewer dimensions": lambda t: t[0],
    "dtype": lambda t: t.int(),
    "device": lambda t: t.to("meta"),
    "a parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "a subclass": lambda t: t.as_subclass(type("Mine", (Tensor,), {})),
    "a fake tensor": lambda t: FakeTensorMode().from_tensor(t),
    "requires gradients": lambda t: t.clone().requires_grad_(),
    "sparse": lambda t: t.to_sparse(),
    "in compressed rows": lambda t: t.to_sparse_csr(),
    "nested": lambda t: torch.nested.nested_tensor([t]),
    "zeros without memory": lambda t: torch._efficientzerotensor(t.shape),
    "a list": lambda t: t.tolist(),
    "nothing": lambda t: None,
    "the other one": lambda t: None,
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("how", UNLIKE)
def test_a_call_unlike_the_latest_is_not_taken_for_it(how: str) -> None:
    remembered(torch.randn(4, 4), torch.randn(4, 4))
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    assert found(a, b) is not None
    other = a if how == "the other one" else UNLIKE[how](b)
    assert found(a, other) is None
    assert found(a, b) is not None


def test_a_pending_negation_is_not_taken_for_the_latest() -> None:
    x = torch.zeros(4, 4, dtype=torch.complex64)
    alike = plans._alike((x.imag,))
    assert alike is not None and alike(x.clone().imag)
    assert x.conj().imag.stride() == x.imag.stride() and not alike(x.conj().imag)


def _within(transform: Callable[[Callable[[Tensor], Tensor]], Any], *inputs: Tensor) -> list[bool]:
    """Whether the latest call is found inside of a function that is transformed."""
    seen: list[bool] = []

    def function(x: Tensor) -> Tensor:
        seen.append(found(*inputs) is not None)
        return x + 1

    transform(function)
    return seen[:1]


def _mode(a: Tensor, b: Tensor) -> list[bool]:
    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    with Looks():
        return [found(a, b) is not None]


def _fake_mode(a: Tensor, b: Tensor) -> list[bool]:
    with FakeTensorMode():
        return [found(a, b) is not None]


LOOKS_ON: dict[str, Callable[[Tensor, Tensor], list[bool]]] = {
    "a mode": _mode,
    "a mode of fake tensors": _fake_mode,
    "functorch": lambda a, b: _within(lambda f: torch.func.vmap(f)(a), a, b),
    "derivatives of functorch": lambda a, b: _within(
        lambda f: torch.func.grad(lambda x: f(x).sum())(a), a, b
    ),
    "several gradients at once": lambda a, b: _within(lambda f: torch._vmap_internals._vmap(f)(a), a, b),
    "a tracer": lambda a, b: _within(lambda f: torch.jit.trace(f, (a,)), a, b),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("who", LOOKS_ON)
def test_whoever_looks_on_the_latest_call_is_not_found(who: str) -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    remembered(a, b)
    assert found(a, b) is not None
    assert LOOKS_ON[who](a, b) == [False]


def test_another_architecture_has_latest_calls_of_its_own() -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    remembered(a, b)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.override_arch = "sm87"
        assert found(a, b) is None
    assert found(a, b) is not None


def test_without_such_guards_calls_are_known_by_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "guards", None)
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(3):
        (total,) = launched((a, b), ("option",), lambda: call(Kernel(), a, b))
    assert torch.equal(total, a + (a + b)) and plans._latest == {} and found(a, b) is None


def test_to_remember_a_call_keeps_no_tensor() -> None:
    a = torch.randn(4, 4)
    alike, gone = plans._alike((a,)), weakref.ref(a)
    del a
    gc.collect()
    assert gone() is None and alike is not None and alike(torch.randn(4, 4))


def test_what_a_transformation_left_behind_is_not_remembered() -> None:
    left: list[Tensor] = []
    torch.func.grad(lambda x: left.append(x) or x.sum())(torch.ones(4))  # type: ignore[func-returns-value]
    assert type(left[0]) is Tensor and plans._alike((left[0],)) is None


def test_the_latest_call_decides_for_the_next(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs_of(device)
    out, lse, *gradients = (torch.zeros_like(t) for t in (x.q, x.q[..., 0], x.q, x.k, x.v))
    asked: list[tuple[Any, ...]] = []

    def always(options: tuple[Any, ...], inputs: tuple[Tensor, ...]) -> Any:
        asked.append(options)
        results = (out.clone(), lse.clone()) if len(inputs) == 3 else tuple(gradients)
        return plans.Again(lambda *_: True, True, (True, 0.5, False), lambda _: results)  # type: ignore[arg-type]

    monkeypatch.setattr(plans, "latest", always)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(attention, "_apply", None)  # which would cost more than the launch
        assert torch.equal(flash_attention(*leaves), out)
    found = flash_attention(*leaves, scale=0.5, causal=True)
    assert torch.equal(found, out) and found.requires_grad
    for once, gradient in zip(torch.autograd.grad(found, leaves, out), gradients, strict=True):
        assert torch.equal(once, gradient)
    assert asked == [(False, None, False), (True, 0.5, False), (True, 0.5, False, True, True)]

    asked.clear()  # what is equal to numbers or flags, and is none
    assert not torch.equal(flash_attention(x.q, x.k, x.v, scale=1), out)
    for options in ({"scale": True}, {"causal": 1}, {"allow_tf32": 0}):
        with pytest.raises(TypeError):
            flash_attention(x.q, x.k, x.v, **options)
    with pytest.raises(RuntimeError, match="q has a tangent"):
        torch.func.jvp(lambda q: flash_attention(q, x.k, x.v), (x.q,), (torch.ones_like(x.q),))
    found = flash_attention(*leaves)
    with pytest.raises(RuntimeError):  # a second derivative is not the latest call's either
        (first,) = torch.autograd.grad(found, leaves[:1], out.requires_grad_(), create_graph=True)
        torch.autograd.grad(first.sum(), leaves[:1])
    assert asked == [(False, None, False)]


def test_a_backward_asks_once_for_what_is_saved(device: torch.device) -> None:
    """Checkpoints give saved tensors once, and raise the second time."""
    x, given = inputs_of(device), 0

    def unpack(t: Tensor) -> Tensor:
        nonlocal given
        given += 1
        return t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        attend(x)
    assert given == 5


# ---------------------------------------------------------------- on a GPU

on_a_gpu = pytest.mark.skipif(interpreted(), reason="Triton interprets: nothing is compiled, or planned")


@on_a_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d_lse", [False, True])
def test_a_plan_gives_the_bits_of_the_first_call(causal: bool, d_lse: bool, device: torch.device) -> None:
    x, y = (inputs_of(device, seed=seed, d_lse=d_lse) for seed in (0, 1))
    through = "out lse" if d_lse else "out"
    expected = attend(y, causal=causal, through=through)
    plans.forget()
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
    plans.forget()
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
