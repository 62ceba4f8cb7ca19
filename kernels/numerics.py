"""Device code shared by the kernels: exponents, rounding, visibility."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

STRIDES_AND_LENGTHS = [
    *(f"stride_{tensor}{dim}" for tensor in ("q", "o", "do", "dq", "dl", "l") for dim in "bhmd"),
    *(f"stride_{tensor}{dim}" for tensor in ("k", "v", "dk", "dv") for dim in "bhnd"),
    "Hq", "Hkv", "group", "Sq", "Sk", "batch",
]  # fmt: skip
"""Integer arguments that a kernel is not compiled anew for; see `row_pointers`."""


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


@triton.constexpr_function
def n_slices(DIM, WIDTH):
    """Slices of a head dimension: all WIDTH columns wide but for the last."""
    return -(-DIM // WIDTH)


@triton.constexpr_function
def slice_width(i, DIM, WIDTH):
    """Columns of slice i: of the last the power of two, at least 16, that holds what is left."""
    left = DIM - i * WIDTH
    return WIDTH if left >= WIDTH else max(16, 1 << (left - 1).bit_length())


@triton.jit
def row_pointers(base, rows, stride_row, VECTOR: tl.constexpr):
    """Pointers [len(rows)] to rows. 64-bit offsets.

    VECTOR > 1 promises a last dimension without gaps and all else in multiples of VECTOR elements (16
    bytes). The compiler learns it from a division and multiplication that change nothing, and emits
    16-byte accesses; Triton's own specialisation of integer arguments would compile each kernel anew
    for every pattern of divisible strides and lengths.
    """
    return base + rows.to(tl.int64) * row_step(stride_row, VECTOR)


@triton.jit
def row_step(stride_row, VECTOR: tl.constexpr):
    """From one row to the next, in 64 bits."""
    return (stride_row // VECTOR * VECTOR).to(tl.int64)


@triton.jit
def slice_pointers(rows, i: tl.constexpr, stride_dim, DIM: tl.constexpr, WIDTH: tl.constexpr,
                   VECTOR: tl.constexpr):  # fmt: skip
    """Pointers [len(rows), columns] to slice i of rows, from those of the rows."""
    dims = i * WIDTH + tl.arange(0, slice_width(i, DIM, WIDTH))
    if VECTOR > 1:
        return rows[:, None] + dims[None, :]
    else:
        return rows[:, None] + (dims.to(tl.int64) * stride_dim)[None, :]


@triton.jit
def load_slice(pointers, i: tl.constexpr, rows, n_rows, stride_dim, DIM: tl.constexpr, WIDTH: tl.constexpr,
               VECTOR: tl.constexpr, CHECK_ROWS: tl.constexpr):  # fmt: skip
    """Slice i of rows; 0 past n_rows and past DIM."""
    where = slice_pointers(pointers, i, stride_dim, DIM, WIDTH, VECTOR)
    columns: tl.constexpr = slice_width(i, DIM, WIDTH)
    inside = (i * WIDTH + tl.arange(0, columns) < DIM)[None, :]
    if CHECK_ROWS:
        if i * WIDTH + columns <= DIM:
            return tl.load(where, mask=(rows < n_rows)[:, None], other=0.0)
        else:
            return tl.load(where, mask=(rows < n_rows)[:, None] & inside, other=0.0)
    else:
        if i * WIDTH + columns <= DIM:
            return tl.load(where)
        else:
            return tl.load(where, mask=inside, other=0.0)


@triton.jit
def load_tile(pointers, rows, n_rows, stride_dim, DIM: tl.constexpr, WIDTH: tl.constexpr,
              VECTOR: tl.constexpr, CHECK_ROWS: tl.constexpr, EMULATE_BF16: tl.constexpr):  # fmt: skip
    """Rows of a tensor as operands: a tile [len(rows), columns] for each slice of the head dimension."""
    tiles = ()
    for i in tl.static_range(n_slices(DIM, WIDTH)):
        x = load_slice(pointers, i, rows, n_rows, stride_dim, DIM, WIDTH, VECTOR, CHECK_ROWS)
        tiles = tiles + (operand(x, EMULATE_BF16),)
    return tiles


@triton.jit
def zeros(rows: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """A float32 tile [rows, columns] of zeros for each slice."""
    tiles = ()
    for i in tl.static_range(n_slices(DIM, WIDTH)):
        tiles = tiles + (tl.zeros([rows, slice_width(i, DIM, WIDTH)], tl.float32),)
    return tiles


@triton.jit
def scores(a, b, DIM: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """a b^T [rows of a, rows of b], summed over the slices."""
    x = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    for i in tl.static_range(1, n_slices(DIM, WIDTH)):
        x = tl.dot(a[i], tl.trans(b[i]), x, input_precision=PRECISION)
    return x


@triton.jit
def add_product(acc, a, b, DIM: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b, slice by slice of b."""
    tiles = ()
    for i in tl.static_range(n_slices(DIM, WIDTH)):
        tiles = tiles + (tl.dot(a, b[i], acc[i], input_precision=PRECISION),)
    return tiles


@triton.jit
def times(tiles, x, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Each slice times x."""
    found = ()
    for i in tl.static_range(n_slices(DIM, WIDTH)):
        found = found + (tiles[i] * x,)
    return found


@triton.jit
def store_slice(pointers, x, i: tl.constexpr, rows, n_rows, stride_dim, DIM: tl.constexpr,
                WIDTH: tl.constexpr, VECTOR: tl.constexpr, EMULATE_BF16: tl.constexpr):  # fmt: skip
    """A float32 slice, rounded to the dtype of the memory, up to n_rows and DIM."""
    where = slice_pointers(pointers, i, stride_dim, DIM, WIDTH, VECTOR)
    columns = i * WIDTH + tl.arange(0, slice_width(i, DIM, WIDTH))
    x = rounded(x, where.dtype.element_ty, EMULATE_BF16)
    if EMULATE_BF16:
        x = (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    tl.store(where, x, mask=(rows < n_rows)[:, None] & (columns < DIM)[None, :])


@triton.jit
def store_tile(pointers, tiles, rows, n_rows, stride_dim, DIM: tl.constexpr, WIDTH: tl.constexpr,
               VECTOR: tl.constexpr, EMULATE_BF16: tl.constexpr):  # fmt: skip
    """All slices of rows."""
    for i in tl.static_range(n_slices(DIM, WIDTH)):
        store_slice(pointers, tiles[i], i, rows, n_rows, stride_dim, DIM, WIDTH, VECTOR, EMULATE_BF16)


@triton.jit
def is_visible(rows, keys, Sq, Sk, CAUSAL: tl.constexpr):
    """Whether query i sees key j, for broadcastable indices: j < Sk and, causal, j <= i + Sk - Sq."""
    if CAUSAL:
        return keys <= tl.minimum(rows + (Sk - Sq), Sk - 1)
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
