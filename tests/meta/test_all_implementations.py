"""`--impl all`: which run, what they are told, and the table of what came of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from reports import capabilities, records
from reports.capabilities import Capabilities, Cell, row
from reports.records import Record, Verdict
from reports.run import RUN, LawTest
from reports.run import Run as RunNote
from tests import all_implementations, backends
from tests.all_implementations import combined, why_not, with_implementation
from tests.cases import Case
from tests.execution import FOLLOWS, REPEATS, SHAPE
from tests.meta.test_command_line import ROOT, suite
from tests.session import BROKE, HELD, NOTHING_EXECUTED, WRONG_USE

# ---------------------------------------------------------------- what each is told


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--impl", "all", "-n", "2", "-k", "a"], ["-n", "2", "-k", "a"]),
        (["-x", "--impl=all", "tests/a.py"], ["-x", "tests/a.py"]),
        (["--impl", "triton", "--impl", "all"], []),
        ([], []),
        (["--junitxml=out/j.xml", "--impl", "all"], ["--junitxml=out/j-flex.xml"]),
        (["--junit-xml", "j.xml", "--impl", "all"], ["--junit-xml", "j-flex.xml"]),
    ],
)
def test_each_gets_the_arguments_with_its_own_name(arguments: list[str], expected: list[str]) -> None:
    assert with_implementation(arguments, "flex") == ["--impl", "flex", *expected]


def test_only_triton_runs_where_another_architecture_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "available", lambda name, require_gpu: "")
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm80")
    runs = [name for name in backends.BUILT_IN if not why_not(name)]
    assert runs == ["triton", "flex"]
    assert why_not("sdpa-flash") == "not Triton, runs natively only, and TRITON_OVERRIDE_ARCH is set"


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([HELD, HELD], HELD),
        ([HELD, NOTHING_EXECUTED], HELD),
        ([NOTHING_EXECUTED, NOTHING_EXECUTED], NOTHING_EXECUTED),
        ([], NOTHING_EXECUTED),
        ([HELD, WRONG_USE, NOTHING_EXECUTED], WRONG_USE),
        ([WRONG_USE, BROKE, HELD], BROKE),
    ],
)
def test_the_status_is_the_worst(statuses: list[int], expected: int) -> None:
    assert combined(statuses) == expected


# ---------------------------------------------------------------- the table

CASE = Case(heads_q=2, grad="none")
CLAIMS = {
    "dtypes": ["float16", "float32"],
    "masks": ["full", "causal"],
    "backward": True,
    "deterministic": True,
}


def record(case: Case, *verdicts: Verdict, status: str = "", origin: str = "edge") -> Record:
    held = all(verdict.held for verdict in verdicts)
    return Record(
        case=case.id,
        words=case.words(),
        origin=origin,
        implementation="mine",
        path="cpu",
        status=status or ("held" if held else "broken"),
        dtype=case.dtype,
        backward=case.backward,
        verdicts=list(verdicts),
    )


def out(held: bool = True) -> Verdict:
    return Verdict("out", "oracle", "hard bound", held)


def row_of(tmp_path: Path, found: list[Record], laws: list[LawTest] | None = None) -> capabilities.Row:
    for each in found:
        records.append(tmp_path / "records.jsonl", each)
    note = RunNote(
        implementation="mine", claims=CLAIMS, machine="CPU", torch="2", triton="3", status=1,
        reason="because", laws=laws or [],
    )  # fmt: skip
    (tmp_path / RUN).write_bytes(msgspec.json.encode(note))
    return row("mine", tmp_path, 1)


def test_a_property_is_what_its_cases_and_its_rules_say(tmp_path: Path) -> None:
    large = Case(heads_q=2, len_q=32, len_k=40, causal=True, grad="none")
    small = Case(heads_q=2, len_q=16, len_k=20, causal=True, grad="none")
    same = [Verdict("out", "contract", rule, True) for rule in REPEATS]
    found = row_of(
        tmp_path,
        [
            record(CASE, out(), *same, Verdict("out", "contract", FOLLOWS, False)),
            record(large, out(False)),
            record(small, out(False)),
            record(small, Verdict("out", "contract", SHAPE, True), out(False), status="known failure"),
            record(Case(dtype="bfloat16"), status="not claimed"),
            record(CASE, out(False), origin="law"),
        ],
    )
    assert found.cells["out"] == Cell("broken", 4, 2, 1, small.id, "out: hard bound")
    assert found.cells["causal"] == Cell("broken", 3, 2, 1, small.id, "out: hard bound")
    assert found.cells["same bits again"] == Cell("held", 1)
    assert found.cells["no state between calls"] == Cell("broken", 1, 1, 0, CASE.id, f"out: {FOLLOWS}")
    assert found.cells["contract"] == Cell("held", 1)
    assert found.cells["bfloat16"] == found.cells["Sq != Sk"] == Cell("not claimed")
    assert found.cells["lse"] == Cell("not claimed")
    assert found.cells["gradients"] == found.cells["float32"] == Cell("not run")
    assert (found.reason, found.paths, found.status) == ("because", ["cpu"], 1)


@pytest.mark.parametrize(
    "rule", ["does not raise", "does not crash", "does not hang", "leaves the GPU usable"]
)
def test_where_there_is_no_result_whatever_the_case_is_about_is_broken(rule: str, tmp_path: Path) -> None:
    found = row_of(tmp_path, [record(Case(causal=True), Verdict("out", "contract", rule, False))])
    broken = {name for name, cell in found.cells.items() if cell.state == "broken"}
    assert broken == {"float16", "causal", "contract"}
    assert {found.cells[name].why for name in broken} == {f"out: {rule}"}


def test_laws_are_counted_by_their_names(tmp_path: Path) -> None:
    laws = [
        LawTest("test_generated[split_keys-0]", "passed"),
        LawTest("test_generated[split_keys-1]", "failed"),
        LawTest("test_generated[sum_of_dv-0]", "passed"),
        LawTest("test_long[b1_h1x1_very-negative-sum_of_dv]", "skipped"),
        LawTest("test_generated[ragged_is_separate-0]", "skipped", "not claimed: ragged batches"),
    ]
    assert row_of(tmp_path, [], laws).cells["laws"] == Cell("broken", 2, 1, 0, "split_keys")
    assert row_of(tmp_path, [], laws[-1:]).cells["laws"] == Cell("not claimed")
    assert row_of(tmp_path, []).cells["laws"] == Cell("not run")


def test_a_run_that_left_nothing_says_so(tmp_path: Path) -> None:
    found = row("mine", tmp_path, 1)
    assert found.reason == "the run did not come to its end: see what it printed"
    assert {cell.state for cell in found.cells.values()} == {"not run"}


def test_the_page_and_the_terminal_have_the_same_and_the_json_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Capabilities(
        rows=[row_of(tmp_path, [record(CASE, out(False))])], not_runnable={"flex": "needs a GPU"}
    )
    page, data = capabilities.write(found, tmp_path)
    assert msgspec.json.decode(data.read_bytes(), type=Capabilities) == found
    capabilities.show(found)
    printed = capsys.readouterr().out
    for text in (printed, page.read_text()):
        assert "broken 1 of 1" in text
        assert f"mine, float16, out: {CASE.id} (out: hard bound)" in text
        assert "flex: needs a GPU" in text
        assert "mine on cpu: because (1)" in text
    assert "| out | broken 1 of 1 |" in page.read_text()


# ---------------------------------------------------------------- the command line


def test_all_that_can_run_here_run_and_are_compared(tmp_path: Path) -> None:
    run = suite(tmp_path, "--impl", "all", "--examples", "20", "-k", "generated", "-n", "0", "-q")
    assert run.status == HELD, run.output
    table = msgspec.json.decode((tmp_path / "capabilities.json").read_bytes(), type=Capabilities)
    here = {of.name: of for of in table.rows}
    assert {"triton", "pytorch", "sdpa-math", "emulation"} <= set(here)
    assert {"sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "flex"} <= set(table.not_runnable)
    assert set(here).isdisjoint(table.not_runnable)
    for name, of in here.items():
        assert (of.status, of.cells["out"].state) == (HELD, "held")
        assert len(records.read(tmp_path / name / "records.jsonl")) == 20
    assert here["pytorch"].paths == ["cpu"] and here["triton"].paths == ["interpreter"]
    assert here["sdpa-math"].cells["lse"].state == "not claimed"
    assert "  flex: needs a GPU" in run.output
    assert "| out | held 20 | held 20 |" in (tmp_path / "capabilities.md").read_text()


def test_what_one_claims_is_no_option_for_all(tmp_path: Path) -> None:
    run = suite(tmp_path, "--impl", "all", "--manifest", "mine.toml")
    assert run.status == WRONG_USE
    assert run.output.startswith("ERROR: --impl is 'all' and --manifest is given")


@pytest.mark.parametrize(
    ("source", "files"),
    [
        (pytest.Config.ArgsSource.ARGS, []),
        (pytest.Config.ArgsSource.TESTPATHS, ["tests/test_references.py", "tests/test_laws.py"]),
    ],
)
def test_without_files_those_about_implementations_run(
    source: Any, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(all_implementations, "main", lambda *given: given)
    given = SimpleNamespace(
        option=SimpleNamespace(manifest=None, require_gpu=False),
        args_source=source,
        invocation_params=SimpleNamespace(args=("--impl", "all")),
    )
    found: Any = all_implementations.of_command_line(given)  # type: ignore[arg-type]
    assert found == (["--impl", "all", *files], False)


def test_a_package_that_is_not_installed_is_wrong_use(tmp_path: Path) -> None:
    if not backends.available("flash-attn").endswith("not installed"):
        pytest.skip("flash_attn is installed")
    run = suite(tmp_path, "--impl", "flash-attn")
    assert run.status == WRONG_USE, run.output
    assert "--impl is 'flash-attn', which needs the package flash_attn, which is not installed" in run.output
    assert all_implementations.why_not("flash-attn") == backends.available("flash-attn")
