"""Known failures: which comparisons and laws they are about, and what a run makes of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from reports import records
from reports.records import Record, Verdict
from tests.known_failures import STATUS, Known, KnownFailures, KnownFailuresError, accept, read
from tests.meta.test_command_line import Run
from tests.meta.test_isolation import case_of, cases
from tests.meta.test_isolation import suite as run_of
from tests.session import BROKE, HELD, NOTHING_EXECUTED, WRONG_USE, exit_status

OFF = Verdict("dk", "oracle", "rms z", False, 2.0, 1.0)
FAR = Verdict("dk", "oracle", "hard bound", False, 3.0, 1.0)
FINE = Verdict("out", "oracle", "rms z", True, 0.5, 1.0)
CRASHED = Verdict("out", "contract", "does not crash", False, note="killed")


def record(status: str, *verdicts: Verdict, **changes: str) -> Record:
    base = Record(
        case="b1_h1x1_s17", words="float16, batch 1", origin="edge", implementation="mine.py:f", path="sm80",
        status=status, dtype="float16", backward=True, verdicts=list(verdicts),
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def of_law(status: str, law: str = "permuted_keys", held: bool = False) -> Record:
    return record(status, Verdict("out", "law", law, held), origin="law")


RED = record("broken", OFF, FAR, FINE)
GREEN = record("held", FINE)


# ---------------------------------------------------------------- which


@pytest.mark.parametrize(
    ("known", "red", "covered"),
    [
        (Known("b1_h1x1_s17", "7"), RED, True),
        (Known("b1_*", "7"), RED, True),
        (Known("b2_*", "7"), RED, False),
        (Known("*", "7", ("dk: *",)), RED, True),
        (Known("*", "7", ("dk: rms z",)), RED, False),
        (Known("*", "7", ("dk: rms z", "d?: hard bound")), RED, True),
        (Known("*", "7", ("DK: *",)), RED, False),
        (Known("*", "7", implementation="mine.py:*"), RED, True),
        (Known("*", "7", implementation="yours.py:*"), RED, False),
        (Known("*", "7", path="sm80-override"), RED, False),
        (Known("*", "7", ("out: does not crash",)), record("broken", CRASHED), True),
        (Known("*", "7", ("permuted_keys",)), of_law("broken"), True),
        (Known("*", "7", ("out: permuted*",)), of_law("broken"), True),
        (Known("*", "7", ("permuted_heads",)), of_law("broken"), False),
        (Known("*", "7", ("permuted_keys",)), RED, False),
    ],
)
def test_a_red_record_is_known_if_all_that_is_broken_is(known: Known, red: Record, covered: bool) -> None:
    settled = KnownFailures((known,)).settled(red)
    assert settled == (msgspec.structs.replace(red, status=STATUS, reason="7") if covered else red)


def test_several_entries_may_cover_one_record() -> None:
    entries = Known("*", "7", ("dk: rms z",)), Known("*", "8", ("dk: hard*",)), Known("*", "9", ("dq: *",))
    settled = KnownFailures(entries).settled(RED)
    assert (settled.status, settled.reason) == (STATUS, "7; 8")


@pytest.mark.parametrize("fine", [GREEN, record("no power"), record("not claimed")])
def test_what_is_not_broken_stays_as_it_is(fine: Record) -> None:
    assert KnownFailures((Known("*", "7"),)).settled(fine) == fine


@pytest.mark.parametrize(
    ("known", "found", "unexpected", "unmet"),
    [
        pytest.param(Known("*", "7"), [GREEN], 1, 0, id="nothing-red"),
        pytest.param(Known("*", "7"), [GREEN, RED], 0, 0, id="one-red"),
        pytest.param(Known("*", "7", ("dk: rms z",)), [RED], 0, 0, id="red-by-more-than-is-known"),
        pytest.param(Known("*", "7", ("dq: rms z",)), [RED], 1, 0, id="red-by-something-else"),
        pytest.param(Known("*", "7", sometimes=True), [GREEN], 0, 0, id="sometimes"),
        pytest.param(Known("b2*", "7"), [GREEN], 0, 1, id="another-case"),
        pytest.param(Known("*", "7"), [record("not claimed")], 0, 1, id="not-claimed"),
        pytest.param(Known("*", "7"), [record("no power")], 0, 1, id="not-judged"),
        pytest.param(Known("*", "7", ("out: does not crash",)), [GREEN], 1, 0, id="crashes-no-more"),
        pytest.param(Known("*", "7", ("permuted_keys",)), [GREEN], 0, 1, id="a-law-that-did-not-run"),
        pytest.param(Known("*", "7", ("permuted_keys",)), [of_law("held", held=True)], 1, 0, id="a-law-held"),
        pytest.param(Known("*", "7", ("permuted_keys",)), [of_law("broken")], 0, 0, id="a-law-is-red"),
        pytest.param(Known("*", "7", ("dk: *",)), [of_law("held", held=True)], 0, 1, id="of-laws-no-tensor"),
        pytest.param(
            Known("*", "7", ("permuted_*",)), [of_law("held", "keys_twice", True)], 0, 1, id="other"
        ),
    ],
)
def test_an_entry_is_no_longer_true_if_it_was_tried_and_nothing_failed(
    known: Known, found: list[Record], unexpected: int, unmet: int
) -> None:
    entries = KnownFailures((known,))
    assert (len(entries.unexpected(found)), len(entries.unmet(found))) == (unexpected, unmet)


def test_the_exit_status_is_0_if_all_that_fails_is_known() -> None:
    known = record(STATUS, OFF)
    assert exit_status([known], False, False)[0] == HELD
    assert exit_status([known, GREEN], False, False)[0] == HELD
    assert exit_status([known], False, False, ["entry 1"])[0] == BROKE
    assert exit_status([known, RED], False, False) == (BROKE, "red comparisons: 1")
    assert exit_status([known, of_law("broken")], True, False) == (BROKE, "red laws: 1")
    assert exit_status([record("not claimed")], False, False)[0] == NOTHING_EXECUTED


# ---------------------------------------------------------------- the file

WHOLE = """
[[known]]
case = "b1_*"
reason = "#7"
property = ["dk: *", "permuted_keys"]
implementation = "mine.py:*"
path = "sm80-override"
sometimes = true

