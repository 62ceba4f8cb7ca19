"""Device code shared by the kernels: exponents, rounding, visibility."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

STRIDES_AND_LENGTHS = [
    *(f"stride_{tensor}{dim}" for tensor in ("q", "o", "do", "dq", "dl", "l") for dim in "bhmd"),
    *(f"stride_{tensor}{dim}" for tensor in ("k", "v", "dk", "dv") for dim in "bhnd"),
    "Hq", "Hkv", "group", "Sq", "Sk", "batch",
]  # fmt: skip
"""Integer arguments that a kernel is not compiled anew for; see `tile_pointers`."""


@triton.jit
def operand(x, EMULATE_BF16: tl.constexpr):
    """A loaded tile as an operand of a product: as it is, but bfloat16 raised where it is interpreted.

    The interpreter multiplies the bit patterns of bfloat16 operands. float32 holds the same values, and
    products of them are exact there as on a tensor core. The bits are moved by hand: the interpreter's
    cast is wrong for subnormal numbers.
    """
    if EMULATE_BF16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def rounded(x, DTYPE: tl.constexpr, EMULATE_BF16: tl.constexpr):
    """A float32 tile rounded to DTYPE, to nearest, ties to even.

    The interpreter truncates when it casts to bfloat16: there the bits are rounded by hand, and the
    tile stays float32 with bfloat16's values.
    """
    if EMULATE_BF16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(DTYPE)


@triton.jit
def head_base(tensor, b, stride_b, h, stride_h, VECTOR: tl.constexpr):
    """Pointer to one head of one batch entry. 64-bit offsets: b and h are int64."""
    return tensor + (b * stride_b + h * stride_h) // VECTOR * VECTOR


@triton.jit
def tile_pointers(base, rows, stride_row, stride_dim, BLOCK_DIM: tl.constexpr, VECTOR: tl.constexpr):
    """Pointers [len(rows), BLOCK_DIM]. 64-bit offsets.

    VECTOR > 1 promises a last dimension without gaps and all else in multiples of VECTOR elements (16
    bytes). The compiler learns it from a division and multiplication that change nothing, and emits
    16-byte accesses; Triton's own specialisation of integer arguments would compile each kernel anew
    for every pattern of divisible strides and lengths.
    """
    dims = tl.arange(0, BLOCK_DIM)
    if VECTOR > 1:
        return base + (rows.to(tl.int64) * (stride_row // VECTOR * VECTOR))[:, None] + dims[None, :]
    else:
        columns = dims.to(tl.int64) * stride_dim
        return base + (rows.to(tl.int64) * stride_row)[:, None] + columns[None, :]


@triton.jit
def load_tile(base, rows, stride_row, stride_dim, n_rows, DIM: tl.constexpr,
              BLOCK_DIM: tl.constexpr, VECTOR: tl.constexpr, CHECK_ROWS: tl.constexpr):  # fmt: skip
    """Rows of a tensor as a tile [len(rows), BLOCK_DIM]; 0 past n_rows and past DIM."""
    pointers = tile_pointers(base, rows, stride_row, stride_dim, BLOCK_DIM, VECTOR)
    inside = (tl.arange(0, BLOCK_DIM) < DIM)[None, :]
    if CHECK_ROWS:
        if DIM == BLOCK_DIM:
            return tl.load(pointers, mask=(rows < n_rows)[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=(rows < n_rows)[:, None] & inside, other=0.0)
    else:
        if DIM == BLOCK_DIM:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store_tile(pointers, x, rows, n_rows, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
               EMULATE_BF16: tl.constexpr):  # fmt: skip
    """A float32 tile [len(rows), BLOCK_DIM], rounded to the dtype of the memory, up to n_rows and DIM."""
    mask = (rows < n_rows)[:, None] & (tl.arange(0, BLOCK_DIM) < DIM)[None, :]
    x = rounded(x, pointers.dtype.element_ty, EMULATE_BF16)
    if EMULATE_BF16:
        x = (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    tl.store(pointers, x, mask=mask)


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
