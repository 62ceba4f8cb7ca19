"""A sample of the planted faults gets the right diagnosis; `python -m tests.mutants.diagnoses` has all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import diagnoses, matrix
from tests.mutants.catalogue import by_name
from tests.mutants.diagnoses import Seen, Told, able
from tests.mutants.expected import EXPECTED
from tests.session import interpreted

SAMPLE = (
    "no-length-mask-in-the-last-key-tile",
    "last-tile-of-rows-not-launched",
    "causal-mask-missing-in-the-forward",
    "delta-of-the-first-sequence",
    "dq-written-with-the-strides-of-q",
    "sum-not-rescaled",
    "dk-accumulated-in-float16",
    "lse-in-base-2",
    "dk-without-scale",
    "group-overwritten-instead-of-summed",
)
"""One of each pattern, of five seconds each."""


@pytest.mark.skipif(not interpreted(), reason="planted through the interpreter")
@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_fault_is_diagnosed(name: str) -> None:
    told = diagnoses.diagnosed(by_name(name), matrix.killers())
    assert told.right, (told.expected, told.said, told.trouble)
    assert not any("no diagnosis" in sentence for sentence in told.said)
    assert not told.misleading
    assert all(seen.red for seen in told.seen)


def test_what_is_expected_is_of_mutants_that_a_case_shows() -> None:
    assert set(EXPECTED) <= {mutant.name for mutant in able()}


def test_the_committed_table_has_every_mutant() -> None:
    text = diagnoses.OUT.read_text()
    assert not [mutant.name for mutant in able() if f"| {mutant.name}: " not in text]


def test_the_table_counts_what_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, missed, none = "dk-without-scale", "lse-in-base-2", "mask-by-multiplication"
    said = [f"certain: dk is off by a constant factor of 4: {EXPECTED[right]} | that is all"]
    all_told = [Told(right, [Seen("b1", True, said, 0.1)]), Told(missed, [], "exit status 1"), Told(none, [])]
    text = diagnoses.markdown(all_told)
    assert "2 of 3 faults have a pattern with a name; of these 1 are diagnosed (50 %)" in text
    assert "1 / scale \\| that is all |" in text and "| exit status 1 |" in text
    with pytest.raises(SystemExit, match="2"):
        diagnoses.main(["no-such-mutant"])
    assert "no mutant that a case shows" in capsys.readouterr().err
