"""The page of a run: what it says of a green run and a red one; that it is one file, safe, quick, small."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reports import __main__ as reports
from reports import records
from reports.coverage import Table, tables
from reports.errors import ReportError
from reports.outcomes import Outcome, Report, changes, outcome, read, report
from reports.page import DETAILED, FEW, PICTURES, render
from reports.records import Record, Verdict
from reports.repeats import NOT_AGAIN, always
from reports.run import LawTest, Run
from tests.cases import LAYOUTS, REGIMES, Case, parse_case
from tests.comparison import compare
from tests.meta.plain import CPU, spoiled

RUN = Run(
    implementation="mine.py:attention", machine="a machine", torch="2.0", triton="3.0", status=0,
    reason="every claim that could run here held", seconds=12.5, python="3.12", arguments=["-q"],
    ended="2026-01-02T03:04:05+00:00",
    claims={
        "dtypes": ["float16", "bfloat16", "float32"], "masks": ["full", "causal"], "backward": True,
        "lse": True,
    },
    laws=[LawTest("test_law[keys-permuted]", "failed"), LawTest("test_law[other]", "passed")],
)  # fmt: skip


@pytest.fixture(scope="module")
def held() -> Record:
    return compare(
        Case(dtype="float16", len_q=40, len_k=40), spoiled(lambda x: None), CPU, "edge", hostile=False
    )


@pytest.fixture(scope="module")
def broken() -> Record:
    """A row of out that is wrong, another that is NaN; in a case that ran three times."""
    case = Case(batch=2, heads_q=3, heads_kv=3, len_q=150, len_k=150, dim=32, dim_v=32, grad="none", seed=4)
    wrong = spoiled(lambda x: (x[1, 2, 129].mul_(2), x[0, 0, 3].fill_(float("nan"))))
    return compare(case, wrong, CPU, "recipe", hostile=True)


def many(n: int, *kinds: Record) -> list[Record]:
    """So many comparisons, each of a case of its own."""
    found = []
    for i in range(n):
        kind = kinds[i % len(kinds)]
        length = 1 + i % 90
        case = replace(
            parse_case(kind.case), seed=i, causal=bool(i % 2), len_q=length, len_k=length,
            values=list(REGIMES)[i % len(REGIMES)], layout=list(LAYOUTS)[i % len(LAYOUTS)],
        )  # fmt: skip
        found.append(
            msgspec.structs.replace(kind, case=case.id, words=case.words(), replay=f"--case {case.id}")
        )
    return found


def text(page: str) -> str:
    """What a reader reads, without figures."""
    page = re.sub(r"<(svg|style|script)\b.*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


# ---------------------------------------------------------------- what it says


def test_a_green_run_says_what_ran_what_held_and_what_was_covered(held: Record) -> None:
    not_claimed = msgspec.structs.replace(
        held, status="not claimed", reason="Sq != Sk", tensors={}, verdicts=[]
    )
    page = render([*many(FEW, held), not_claimed], RUN)
    for said in (
        "✓ Every claim that could run here held",
        "mine.py:attention",
        "a machine",
        "torch 2.0, Triton 3.0, Python 3.12",
        "2026-01-02 03:04:05 UTC, after 12.5 s",
        f"comparisons executed: {FEW}, of which with a backward: {FEW}",
        "not claimed, so not executed: 1; they would need Sq != Sk (1)",
        "tests of laws: 1 held, 1 red, 0 skipped",
        "red: test_law[keys-permuted]", f"✓ held {FEW}", "The rms of z stays below 1 at every length",
        "Rounding errors are narrower than the error model allows.", "Lengths, by where they end in a tile.",
        f"{FEW + 1} comparisons, worst first",
    ):  # fmt: skip
        assert said in text(page), said
    assert page.count("<svg") == 3
    assert "Failures" not in text(page)


def test_of_a_few_comparisons_there_are_no_figures(held: Record) -> None:
    page = render(many(FEW - 1, held), RUN)
    assert "<svg" not in page
    assert f"are made of {FEW} comparisons or more" in text(page)


def test_a_failure_says_what_where_how_bad_and_how_to_see_it_again(broken: Record) -> None:
    told = msgspec.structs.replace(broken, diagnosis=["certain: something"])
    page = render([told], msgspec.structs.replace(RUN, status=1, reason="red comparisons: 1"))
    worst = max((v for v in broken.verdicts if v.rule == "largest z"), key=lambda v: v.margin)
    for said in (
        "✗ 1 red comparison", "Failures (1)", broken.words, "certain: something", broken.replay,
        "always : each of 3 runs broke its hard bound", "Not shrunk: it is from a list (recipe)",
        "out of batch entry 0, head 0 is wrong in only query row 3, of 150.",
        "64 of 28,800 judged elements are beyond a limit; first at [0, 0, 3, 0]",
        "NaN and infinities in out of batch entry 0, head 0.",
        "NaN: 32",
        "largest z",
        str(list(worst.where or ())),
        "✗ broken 1 of 1",
    ):  # fmt: skip
        assert said in text(page), said
    assert page.count("<svg") == 2
    assert 'aria-label="Map of the error of out.' in page


def test_of_a_generated_case_it_says_that_it_was_shrunk_and_of_others_which_is_the_smallest(
    broken: Record,
) -> None:
    small = parse_case(broken.case)
    least = msgspec.structs.replace(
        broken, case=replace(small, len_q=33, len_k=33).id, origin="generated", maps=[]
    )
    page = text(render([broken, least], None))
    assert "Generated, and shrunk to the smallest case that fails." in page
    assert f"The smallest failing case of this run that breaks a rule of these: {least.case}" in page


def test_of_many_failures_some_are_shown_and_all_are_listed(broken: Record) -> None:
    count = FEW - 1
    found = many(count, broken)
    page = render(found, None)
    assert page.count("<article") == DETAILED
    assert f"{DETAILED} of {count} in full" in text(page)
    assert f"{count - DETAILED} further failures" in text(page)
    assert page.count("<svg") <= PICTURES + 1
    assert all(record.case in page for record in found)


def test_a_run_that_did_not_come_to_its_end_has_a_page(held: Record) -> None:
    assert "The run did not come to its end" in text(render([held], None))
    assert "Nothing was executed" in text(render([], msgspec.structs.replace(RUN, status=3)))


def test_a_result_that_never_came_has_no_numbers(broken: Record) -> None:
    raised = Verdict("out", "contract", "does not raise", False, note="RuntimeError: a\n  at mine.py:3")
    one = msgspec.structs.replace(
        broken, verdicts=[raised], tensors={}, maps=[], reason="raised RuntimeError: a"
    )
    assert "raised RuntimeError: a" in text(render([one], None))
    assert (outcome(one).largest_z, outcome(one).budget_use) == (None, None)


def test_red_laws_are_failures_but_no_comparisons(broken: Record) -> None:
    law = msgspec.structs.replace(broken, origin="law", maps=[])
    page = text(render([law], msgspec.structs.replace(RUN, status=1)))
    assert "✗ 1 red law" in page and "A law, not a comparison." in page and "0 comparisons" in page


# ---------------------------------------------------------------- always or sometimes


FURTHER = "the same amid infinities"


@pytest.mark.parametrize(
    ("verdicts", "changed", "expected"),
    [
        ([Verdict("out", "contract", FURTHER, True)], {}, ("always", "2 runs gave the same bits")),
        (
            [Verdict("dq", "contract", FURTHER, False)],
            {},
            ("sometimes", "runs of the same case differ: dq amid infinities"),
        ),
        (
            [
                Verdict("out", "oracle", "hard bound", False, 2, 1),
                Verdict("out", "oracle", f"{FURTHER}: hard bound", True, 0.5, 1),
            ],
            {},
            ("sometimes", "further runs of the same case were within the hard bound: amid infinities"),
        ),
        ([], {"reason": NOT_AGAIN + "out"}, ("sometimes", "the same case was not red when it ran again")),
        ([], {"origin": "generated"}, ("always", "it was red again when it was repeated")),
        ([], {"origin": "edge"}, ("once", "it ran once here: the replay line runs it three times")),
    ],
    ids=["same-bits", "other-bits", "within-the-bound-later", "not-again", "generated", "once"],
)  # fmt: skip
def test_whether_it_is_broken_always_follows_from_the_further_runs(
    verdicts: list[Verdict], changed: dict[str, Any], expected: tuple[str, str], broken: Record
) -> None:
    assert always(msgspec.structs.replace(broken, verdicts=verdicts, **changed)) == expected


# ---------------------------------------------------------------- safe, quick, small


EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;{{ 7 * 7 }}"


def test_nothing_that_a_file_says_becomes_part_of_the_page(held: Record, broken: Record) -> None:
    words = ("case", "words", "reason", "replay", "implementation", "path", "origin", "dtype", "status")
    red = msgspec.structs.replace(broken, **dict.fromkeys(words[:-3], EVIL), diagnosis=[EVIL])
    red = msgspec.structs.replace(red, verdicts=[Verdict(EVIL, EVIL, EVIL, False, 2, 1, note=EVIL)])
    other = msgspec.structs.replace(broken, **dict.fromkeys(words, EVIL), maps=[])
    run = msgspec.structs.replace(RUN, implementation=EVIL, machine=EVIL, reason=EVIL, arguments=[EVIL])
    run = msgspec.structs.replace(run, laws=[LawTest(EVIL, "failed")])
    earlier = Report(implementation=EVIL, run=None, outcomes=[Outcome(EVIL, EVIL, EVIL, EVIL, "held")])
    page = render([red, other, *many(FEW, held)], run, earlier, EVIL)
    assert page.count("<script") == 1
    assert "<img" not in page and "49" not in re.findall(r"amp;(\S+?)<", page)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "2 of these name no case that could be read" in text(page)


def test_the_page_needs_nothing_else_and_can_be_read_without_a_script(held: Record, broken: Record) -> None:
    page = render([broken, *many(FEW, held)], RUN)
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"|url\((?!#)[^)]*\)|@import', page)
    for needed in ('name="viewport"', "prefers-color-scheme: dark", '<html lang="en">'):
        assert needed in page
    assert len(re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[0]) < 4_000
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_3000_comparisons_take_at_most_10_seconds_and_5_megabytes(held: Record, broken: Record) -> None:
    found = [*many(2_950, held), *many(50, broken)]
    began = time.process_time()  # others may use the processor too
    page = render(found, RUN, report(found, RUN))
    assert time.process_time() - began < 10
    assert len(page.encode()) < 5e6
    assert all(page.count(record.case) for record in found)


# ---------------------------------------------------------------- what has changed


def outcomes(*statuses: str, path: str = "sm80", implementation: str = "mine") -> Report:
    found = [
        Outcome(f"case{n}", path, "edge", "float16", status) for n, status in enumerate(statuses) if status
    ]
    return Report(implementation=implementation, run=None, outcomes=found)


def test_what_is_newly_broken_and_what_is_mended_is_told() -> None:
    then = outcomes("held", "broken", "broken", "held", "known failure", "no power", "held", "")
    now = outcomes("broken", "held", "broken", "held", "broken", "broken", "", "broken")
    found = changes(now, then, "before")
    assert [one.case for one in found.broken] == ["case0", "case4"]
    assert [one.case for one in found.mended] == ["case1"]
    assert (found.red, found.shared, found.new, found.gone) == (1, 5, 2, 1)


@pytest.mark.parametrize(
    ("then", "why"),
    [
        (outcomes("held", implementation="theirs"), "it was of theirs, not of mine"),
        (outcomes("held", path="sm90"), "it ran as sm90, not as sm80"),
    ],
    ids=["implementation", "path"],
)
def test_what_is_not_the_same_is_not_compared(then: Report, why: str) -> None:
    found = changes(outcomes("broken"), then, "before")
    assert (found.incomparable, found.broken) == (why, ())


def test_the_page_tells_what_has_changed(held: Record, broken: Record) -> None:
    then = report(
        [msgspec.structs.replace(broken, status="held"), msgspec.structs.replace(held, status="broken")], None
    )
    page = text(render([held, broken], None, then))
    assert f"Newly broken: 1 {broken.case}" in page
    assert f"Mended: 1 {held.case}" in page


# ---------------------------------------------------------------- coverage


def holes(table: Table) -> list[tuple[str, str]]:
    return [
        (row, column)
        for row, cells in table.rows
        for column, n in zip(table.columns, cells, strict=True)
        if n == 0
    ]


def test_a_hole_in_the_coverage_shows(held: Record) -> None:
    cases = [Case(dtype=dtype, values=values) for values in REGIMES for dtype in ("float16", "float32")]
    found = [
        msgspec.structs.replace(held, case=c.id, dtype=c.dtype)
        for c in cases
        if (c.values, c.dtype) != ("mean", "float32")
    ]
    lengths, masks, values, memory = tables(found, RUN.claims | {"dtypes": ["float16", "float32"]})
    assert holes(values) == [("mean", "float32")]
    assert ("packed", "float16") not in holes(memory)  # it claims no strides
    assert ("causal, Sq = Sk", "1 head") in holes(masks)
    assert ("full, Sq = Sk", "1 head") not in holes(masks)
    assert ("below a tile", "below a tile") not in holes(lengths) and ("between", "between") in holes(lengths)
    assert all("Sq < Sk" not in row for row, _ in holes(masks))  # nor other lengths


ENDS = {
    0: "0", 1: "1", 17: "below a tile", 31: "1 less", 32: "whole tiles", 33: "1 more", 64: "whole tiles",
    80: "between",
}  # fmt: skip


@pytest.mark.parametrize(("n", "expected"), ENDS.items())
def test_lengths_are_told_apart_by_where_they_end_in_a_tile(n: int, expected: str, held: Record) -> None:
    record = msgspec.structs.replace(held, case=Case(len_q=n, len_k=n).id, tile=(32, 32))
    table = tables([record], {})[0]
    ((row, column),) = [
        (row, column)
        for row, cells in table.rows
        for column, count in zip(table.columns, cells, strict=True)
        if count
    ]
    assert row == column == expected


# ---------------------------------------------------------------- the command


@pytest.fixture
def folder(tmp_path: Path, broken: Record) -> Path:
    """Of a run."""
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(RUN))
    records.append(tmp_path / "records.jsonl", broken)
    return tmp_path


def test_a_page_is_made_from_the_files_of_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reports.main(["render", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert capsys.readouterr().out == f"page: {folder}/report.html\n"
    assert "Changes" not in text(page)
    assert (
        reports.main(["render", str(folder), "--out", str(folder / "other.html"), "--baseline", str(folder)])
        == 0
    )
    assert f"Compared with the run in {folder}" in text((folder / "other.html").read_text())


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("records.jsonl", b'{"version": 1', "records.jsonl, line 1: not a record"),
        ("records.jsonl", b'{"version": 9}', "records.jsonl, line 1: a record of version 9; this reads"),
        ("records.jsonl", b"\xff\xfe\x00", "records.jsonl, line 1: not a record"),
        ("run.json", b'{"implementation": 3}', "run.json: it does not say what a run was"),
        ("previous-report.json", b"[", "previous-report.json: not a report"),
        ("previous-report.json", b'{"version": 2}', "previous-report.json: a report of version 2; this"),
        ("previous-report.json", b'{"version": 1}', "previous-report.json: not a report"),
    ],
    ids=lambda x: x.decode(errors="replace") if isinstance(x, bytes) else None,
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_named(
    file: str, content: bytes, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / file).write_bytes(content)
    assert reports.main(["render", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"python -m reports render: {folder}/{message}")
    assert said.count("\n") == 1
    assert not (folder / "report.html").exists()


def test_a_folder_without_a_run_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, what in (
        (["render", str(tmp_path)], "it has no records.jsonl"),
        (["render", str(tmp_path / "none")], "no folder"),
        (["render", "--baseline", str(tmp_path / "none"), str(tmp_path)], "it has no records.jsonl"),
    ):
        assert reports.main(words) == 2
        assert what in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_wrong_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reports.main(["render", str(folder), "--out", str(folder / "none" / "page.html")]) == 2
    assert f"{folder}/none/page.html: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"z": b"nothing packed"}, {"z": b""}, {"nonfinite": b"x"}, {"cells": (3, 3)}, {"cells": (10**9,) * 2},
        {"step": (0, 1)}, {"shape": (1, 2)}, {"tensor": "<b>"}, {"worst": (1,)}, {"by_row": []},
        {"limit": 0.0},
    ],
    ids=str,
)  # fmt: skip
def test_a_map_that_is_none_is_named(
    change: dict[str, Any], folder: Path, broken: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    spoilt = msgspec.structs.replace(broken.maps[0], **change)
    (folder / "records.jsonl").write_bytes(records.encode(msgspec.structs.replace(broken, maps=[spoilt])))
    assert reports.main(["render", str(folder)]) == 2
    assert f"{folder}/records.jsonl: " in capsys.readouterr().err


def test_a_report_is_read_back(tmp_path: Path, held: Record, broken: Record) -> None:
    found = report([held, broken], RUN)
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(found))
    assert read(tmp_path / "report.json") == found
    assert [(one.status, one.largest_z) for one in found.outcomes] == [
        ("held", pytest.approx(max(t.max_z or 0 for t in held.tensors.values()), rel=1e-4)),
        ("broken", None),  # some of it is NaN
    ]
    with pytest.raises(ReportError, match="No such file"):
        read(tmp_path / "none.json")
