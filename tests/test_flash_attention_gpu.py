"""What only a GPU can show of `flash_attention`: graphs, streams, devices, offsets, tensor cores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import flash_attention

from .calls import assert_same_bits, attend, every, inputs_of, with_exact_delta
from .values import Inputs

pytestmark = pytest.mark.usefixtures("gpu")


def fill(x: Inputs, values: Inputs) -> None:
    for name, t in vars(x).items():
        t.copy_(getattr(values, name))


def skip_unless_free(gpu: torch.device, gib: int) -> None:
    free = torch.cuda.mem_get_info(gpu)[0]
    if free < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free GPU memory, and there are {free / 2**30:.1f}")


@pytest.fixture
def memory_given_back() -> Iterator[None]:
    """Others may share the GPU: what a test took does not stay with this process."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


# ---------------------------------------------------------------- graphs, streams, devices


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_cuda_graph_of_forward_and_backward_gives_the_bits_of_an_eager_call(
    causal: bool, gpu: torch.device
) -> None:
    static, other = (inputs_of(gpu, batch=2, seed=seed) for seed in (0, 1))
    expected = attend(other, causal=causal)

    before = torch.cuda.Stream(gpu)  # compiles and loads, which a capture must not
    before.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(before):
        for _ in range(3):
            attend(static, causal=causal)
    torch.cuda.current_stream(gpu).wait_stream(before)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend(static, causal=causal)
    for _ in range(2):
        fill(static, other)
        for t in results.values():
            t.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize(gpu)
        assert_same_bits(results, expected)


def test_kernels_run_on_the_current_stream(gpu: torch.device) -> None:
    x = inputs_of(gpu, batch=2)
    expected = attend(x)  # compiled from here on
    late = every(x, lambda _, t: torch.full_like(t, math.nan))
    stream = torch.cuda.Stream(gpu)
    torch.cuda.synchronize(gpu)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        fill(late, x)  # a kernel on another stream would not wait for this, and find NaN
        found = attend(late)
    stream.synchronize()
    assert_same_bits(found, expected)


def test_tensors_on_a_device_that_is_not_the_current_one(gpu: torch.device) -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs, and there is one")
    current = torch.cuda.current_device()
    other = torch.device("cuda", (current + 1) % count)
    x = inputs_of(other)
    found = attend(x, causal=True)
    assert torch.cuda.current_device() == current
    assert {t.device for t in found.values()} == {other}
    with torch.cuda.device(other):
        expected = attend(x, causal=True)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("dynamic", [False, True], ids=["each length compiled", "lengths dynamic"])
def test_compiled_by_inductor_it_gives_the_same_bits(dynamic: bool, gpu: torch.device) -> None:
    torch.compiler.reset()
    compiled: Any = torch.compile(flash_attention, fullgraph=True, dynamic=dynamic)
    for length in (64, 65, 128):
        x = inputs_of(gpu, len_q=length, len_k=length + 1, heads_q=4, heads_kv=2)
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        out, lse = compiled(*leaves, causal=True, return_lse=True)
        gradients = torch.autograd.grad((out, lse), leaves, (x.d_out, x.d_lse))
        found = {"out": out.detach(), "lse": lse.detach()}
        found |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        assert_same_bits(found, attend(x, causal=True))


# ---------------------------------------------------------------- sizes


def assert_out_is_v(x: Inputs) -> None:
    """With one query and one key, out is v and dv is d_out, bit for bit; dq and dk are 0."""
    found = attend(x, through="out")
    assert x.d_out is not None
    assert torch.equal(found["out"], x.v), "out"
    assert torch.equal(found["dv"], x.d_out), "dv"
    assert found["lse"].isfinite().all(), "lse"
    assert not found["dq"].any() and not found["dk"].any(), "dq or dk"


