"""Implementations by name: what they claim, whether it is so, and why some of them do not run here."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests import backends
from tests.cases import Case
from tests.comparison import Prepared, compare, explain
from tests.implementations import OWN, Claims, ImplementationError, load

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
        ({"layout": "strided"}, "inputs that are not contiguous"),
        ({"d_lse": True}, "gradients through the lse"),
    ],
)
def test_what_no_document_promises_is_not_claimed(name: str, changes: dict[str, Any], reason: str) -> None:
    claims = load(name).claims
    assert claims.devices == ("cuda",)
    assert not claims.refusal(SQUARE)
    assert claims.refusal(replace(SQUARE, **changes)) == reason


@pytest.mark.parametrize("name", FUSED)
def test_of_grouped_heads_is_said_where_they_are_rounded(name: str) -> None:
    claims = load(name).claims
    grouped = replace(SQUARE, heads_q=4)
    assert not claims.gqa or claims.rounding.heads_rounded_before_group_sum
    assert claims.refusal(grouped) == ("" if claims.gqa else "several query heads a KV head")


def test_multiples_of_head_dimensions() -> None:
    odd = replace(SQUARE, dim=20, dim_v=20)
    refusals = {
        name: load(name).claims.refusal(odd) for name in (*FUSED, "sdpa-math", "emulation", "pytorch")
    }
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


# ---------------------------------------------------------------- the definition in PyTorch


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_definition_does_what_it_claims(dtype: str) -> None:
    """All of the suite's cases: `--impl pytorch`."""
    for case in [
        replace(UNEQUAL, d_lse=True, heads_q=4, dim_v=24, causal=True, layout="odd"),
        replace(SQUARE, causal=True, len_k=20, d_lse=True, scale=-0.2, layout="expanded"),
        replace(SQUARE, len_k=0, d_lse=True),
        replace(SQUARE, values="very-negative", causal=True),
        Case(heads_q=2, lengths=((33, 20), (0, 5), (7, 0)), past=(2, 1), d_lse=True, layout="bshd"),
        Case(lengths=(), past=(3, 0)),
    ]:
        record = compare(replace(case, dtype=dtype), load("pytorch"), CPU)
        assert record.status == "held", explain(record)


def test_the_definition_claims_all_that_ours_do() -> None:
    ours = load(OWN).claims
    ours = replace(ours, largest_scale=Claims().largest_scale, batch_invariant=False)
    assert ours == load("pytorch").claims


# ---------------------------------------------------------------- what is not here


def test_what_is_not_here_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = "needs the package {}, which is not installed"
    assert {name: backends.available(name) for name in backends.BUILT_IN} == {
        "triton": "",
        "pytorch": "",
        "sdpa-flash": "needs a GPU",
        "sdpa-efficient": "needs a GPU",
        "sdpa-cudnn": "needs a GPU",
        "sdpa-math": "",
        "flex": "needs a GPU",
        "flash-attn": missing.format("flash_attn"),
        "flash-attn-4": missing.format("flash_attn"),
        "xformers": missing.format("xformers"),
        "emulation": "",
    }
    with pytest.raises(
        ImplementationError, match="--impl is 'flash-attn', which needs the package flash_attn"
    ):
        load("flash-attn")


def test_where_a_gpu_is_required_what_has_none_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert backends.available("emulation", require_gpu=True) == "runs on the CPU only, and a GPU is required"
    assert not backends.available("flex", require_gpu=True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backends.available("flex") == "needs a GPU, and Triton interprets here"


def test_a_package_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "xformers").mkdir()
    (tmp_path / "xformers" / "__init__.py").write_text("raise OSError('undefined symbol: _ZN3c10\\nmore')")
    monkeypatch.syspath_prepend(str(tmp_path))
    why = "needs xformers.ops, and importing it failed: OSError: undefined symbol: _ZN3c10"
    assert backends.available("xformers") == why
    with pytest.raises(ImplementationError, match=f"--impl is 'xformers', which {why}"):
        load("xformers")


# ---------------------------------------------------------------- packages, by stand-ins of their signatures


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    assert deterministic
    rows = (t.transpose(1, 2) for t in (q, k, v))
    definition = load("pytorch").function
    out, lse = definition(*rows, causal=causal, scale=softmax_scale, return_lse=True)
    lse = torch.where(lse == -math.inf, math.inf, lse)
    return (out.transpose(1, 2), lse, None) if return_attn_probs else out.transpose(1, 2)


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    definition = load("pytorch").varlen
    assert definition is not None and deterministic
    where = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = definition(q, k, v, *where, causal=causal, scale=softmax_scale, return_lse=True)
    return (out, torch.where(lse == -math.inf, math.inf, lse), None) if return_attn_probs else out


class FromBottomRight:
    pass


def memory_efficient_attention(q: Any, k: Any, v: Any, attn_bias: Any = None, scale: Any = None) -> Any:
    rows = (t.transpose(1, 2) for t in (q, k, v))
    causal = isinstance(attn_bias, FromBottomRight)
    out = load("pytorch").function(*rows, causal=causal, scale=scale, return_lse=False)
    return out.transpose(1, 2)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for all of them."""
    functions: dict[str, Any] = {
        "flash_attn_func": flash_attn_func,
        "flash_attn_varlen_func": flash_attn_varlen_func,
    }
    modules: dict[str, dict[str, Any]] = {
        "flash_attn": functions,
        "xformers": {},
        "xformers.ops": {"memory_efficient_attention": memory_efficient_attention},
        "xformers.ops.fmha": {},
        "xformers.ops.fmha.attn_bias": {"LowerTriangularFromBottomRightMask": FromBottomRight},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update({**members, "__path__": [], "__spec__": SimpleNamespace(name=name)})
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", ["flash-attn", "xformers"])
def test_a_package_is_called_by_its_own_convention(name: str, packages: None) -> None:
    package = load(name)
    cases = [
        replace(UNEQUAL, causal=True, scale=0.3),
        replace(SQUARE, causal=True, len_k=20),
        Case(lengths=((33, 20), (7, 9)), causal=True, layout="bshd"),
    ]
    claimed = [c for c in map(package.claims.narrowed, cases) if not package.claims.refusal(c)]
    assert len(claimed) == {"flash-attn": 3, "xformers": 1}[name]
    for case in claimed:
        assert case.layout == "bshd"
        record = compare(case, package, CPU)
        assert record.status == "held", explain(record)
