"""Every tile configuration alone, and every depth of the pipeline against every other. On a GPU.

An autotuner hides a broken configuration: another candidate has filled the output (field-bugs M2). Here each
entry of the table, first choice or not, runs alone, on poisoned memory, through the whole judgement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kernels import effective_architecture, launch, plans
from kernels.architecture import Architecture
from kernels.tiles import TABLES, WHOLE, Tile, Tiles, choose_tiles, shared_memory
from reference import emulation

from .calls import assert_same_bits, attend, inputs_of
from .cases import Case
from .comparison import compare, explain
from .implementations import load

pytestmark = pytest.mark.usefixtures("gpu")

KERNELS = ("forward", "dkdv", "dq")


@dataclass(frozen=True)
class Choice:
    """An entry of the tables of tiles: of a kernel, the largest head dimension that it is for, and a width of
    the dtype."""

    kernel: str
    dim: int
    itemsize: int
    tile: Tile

    def __str__(self) -> str:
        tile = self.tile
        shape = f"{tile.BM}x{tile.BN}-w{tile.warps}-s{tile.stages}"
        shape += f"-c{tile.width}" if tile.width != WHOLE else ""
        return f"{self.kernel}-D{self.dim}-{8 * self.itemsize}bit-{shape}"


def choices() -> Iterator[Choice]:
    """Of all tables; some have the same."""
    for name, table in TABLES.items():
        itemsize = int(name.split()[0]) // 8
        for kernel, by_dim in table.items():
            for dim, entries in by_dim.items():
                for entry in entries:
                    yield Choice(kernel, dim, itemsize, Tile(*entry))


def with_tile(arch: Architecture, choice: Choice, **changes: int) -> Tiles:
    """What is chosen for the architecture, but for one kernel's tile. Skips what its memory cannot hold."""
    tile = replace(choice.tile, **changes)
    if shared_memory(arch, choice.kernel, tile, choice.dim, choice.itemsize) > arch.shared_memory:
        pytest.skip(f"needs more shared memory than {arch.name} has")
    return replace(choose_tiles(arch, choice.dim, choice.dim, choice.itemsize), **{choice.kernel: tile})


def launch_with(tiles: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has these launched, and forgets the calls that were made with others."""
    monkeypatch.setattr(launch, "choose_tiles", lambda *_: tiles)
    monkeypatch.setattr(plans, "_plans", {})


@pytest.mark.parametrize("choice", list(dict.fromkeys(choices())), ids=str)
def test_each_configuration_alone_is_right(
    choice: Choice, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M2."""
    tiles = with_tile(effective_architecture(gpu), choice)
    launch_with(tiles, monkeypatch)
    known = emulation.Tiles(**{kernel: (t.BM, t.BN) for kernel, t in vars(tiles).items()})
    ours = replace(load("triton"), tiles=lambda case, device: known)
    dtypes = ("float16", "bfloat16") if choice.itemsize == 2 else ("float32",)
    for dtype in dtypes:
        for causal in (False, True):
            case = Case(heads_q=4, heads_kv=2, len_q=2 * choice.tile.BM + 1, len_k=2 * choice.tile.BN + 3,
                        dim=choice.dim, dim_v=choice.dim, dtype=dtype, causal=causal, d_lse=True)  # fmt: skip
            record = compare(case, ours, gpu)
            assert record.status == "held", explain(record)


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize(("dim", "dim_v"), [(80, 80), (192, 128), (40, 256)])
def test_slices_of_any_width_are_right(
    dim: int, dim_v: int, width: int, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several whole slices, a narrower last one, and other slices of v than of q and k."""
    chosen = choose_tiles(effective_architecture(gpu), dim, dim_v, 2)
    launch_with(
        Tiles(**{kernel: replace(tile, width=width) for kernel, tile in vars(chosen).items()}), monkeypatch
    )
    for causal in (False, True):
        case = Case(heads_q=2, heads_kv=1, len_q=2 * chosen.forward.BM + 1, len_k=2 * chosen.dkdv.BN + 3,
                    dim=dim, dim_v=dim_v, dtype="float16", causal=causal, d_lse=True)  # fmt: skip
        record = compare(case, load("triton"), gpu)
        assert record.status == "held", explain(record)


@pytest.mark.parametrize("arithmetic", ["float16", "float32", "tf32"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_depth_of_the_pipeline_changes_no_bit(
    kernel: str, dim: int, arithmetic: str, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N2: 1 to 4 stages, twice each."""
    arch = effective_architecture(gpu)
    dtype = "float16" if arithmetic == "float16" else "float32"
    itemsize = getattr(torch, dtype).itemsize
    tile = getattr(choose_tiles(arch, dim, dim, itemsize), kernel)
    choice = Choice(kernel, dim, itemsize, tile)
    x = inputs_of(gpu, dtype=dtype, dim=dim, batch=2, heads_q=8, heads_kv=4, len_q=333, len_k=519)
    found: dict[int, dict[str, Any]] = {}
    for stages in (1, 2, 3, 4):
        candidate = replace(tile, stages=stages)
        if shared_memory(arch, kernel, candidate, dim, itemsize) > arch.shared_memory:
            continue
        tiles = with_tile(arch, choice, stages=stages)
        launch_with(tiles, monkeypatch)
        found[stages] = attend(x, causal=True, allow_tf32=arithmetic == "tf32")
        assert_same_bits(attend(x, causal=True, allow_tf32=arithmetic == "tf32"), found[stages])
    assert len(found) >= 2
    for results in found.values():
        assert_same_bits(results, found[1])
