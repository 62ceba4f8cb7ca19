"""What a run writes besides its records: its page, what it came to, and what JUnit tells of each test."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from reports import records
from reports.folder import Folder
from reports.junit import properties
from reports.outcomes import read
from reports.records import Record, Verdict
from reports.run import RunFile
from reports.summary import Summary
from reports.written import PageFile
from tests.cases import Case
from tests.comparison import compare
from tests.meta.plain import CPU, spoiled
from tests.meta.test_command_line import HELD_CASE, MINE, suite
from tests.session import BROKE, HELD


def test_each_run_has_a_page_that_tells_what_has_changed_since_the_run_before(tmp_path: Path) -> None:
    mine, reports, junit = tmp_path / "mine.py", tmp_path / "reports", tmp_path / "junit.xml"
    wrong = MINE.replace("    s = scale", "    q = 1.01 * q\n    s = scale")
    for text, status in ((MINE, HELD), (wrong, BROKE)):
        mine.write_text(text)
        options = ["--impl", f"{mine}:attention", "--case", HELD_CASE, f"--junitxml={junit}"]
        run = suite(reports, *options)
        assert run.status == status, run.output
        assert Path(run.line("page: ")).resolve() == (reports / "report.html").resolve()
    page = (reports / "report.html").read_text()
    assert "<strong>Newly broken: 1</strong>" in page and "<svg" in page
    found = records.read(reports / "records.jsonl")
    (red,) = (record for record in found if record.status == "broken")
    assert red.maps and red.case in page
    now, then = read(reports / "report.json"), read(reports / "previous-report.json")
    assert [one.status for one in then.outcomes] == ["held"]
    assert now.run is not None and now.run.status == BROKE and now.run.arguments[-1] == f"--junitxml={junit}"
    assert {one.case for one in now.outcomes} == {record.case for record in found}

    (tested,) = ElementTree.parse(junit).iter("testcase")
    told = {p.attrib["name"]: p.attrib["value"] for p in tested.iter("property")}
    assert told["case"] == red.case
    assert float(told["largest_z"]) == pytest.approx(
        max(t.max_z or 0 for t in red.tensors.values()), rel=1e-4
    )
    assert float(told["budget_use"]) == pytest.approx(red.tensors["out"].budget_use, rel=1e-4)


@pytest.fixture(scope="module")
def held() -> Record:
    return compare(Case(), spoiled(lambda x: None), CPU, hostile=False)


def test_junit_tells_of_the_red_comparison_or_else_of_the_largest_z(held: Record) -> None:
    assert properties([]) == []
    other = compare(Case(seed=1), spoiled(lambda x: None), CPU, hostile=False)
    found = sorted([held, other], key=lambda record: max(t.max_z or 0 for t in record.tensors.values()))
    assert properties(found)[0] == ("case", found[1].case)
    nan = Verdict("out", "oracle", "finite where it should be", False, 1.0, 0.0)
    red = msgspec.structs.replace(found[0], status="broken", verdicts=[nan])
    assert properties([red, found[1]]) == [("case", red.case), ("largest_z", "inf"), ("budget_use", "inf")]
    skipped = msgspec.structs.replace(held, status="not claimed", tensors={})
    assert properties([skipped]) == [("case", held.case)]


def ended(folder: Path, config: pytest.Config, found: list[Record]) -> tuple[PageFile, Any]:
    """The plugin after a run that came to its end."""
    summary, session = Summary(config, Folder(folder), {}), SimpleNamespace(exitstatus=HELD)
    summary.found, summary.reason = found, "every claim that could run here held"
    page = PageFile(config, summary.folder, summary, RunFile(config, summary.folder))
    page.pytest_sessionstart()
    steps: Any = page.pytest_sessionfinish(session)  # type: ignore[arg-type]
    next(steps)
    with pytest.raises(StopIteration):
        next(steps)
    return page, session


def test_trouble_with_the_page_is_told_and_changes_no_status(
    held: Record, tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.html").write_text("of an earlier run")
    monkeypatch.setattr("reports.written.render", lambda *_: 1 / 0)
    page, session = ended(tmp_path, pytestconfig, [held])
    assert (session.exitstatus, page.written) == (HELD, False)
    assert page.trouble == ["ZeroDivisionError: division by zero"]
    assert not (tmp_path / "report.html").exists()


def test_an_earlier_run_that_cannot_be_read_is_told_and_the_page_is_written(
    held: Record, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    (tmp_path / "report.json").write_text("{")
    page, _ = ended(tmp_path, pytestconfig, [held])
    assert page.written
    (trouble,) = page.trouble
    assert trouble.startswith(f"{tmp_path}/previous-report.json: not a report")
    assert trouble.endswith("; nothing is compared with it")


def test_of_a_run_without_comparisons_there_is_no_page(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    (tmp_path / "report.html").write_text("of an earlier run")
    page, _ = ended(tmp_path, pytestconfig, [])
    assert not page.written and not list(tmp_path.iterdir())


def test_junit_has_what_is_not_claimed_as_skipped(tmp_path: Path) -> None:
    claimed = Case(grad="none", dtype="float32")
    cases = [claimed, replace(claimed, len_k=3)]
    words = [word for case in cases for word in ("--case", case.id)]
    file = tmp_path / "junit.xml"
    bad = "tests/meta/bad_attention.py:right"
    run = suite(tmp_path, "--impl", bad, *words, f"--junitxml={file}", CUDA_VISIBLE_DEVICES="")
    assert "1 passed, 1 not claimed" in run.output.splitlines()[-1]
    suite_of_tests = ElementTree.parse(file).getroot()[0]
    assert (suite_of_tests.get("tests"), suite_of_tests.get("skipped")) == ("2", "1")
    (skipped,) = suite_of_tests.iter("skipped")
    assert skipped.get("message") == "not claimed"
