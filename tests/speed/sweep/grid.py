"""Which tiles are looked at, and why one is pruned before it is compiled. All is for 16-bit inputs."""

from __future__ import annotations

from itertools import product

from kernels.architecture import Architecture
from kernels.tiles import WHOLE, Tile, choose_tiles, columns, shared_memory

from ..occupancy import REGISTERS_OF_A_THREAD, THREADS

ITEMSIZE = 2
"""Bytes of an element of q, k, v. float32 has a table of its own, of tiles that do without tensor cores."""

NO_MEMORY = "may take more shared memory than a block has (the bound that kernels.tiles chooses by)"
NO_REGISTERS = f"its accumulators alone take more than {REGISTERS_OF_A_THREAD} registers a thread"


def grid(arch: Architecture, kernel: str, dim: int, quick: bool = False) -> list[Tile]:
    """The tiles that are looked at, before anything is pruned.

    Args:
        arch: what is compiled for.
        kernel: of `tests.offline.TILED`.
        dim: head dimension. At 256 the streamed keys may be 16; for dkdv they stay, and 16 are too few. At
            224 dkdv has 16 all the same: its last slice, of 32 columns, makes larger tiles spill.
        quick: a few of them.
    """
    slices = widths(arch, dim)
    if quick:
        return [Tile(*tile) for tile in product((64, 128), (32, 64, 128), (4, 8), (2,), slices)]
    keys = (16, 32, 64, 128) if dim == 224 or (dim == 256 and kernel != "dkdv") else (32, 64, 128)
    return [Tile(*tile) for tile in product((32, 64, 128), keys, (4, 8), (1, 2, 3), slices)]


def widths(arch: Architecture, dim: int) -> tuple[int, ...]:
    """Columns of a slice: whole, and 64 and 128 where those are several; 32 if only that makes equal ones.

    Before sm_90 operands wait in registers: there more than 128 columns at a time are not looked at, and 32
    are for 128 too.
    """
    several = tuple(width for width in (64, 128) if width < dim)
    if several and (dim % 64 == 32 or (arch.capability < 90 and dim == 128)):
        several = (32, *several)
    if arch.capability < 90 and dim > 128:
        return several
    return (*several, WHOLE)


def shipped_tile(arch: Architecture, kernel: str, dim: int) -> Tile:
    """That of `kernels.tiles`, for head dimensions D = Dv.

    Raises:
        RuntimeError: if none fits the architecture's shared memory.
    """
    tile: Tile = getattr(choose_tiles(arch, dim, dim, ITEMSIZE), kernel)
    return tile


def why_pruned(arch: Architecture, kernel: str, tile: Tile, dim: int) -> str:
    """Why a tile need not be compiled; empty if it is to be."""
    if shared_memory(arch, kernel, tile, dim, ITEMSIZE) > arch.shared_memory:
        return NO_MEMORY
    if accumulators(kernel, tile, dim) > REGISTERS_OF_A_THREAD:
        return NO_REGISTERS
    return ""


def accumulators(kernel: str, tile: Tile, dim: int) -> float:
    """Registers a thread of the float32 tiles that live at once: results, and S, and P beside dP."""
    BM, BN, padded = tile.BM, tile.BN, columns(dim, tile.width)
    elements = {
        "forward": BM * padded + BM * BN,
        "dkdv": 2 * BN * padded + 2 * BM * BN,
        "dq": BM * padded + 2 * BM * BN,
    }[kernel]
    return elements / (THREADS * tile.warps)
