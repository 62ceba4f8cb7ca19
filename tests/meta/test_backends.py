"""PyTorch's own attentions, and the emulation, as implementations: what they claim, and whether it is so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import backends
from tests.cases import Case
from tests.comparison import Prepared, compare, explain
from tests.implementations import OWN, Claims, load

CPU = torch.device("cpu")
FUSED = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient")
SQUARE = Case(batch=2, heads_q=2, heads_kv=2, len_q=33, len_k=33)
UNEQUAL = replace(SQUARE, len_k=40)

OF_MATH = [
    SQUARE,
    replace(SQUARE, causal=True),
    UNEQUAL,
    replace(SQUARE, heads_q=4),
    replace(SQUARE, dim_v=24),
    replace(SQUARE, scale=0.0),
    replace(SQUARE, scale=-0.2, causal=True),
    replace(SQUARE, layout="strided"),
    replace(SQUARE, layout="expanded", heads_q=4),
    replace(SQUARE, values="mean", scale=1.0),
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_math_does_what_it_claims(dtype: str) -> None:
    for case in OF_MATH:
        record = compare(replace(case, dtype=dtype), load("sdpa-math"), CPU)
        assert record.status == "held", explain(record)
        assert set(record.tensors) == {"out", "dq", "dk", "dv"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_emulation_does_what_it_claims(dtype: str) -> None:
    for case in [
        replace(UNEQUAL, d_lse=True, heads_q=4, dim_v=24),
        replace(SQUARE, causal=True, len_k=20, d_lse=True),
        replace(SQUARE, len_k=0),
        replace(SQUARE, scale=-0.2, layout="packed", grad="v"),
    ]:
        record = compare(replace(case, dtype=dtype), load("emulation"), CPU)
        assert record.status == "held", explain(record)


@pytest.mark.parametrize("name", [*FUSED, "sdpa-math"])
def test_a_causal_mask_at_the_top_left_is_not_ours(name: str) -> None:
    claims = load(name).claims
    assert not claims.refusal(UNEQUAL)
    assert not claims.refusal(replace(SQUARE, causal=True))
    assert claims.refusal(replace(UNEQUAL, causal=True)) == "a causal mask aligned at the bottom right"


def test_it_would_be_seen_if_it_were_claimed() -> None:
    math = load("sdpa-math")
    bold = replace(math, claims=replace(math.claims, causal_alignment="bottom-right"))
    assert compare(replace(UNEQUAL, causal=True), bold, CPU).status == "broken"


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scale": 0.0}, "a scale of 0 or less"),
        ({"scale": -0.2}, "a scale of 0 or less"),
        ({"heads_q": 4}, "several query heads a KV head"),
        ({"layout": "strided"}, "inputs that are not contiguous"),
        ({"d_lse": True}, "gradients through the lse"),
    ],
)
def test_what_no_document_promises_is_not_claimed(name: str, changes: dict[str, Any], reason: str) -> None:
    claims = load(name).claims
    assert claims.devices == ("cuda",)
    assert not claims.refusal(SQUARE)
    assert claims.refusal(replace(SQUARE, **changes)) == reason


def test_multiples_of_head_dimensions() -> None:
    odd = replace(SQUARE, dim=20, dim_v=20)
    refusals = {name: load(name).claims.refusal(odd) for name in backends.NAMES}
    assert {name for name, refusal in refusals.items() if refusal} == {"sdpa-cudnn", "sdpa-efficient"}
    assert refusals["sdpa-cudnn"] == "head dimensions not multiples of 8"


def test_there_is_no_lse() -> None:
    q = torch.ones(1, 1, 16, 16)
    with pytest.raises(ValueError, match="return_lse is True"):
        load("sdpa-math").function(q, q, q, causal=False, scale=None, return_lse=True)


def test_what_is_not_triton_runs_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm80")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert {load(name).path(torch.device("cuda")) for name in FUSED} == {"sm90"}


def test_ours_still_claims_all_alignments() -> None:
    assert load(OWN).claims.causal_alignment == Claims().causal_alignment == "bottom-right"
    assert not load(OWN).claims.refusal(replace(UNEQUAL, causal=True, len_q=50))


def test_references_that_are_shared_say_the_same() -> None:
    case = replace(SQUARE, dtype="bfloat16", causal=True)
    prepared = Prepared(case)
    for name in ("sdpa-math", "emulation", "sdpa-math"):
        alone, shared = (compare(case, load(name), CPU, prepared=p) for p in (None, prepared))
        assert shared.verdicts == alone.verdicts
        assert shared.tensors == alone.tensors
