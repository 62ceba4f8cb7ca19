"""The tile sweep without a GPU: occupancy by hand, the grid, a forced tile, what becomes of bad tiles."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import launch
from kernels.architecture import SHARED_MEMORY, Architecture
from kernels.tiles import Tile, choose_tiles, shared_memory
from reports import tile_sweep
from reports.errors import ReportError
from reports.tile_sweep import (
    FAILED,
    MEASURED,
    PRUNED,
    UNMEASURED,
    WRONG,
    Program,
    TileEntry,
    TileSweep,
    claims,
    markdown,
)
from tests.offline import KERNELS, TILED
from tests.speed import pairs, sweep
from tests.speed.occupancy import CHIPS, KIB, resident_blocks
from tests.speed.sweep import ContextLostError, Failure, Group, Measured, Outcome, Tensors

ROOT = Path(__file__).resolve().parents[2]
AMPERE, HOPPER = (Architecture(f"sm{cc}", cc, SHARED_MEMORY[cc]) for cc in (80, 90))

# ---------------------------------------------------------------- occupancy


@pytest.mark.parametrize(
    "chip, warps, registers, shared, blocks, limits, occupancy",
    [
        # CUDA C++ Best Practices Guide, "Calculating Occupancy": 37 registers, rounded up to 40, of a chip
        # with as many registers and warps
        (80, 4, 37, 0, 12, ["registers"], 0.75),
        (80, 10, 37, 0, 4, ["registers"], 0.625),
        # 256 x 32 registers a warp, 16384 in each part: 2 warps a part, 8 in all
        (80, 4, 255, 0, 2, ["registers"], 0.125),
        (80, 8, 255, 0, 1, ["registers"], 0.125),
        (90, 4, 128, 0, 4, ["registers"], 0.25),
        (90, 4, 168, 0, 3, ["registers"], 0.1875),  # 5376 a warp: 3 a part
        (90, 4, 169, 0, 2, ["registers"], 0.125),
        (80, 3, 200, 0, 2, ["registers"], 6 / 64),  # 65536 / 6400 are 10 warps, but 2 in each part 8
        (80, 32, 64, 0, 1, ["registers"], 0.5),
        (80, 32, 65, 0, 0, ["registers"], 0.0),
        (80, 4, 256, 0, 0, ["registers"], 0.0),  # no thread has so many
        # 1 KiB more a block than it asks for
        (80, 4, 32, 48 * KIB, 3, ["shared memory"], 12 / 64),
        (80, 4, 32, 163 * KIB, 1, ["shared memory"], 4 / 64),
        (80, 4, 32, 163 * KIB + 1, 0, ["shared memory"], 0.0),
        (86, 4, 32, 99 * KIB, 1, ["shared memory"], 4 / 48),
        (89, 4, 32, 49 * KIB, 2, ["shared memory"], 8 / 48),
        (90, 4, 160, 113 * KIB, 2, ["shared memory"], 8 / 64),
        (90, 4, 160, 114 * KIB, 1, ["shared memory"], 4 / 64),
        (90, 8, 255, 227 * KIB, 1, ["registers", "shared memory"], 8 / 64),
        (90, 4, 32, 37 * KIB - 127, 6, ["shared memory"], 24 / 64),  # in units of 128 bytes
        (86, 8, 32, 0, 6, ["warps"], 1.0),
        (86, 1, 16, 0, 16, ["blocks"], 16 / 48),
        (89, 1, 16, 0, 24, ["blocks"], 0.5),
        (90, 1, 16, 0, 32, ["blocks"], 0.5),
        (90, 2, 32, 0, 32, ["registers", "warps", "blocks"], 1.0),
    ],
)
def test_resident_blocks(
    chip: int, warps: int, registers: int, shared: int, blocks: int, limits: list[str], occupancy: float
) -> None:
    found = resident_blocks(CHIPS[chip], warps, registers, shared)
    assert (found.blocks, list(found.limits)) == (blocks, limits)
    assert found.occupancy == pytest.approx(occupancy)


def test_a_block_of_nothing_is_refused() -> None:
    for wrong in ((0, 32, 0), (4, -1, 0), (4, 32, -1)):
        with pytest.raises(ValueError, match=r"at least 1, 0 and 0"):
            resident_blocks(CHIPS[80], *wrong)


def test_what_one_block_may_take_is_what_the_kernels_know() -> None:
    for capability, chip in CHIPS.items():
        assert resident_blocks(chip, 4, 32, SHARED_MEMORY[capability]).blocks == 1
        assert resident_blocks(chip, 4, 32, SHARED_MEMORY[capability] + 1).blocks == 0


# ---------------------------------------------------------------- the grid


@pytest.mark.parametrize("arch", [AMPERE, HOPPER], ids=lambda arch: arch.name)
@pytest.mark.parametrize("kernel", TILED)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_grid_has_no_tile_twice_and_keeps_many_and_those_that_are_shipped(
    arch: Architecture, kernel: str, dim: int
) -> None:
    tiles = sweep.grid(kernel, dim)
    assert len(set(tiles)) == len(tiles)
    assert {tile.BM for tile in tiles} == {32, 64, 128}
    kept = [tile for tile in tiles if not sweep.why_pruned(arch, kernel, tile, dim)]
    assert len(kept) >= 15
    assert all(shared_memory(arch, kernel, tile, dim, 2) <= arch.shared_memory for tile in kept)
    assert getattr(choose_tiles(arch, dim, dim, 2), kernel) in kept
    assert set(sweep.grid(kernel, dim, quick=True)) <= set(tiles)


def test_why_a_tile_is_pruned() -> None:
    assert sweep.why_pruned(HOPPER, "forward", Tile(128, 64, 8, 2), 128) == ""
    # 128 x 256 floats in 128 threads are 256 each, without S
    assert sweep.why_pruned(HOPPER, "forward", Tile(128, 32, 4, 1), 256) == sweep.NO_REGISTERS
    assert sweep.accumulators("dkdv", Tile(64, 128, 4, 2), 128) == 2 * (128 * 128 + 64 * 128) / 128
    assert sweep.why_pruned(HOPPER, "dkdv", Tile(64, 128, 4, 1), 128) == sweep.NO_REGISTERS
    assert sweep.why_pruned(HOPPER, "dq", Tile(128, 128, 8, 3), 256) == sweep.NO_MEMORY


# ---------------------------------------------------------------- one launch


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", TILED)
def test_a_forced_tile_reaches_the_launch(kernel: str, causal: bool) -> None:
    tile = Tile(32, 16, 8, 1)
    assert tile != getattr(choose_tiles(AMPERE, 64, 64, 2), kernel)
    x = Tensors.of(3, 2, 100, 64, torch.float16, "meta")
    made = sweep.launches(AMPERE, tile, x, causal)[kernel]
    keywords = made.keywords
    assert (keywords["BM"], keywords["BN"], keywords["num_warps"], keywords["num_stages"]) == (32, 16, 8, 1)
    assert keywords["maxnreg"] == 255, "as on the architecture that was asked for"
    assert keywords["CAUSAL"] is causal
    rows = tile.BN if kernel == "dkdv" else tile.BM
    assert made.grid == (3 * 2 * -(-100 // rows),)
    assert made.kernel is getattr(launch, KERNELS[kernel]).kernel
    for result in x.results(kernel).values():
        assert any(argument is result for argument in made.arguments), "it writes where it is looked for"


SAME_KERNEL = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Driver:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(Driver())
from kernels.architecture import SHARED_MEMORY, Architecture
from kernels.tiles import Tile
from tests.speed.sweep import TILED, Tensors, launches

arch, tile = Architecture("sm90", 90, SHARED_MEMORY[90]), Tile(32, 32, 4, 2)
small, large = (Tensors.of(*of, 32, torch.float16, "meta") for of in ((1, 1, 16), (8, 64, 2048)))
for kernel in TILED:
    first, second = (launches(arch, tile, x, True)[kernel].compile() for x in (small, large))
    assert first is second, kernel
"""


