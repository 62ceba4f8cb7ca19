"""Parts of the tile sweep without a GPU: the grid, a forced tile, processes that die, bad tiles."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from kernels import launch
from kernels.architecture import SHARED_MEMORY, Architecture
from kernels.tiles import WHOLE, Tile, columns, shared_memory
from reports.tiles import FAILED, MEASURED, UNMEASURED, WRONG, Program
from tests.offline import DIMS, KERNELS, TILED
from tests.speed.occupancy import KIB
from tests.speed.sweep import timing
from tests.speed.sweep.grid import (
    NO_MEMORY,
    NO_REGISTERS,
    accumulators,
    grid,
    shipped_tile,
    why_pruned,
    widths,
)
from tests.speed.sweep.launches import Compilation, Tensors, compile_tile, launches
from tests.speed.sweep.outcomes import TIME_OVER
from tests.speed.sweep.processes import ContextLostError, Failure, answers
from tests.speed.sweep.timing import Group, GroupTiming, measure, why_wrong

ROOT = Path(__file__).resolve().parents[2]
AMPERE, HOPPER = (Architecture(f"sm{cc}", cc, SHARED_MEMORY[cc]) for cc in (80, 90))

# ---------------------------------------------------------------- the grid


@pytest.mark.parametrize("arch", [AMPERE, HOPPER], ids=lambda arch: arch.name)
@pytest.mark.parametrize("kernel", TILED)
@pytest.mark.parametrize("dim", [dim for dim in DIMS if dim >= 64])
def test_the_grid_has_no_tile_twice_and_keeps_many_and_those_that_are_shipped(
    arch: Architecture, kernel: str, dim: int
) -> None:
    tiles = grid(arch, kernel, dim)
    assert len(set(tiles)) == len(tiles)
    assert {tile.BM for tile in tiles} == {32, 64, 128}
    kept = [tile for tile in tiles if not why_pruned(arch, kernel, tile, dim)]
    assert len(kept) >= 15
    assert all(shared_memory(arch, kernel, tile, dim, 2) <= arch.shared_memory for tile in kept)
    assert shipped_tile(arch, kernel, dim) in kept
    assert set(grid(arch, kernel, dim, quick=True)) <= set(tiles)


def test_slices_are_as_wide_as_gives_another_kernel() -> None:
    assert [widths(HOPPER, dim) for dim in (32, 64, 80, 96, 128, 192, 256)] == [
        (WHOLE,), (WHOLE,), (64, WHOLE), (32, 64, WHOLE), (64, WHOLE), (64, 128, WHOLE), (64, 128, WHOLE)
    ]  # fmt: skip
    assert [widths(AMPERE, dim) for dim in (64, 96, 128, 192, 256)] == [
        (WHOLE,), (32, 64, WHOLE), (32, 64, WHOLE), (64, 128), (64, 128)
    ]  # fmt: skip
    assert [columns(80, width) for width in (16, 32, 64, WHOLE)] == [80, 80, 80, 128]
    assert [columns(192, width) for width in (64, 128, WHOLE)] == [192, 192, 256]


def test_why_a_tile_is_pruned() -> None:
    assert why_pruned(HOPPER, "forward", Tile(128, 64, 8, 2), 128) == ""
    # 128 x 256 floats in 128 threads are 256 each, without S
    assert why_pruned(HOPPER, "forward", Tile(128, 32, 4, 1), 256) == NO_REGISTERS
    assert accumulators("dkdv", Tile(64, 128, 4, 2), 128) == 2 * (128 * 128 + 64 * 128) / 128
    assert why_pruned(HOPPER, "dkdv", Tile(64, 128, 4, 1), 128) == NO_REGISTERS
    assert why_pruned(HOPPER, "dq", Tile(128, 128, 8, 3), 256) == NO_MEMORY
    # what is padded takes registers too: 80 columns are 128 in one slice
    assert why_pruned(HOPPER, "dkdv", Tile(32, 128, 4, 1), 80) == NO_REGISTERS
    assert why_pruned(HOPPER, "dkdv", Tile(32, 128, 4, 1, 64), 80) == ""


# ---------------------------------------------------------------- one launch


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", TILED)
def test_a_forced_tile_reaches_the_launch(kernel: str, causal: bool) -> None:
    tile = Tile(32, 16, 8, 1, 32)
    assert tile != shipped_tile(AMPERE, kernel, 64)
    x = Tensors.of(3, 2, 100, 64, torch.float16, "meta")
    made = launches(AMPERE, tile, x, causal)[kernel]
    keywords = made.keywords
    assert (keywords["BM"], keywords["BN"], keywords["num_warps"], keywords["num_stages"]) == (32, 16, 8, 1)
    assert keywords["WIDTH"] == 32
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
from tests.offline import TILED
from tests.speed.sweep.launches import Tensors, launches

arch, tile = Architecture("sm90", 90, SHARED_MEMORY[90]), Tile(32, 32, 4, 2)
small, large = (Tensors.of(*of, 32, torch.float16, "meta") for of in ((1, 1, 16), (8, 64, 2048)))
for kernel in TILED:
    first, second = (launches(arch, tile, x, True)[kernel].compile() for x in (small, large))
    assert first is second, kernel
"""


