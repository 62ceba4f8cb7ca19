"""Baselines: files of measurements that are committed, and what has changed against them.

Each kind of baseline (`errors`, `resources`, ...) has a module that measures and compares; here is what they
share: the name of a file says what it was measured of, its lines are one entry each, so that a change of one
number is a change of one line, and what cannot be compared is said to be missing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from .versioned import T, read

FOLDER = Path(__file__).parent / "baselines"
"""Those that are committed; --baseline-dir names another."""


@dataclass(frozen=True)
class Key:
    """What a baseline was measured of: nothing else is compared with it.

    Attributes:
        kind: of the measurement: "errors", "resources", ...
        implementation: its name.
        device: the GPU's name, the processor's, or what was compiled for.
        torch, triton: versions; torch is empty where it does not matter.
        path: the code that ran: "sm90", "sm80-override", "interpreter", ...; empty where it does not matter.
    """

    kind: str
    implementation: str
    device: str
    torch: str
    triton: str
    path: str = ""

    @property
    def name(self) -> str:
        """The name of the file."""
        versions = [f"{what}{version}" for what, version in (("torch", self.torch), ("triton", self.triton))
                    if version]  # fmt: skip
        words = [self.kind, self.implementation, self.device, *versions, self.path]
        return "-".join(_slug(word) for word in words if word) + ".json"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower().partition("+")[0]).strip("-")


@dataclass(frozen=True)
class Difference:
    """Something that is not as the baseline has it.

    Attributes:
        what: for a reader: of what, what it was, what it is.
        red: whether it breaks what the baseline guards; what has become better is not red.
    """

    what: str
    red: bool


def encode(of: msgspec.Struct) -> bytes:
    """A file: JSON, each entry of a mapping or list of the struct on a line of its own."""
    fields: dict[str, Any] = msgspec.to_builtins(of)
    lines = ["{"]
    for i, (name, value) in enumerate(fields.items()):
        end = "" if i == len(fields) - 1 else ","
        head = f" {_json(name)}: "
        if isinstance(value, (dict, list)) and value:
            if isinstance(value, dict):
                opened, closed = "{}"
                entries = [f"  {_json(key)}: {_json(entry)}" for key, entry in value.items()]
            else:
                opened, closed = "[]"
                entries = [f"  {_json(entry)}" for entry in value]
            lines += [head + opened, ",\n".join(entries), f" {closed}{end}"]
        else:
            lines.append(head + _json(value) + end)
    return ("\n".join([*lines, "}"]) + "\n").encode()


def _json(x: Any) -> str:
    return msgspec.json.encode(x).decode().replace('":', '": ').replace(',"', ', "')


def decode(path: Path, type: type[T], version: int) -> T:
    """What `encode` wrote.

    Raises:
        ReportError: if it is missing, truncated, of another version, or not a baseline of this kind.
    """
    return read(path, type, version, "baseline")


def command(words: Mapping[str, str | None]) -> str:
    """The options of a command line, those that are given."""
    return shlex.join(word for pair in words.items() for word in pair if word)
