"""The laws themselves: in float64 they hold for attention by its definition, and each can fail.

`FA_LAWS=N pytest tests/meta/test_laws.py -k right` judges N cases a shard instead of a few.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, seed
from torch import Tensor

from reference import emulation
from reference.emulation import Tiles
from tests.cases import DTYPES, Case
from tests.implementations import Claims, Implementation
from tests.laws import LAWS, Finding, broken, outcomes
from tests.laws.registry import with_backward
from tests.meta.plain import CPU
from tests.strategies import cases, generation, shard_of

CLAIMS = Claims(
    dtypes=DTYPES, equal_dims=False, gqa=True, cross_lengths=True, dead_rows=True, empty=True, backward=True,
    lse=True, lse_grad=True, strided=True, ragged=True,
)  # fmt: skip
REPEATABLE = replace(CLAIMS, deterministic=True, deterministic_backward=True)

LOG2E = 1.4426950408889634


class Textbook:
    """Attention by its definition, dense and ragged, and its gradients by their formulas.

    In float64, rounded once; `faults` name what is wrong with it.
    """

    def __init__(self, *faults: str) -> None:
        self.faults = set(faults)
        self.calls = 0

    def implementation(self, claims: Claims = CLAIMS) -> Implementation:
        return Implementation("textbook", self.dense, claims, lambda device: "cpu", varlen=self.ragged)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        self.calls += 1
        if "layout" in self.faults:  # takes rows of v to lie behind one another
            v = v.as_strided(v.shape, (*v.stride()[:2], v.shape[3], 1), v.storage_offset())
        return self._attention(q, k, v, **options)

    def ragged(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
        **options: Any,
    ) -> Any:  # fmt: skip
        self.calls += 1
        found = []
        for b in range(len(cu_q) - 1):
            (q0, q1), (k0, k1) = ([int(n) for n in cu[b : b + 2]] for cu in (cu_q, cu_k))
            if "ragged offset" in self.faults and b and k0 < k1:
                k0, k1 = k0 - 1, k1 - 1
            parts = (x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
            found.append(self._attention(*parts, **options))
        out, lse = zip(*found, strict=True)
        return torch.cat(out, 2)[0].transpose(0, 1), torch.cat(lse, 2)[0]

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool
    ) -> Any:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out, lse = _Explicit.apply(q, k, v, causal, scale, self)
        return (out, lse) if return_lse else out


class _Explicit(torch.autograd.Function):
    """out and lse, dq, dk and dv, with what faults a textbook has."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, book: Textbook) -> Any:
        faults = book.faults
        Q, K, V = _heads(q, k, v, faults)
        (B, H, Sq, _), Sk = Q.shape, K.shape[2]
        if "relu of q" in faults:
            Q = Q.relu()
        i, j = torch.arange(Sq)[:, None], torch.arange(Sk)
        diagonal = Sk - Sq
        if "top left" in faults:
            diagonal = 0
        if "padded diagonal" in faults:  # the last tile's rows counted in
            diagonal = min(Sk - Sq + -Sq % 8, Sk - 1)
        visible = j <= i + diagonal if causal else torch.ones(Sq, Sk, dtype=torch.bool)
        if "last key missing" in faults and Sk > 1:
            visible = visible & (j < Sk - 1)
        S = scale * Q @ K.mT
        if "slope by head" in faults:
            S = S - 0.1 * torch.arange(H)[:, None, None] * (Sk - 1 - j)
        S = S.masked_fill(~visible, -torch.inf)
        lse = S.logsumexp(-1) if Sk else torch.full((B, H, Sq), -torch.inf, dtype=Q.dtype)
        P = (S - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
        out = P @ (V.relu() if "relu of v" in faults else V)
        if "one maximum for the batch" in faults and V.numel():
            out = out + 0 * V.amax()
        if "biased by v" in faults and V.numel():
            out = out + 0.1 * V.abs().amax((2, 3), keepdim=True)
        if "out too large" in faults:
            out = out * 1.02
        if "entries differ" in faults:
            out = out * (1 + 0.1 * torch.arange(B)[:, None, None, None])
        if "state" in faults:
            out = out * (1 + 0.1 * book.calls)
        ctx.save_for_backward(Q, K, V, P, out)
        ctx.scale, ctx.faults, ctx.given = scale, faults, (q, k, v)
        if "lse in base 2" in faults:
            lse = lse * LOG2E
        stored = torch.float64 if q.dtype == torch.float64 else torch.float32
        return out.to(q.dtype), lse.to(stored)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> Any:
        (Q, K, V, P, out), faults = ctx.saved_tensors, ctx.faults
        dO = torch.zeros_like(out) if d_out is None else d_out.double()
        if "clamped dO" in faults:
            dO = dO.clamp(-2, 2)
        row = -(dO * out).sum(-1, keepdim=True)
        if "no delta" in faults:
            row = row * 0
        if d_lse is not None and "no dlse" not in faults:
            row = row + d_lse.double()[..., None]
        dS = P * (dO @ V.mT + row)
        again = P * 1.05 if "P again, too large" in faults else P
        dq = ctx.scale * dS @ K * (ctx.scale if "dq scaled twice" in faults else 1)
        dk = (1 if "dk not scaled" in faults else ctx.scale) * dS.mT @ Q
        dv = again.mT @ dO
        q, k, v = ctx.given
        dk, dv = (_summed(x, k.shape[1], faults) for x in (dk, dv))
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(v.dtype), None, None, None


def _heads(q: Tensor, k: Tensor, v: Tensor, faults: set[str]) -> tuple[Tensor, Tensor, Tensor]:
    G = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    if "heads mixed up" in faults:
        return q, k.repeat(1, G, 1, 1), v.repeat(1, G, 1, 1)
    return q, k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)


