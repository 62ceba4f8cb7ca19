"""Device code shared by the kernels: exponents, rounding, visibility."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def operand(x, EMULATE_BF16: tl.constexpr):
    """A loaded tile as an operand of a product: as it is, but bfloat16 raised where it is interpreted.

    The interpreter multiplies the bit patterns of bfloat16 operands. float32 holds the same values, and
    products of them are exact there as on a tensor core.
    """
    if EMULATE_BF16:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def rounded(x, DTYPE: tl.constexpr, EMULATE_BF16: tl.constexpr):
    """A float32 tile rounded to DTYPE, to nearest, ties to even.

    The interpreter truncates when it casts to bfloat16: there the bits are rounded by hand, and the
    tile stays float32 with bfloat16's values, which a cast then keeps.
    """
    if EMULATE_BF16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(DTYPE)


@triton.jit
def stored(pointers, x, mask, EMULATE_BF16: tl.constexpr):
    """Store a float32 tile, rounded to the dtype of the memory."""
    x = rounded(x, pointers.dtype.element_ty, EMULATE_BF16)
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def load_tile(base, rows, stride_row, stride_dim, n_rows,
              DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, CHECK_ROWS: tl.constexpr):  # fmt: skip
    """Rows of a tensor as a tile [len(rows), BLOCK_DIM]; 0 past n_rows and past DIM. 64-bit offsets."""
    dims = tl.arange(0, BLOCK_DIM)
    pointers = base + rows.to(tl.int64)[:, None] * stride_row + dims.to(tl.int64)[None, :] * stride_dim
    if CHECK_ROWS:
        if DIM == BLOCK_DIM:
            return tl.load(pointers, mask=(rows < n_rows)[:, None], other=0.0)
        else:
            mask = (rows < n_rows)[:, None] & (dims < DIM)[None, :]
            return tl.load(pointers, mask=mask, other=0.0)
    else:
        if DIM == BLOCK_DIM:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)


@triton.jit
def store_tile(base, x, rows, stride_row, stride_dim, n_rows,
               DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, EMULATE_BF16: tl.constexpr):  # fmt: skip
    """A float32 tile [len(rows), BLOCK_DIM] to rows of a tensor, up to n_rows and DIM."""
    dims = tl.arange(0, BLOCK_DIM)
    pointers = base + rows.to(tl.int64)[:, None] * stride_row + dims.to(tl.int64)[None, :] * stride_dim
    mask = (rows < n_rows)[:, None] & (dims < DIM)[None, :]
    stored(pointers, x, mask, EMULATE_BF16)


@triton.jit
def is_visible(rows, keys, Sq, Sk, CAUSAL: tl.constexpr):
    """Whether query i sees key j, for broadcastable indices: j < Sk and, causal, j <= i + Sk - Sq."""
    if CAUSAL:
        return (keys < Sk) & (keys <= rows + (Sk - Sq))
    else:
        return keys < Sk + 0 * rows


@triton.jit
def key_range(start_m, Sq, Sk, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """Keys that a tile of query rows reads: [0, full) whole tiles that all rows see, [full, end) the rest."""
    if CAUSAL:
        seen_by_first = tl.minimum(tl.maximum(start_m + 1 + (Sk - Sq), 0), Sk)
        end = tl.minimum(tl.maximum(start_m + BM + (Sk - Sq), 0), Sk)
    else:
        seen_by_first = Sk
        end = Sk
    return seen_by_first // BN * BN, end
