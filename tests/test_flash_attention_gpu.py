"""What only a GPU can show of our functions: graphs, streams, devices, offsets, tensor cores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import flash_attention, flash_attention_varlen

from .calls import (
    Offsets,
    assert_same_bits,
    attend,
    every,
    inputs_of,
    ragged_inputs_of,
    same_bits,
    with_exact_delta,
)
from .cases import DTYPES
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


RAGGED = [(130, 70), (0, 9), (1, 200), (77, 0), (90, 131)]
OTHER_LENGTHS = [(3, 131), (200, 5), (0, 0), (65, 270), (30, 4)]
"""As many sequences and rows as RAGGED has, elsewhere."""


@pytest.fixture(params=["dense", "ragged"])
def two_problems(request: pytest.FixtureRequest, gpu: torch.device) -> list[tuple[Inputs, Offsets | None]]:
    """Two problems whose tensors have the same shapes, and other values and offsets."""
    if request.param == "dense":
        return [(inputs_of(gpu, batch=2, seed=seed), None) for seed in (0, 1)]
    lengths = (RAGGED, OTHER_LENGTHS)
    totals = [max(sum(pair[side] for pair in batch) for batch in lengths) for side in (0, 1)]
    found: list[tuple[Inputs, Offsets | None]] = []
    for seed, batch in enumerate(lengths):
        past = (totals[0] - sum(q for q, _ in batch), totals[1] - sum(k for _, k in batch))
        x = ragged_inputs_of(gpu, batch, past=past, seed=seed, heads_q=4, heads_kv=2)
        found.append((x, Offsets.of(batch, gpu)))
    return found


def fill_all(to: tuple[Inputs, Offsets | None], values: tuple[Inputs, Offsets | None]) -> None:
    fill(to[0], values[0])
    if to[1] is not None and values[1] is not None:
        to[1].cu_seqlens_q.copy_(values[1].cu_seqlens_q)
        to[1].cu_seqlens_k.copy_(values[1].cu_seqlens_k)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_cuda_graph_of_forward_and_backward_gives_the_bits_of_an_eager_call(
    causal: bool, two_problems: list[tuple[Inputs, Offsets | None]], gpu: torch.device
) -> None:
    """Captured with one input and one set of lengths, replayed with others."""
    static, other = two_problems
    expected = attend(*other, causal=causal)

    before = torch.cuda.Stream(gpu)  # compiles and loads, which a capture must not
    before.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(before):
        for _ in range(3):
            attend(*static, causal=causal)
    torch.cuda.current_stream(gpu).wait_stream(before)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend(*static, causal=causal)
    for _ in range(2):
        fill_all(static, other)
        for t in results.values():
            t.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize(gpu)
        assert_same_bits(results, expected)


def test_validate_is_refused_while_a_graph_is_captured(gpu: torch.device) -> None:
    x, offsets = ragged_inputs_of(gpu, RAGGED), Offsets.of(RAGGED, gpu)
    attend(x, offsets, wanted="")
    refused = pytest.raises(RuntimeError, match="validate is True while a CUDA graph is captured")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        attend(x, offsets, wanted="", validate=True)
    torch.cuda.synchronize(gpu)


def test_the_host_does_not_wait_for_the_device(
    two_problems: list[tuple[Inputs, Offsets | None]], gpu: torch.device
) -> None:
    x, offsets = two_problems[0]
    expected = attend(x, offsets)  # compiled from here on
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = attend(x, offsets)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert_same_bits(found, expected)


def test_kernels_run_on_the_current_stream(
    two_problems: list[tuple[Inputs, Offsets | None]], gpu: torch.device
) -> None:
    x, offsets = two_problems[0]
    expected = attend(x, offsets)  # compiled from here on
    late = every(x, lambda _, t: torch.full_like(t, math.nan))
    elsewhere = None
    if offsets is not None:
        cu_q, cu_k = (torch.zeros_like(cu) for cu in (offsets.cu_seqlens_q, offsets.cu_seqlens_k))
        elsewhere = replace(offsets, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    stream = torch.cuda.Stream(gpu)
    torch.cuda.synchronize(gpu)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        fill_all((late, elsewhere), (x, offsets))  # on another stream it would find NaN, and no sequences
        found = attend(late, elsewhere)
    stream.synchronize()
    assert_same_bits(found, expected)


CYCLES = 10**9
"""Half a second, or less: longer than the host needs for two calls that are compiled."""


def test_tensors_on_a_device_that_is_not_the_current_one(gpu: torch.device) -> None:
    """M7: forward and backward, on the device of the tensors, after what is queued on its stream.

    A GPU reaches its neighbour's memory: kernels that run on the wrong one give the right numbers all the
    same, unless what they read is written late.
    """
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs, and there is one")
    current = torch.cuda.current_device()
    other = torch.device("cuda", (current + 1) % count)
    for x, offsets in (
        (inputs_of(other), None),
        (ragged_inputs_of(other, RAGGED), Offsets.of(RAGGED, other)),
    ):
        with torch.cuda.device(other):
            expected = attend(x, offsets, causal=True)
        given = [t for t in vars(x).values() if t is not None]
        late = [t.clone() for t in given]
        for t in given:
            t.fill_(torch.nan)
        torch.cuda.synchronize(other)
        with torch.cuda.device(other):
            torch.cuda._sleep(CYCLES)
            for t, values in zip(given, late, strict=True):
                t.copy_(values)
        assert torch.cuda.current_device() == current
        for _ in range(3):  # compiled, launched directly, planned
            found = attend(x, offsets, causal=True)
            assert torch.cuda.current_device() == current
            assert {t.device for t in found.values()} == {other}
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


@pytest.mark.parametrize("dynamic", [False, True], ids=["each length compiled", "lengths dynamic"])
def test_ragged_and_compiled_by_inductor_it_gives_the_same_bits(dynamic: bool, gpu: torch.device) -> None:
    torch.compiler.reset()
    compiled: Any = torch.compile(flash_attention_varlen, fullgraph=True, dynamic=dynamic)
    for lengths in ([(64, 64), (65, 3)], [(65, 63), (130, 9)], [(128, 64), (0, 70), (5, 5)]):
        x, offsets = ragged_inputs_of(gpu, lengths), Offsets.of(lengths, gpu)
        found = attend(x, offsets, attention=compiled, causal=True)
        assert_same_bits(found, attend(x, offsets, causal=True))


# ---------------------------------------------------------------- repetition


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_250_forwards_and_50_backwards_of_a_large_batch_are_one(
    dtype: str, causal: bool, gpu: torch.device
) -> None:
    """A7, H7, H8, K4: what is read uninitialised or before it is there differs sometimes."""
    x = inputs_of(gpu, dtype=dtype, batch=4, heads_q=16, heads_kv=4, dim=72, len_q=500, len_k=530)
    expected = attend(x, causal=causal)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    for number in range(250):
        out, lse = flash_attention(*leaves, causal=causal, return_lse=True)
        found = {"out": out.detach(), "lse": lse.detach()}
        if number % 5 == 0:
            gradients = torch.autograd.grad((out, lse), leaves, (x.d_out, x.d_lse))
            found |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        assert_same_bits(found, {name: expected[name] for name in found})
    skewed = [(1500, 1500), *[(1, 1), (0, 7), (33, 200)] * 20]
    ragged, offsets = ragged_inputs_of(gpu, skewed, dtype=dtype, heads_q=8), Offsets.of(skewed, gpu)
    expected = attend(ragged, offsets, causal=causal)
    for _ in range(20):
        assert_same_bits(attend(ragged, offsets, causal=causal), expected)


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
    """E7."""
    count = 2**16 + 1
    sizes = {"batch": count} if where == "batch" else {"heads_q": count, "heads_kv": count}
    x = inputs_of(gpu, **({"heads_q": 1, "len_q": 1, "len_k": 1, "dim": 16} | sizes))
    assert_out_is_v(with_exact_delta(x))


def test_more_sequences_than_a_grid_has_in_its_second_dimension(gpu: torch.device) -> None:
    """E7: most of them empty."""
    lengths = [(1, 1)] * 500 + [(0, 0)] * 2**16 + [(1, 1)] * 500
    x = with_exact_delta(ragged_inputs_of(gpu, lengths, heads_q=1, dim=16))
    found, d_out = attend(x, Offsets.of(lengths, gpu), through="out"), x.d_out
    assert d_out is not None
    assert same_bits(found["out"], x.v) and torch.equal(found["dv"], d_out)
    assert not found["dq"].any() and not found["dk"].any()


@pytest.mark.usefixtures("memory_given_back")
def test_results_of_more_than_2_31_elements(gpu: torch.device) -> None:
    """E4: stores."""
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
    **{
        f"{rows} rows": ({"heads_q": 1, "len_q": rows + 1, "len_k": rows + 1, "dim": 64}, 2, 2**31 // rows)
        for rows in (32, 64, 128)
    },
}
"""A dimension, and a stride of it that fits 32 bits while the offset of its last index does not. Of so many
rows, the same of the step from a tile to the next."""


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
    """E1, E2: one tensor at a time."""
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


@pytest.mark.parametrize("name", ["q", "k", "v", "d_out"])
@pytest.mark.parametrize("dimension", ["rows", "heads"])
def test_ragged_offsets_beyond_32_bits(dimension: str, name: str, gpu: torch.device, wide: Tensor) -> None:
    """E1, E2: the sequence that lies beyond 2**31 elements, and the head."""
    lengths, heads = ([(1, 1)] * 3, 1) if dimension == "rows" else ([(1, 1)], 3)
    offsets = Offsets.of(lengths, gpu)
    x = with_exact_delta(ragged_inputs_of(gpu, lengths, heads_q=heads, heads_kv=heads, dim=64))
    t = getattr(x, name)
    strides = (2**30, 64, 1) if dimension == "rows" else (64, 2**30, 1)
    far = wide.as_strided(t.shape, strides)
    far.copy_(t)
    try:
        found = attend(replace(x, **{name: far}), offsets)
    finally:
        far.fill_(math.nan)
    assert_same_bits(found, attend(x, offsets))


@pytest.mark.usefixtures("memory_given_back")
@pytest.mark.parametrize("dimension", [0, 1, 2], ids=["batch", "heads", "rows"])
def test_offsets_of_the_gradient_of_the_lse_beyond_32_bits(dimension: int, gpu: torch.device) -> None:
    """E2: the pass over the rows before the backward proper."""
    skip_unless_free(gpu, 12)
    sizes = [{"batch": 3, "heads_q": 1, "len_q": 1}, {"heads_q": 3, "heads_kv": 3, "len_q": 1},
             {"heads_q": 1, "len_q": 3}][dimension]  # fmt: skip
    x = with_exact_delta(inputs_of(gpu, len_k=1, dim=64, **sizes))
    assert x.d_lse is not None
    strides = [1, 1, 1]
    strides[dimension] = 2**30
    buffer = torch.full((2**31 + 64,), math.nan, dtype=torch.float32, device=gpu)
    far = buffer.as_strided(x.d_lse.shape, strides)
    far.copy_(x.d_lse)
    assert_same_bits(attend(replace(x, d_lse=far)), attend(x))


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
    """F4, F5."""
    x = inputs_of(gpu, dtype="float32", dim=64, heads_q=2, heads_kv=2, len_q=129, len_k=131)
    exact, ieee, tf32 = reference(x), attend(x), attend(x, allow_tf32=True)
    assert_same_bits(attend(x, allow_tf32=False), ieee)
    for name, r in exact.items():
        error, error_tf32 = ((y[name] - r).abs().max().item() for y in (ieee, tf32))
        # the mantissas have 23 and 10 bits: wherever between their errors one draws the line
        assert 32 * error < error_tf32, f"{name}: {error:.1e} by default, {error_tf32:.1e} with TF32"
