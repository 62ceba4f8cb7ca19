"""The corpus: case ids in the repository that run first."""

from __future__ import annotations

from pathlib import Path

from .cases import Case, parse_case

PATH = Path(__file__).parent / "corpus.txt"


def read_corpus(path: Path = PATH) -> list[Case]:
    """The cases of a corpus file.

    Raises:
        ValueError: if a line is not a case id; says which.
    """
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.partition("#")[0].strip()
        if text:
            try:
                found.append(parse_case(text))
            except ValueError as error:
                raise ValueError(f"{path.name}, line {number}: {error}") from None
    return list(dict.fromkeys(found))
