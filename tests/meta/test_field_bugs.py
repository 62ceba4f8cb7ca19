"""The table of faults seen in the field says what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.recipes import recipes

TABLE = Path(__file__).parent.parent / "field_bugs.md"

REPORTED = {
    "A": (1, 2, 4, 5, 7, 8, 10, 11, 13, 14),
    "B": (1, 2, 4, 5, 7, 8, 10, 11, 13),
    "C": (1, 2, 4, 5, 7, 8, 10, 11),
    "D": (1, 2, 4, 5, 7, 8),
    "E": (1, 2, 4, 5, 7),
    "F": (1, 2, 4, 5, 7, 8, 10),
    "G": (1, 2, 4, 5),
    "H": (1, 2, 4, 5, 7, 8, 10),
    "M": (1, 2, 4, 5, 7, 8, 10, 11),
}
"""The reports that the table was made from, by kind."""

NUMBERS = [f"{kind}{number}" for kind, numbers in REPORTED.items() for number in numbers]


def rows() -> dict[str, str]:
    """What stands in the last column, by number."""
    found = {}
    for line in TABLE.read_text().splitlines():
        if match := re.fullmatch(r"\| ([A-Z]\d+) \|[^|]+\|[^|]+\| ([^|]+) \|", line):
            assert match[1] not in found, f"{match[1]} is there twice"
            found[match[1]] = match[2]
    return found


def test_every_number_has_a_row_and_every_recipe_a_number() -> None:
    assert list(rows()) == NUMBERS
    named = {number for number, tests in rows().items() if tests.startswith("recipe")}
    assert set(recipes((32, 16))) == named


@pytest.mark.parametrize("number", NUMBERS)
def test_every_row_names_tests_that_are_there_and_carry_its_number(number: str) -> None:
    tests = rows()[number]
    named = re.findall(r"([\w/]+)\.py::(\w+)", tests)
    assert named or tests.startswith("recipe") or tests.startswith("waits for"), tests
    for file, name in named:
        source = (TABLE.parent / f"{file}.py").read_text()
        match = re.search(
            rf"^def {name}\(.*?^(?=def |@pytest|[A-Z_]+ =|# ---)", source + "\n# ---", re.S | re.M
        )
        assert match, f"{file}.py has no {name}"
        assert re.search(rf"\b{number}\b", match[0]), f"{name} does not carry {number}"


def test_recipes_are_of_the_kind_that_their_number_says() -> None:
    for tile in ((32, 16), (128, 128)):
        for number, cases in recipes(tile).items():
            assert cases, number
            assert all(case.ragged for case in cases) or number not in ("A14", "C1", "C2", "C4", "C5", "G2")
