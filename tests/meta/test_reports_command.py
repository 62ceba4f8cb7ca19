"""`python -m reports`: diff and show, their statuses, and what is told of files that are none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reports import records
from reports.__main__ import COMMANDS, main
from reports.records import Record, TensorSummary, Verdict
from reports.run import RUN, Run
from tests.cases import Case
from tests.meta.test_command_line import ROOT

A = Case(heads_q=2, grad="none")
B = Case(heads_q=2, len_q=33, len_k=33, causal=True, grad="none")
C = Case(dtype="float32", len_q=65, grad="none")


def record(case: Case, held: bool = True, rms: float | None = 0.5, **changes: Any) -> Record:
    verdict = Verdict("out", "oracle", "hard bound", held, 0.4 if held else 7.0, 1.0, (0, 1, 2, 3))
    fields: dict[str, Any] = {
        "case": case.id,
        "words": case.words(),
        "origin": "edge",
        "implementation": "mine",
        "path": "sm90",
        "status": "held" if held else "broken",
        "reason": "" if held else "out: hard bound",
        "dtype": case.dtype,
        "backward": case.backward,
        "verdicts": [verdict],
        "tensors": {"out": TensorSummary(512, 512, 0.4 if held else 7.0, 2.0, rms, 1.1)},
        "diagnosis": [] if held else ["certain: only head 1 is wrong"],
        "replay": f"python -m pytest tests/test_references.py --case {case.id}",
    }
    return Record(**{**fields, **changes})


def run_in(folder: Path, *found: Record) -> Path:
    for each in found:
        records.append(folder / "records.jsonl", each)
    note = Run(
        implementation="mine", machine="NVIDIA X", torch="2.13.0", triton="3.7.1", status=1, reason="red"
    )
    (folder / RUN).write_bytes(msgspec.json.encode(note))
    return folder


# ---------------------------------------------------------------- diff


def test_diff_tells_what_is_newly_broken_and_what_is_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run_in(tmp_path / "a", record(A), record(B, held=False), record(C))
    after = run_in(tmp_path / "b", record(A, held=False, rms=3.0), record(B))
    assert main(["diff", str(before), str(after)]) == 1
    said = capsys.readouterr().out
    assert "mine on NVIDIA X, torch 2.13.0, triton 3.7.1: red (1)" in said
    assert "comparisons in both: 2; only in A: 1; only in B: 0" in said
    assert f"  newly broken: {A.id} (out: hard bound)\n    replay: " in said
    assert f"  mended: {B.id}\n" in said
    (row,) = (line.split() for line in said.splitlines() if line.startswith("sm90"))
    assert row == ["sm90", "float16", "out", "2", "7.000", "7.000", "2.000", "2.000", "0.500", "2.151"]
    assert main(["diff", str(after), str(before)]) == 1  # the other way round B is newly broken
    assert main(["diff", str(before), str(before)]) == 0


def test_diff_compares_the_same_path_only_and_any_implementation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run_in(tmp_path / "a", record(A), record(B))
    other_path = run_in(tmp_path / "b", record(A, path="sm80-override"))
    assert main(["diff", str(before), str(other_path)]) == 3
    assert "nothing can be compared: A ran as sm90, not as sm80-override" in capsys.readouterr().out
    variant = run_in(tmp_path / "c", record(B, held=False, implementation="variant"))
    assert main(["diff", str(before), str(variant)]) == 1
    assert "comparisons in both: 1; only in A: 1; only in B: 0" in capsys.readouterr().out


def test_diff_tells_what_is_red_and_was_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    law = Verdict("out", "law", "permuted_keys", False, 3.0, 1.0)
    before = run_in(tmp_path / "a", record(A))
    with_law = run_in(
        tmp_path / "b",
        record(A),
        record(A, held=False, origin="law", verdicts=[law], reason="out: permuted_keys"),
    )
    assert main(["diff", str(before), str(with_law)]) == 1
    assert "red only in B: 0 comparisons that A has not, 1 laws" in capsys.readouterr().out
    assert main(["diff", str(with_law), str(with_law)]) == 0
    with_new = run_in(tmp_path / "c", record(A), record(C, held=False))
    assert main(["diff", str(before), str(with_new)]) == 1
    assert f"  red: {C.id} (out: hard bound)" in capsys.readouterr().out


def test_a_number_that_is_not_finite_is_the_largest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = run_in(tmp_path / "a", record(A)), run_in(tmp_path / "b", record(A, rms=None))
    assert main(["diff", str(before), str(after / "records.jsonl")]) == 0
    assert " inf" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no records.jsonl: no run has written there"),
        (b'{"version": 99}\n', "records.jsonl, line 1: a record of version 99; this reads version 1"),
        (b'{"version": 1, "case": "b1', "records.jsonl, line 1: not a record"),
        (b"\x89PNG\r\n", "records.jsonl, line 1: not a record"),
        (b'{"version": 1}\n', "records.jsonl, line 1: not a record"),
    ],
)
def test_what_is_no_run_is_wrong_use_and_no_traceback(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = run_in(tmp_path / "a", record(A)), tmp_path / "b"
    bad.mkdir()
    if content is not None:
        (bad / "records.jsonl").write_bytes(content)
    for words in (["diff", str(good), str(bad)], ["diff", str(bad), str(good)]):
        assert main(words) == 2
        assert message in capsys.readouterr().err
    assert main(["diff", str(good), str(tmp_path / "none")]) == 2
    assert "none: No such file or directory" in capsys.readouterr().err


def test_a_folder_of_runs_says_which_are_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in(tmp_path / "native", record(A))
    run_in(tmp_path / "sm80", record(A))
    assert main(["diff", str(tmp_path), str(tmp_path)]) == 2
    assert "its folders native, sm80 have" in capsys.readouterr().err


# ---------------------------------------------------------------- show


def test_show_has_everything_of_a_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in(tmp_path / "native", record(A), record(B, held=False))
    run_in(tmp_path / "sm80", record(B, path="sm80-override"))
    assert main(["show", B.id, "--in", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{B.id}\n{B.words()}\n")
    assert "mine on sm90: broken, from edge in" in said and "mine on sm80-override: held" in said
    assert "  certain: only head 1 is wrong\n" in said
    assert "  BROKEN: out against oracle: hard bound: 7, at most 1 (7 x) at [0, 1, 2, 3]\n" in said
    assert "  out: 512 of 512 elements judged; 7 of the bound, 2 largest z, 0.5 rms z" in said
    assert f"  replay: python -m pytest tests/test_references.py --case {B.id}" in said


def test_show_takes_a_part_that_only_one_case_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in(tmp_path, record(A), record(B))
    assert main(["show", "causal", "--in", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(B.id)
    assert main(["show", "h2x1", "--in", str(tmp_path)]) == 2
    assert "CASE is 'h2x1': 2 cases have that in their ids" in capsys.readouterr().err
    assert main(["show", "nonsense", "--in", str(tmp_path)]) == 3
    assert "has 'nonsense' in its id, and it is no id of a case" in capsys.readouterr().out


def test_show_of_a_case_without_a_record_says_how_one_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in(tmp_path, record(A))
    assert main(["show", C.id, "--in", str(tmp_path)]) == 3
    assert f"python -m pytest tests/test_references.py --case {C.id}" in capsys.readouterr().out
    assert main(["show", C.id, "--in", str(tmp_path / "none")]) == 2


def test_show_names_what_baselines_have_of_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from reports import kept
    from reports.error_baseline import Errors, Group

    baseline = Errors(
        implementation="mine", device="X", torch="2", triton="3", path="sm90", runs=5,
        groups={"float32 out": Group((0.1, 0.2), (0.3, 0.5), 0.1)}, cases={C.id: {"out": 0.15}},
    )  # fmt: skip
    (tmp_path / baseline.key.name).write_bytes(kept.encode(baseline))
    run_in(tmp_path / "run", record(C))
    assert main(["show", C.id, "--in", str(tmp_path / "run"), "--baseline-dir", str(tmp_path)]) == 0
    assert f"{baseline.key.name}: rms z of out 0.15" in capsys.readouterr().out


# ---------------------------------------------------------------- the command


def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    program = f"{sys.executable} -m reports vectors --list | head -1"
    done = subprocess.run(program, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "--baseline-dir", __file__], f"--baseline-dir is {__file__}, a file; it must be a folder"),
        (["update", "--as", "triton"], "--as is given with update; it is for check"),
        (["check", "-n", "-3"], "-n is '-3'; it may be auto or a whole number, at least 1"),
    ],
)
def test_a_baseline_command_that_makes_no_sense_is_wrong_use(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["baseline", *words]) == 2
    assert message in capsys.readouterr().err


def test_each_command_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "reports", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert all(f"  {name}" in done.stdout for name in COMMANDS)
    for name in COMMANDS:
        done = subprocess.run(
            [sys.executable, "-m", "reports", name, "--help"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0 and "xit status" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("words", [[], ["nothing"], ["diff", "one"], ["baseline", "forget"]])
def test_a_wrong_command_line_ends_with_wrong_use(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: python -m reports" in capsys.readouterr().err
