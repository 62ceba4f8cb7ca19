"""A mutant: a small named change to the kernels or their launch code, and how it is planted."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("kernels", "reference", "tests", "reports")
FILES = ("conftest.py", "pyproject.toml")

Lane = Literal["cpu", "gpu", "sanitizer"]
LANES: tuple[Lane, ...] = ("cpu", "gpu", "sanitizer")


class DoesNotApply(ValueError):
    """A change whose text is not in the file as often as it should be: the mutant must be written anew."""


@dataclass(frozen=True)
class Change:
    """One replacement.

    Attributes:
        file: in kernels/.
        old, new: the text and what stands in its place.
        count: how often the text must be there; all are replaced.
    """

    file: str
    old: str
    new: str
    count: int = 1

    def applied(self, text: str) -> str:
        """The text with the change.

        Raises:
            DoesNotApply: if what it replaces is not there as often as it should be.
        """
        found = text.count(self.old)
        if found != self.count:
            raise DoesNotApply(f"kernels/{self.file} has {self.old!r} {found} times, not {self.count}")
        return text.replace(self.old, self.new)


FIRST_FUNCTION = {
    "forward.py": "@triton.jit\ndef attend(",
    "backward.py": "@triton.jit(do_not_specialize=STRIDES_AND_LENGTHS)\ndef attention_delta(",
}
"""Where a device function can be added to a file."""


def each_slice(file: str, name: str, makes: str, *parameters: str) -> Change:
    """Adds a device function `name(tiles, *parameters, DIM, WIDTH)` that makes each slice i of a tile anew.

    Args:
        makes: the new slice, an expression.
    """
    words = ", ".join(("tiles", *parameters, "DIM: tl.constexpr", "WIDTH: tl.constexpr"))
    function = (
        f"@triton.jit\ndef {name}({words}):\n"
        "    made = ()\n"
        "    for i in tl.static_range(n_slices(DIM, WIDTH)):\n"
        f"        made = made + ({makes},)\n"
        "    return made\n\n\n"
    )
    return Change(file, FIRST_FUNCTION[file], function + FIRST_FUNCTION[file])


@dataclass(frozen=True)
class Mutant:
    """A planted fault.

    Attributes:
        name: unique, in words, with hyphens.
        kind: the module of the catalogue that it stands in.
        does: what is wrong then, in one sentence.
        changes: the patch.
        witness: what proves that it is not equivalent: the id of a case, or of a test
            ("tests/test_x.py::test_y") where no case can show it; for the lane "sanitizer" one of the
            sanitizer's tools.
        report: its number in `field_bugs.md`, if somebody's kernel had the like of it.
        lane: where it shows: "cpu", through the interpreter; "gpu", only there; "sanitizer".
        tensors: where it must show, at least.
        equivalent: why no result can change, if that is so; such a mutant counts for nothing.
    """

    name: str
    kind: str
    does: str
    changes: tuple[Change, ...]
    witness: str = ""
    report: str = ""
    lane: Lane = "cpu"
    tensors: tuple[str, ...] = ()
    equivalent: str = ""

    @property
    def witnessed_by_test(self) -> bool:
        return "::" in self.witness


def plant(mutant: Mutant, folder: Path) -> None:
    """Copies the project into an empty folder, with the fault.

    Raises:
        DoesNotApply: if a change does not fit the kernels any more.
    """
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("out", "__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    for change in mutant.changes:
        source = folder / "kernels" / change.file
        source.write_text(change.applied(source.read_text()))
