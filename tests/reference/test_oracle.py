"""Proves the float64 oracle, which everything else is judged by: against numerical derivatives,
closed forms, 50-digit arithmetic, and the identities that attention obeys.

Where exactness is not claimed, "equal" means within EXACT of the magnitudes that were summed, which
leaves float64 some hundred roundings and is a million times below the rounding of float32.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
from numpy.typing import NDArray

from reference import oracle

Array = NDArray[np.float64]

EXACT = 1e-13
SUMS = 20.0  # more than the magnitudes of the ten or so terms of any sum in the small problems
GRADIENTS = ("dq", "dk", "dv")
TENSORS = ("out", "lse", *GRADIENTS)


class Problem(NamedTuple):
    """One attention problem: the positional arguments of the oracle, in order."""

    q: Array
    k: Array
    v: Array
    d_out: Array
    d_lse: Array


def problem(
    *,
    heads: tuple[int, int] = (2, 1),
    lengths: tuple[int, int] = (4, 6),
    dims: tuple[int, int] = (3, 2),
    batch: int = 1,
    seed: int = 0,
) -> Problem:
    """Normal values; heads = (Hq, Hkv), lengths = (Sq, Sk), dims = (D, Dv)."""
    (hq, hkv), (sq, sk), (d, dv) = heads, lengths, dims
    shapes = (hq, sq, d), (hkv, sk, d), (hkv, sk, dv), (hq, sq, dv), (hq, sq)
    rng = np.random.default_rng(seed)
    return Problem(*(rng.standard_normal((batch, *shape)) for shape in shapes))


def values(*tensors: Any, **options: Any) -> dict[str, Array]:
    """The oracle's exact values by the name of the tensor."""
    result = oracle.attention(*tensors, **options)
    parts = {name: getattr(result, name) for name in TENSORS}
    return {name: part.value for name, part in parts.items() if part is not None}


def assert_equal(got: Array, expected: Any, magnitude: Any = 1.0) -> None:
    """Within EXACT of `magnitude`, elementwise; infinities have to be the same ones."""
    expected = np.broadcast_to(np.asarray(expected, dtype=float), got.shape)
    with np.errstate(invalid="ignore"):
        error = np.where(got == expected, 0.0, np.abs(got - expected))
    worst = np.max(error - EXACT * np.broadcast_to(magnitude, got.shape), initial=-np.inf)
    assert worst <= 0, f"worst error {error.max()}, {worst} too much"


def visible(sq: int, sk: int, causal: bool, alignment: str = "bottom-right") -> Iterator[list[int]]:
    """For each query the keys that it sees, written out as the definition reads."""
    offset = sk - sq if alignment == "bottom-right" else 0
    for i in range(sq):
        yield [j for j in range(sk) if not causal or j <= i + offset]


def sizes(lengths: tuple[int, int]) -> str:
    return "{} queries, {} keys".format(*lengths)


masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


# Numerical derivatives: the gradients belong to the forward, whatever the forward is.


