"""Failures that are known: a file of them, what they are about, and which of them no longer fail.

    [[known]]
    case = "b1_h*_bfloat16_*"               # an id, or a pattern of ids
    reason = "https://example.org/issues/7" # a link or a number
    property = "dk: rms z*"                 # optional: "tensor: rule" or a law's name; one, or a list
    implementation = "my/kernel.py:*"       # optional
    path = "sm80-override"                  # optional
    sometimes = true                        # optional: it need not fail in each run

Patterns are those of a shell: `*`, `?`, `[abc]`. Several entries may be about one case.
"""

from __future__ import annotations

import glob
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from reports.records import Record, Verdict

STATUS = "known failure"
"""Of a record whose every broken verdict is known."""

LAW = "law"
"""The origin of a record that is about a law, and the reference of its verdicts."""

RAN = ("held", "broken", STATUS)


class KnownFailuresError(Exception):
    """A file that cannot be used: the key, what it was, what it may be, in which entry."""


@dataclass(frozen=True)
class Known:
    """One entry.

    Attributes:
        case, implementation, path: patterns.
        reason: empty only while somebody has to write it: until then nothing is known by the entry.
        properties: patterns of "tensor: rule" or of laws' names; none: any.
        sometimes: whether it is no news if nothing that ran failed.
        where: which entry of the file it is, in words.
    """

    case: str
    reason: str
    properties: tuple[str, ...] = ()
    implementation: str = "*"
    path: str = "*"
    sometimes: bool = False
    where: str = ""

    def about(self, record: Record) -> bool:
        """Whether it names a record's case, implementation and path."""
        return (
            fnmatchcase(record.case, self.case)
            and fnmatchcase(record.implementation, self.implementation)
            and fnmatchcase(record.path, self.path)
        )

    def names(self, verdict: Verdict) -> bool:
        """Whether it is about a verdict, of a record that it is about."""
        words = [f"{verdict.tensor}: {verdict.rule}"]
        if verdict.reference == LAW:
            words.append(verdict.rule)
        return not self.properties or any(fnmatchcase(w, p) for w in words for p in self.properties)

    def fails(self, record: Record) -> bool:
        """Whether it is needed: a record that it is about has a broken verdict that it names."""
        return self.about(record) and any(self.names(v) for v in record.verdicts if not v.held)

    def tried(self, record: Record) -> bool:
        """Whether a record could have shown it.

        A comparison shows all but laws; of laws each shows itself, and whether the implementation gives
        results at all.
        """
        if record.status not in RAN or not self.about(record):
            return False
        if self.fails(record):
            return True
        if record.origin == LAW:
            shows = [*record.verdicts, *(Verdict("out", "contract", rule, True) for rule in NO_RESULT)]
            return bool(self.properties) and any(map(self.names, shows))
        return not self.properties or any(not _names_a_law(p) for p in self.properties)

    def __str__(self) -> str:
        named = ", ".join(self.properties)
        said = {
            "case": self.case,
            "property": named,
            "implementation": self.implementation,
            "path": self.path,
        }
        return f"{self.where}: " + ", ".join(f"{k} {v}" for k, v in said.items() if v not in ("", "*"))


NO_RESULT = ("does not raise", "does not crash", "does not hang", "leaves the GPU usable")
"""Rules about calls that come to no result."""


@dataclass(frozen=True)
class KnownFailures:
    """All entries of a file; none without one."""

    entries: tuple[Known, ...] = ()
    file: str = ""

    def settled(self, record: Record) -> Record:
        """A record that is broken, as a known failure if entries name all of what is; any other as it is."""
        if record.status != "broken":
            return record
        about = [known for known in self.entries if known.reason and known.about(record)]
        wrong = [verdict for verdict in record.verdicts if not verdict.held]
        if not wrong or not all(any(known.names(v) for known in about) for v in wrong):
            return record
        reasons = dict.fromkeys(k.reason for k in about if any(k.names(v) for v in wrong))
        return msgspec.structs.replace(record, status=STATUS, reason="; ".join(reasons))

    def mentions(self, record: Record) -> bool:
        """Whether an entry needs to know that something ran."""
        return any(known.tried(record) for known in self.entries)

    def unexpected(self, found: Sequence[Record]) -> list[str]:
        """Entries of which something ran and nothing failed, in words."""
        said = []
        for known in self.entries:
            tried = [record for record in found if known.tried(record)]
            if tried and known.reason and not known.sometimes and not any(map(known.fails, tried)):
                what = "law" if all(record.origin == LAW for record in tried) else "comparison"
                said.append(f"{known}: no {what} of the {len(tried)} that ran is red")
        return said

    def unmet(self, found: Sequence[Record]) -> list[str]:
        """Entries of which nothing ran, in words."""
        return [str(known) for known in self.entries if not any(map(known.tried, found))]


def _names_a_law(pattern: str) -> bool:
    from .laws import LAWS

    return any(fnmatchcase(law, pattern) for law in LAWS) and not fnmatchcase("out: ", pattern)


# ---------------------------------------------------------------- reading


KEYS = ("case", "reason", "property", "implementation", "path", "sometimes")
HEADER = re.compile(r"\s*\[\[\s*known\s*\]\]")


