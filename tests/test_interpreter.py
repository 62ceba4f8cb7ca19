"""What we rely on in Triton's interpreter, and what we work around: a canary for the day it is mended."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernels.numerics import rounded

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
def round_to_bfloat16(X, Y):
    at = tl.arange(0, 1024)
    tl.store(Y + at, rounded(tl.load(X + at), tl.bfloat16, True).to(tl.bfloat16))


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


def test_our_rounding_to_bfloat16_is_that_of_pytorch() -> None:
    """To nearest, ties to even; subnormal numbers, infinities and NaN included."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1024,), generator=generator).to(torch.int32)
    x = bits.view(torch.float32)
    halves = torch.arange(256, dtype=torch.int32) * 0x8000 + 0x3F800000  # every midpoint in [1, 2)
    x[:256] = halves.view(torch.float32)
    x[256:260] = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0])
    y = torch.empty(1024, dtype=torch.bfloat16)
    round_to_bfloat16[(1,)](x, y)
    expected = x.bfloat16()
    assert torch.equal(y.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(y.view(torch.int16)[number], expected.view(torch.int16)[number])
