"""Baselines of errors: as accurate is green, less accurate is red though it is legal; files that are none."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from reports import error_baseline, kept
from reports.__main__ import main
from reports.error_baseline import Errors, baseline, differences
from reports.errors import ReportError
from reports.kept import Key
from reports.records import Record
from tests.accuracy import corpus
from tests.cases import Case
from tests.comparison import Prepared, compare
from tests.implementations import EVERY_DENSE_CASE, Implementation
from tests.meta.test_command_line import ROOT
from tests.meta.test_rounding import ByHand, as_it_is, cut_off

CPU = torch.device("cpu")
KEY = Key("errors", "mine", "CPU", "2.13.0", "3.7.1", "cpu")
RUNS = 3

Function = Callable[..., Any]


def dense(run: int) -> list[Case]:
    """A few cases of each dtype, small ones."""
    few = [case for case in corpus(run) if not case.ragged and case.dim == case.dim_v == 16]
    return [replace(case, len_q=65, len_k=129, layout="bhsd", grad="v", d_lse=False) for case in few[::3]]


def by_hand(operand: Callable[[Tensor], Tensor] = as_it_is, p: Any = None) -> Function:
    """The definition in float32 on the way, with `p` of the P that enters a product."""

    def function(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: Any, return_lse: bool) -> Any:
        def entering(x: Tensor) -> Tensor:
            is_p = x.shape[-2:] == (q.shape[2], k.shape[2])
            return operand(x if p is None or not is_p else p(x, q.dtype))

        scale = q.shape[3] ** -0.5 if scale is None else scale
        return ByHand.apply(q, k, v, causal, scale, entering, as_it_is, as_it_is)

    return function


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


def truncated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cut off to the digits of a dtype, towards zero; the dtype of a float32 has none to lose."""
    lost = {torch.float16: 13, torch.bfloat16: 16, torch.float32: 0}[dtype]
    return (x.contiguous().view(torch.int32) & ~((1 << lost) - 1)).view(torch.float32)