def test_a_tiny_problem_is_compiled_to_the_same_kernel_as_a_large_one() -> None:
    assert executed("-c", SAME_KERNEL).returncode == 0


def executed(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own that sees no GPU, and whose Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} | variables
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    print(done.stdout, done.stderr)
    return done


# ---------------------------------------------------------------- processes that may die


def test_a_task_that_fails_or_takes_its_process_with_it_is_a_failure_and_the_others_are_done() -> None:
    tasks = deque(["1 + 1", "1 / 0", "__import__('os')._exit(3)", "'af' + 'ter'"])
    found = dict(sweep.answers(eval, tasks, 1, time.monotonic() + 60, 60))
    assert found == {
        "1 + 1": 2,
        "1 / 0": Failure("ZeroDivisionError: division by zero"),
        "__import__('os')._exit(3)": Failure("its process ended with status 3"),
        "'af' + 'ter'": "after",
    }


def test_a_process_that_lost_the_gpu_is_replaced_and_tasks_may_be_added() -> None:
    error = "__import__('tests.speed.sweep', fromlist=['sweep']).ContextLostError('gone', 5)"
    tasks = deque([f"(of for of in ()).throw({error})"])
    found = []
    for _, answer in sweep.answers(eval, tasks, 1, time.monotonic() + 60, 60):
        found.append(answer)
        if answer == Failure("gone", 5):
            tasks.append("1 + 1")
    assert found == [Failure("gone", 5), 2]


