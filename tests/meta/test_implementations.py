"""Implementations: what --impl may name, what lies outside of the claims, which results are no results."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from reports.records import Record
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
}


@pytest.mark.parametrize("spec", UNUSABLE)
def test_what_cannot_be_used_is_refused_by_name(spec: str, mine: Path) -> None:
    Path("broken.py").write_text("import no_such_module\n")
    Path("typo.py").write_text("def attention(:\n")
    Path("script.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ImplementationError) as refused:
        load(spec)
    assert str(refused.value).startswith(f"--impl is {spec!r}")
    assert UNUSABLE[spec].format(folder=mine.parent) in str(refused.value)


# ---------------------------------------------------------------- claims


OUTSIDE: dict[str, tuple[Case, dict[str, Any]]] = {
    "dtype bfloat16": (Case(dtype="bfloat16", grad="none"), {"dtypes": DTYPES}),
    "head dimension 512": (Case(dim=512, dim_v=512, grad="none"), {"largest_dim": 512}),
    "head dimension 8": (Case(dim=8, dim_v=8, grad="none"), {"smallest_dim": 8}),
    "Dv != D": (Case(dim=32, dim_v=64, grad="none"), {"equal_dims": False}),
    "several query heads a KV head": (Case(heads_q=4, heads_kv=2, grad="none"), {"gqa": True}),
    "Sq != Sk": (Case(len_q=3, len_k=4, grad="none"), {"cross_lengths": True}),
    "empty inputs": (Case(len_q=0, len_k=0, grad="none"), {"empty": True}),
    "a backward": (Case(grad="q"), {"backward": True}),
    "inputs that are not contiguous": (Case(layout="offset", grad="none"), {"strided": True}),
}


@pytest.mark.parametrize("wants", OUTSIDE)
def test_a_case_outside_of_the_claims_is_refused_until_it_is_claimed(wants: str) -> None:
    case, claim = OUTSIDE[wants]
    assert Claims().refusal(case) == wants
    assert Claims(**claim).refusal(case) == ""


@pytest.mark.parametrize("nothing", ["batch", "len_q", "len_k"])
def test_each_kind_of_empty_input_is_one(nothing: str) -> None:
    case = replace(Case(grad="none"), **{nothing: 0})  # type: ignore[arg-type]
    assert "empty inputs" in Claims().refusal(case)


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


# ---------------------------------------------------------------- results that are no results


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool) -> Any:
    """Differentiable attention in float32 by its definition, for square cases."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = scale * q.float() @ k.float().mT
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    out = (s.softmax(-1) @ v.float()).to(q.dtype)
    return (out, s.logsumexp(-1)) if return_lse else out


CLAIMS = Claims(backward=True, lse=True, lse_grad=True)
CASE = Case(heads_q=2, heads_kv=2, len_q=20, len_k=20, d_lse=True, dtype="float32")
FORWARD = replace(CASE, grad="none", d_lse=False)


def compared(function: Any, case: Case = CASE, claims: Claims = CLAIMS) -> Record:
    return compare(case, Implementation("mine", function, claims, lambda device: "cpu"), CPU)


@pytest.mark.parametrize(
    "case", [CASE, FORWARD, replace(CASE, causal=True, grad="kv", dtype="float16")], ids=str
)
def test_a_right_implementation_is_held(case: Case) -> None:
    record = compared(attention, case)
    assert record.status == "held", record.reason
    gradients = [f"d{name}" for name in "qkv" if case.backward and name in case.grad]
    assert list(record.tensors) == ["out", "lse", *gradients]


def changing(**changes: Any) -> Any:
    """The right implementation, with its out or lse replaced by a function of it."""

    def changed(*tensors: Tensor, **options: Any) -> Any:
        out, lse = attention(*tensors, **options)
        return changes.get("out", lambda x: x)(out), changes.get("lse", lambda x: x)(lse)

    return changed


