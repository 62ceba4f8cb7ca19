"""What a caller of `flash_attention` relies on beside the numbers: repeatability and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import flash_attention, launch, plans

from .calls import assert_same_bits, attend, bits, case_of, inputs_of, largest_tile, same_bits
from .cases import DTYPES, GRADIENTS
from .values import Inputs

SUBSETS = [wanted for wanted in GRADIENTS if wanted != "none"]


def spoil_free_memory(device: torch.device) -> None:
    """Leaves NaN where the next tensors of the allocator's small and large blocks will lie."""
    blocks = [torch.full((size,), float("nan"), device=device) for size in (2**8, 2**12, 2**16, 2**20) * 4]
    del blocks


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_run_gives_the_same_bits(dtype: str, causal: bool, device: torch.device) -> None:
    runs, lengths = (20, {"len_q": 1000, "len_k": 1030}) if device.type == "cuda" else (1, {})
    x = inputs_of(device, dtype=dtype, dim=72, **lengths)
    first = attend(x, causal=causal)
    for _ in range(runs):
        spoil_free_memory(device)
        assert_same_bits(attend(x, causal=causal), first)


def test_that_it_need_not_be_deterministic_changes_nothing_today(device: torch.device) -> None:
    x = inputs_of(device)
    assert_same_bits(attend(x, deterministic=False), attend(x, deterministic=True))


def test_a_second_backward_of_one_forward_gives_the_same_bits(device: torch.device) -> None:
    """H7."""
    x = inputs_of(device)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    out = flash_attention(*leaves)
    first = torch.autograd.grad(out, leaves, x.d_out, retain_graph=True)
    spoil_free_memory(device)
    second = torch.autograd.grad(out, leaves, x.d_out)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


def test_inputs_keep_their_bits(device: torch.device) -> None:
    x = inputs_of(device, batch=2)
    before = {name: bits(t).clone() for name, t in vars(x).items()}
    attend(x, causal=True)
    assert [name for name, t in vars(x).items() if not torch.equal(bits(t), before[name])] == []


def test_results_have_memory_of_their_own(device: torch.device) -> None:
    x = inputs_of(device, len_q=1, len_k=1)  # one key: out equals v, dv the sum of d_out
    tensors = vars(x) | attend(x)
    memory = {name: t.untyped_storage().data_ptr() for name, t in tensors.items()}
    assert len(set(memory.values())) == len(memory) == 10, memory


def test_without_the_lse_out_is_the_same(device: torch.device) -> None:
    x = inputs_of(device)
    alone = flash_attention(x.q, x.k, x.v, causal=True)
    assert same_bits(alone, attend(x, wanted="", causal=True)["out"])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients_change_nothing_else(mode: Any, device: torch.device) -> None:
    x = inputs_of(device)
    with mode():
        out, lse = flash_attention(x.q.requires_grad_(), x.k, x.v, return_lse=True)
    assert not out.requires_grad and not lse.requires_grad
    assert_same_bits({"out": out, "lse": lse}, attend(x, wanted=""))


# ---------------------------------------------------------------- which gradients, through what


@pytest.fixture(scope="module")
def all_three(device: torch.device) -> tuple[Inputs, dict[str, Tensor]]:
    """Inputs, and the results where q, k and v all require a gradient."""
    x = inputs_of(device, dtype="bfloat16")
    return x, attend(x, causal=True)


