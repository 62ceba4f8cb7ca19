"""Where a correct attention kernel rounds, and how much: the constants and laws behind every bound and sigma.

Products of 16-bit operands are exact in float32 and are summed in float32; P and dS are rounded to the
dtype of the inputs before they enter the second product; results are rounded once more when stored.
Symbols, and what they are called in `error_model`:

    a       A            2^-24, half an ulp of 1 in float32
    u       Dtype.u      half an ulp of 1 in the dtype of the inputs (float32: P and dS are not rounded)
    h(x)    half_step    half a step of that dtype at x: a rounding error is uniform on [-h, h]
    c_n     sum_sigma    standard deviation of a float32 sum of n terms, relative to their magnitudes
    beta_n  truncation   a tensor core truncates its sums: they come out low by up to n 2^-26, in step

Sources: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., sections 2.2 and 4.2 (bounds);
Blanchard, Higham, Lopez, Mary, Pranesh, SIAM J. Sci. Comput. 42(3), 2020 (tensor cores); the
statistical form is our own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

A = 2.0**-24
"""Half an ulp of 1 in float32, the dtype of every accumulation."""

C_EXP = 4 * A
"""Relative standard deviation allowed to an exponential (exp2 of the GPU is good to 2 ulp)."""

FLUSHED = 2.0**-126
"""Smallest normal float32: exp2 on a GPU flushes what lies below to zero."""


@dataclass(frozen=True)
class Dtype:
    """What rounding to a dtype means.

    Attributes:
        name: NumPy's and PyTorch's name of the dtype.
        u: half an ulp of 1.
        eta: half the step of the subnormal numbers (float32: what a GPU may flush to zero).
        largest: largest finite value.
        overflow: smallest magnitude that rounds to infinity.
    """

    name: str
    u: float
    eta: float
    largest: float
    overflow: float

    def half_step(self, x: Array) -> Array:
        """h(x): the largest error of rounding x, elementwise."""
        _, exponent = np.frexp(x)  # |x| in [2^(e-1), 2^e)
        return np.where(x == 0, self.eta, np.maximum(np.ldexp(self.u, exponent - 1), self.eta))

    def rounded(self, x: Array) -> Array:
        """x rounded to nearest, ties to even; what overflows becomes infinite."""
        step = 2 * self.half_step(x)
        y = np.rint(x / step) * step
        return np.where(np.abs(y) > self.largest, np.copysign(np.inf, x), y)

    def rounded_away(self, x: Array) -> Array:
        """x rounded to nearest, ties away from zero; what is too large stays."""
        step = 2 * self.half_step(x)
        y = np.copysign(np.floor(np.abs(x) / step + 0.5) * step, x)
        return np.where(np.abs(y) > self.largest, x, y)

    def truncated(self, x: Array) -> Array:
        """x cut off towards zero; what is too large stays."""
        step = 2 * self.half_step(x)
        return np.where(np.abs(x) > self.largest, x, np.trunc(x / step) * step)


FLOAT16 = Dtype("float16", 2.0**-11, 2.0**-25, 65504.0, 65520.0)
BFLOAT16 = Dtype("bfloat16", 2.0**-8, 2.0**-134, 2.0**128 * (1 - 2.0**-8), 2.0**128 * (1 - 2.0**-9))
FLOAT32 = Dtype("float32", A, FLUSHED, 2.0**128 * (1 - 2.0**-24), 2.0**128 * (1 - 2.0**-25))

DTYPES = {dtype.name: dtype for dtype in (FLOAT16, BFLOAT16, FLOAT32)}

TF32 = Dtype("tf32", 2.0**-11, 2.0**-137, 2.0**128 * (1 - 2.0**-11), 2.0**128 * (1 - 2.0**-12))
"""What a tensor core takes of a float32 operand: float32's exponents, float16's digits."""

PRODUCTS = ("ieee", "tf32")


@dataclass(frozen=True)
class Rounding:
    """Where an implementation rounds, as far as it differs from ours. Declared by it, never guessed.

    Attributes:
        p_rounded_before_ds: dS is formed from P already rounded to the dtype of the inputs.
        l_from_rounded_p: the row sum l is taken of the rounded P.
        heads_rounded_before_group_sum: dk and dv of each query head are rounded to the dtype of the inputs
            before they are added up over the group.
        products: of float32 inputs: "ieee", or "tf32": each operand of a product is rounded to TF32, either
            way at ties, or cut off to it.

    Raises:
        ValueError: if `products` is neither.
    """

    p_rounded_before_ds: bool = False
    l_from_rounded_p: bool = False
    heads_rounded_before_group_sum: bool = False
    products: str = "ieee"

    def __post_init__(self) -> None:
        if self.products not in PRODUCTS:
            raise ValueError(f"products is {self.products!r}; it may be {' or '.join(PRODUCTS)}")


def sum_sigma(n: int) -> float:
    """c_n: standard deviation of a float32 sum of n terms relative to the sum of the magnitudes."""
    return A * max(1.0, n**0.5 / 3)


def sum_bound(n: int) -> float:
    """Hard bound on the relative error of a float32 sum of n products and a few operations on it."""
    return A * (n + 12)


def truncation(n: int) -> float:
    """beta_n: how far below its value a tensor core's sum of n products may lie, relatively."""
    return n * 2.0**-26


def flip_variance(h: Array, error: Array, shift: Array | float = 0.0) -> Array:
    """Variance of the difference of two roundings of a quantity computed twice, each with `error`.

    The two computed values differ by sqrt(2) `error` (a standard deviation), and one of them may be off by
    `shift` besides; they fall on different sides of a midpoint of the grid (spacing 2h) with probability
    E|difference| / 2h and then differ by 2h. E|N(0, s)| = 0.8 s, hence 2h (0.8 * sqrt(2) * error + |shift|);
    where the difference exceeds the grid this is the plain variance.
    """
    shift = np.abs(shift)
    return np.maximum(h * (2.3 * error + 2 * shift), 2 * error**2 + shift**2)