def _summed(x: Tensor, Hkv: int, faults: set[str]) -> Tensor:
    if "heads mixed up" in faults:
        return x.unflatten(1, (-1, Hkv)).sum(1)
    return x.unflatten(1, (Hkv, -1)).sum(2)


def by_autograd(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """Dense attention with no gradient formula of ours, in float64."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    G = q.shape[1] // k.shape[1]
    Q, K, V = q.double(), k.double().repeat_interleave(G, 1), v.double().repeat_interleave(G, 1)
    S = scale * Q @ K.mT
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    dead = (i + k.shape[2] - q.shape[2] < 0) & causal
    if causal:
        # a dead row's scores stay finite, and what comes of them is left out: no gradient is NaN
        S = S.masked_fill((j > i + k.shape[2] - q.shape[2]) & ~dead, -torch.inf)
    out = (S.softmax(-1) @ V).masked_fill(dead, 0.0)
    return out.to(q.dtype), S.logsumexp(-1).masked_fill(dead[:, 0], -torch.inf)


# ---------------------------------------------------------------- they hold

BASE = Case(
    batch=2, heads_q=4, heads_kv=2, len_q=20, len_k=33, dim=24, dim_v=40, causal=True, d_lse=True, seed=5
)
RAGGED = replace(BASE, lengths=((20, 33), (9, 9), (3, 0), (12, 5)), layout="strided")
SCENES = [
    BASE,
    replace(BASE, len_k=20, values="large", scale=-0.2),
    replace(BASE, causal=False, dim=16, dim_v=16, layout="packed"),
    replace(BASE, causal=False, len_q=33, len_k=20, values="loud", d_lse=False),
    replace(BASE, len_q=33, len_k=20, values="mean"),
    replace(BASE, values="tiny", scale=1.0, layout="expanded", dim_v=24),
    replace(BASE, values="growing", heads_q=6, heads_kv=3, dim_v=24, layout="sbhd"),
    replace(BASE, values="outliers", scale=0.0),
    RAGGED,
    replace(RAGGED, causal=False, values="near-tied"),
]


@pytest.mark.parametrize("case", SCENES, ids=lambda case: case.id)
def test_laws_hold_in_float64(case: Case) -> None:
    """To 2e-13 of the magnitudes."""
    found = broken(case, Textbook().implementation(), CPU, torch.float64)
    assert not found, words(found)


@pytest.mark.parametrize("case", [c for c in SCENES if not c.ragged], ids=lambda case: case.id)
def test_laws_hold_in_float64_for_gradients_by_autograd(case: Case) -> None:
    claims = replace(CLAIMS, ragged=False, empty=False)
    found = broken(case, Implementation("autograd", by_autograd, claims, lambda device: "cpu"), CPU,
                   torch.float64)  # fmt: skip
    assert not found, words(found)


def test_every_law_is_judged_somewhere() -> None:
    held = {
        o.law
        for case in (BASE, RAGGED)
        for law in LAWS.values()
        for o in outcomes(law.suited(case), Textbook().implementation(), CPU)
        if o.law == law.name and o.status == "held"
    }
    assert held == set(LAWS)


def words(found: list[Finding]) -> str:
    return "\n".join(f"{f.law} {f.tensor}: {f.margin:.3g} x at {f.where}; {f.note}" for f in found)


# ---------------------------------------------------------------- each can fail

FULL = replace(BASE, causal=False)


@dataclass(frozen=True)
class Fault:
    """What is wrong, laws that must name it, and on which case."""

    name: str
    laws: str
    case: Case = FULL


SQUARE = replace(BASE, len_k=20)
FAULTS = [
    Fault("top left", "permuted_keys split_keys", BASE),
    Fault("lse in base 2", "doubled_keys shifted_keys split_keys"),
    Fault("no dlse", "sum_of_dk values_are_keys shifted_keys one_visible_key", replace(FULL, dim_v=24)),
    Fault("dk not scaled", "sum_of_dk dq_q_is_dk_k"),
    Fault("dq scaled twice", "shifted_keys one_visible_key"),
    Fault("no delta", "values_of_one shifted_values sum_of_dk"),
    Fault("heads mixed up", "permuted_kv_heads permuted_heads_of_a_group"),
    Fault("slope by head", "permuted_kv_heads permuted_heads_of_a_group permuted_keys"),
    Fault("biased by v", "linear_in_values values_of_one d_out_out_is_dv_v"),
    Fault("out too large", "values_of_one hull_of_values", SQUARE),
    Fault("last key missing", "permuted_keys doubled_keys split_keys"),
    Fault("padded diagonal", "prefix_of_queries", BASE),
    Fault("P again, too large", "sum_of_dv"),
    Fault("entries differ", "permuted_entries values_of_one"),
    Fault("one maximum for the batch", "neighbours"),
    Fault("ragged offset", "ragged_is_separate neighbours", replace(RAGGED, lengths=((9, 9), (20, 33)))),
    Fault("state", "repetition"),
    Fault("layout", "layouts", replace(FULL, layout="bshd")),
    Fault("clamped dO", "scaled_gradients"),
    Fault("relu of q", "flipped_coordinate_of_q_and_k"),
    Fault("relu of v", "flipped_coordinate_of_v linear_in_values"),
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_breaks_its_laws(fault: Fault, dtype: str) -> None:
    case = replace(fault.case, dtype=dtype)
    assert not (found := broken(case, Textbook().implementation(), CPU)), words(found)
    named = {f.law for f in broken(case, Textbook(fault.name).implementation(), CPU)}
    assert set(fault.laws.split()) <= named, named


def test_every_law_has_a_fault() -> None:
    assert {law for fault in FAULTS for law in fault.laws.split()} == set(LAWS)


def test_a_bitwise_law_sees_one_bit_and_only_where_that_is_claimed() -> None:
    """A last bit that depends on how often the function was called."""

    class Trembling(Textbook):
        def dense(self, *tensors: Tensor, **options: Any) -> Any:
            out, lse = super().dense(*tensors, **options)
            moved = torch.nextafter(out, torch.full_like(out, torch.inf)).detach()
            return out + ((moved - out.detach()) if self.calls % 2 else 0), lse

    case = with_backward(FULL)
    assert "repetition" in {f.law for f in broken(case, Trembling().implementation(REPEATABLE), CPU)}
    assert {f.law for f in broken(case, Trembling().implementation(), CPU)} == {"one_visible_key"}


def test_what_is_not_claimed_is_not_judged() -> None:
    claims = Claims(dtypes=DTYPES)
    case = Case(batch=2, heads_q=2, heads_kv=2, len_q=20, len_k=20, grad="none")
    status = {o.law: o.status for o in outcomes(case, Textbook().implementation(claims), CPU)
              if o.status != "held"}  # fmt: skip
    assert status["split_keys"] == status["sum_of_dv"] == status["doubled_keys"] == "not claimed"
    assert outcomes(BASE, Textbook().implementation(claims), CPU)[0].status == "not claimed"


# ---------------------------------------------------------------- a right one is never red


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Any:
        ctx.options = {"causal": causal, "scale": scale, "tiles": Tiles((16, 16), (16, 16), (16, 16))}
        out, lse, *_ = emulation.attention(q, k, v, **ctx.options)
        ctx.save_for_backward(q, k, v, stored := out.to(q.dtype))
        return stored, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> Any:
        q, k, v, out = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out
        _, _, *found = emulation.attention(q, k, v, d_out, d_lse, out_given=out, **ctx.options)
        return *(x.to(q.dtype) for x in found if x is not None), None, None


def _emulated(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool) -> Any:
    return _Emulated.apply(q, k, v, causal, scale)


def _emulated_ragged(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: Any
) -> Any:
    def sequences() -> Iterator[Any]:
        for (q0, q1), (k0, k1) in zip(_pairs(cu_q), _pairs(cu_k), strict=True):
            parts = (x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
            yield _emulated(*parts, **options)

    out, lse = zip(*sequences(), strict=True)
    return torch.cat(out, 2)[0].transpose(0, 1), torch.cat(lse, 2)[0]


def _pairs(cu: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(cu.tolist()))


EMULATED = Implementation("emulation", _emulated, CLAIMS, lambda device: "cpu", varlen=_emulated_ragged)


@pytest.mark.parametrize("shard", range(9))
def test_a_right_implementation_is_never_red(shard: int) -> None:
    examples = int(os.environ.get("FA_LAWS", "10"))
    dtype, dims = shard_of(shard, CLAIMS, interpreted=True)
    count: dict[str, int] = {}

    @seed(shard + 1000 * examples)
    @generation(examples)
    @given(cases(CLAIMS, dtype, dims, (16, 16), 4_000))
    def judged(case: Case) -> None:
        found = outcomes(case, EMULATED, CPU)
        for o in found:
            count[o.status] = count.get(o.status, 0) + 1
        red = [f for o in found for f in o.findings]
        assert not red, f"{case.id}\n{words(red)}"

    judged()
    assert count["held"] > count.get("no power", 0)
    print(dtype, dims, count)