[[known]] # another
reason = "#8"
case = 'b2_\\*'
property = "out: *"
"""


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    path.write_text(WHOLE)
    first, second = read(path).entries
    assert first == Known(
        "b1_*", "#7", ("dk: *", "permuted_keys"), "mine.py:*", "sm80-override", True, "entry 1 (line 2)"
    )
    assert second == Known("b2_\\*", "#8", ("out: *",), where="entry 2 (line 10)")
    path.write_text("# nothing yet\n")
    assert read(path).entries == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[known]]\nreason = "7"', "entry 1 (line 1): case is missing; it must be the id of a case"),
        ('[[known]]\ncase = "*"', "entry 1 (line 1): reason is missing; it must be a link or the number"),
        ('[[known]]\ncase = "*"\nreason = ""', "entry 1 (line 3): reason is ''; it must be a link"),
        ('[[known]]\ncase = "*"\nreason = " "', "entry 1 (line 3): reason is ' '; it must be a link"),
        ('[[known]]\ncase = "*"\nreason = 7', "entry 1 (line 3): reason is 7; it must be a link"),
        ('[[known]]\ncase = ["*"]\nreason = "7"', "entry 1 (line 2): case is ['*']; it must be the id"),
        (
            '[[known]]\ncase = "*"\nreason = "7"\npath = 80',
            "(line 4): path is 80; it must be a pattern of code",
        ),
        (
            '[[known]]\ncase = "*"\nreason = "7"\nproperty = []',
            "(line 4): property is []; it must be a pattern",
        ),
        ('[[known]]\ncase = "*"\nreason = "7"\nproperty = [1]', "(line 4): property is [1]; it must be a"),
        (
            '[[known]]\ncase = "*"\nreason = "7"\nsometimes = 1',
            "(line 4): sometimes is 1; it must be true or",
        ),
        (WHOLE + 'test = "a"', "entry 2 (line 14): there is a key 'test'; it may be case, reason, property,"),
        ('[known]\ncase = "*"', "known is {'case': '*'}; it must be tables [[known]]"),
        ('case = "*"', "there is a key 'case'; it may have tables [[known]] only"),
        ("[[known]\n", "not TOML: "),
    ],
)
def test_a_wrong_file_is_refused_with_the_entry_and_the_key(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    path.write_text(text)
    with pytest.raises(KnownFailuresError) as refused:
        read(path)
    assert str(refused.value).startswith(str(path))
    assert says in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KnownFailuresError, match="No such file"):
        read(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(KnownFailuresError, match="not TOML"):
        read(tmp_path / "latin.toml")


ODD = 'a"b\\c\n\t\x7f[0]*é.py:f'


def test_accepted_entries_need_a_reason_and_then_cover_what_was_red(tmp_path: Path) -> None:
    path = tmp_path / "new" / "known.toml"
    red = [RED, of_law("broken"), record("broken", CRASHED, implementation=ODD, words="two\nlines"), GREEN]
    assert accept(path, KnownFailures(), red) == 2
    with pytest.raises(KnownFailuresError, match=r"entry 1 \(line 11\): reason is ''"):
        read(path)
    tables = tomllib.loads(path.read_text())["known"]
    assert tables[0]["property"] == ["dk: rms z", "dk: hard bound", "permuted_keys"]
    path.write_text(path.read_text().replace('reason = ""', 'reason = "#7"'))
    known = read(path)
    assert [known.settled(r).status for r in red] == [STATUS, STATUS, STATUS, "held"]
    other = record("broken", CRASHED, implementation=ODD.replace("[0]", "0"))
    assert known.settled(other).status == "broken"


def test_accepting_adds_only_what_is_not_known_and_leaves_the_rest_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    before = '# mine\n[[known]]\ncase = "*"\nproperty = "dk: rms z"\nreason = "#7" # see there'
    path.write_text(before)
    known = read(path)
    assert accept(path, known, [known.settled(RED), known.settled(record("broken", OFF)), GREEN]) == 1
    assert path.read_text().startswith(before + "\n\n# float16, batch 1\n[[known]]\n")
    assert tomllib.loads(path.read_text())["known"][1]["property"] == ["dk: hard bound"]
    accepted = path.read_text()
    assert accept(path, known, [GREEN]) == 0
    assert path.read_text() == accepted


def test_an_entry_without_its_reason_is_accepted_once_and_makes_nothing_known(tmp_path: Path) -> None:
    """Both paths of a GPU accept into one file."""
    path = tmp_path / "known.toml"
    accept(path, KnownFailures(), [RED])
    known = read(path, complete=False)
    assert known.settled(RED) == RED
    assert known.unexpected([GREEN]) == []
    assert accept(path, known, [RED]) == 0
    assert accept(path, known, [RED, msgspec.structs.replace(RED, path="sm80-override")]) == 1


# ---------------------------------------------------------------- runs

TEST = "tests/test_references.py"


def suite(reports: Path, known: Path, *options: str, function: str = "off_from_17_on") -> Run:
    return run_of(reports, function, "--known-failures", str(known), *options)


def test_accepted_completed_and_known(tmp_path: Path) -> None:
    """The life of a known failure: accepted, refused without a reason, known, and fixed."""
    known = tmp_path / "known.toml"
    options = [TEST, "-n", "0", *cases(16, 17)]
    run = suite(tmp_path / "1", known, *options, "--accept")
    assert run.status == BROKE, run.output
    assert run.line("known failures: ").endswith("known.toml: 1 entries added; write the reason of each")
    assert run.line("result: ") == "red comparisons: 1"

    run = suite(tmp_path / "2", known, *options)
    assert run.status == WRONG_USE, run.output
    assert "entry 1 (line " in run.output
    assert "reason is ''; it must be a link" in run.output
    assert len(run.output.strip().splitlines()) == 1

    known.write_text(known.read_text().replace('reason = ""', 'reason = "issue 7"'))
    run = suite(tmp_path / "3", known, *options)
    assert run.status == HELD, run.output
    assert re.search(r"\b1 passed, .*\b1 known failure\b", run.output.splitlines()[-1])
    assert run.line("known failures: ") == "1, by reason: issue 7 (1)"
    assert run.line("comparisons executed: ") == "2, of which with a backward: 0"
    assert run.line("red: ") == "0"
    found = {r.case: (r.status, r.reason) for r in records.read(tmp_path / "3" / "records.jsonl")}
    assert found == {case_of(16): ("held", ""), case_of(17): (STATUS, "issue 7")}
    assert not (tmp_path / "3" / "red-cases.txt").exists()

    known.write_text(known.read_text().replace("off_from_17_on", "*").replace(case_of(17), case_of(16)))
    known.write_text(known.read_text() + '[[known]]\ncase = "b9_*"\nreason = "issue 9"\n')
    run = suite(tmp_path / "4", known, *options)
    assert run.status == BROKE, run.output
    assert run.line("known failure that does not fail: ").startswith(f"entry 1 (line 2): case {case_of(16)}")
    assert re.search(
        r"known failure of which nothing ran: entry 2 \(line \d+\): case b9_\*$", run.output, re.M
    )
    assert run.line("result: ") == "red comparisons: 1, known failures that do not fail: 1"


def test_a_crash_may_be_known(tmp_path: Path) -> None:
    known = tmp_path / "known.toml"
    known.write_text('[[known]]\ncase = "*"\nreason = "issue 7"\nproperty = "out: does not crash"\n')
    run = suite(tmp_path / "out", known, TEST, *cases(16, 17), function="attention")
    assert run.status == HELD, run.output
    assert re.search(r"\b1 passed, .*\b1 known failure\b", run.output.splitlines()[-1])
    assert run.line("known failures: ") == "1, by reason: issue 7 (1)"


def test_of_generated_cases_and_laws_the_rest_goes_on(tmp_path: Path) -> None:
    known = tmp_path / "known.toml"
    known.write_text('[[known]]\ncase = "*"\nreason = "issue 7"\n')
    options = [TEST, "tests/test_laws.py", "-n", "0", "--examples", "20"]
    run = suite(tmp_path / "out", known, *options, "-k", "generated and (permuted_keys or references)")
    assert run.status == HELD, run.output
    found = [r for r in records.read(tmp_path / "out" / "records.jsonl") if r.origin == "generated"]
    assert len(found) == 20
    assert 1 < sum(r.status == STATUS for r in found) < 20


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--accept"], "--accept is given without --known-failures; it must say into which file"),
        (["--known-failures", "none.toml"], "--known-failures: none.toml: No such file or directory"),
    ],
    ids=["accept-alone", "no-file"],
)
def test_a_wrong_use_is_refused(options: list[str], says: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, "attention", *options)
    assert run.status == WRONG_USE
    assert run.output.strip() == f"Exit: {says}"