def read(path: Path, complete: bool = True) -> KnownFailures:
    """The known failures of a file.

    Args:
        path: the file.
        complete: whether each entry must have its reason.

    Raises:
        KnownFailuresError: if it cannot be read, or says something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        given = tomllib.loads(text)
    except OSError as error:
        raise KnownFailuresError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KnownFailuresError(f"{path}: not TOML: {error}") from None
    for key in given:
        if key != "known":
            raise KnownFailuresError(f"{path}: there is a key {key!r}; it may have tables [[known]] only")
    tables = given.get("known", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise KnownFailuresError(f"{path}: known is {tables!r}; it must be tables [[known]]")
    lines = _lines(text, len(tables))
    entries = [_entry(path, n, t, lines[n - 1], complete) for n, t in enumerate(tables, 1)]
    return KnownFailures(tuple(entries), str(path))


def _lines(text: str, tables: int) -> list[dict[str, int]]:
    """On which line each table begins, by "", and its keys; nothing if that cannot be told."""
    found: list[dict[str, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if HEADER.match(line):
            found.append({"": number})
        elif found and (key := re.match(r"\s*(\w+)\s*=", line)):
            found[-1].setdefault(key[1], number)
    return found if len(found) == tables else [{}] * tables


def _entry(path: Path, number: int, table: dict[str, Any], lines: dict[str, int], complete: bool) -> Known:
    def where(key: str = "") -> str:
        line = lines.get(key, lines.get(""))
        return f"entry {number}" + (f" (line {line})" if line else "")

    def refuse(key: str, may: str) -> KnownFailuresError:
        was = repr(table[key]) if key in table else "missing"
        return KnownFailuresError(f"{path}, {where(key)}: {key} is {was}; {may}")

    for key in table:
        if key not in KEYS:
            raise KnownFailuresError(
                f"{path}, {where(key)}: there is a key {key!r}; it may be {', '.join(KEYS)}"
            )
    for key, what in {
        "case": "the id of a case, or a pattern of ids",
        "reason": "a link or the number of an issue, which somebody has to write",
        "implementation": "a pattern of --impl",
        "path": "a pattern of code paths",
    }.items():
        value = table.get(key)
        optional = key in ("implementation", "path")
        if (value is None and optional) or (value == "" and key == "reason" and not complete):
            continue
        if not isinstance(value, str) or not value.strip():
            raise refuse(key, f"it must be {what}")
    properties = table.get("property", ())
    properties = [properties] if isinstance(properties, str) else properties
    named = isinstance(properties, list) and properties and all(isinstance(p, str) and p for p in properties)
    if "property" in table and not named:
        raise refuse(
            "property", "it must be a pattern of 'tensor: rule' or of laws' names, or a list of them"
        )
    if not isinstance(table.get("sometimes", False), bool):
        raise refuse("sometimes", "it must be true or false")
    return Known(
        table["case"],
        table["reason"],
        tuple(properties),
        table.get("implementation", "*"),
        table.get("path", "*"),
        table.get("sometimes", False),
        where(),
    )


# ---------------------------------------------------------------- writing


@dataclass
class _Red:
    """What of a case is red."""

    record: Record
    properties: dict[str, None] = field(default_factory=dict)


def accept(path: Path, known: KnownFailures, found: Iterable[Record]) -> int:
    """Appends what was red to a file: entries without a reason, which a person writes.

    Args:
        path: the file; made if it is not there.
        known: what it says.
        found: the records of a run.

    Returns:
        How many entries were added.

    Raises:
        OSError: if the file cannot be written.
    """
    red: dict[tuple[str, str, str], _Red] = {}
    for record in found:
        if record.status != "broken":
            continue
        key = record.case, record.implementation, record.path
        of_case = red.setdefault(key, _Red(record))
        about = [entry for entry in known.entries if entry.about(record)]
        for verdict in record.verdicts:
            if not verdict.held and not any(entry.names(verdict) for entry in about):
                law = verdict.reference == LAW
                of_case.properties[verdict.rule if law else f"{verdict.tensor}: {verdict.rule}"] = None
    red = {key: of_case for key, of_case in red.items() if of_case.properties}
    if not red:
        return 0
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    text = "" if before.endswith("\n") or not before else "\n"
    for number, of_case in enumerate(red.values()):
        record = of_case.record
        text += "\n" if before or number else ""
        text += f"# {_comment(record.words)}\n[[known]]\ncase = {_string(glob.escape(record.case))}\n"
        text += f"implementation = {_string(glob.escape(record.implementation))}\n"
        text += f"path = {_string(glob.escape(record.path))}\n"
        named = "".join(f"    {_string(glob.escape(name))},\n" for name in of_case.properties)
        text += f'property = [\n{named}]\nreason = ""\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", errors="replace") as file:  # by a ?, which stands for any character
        file.write(text)
    return len(red)


ESCAPED = {"\\": "\\\\", '"': '\\"', "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def _string(text: str) -> str:
    """A TOML basic string."""
    return '"' + "".join(
        ESCAPED.get(c) or (f"\\u{ord(c):04X}" if ord(c) < 0x20 or ord(c) == 0x7F else c) for c in text
    ) + '"'  # fmt: skip


def _comment(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