def derivative(x: Problem, name: str, **options: Any) -> Array:
    """Central differences of fourth order of Σ out·d_out + Σ lse·d_lse, by every element of `name`.

    Every displaced copy of the problem is one entry of a batch, so that one call computes them all.
    """
    step = 1e-3
    at = getattr(x, name)
    unit = np.eye(at.size).reshape(at.size, *at.shape[1:])

    def loss(distance: float) -> Array:
        moved = {n: np.repeat(getattr(x, n), at.size, axis=0) for n in ("q", "k", "v")}
        moved[name] = moved[name] + distance * unit
        y = values(moved["q"], moved["k"], moved["v"], **options)
        # A dead row's lse is -inf whatever the inputs: constant, so it has no derivative.
        lse = np.where(np.isneginf(y["lse"]), 0.0, y["lse"])
        return (y["out"] * x.d_out).sum((1, 2, 3)) + (lse * x.d_lse).sum((1, 2))

    near, far = (loss(h) - loss(-h) for h in (step, 2 * step))
    return ((8 * near - far) / (12 * step)).reshape(at.shape)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="full"),
        pytest.param({"causal": True}, id="causal"),
        pytest.param({"causal": True, "alignment": "top-left"}, id="causal top-left"),
        pytest.param({"causal": True, "scale": -1.3}, id="causal, negative scale"),
        pytest.param({"scale": 0.0}, id="scale zero"),
    ],
)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"lengths": (4, 6)}, id="more keys"),
        pytest.param({"lengths": (5, 3)}, id="more queries"),
        pytest.param({"lengths": (3, 4), "heads": (4, 2), "dims": (2, 3)}, id="grouped heads"),
    ],
)
def test_gradients_are_the_derivatives_of_the_forward(
    shape: dict[str, Any], options: dict[str, Any], name: str
) -> None:
    x = problem(**shape)
    gradient = values(*x, **options)[f"d{name}"]
    # step^4 times a fifth derivative of order 10 to 100, and eps/step: both near 1e-11
    np.testing.assert_allclose(gradient, derivative(x, name, **options), rtol=0, atol=1e-9)


@pytest.mark.parametrize("absent", ["d_out", "d_lse"])
def test_a_gradient_not_given_counts_as_zero(absent: str) -> None:
    x = problem()
    gradients = {"d_out": x.d_out, "d_lse": x.d_lse}
    alone = values(*x[:3], **gradients | {absent: None}, causal=True)
    both = values(*x[:3], **gradients | {absent: 0 * gradients[absent]}, causal=True)
    for name in TENSORS:
        assert_equal(alone[name], both[name])
    assert np.abs(alone["dq"]).max() > 0.01


def test_no_gradients_without_d_out_and_d_lse() -> None:
    assert set(values(*problem()[:3])) == {"out", "lse"}


# 50 digits: the same closed forms, written once more with Python loops and mpmath's numbers.


