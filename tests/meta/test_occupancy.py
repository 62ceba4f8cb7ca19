"""Resident blocks and occupancy, by hand."""

from __future__ import annotations

import pytest

from kernels.architecture import SHARED_MEMORY
from tests.speed.occupancy import CHIPS, KIB, resident_blocks


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