def test_a_tiny_problem_is_compiled_to_the_same_kernel_as_a_large_one() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-c", SAME_KERNEL], cwd=ROOT, env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- processes that may die


def test_a_task_that_fails_or_takes_its_process_with_it_is_a_failure_and_the_others_are_done() -> None:
    tasks = deque(["1 + 1", "1 / 0", "__import__('os')._exit(3)", "'af' + 'ter'"])
    found = dict(answers(eval, tasks, 1, time.monotonic() + 60, 60))
    assert found == {
        "1 + 1": 2,
        "1 / 0": Failure("ZeroDivisionError: division by zero"),
        "__import__('os')._exit(3)": Failure("its process ended with status 3"),
        "'af' + 'ter'": "after",
    }


def test_a_process_that_lost_the_gpu_is_replaced_and_tasks_may_be_added() -> None:
    error = "__import__('tests.speed.sweep.processes', fromlist=['processes']).ContextLostError('gone', 5)"
    tasks = deque([f"(of for of in ()).throw({error})"])
    found = []
    for _, answer in answers(eval, tasks, 1, time.monotonic() + 60, 60):
        found.append(answer)
        if answer == Failure("gone", 5):
            tasks.append("1 + 1")
    assert found == [Failure("gone", 5), 2]


def test_other_processes_find_what_they_are_to_do() -> None:
    """Without a GPU: what is found says that there is none."""
    tile = Tile(32, 32, 4, 1)
    compilation = Compilation("dq", 64, tile, "float16", "causal")
    group = Group("dq", 64, "float16", (2048,), (tile,), tile, 0.0)
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
        for function, task in ((compile_tile, compilation), (measure, group)):
            ((_, answer),) = answers(function, deque([task]), 1, time.monotonic() + 60, 60)
            assert isinstance(answer, Failure), task
            assert re.search("CUDA|NVIDIA", answer.reason), answer


def test_a_task_that_takes_too_long_is_ended() -> None:
    begun, slow = time.monotonic(), "__import__('time').sleep(60)"
    assert list(answers(eval, deque([slow]), 1, begun + 60, 0.2)) == [(slow, Failure("not done after 0 s"))]
    assert list(answers(eval, deque([slow]), 1, time.monotonic() + 0.2, 60)) == [], "the time was over"
    assert time.monotonic() - begun < 20


# ---------------------------------------------------------------- timing, with kernels that are none


class Stub:
    """Stands for a launch of the forward: writes a value, and is compiled to what the tile says."""

    def __init__(self, x: Tensors, of: Behaviour) -> None:
        self.x, self.of = x, of

    def __call__(self) -> Any:
        if self.of.raises:
            raise RuntimeError(self.of.raises)
        if self.of.value is not None:
            self.x.out.fill_(self.of.value)
        self.x.lse.fill_(1)
        return SimpleNamespace(
            n_regs=self.of.registers, n_spills=self.of.spills, metadata=SimpleNamespace(shared=KIB)
        )


class Behaviour(SimpleNamespace):
    """Of a tile: what it computes (None: nothing), how long it takes, whether it raises."""

    value: float | None
    seconds: float
    raises: str
    registers: int
    spills: int

    @staticmethod
    def of(seconds: float = 1.0, value: float | None = 1.0, raises: str = "", spills: int = 0) -> Behaviour:
        return Behaviour(seconds=seconds, value=value, raises=raises, registers=100, spills=spills)


SHIPPED = shipped_tile(HOPPER, "forward", 64)
FASTER, SLOWER, ILL, IDLE, BROKEN, SPILLING = (Tile(16 * n, 16, 4, 1) for n in range(1, 7))
TILES = {
    SHIPPED: Behaviour.of(),
    FASTER: Behaviour.of(0.8),
    SLOWER: Behaviour.of(1.5),
    ILL: Behaviour.of(0.1, value=1.05),
    IDLE: Behaviour.of(0.05, value=None),
    BROKEN: Behaviour.of(raises="out of resource: shared memory\nand more"),
    SPILLING: Behaviour.of(0.7, spills=3),
}


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    def stub_launches(arch: Architecture, tile: Tile, x: Tensors, causal: bool) -> dict[str, Stub]:
        return {"forward": Stub(x, TILES[tile])}

    monkeypatch.setattr(timing, "launches", stub_launches)
    monkeypatch.setattr(timing, "effective_architecture", lambda device: HOPPER)
    monkeypatch.setattr(timing, "context_lives", lambda: True)
    monkeypatch.setattr(timing, "TOKENS", 16)
    monkeypatch.setattr(timing, "WIDTH", 64)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def seconds_of(call: Any) -> float:
    call()
    return call.of.seconds * random.uniform(0.999, 1.001)


