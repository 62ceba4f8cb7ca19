"""Sums over programs: dq in float32 in memory, to which every tile of keys adds what it gives."""

import triton
import triton.language as tl

from .numerics import LOG2_E, n_slices, slice_width

CLEARED = tl.constexpr(1024)
"""Elements that a program sets to 0 at a time."""


@triton.constexpr_function
def padded_dim(DIM, WIDTH):
    """Columns of all slices."""
    return sum(slice_width(i, DIM, WIDTH) for i in range(n_slices(DIM, WIDTH)))


@triton.jit
def place(rows, dims, COLUMNS: tl.constexpr):
    """Where the float32 sums [rows, dims] of dq lie: blocks of 8 x 8.

    An accumulator of mma.sync or wgmma gives a warp 8 x 8 elements of such a block, two to a lane: the 32
    first ones lie together, and then the 32 second ones, so that a warp adds 128 bytes in a row.
    """
    of_row = rows // 8 * (8 * COLUMNS) + rows % 8 * 4
    of_dim = dims // 8 * 64 + dims % 2 * 32 + dims % 8 // 2
    return of_row[:, None] + of_dim[None, :]


@triton.jit
def add(where, x, INTERPRETED: tl.constexpr):
    """Like tl.atomic_add, relaxed. In PTX, so that the tile stays in the registers in which a product left
    it: Triton would bring it into another layout first, through shared memory."""
    if INTERPRETED:
        tl.atomic_add(where, x, sem="relaxed")
    else:
        tl.inline_asm_elementwise("red.relaxed.gpu.global.add.f32 [$1], $2; mov.b32 $0, 0;", "=r,l,r",
                                  [where, x.to(tl.int32, bitcast=True)], dtype=tl.int32, is_pure=False,
                                  pack=1)  # fmt: skip


@triton.jit
def add_to_sums(Sums, dS, k, D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
                INTERPRETED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Adds dS^T k [BM, D] to the sums of a tile of query rows."""
    COLUMNS: tl.constexpr = padded_dim(D, WIDTH)
    for i in tl.static_range(n_slices(D, WIDTH)):
        dims = i * WIDTH + tl.arange(0, slice_width(i, D, WIDTH))
        part = tl.dot(tl.trans(dS), k[i], input_precision=PRECISION)
        add(Sums + place(tl.arange(0, BM), dims, COLUMNS), part, INTERPRETED)


@triton.jit
def prepare(delta, lse_base, lse2_base, delta_base, Sums, n_sums, rows, start_m, Sq, padded_rows,
            BM: tl.constexpr):  # fmt: skip
    """Lse, in units of log 2, and delta as the loops want them; the sums are 0.

    Rows that see no key get delta 0, whatever flows back there. Rows past Sq, up to whole tiles, get an lse
    of inf and delta 0.
    """
    lse = tl.load(lse_base + rows, mask=rows < Sq, other=float("inf"))
    delta = tl.where(lse == float("-inf"), 0.0, delta)
    tl.store(lse2_base + rows, lse * LOG2_E, mask=rows < padded_rows)
    tl.store(delta_base + rows, delta, mask=rows < padded_rows)
    if start_m + BM >= Sq:
        for past in range(start_m + BM, padded_rows, BM):
            more = past + tl.arange(0, BM)
            tl.store(lse2_base + more, tl.full([BM], float("inf"), tl.float32), mask=more < padded_rows)
            tl.store(delta_base + more, tl.zeros([BM], tl.float32), mask=more < padded_rows)
    first = tl.program_id(0).to(tl.int64) * CLEARED
    for start in range(first, n_sums.to(tl.int64), tl.num_programs(0).to(tl.int64) * CLEARED):
        some = start + tl.arange(0, CLEARED)
        tl.store(Sums + some, tl.zeros([CLEARED], tl.float32), mask=some < n_sums)
