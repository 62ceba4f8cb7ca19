"""How many blocks of a kernel a multiprocessor holds at once, and what allows no more.

The limits are those of the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; how
registers and shared memory are given out is that of NVIDIA's occupancy calculator (`cuda_occupancy.h` of the
CUDA toolkit): a multiprocessor has four parts, each with its own registers, and registers go to whole warps
in units of 256. Shared memory is counted as if the L1 cache had left the largest share to it.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
THREADS = 32
"""Of a warp."""

REGISTERS_OF_A_THREAD = 255
WARPS_OF_A_BLOCK = 32

REGISTER_UNIT = 256
"""Registers are given to a warp in multiples of this: 8 a thread."""

PARTS = 4
"""Of a multiprocessor; a warp lives in one, with its registers."""

SHARED_UNIT = 128
"""Bytes; shared memory is given to a block in multiples of this."""

RESERVED = KIB
"""Bytes of shared memory that the system keeps for itself for each block."""


@dataclass(frozen=True)
class Chip:
    """What one multiprocessor has.

    Attributes:
        name: of the architecture: "sm80".
        registers: of 32 bits.
        shared: bytes of shared memory.
        warps, blocks: most that are resident.
    """

    name: str
    shared: int
    warps: int
    blocks: int
    registers: int = 65536


CHIPS = {
    80: Chip("sm80", 164 * KIB, 64, 32),
    86: Chip("sm86", 100 * KIB, 48, 16),
    89: Chip("sm89", 100 * KIB, 48, 24),
    90: Chip("sm90", 228 * KIB, 64, 32),
}
"""By compute capability."""

LIMITS = ("registers", "shared memory", "warps", "blocks")


@dataclass(frozen=True)
class Residence:
    """Of a kernel on a multiprocessor.

    Attributes:
        blocks: that are resident at once; 0 if none fits.
        limits: of `LIMITS`: those that allow no more.
        occupancy: theoretical: resident warps over most warps.
    """

    blocks: int
    limits: tuple[str, ...]
    occupancy: float


def resident_blocks(chip: Chip, warps: int, registers: int, shared: int) -> Residence:
    """What a multiprocessor holds of blocks of a kernel.

    Args:
        chip: of `CHIPS`.
        warps: of a block.
        registers: of a thread.
        shared: bytes of shared memory of a block, static and dynamic, without what the system reserves.

    Raises:
        ValueError: if a block has no warp, or a number is negative.
    """
    if warps < 1 or registers < 0 or shared < 0:
        raise ValueError(
            f"{warps} warps, {registers} registers, {shared} bytes; at least 1, 0 and 0 are allowed"
        )
    allowed = {
        "registers": _by_registers(chip, warps, registers),
        "shared memory": chip.shared // _rounded_up(shared + RESERVED, SHARED_UNIT),
        "warps": chip.warps // warps if warps <= WARPS_OF_A_BLOCK else 0,
        "blocks": chip.blocks,
    }
    blocks = min(allowed.values())
    limits = tuple(name for name in LIMITS if allowed[name] == blocks)
    return Residence(blocks, limits, blocks * warps / chip.warps)


def _by_registers(chip: Chip, warps: int, registers: int) -> int:
    """Blocks whose registers fit."""
    if registers > REGISTERS_OF_A_THREAD:
        return 0
    of_a_warp = _rounded_up(max(registers, 1) * THREADS, REGISTER_UNIT)
    return chip.registers // PARTS // of_a_warp * PARTS // warps


def _rounded_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
