"""Implementations: what --impl may name, and what lies outside of the claims."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.checks import LARGEST_SCALE
from tests.cases import DTYPES, Case
from tests.comparison import compare
from tests.implementations import Claims, Implementation, ImplementationError, environment, load

CPU = torch.device("cpu")


# ---------------------------------------------------------------- loading


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with an implementation, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "my_attention.py"
    path.write_text("def attention(q, k, v, *, causal, scale, return_lse):\n    return 'mine'\nnumber = 7\n")
    return path


@pytest.mark.parametrize("source", ["my_attention.py", "./my_attention.py", "{path}", "my_attention"])
def test_a_callable_is_found_by_file_and_by_module(source: str, mine: Path) -> None:
    spec = source.format(path=mine) + ":attention"
    found = load(spec)
    assert found.function(1, 2, 3, causal=False, scale=None, return_lse=False) == "mine"
    assert found.name == spec
    assert found.claims == Claims()
    assert found.path(CPU) == "cpu"
    assert found.tiles is None


def test_a_home_folder_may_be_abbreviated(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(mine.parent))
    assert load("~/my_attention.py:attention").function(1, 2, 3, causal=0, scale=0, return_lse=0) == "mine"


UNUSABLE = {
    "attention": "'attention'; it may be 'triton', 'module:callable' or 'path/file.py:callable'",
    "my_attention.py": "it may be 'triton'",
    "my_attention.py:": "it may be 'triton'",
    ":attention": "it may be 'triton'",
    "none.py:attention": "there is no file {folder}/none.py",
    "my_attention.py:atention": "'atention' is not there; it must be a callable",
    "my_attention.py:number": "'number' is a int; it must be a callable",
    "no_such_module:attention": "importing no_such_module failed: ModuleNotFoundError: No module named",
    "broken.py:attention": "importing broken.py failed: ModuleNotFoundError: No module named 'no",
    "typo.py:attention": "importing typo.py failed: SyntaxError: ",
    "script.py:attention": "importing script.py failed: SystemExit: 3",
    "lazy.py:attention": "asking lazy.py for 'attention' failed: RuntimeError: not today",
    "classes.py:Module": "'Module' is a class; give an instance of it or a function",
    "classes.py:int": "'int' is a class; give an instance of it or a function",
}


@pytest.mark.parametrize("spec", UNUSABLE)
def test_what_cannot_be_used_is_refused_by_name(spec: str, mine: Path) -> None:
    Path("broken.py").write_text("import no_such_module\n")
    Path("typo.py").write_text("def attention(:\n")
    Path("script.py").write_text("import sys\nsys.exit(3)\n")
    Path("lazy.py").write_text("def __getattr__(name):\n    raise RuntimeError('not today')\n")
    Path("classes.py").write_text("from torch.nn import Module\nint = int\n")
    with pytest.raises(ImplementationError) as refused:
        load(spec)
    assert str(refused.value).startswith(f"--impl is {spec!r}")
    assert UNUSABLE[spec].format(folder=mine.parent) in str(refused.value)


# ---------------------------------------------------------------- claims


OUTSIDE: dict[str, tuple[Case, dict[str, Any]]] = {
    "dtype bfloat16": (Case(dtype="bfloat16", grad="none"), {"dtypes": DTYPES}),
    "head dimension 512": (Case(dim=512, dim_v=512, grad="none"), {"largest_dim": 512}),
    "head dimension 8": (Case(dim=8, dim_v=8, grad="none"), {"smallest_dim": 8}),
    "a scale beyond 3.4028e+38": (Case(scale=-1e39, grad="none"), {"largest_scale": 1e40}),
    "Dv != D": (Case(dim=32, dim_v=64, grad="none"), {"equal_dims": False}),
    "several query heads a KV head": (Case(heads_q=4, heads_kv=2, grad="none"), {"gqa": True}),
    "Sq != Sk": (Case(len_q=3, len_k=4, grad="none"), {"cross_lengths": True}),
    "empty inputs": (Case(len_q=0, len_k=0, grad="none"), {"empty": True}),
    "a backward": (Case(grad="q"), {"backward": True}),
    "inputs that are not contiguous": (Case(layout="offset", grad="none"), {"strided": True}),
    "head dimension 48": (
        Case(dim=48, dim_v=48, grad="none"),
        {"smallest_dim": 32, "largest_dim": 64, "dims": (32, 48, 64)},
    ),
    "ragged batches": (Case(lengths=((16, 16),), layout="bshd", grad="none"), {"ragged": True}),
}


@pytest.mark.parametrize("wants", OUTSIDE)
def test_a_case_outside_of_the_claims_is_refused_until_it_is_claimed(wants: str) -> None:
    case, claim = OUTSIDE[wants]
    less: dict[str, Any] = {"dims": (32, 64)} if wants == "head dimension 48" else {}
    assert Claims(**less).refusal(case) == wants
    assert Claims(**claim).refusal(case) == ""


LESS: dict[str, tuple[Case, dict[str, Any]]] = {
    "a causal mask": (Case(causal=True, grad="none"), {"masks": ("full",)}),
    "calls without a mask": (Case(grad="none"), {"masks": ("causal",)}),
    "head dimensions not multiples of 8": (Case(dim=20, dim_v=20, grad="none"), {"dims_multiple_of": 8}),
    "a scale other than the default": (Case(scale=0.25, grad="none"), {"default_scale": True}),
    "a scale of 0 or less": (Case(scale=0.0, grad="none"), {"positive_scale": True}),
    "a scale beyond 2": (Case(scale=-3.0, grad="none"), {"largest_scale": 2.0}),
    "rows past the last sequence": (
        Case(lengths=((4, 4),), past=(1, 0), layout="bshd", grad="none"),
        {"ragged": True, "past_rows": False},
    ),
}


@pytest.mark.parametrize("wants", LESS)
def test_what_is_assumed_need_not_be_claimed(wants: str) -> None:
    case, claim = LESS[wants]
    assert Claims(**claim).refusal(case) == wants
    assert replace(Claims(**claim), **{name: getattr(WIDEST, name) for name in claim}).refusal(case) == ""


WIDEST = Claims(ragged=True)


@pytest.mark.parametrize("contiguous", ["bhsd", "bshd", "sbhd"])
def test_contiguous_is_what_an_implementation_knows_as_that(contiguous: str) -> None:
    claims = Claims(contiguous=contiguous, ragged=True)
    dense = Case(grad="none", batch=2)
    ragged = Case(grad="none", lengths=((3, 3),), layout="bshd")
    assert claims.narrowed(dense) == replace(dense, layout=contiguous)
    assert claims.refusal(claims.narrowed(dense)) == claims.refusal(ragged) == ""
    assert claims.narrowed(ragged) == ragged
    for layout in {"bhsd", "bshd", "offset"} - {contiguous, "bhsd"}:
        other = replace(dense, layout=layout)
        assert claims.narrowed(other) == other
        assert claims.refusal(other) == "inputs that are not contiguous"
    anything = replace(claims, strided=True)
    assert anything.narrowed(dense) == dense and anything.refusal(dense) == ""


def test_the_gradient_of_the_lse_is_contiguous_where_inputs_must_be() -> None:
    assert Claims(contiguous="bshd").layout_of_d_lse("bshd") == "bhsd"
    assert Claims(strided=True).layout_of_d_lse("bshd") == "bshd"


@pytest.mark.parametrize("nothing", ["batch", "len_q", "len_k"])
def test_each_kind_of_empty_input_is_one(nothing: str) -> None:
    case = replace(Case(grad="none"), **{nothing: 0})  # type: ignore[arg-type]
    assert "empty inputs" in Claims().refusal(case)


@pytest.mark.parametrize(
    ("case", "wants"),
    [
        (Case(lengths=((3, 3), (4, 4)), layout="bshd"), ""),
        (Case(lengths=((3, 3), (4, 4)), past=(2, 1), layout="bshd"), ""),
        (Case(lengths=((3, 4), (4, 3)), layout="bshd"), "Sq != Sk"),
        (Case(lengths=((4, 4), (4, 3)), layout="bshd", causal=True), "Sq != Sk, rows that see no key"),
        (Case(lengths=((4, 4), (0, 0)), layout="bshd"), "empty inputs"),
        (Case(lengths=(), past=(3, 2), layout="bshd"), "empty inputs"),
        (Case(lengths=((4, 4), (2, 0)), layout="bshd"), "Sq != Sk, rows that see no key, empty inputs"),
        (Case(lengths=((3, 3),), layout="bhsd"), "inputs that are not contiguous"),
    ],
    ids=str,
)
def test_what_any_sequence_wants_is_wanted_of_a_ragged_batch(case: Case, wants: str) -> None:
    assert Claims(ragged=True, backward=True).refusal(case) == wants


def test_ragged_batches_cannot_be_claimed_without_a_function_for_them() -> None:
    with pytest.raises(ValueError, match="mine claims ragged batches, and no function for them is given"):
        Implementation("mine", lambda: None, Claims(ragged=True), lambda device: "cpu")


def test_our_own_claims_everything() -> None:
    own = load("triton")
    case = Case(
        lengths=((4, 0), (0, 3), (5, 2)), heads_q=2, dim_v=32, dtype="bfloat16", causal=True, d_lse=True
    )
    assert own.claims.refusal(case) == ""
    assert own.claims.refusal(replace(case, scale=LARGEST_SCALE)) == ""
    assert own.claims.refusal(replace(case, scale=3e38)) == "a scale beyond 2.3586e+38"
    assert own.tiles is not None
    assert own.tiles(case, CPU) == own.tiles(replace(case, lengths=None), CPU)


def test_all_that_a_case_wants_is_listed() -> None:
    case = Case(len_q=5, len_k=3, causal=True, d_lse=True)
    wants = "Sq != Sk, rows that see no key, a backward, gradients through the lse"
    assert Claims().refusal(case) == wants


def test_a_case_outside_of_the_claims_is_recorded_and_not_run() -> None:
    def never(*tensors: Tensor, **options: object) -> None:
        raise AssertionError

    record = compare(Case(len_k=17), Implementation("never", never, Claims(), lambda device: "cpu"), CPU)
    assert (record.status, record.reason) == ("not claimed", "Sq != Sk, a backward")
    assert not record.verdicts


@pytest.mark.parametrize(
    ("path", "variables"),
    [
        ("interpreter", {"TRITON_INTERPRET": "1"}),
        ("sm80-override", {"TRITON_OVERRIDE_ARCH": "sm80"}),
        ("sm90", {}),
        ("cpu", {}),
    ],
)
def test_a_code_path_names_the_variables_that_lead_to_it(path: str, variables: dict[str, str]) -> None:
    assert environment(path) == variables


def test_a_module_that_ends_the_process_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(0)\n")
    with pytest.raises(ImplementationError, match=r"importing .*ends.py failed: SystemExit: 0"):
        load(f"{tmp_path}/ends.py:attention")
