"""The folder of results: what is a run's own, what a dead run leaves, and files that are whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reports.folder import Folder

ROOT = Path(__file__).parents[2]
NAMES = ("records.jsonl", "red-cases.txt")


def names(path: Path) -> list[str]:
    return sorted(found.name for found in path.iterdir())


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that is under way in the folder, and has written a record."""
    code = (
        "from pathlib import Path; from reports.folder import Folder; import sys\n"
        "folder = Folder(Path(sys.argv[1])); folder.begin(()); folder.part('main').write_text('its own')\n"
        "print(folder.own.name, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield process
        process.kill()


def test_a_run_leaves_its_files_and_nothing_else(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "not" / "there")
    folder.begin(NAMES)
    for process in ("gw1", "gw0"):
        folder.part(process).write_text(process)
    parts = folder.parts()
    assert [part.read_text() for part in parts] == ["gw0", "gw1"]
    folder.end({"records.jsonl": b"gw0gw1", "red-cases.txt": None}, parts)
    assert names(folder.path) == ["records.jsonl"]
    assert (folder.path / "records.jsonl").read_bytes() == b"gw0gw1"


def test_what_is_not_in_the_files_stays_until_the_next_run(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.begin(NAMES)
    folder.part("gw0").write_text("cut sho")
    folder.end({"records.jsonl": b"others"}, [])
    assert folder.parts()[0].read_text() == "cut sho"
    Folder(tmp_path).begin(())
    assert folder.parts() == []


def test_files_of_an_earlier_run_go_when_one_begins(tmp_path: Path) -> None:
    for name in (*NAMES, "another"):
        (tmp_path / name).touch()
    folder = Folder(tmp_path)
    folder.begin(NAMES)
    assert names(tmp_path) == sorted(["another", folder.own.name])


def test_what_a_live_run_has_is_left_alone(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    assert other.stdout is not None
    theirs = tmp_path / other.stdout.readline().strip()
    (tmp_path / "red-cases.txt").write_text("it may be theirs")
    mine = Folder(tmp_path)
    mine.begin(NAMES)
    assert mine.parts() == []
    assert names(tmp_path) == sorted(["red-cases.txt", theirs.name, mine.own.name])
    mine.end({"red-cases.txt": None}, [])
    assert names(tmp_path) == [theirs.name]
    assert (theirs / "records-main.jsonl").read_text() == "its own"


def test_what_a_killed_run_left_goes(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    assert other.stdout is not None
    theirs = tmp_path / other.stdout.readline().strip()
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    assert theirs.exists()
    mine = Folder(tmp_path)
    mine.begin(NAMES)
    assert names(tmp_path) == [mine.own.name]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Folder(tmp_path / "file" / "reports").begin(NAMES)