def near_ties_either_way(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to a dtype; to bfloat16 what lies near the middle of a step, up or down as it comes."""
    if dtype is not torch.bfloat16:
        return rounded(x, dtype)
    low = truncated(x, dtype)
    step = (x.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32) * 2**-7
    share = (x - low) / step.clamp(min=1e-30)
    up = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    either = (share > 0.3) & (share < 0.7)
    return torch.where(either, torch.where(up, low + step, low), rounded(x, dtype))


_prepared: dict[str, Prepared] = {}


def run_of(function: Function, run: int, cases: Callable[[int], list[Case]] = dense) -> list[Record]:
    mine = Implementation("mine", function, replace(EVERY_DENSE_CASE, dead_rows=False), lambda device: "cpu")
    found = []
    for case in cases(run):
        if case.id not in _prepared:
            _prepared[case.id] = Prepared(case, fa2=False)
        found.append(compare(case, mine, CPU, "replay", _prepared[case.id], hostile=False))
    return found


@pytest.fixture(scope="module")
def committed() -> Errors:
    return baseline(KEY, [run_of(by_hand(p=rounded), run) for run in range(RUNS)])


def test_the_corpus_has_some_200_cases_and_another_run_the_same_with_other_values() -> None:
    first, second = corpus(), corpus(1)
    assert 190 <= len(first) <= 210
    assert len({case.id for case in first}) == len(first) < error_baseline_seeds()
    assert [replace(case, seed=0) for case in first] == [replace(case, seed=0) for case in second]
    assert {case.seed for case in first}.isdisjoint(case.seed for case in second)
    assert {(case.dtype, case.causal) for case in first} == {
        (dtype, causal) for dtype in ("float16", "bfloat16", "float32") for causal in (False, True)
    }


def error_baseline_seeds() -> int:
    from tests.accuracy import ANOTHER

    return ANOTHER


def test_what_is_as_accurate_is_green(committed: Errors) -> None:
    assert differences(committed, run_of(by_hand(p=rounded), 0)) == []
    assert set(committed.groups) == {
        f"{dtype} {tensor}" for dtype in ("float16", "bfloat16", "float32") for tensor in ("out", "lse", "dv")
    }


def test_a_p_that_is_cut_off_is_red(committed: Errors) -> None:
    red = [of.what for of in differences(committed, run_of(by_hand(p=truncated), 0)) if of.red]
    for group in ("float16 out", "bfloat16 out", "float16 dv", "bfloat16 dv"):
        assert any(what.startswith(f"{group}: rms z ") and "it rose most in b1_" in what for what in red), red
    assert not any(what.startswith("float32") for what in red)


def test_what_is_legal_and_less_accurate_is_red(committed: Errors) -> None:
    """P is rounded the wrong way at random, where it is near the middle of a step."""
    found = [record for record in run_of(by_hand(p=near_ties_either_way), 0) if record.dtype == "bfloat16"]
    legal = [record for record in found if record.status == "held"]
    assert len(legal) >= 2, [record.reason for record in found]
    red = [of.what for of in differences(committed, legal) if of.red and "rms z" in of.what]
    assert any(what.startswith("bfloat16 out: rms z ") for what in red), red


def test_tf32_products_are_red(committed: Errors) -> None:
    found = [r for r in run_of(by_hand(cut_off, p=rounded), 0) if r.dtype == "float32"]
    red = [difference.what for difference in differences(committed, found) if difference.red]
    assert any(what.startswith("float32 out: rms z ") for what in red)
    assert any("cases were not executed" in what for what in red)


def test_what_has_become_better_is_told_and_not_red(committed: Errors) -> None:
    worse = {
        name: msgspec.structs.replace(group, rms_z=tuple(2 * x for x in group.rms_z))
        for name, group in committed.groups.items()
    }
    before = msgspec.structs.replace(committed, groups=worse)
    differs = differences(before, run_of(by_hand(p=rounded), 0))
    assert len(differs) == len(worse) and not any(difference.red for difference in differs)
    assert all(difference.what.endswith("the baseline may be updated") for difference in differs)


def test_one_case_alone_is_seen(committed: Errors) -> None:
    found = run_of(by_hand(p=rounded), 0)
    of = found[3].tensors["out"]
    worse = msgspec.structs.replace(of, rms_z=1.6 * (of.rms_z or 0.0))
    found[3] = msgspec.structs.replace(found[3], tensors={**found[3].tensors, "out": worse})
    (difference,) = differences(committed, found)
    assert difference.red
    assert re.fullmatch(rf"\w+ out: rms z .* {found[3].case}.*", difference.what)


def test_what_is_not_claimed_is_told_and_not_red(committed: Errors) -> None:
    found = run_of(by_hand(p=rounded), 0)
    for i, record in enumerate(found):
        if record.dtype == "float16":
            found[i] = msgspec.structs.replace(record, status="not claimed", tensors={})
    differs = differences(committed, found)
    assert not any(difference.red for difference in differs)
    assert differs[0].what.endswith("cases are not claimed, hence not compared")


def test_of_what_is_red_no_baseline_is_made() -> None:
    def doubled(*tensors: Tensor, **options: Any) -> Any:
        out, lse = by_hand(p=rounded)(*tensors, **options)
        return 2 * out, lse

    with pytest.raises(
        ReportError,
        match=r"\d+ comparisons are red, of \d+ cases in 1 runs, so that no baseline is made of them",
    ):
        baseline(KEY, [run_of(doubled, 0)])


# ---------------------------------------------------------------- files


def test_a_baseline_is_read_as_it_was_written_a_line_for_each_entry(
    tmp_path: Path, committed: Errors
) -> None:
    path = tmp_path / KEY.name
    path.write_bytes(kept.encode(committed))
    assert kept.decode(path, Errors, error_baseline.VERSION) == committed
    assert path.name == "errors-mine-cpu-torch2.13.0-triton3.7.1-cpu.json"
    lines = path.read_text().splitlines()
    for name in (*committed.groups, *committed.cases):
        assert sum(f'"{name}"' in line for line in lines) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a baseline that can be read"),
        (b'{"version": 7, "groups": {}}', "a baseline of version 7; this reads version 1"),
        (b'{"version": 1}', "not a baseline that can be read"),
        (b"\xff\xfe", "not a baseline that can be read"),
        (b"[1, 2]", "not a baseline that can be read"),
        (None, "not a baseline that can be read"),
    ],
)
def test_what_is_no_baseline_is_named(
    content: bytes | None, message: str, tmp_path: Path, committed: Errors
) -> None:
    path = tmp_path / "errors.json"
    path.write_bytes(kept.encode(committed)[:-40] if content is None else content)
    with pytest.raises(ReportError, match=f"^{path}: {message}"):
        kept.decode(path, Errors, error_baseline.VERSION)
    with pytest.raises(ReportError, match="No such file"):
        kept.decode(tmp_path / "none.json", Errors, error_baseline.VERSION)


# ---------------------------------------------------------------- the command


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, committed: Errors) -> list[Record]:
    """The command with a corpus that has been run already."""
    found = run_of(by_hand(p=rounded), 0)
    monkeypatch.setattr(error_baseline, "targets", lambda *given: [error_baseline.Target()])
    monkeypatch.setattr(error_baseline, "key_of", lambda target: KEY)
    monkeypatch.setattr(error_baseline, "executed", lambda target, runs: [found for _ in runs])
    return found


def test_a_missing_baseline_is_said_to_be_with_the_command_that_makes_one(
    tmp_path: Path, measured: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    check = ["baseline", "check", "--kind", "errors", "--baseline-dir", str(tmp_path)]
    assert main(check) == 3
    said = capsys.readouterr().out
    assert (
        "no baseline of mine on CPU on path cpu with torch 2.13.0, triton 3.7.1: nothing was compared" in said
    )
    assert f"python -m reports baseline update --kind errors --baseline-dir {tmp_path}" in said
    assert main(["baseline", "update", "--kind", "errors", "--baseline-dir", str(tmp_path)]) == 0
    assert main(check) == 0
    assert "as kept" in capsys.readouterr().out


def test_check_is_red_where_it_is_worse(
    tmp_path: Path, measured: list[Record], committed: Errors, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / KEY.name).write_bytes(kept.encode(committed))
    measured[:] = run_of(by_hand(p=truncated), 0)
    assert main(["baseline", "check", "--kind", "errors", "--baseline-dir", str(tmp_path)]) == 1
    assert "  worse: bfloat16 out: rms z " in capsys.readouterr().out


def test_check_against_another_implementation(
    tmp_path: Path, measured: list[Record], committed: Errors, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / replace(KEY, implementation="other").name).write_bytes(kept.encode(committed))
    check = ["baseline", "check", "--kind", "errors", "--baseline-dir", str(tmp_path)]
    assert main(check) == 3
    assert main([*check, "--as", "other"]) == 0


def test_a_file_that_is_none_ends_with_wrong_use(
    tmp_path: Path, measured: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / KEY.name).write_text("{}")
    assert main(["baseline", "check", "--kind", "errors", "--baseline-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"python -m reports baseline: {tmp_path / KEY.name}: not a")


def test_a_real_run_measures_what_the_suite_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the suite itself, with a corpus of two cases."""
    few = [case.id for case in corpus() if case.dim == 16 and case.dtype == "float32"][:2]
    program = (
        "import sys; from dataclasses import replace\n"
        "from tests import accuracy; from tests.cases import parse_case\n"
        f"few = [parse_case(case) for case in {few!r}]\n"
        "accuracy.corpus = lambda run=0: [replace(c, seed=c.seed + 1000 * run) for c in few]\n"
        "from reports.__main__ import main\n"
        "options = ['--kind', 'errors', '--impl', 'pytorch', '-n', '1']\n"
        f"options += ['--baseline-dir', {str(tmp_path)!r}]\n"
        "assert main(['baseline', 'update', *options]) == 0\n"
        "sys.exit(main(['baseline', 'check', *options]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("errors-pytorch-*-cpu.json")
    written = kept.decode(path, Errors, error_baseline.VERSION)
    assert sorted(written.cases) == sorted(few)
    assert written.runs == error_baseline.RUNS
    assert set(written.groups) == {f"float32 {t}" for t in ("out", "lse", "dq", "dk", "dv")}


def test_an_implementation_that_is_not_there_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["baseline", "check", "--kind", "errors", "--impl", "nothing:here"]) == 2
    assert "--impl is 'nothing:here': importing nothing failed" in capsys.readouterr().err