def test_a_task_that_takes_too_long_is_ended() -> None:
    begun = time.monotonic()
    found = list(sweep.answers(eval, deque(["slow"]), 1, begun + 60, 0.2))  # no process starts so fast
    assert found == [("slow", Failure("not done after 0 s"))]
    assert list(sweep.answers(eval, deque(["lost"]), 1, time.monotonic() + 0.2, 60)) == []
    assert time.monotonic() - begun < 20


# ---------------------------------------------------------------- timing, with kernels that are none


class Stub:
    """Stands for a launch of the forward: writes a value, and is compiled to what the tile says."""

    def __init__(self, x: Tensors, of: Behaviour) -> None:
        self.x, self.of = x, of

    def __call__(self) -> Any:
        if self.of.raises:
            raise RuntimeError(self.of.raises)
        self.x.out.fill_(self.of.value)
        self.x.lse.fill_(1)
        return SimpleNamespace(
            n_regs=self.of.registers, n_spills=self.of.spills, metadata=SimpleNamespace(shared=KIB)
        )


class Behaviour(SimpleNamespace):
    """Of a tile: what it computes, how long it takes, whether it raises."""

    value: float
    seconds: float
    raises: str
    registers: int
    spills: int

    @staticmethod
    def of(seconds: float = 1.0, value: float = 1.0, raises: str = "", spills: int = 0) -> Behaviour:
        return Behaviour(seconds=seconds, value=value, raises=raises, registers=100, spills=spills)


SHIPPED = choose_tiles(HOPPER, 64, 64, 2).forward
FASTER, SLOWER, ILL, BROKEN, SPILLING = (Tile(16 * n, 16, 4, 1) for n in range(1, 6))
TILES = {
    SHIPPED: Behaviour.of(),
    FASTER: Behaviour.of(0.8),
    SLOWER: Behaviour.of(1.5),
    ILL: Behaviour.of(0.1, value=1.05),
    BROKEN: Behaviour.of(raises="out of resource: shared memory\nand more"),
    SPILLING: Behaviour.of(0.7, spills=3),
}


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    def launches(arch: Architecture, tile: Tile, x: Tensors, causal: bool) -> dict[str, Stub]:
        return {"forward": Stub(x, TILES[tile])}

    monkeypatch.setattr(sweep, "launches", launches)
    monkeypatch.setattr(sweep, "effective_architecture", lambda device: HOPPER)
    monkeypatch.setattr(sweep, "context_lives", lambda: True)
    monkeypatch.setattr(sweep, "TOKENS", 16)
    monkeypatch.setattr(sweep, "WIDTH", 64)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def seconds_of(call: Any) -> float:
    call()
    return call.of.seconds * random.uniform(0.999, 1.001)


def group(**changes: Any) -> Group:
    made = Group("forward", 64, "float32", (8,), tuple(TILES), SHIPPED, time.monotonic() + 60)
    return replace(made, **changes)


