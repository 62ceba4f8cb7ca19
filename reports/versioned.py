"""JSON files of a version: read, or refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from .errors import ReportError

T = TypeVar("T", bound=msgspec.Struct)


class _Version(msgspec.Struct):
    version: int


def read(path: Path, type: type[T], version: int, what: str) -> T:
    """The struct that a file holds.

    Args:
        path: the file.
        type: of the struct; it has a field `version`.
        version: the only one that can be read.
        what: such a file is called.

    Raises:
        ReportError: if it is missing, truncated, of another version, or no such file.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from None
    try:
        found = msgspec.json.decode(data, type=_Version).version
        if found != version:
            raise ReportError(f"{path}: a {what} of version {found}; this reads version {version}")
        return msgspec.json.decode(data, type=type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: not a {what} that can be read ({error})") from None
