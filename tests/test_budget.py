"""Proves what every sigma and bound is made of: half steps and roundings bit for bit against NumPy's and
PyTorch's own, the laws of sums and flips against simulated roundings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from reference.budget import BFLOAT16, FLOAT16, FLOAT32, A, Dtype, flip_variance, sum_bound, sum_sigma

Array = NDArray[np.float64]

halves = pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=lambda dtype: dtype.name)


def every_finite(dtype: Dtype) -> Array:
    """All finite numbers of a 16-bit dtype, in order."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(getattr(torch, dtype.name)).double().numpy()
    return np.unique(x[np.isfinite(x)])


def stored(x: Array, dtype: Dtype) -> Array:
    """x as the dtype stores it. float64 to bfloat16 would round twice; what is float32 already does not."""
    if dtype is FLOAT16:
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float64)
    single = torch.from_numpy(x).float()
    assert (single.double().numpy() == x).all()
    return single.to(getattr(torch, dtype.name)).double().numpy()


def same_bits(x: Array, y: Array) -> bool:
    return bool(((x == y) & (np.signbit(x) == np.signbit(y))).all())


@halves
def test_every_number_of_the_dtype_is_rounded_to_itself(dtype: Dtype) -> None:
    x = every_finite(dtype)
    assert x.max() == dtype.largest
    assert same_bits(dtype.rounded(x), x)


@halves
def test_the_half_step_is_half_the_distance_to_the_next_number_away_from_zero(dtype: Dtype) -> None:
    x = every_finite(dtype)
    positive = x[x >= 0]
    assert (dtype.half_step(positive[:-1]) == np.diff(positive) / 2).all()
    assert (dtype.half_step(-positive) == dtype.half_step(positive)).all()
    assert dtype.half_step(np.array(0.0)) == dtype.eta == positive[1] / 2


@halves
def test_ties_go_to_even_and_all_else_to_the_nearer(dtype: Dtype) -> None:
    """About every midpoint of the dtype, subnormal ones too: on it, and just beside it on both sides."""
    x = every_finite(dtype)
    middle = (x[1:] + x[:-1]) / 2
    beside = np.diff(x) * 2.0**-8
    for y in (middle, middle - beside, middle + beside):
        assert (dtype.rounded(y) == stored(y, dtype)).all()


@halves
def test_a_number_is_infinite_from_where_it_rounds_past_the_largest(dtype: Dtype) -> None:
    step = dtype.overflow - dtype.largest
    x = np.array([dtype.largest, dtype.overflow - step / 8, dtype.overflow, dtype.overflow + step / 8])
    expected = np.array([dtype.largest, dtype.largest, np.inf, np.inf])
    for sign in (1, -1):
        assert (dtype.rounded(sign * x) == sign * expected).all()
        assert (stored(sign * x, dtype) == sign * expected).all()


@halves
def test_random_numbers_of_every_size_are_rounded_as_the_libraries_do(dtype: Dtype) -> None:
    rng = np.random.default_rng(0)
    smallest, largest = (-28, 17) if dtype is FLOAT16 else (-140, 128)
    x = np.ldexp(rng.uniform(-1, 1, 10**5), rng.integers(smallest, largest, 10**5))
    x = x.astype(np.float32).astype(np.float64)
    assert (dtype.rounded(x) == stored(x, dtype)).all()


def test_float32_is_rounded_as_numpy_does_above_what_a_gpu_may_flush() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(10**5) * 10.0 ** rng.integers(-24, 38, 10**5)
    single = x.astype(np.float32)
    assert (FLOAT32.rounded(x) == single).all()
    step = np.spacing(np.abs(single)).astype(np.float64)
    assert (FLOAT32.half_step(single.astype(np.float64)) == step / 2).all()


@halves
def test_a_rounding_error_is_uniform_over_the_step(dtype: Dtype) -> None:
    x = np.random.default_rng(0).uniform(0.3, 5, 10**5)
    error = (dtype.rounded(x) - x) / dtype.half_step(x)
    assert np.abs(error).max() <= 1
    assert abs(error.mean()) < 0.01
    assert error.var() == pytest.approx(1 / 3, rel=0.02)


@pytest.mark.parametrize("spacings", [1e-3, 0.01, 0.05, 0.2])
def test_two_roundings_of_one_quantity_differ_by_the_variance_of_a_flip(spacings: float) -> None:
    """Errors small against the grid: rarely a flip, but of a whole step."""
    h = FLOAT16.half_step(np.array(1.5))
    error = spacings * 2 * h
    rng = np.random.default_rng(0)
    x = rng.uniform(1.25, 1.75, 10**6)
    first, second = (FLOAT16.rounded(x + error * rng.standard_normal(x.size)) for _ in range(2))
    measured = ((first - second) ** 2).mean()
    assert measured == pytest.approx(float(flip_variance(h, np.array(error))), rel=0.1)


@pytest.mark.parametrize("spacings", [0.01, 0.1, 0.4])
def test_a_shift_of_one_of_the_two_flips_too(spacings: float) -> None:
    """The variance about the shift itself, which moves all elements in step, is no larger."""
    h = FLOAT16.half_step(np.array(1.5))
    shift = spacings * 2 * h
    x = np.random.default_rng(0).uniform(1.25, 1.75, 10**6)
    apart = FLOAT16.rounded(x - shift) - FLOAT16.rounded(x)
    assert apart.mean() == pytest.approx(-shift, rel=0.05)
    predicted = float(flip_variance(h, np.array(0.0), shift))
    assert (apart**2).mean() == pytest.approx(predicted, rel=0.1)
    assert apart.var() < predicted * 1.02


@pytest.mark.parametrize("spacings", [1.0, 3.0])
def test_beyond_the_grid_a_flip_is_the_plain_difference(spacings: float) -> None:
    """But for the two roundings themselves, which the sigma of an emulation counts elsewhere."""
    h = FLOAT16.half_step(np.array(1.5))
    error = spacings * 2 * h
    rng = np.random.default_rng(0)
    x = rng.uniform(1.25, 1.75, 10**6)
    first, second = (FLOAT16.rounded(x + error * rng.standard_normal(x.size)) for _ in range(2))
    predicted = float(flip_variance(h, np.array(error)))
    assert predicted == 2 * error**2
    assert predicted <= ((first - second) ** 2).mean() <= predicted + 2 * h**2 / 3 * 1.02


@pytest.mark.parametrize("n", [4, 64, 1024])
@pytest.mark.parametrize("signed", [True, False], ids=["terms of both signs", "terms of one sign"])
def test_a_float32_sum_stays_within_its_bound_and_near_its_sigma(n: int, signed: bool) -> None:
    """Term by term, the worst order that a kernel may use."""
    rng = np.random.default_rng(0)
    terms = (rng.standard_normal((2000, n)) if signed else rng.uniform(0, 1, (2000, n))).astype(np.float32)
    total = np.zeros(2000, np.float32)
    for j in range(n):
        total += terms[:, j]
    exact = terms.astype(np.float64).sum(1)
    error = np.abs(total - exact) / np.abs(terms).astype(np.float64).sum(1)
    assert error.max() <= sum_bound(n)
    assert np.sqrt((error**2).mean()) <= sum_sigma(n)
    assert sum_sigma(n) >= A