@pytest.mark.usefixtures("stubs")
def test_what_becomes_of_tiles() -> None:
    found = sweep._Timing(group(), seconds_of, "cpu").measured()
    status = {tile: of.status for tile, of in found.outcomes.items()}
    assert status == {SHIPPED: MEASURED, FASTER: MEASURED, SLOWER: MEASURED, ILL: WRONG, BROKEN: FAILED,
                      SPILLING: MEASURED}  # fmt: skip
    ill, broken = found.outcomes[ILL], found.outcomes[BROKEN]
    assert ill.reason == "T 8 causal: out is off by 0.05 of its norm; 0.01 is allowed"
    assert not ill.seconds, "what is wrong has no time"
    assert broken.reason == "RuntimeError: out of resource: shared memory"
    shipped = found.outcomes[SHIPPED]
    assert {name: len(of) for name, of in shipped.seconds.items()} == dict.fromkeys(
        ("T 8 causal", "T 8 full"), sweep.ROUNDS
    )
    assert shipped.programs["full"] == Program(registers=100, spilled=0, shared=KIB)
    assert found.outcomes[SPILLING].programs["causal"].spilled == 12
    finalists = {tile for tile, of in found.outcomes.items() if of.final}
    assert finalists == {SHIPPED, FASTER, SLOWER, SPILLING}
    assert {len(of) for of in found.control.values()} == {sweep.FINAL_ROUNDS}


@pytest.mark.usefixtures("stubs")
def test_when_the_time_is_over_nothing_more_is_timed() -> None:
    found = sweep._Timing(group(until=0.0), seconds_of, "cpu").measured()
    assert {(of.status, of.reason) for of in found.outcomes.values()} == {(UNMEASURED, sweep.TIME_OVER)}


@pytest.mark.usefixtures("stubs")
def test_a_tile_that_takes_the_context_with_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "context_lives", lambda: False)
    with pytest.raises(ContextLostError) as raised:
        sweep._Timing(group(), seconds_of, "cpu").measured()
    assert raised.value.of == BROKEN


def test_a_result_that_is_not_finite_or_far_off_is_wrong() -> None:
    right = {"dq": torch.randn(100)}
    assert sweep.why_wrong({"dq": right["dq"].half()}, right) == ""
    assert "off by" in sweep.why_wrong({"dq": right["dq"] * 1.02}, right)
    assert sweep.why_wrong({"dq": right["dq"].where(right["dq"] < 1, math.nan)}, right) == "dq is not finite"


# ---------------------------------------------------------------- a whole sweep, with processes that are none

LOST, UNCOMPILED = Tile(64, 128, 8, 2), Tile(128, 32, 8, 2)


