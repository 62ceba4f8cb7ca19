"""Values at the limits: NaN and infinity, huge scores, scales of every sign."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import flash_attention

from .calls import assert_same_bits, attend, inputs_of, largest_tile, same_bits
from .cases import DTYPES
from .values import Inputs


def changed(x: Inputs, name: str, *index: int, value: float) -> Inputs:
    t = getattr(x, name).clone()
    t[index] = value
    return replace(x, **{name: t})


def spoiled(x: Tensor) -> Tensor:
    """Which rows hold something that is not finite, over the last dimension."""
    return ~x.isfinite().all(-1)


# ---------------------------------------------------------------- a value that is not finite


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize(
    ("dtype", "causal"),
    [("float16", False), ("float16", True), ("bfloat16", True), ("float32", True)],
    ids=lambda value: {False: "full", True: "causal"}.get(value, value),
)
def test_a_visible_nan_shows_in_every_row_that_sees_it_and_nowhere_else(
    dtype: str, name: str, causal: bool, device: torch.device
) -> None:
    BM, BN = largest_tile(device, dtype, 16)
    tile = max(BM, BN)
    length = tile + 5
    key = tile + 2  # in the second tile of every kernel
    x = inputs_of(device, dtype=dtype, dim=16, heads_kv=2, len_q=length, len_k=length)
    clean, found = (
        attend(x, causal=causal),
        attend(changed(x, name, 0, 1, key, 5, value=math.nan), causal=causal),
    )

    first = key if causal else 0
    for result in ("out", "dq"):
        rows = spoiled(found[result])[:, 1]
        assert rows[:, first:].all(), f"{result}: a row sees the NaN and is finite"
    assert spoiled(found["dk"])[:, 1].all()  # by way of the last row, which sees every key
    if name == "k":
        assert found["lse"][:, 1, first:].isnan().all()
        assert spoiled(found["dv"])[:, 1].all()

    finite_rows = slice(0, tile if causal else 0)  # tiles that end before the key
    for result, value in found.items():
        assert same_bits(value[:, 0], clean[result][:, 0]), f"{result} of the other head"
        if result not in ("dk", "dv"):
            assert same_bits(value[:, :, finite_rows], clean[result][:, :, finite_rows]), result


def test_a_nan_in_q_shows_in_its_own_row_alone(device: torch.device) -> None:
    x = inputs_of(device)
    row = 3
    clean, found = attend(x), attend(changed(x, "q", 0, 1, row, 7, value=math.nan))
    assert found["out"][0, 1, row].isnan().all() and found["lse"][0, 1, row].isnan()
    assert found["dq"][0, 1, row].isnan().all()
    for name in ("out", "lse", "dq"):
        found[name][0, 1, row] = clean[name][0, 1, row]
        assert same_bits(found[name], clean[name]), name
    assert spoiled(found["dk"]).all() and spoiled(found["dv"]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_score_of_infinity_is_not_hidden(dtype: str, device: torch.device) -> None:
    x = inputs_of(device, dtype=dtype)
    x = changed(changed(x, "q", 0, 1, 2, 0, value=1e30), "k", 0, 0, 9, 0, value=1e30)
    found = attend(x, wanted="")
    rows = spoiled(found["out"])
    assert rows[0, 1, 2] and not found["lse"][0, 1, 2].isfinite()
    assert rows.sum() == 1


def test_a_row_of_scores_of_minus_infinity_is_not_taken_for_a_dead_row(device: torch.device) -> None:
    x = inputs_of(device, len_q=2, len_k=1)
    x = replace(x, q=x.q.abs() + 1, k=torch.full_like(x.k, -math.inf))
    found = attend(x, wanted="")
    assert found["out"].isnan().all() and not found["lse"].isfinite().any()


@pytest.mark.parametrize(("dtype", "large"), [("float16", 6e4), ("bfloat16", 3e38), ("float32", 3e38)])
def test_a_gradient_beyond_the_dtype_is_infinity(dtype: str, large: float, device: torch.device) -> None:
    x = inputs_of(device, dtype=dtype, len_q=2, len_k=1, heads_q=1)
    assert x.d_out is not None
    d_out = torch.zeros_like(x.d_out)
    d_out[..., 0], d_out[..., 1] = large, -large
    x = replace(x, q=torch.zeros_like(x.q), v=torch.zeros_like(x.v), d_out=d_out)
    dv = attend(x, wanted="v", through="out")["dv"]  # P = 1: the sum of both rows of d_out
    assert dv[0, 0, 0, :3].tolist() == [math.inf, -math.inf, 0.0]


# ---------------------------------------------------------------- scores however large, scales of every sign


@pytest.mark.parametrize("scale", [None, 1e10, -1e10, 1e30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_with_one_key_out_is_v_however_large_the_score(
    dtype: str, scale: float | None, device: torch.device
) -> None:
    """F1."""
    x = inputs_of(device, dtype=dtype, dim=64, len_q=5, len_k=1, heads_kv=2)
    if scale is None and dtype != "float16":  # the score comes from q and k: about 1e11
        x = replace(x, q=torch.full_like(x.q, 133120.0), k=torch.full_like(x.k, 133120.0))
    found = attend(x, wanted="", scale=scale)
    assert same_bits(found["out"], x.v.expand(found["out"].shape))
    assert found["lse"].isfinite().all()


def test_one_key_ahead_of_the_others_by_1e8_is_all_that_counts(device: torch.device) -> None:
    x = inputs_of(device, len_q=1, heads_q=1)
    ahead = x.k.shape[2] // 2
    k = torch.zeros_like(x.k)
    k[:, :, ahead] = 1.0
    found = attend(replace(x, q=torch.ones_like(x.q), k=k), wanted="", scale=1e8 / x.q.shape[3])
    assert same_bits(found["out"], x.v[:, :, ahead : ahead + 1])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_negative_scale_is_a_negated_q(dtype: str, causal: bool, device: torch.device) -> None:
    x = inputs_of(device, dtype=dtype)
    found = attend(x, scale=-0.3, causal=causal)
    expected = attend(replace(x, q=-x.q), scale=0.3, causal=causal)
    expected["dq"] = 0 - expected["dq"]  # no negative zeros
    found["dq"] += 0
    assert_same_bits(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_scale_zero_out_is_the_mean_of_v_whatever_q_and_k_are(dtype: str, device: torch.device) -> None:
    x = inputs_of(device, dtype=dtype)
    keys = x.k.shape[2]
    x = replace(x, v=x.v.mul(8).round())  # their sums are exact in float32
    found = attend(x, scale=0.0)
    assert_same_bits(attend(replace(x, k=x.k.flip(2)), wanted="", scale=0.0),
                     {name: found[name] for name in ("out", "lse")})  # fmt: skip
    scores_zero = attend(replace(x, q=torch.zeros_like(x.q)), scale=1.0)
    for name in ("out", "lse", "dv"):
        assert same_bits(found[name], scores_zero[name]), name
    assert not found["dq"].any() and not found["dk"].any()

    # the quotient may be two units off in float32, and is then rounded to the dtype
    eps = torch.finfo(x.v.dtype).eps / 2 + 2 * torch.finfo(torch.float32).eps
    mean = (x.v.double().sum(2, keepdim=True) / keys).expand(found["out"].shape)
    torch.testing.assert_close(found["out"].double(), mean, rtol=eps, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_with_scale_zero_no_product_of_q_and_k_is_too_large(dtype: str, device: torch.device) -> None:
    x = inputs_of(device, dtype=dtype)
    large = replace(x, q=torch.full_like(x.q, 1e20), k=torch.full_like(x.k, 1e20))  # 1e40 each
    found, small = attend(large, scale=0.0), attend(x, scale=0.0)
    assert not found["dq"].any() and not found["dk"].any()
    for name in ("out", "lse", "dv"):
        assert same_bits(found[name], small[name])


@pytest.mark.parametrize("scale", [2.3e38, -2.3e38, 1.2e-38])
def test_the_most_extreme_scales_are_scales(scale: float, device: torch.device) -> None:
    x = inputs_of(device, dtype="float32", len_q=2, len_k=1, heads_q=1)
    found = attend(replace(x, q=x.q * 1e-30, k=x.k * 1e-8), wanted="", scale=scale)
    assert same_bits(found["out"], x.v.expand(found["out"].shape))


@pytest.mark.parametrize(("exponent", "causal"), [(-2, False), (15, False), (15, True)])
@pytest.mark.parametrize("below", [False, True], ids=["above", "below"])
@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_scores_are_exact_and_leave_their_neighbours_alone(
    dtype: str, sign: int, below: bool, exponent: int, causal: bool, device: torch.device
) -> None:
    """From 2^13 on, in units of log2, a maximum is subtracted in units of the scores; here all are exact."""
    BM, BN = largest_tile(device, dtype, 16)
    rows, keys = BM + 5, 2 * BN + 3
    x = inputs_of(device, dtype=dtype, dim=16, heads_q=1, len_q=rows, len_k=keys)
    q, k = torch.zeros_like(x.q), torch.zeros_like(x.k)
    k[..., 0] = -(torch.arange(keys, device=device) % 4).to(k.dtype)  # which of four keys
    k[..., 1] = 8
    k[:, :, keys - 2 :] = 0  # the last two have the score 0
    q[..., :2] = 2.0**-15
    # the second tile of rows has those far above 0, or those far below, alone
    above = {3: 2.0**13, 17: -(2.0**13), BM: -(2.0**15) if below else 2.0**15}
    for row, factor in above.items():
        q[:, :, row, 0], q[:, :, row, 1] = abs(factor), factor
    if below:
        k[:, :, keys - 2 :, 1] = 8
    scale = sign * 2.0**exponent  # the largest scores are 2^13 or 2^14, or 2^31 to 2^33
    found = attend(replace(x, q=sign * q, k=k), wanted="", scale=scale, causal=causal)
    scores = (q.double() @ k.double().mT) * abs(scale)
    if causal:
        hidden = ~torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)
        scores = scores.masked_fill(hidden, -math.inf)
    P = scores.softmax(-1)
    eps = torch.finfo(x.v.dtype).eps
    for row in above:
        assert scores[0, 0, row, 0].abs() > 2.0**13
        torch.testing.assert_close(
            found["out"][:, :, row].double(), P[:, :, row] @ x.v.double()[:, 0], rtol=eps, atol=eps
        )
        torch.testing.assert_close(
            found["lse"][:, :, row].double(), scores[:, :, row].logsumexp(-1), rtol=2.0**-22, atol=0
        )
    others = [row for row in range(rows) if row not in above]
    without = replace(x, q=torch.where(q.abs() > 1, 0.0, q), k=k)
    at_that_scale = attend(without, wanted="", scale=abs(scale), causal=causal)
    for name in ("out", "lse"):
        assert same_bits(found[name][:, :, others], at_that_scale[name][:, :, others]), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_allow_tf32_does_not_touch_16_bit_inputs(dtype: str, device: torch.device) -> None:
    x = inputs_of(device, dtype=dtype)
    assert_same_bits(attend(x, allow_tf32=True), attend(x, allow_tf32=False))


def test_the_first_row_sees_one_key(device: torch.device) -> None:
    """B13."""
    x = inputs_of(device, heads_q=1, len_q=35, len_k=35)
    out = flash_attention(x.q, x.k, x.v, causal=True)
    assert same_bits(out[:, :, 0], x.v[:, :, 0])


# ---------------------------------------------------------------- what the lse is for, what options are for


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_halves_of_the_keys_merge_by_their_lse(dtype: str, device: torch.device) -> None:
    """G4: the lse is of the scores as they are, not relative to anything of the half's own."""
    x = inputs_of(device, dtype=dtype, len_q=5, heads_kv=2)
    middle = x.k.shape[2] // 3
    halves = [
        attend(replace(x, k=x.k[:, :, keys] + 1, v=x.v[:, :, keys]), wanted="")
        for keys in (slice(None, middle), slice(middle, None))
    ]
    whole = attend(replace(x, k=x.k + 1), wanted="")
    lse = torch.logaddexp(halves[0]["lse"].double(), halves[1]["lse"].double())
    weights = [(half["lse"].double() - lse).exp()[..., None] for half in halves]
    out = sum(weight * half["out"].double() for weight, half in zip(weights, halves, strict=True))
    torch.testing.assert_close(whole["lse"].double(), lse, rtol=1e-5, atol=1e-5)
    eps = 2 * torch.finfo(x.q.dtype).eps  # three roundings of half a step each, and P's
    torch.testing.assert_close(whole["out"].double(), out, rtol=eps, atol=eps)


def test_every_option_does_something(device: torch.device) -> None:
    """M11. `deterministic` and `validate` are tested elsewhere: they change no number."""
    x = inputs_of(device, dtype="float32", dim=64)
    plain = attend(x)
    options: list[dict[str, Any]] = [{"causal": True}, {"scale": 0.2}]
    if device.type == "cuda":  # the interpreter computes with float32 whatever it is told
        options.append({"allow_tf32": True})
    for option in options:
        found = attend(x, **option)
        for name, t in found.items():
            same = same_bits(t, plain[name])
            assert not same, f"{name} does not change with {option}"
