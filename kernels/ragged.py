"""Ragged batches: which tile each program works on, listed by the device itself.

The host knows the rows of all sequences together, not those of each, and must not wait for the device to
tell. It launches as many programs as there can be tiles, and a small kernel writes a table of the tiles
there are, heaviest first: a skewed batch then ends as evenly as it begins.

    tiles of BM rows <= total // BM + sequences that are not empty

Rows behind the last sequence are a sequence of their own, without any row on the other side: what
attention gives them (out 0, lse -inf, gradients 0) is written like everything else, and nothing of
theirs is read.
"""

import triton
import triton.language as tl

FIELDS = tl.constexpr(5)
"""Of an entry, int32: first row of the tile within its sequence, the sequence's first row and length, and
the first row and length of the same sequence on the other side. All 0: no tile."""

SEQUENCES = 1024
"""That the table's kernel compares at a time."""


@triton.jit
def sequence(CuSeqlens, s, batch, total):
    """First row and length of sequence s; s = batch: of the rows behind the last one.

    Within [0, total] whatever the memory says: offsets that break the rules must not lead outside.
    """
    start = tl.load(CuSeqlens + s, mask=s <= batch, other=0)
    end = tl.load(CuSeqlens + s + 1, mask=s < batch, other=total)
    start = tl.minimum(tl.maximum(start, 0), total)
    end = tl.minimum(tl.maximum(end, start), total)
    return start, tl.where(s <= batch, end - start, 0)


@triton.jit
def other_side(CuSeqlens, s, batch, total):
    """First row and length of sequence s where it meets the other tensor; none behind the last one."""
    start, length = sequence(CuSeqlens, s, batch, total)
    return start, tl.where(s < batch, length, 0)


@triton.jit(do_not_specialize=["batch", "total", "total_other", "n_tiles"])
def list_tiles(Tiles, CuSeqlens, CuSeqlensOther, batch, total, total_other, n_tiles,
               ROWS: tl.constexpr, LAST_FIRST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Tiles (n_tiles, FIELDS): tiles of ROWS rows, those with the longest other side first.

    LAST_FIRST: within a sequence too, the last tile first (causal: it sees the most keys). One program
    per sequence, and one for the rows behind the last, which also clears the rest of the table. A
    program finds its place by comparing its sequence with all others: no sort, no second pass.
    """
    s = tl.program_id(0)
    first, length = sequence(CuSeqlens, s, batch, total)
    first_other, length_other = other_side(CuSeqlensOther, s, batch, total_other)
    before = tl.full([], 0, tl.int64)  # overlapping sequences, against the rules, may have more than 2**31
    all_tiles = tl.full([], 0, tl.int64)
    for start in range(0, batch + 1, BLOCK):
        t = start + tl.arange(0, BLOCK)
        _, rows = sequence(CuSeqlens, t, batch, total)
        _, rows_other = other_side(CuSeqlensOther, t, batch, total_other)
        heavier = (rows_other > length_other) | ((rows_other == length_other) & (t < s))
        n = tl.cdiv(rows, ROWS).to(tl.int64)
        before += tl.sum(tl.where(heavier, n, 0))
        all_tiles += tl.sum(n)

    own_tiles = tl.cdiv(length, ROWS)
    for start in range(0, own_tiles, BLOCK):
        i = start + tl.arange(0, BLOCK)
        entry = Tiles + (before + i) * FIELDS
        inside = (i < own_tiles) & (before + i < n_tiles)
        tile = own_tiles - 1 - i if LAST_FIRST else i
        tl.store(entry, tile * ROWS, mask=inside)
        tl.store(entry + 1, first + 0 * i, mask=inside)
        tl.store(entry + 2, length + 0 * i, mask=inside)
        tl.store(entry + 3, first_other + 0 * i, mask=inside)
        tl.store(entry + 4, length_other + 0 * i, mask=inside)
    if s == batch:
        for rest in range(all_tiles * FIELDS, n_tiles * FIELDS, BLOCK):
            free = rest + tl.arange(0, BLOCK)
            tl.store(Tiles + free, tl.zeros([BLOCK], tl.int32), mask=free < n_tiles * FIELDS)


@triton.jit
def listed_tile(Tiles, number):
    """An entry of the table: first row of the tile, then first row and length on either side."""
    entry = Tiles + number.to(tl.int64) * FIELDS
    first, length = tl.load(entry + 1), tl.load(entry + 2)
    first_other, length_other = tl.load(entry + 3), tl.load(entry + 4)
    return tl.load(entry), first.to(tl.int64), length, first_other.to(tl.int64), length_other