def answers(
    function: Callable[[Any], Any], tasks: deque[Any], workers: int, until: float, seconds: float
) -> Iterator[tuple[Any, Any]]:
    """Stands for the processes: one tile does not compile, another takes the GPU with it."""
    while tasks:
        task = tasks.popleft()
        if function is sweep.compile_:
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
    monkeypatch.setattr(sweep, "answers", answers)
    monkeypatch.setattr(sweep, "why_not_here", lambda: "")
    monkeypatch.setattr(sweep, "effective_architecture", lambda device: replace(AMPERE, overridden=True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


@pytest.mark.usefixtures("here")
def test_a_sweep_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new"
    words = ["--kernel", "forward", "--dims", "64,256", "--quick", "--out", str(folder)]
    assert sweep.main(words) == 0
    printed = capsys.readouterr().out
    assert "an illegal memory access; again without it" in printed
    assert "pruned: its accumulators alone take more than 255 registers a thread" in printed
    assert printed.splitlines()[-3:] == [
        str(folder / name) for name in ("tiles.json", "tiles.md", "tiles.png")
    ]
    found = tile_sweep.read(folder / tile_sweep.FILE)
    assert (found.device, found.path, found.chip, found.compiled_for, found.table) == (
        "NVIDIA H200", "sm80-override", "sm90", "sm80", "16 bit"
    )  # fmt: skip
    entries = {(entry.dim, entry.tile): entry for entry in found.entries}
    lost, uncompiled = entries[64, (64, 128, 8, 2)], entries[64, (128, 32, 8, 2)]
    assert (lost.status, lost.reason) == (FAILED, "RuntimeError: an illegal memory access")
    assert (uncompiled.status, uncompiled.reason) == (FAILED, "full: PTXASError: no")
    shipped = [(entry.dim, entry.tile) for entry in found.entries if entry.shipped]
    assert shipped == [(64, (128, 128, 8, 2)), (256, (64, 64, 8, 2))]
    best = entries[shipped[1]]
    # 128 registers: 4096 a warp, 4 warps in each part, 16 in all
    assert {chip: of.blocks for chip, of in best.residence.items()} == {"sm90": 2, "sm80": 2}
    assert best.seconds == {"T 2048 causal": [0.001] * 15}
    assert list(found.controls) == ["forward 64", "forward 256"]
    assert found.controls["forward 64"] == {"T 2048 causal": [0.001] * 15}
    assert (folder / tile_sweep.PAGE).read_text() == markdown(found)


@pytest.mark.usefixtures("here")
def test_without_the_shipped_tile_nothing_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "UNCOMPILED", choose_tiles(AMPERE, 64, 64, 2).dq)
    assert sweep.main(["--kernel", "dq", "--dims", "64", "--quick", "--out", str(tmp_path)]) == 1
    found = tile_sweep.read(tmp_path / tile_sweep.FILE)
    reasons = {entry.reason for entry in found.entries if entry.status == UNMEASURED}
    assert reasons == {"the shipped tile was not compiled"}
    assert "no plot: no tile has a time" in capsys.readouterr().out


# ---------------------------------------------------------------- what a reader gets


def entry(
    kernel: str, dim: int, tile: tuple[int, int, int, int], ms: float, *, registers: int = 128,
    spilled: int = 0, shipped: bool = False, final: Sequence[float] = (),
) -> TileEntry:  # fmt: skip
    """One that was measured, in `ms` with a causal mask and in twice that without."""
    programs = {"causal": Program(registers=registers, spilled=spilled, shared=64 * KIB),
                "full": Program(registers=registers - 8, spilled=0, shared=60 * KIB)}  # fmt: skip
    outcome = Outcome(
        MEASURED, "", programs, {"T 2048 causal": [ms / 1e3] * 7, "T 2048 full": [ms / 500] * 7}
    )
    if final:
        outcome.final = {"T 2048 causal": [t / 1e3 for t in final], "T 2048 full": [t / 500 for t in final]}
    return sweep.entry(kernel, dim, Tile(*tile), shipped, outcome, [90])


NOISE = [1 + 0.001 * (n % 5 - 2) for n in range(15)]


def made_up(*entries: TileEntry, **changes: Any) -> TileSweep:
    controls = {f"{of.kernel} {of.dim}": of.final for of in entries if of.shipped}
    values: dict[str, Any] = {
        "device": "NVIDIA H200", "chip": "sm90", "compiled_for": "sm90", "path": "sm90", "dtype": "float16",
        "table": "16 bit, sm_90", "tokens": 16384, "versions": {"triton": "3.6.0"}, "controls": controls,
    }  # fmt: skip
    return TileSweep(entries=list(entries), **values | changes)


FORWARD = (
    entry("forward", 64, (64, 64, 4, 3), 0.5, shipped=True, final=[0.5 * x for x in NOISE]),
    entry("forward", 64, (128, 128, 8, 2), 0.4, registers=200, final=[0.4 * x for x in reversed(NOISE)]),
    entry("forward", 64, (128, 64, 4, 3), 0.39, registers=255, spilled=40, final=[0.39] * 15),
    TileEntry(kernel="forward", dim=64, BM=128, BN=128, warps=4, stages=3, status=PRUNED, reason="too large"),
    TileEntry(kernel="forward", dim=64, BM=32, BN=128, warps=4, stages=3, status=PRUNED, reason="too large"),
    TileEntry(kernel="forward", dim=64, BM=32, BN=32, warps=4, stages=3, status=WRONG, reason="dq | off"),
)
DQ = (
    entry("dq", 64, (64, 64, 4, 2), 1.0, shipped=True, final=NOISE),
    entry("dq", 64, (128, 64, 8, 2), 0.999, registers=200, final=[0.999 * x for x in reversed(NOISE)]),
)


def test_the_table_is_sorted_by_time_and_says_what_is_left_out() -> None:
    lines = markdown(made_up(*FORWARD, *DQ)).splitlines()
    begin = lines.index("#### forward, D = 64")
    rows = lines[begin + 4 : begin + 7]
    assert rows[0] == ("| 128 | 64 | 4 | 3 | 0.390 | 0.780 | 1.282 | 255 | 40 | 64 | 2 | registers | 12.5% |")
    assert rows[1].startswith("| 128 | 128 | 8 | 2 | 0.400 | 0.800 | 1.250 | 200 |")
    assert rows[2].startswith("| **64** | **64** | **4** | **3** | **0.500** | **1.000** | **1.000** |")
    assert "- 2 pruned: too large" in lines
    assert "- 1 wrong: dq \\| off (32x32 w4 s3)" in lines
    assert "Of 8 tiles 5 measured, 2 pruned, 1 wrong." in "\n".join(lines)


def test_only_what_is_faster_by_more_than_noise_is_for_the_tile_table() -> None:
    found = {of.kernel: of for of in claims(made_up(*FORWARD, *DQ))}
    assert found["forward"].line == "64: [(128, 128, 8, 2)],", "what spills could not be shipped"
    assert found["forward"].verdict == pairs.FASTER
    assert found["forward"].ratio is not None and found["forward"].ratio.median == pytest.approx(
        1.25, abs=0.01
    )
    assert found["dq"].verdict == pairs.SAME
    page = markdown(made_up(*FORWARD, *DQ))
    code = page[page.index("```python") :]
    assert "    64: [(128, 128, 8, 2)],  # 1.25 (" in code
    assert "dq" not in code
    assert "No other tile is faster by more than noise" in markdown(made_up(*DQ))


def test_without_enough_rounds_or_quiet_nothing_is_claimed() -> None:
    few = [entry("dq", 64, (64, 64, 4, 2), 1.0, shipped=True, final=[1.0] * 6),
           entry("dq", 64, (64, 32, 4, 2), 0.5, final=[0.5] * 6)]  # fmt: skip
    (of,) = claims(made_up(*few))
    assert (of.ratio, of.verdict) == (None, pairs.CANNOT_TELL)
    assert "too few rounds" in markdown(made_up(*few))
    loud = {"forward 64": {"T 2048 causal": [0.6e-3] * 15, "T 2048 full": [1.2e-3] * 15}}
    (of,) = claims(made_up(*FORWARD, controls=loud))
    assert of.verdict == pairs.CANNOT_TELL
    assert claims(made_up(FORWARD[1])) == [], "there is no shipped one"
    assert "Nothing was compared." in markdown(made_up(FORWARD[1]))


def test_the_files_are_read_back_and_drawn_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = made_up(*FORWARD, *DQ, path="sm80-override", compiled_for="sm80")
    tile_sweep.write(whole, tmp_path)
    path = tmp_path / tile_sweep.FILE
    assert tile_sweep.read(path) == whole
    (tmp_path / tile_sweep.PAGE).unlink()
    assert tile_sweep.main([str(path)]) == 0
    assert "The code is that for sm80, assembled for sm90" in (tmp_path / tile_sweep.PAGE).read_text()
    picture = (tmp_path / tile_sweep.PLOT).read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    assert tile_sweep.main([str(path)]) == 2
    assert "a file of a tile sweep of version 2; this reads version 1" in capsys.readouterr().err
    with pytest.raises(ReportError, match="no tile has a time"):
        tile_sweep.plot(made_up(FORWARD[3]), tmp_path / "none.png")


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    "words, said",
    [
        (["--kernel", "forward,delta"], "--kernel: is 'forward,delta'; it may be some of forward, dkdv, dq"),
        (["--dims", "64,96"], "--dims: is '64,96'; it may be some of 16, 32, 64, 128, 256"),
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
        sweep.main(words)
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("here")
def test_a_folder_that_cannot_be_written_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["--out", "/dev/null/tiles"]) == 2
    assert capsys.readouterr().err == (
        "--out is '/dev/null/tiles': nothing can be written there (Not a directory)\n"
    )


def test_without_a_gpu_nothing_is_timed() -> None:
    done = executed("-m", "tests.speed.sweep", "--quick")
    assert done.returncode == 3
    assert done.stdout == ""
    assert "CUDA" in done.stderr or "GPU" in done.stderr


def test_an_interpreter_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert sweep.main([]) == 3
    assert "TRITON_INTERPRET is '1'" in capsys.readouterr().err
