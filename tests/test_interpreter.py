"""What we rely on in Triton's interpreter, and what we work around: a canary for the day it is mended."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernels.numerics import operand, store_tile

from .session import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="about the interpreter: kernels are compiled here")

N = 16


@triton.jit
def multiply(A, B, C):
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    product = tl.dot(tl.load(A + at), tl.load(B + at))
    tl.store(C + at, product)


@triton.jit
def round_and_store(X, Y):
    rows = tl.arange(0, 64)
    x = tl.load(X + rows[:, None] * 16 + tl.arange(0, 16)[None, :])
    store_tile(Y + rows * 16, (x,), rows, 64, 1, 16, 16, 1, True)


@triton.jit
def load_and_raise(X, Y):
    at = tl.arange(0, 65536)
    tl.store(Y + at, operand(tl.load(X + at), True))


def product_error(dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(N, N, generator=generator).to(dtype) for _ in range(2))
    c = torch.empty(N, N)
    multiply[(1,)](a, b, c)
    return (c - a.float() @ b.float()).abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_products_are_right(dtype: torch.dtype) -> None:
    assert product_error(dtype) < 1e-5


@pytest.mark.xfail(strict=True, reason="the interpreter multiplies the bit patterns of bfloat16 operands")
def test_products_of_bfloat16_are_right() -> None:
    """The day this passes, EMULATE_BF16 in kernels/numerics.py can go."""
    assert product_error(torch.bfloat16) < 1e-5


def test_we_round_to_bfloat16_as_pytorch_does() -> None:
    """To nearest, ties to even; subnormal numbers, infinities and NaN included."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1024,), generator=generator).to(torch.int32)
    x = bits.view(torch.float32)
    halves = torch.arange(256, dtype=torch.int32) * 0x8000 + 0x3F800000  # every midpoint in [1, 2)
    x[:256] = halves.view(torch.float32)
    x[256:512] = (bits[256:512] & 0x807FFFFF).view(torch.float32)  # subnormal
    x[512:516] = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0])
    y = torch.empty(1024, dtype=torch.bfloat16)
    round_and_store[(1,)](x, y)
    assert_same(y, x.bfloat16())


def test_we_raise_every_bfloat16_to_the_same_float32() -> None:
    x = torch.arange(65536).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    y = torch.empty(65536)
    load_and_raise[(1,)](x, y)
    assert_same(y, x.float())


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    integers = {2: torch.int16, 4: torch.int32}[found.element_size()]
    number = ~expected.isnan()
    assert torch.equal(found.isnan(), ~number)
    assert torch.equal(found.view(integers)[number], expected.view(integers)[number])