@pytest.mark.parametrize("where", ["batch", "heads"])
def test_more_heads_than_a_grid_has_in_its_second_dimension(where: str, gpu: torch.device) -> None:
    count = 2**16 + 1
    sizes = {"batch": count} if where == "batch" else {"heads_q": count, "heads_kv": count}
    x = inputs_of(gpu, **({"heads_q": 1, "len_q": 1, "len_k": 1, "dim": 16} | sizes))
    assert_out_is_v(with_exact_delta(x))


@pytest.mark.usefixtures("memory_given_back")
def test_results_of_more_than_2_31_elements(gpu: torch.device) -> None:
    skip_unless_free(gpu, 24)
    batch = 2**31 // 256 + 1
    x = with_exact_delta(inputs_of(gpu, heads_q=1, len_q=1, len_k=1, dim=256))
    expanded = every(x, lambda _, t: t.expand(batch, *t.shape[1:]))
    assert_out_is_v(expanded)


ELEMENTS = 2**31 + 64

FAR: dict[str, tuple[dict[str, int], int, int]] = {
    "batch": ({"batch": 3, "heads_q": 1, "len_q": 1, "len_k": 1, "dim": 64}, 0, 2**30),
    "heads": ({"heads_q": 3, "heads_kv": 3, "len_q": 1, "len_k": 1, "dim": 64}, 1, 2**30),
    "sequence": ({"heads_q": 1, "len_q": 3, "len_k": 3, "dim": 64}, 2, 2**30),
    "head dimension": ({"heads_q": 1, "len_q": 1, "len_k": 1, "dim": 17}, 3, 2**27),
}
"""A dimension, and a stride of it that fits 32 bits while the offset of its last index does not."""


@pytest.fixture(scope="module")
def wide(gpu: torch.device) -> Iterator[Tensor]:
    """2**31 + 64 elements of float16, all NaN."""
    torch.cuda.empty_cache()
    skip_unless_free(gpu, 12)
    buffer = torch.full((ELEMENTS,), math.nan, dtype=torch.float16, device=gpu)
    yield buffer
    del buffer
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", ["q", "k", "v", "d_out"])
@pytest.mark.parametrize("dimension", FAR)
def test_offsets_beyond_32_bits(dimension: str, name: str, gpu: torch.device, wide: Tensor) -> None:
    sizes, which, stride = FAR[dimension]
    x = with_exact_delta(inputs_of(gpu, **sizes))
    t = getattr(x, name)
    strides = list(t.stride())
    strides[which] = stride
    far = wide.as_strided(t.shape, strides)
    far.copy_(t)
    try:
        found = attend(replace(x, **{name: far}))
    finally:
        far.fill_(math.nan)
    assert_same_bits(found, attend(x))


# ---------------------------------------------------------------- float32


def reference(x: Inputs) -> dict[str, Tensor]:
    """The definition in float64, for one KV head a query head, not causal."""
    q, k, v = (t.double().requires_grad_() for t in (x.q, x.k, x.v))
    scores = q @ k.mT * q.shape[3] ** -0.5
    out, lse = scores.softmax(3) @ v, scores.logsumexp(3)
    assert x.d_out is not None and x.d_lse is not None
    gradients = torch.autograd.grad((out, lse), (q, k, v), (x.d_out.double(), x.d_lse.double()))
    found = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return {"out": out.detach(), "lse": lse.detach()} | found


def test_float32_products_are_ieee_unless_tf32_is_allowed(gpu: torch.device) -> None:
    x = inputs_of(gpu, dtype="float32", dim=64, heads_q=2, heads_kv=2, len_q=129, len_k=131)
    exact, ieee, tf32 = reference(x), attend(x), attend(x, allow_tf32=True)
    assert_same_bits(attend(x, allow_tf32=False), ieee)
    for name, r in exact.items():
        error, error_tf32 = ((y[name] - r).abs().max().item() for y in (ieee, tf32))
        # the mantissas have 23 and 10 bits: wherever between their errors one draws the line
        assert 32 * error < error_tf32, f"{name}: {error:.1e} by default, {error_tf32:.1e} with TF32"
