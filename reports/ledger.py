"""The ledger of campaigns: how many comparisons were made in all, where, and what was red.

A campaign is an entry of `baselines/ledger.json`, a list that a person reads. An exception in it says what
it was in the field `told`, which is written by hand once somebody has looked into it.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
LEDGER = ROOT / "reports" / "baselines" / "ledger.json"

VERSION = 1
"""Of the format. Raised whenever a field changes its meaning or goes."""

CODE = ("kernels", "reference", "tests")
"""Folders whose Python files decide what a campaign finds."""


class LedgerError(Exception):
    """A ledger or an entry that cannot be used; says which and why."""


class Count(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Comparisons of an implementation on a path in a dtype; those without power are not among them."""

    implementation: str
    path: str
    dtype: str
    comparisons: int
    no_power: int = 0


class Exceptional(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A comparison that was red.

    Attributes:
        case, implementation, path: which.
        reason: the rules that broke, by tensor, or what was raised.
        told: what it was: a model mistaken, or a real finding. Empty until somebody has looked into it.
        count: how many were red in this way; `case` is the first.
    """

    case: str
    implementation: str
    path: str
    reason: str
    told: str = ""
    count: int = 1


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cases for which a backend has no kernel, though it is said to have one: not comparisons."""

    implementation: str
    cases: int
    example: str


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A campaign.

    Attributes:
        version: of the format.
        date: of its end, UTC.
        machine, driver, torch, triton: where it ran; no driver on a CPU.
        code: digest of the suite's Python files, `code_digest`.
        seed, seeds: its cases, and the set that the seed is from ("calibration", "verification").
        complete: whether all the cases asked for were compared; otherwise the time ended it.
        seconds, workers: that it took, and how many processes it had.
        cases: that were compared, each with several implementations.
        comparisons: of each implementation.
        red, refused: what did not go as claimed.
        elements, no_power: of all tensors, and how many of them could not be judged.
        closest: by statistic, the largest share of its limit that was used by what was not red.
    """

    version: int = VERSION
    date: str
    machine: str
    driver: str
    torch: str
    triton: str
    code: str
    seed: int
    seeds: str
    complete: bool
    seconds: float
    workers: int
    cases: int
    comparisons: list[Count]
    red: list[Exceptional]
    refused: list[Refusal]
    elements: int
    no_power: int
    closest: dict[str, float]

    @property
    def key(self) -> tuple[str, ...]:
        """What a campaign is known by: run again, it would make the same comparisons."""
        return str(self.seed), self.code, self.machine, self.torch, self.triton

    @property
    def total(self) -> int:
        return sum(count.comparisons for count in self.comparisons)


class _Version(msgspec.Struct):
    version: int


def code_digest(root: Path = ROOT) -> str:
    """Of the files that decide what a campaign finds; the same whatever else the checkout holds."""
    digest = hashlib.sha256()
    for folder in CODE:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def read_entry(path: Path) -> Entry:
    """The entry that a file holds.

    Raises:
        LedgerError: if it is missing, truncated, of another version or not an entry.
    """
    return _decoded(path, Entry)


def read(path: Path = LEDGER) -> list[Entry]:
    """All entries of a ledger; none if there is no such file yet.

    Raises:
        LedgerError: if it is truncated, of another version or not a ledger.
    """
    return _decoded(path, list[Entry]) if path.exists() else []


def _decoded(path: Path, kind: Any) -> Any:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise LedgerError(f"{path}: {error.strerror}") from None
    try:
        versions = msgspec.json.decode(text, type=_Version if kind is Entry else list[_Version])
        for found in versions if isinstance(versions, list) else [versions]:
            if found.version != VERSION:
                raise LedgerError(f"{path}: of version {found.version}; this reads version {VERSION}")
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what = "an entry" if kind is Entry else "a ledger"
        raise LedgerError(f"{path}: not {what}, or not all of one ({error})") from None


def encoded(entries: Entry | list[Entry]) -> bytes:
    """As a file holds it, for a reader too."""
    return msgspec.json.format(msgspec.json.encode(entries), indent=1) + b"\n"


def add(entry: Entry, path: Path = LEDGER) -> None:
    """Adds a campaign to a ledger, which a crash leaves as it was.

    Raises:
        LedgerError: if it has no comparisons, or is in it already: nothing is counted twice.
    """
    entries = read(path)
    if not entry.total:
        raise LedgerError(f"the campaign of seed {entry.seed} made no comparison")
    refuse_double(entry.key, entries, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f"{path.name}.{os.getpid()}")
    whole.write_bytes(encoded([*entries, msgspec.structs.replace(entry, red=alike(entry.red))]))
    whole.replace(path)


def alike(red: list[Exceptional]) -> list[Exceptional]:
    """One of each implementation, path and reason, with the count of all."""
    found: dict[tuple[str, str, str], Exceptional] = {}
    for one in red:
        first = found.setdefault((one.implementation, one.path, one.reason), one)
        count = one.count if first is one else first.count + one.count
        found[one.implementation, one.path, one.reason] = msgspec.structs.replace(first, count=count)
    return list(found.values())


def refuse_double(key: tuple[str, ...], entries: list[Entry], path: Path = LEDGER) -> None:
    """
    Raises:
        LedgerError: if one of the entries is of this key.
    """
    for old in entries:
        if old.key == key:
            seed, code, machine, *_ = key
            raise LedgerError(
                f"{path}: has a campaign of seed {seed} by code {code} on {machine} already ({old.date});"
                " its comparisons would count twice. Take another seed"
            )


def totals(entries: list[Entry]) -> dict[tuple[str, str, str], int]:
    """Comparisons by machine, implementation and path."""
    found: Counter[tuple[str, str, str]] = Counter()
    for entry in entries:
        for count in entry.comparisons:
            found[entry.machine, count.implementation, count.path] += count.comparisons
    return dict(sorted(found.items()))