def group(**changes: Any) -> Group:
    made = Group("forward", 64, "float32", (8,), tuple(TILES), SHIPPED, time.monotonic() + 60)
    return replace(made, **changes)


@pytest.mark.usefixtures("stubs")
def test_what_becomes_of_tiles() -> None:
    found = GroupTiming(group(), seconds_of, "cpu").measured()
    status = {tile: of.status for tile, of in found.outcomes.items()}
    assert status == {SHIPPED: MEASURED, FASTER: MEASURED, SLOWER: MEASURED, ILL: WRONG, IDLE: WRONG,
                      BROKEN: FAILED, SPILLING: MEASURED}  # fmt: skip
    ill, broken = found.outcomes[ILL], found.outcomes[BROKEN]
    assert ill.reason == "T 8 causal: out is off by 0.05 of its norm; 0.01 is allowed"
    assert found.outcomes[IDLE].reason == "T 8 causal: out is not finite", "it was NaN before"
    assert not ill.seconds, "what is wrong has no time"
    assert broken.reason == "RuntimeError: out of resource: shared memory"
    shipped = found.outcomes[SHIPPED]
    assert {name: len(of) for name, of in shipped.seconds.items()} == dict.fromkeys(
        ("T 8 causal", "T 8 full"), timing.ROUNDS
    )
    assert shipped.programs["full"] == Program(registers=100, spilled=0, shared=KIB)
    assert found.outcomes[SPILLING].programs["causal"].spilled == 12
    finalists = {tile for tile, of in found.outcomes.items() if of.final}
    assert finalists == {SHIPPED, FASTER, SLOWER, SPILLING}
    assert {len(of) for of in found.control.values()} == {timing.FINAL_ROUNDS}


@pytest.mark.usefixtures("stubs")
def test_delta_is_computed_before_a_kernel_that_reads_it_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, Tile]] = []

    class Recorded(Stub):
        def __init__(self, x: Tensors, name: str, tile: Tile) -> None:
            super().__init__(x, TILES[tile])
            self.name, self.tile = name, tile

        def __call__(self) -> Any:
            launched.append((self.name, self.tile))
            self.x.dq.fill_(1)
            return super().__call__()

    def stub_launches(arch: Architecture, tile: Tile, x: Tensors, causal: bool) -> dict[str, Recorded]:
        return {name: Recorded(x, name, tile) for name in ("forward", "delta", "dq")}

    monkeypatch.setattr(timing, "launches", stub_launches)
    GroupTiming(group(kernel="dq", tiles=(FASTER, SHIPPED)), seconds_of, "cpu").measured()
    expected, first_calls = launched[:6], launched[6:14]
    assert expected == 2 * [("forward", SHIPPED), ("delta", SHIPPED), ("dq", SHIPPED)]
    assert first_calls == [(name, tile) for tile in (SHIPPED, FASTER) for name in 2 * ("delta", "dq")]
    assert {name for name, _ in launched[14:]} == {"dq"}, "delta is not timed"


@pytest.mark.usefixtures("stubs")
def test_when_the_time_is_over_nothing_more_is_timed() -> None:
    found = GroupTiming(group(until=0.0), seconds_of, "cpu").measured()
    assert {(of.status, of.reason) for of in found.outcomes.values()} == {(UNMEASURED, TIME_OVER)}


@pytest.mark.usefixtures("stubs")
def test_a_tile_that_takes_the_context_with_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "context_lives", lambda: False)
    with pytest.raises(ContextLostError) as raised:
        GroupTiming(group(), seconds_of, "cpu").measured()
    assert raised.value.of == BROKEN


def test_a_result_that_is_not_finite_or_far_off_is_wrong() -> None:
    right = {"dq": torch.randn(100)}
    assert why_wrong({"dq": right["dq"].half()}, right) == ""
    assert "off by" in why_wrong({"dq": right["dq"] * 1.02}, right)
    assert why_wrong({"dq": right["dq"].where(right["dq"] < 1, math.nan)}, right) == "dq is not finite"
