"""Tile sizes: a table by kernel and head dimension, for 16-bit and for float32 inputs.

Each entry lists choices from best to safest; the first whose shared memory fits the architecture's block
is used. What that chooses for sm_80, 86, 89 and 90 is compiled offline by tests/test_compile.py; what spills
within a loop over tiles is listed with its reason.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .architecture import KIB, Architecture
from .numerics import n_slices, slice_width

WHOLE = 256
"""Columns of a slice that holds any head dimension."""


@dataclass(frozen=True)
class Tile:
    """One kernel's tile and how it is compiled.

    Attributes:
        BM: query rows.
        BN: key rows.
        warps: of 32 threads each.
        stages: depth of the software pipeline.
        width: columns of a slice of the head dimension; the last slice is as narrow as what is left.
    """

    BM: int
    BN: int
    warps: int
    stages: int
    width: int = WHOLE


@dataclass(frozen=True)
class Tiles:
    """The tiles of the three kernels: forward, dK/dV, dQ."""

    forward: Tile
    dkdv: Tile
    dq: Tile


Table = dict[str, dict[int, list[tuple[int, ...]]]]
"""By kernel and the largest head dimension that an entry is for: (BM, BN, warps, stages), and the width where
it is not whole; from best to safest."""

# mma.sync takes its left operand from registers, and warps split an accumulator into rows alone only if it
# has no more columns than rows: otherwise they lie beside each other too, and each loads what the other has.
# So slices are mostly no wider than a tile is high. 80 and 96 are 64 + 16 and 3 x 32 instead of a padded 128.
_HALF: Table = {
    "forward": {
        16: [(128, 64, 4, 3)],
        32: [(128, 64, 4, 3)],
        64: [(128, 64, 4, 3)],
        80: [(128, 64, 4, 3, 64)],
        96: [(128, 64, 4, 3, 32)],
        128: [(128, 32, 4, 3, 64)],
        192: [(64, 64, 4, 2, 64)],
        256: [(64, 64, 4, 2, 64), (64, 32, 4, 2, 64)],
    },
    "dkdv": {
        16: [(64, 64, 4, 2)],
        32: [(64, 64, 4, 2)],
        64: [(64, 64, 4, 2)],
        80: [(64, 64, 4, 2, 64)],
        96: [(64, 64, 4, 2, 32)],
        128: [(32, 64, 4, 2, 64)],
        160: [(32, 64, 4, 2, 64)],
        192: [(64, 32, 4, 2, 64)],
        224: [(32, 16, 4, 2, 64)],
        256: [(64, 32, 4, 2, 64), (32, 32, 4, 2, 64)],
    },
    "dq": {
        16: [(64, 64, 4, 2)],
        32: [(64, 64, 4, 2)],
        64: [(128, 32, 4, 3)],
        80: [(128, 32, 4, 3, 64)],
        96: [(128, 32, 4, 3, 32)],
        128: [(128, 32, 4, 3, 32), (64, 32, 4, 3, 64)],
        192: [(64, 64, 4, 2, 64), (64, 32, 4, 2, 64)],
        256: [(64, 32, 4, 2, 64), (64, 16, 4, 2, 64)],
    },
}

# float32 products do not use tensor cores: small tiles, or the operands fill the registers.
_SINGLE: Table = {
    "forward": {
        16: [(64, 32, 4, 2)],
        32: [(64, 32, 4, 2)],
        64: [(64, 32, 8, 2)],
        128: [(32, 16, 4, 2, 64)],
        256: [(32, 16, 8, 2)],
    },
    "dkdv": {
        16: [(32, 32, 4, 2)],
        32: [(32, 32, 4, 2)],
        64: [(32, 32, 4, 2)],
        128: [(16, 32, 8, 2)],
        256: [(16, 32, 8, 1), (16, 16, 4, 1)],
    },
    "dq": {
        16: [(32, 32, 4, 2)],
        32: [(32, 32, 4, 2)],
        64: [(32, 32, 4, 2)],
        128: [(32, 32, 8, 2)],
        256: [(32, 16, 8, 1), (16, 16, 4, 1)],
    },
}

# On sm_90 products run from shared memory while they are waited for, so that Q takes no registers: smaller
# tiles, two blocks of which share a multiprocessor, overlap one's exponentials with the other's products. At
# the largest head dimensions one block of 8 warps is ahead, in the forward.
_HALF_SM90: Table = {
    "forward": {
        16: [(128, 64, 4, 3)],
        32: [(128, 64, 4, 3)],
        64: [(128, 64, 4, 3)],
        80: [(128, 64, 4, 3, 64)],
        96: [(128, 64, 4, 3, 64)],
        128: [(64, 64, 4, 3)],
        192: [(128, 64, 8, 3, 64)],
        256: [(128, 64, 8, 2)],
    },
    "dkdv": {
        16: [(64, 64, 4, 2)],
        32: [(64, 64, 4, 2)],
        64: [(64, 64, 4, 3)],
        80: [(64, 64, 4, 1, 64)],
        96: [(64, 64, 4, 1, 64)],
        128: [(64, 64, 4, 2)],
        192: [(32, 128, 8, 1, 64)],
        256: [(64, 64, 8, 1, 128)],
    },
    "dq": {
        16: [(64, 64, 4, 2)],
        32: [(64, 64, 4, 2)],
        64: [(64, 64, 4, 3)],
        80: [(64, 64, 4, 3, 64)],
        96: [(64, 64, 4, 3, 64)],
        128: [(128, 64, 8, 3)],
        192: [(128, 64, 8, 2, 128)],
        256: [(64, 64, 4, 2, 128)],
    },
}

TABLES: dict[str, Table] = {
    "16 bit": _HALF,
    "16 bit, sm_90": _HALF_SM90,
    "32 bit": _SINGLE,
}
"""By what they are for."""

# The interpreter takes a millisecond an operation whatever the size: small tiles, so that short (cheap)
# sequences span several of them; BM and BN differ, so that a mix-up shows; and slices of 32 columns, so that
# small head dimensions have several too.
_INTERPRETER = {"forward": (32, 16, 1, 1, 32), "dkdv": (16, 32, 1, 1, 32), "dq": (32, 16, 1, 1, 32)}


def columns(dim: int, width: int) -> int:
    """Of all slices of a head dimension, padding included."""
    return sum(slice_width(i, dim, width) for i in range(n_slices(dim, width)))


def shared_memory(arch: Architecture, kernel: str, tile: Tile, head_dim: int, itemsize: int) -> int:
    """Bytes of shared memory that a tile may take, seen from above.

    Triton keeps what its pipelined loop loads in a ring of buffers: one a stage where products read
    shared memory while they run (wgmma, tcgen05), one less where they read registers (mma.sync,
    FMA). Beside the ring lie the operands that stay, P or an operand of two products once more in
    another layout, and 8 float32 a row; in the forward 8 more, l in parts.
    """
    BM, BN, dim = tile.BM, tile.BN, columns(head_dim, tile.width)
    buffers = tile.stages if 90 <= arch.capability < 120 else max(tile.stages - 1, 1)
    ring, kept = {
        "forward": (2 * BN * dim, BM * dim + BM * BN),
        "dkdv": (2 * BM * dim, 2 * BN * dim + BM * max(BN, dim)),
        "dq": (2 * BN * dim, 2 * BM * dim + BN * max(BM, dim)),
    }[kernel]
    per_row = 64 if kernel == "forward" else 32
    return itemsize * (buffers * ring + kept) + per_row * BM


def table_of(arch: Architecture, itemsize: int) -> Table:
    """The table for an architecture and a dtype's size in bytes."""
    if itemsize == 4:
        return TABLES["32 bit"]
    return TABLES["16 bit, sm_90" if 90 <= arch.capability < 100 else "16 bit"]


@functools.cache
def choose_tiles(arch: Architecture, head_dim: int, head_dim_v: int, itemsize: int) -> Tiles:
    """The tiles for an architecture, head dimensions D and Dv and a dtype's size in bytes (2 or 4).

    Raises:
        RuntimeError: if none fits the architecture's shared memory.
    """
    if arch.interpreted:
        return Tiles(**{kernel: Tile(*tile) for kernel, tile in _INTERPRETER.items()})
    dim = max(head_dim, head_dim_v)
    table = table_of(arch, itemsize)

    def first_that_fits(kernel: str) -> Tile:
        by_dim = table[kernel]
        for choice in by_dim[min(largest for largest in by_dim if largest >= dim)]:
            tile = Tile(*choice)
            if shared_memory(arch, kernel, tile, dim, itemsize) <= arch.shared_memory:
                return tile
        raise RuntimeError(
            f"no {kernel} tile for head dimension {dim} fits the {arch.shared_memory // KIB} KiB of"
            f" shared memory of {arch.name}"
        )

    return Tiles(*(first_that_fits(kernel) for kernel in ("forward", "dkdv", "dq")))
