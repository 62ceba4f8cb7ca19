"""The folder that runs write into: parts that are one run's own while it lasts, whole files at its end.

Runs may share the folder, at the same time too. The processes of a run write into `unfinished-ID`, which is
locked as long as the run lives; at its end these parts become the files that everybody knows by name. The
last run to end has them, all of them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED = "unfinished-"


class Folder:
    """One run's use of a folder.

    Args:
        path: the folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.own = path / f"{UNFINISHED}{uuid.uuid4().hex[:12]}"
        self._lock: int | None = None

    def part(self, process: str) -> Path:
        """Where a process of this run writes its records."""
        return self.own / f"records-{process}.jsonl"

    def parts(self) -> list[Path]:
        """What the processes of this run wrote, by name."""
        return sorted(self.own.glob("records-*.jsonl"))

    def begin(self, names: Collection[str]) -> None:
        """Makes the part of this run, and removes what runs left that are dead.

        Args:
            names: files of earlier runs, which go too: what a run that dies leaves must not look like its
                own. Not while another run is under way, whose they may be.

        Raises:
            OSError: if the folder cannot be made or written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with _alone(self.path):
            alive = [other for other in self.path.glob(f"{UNFINISHED}*") if not _removed_if_dead(other)]
            self.own.mkdir()
            self._lock = _locked(self.own, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in () if alive else names:
                (self.path / name).unlink(missing_ok=True)

    def end(self, files: Mapping[str, bytes | None], read: Collection[Path]) -> None:
        """Puts the files of this run into the folder, each whole, and removes its parts.

        Args:
            files: by name; None removes that of an earlier run.
            read: the parts that are in the files; others stay, until the next run begins.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with _alone(self.path):
            for name, content in files.items():
                if content is None:
                    (self.path / name).unlink(missing_ok=True)
                    continue
                new = self.path / f".{name}.new"
                new.write_bytes(content)
                new.replace(self.path / name)
        for part in read:
            part.unlink(missing_ok=True)
        with suppress(OSError):  # it is not empty, or never was
            self.own.rmdir()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked(path: Path, how: int) -> int | None:
    """An open descriptor of a folder that holds its lock; None if it cannot be had.

    The system gives a lock back when its process dies, however it does.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
    except OSError:  # another process has it, or the file system knows no locks
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lets one process at a time change what runs share; where there are no locks, all."""
    descriptor = _locked(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _removed_if_dead(part: Path) -> bool:
    """Removes the part of a run unless that lives, which its lock tells."""
    try:
        descriptor = _locked(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:  # its run has just ended
        return True
    if descriptor is None:
        return False
    shutil.rmtree(part, ignore_errors=True)
    os.close(descriptor)
    return True