def fifty_digits(
    x: Problem, *, causal: bool, scale: float | None, alignment: str = "bottom-right"
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Values and, for each element, the sum of the magnitudes of its terms, rounded to float64.

    That sum is what a float64 computation can be relative to: an element may cancel to nothing.
    """
    (batch, hq, sq, d), (hkv, sk), dim_v = x.q.shape, x.k.shape[1:3], x.v.shape[3]
    shapes = {"out": x.d_out.shape, "lse": x.d_lse.shape}
    shapes |= {"dq": x.q.shape, "dk": x.k.shape, "dv": x.v.shape}
    value = {name: np.full(shape, mpmath.mpf(0)) for name, shape in shapes.items()}
    magnitude = {name: np.full(shape, mpmath.mpf(0)) for name, shape in shapes.items()}
    with mpmath.workdps(50):
        alpha = 1 / mpmath.sqrt(d) if scale is None else mpmath.mpf(scale)
        q, k, v, d_out, d_lse = (np.vectorize(mpmath.mpf, otypes=[object])(tensor) for tensor in x)

        def add(name: str, at: tuple[int, ...], term: Any, size: Any) -> None:
            value[name][at] += term
            magnitude[name][at] += size

        for b, h, (i, seen) in (
            (b, h, row)
            for b in range(batch)
            for h in range(hq)
            for row in enumerate(visible(sq, sk, causal, alignment))
        ):
            g = h // (hq // hkv)
            qi, do, dlse = q[b, h, i], d_out[b, h, i], d_lse[b, h, i]
            if not seen:
                add("lse", (b, h, i), mpmath.ninf, 0)
                continue
            s = {j: alpha * mpmath.fdot(qi, k[b, g, j]) for j in seen}
            lse = mpmath.log(mpmath.fsum(mpmath.exp(s[j]) for j in seen))
            p = {j: mpmath.exp(s[j] - lse) for j in seen}
            dp = {j: mpmath.fdot(do, v[b, g, j]) for j in seen}
            dp_size = {j: mpmath.fdot(abs(do), abs(v[b, g, j])) for j in seen}
            delta = mpmath.fsum(p[j] * dp[j] for j in seen)
            delta_size = mpmath.fsum(p[j] * dp_size[j] for j in seen)
            add("lse", (b, h, i), lse, abs(lse))
            for j in seen:
                ds = p[j] * (dp[j] - delta + dlse)
                ds_size = p[j] * (dp_size[j] + delta_size + abs(dlse))
                for c in range(dim_v):
                    add("out", (b, h, i, c), *(p[j] * f(v[b, g, j, c]) for f in (mpmath.mpf, abs)))
                    add("dv", (b, g, j, c), *(p[j] * f(do[c]) for f in (mpmath.mpf, abs)))
                for c in range(d):
                    key, query = k[b, g, j, c], qi[c]
                    add("dq", (b, h, i, c), alpha * ds * key, abs(alpha * ds_size * key))
                    add("dk", (b, g, j, c), alpha * ds * query, abs(alpha * ds_size * query))
    as_float = {name: tensor.astype(float) for name, tensor in value.items()}
    return as_float, {name: tensor.astype(float) for name, tensor in magnitude.items()}


def steep() -> Problem:
    """Scores of ±1e4, exact in float64, and pairs of them one apart, so that both count."""
    x = problem(lengths=(3, 5))
    q, k = np.zeros_like(x.q), np.zeros_like(x.k)
    q[..., 0], q[..., 1] = 100.0, 1.0
    k[..., 0] = [100.0, -100.0, 100.0, 0.0, 100.0]
    k[..., 1] = [0.0, 2.0, 1.0, 3.0, -1.0]
    q[:, :, 2, :] *= -1  # here the one score of +1e4 wins alone
    return x._replace(q=q, k=k)


@masks
@pytest.mark.parametrize(
    ("x", "scale"),
    [
        pytest.param(problem(lengths=(3, 4)), None, id="more keys"),
        pytest.param(problem(lengths=(5, 4), dims=(3, 3)), None, id="more queries"),
        pytest.param(problem(lengths=(4, 7), heads=(4, 2), dims=(5, 2)), None, id="grouped heads"),
        pytest.param(problem(heads=(2, 2), dims=(4, 1), batch=2), None, id="one KV head each"),
        pytest.param(problem(), -1.7, id="negative scale"),
        pytest.param(problem(), 0.0, id="scale zero"),
        pytest.param(problem(), 6.0, id="large scale"),
        pytest.param(steep(), 1.0, id="scores of 10000 and -10000"),
    ],
)
def test_values_equal_a_computation_with_fifty_digits(x: Problem, scale: float | None, causal: bool) -> None:
    expected, magnitude = fifty_digits(x, causal=causal, scale=scale)
    got = values(*x, causal=causal, scale=scale)
    for name in TENSORS:
        assert_equal(got[name], expected[name], magnitude[name])


@pytest.mark.parametrize("lengths", [(3, 6), (5, 3), (4, 4)], ids=sizes)
def test_top_left_alignment_equals_a_computation_with_fifty_digits(
    lengths: tuple[int, int],
) -> None:
    x = problem(lengths=lengths)
    expected, magnitude = fifty_digits(x, causal=True, scale=None, alignment="top-left")
    got = values(*x, causal=True, alignment="top-left")
    for name in TENSORS:
        assert_equal(got[name], expected[name], magnitude[name])


# Closed forms.


@masks
def test_one_key_passes_its_value_on(causal: bool) -> None:
    """P = 1: out = v exactly, lse = s, and only d_lse reaches q and k."""
    x = problem(lengths=(1, 1), heads=(4, 2), dims=(5, 3))
    scale = 0.7
    got = values(*x, causal=causal, scale=scale)
    k, v = (np.repeat(kv, 2, axis=1) for kv in (x.k, x.v))
    d_s = scale * x.d_lse[..., None]
    np.testing.assert_array_equal(got["out"], v)
    assert_equal(got["lse"], scale * (x.q * k).sum(-1), scale * np.abs(x.q * k).sum(-1))
    # dP - Δ cancels exactly only in exact arithmetic, hence the second term
    size = 2 * np.abs(x.d_out * v).sum(-1, keepdims=True) + np.abs(x.d_lse[..., None])
    assert_equal(got["dq"], d_s * k, scale * size * np.abs(k))
    group = (1, 2, 2, 1, -1)  # (B, Hkv, heads of a group, S, D)
    assert_equal(got["dk"], (d_s * x.q).reshape(group).sum(2), SUMS)
    assert_equal(got["dv"], x.d_out.reshape(group).sum(2), np.abs(x.d_out).max() * 2)


def test_two_keys_are_a_logistic_function() -> None:
    x = problem(lengths=(1, 2), heads=(1, 1), dims=(1, 1))
    (q,), k, v, (d_out,) = (tensor.ravel() for tensor in x[:4])
    p = 1 / (1 + math.exp(-0.5 * q * (k[0] - k[1])))
    slope = p * (1 - p) * (v[0] - v[1]) * d_out  # of the loss, by the difference of the scores
    got = values(*x[:4], scale=0.5)
    assert_equal(got["out"], p * v[0] + (1 - p) * v[1])
    assert_equal(got["lse"], math.log(math.exp(0.5 * q * k[0]) + math.exp(0.5 * q * k[1])))
    assert_equal(got["dq"].ravel(), 0.5 * slope * (k[0] - k[1]))
    assert_equal(got["dk"].ravel(), [0.5 * slope * q, -0.5 * slope * q])
    assert_equal(got["dv"].ravel(), [p * d_out, (1 - p) * d_out])


@masks
@pytest.mark.parametrize("lengths", [(5, 9), (9, 5)], ids=sizes)
def test_equal_keys_average_the_visible_values(lengths: tuple[int, int], causal: bool) -> None:
    x = problem(lengths=lengths, heads=(1, 1))
    got = values(x.q, np.broadcast_to(x.k[:, :, :1], x.k.shape), x.v, causal=causal)
    for i, seen in enumerate(visible(*lengths, causal)):
        score = x.q[0, 0, i] @ x.k[0, 0, 0] / math.sqrt(3)
        mean = x.v[0, 0, seen].mean(0) if seen else np.zeros(2)
        lse = score + math.log(len(seen)) if seen else -math.inf
        assert_equal(got["out"][0, 0, i], mean)
        assert_equal(got["lse"][0, 0, i], lse, SUMS)


def test_scores_far_apart_pick_one_key() -> None:
    """The others are more than e^-745 below, which is 0 in float64."""
    x = problem(lengths=(4, 5), heads=(1, 1), dims=(5, 3))
    picked = [3, 0, 4, 1]
    q = 50.0 * np.eye(5)[picked][None, None]
    k = 50.0 * np.eye(5)[None, None]
    got = values(q, k, x.v, x.d_out, x.d_lse, scale=1.0)
    dv = np.zeros_like(x.v)
    dv[:, :, picked] = x.d_out
    np.testing.assert_array_equal(got["out"], x.v[:, :, picked])
    np.testing.assert_array_equal(got["lse"], np.full((1, 1, 4), 2500.0))
    np.testing.assert_array_equal(got["dv"], dv)
    assert_equal(got["dq"], x.d_lse[..., None] * k[:, :, picked], 50 * 10)


@masks
def test_constant_values_come_out_and_leave_only_the_gradient_of_lse(causal: bool) -> None:
    x = problem(lengths=(4, 6))
    constant = np.broadcast_to(x.v[:, :, :1], x.v.shape)
    got = values(*x._replace(v=constant), causal=causal)
    through_lse = values(x.q, x.k, constant, None, x.d_lse, causal=causal)
    assert_equal(got["out"], constant[:, :, :1], np.abs(constant).max())
    for name in ("dq", "dk"):
        assert_equal(got[name], through_lse[name], SUMS)


@pytest.mark.parametrize("lengths", [(5, 3), (3, 1), (2, 0)], ids=sizes)
def test_dead_rows_are_zero_and_give_nothing(lengths: tuple[int, int]) -> None:
    """What is left is the problem without them."""
    dead = lengths[0] - lengths[1]
    x = problem(lengths=lengths)
    got = values(*x, causal=True)
    live = Problem(x.q[:, :, dead:], x.k, x.v, x.d_out[:, :, dead:], x.d_lse[:, :, dead:])
    expected = values(*live, causal=True)
    assert np.isneginf(got["lse"][:, :, :dead]).all()
    assert not got["out"][:, :, :dead].any()
    assert not got["dq"][:, :, :dead].any()
    for name in ("out", "lse", "dq"):
        assert_equal(got[name][:, :, dead:], expected[name], SUMS)
    for name in ("dk", "dv"):
        assert_equal(got[name], expected[name], SUMS)


def test_without_keys_every_row_is_dead() -> None:
    got = values(*problem(lengths=(3, 0)))
    assert np.isneginf(got["lse"]).all()
    assert got["lse"].shape == (1, 2, 3)
    assert not got["out"].any()
    assert not got["dq"].any()


@pytest.mark.parametrize(
    ("lengths", "alignment", "seen"),
    [
        pytest.param((0, 4), "bottom-right", 0, id="no queries"),
        pytest.param((2, 5), "top-left", 2, id="keys beyond a top-left diagonal"),
    ],
)
def test_a_key_that_no_query_sees_has_no_gradient(
    lengths: tuple[int, int], alignment: str, seen: int
) -> None:
    got = values(*problem(lengths=lengths), causal=True, alignment=alignment)
    for name in ("dk", "dv"):
        assert got[name].shape[2] == lengths[1]
        assert not got[name][:, :, seen:].any()
        assert got[name][:, :, :seen].all()


# Identities.


@masks
def test_a_power_of_two_moves_between_q_and_scale(causal: bool) -> None:
    """Only exponents change, so not one bit of the rest does."""
    x = problem()
    got = values(*x, causal=causal, scale=0.6)
    moved = values(*x._replace(q=4 * x.q), causal=causal, scale=0.15)
    moved["dq"] *= 4
    for name in TENSORS:
        np.testing.assert_array_equal(got[name], moved[name])


@masks
def test_a_negative_scale_is_a_negated_q(causal: bool) -> None:
    x = problem()
    got = values(*x, causal=causal, scale=-0.6)
    negated = values(*x._replace(q=-x.q), causal=causal, scale=0.6)
    negated["dq"] *= -1
    for name in TENSORS:
        np.testing.assert_array_equal(got[name], negated[name])


@pytest.mark.parametrize("dim", [1, 3, 64, 80])
def test_the_default_scale_is_one_over_the_root_of_the_head_dimension(dim: int) -> None:
    x = problem(dims=(dim, 2))
    got, expected = values(*x), values(*x, scale=1 / math.sqrt(dim))
    for name in TENSORS:
        assert_equal(got[name], expected[name], SUMS)


@masks
def test_a_vector_added_to_all_keys_moves_lse_and_dq_only(causal: bool) -> None:
    """lse moves by scale·q·c, dq by scale·d_lse·c."""
    x = problem()
    c = np.array([0.5, -0.25, 1.0])
    got = values(*x, causal=causal, scale=0.5)
    moved = values(*x._replace(k=x.k + c), causal=causal, scale=0.5)
    got["lse"] += 0.5 * x.q @ c
    got["dq"] += 0.5 * x.d_lse[..., None] * c
    for name in TENSORS:
        assert_equal(moved[name], got[name], SUMS)


@masks
def test_gradients_are_linear_in_d_out_and_d_lse(causal: bool) -> None:
    x, y = problem(), problem(seed=1)
    parts = [values(*x[:3], d.d_out, d.d_lse, causal=causal) for d in (x, y)]
    whole = values(*x[:3], x.d_out + 2 * y.d_out, x.d_lse + 2 * y.d_lse, causal=causal)
    for name in GRADIENTS:
        assert_equal(whole[name], parts[0][name] + 2 * parts[1][name], SUMS)


def test_top_left_is_a_square_problem_over_the_first_keys() -> None:
    x = problem(lengths=(4, 7))
    got = values(*x, causal=True, alignment="top-left")
    square = values(*x._replace(k=x.k[:, :, :4], v=x.v[:, :, :4]), causal=True)
    for name in ("out", "lse", "dq"):
        assert_equal(got[name], square[name], SUMS)
    for name in ("dk", "dv"):
        assert_equal(got[name][:, :, :4], square[name], SUMS)


def test_causal_alignment_does_not_matter_without_a_mask() -> None:
    x = problem(lengths=(4, 7))
    got, other = values(*x), values(*x, alignment="top-left")
    for name in TENSORS:
        np.testing.assert_array_equal(got[name], other[name])


# Evaluation in blocks.


def direct(x: Problem, causal: bool) -> dict[str, Array]:
    """The textbook's formulas over whole matrices, one (batch, head) at a time. No dead rows."""
    (batch, hq, sq, d), (hkv, sk) = x.q.shape, x.k.shape[1:3]
    y = {"out": np.zeros_like(x.d_out), "lse": np.zeros_like(x.d_lse)}
    y |= {"dq": np.zeros_like(x.q), "dk": np.zeros_like(x.k), "dv": np.zeros_like(x.v)}
    hidden = np.ones((sq, sk), dtype=bool)
    for row, seen in zip(hidden, visible(sq, sk, causal), strict=True):
        row[seen] = False
    for b, h in np.ndindex(batch, hq):
        g = h // (hq // hkv)
        q, k, v, d_out = x.q[b, h], x.k[b, g], x.v[b, g], x.d_out[b, h]
        s = np.where(hidden, -np.inf, q @ k.T / math.sqrt(d))
        lse = np.log(np.exp(s).sum(1))  # normal values: nothing overflows
        p = np.exp(s - lse[:, None])
        d_p = d_out @ v.T
        d_s = p * (d_p - (p * d_p).sum(1, keepdims=True) + x.d_lse[b, h][:, None])
        y["out"][b, h], y["lse"][b, h], y["dq"][b, h] = p @ v, lse, d_s @ k / math.sqrt(d)
        y["dk"][b, g] += d_s.T @ q / math.sqrt(d)
        y["dv"][b, g] += p.T @ d_out
    return y


@masks
@pytest.mark.parametrize(
    ("lengths", "block"),
    [
        pytest.param((500, 640), oracle.BLOCK, id="two blocks each way"),
        pytest.param((70, 150), 2000, id="many blocks, more keys"),
        pytest.param((110, 110), 1500, id="many blocks, square"),
    ],
)
def test_blocks_equal_whole_matrices(
    lengths: tuple[int, int], block: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "BLOCK", block)
    x = problem(lengths=lengths, heads=(4, 2), dims=(24, 16))
    assert 2 * lengths[0] * lengths[1] > block  # the rows of a group of two heads
    got, expected = values(*x, causal=causal), direct(x, causal)
    for name in TENSORS:
        assert_equal(got[name], expected[name], SUMS)


@masks
@pytest.mark.parametrize("block", [1, 7, 30], ids="blocks of {}".format)
@pytest.mark.parametrize(
    "x",
    [
        pytest.param(problem(heads=(4, 2), batch=2), id="grouped heads"),
        pytest.param(problem(lengths=(6, 4)), id="dead rows"),
        pytest.param(steep(), id="scores of 10000 and -10000"),
    ],
)
def test_the_size_of_the_blocks_does_not_matter(
    x: Problem, block: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = values(*x, causal=causal, scale=1.0)
    monkeypatch.setattr(oracle, "BLOCK", block)
    got = values(*x, causal=causal, scale=1.0)
    _, magnitude = fifty_digits(x, causal=causal, scale=1.0)
    for name in TENSORS:
        assert_equal(got[name], expected[name], magnitude[name])


# What the result says besides the values. Whether the budget is tight, and whether it catches
# faults, is proven with the judge.


@masks
@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
@pytest.mark.parametrize("lengths", [(4, 7), (7, 4), (3, 0), (0, 3)], ids=sizes)
def test_visible_keys_are_counted(lengths: tuple[int, int], alignment: str, causal: bool) -> None:
    x = problem(lengths=lengths, heads=(4, 2), batch=2)
    got = oracle.attention(*x[:3], causal=causal, alignment=alignment).visible_keys
    rows = [len(seen) for seen in visible(*lengths, causal, alignment)]
    np.testing.assert_array_equal(got, np.broadcast_to(np.array(rows, int), x.d_lse.shape))


@masks
def test_a_given_output_moves_delta_and_nothing_else(causal: bool) -> None:
    """dS = P (dP - delta + d_lse): another output acts like another d_lse.

    In float32 dS is not rounded, so that each hypothesis is a point: the exact output's, then the
    given one's.
    """
    x = problem(heads=(4, 2))
    exact = values(*x, causal=causal)
    given = exact["out"] + 0.1 * problem(heads=(4, 2), seed=1).d_out
    d_lse = x.d_lse - (x.d_out * (given - exact["out"])).sum(-1)
    expected = values(*x._replace(d_lse=d_lse), causal=causal)
    got = oracle.attention(*x, causal=causal, dtype="float32", out_given=given)
    for name in ("dq", "dk"):
        part = getattr(got, name)
        for end in (part.low, part.high):
            assert_equal(end, np.stack([exact[name], expected[name]]), SUMS)
    for name in TENSORS:
        np.testing.assert_array_equal(getattr(got, name).value, exact[name])


@masks
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("lengths", [(1, 1), (40, 70)], ids=sizes)
def test_every_element_has_a_budget(dtype: str, lengths: tuple[int, int], causal: bool) -> None:
    x = problem(lengths=lengths, dims=(16, 16))
    result = oracle.attention(*x, causal=causal, dtype=dtype)
    for name in TENSORS:
        part = getattr(result, name)
        assert part.value.shape == part.bound.shape == part.sigma.shape
        assert np.isfinite(part.bound).all(), name
        assert (part.sigma > 0).all(), name
        assert (part.sigma <= part.bound).all(), name
        assert (part.low <= part.value).all(), name
        assert (part.value <= part.high).all(), name


@masks
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"lengths": (0, 3)}, id="no queries"),
        pytest.param({"lengths": (3, 0)}, id="no keys"),
        pytest.param({"lengths": (0, 0)}, id="neither"),
        pytest.param({"batch": 0}, id="no batch"),
    ],
)
def test_empty_problems_have_results_of_the_right_shape(
    shape: dict[str, Any], dtype: str, causal: bool
) -> None:
    x = problem(**shape)
    result = oracle.attention(*x, causal=causal, dtype=dtype)
    shapes = zip(TENSORS, (x.d_out, x.d_lse, x.q, x.k, x.v), strict=True)
    for name, like in shapes:
        part = getattr(result, name)
        assert part.value.shape == part.bound.shape == part.sigma.shape == like.shape
        assert not np.isnan(part.value).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_budget_never_moves_the_value(dtype: str) -> None:
    x = problem()
    got, expected = values(*x, dtype=dtype), values(*x)
    for name in TENSORS:
        np.testing.assert_array_equal(got[name], expected[name])


def test_inputs_are_left_alone() -> None:
    x, before = problem(), problem()
    oracle.attention(*x, causal=True)
    for got, expected in zip(x, before, strict=True):
        np.testing.assert_array_equal(got, expected)
