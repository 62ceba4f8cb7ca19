"""Diagnoses that say what it is instead: factors, other places, faults that are computed, fewer digits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from reference import oracle
from reference.emulation import Tiles
from tests import comparison, diagnosis
from tests.cases import Case
from tests.diagnosis.variations import Attention
from tests.meta.test_diagnosis import record_of

TILES = Tiles((16, 16), (16, 16), (16, 16))
CASE = Case(batch=2, heads_q=4, heads_kv=2, len_q=37, len_k=41, dim=16, dim_v=16, grad="none")
CAUSAL = replace(CASE, causal=True)


class Backwards(torch.autograd.Function):
    """Two or three tensors as they are, their gradients as a function makes them."""

    @staticmethod
    def forward(ctx: Any, change: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.change = change
        return tuple(t.clone() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.change(*gradients)


def results(change: Callable[..., Any]) -> Callable[..., Any]:
    """The right out and lse, changed."""
    return lambda right, *tensors, **options: change(*right(*tensors, **options))


def inputs(change: Callable[..., Any]) -> Callable[..., Any]:
    """The right function of other q, k and v."""
    return lambda right, *tensors, **options: right(*change(*tensors), **options)


def gradients(change: Callable[..., Any]) -> Callable[..., Any]:
    """The right function, its gradients changed."""
    return inputs(lambda *tensors: Backwards.apply(change, *tensors))


# ---------------------------------------------------------------- a factor, another place


@pytest.mark.parametrize(
    ("by", "says"),
    [
        (2.0, "a constant factor of 2: "),
        (0.5, "a constant factor of 0.5: "),
        (math.log(2), "a constant factor of 0.6931: ln 2"),
        (1 / math.log(2), "a constant factor of 1.443: 1 / ln 2"),
        (0.3, "a constant factor of 0.3: the scale"),
        (1 / 0.3, "a constant factor of 3.333: 1 / scale"),
        (3.0, "a constant factor of 3: the group of query heads on a KV head"),
    ],
)  # fmt: skip
def test_factors_are_named(by: float, says: str) -> None:
    case = replace(CASE, scale=0.3, heads_q=6, dtype="float32")
    (said,) = record_of(results(lambda out, lse: (out * by, lse)), case, TILES).diagnosis
    assert said.startswith("certain: out is off by " + says)


def test_a_gradient_without_its_scale_is_told() -> None:
    spoil = gradients(lambda dq, dk, dv: (dq, dk / 0.3, dv))
    (said,) = record_of(spoil, replace(CASE, scale=0.3, grad="qkv", dtype="float32"), TILES).diagnosis
    assert said == "certain: dk is off by a constant factor of 3.333: 1 / scale"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda out, lse: (out[:1].expand_as(out), lse), "out is that of batch entry 0 throughout"),
        (lambda out, lse: (out[:, :1].expand_as(out), lse), "out is that of head 0 throughout"),
        (lambda out, lse: (out.flip(1), lse), "out is that of the heads in reverse order"),
        (lambda out, lse: (out, lse.roll(-1, 1)), "lse is that of the next head"),
        (
            lambda out, lse: (out.transpose(1, 2).reshape(out.shape), lse),
            "out is transposed: it lies in memory as (batch, rows, heads, columns)",
        ),
        (lambda out, lse: (out.mT.reshape(out.shape), lse),
         "out is transposed: it lies in memory as (batch, heads, columns, rows)"),
    ],
    ids=["entry", "head", "reverse", "next", "layout", "transposed"],
)  # fmt: skip
def test_another_place_is_told(change: Callable[..., Any], says: str) -> None:
    case = replace(CASE, heads_q=3, heads_kv=3)
    assert f"certain: {says}" in record_of(results(change), case, TILES).diagnosis


def test_a_tensor_that_is_another_is_told() -> None:
    spoil = gradients(lambda dq, dk, dv: (dq, dv, dk))
    said = record_of(spoil, replace(CASE, grad="qkv"), TILES).diagnosis
    assert "certain: dk is what dv should be" in said and "certain: dv is what dk should be" in said


# ---------------------------------------------------------------- faults that are computed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda q, k, v: (q, k[:, :, :32], v[:, :, :32]), "the last tile of 16 keys were left out"),
        (lambda q, k, v: (q, k[:, :, 16:], v[:, :, 16:]), "the first tile of 16 keys were left out"),
        (lambda q, k, v: (q, k[:, :, 32:], v[:, :, 32:]), "only the last tile of 16 keys counted"),
        (lambda q, k, v: (q, k[:, :, :40], v[:, :, :40]), "the last key were left out"),
        (
            lambda q, k, v: (q, *(pad(x, (0, 0, 0, 7)) for x in (k, v))),
            "keys past the end of the last tile of 16 keys took part with score 0",
        ),
        (lambda q, k, v: (q * math.log(2), k, v), "the scores were multiplied by ln 2"),
        (lambda q, k, v: (-q, k, v), "the scores had the opposite sign"),
        (
            lambda q, k, v: (q, *(x.repeat(1, 2, 1, 1) for x in (k, v))),
            "query head h read KV head h % (number of KV heads)",
        ),
    ],
    ids=["last tile", "first tile", "only the last", "last key", "past the end", "exp2", "sign", "heads"],
)  # fmt: skip
def test_faults_of_the_forward_are_told(change: Callable[..., Any], says: str) -> None:
    (said,) = record_of(inputs(change), replace(CASE, dtype="float32"), TILES).diagnosis
    assert said.startswith(f"certain: out, lse are as if {says}")


def test_keys_above_the_diagonal_are_told() -> None:
    """The mask of whole tiles: a row sees all keys up to the end of its tile's last one."""

    def spoil(right: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        parts = []
        for start in range(0, q.shape[2], 16):
            keys = min(-(-(min(start + 16, 48) + 4) // 16) * 16, k.shape[2])
            own = [q[:, :, start : start + 16], k[:, :, :keys], v[:, :, :keys]]
            parts.append(right(*own, **{**options, "causal": False}))
        return tuple(torch.cat(x, 2) for x in zip(*parts, strict=True))

    (said,) = record_of(spoil, CAUSAL, TILES).diagnosis
    assert said == (
        "certain: out, lse are as if the tiles on the diagonal were not masked: keys above the diagonal count"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda lse: lse / math.log(2), "it were a logarithm in base 2"),
        (lambda lse: -lse, "it had the opposite sign"),
        (lambda lse: lse.exp(), "it were the sum itself, not its logarithm"),
    ],
    ids=["base 2", "sign", "sum"],
)  # fmt: skip
def test_another_lse_is_told(change: Callable[[Tensor], Tensor], says: str) -> None:
    (said,) = record_of(results(lambda out, lse: (out, change(lse))), CASE, TILES).diagnosis
    assert said == f"certain: lse is as if {says}"


def test_several_faults_that_would_explain_it_are_all_named() -> None:
    """Of 17 keys and tiles of 16 every other tile is the last one."""
    spoil = inputs(lambda q, k, v: (q, k[:, :, :16], v[:, :, :16]))
    (said,) = record_of(spoil, replace(CASE, len_k=17), TILES).diagnosis
    assert said == (
        "likely: out, lse are as if the last tile of 16 keys were left out (the last key),"
        " or as if every other tile of 16 keys were left out"
    )


def variations_of(case: Case) -> tuple[Attention, oracle.Result]:
    rng = np.random.default_rng(0)
    B, Hq, Hkv, Sq, Sk = case.batch, case.heads_q, case.heads_kv, case.len_q, case.len_k
    q, k, v, d_out = (
        rng.standard_normal(shape)
        for shape in ((B, Hq, Sq, 8), (B, Hkv, Sk, 8), (B, Hkv, Sk, 6), (B, Hq, Sq, 6))
    )
    d_lse = rng.standard_normal((B, Hq, Sq))
    exact = oracle.attention(q, k, v, d_out, d_lse, causal=case.causal, scale=0.4)
    return Attention.of(q, k, v, d_out, d_lse, causal=case.causal, scale=0.4), exact


@pytest.mark.parametrize("causal", [False, True])
def test_without_a_fault_it_is_the_oracle(causal: bool) -> None:
    attention, exact = variations_of(replace(CASE, causal=causal, len_q=45))
    found = dict(zip(("out", "lse"), attention.forward(), strict=True)) | attention.backward()
    for name, x in found.items():
        np.testing.assert_allclose(x, getattr(exact, name).value, atol=1e-12)
    for x, y in zip(attention.online(16), attention.forward(), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)
    for name in ("dk", "dv"):
        summed = attention.by_kv_head(attention.by_query_head[name])
        np.testing.assert_allclose(summed, found[name], atol=1e-12)


# ---------------------------------------------------------------- small errors


def test_a_lower_precision_is_told() -> None:
    def spoil(right: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return right(q, k, v.half().to(v), **options)

    (said,) = record_of(spoil, replace(CASE, dtype="float32"), TILES).diagnosis
    assert said.startswith("likely: out is off by a little throughout")


def test_fewer_digits_are_told() -> None:
    spoil = results(lambda out, lse: (out.bfloat16().to(out), lse.half().float()))
    said = record_of(spoil, CASE, TILES).diagnosis
    assert "certain: out is rounded to bfloat16: no element has more digits" in said
    assert "certain: lse is rounded to float16: no element has more digits" in said


def test_what_is_cut_off_is_told() -> None:
    def cut(out: Tensor, lse: Tensor) -> Any:
        return (out.view(torch.int32) & ~0xFF).view(torch.float32), lse

    (said,) = record_of(results(cut), replace(CASE, dtype="float32"), TILES).diagnosis
    assert said.startswith("likely: out is too small nearly everywhere, by a little: cut off")


def test_an_accumulator_in_a_low_precision_is_told() -> None:
    def spoil(right: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """out, P V added up in float16 over tiles of keys."""
        _, lse = right(q, k, v, **options)
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        P = torch.where(j <= i, ((q @ k.mT) * 0.25).exp(), 0.0)
        out = torch.zeros_like(q)
        for n in range(0, k.shape[2], 16):
            out = (out + P[..., n : n + 16] @ v[:, :, n : n + 16]).half().float()
        return out / P.sum(-1, keepdim=True), lse

    case = Case(heads_q=4, heads_kv=2, len_q=160, len_k=160, causal=True, grad="none", dtype="float32")
    (said,) = record_of(spoil, replace(case, values="mean"), TILES).diagnosis
    assert said.startswith("likely: out is worse the more tiles are added up")
    assert said.endswith("an accumulator in a low precision")


# ---------------------------------------------------------------- what must not be said


@pytest.mark.parametrize("size", [2.0**-7, 1.0, 30.0])
def test_of_noise_nothing_is_certain(size: float) -> None:
    random = Random(size)
    torch.manual_seed(0)

    def noisy(right: Any, *tensors: Tensor, **options: Any) -> Any:
        out, lse = right(*tensors, **options)
        return out + size * torch.randn_like(out), lse + size * torch.randn_like(lse)

    for seed in range(12):
        heads_kv = random.choice((1, 2))
        case = Case(
            batch=random.choice((1, 2)), heads_q=heads_kv * random.choice((1, 2, 3)), heads_kv=heads_kv,
            len_q=random.randint(2, 50), len_k=random.randint(2, 50), causal=random.random() < 0.5,
            dtype=random.choice(("float16", "float32")), grad="none", seed=seed,
        )  # fmt: skip
        record = record_of(noisy, case, random.choice((TILES, None)))
        assert record.status == "broken"
        assert not [s for s in record.diagnosis if "no diagnosis" in s]
        # a row that sees no key is wrong in its own right: only places may be certain
        assert all(" wrong" in s for s in record.diagnosis if s.startswith("certain")), (
            case,
            record.diagnosis,
        )


def test_of_right_results_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked all the same, of right results with a little noise on them."""
    pieces: list[diagnosis.Piece] = []

    def kept(*arguments: Any) -> diagnosis.Piece:
        pieces.append(diagnosis.Piece(*arguments))
        return pieces[-1]

    monkeypatch.setattr(comparison, "Piece", kept)
    random = Random(0)
    torch.manual_seed(0)

    def noisy(*tensors: Tensor) -> list[Tensor]:
        return [x * (1 + 2.0**-25 * torch.randn_like(x)) if x.dtype == torch.float32 else x for x in tensors]

    for seed in range(24):
        heads_kv = random.choice((1, 2, 3))
        case = Case(
            batch=random.choice((1, 2)), heads_q=heads_kv * random.choice((1, 2, 3)), heads_kv=heads_kv,
            len_q=random.randint(1, 50), len_k=random.randint(1, 50), causal=random.random() < 0.5,
            dtype=random.choice(("float16", "bfloat16", "float32")), d_lse=random.random() < 0.5, seed=seed,
            values=random.choice(("normal", "large", "tiny", "mean", "equal", "growing", "near-tied")),
        )  # fmt: skip

        def spoil(right: Any, *tensors: Tensor, **options: Any) -> Any:
            out, lse = right(*Backwards.apply(noisy, *tensors), **options)
            return (out, *noisy(lse))  # an out that sees one key must be exact

        record = record_of(spoil, case)
        assert record.status == "held", (case, record.reason)
        assert diagnosis.diagnose(pieces) == [], case
        assert diagnosis.diagnose([replace(piece, tiles=TILES) for piece in pieces]) == [], case
        pieces.clear()


def test_a_hypothesis_that_raises_is_named_and_the_others_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(pieces: Any) -> Any:
        raise ValueError("planted")

    monkeypatch.setattr(diagnosis, "PLACES", (raises, *diagnosis.PLACES))
    said = record_of(results(lambda out, lse: (-out, lse)), CASE).diagnosis
    assert said == ["certain: out has the opposite sign", "no diagnosis by raises: ValueError: planted"]
