"""The operators in torch.library: registration, torch.compile, torch.export; and calls round them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import attention, attention_varlen, flash_attention
from kernels.attention import NAMESPACE
from kernels.dispatch import needs_operator

from .calls import Lengths, Offsets, assert_same_bits, attend, every, inputs_of, ragged_inputs_of
from .layouts import place
from .values import Inputs

forward_operator = getattr(torch.ops, NAMESPACE).flash_attention_forward.default
backward_operator = getattr(torch.ops, NAMESPACE).flash_attention_backward.default

ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, some rows see no key": {"causal": True, "len_q": 9},
    "a group of heads, Dv not D": {"heads_q": 4, "heads_kv": 2, "dim": 24, "dim_v": 40},
    "not contiguous, bfloat16": {"layout": "bshd", "batch": 2, "dtype": "bfloat16"},
    "expanded over the heads, float32": {"layout": "expanded", "heads_kv": 2, "dtype": "float32"},
    "one of everything": {"len_q": 1, "len_k": 1, "heads_q": 1},
    "no queries": {"len_q": 0},
    "no keys": {"len_k": 0},
    "no batch": {"batch": 0},
}
SMALL = {"len_q": 3, "len_k": 5}


def arguments_of(name: str, device: torch.device) -> tuple[Inputs, bool]:
    """Inputs in the layout of the entry, and whether it is causal."""
    changes = SMALL | ARGUMENTS[name]
    causal = changes.pop("causal", False)
    layout = changes.get("layout", "bhsd")
    x = inputs_of(device, **changes)
    return every(x, lambda which, t: place(which, t.cpu(), layout, device)), causal


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_forward_operator_keeps_the_rules_of_torch_library(name: str, device: torch.device) -> None:
    x, causal = arguments_of(name, device)
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    torch.library.opcheck(forward_operator, (q, k, v, causal, 0.2, False))
    if name == "plain":
        torch.library.opcheck(forward_operator, (x.q, x.k, x.v, causal, 0.2, True))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_backward_operator_keeps_the_rules_of_torch_library(name: str, device: torch.device) -> None:
    x, causal = arguments_of(name, device)
    out, lse = forward_operator(x.q, x.k, x.v, causal, 0.2, False)
    saved = (x.q, x.k, x.v, out, lse, causal, 0.2, False)
    torch.library.opcheck(backward_operator, (x.d_out, x.d_lse, *saved, True, True))
    if name == "plain":  # without an operand each, and with less to do
        torch.library.opcheck(backward_operator, (None, x.d_lse, *saved, True, False))
        torch.library.opcheck(backward_operator, (x.d_out, None, *saved, False, True))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_fake_operators_foresee_shapes_dtypes_and_strides(name: str, device: torch.device) -> None:
    """D5, D8."""
    x, causal = arguments_of(name, device)
    out, lse = forward_operator(x.q, x.k, x.v, causal, 0.2, False)
    calls: list[tuple[Any, tuple[Any, ...]]] = [(forward_operator, (x.q, x.k, x.v, causal, 0.2, False))]
    for needs in product((True, False), repeat=2):
        saved = (x.q, x.k, x.v, out, lse, causal, 0.2, False)
        calls.append((backward_operator, (x.d_out, x.d_lse, *saved, *needs)))

    for operator, arguments in calls:
        assert_foreseen(operator, arguments)


def assert_foreseen(operator: Any, arguments: tuple[Any, ...]) -> None:
    with FakeTensorMode() as mode:
        foreseen = operator(*(mode.from_tensor(t) if isinstance(t, Tensor) else t for t in arguments))
    for fake, real in zip(foreseen, operator(*arguments), strict=True):
        for what in ("shape", "dtype", "device"):
            assert getattr(fake, what) == getattr(real, what), (operator, what)
        assert fake.stride() == real.stride(), operator


# ---------------------------------------------------------------- ragged batches

varlen_forward_operator = getattr(torch.ops, NAMESPACE).flash_attention_varlen_forward.default
varlen_backward_operator = getattr(torch.ops, NAMESPACE).flash_attention_varlen_backward.default

BATCHES: dict[str, tuple[Lengths, tuple[int, int], dict[str, Any]]] = {
    "plain": ([(3, 5), (4, 2)], (0, 0), {}),
    "empties, rows past the end, a group of heads, Dv not D": (
        [(0, 5), (4, 0), (2, 3)], (1, 2), {"heads_q": 4, "heads_kv": 2, "dim": 24, "dim_v": 40}
    ),
    "float32": ([(3, 5)], (0, 0), {"dtype": "float32"}),
    "no sequence": ([], (2, 1), {}),
    "no rows": ([(0, 0)], (0, 0), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_the_ragged_operators_keep_the_rules_of_torch_library(name: str, device: torch.device) -> None:
    lengths, past, changes = BATCHES[name]
    x, offsets = ragged_inputs_of(device, lengths, past=past, **changes), Offsets.of(lengths, device)
    where = vars(offsets).values()
    q, k, v = (t.detach().nan_to_num().requires_grad_() for t in (x.q, x.k, x.v))
    torch.library.opcheck(varlen_forward_operator, (q, k, v, *where, True, 0.2, False, False))
    torch.library.opcheck(varlen_forward_operator, (x.q, x.k, x.v, *where, False, 0.2, False, True))

    out, lse = varlen_forward_operator(x.q, x.k, x.v, *where, True, 0.2, False, False)
    cu_seqlens = (offsets.cu_seqlens_q, offsets.cu_seqlens_k)
    saved = (x.q, x.k, x.v, *cu_seqlens, out, lse, True, 0.2, False)
    for d_out, d_lse, *needs in (
        (x.d_out, x.d_lse, True, True), (None, x.d_lse, True, False), (x.d_out, None, False, True)
    ):  # fmt: skip
        torch.library.opcheck(varlen_backward_operator, (d_out, d_lse, *saved, *needs))


@pytest.mark.parametrize("layout", ["contiguous", "heads first"])
@pytest.mark.parametrize("name", BATCHES)
def test_the_fake_ragged_operators_foresee_shapes_dtypes_and_strides(
    name: str, layout: str, device: torch.device
) -> None:
    """D5, D8."""
    lengths, past, changes = BATCHES[name]
    x, offsets = ragged_inputs_of(device, lengths, past=past, **changes), Offsets.of(lengths, device)
    if layout == "heads first":
        x = every(x, lambda _, t: t.transpose(0, 1).contiguous().transpose(0, 1))
    where = tuple(vars(offsets).values())
    out, lse = varlen_forward_operator(x.q, x.k, x.v, *where, True, 0.2, False, False)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (varlen_forward_operator, (x.q, x.k, x.v, *where, True, 0.2, False, False))
    ]
    for needs in product((True, False), repeat=2):
        saved = (x.q, x.k, x.v, *where[:2], out, lse, True, 0.2, False)
        calls.append((varlen_backward_operator, (x.d_out, x.d_lse, *saved, *needs)))
    for operator, arguments in calls:
        assert_foreseen(operator, arguments)


# ---------------------------------------------------------------- round the dispatcher, or not


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which operators are called from now on."""
    called: list[str] = []
    for module in (attention, attention_varlen):
        for name in ("_forward_operator", "_backward_operator"):
            original = getattr(module, name)

            def seen(*arguments: Any, name: str = name, original: Any = original) -> Any:
                called.append(name)
                return original(*arguments)

            monkeypatch.setattr(module, name, seen)
    return called