RESULTS = {
    "an out with heads and queries exchanged": (
        changing(out=lambda x: x.transpose(1, 2)), "out", "shape (1, 20, 2, 16), not (1, 2, 20, 16)",
    ),
    "an out without a batch": (changing(out=lambda x: x[0]), "out", "shape (2, 20, 16), not (1, 2, 20, 16)"),
    "an out in float64": (changing(out=lambda x: x.double()), "out", "torch.float64, not torch.float32"),
    "an out elsewhere": (changing(out=lambda x: x.to("meta")), "out", "on meta, not on cpu"),
    "an out in NumPy": (changing(out=lambda x: x.detach().numpy()), "out", "it is a ndarray"),
    "an lse with one more dimension": (
        changing(lse=lambda x: x[..., None]), "lse", "shape (1, 2, 20, 1), not (1, 2, 20)",
    ),
    "an lse in float16": (changing(lse=lambda x: x.half()), "lse", "torch.float16, not torch.float32"),
    "nothing": (lambda *tensors, **options: None, "out", "it is a NoneType"),
    "out alone": (lambda *t, **options: attention(*t, **options)[0], "lse", "it is a NoneType"),
    "three things": (lambda *t, **options: (*attention(*t, **options), 0), "out", "it is a tuple"),
}  # fmt: skip


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("case", [CASE, FORWARD], ids=["backward", "forward"])
def test_what_is_not_the_tensor_asked_for_is_red(result: str, case: Case) -> None:
    function, tensor, note = RESULTS[result]
    record = compared(function, case)
    broken = [v for v in record.verdicts if not v.held]
    assert record.status == "broken"
    assert (broken[0].tensor, broken[0].reference, broken[0].note) == (tensor, "contract", note)
    assert broken[0].rule == "a tensor of the right shape, dtype and device"
    assert tensor not in record.tensors


def test_one_tensor_is_asked_for_where_no_lse_is_claimed() -> None:
    claims = Claims()
    assert compared(attention, FORWARD, claims).status == "held"
    record = compared(lambda *t, **options: (attention(*t, **options), None), FORWARD, claims)
    assert record.reason == "out: a tensor of the right shape, dtype and device"


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_gradient_that_is_none_is_red(name: str) -> None:
    def cut(*tensors: Tensor, **options: Any) -> Any:
        return attention(
            *(t.detach() if n == name else t for n, t in zip("qkv", tensors, strict=True)), **options
        )

    record = compared(cut)
    (broken,) = [v for v in record.verdicts if not v.held]
    assert (broken.tensor, broken.note) == (f"d{name}", "it is a NoneType")
    assert record.status == "broken"


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_input_changed_in_place_is_red(name: str) -> None:
    def scribbling(*tensors: Tensor, **options: Any) -> Any:
        result = attention(*tensors, **options)
        tensors["qkv".index(name)].detach()[0, 1, 19, 3] += 1
        return result

    record = compared(scribbling, FORWARD)
    assert record.reason == f"{name}: input unchanged"
    assert record.status == "broken"


def test_an_exception_is_red_and_says_what_was_raised() -> None:
    def raising(*tensors: Tensor, **options: Any) -> Any:
        raise ZeroDivisionError("no kernel\nfor this GPU")

    record = compared(raising)
    (broken,) = record.verdicts
    assert record.status == "broken"
    assert record.reason == "raised ZeroDivisionError: no kernel"
    assert (broken.rule, broken.note) == ("does not raise", "ZeroDivisionError: no kernel\nfor this GPU")


def test_a_result_without_a_graph_is_red_where_gradients_are_claimed() -> None:
    record = compared(changing(out=Tensor.detach, lse=Tensor.detach))
    assert record.status == "broken"
    assert "does not require grad" in record.reason


def test_a_wrong_option_is_no_way_out() -> None:
    """An implementation that does not take what the convention asks for is red, not skipped."""
    record = compared(lambda q, k, v: q)
    assert record.status == "broken"
    assert "unexpected keyword argument" in record.reason


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
