"""A whole tile sweep without a GPU, with processes that are none, and its command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.architecture import SHARED_MEMORY, Architecture
from kernels.tiles import Tile
from reports.tile_sweep import FILE, PAGE, markdown
from reports.tiles import FAILED, MEASURED, UNMEASURED, Program, read
from tests.offline import DIMS
from tests.speed.occupancy import KIB
from tests.speed.sweep import __main__ as command
from tests.speed.sweep import run
from tests.speed.sweep.__main__ import main
from tests.speed.sweep.grid import shipped_tile
from tests.speed.sweep.launches import compile_tile
from tests.speed.sweep.outcomes import Outcome
from tests.speed.sweep.processes import Failure
from tests.speed.sweep.timing import Measured

ROOT = Path(__file__).resolve().parents[2]
AMPERE = Architecture("sm80", 80, SHARED_MEMORY[80])

LOST, UNCOMPILED = Tile(64, 128, 8, 2), Tile(128, 32, 8, 2)


def answers(
    function: Callable[[Any], Any], tasks: deque[Any], workers: int, until: float, seconds: float
) -> Iterator[tuple[Any, Any]]:
    """Stands for the processes: one tile does not compile, another takes the GPU with it."""
    while tasks:
        task = tasks.popleft()
        if function is compile_tile:
            yield task, Failure("PTXASError: no") if task.tile == UNCOMPILED else None
        elif LOST in task.tiles:
            yield task, Failure("RuntimeError: an illegal memory access", LOST)
        else:
            outcomes = {tile: timed(0.001 * (1 + 0.1 * n)) for n, tile in enumerate(task.tiles)}
            yield task, Measured(outcomes, {"T 2048 causal": [0.001] * 15}, 1)


def timed(seconds: float) -> Outcome:
    rounds = {"T 2048 causal": [seconds] * 15}
    programs = {"causal": Program(registers=128, spilled=0, shared=48 * KIB)}
    return Outcome(MEASURED, "", programs, rounds, rounds)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 on which Triton generates code for an A100."""
    monkeypatch.setattr(run, "answers", answers)
    monkeypatch.setattr(command, "why_not_here", lambda: "")
    monkeypatch.setattr(run, "effective_architecture", lambda device: replace(AMPERE, overridden=True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


@pytest.mark.usefixtures("here")
def test_a_sweep_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new"
    words = ["--kernel", "forward", "--dims", "64,256", "--quick", "--out", str(folder)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "an illegal memory access; again without it" in printed
    assert "pruned: its accumulators alone take more than 255 registers a thread" in printed
    assert printed.splitlines()[-3:] == [
        str(folder / name) for name in ("tiles.json", "tiles.md", "tiles.png")
    ]
    found = read(folder / FILE)
    assert (found.device, found.path, found.chip, found.compiled_for, found.table) == (
        "NVIDIA H200", "sm80-override", "sm90", "sm80", "16 bit"
    )  # fmt: skip
    entries = {(entry.dim, entry.tile): entry for entry in found.entries}
    lost, uncompiled = entries[64, (64, 128, 8, 2)], entries[64, (128, 32, 8, 2)]
    assert (lost.status, lost.reason) == (FAILED, "RuntimeError: an illegal memory access")
    assert (uncompiled.status, uncompiled.reason) == (FAILED, "full: PTXASError: no")
    shipped = [(entry.dim, entry.tile) for entry in found.entries if entry.shipped]
    assert shipped == [(64, (128, 64, 4, 3)), (256, (64, 64, 4, 2, 64))]
    best = entries[shipped[1]]
    # 128 registers: 4096 a warp, 4 warps in each part, 16 in all; 49 KiB of 228, and of 164
    assert {chip: of.blocks for chip, of in best.residence.items()} == {"sm90": 4, "sm80": 3}
    assert best.seconds == {"T 2048 causal": [0.001] * 15}
    assert list(found.controls) == ["forward 64", "forward 256"]
    assert found.controls["forward 64"] == {"T 2048 causal": [0.001] * 15}
    assert (folder / PAGE).read_text() == markdown(found)


@pytest.mark.usefixtures("here")
def test_if_the_shipped_tile_takes_the_gpu_with_it_nothing_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LOST", shipped_tile(AMPERE, "dq", 64))
    assert main(["--kernel", "dq", "--dims", "64", "--quick", "--out", str(tmp_path)]) == 1
    reasons = {entry.reason for entry in read(tmp_path / FILE).entries if entry.status == UNMEASURED}
    assert reasons == {"RuntimeError: an illegal memory access"}
    assert "dq 64: RuntimeError: an illegal memory access\n" in capsys.readouterr().out


@pytest.mark.usefixtures("here")
def test_without_the_shipped_tile_nothing_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "UNCOMPILED", shipped_tile(AMPERE, "dq", 64))
    assert main(["--kernel", "dq", "--dims", "64", "--quick", "--out", str(tmp_path)]) == 1
    found = read(tmp_path / FILE)
    reasons = {entry.reason for entry in found.entries if entry.status == UNMEASURED}
    assert reasons == {"the shipped tile was not compiled"}
    assert "no plot: no tile has a time" in capsys.readouterr().out


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    "words, said",
    [
        (["--kernel", "forward,delta"], "--kernel: is 'forward,delta'; it may be some of forward, dkdv, dq"),
        (["--dims", "64,97"], f"--dims: is '64,97'; it may be some of {', '.join(map(str, DIMS))}"),
        (["--dtype", "float32"], "--dtype: is 'float32'; it may be float16 or bfloat16"),
        (["--lengths", "2048,0"], "--lengths: is '2048,0'; it may be numbers from 1 to 16384"),
        (["--lengths", "many"], "--lengths: is 'many'; it may be numbers from 1 to 16384"),
        (["-n", "0"], "-n/--workers: is '0'; it may be a number from 1 on"),
        (["--seconds", "nan"], "--seconds: is 'nan'; it may be a number greater than 0"),
        (["--tile", "64"], "unrecognized arguments: --tile"),
    ],
)
def test_wrong_use(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("here")
def test_a_folder_that_cannot_be_written_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", "/dev/null/tiles"]) == 2
    assert capsys.readouterr().err == (
        "--out is '/dev/null/tiles': nothing can be written there (Not a directory)\n"
    )


def test_without_a_gpu_nothing_is_timed() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.speed.sweep", "--quick"], cwd=ROOT,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stdout == ""
    assert "CUDA" in done.stderr or "GPU" in done.stderr


def test_an_interpreter_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main([]) == 3
    assert "TRITON_INTERPRET is '1'" in capsys.readouterr().err