@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
def test_a_call_round_the_dispatcher_gives_the_same_bits(
    ragged: bool, device: torch.device, operators: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [(3, 5), (0, 2), (4, 4)]
    x = ragged_inputs_of(device, lengths) if ragged else inputs_of(device, **SMALL)
    where = (Offsets.of(lengths, device),) if ragged else ()
    directly = attend(x, *where, causal=True)
    assert operators == []
    for module in (attention, attention_varlen):
        monkeypatch.setattr(module, "needs_operator", lambda *_: True)
    assert_same_bits(directly, attend(x, *where, causal=True))
    assert operators == ["_forward_operator", "_backward_operator"]


def _mode(t: Tensor) -> bool:
    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    with Looks():
        return needs_operator(t)


def _within(transform: Callable[[Callable[[Tensor], Tensor]], Any]) -> bool:
    """What is said inside of a function that is transformed."""
    found: list[bool] = []

    def function(x: Tensor) -> Tensor:
        found.append(needs_operator(x))
        return x + 1

    transform(function)
    return found[0]


LOOKS_ON: dict[str, Callable[[Tensor], bool]] = {
    "a subclass": lambda t: needs_operator(t, t.as_subclass(type("Mine", (Tensor,), {}))),
    "a fake tensor": lambda t: needs_operator(FakeTensorMode().from_tensor(t)),
    "a mode": _mode,
    "functorch": lambda t: _within(lambda function: torch.func.vmap(function)(t)),
    "a tracer": lambda t: _within(lambda function: torch.jit.trace(function, (t,))),
    "a pending negation": lambda t: needs_operator(torch.complex(t, t).conj().imag),
    "a tensor without memory": lambda t: needs_operator(t.to("meta")),
    "zeros without memory": lambda t: needs_operator(torch._efficientzerotensor(t.shape)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("who", LOOKS_ON)
def test_whoever_looks_on_gets_the_operator(who: str) -> None:
    t = torch.ones(2, 3)
    assert LOOKS_ON[who](t)
    assert not needs_operator(t, torch.nn.Parameter(t))


def test_gradients_of_several_at_once_are_those_of_each(device: torch.device) -> None:
    x = inputs_of(device, **SMALL)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    assert x.d_out is not None
    several = torch.stack([x.d_out, -2 * x.d_out])
    out = flash_attention(*leaves)
    together = torch.autograd.grad(out, leaves, several, retain_graph=True, is_grads_batched=True)
    for i, d_out in enumerate(several):
        for found, each in zip(
            together, torch.autograd.grad(out, leaves, d_out, retain_graph=True), strict=True
        ):
            assert torch.equal(found[i], each)


def test_without_memory_it_foresees(device: torch.device) -> None:
    x = inputs_of(device, **SMALL)
    leaves = [t.to("meta").requires_grad_() for t in (x.q, x.k, x.v)]
    out, lse = flash_attention(*leaves, return_lse=True)
    assert x.d_out is not None and x.d_lse is not None
    assert (out.shape, lse.shape, out.device.type) == (x.d_out.shape, x.d_lse.shape, "meta")
    found = torch.autograd.grad(out, leaves, x.d_out.to("meta"))
    assert [t.shape for t in found] == [t.shape for t in leaves]


def test_a_mode_sees_the_operators_of_a_call(device: torch.device) -> None:
    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen: list[Any] = []
    x = inputs_of(device, **SMALL)
    with Looks():
        attend(x)
    assert forward_operator in seen and backward_operator in seen


# ---------------------------------------------------------------- torch.compile, torch.export


def with_gradients(function: Callable[..., Any], x: Inputs, **options: Any) -> dict[str, Tensor]:
    """Results of a function with the signature of `flash_attention`, and its gradients."""
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    out, lse = function(*leaves, return_lse=True, **options)
    gradients = torch.autograd.grad((out, lse), leaves, (x.d_out, x.d_lse))
    found = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return {"out": out.detach(), "lse": lse.detach()} | found


COMPILED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal, some rows see no key": ({"len_q": 9}, {"causal": True}),
    "a group of heads, Dv not D, a scale": (
        {"heads_q": 4, "heads_kv": 2, "dim": 24, "dim_v": 40}, {"scale": 0.3}
    ),
}  # fmt: skip


@pytest.fixture
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_as_one_graph_it_gives_the_same_bits(name: str, device: torch.device) -> None:
    changes, options = COMPILED[name]
    x = inputs_of(device, **(SMALL | changes))
    compiled = torch.compile(flash_attention, fullgraph=True, backend="aot_eager")
    assert_same_bits(with_gradients(compiled, x, **options), attend(x, **options))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_inside_of_a_model_it_gives_the_same_bits(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)  # packed, (B, S, 3 H D)
        return flash_attention(q, k, v, causal=True).transpose(1, 2).flatten(2).square()

    x = inputs_of(device, len_k=7, dim=96).k[:, 0]
    found = []
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        leaf = x.detach().requires_grad_()
        out = function(leaf)
        (gradient,) = torch.autograd.grad(out.sum(), leaf)
        found.append({"out": out.detach(), "gradient": gradient})
    assert_same_bits(found[1], found[0])


@pytest.mark.usefixtures("fresh_compiler")
def test_one_compiled_function_serves_all_lengths(device: torch.device) -> None:
    """M4."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flash_attention, fullgraph=True, backend=counter, dynamic=True)
    for len_q, len_k in ((17, 19), (33, 36), (40, 45)):
        x = inputs_of(device, len_q=len_q, len_k=len_k)
        assert_same_bits(with_gradients(compiled, x, causal=True), attend(x, causal=True))
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_it_refuses_what_it_refuses_otherwise(device: torch.device) -> None:
    x = inputs_of(device, **SMALL)
    compiled = torch.compile(flash_attention, backend="aot_eager")
    with pytest.raises(ValueError, match="v has head dimension 15; it may be 16 to 256"):
        compiled(x.q, x.k, x.v[..., :15])


def test_it_can_be_exported(device: torch.device) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return flash_attention(q, k, v, causal=True, return_lse=True)

    x = inputs_of(device, **SMALL)
    exported = torch.export.export(Model(), (x.q, x.k, x.v)).module()
    out, lse = exported(x.q, x.k, x.v)
    assert_same_bits({"out": out, "lse": lse}, attend(x, wanted="", causal=True))