@pytest.mark.parametrize("wanted", SUBSETS)
def test_a_gradient_does_not_depend_on_which_others_are_wanted(
    wanted: str, all_three: tuple[Inputs, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """G5."""
    x, results = all_three
    computed = []

    def backward(*arguments: Any) -> Any:
        computed.append(arguments[-2:])
        return original(*arguments)

    original = launch.backward
    monkeypatch.setattr(launch, "backward", backward)
    monkeypatch.setattr(plans, "_plans", {})  # which launch without asking
    found = attend(x, wanted=wanted, causal=True)

    assert_same_bits(found, {name: results[name] for name in found})
    assert len(found) == 2 + len(wanted)
    assert computed == [("q" in wanted, "k" in wanted or "v" in wanted)]  # and no more than that


@pytest.mark.parametrize("through", ["out", "lse"])
def test_an_output_that_is_not_used_has_gradient_zero(through: str, device: torch.device) -> None:
    x = inputs_of(device)
    unused = "d_lse" if through == "out" else "d_out"
    zeros = replace(x, **{unused: torch.zeros_like(getattr(x, unused))})
    found = attend(x, through=through)
    assert_same_bits(found, attend(zeros))
    assert found["dq"].any() and found["dk"].any() and found["dv"].any() == (through == "out")


def test_gradients_through_out_and_lse_are_not_those_through_one(device: torch.device) -> None:
    x = inputs_of(device)
    both, out_only = attend(x), attend(x, through="out")
    assert not same_bits(both["dq"], out_only["dq"]) and not same_bits(both["dk"], out_only["dk"])
    assert same_bits(both["dv"], out_only["dv"])  # dv = P^T d_out: nothing flows from the lse to v


def test_without_the_lse_gradients_are_those_through_out(device: torch.device) -> None:
    x = inputs_of(device)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    found = torch.autograd.grad(flash_attention(*leaves), leaves, x.d_out)
    expected = attend(x, through="out")
    assert_same_bits(dict(zip(("dq", "dk", "dv"), found, strict=True)),
                     {name: expected[name] for name in ("dq", "dk", "dv")})  # fmt: skip


def test_a_second_derivative_is_refused(device: torch.device) -> None:
    x = inputs_of(device)
    q = x.q.requires_grad_()
    (dq,) = torch.autograd.grad(flash_attention(q, x.k, x.v), q, x.d_out, create_graph=True)
    with pytest.raises(RuntimeError, match=r"backward through .*flash_attention_backward"):
        dq.sum().backward()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_forward_mode_derivative_is_refused(name: str, device: torch.device) -> None:
    x = inputs_of(device, len_q=3, len_k=5)

    def through(t: Tensor) -> Tensor:
        given = {"q": x.q, "k": x.k, "v": x.v} | {name: t}
        return flash_attention(given["q"], given["k"], given["v"])

    t = getattr(x, name)
    with pytest.raises(RuntimeError, match=f"{name} has a tangent; it must have none"):
        torch.func.jvp(through, (t,), (torch.ones_like(t),))


@pytest.mark.parametrize("changed", ["q", "k", "v", "out", "lse"])
def test_what_the_backward_reads_must_not_change_before_it(changed: str, device: torch.device) -> None:
    x = inputs_of(device, len_q=3, len_k=5)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    views: dict[str, Any] = {name: leaf.view_as(leaf) for name, leaf in zip("qkv", leaves, strict=True)}
    out, lse = flash_attention(**views, return_lse=True)
    with torch.no_grad():
        (views | {"out": out, "lse": lse})[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, leaves, x.d_out)


# ---------------------------------------------------------------- rows that see no key


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("dtype", "poisoned", "poison"),
    [
        ("float16", "q", NAN),
        ("float16", "d_out", NAN),
        ("float16", "d_lse", NAN),
        *((dtype, "q d_out d_lse", poison) for dtype in DTYPES for poison in (NAN, INF)),
    ],
)
def test_nothing_of_a_dead_row_reaches_a_result(
    dtype: str, poisoned: str, poison: float, device: torch.device
) -> None:
    BM, BN = largest_tile(device, dtype)
    dead = BM + 5  # a whole tile of rows and part of the next, which holds live rows too
    case = case_of(device, dtype=dtype, len_q=dead + BN + 3, len_k=BN + 3)
    x = inputs_of(device, dtype=dtype, len_q=case.len_q, len_k=case.len_k)

    def with_dead_rows(value: float) -> Inputs:
        changed = {name: getattr(x, name).clone() for name in poisoned.split()}
        for t in changed.values():
            t[:, :, :dead] = value
        return replace(x, **changed)

    found = attend(with_dead_rows(poison), causal=True)
    assert_same_bits(found, attend(with_dead_rows(0.0), causal=True))
    assert not found["out"][:, :, :dead].any() and not found["dq"][:, :, :dead].any()
    assert (found["lse"][:, :, :dead] == -INF).all()
    assert found["lse"][:, :, dead:].isfinite().all() and found["dq"][:, :, dead:].any(-1).all()
