"""The backward in one pass: dk, dv, dq by five products, where the pair of kernels of `backward` takes seven.

    P  = exp(scale S - lse),  dP = dO V^T,  dS = P (dP - delta)       (Algorithm 2 of FlashAttention-2)
    dv = P^T dO,  dk = scale dS^T q                          (in registers, one program per tile of keys)
    dq = scale sum over the tiles of keys of dS K            (in memory, in float32; see `sums`)

Tiles of keys add to dq in the order in which they come to it: its last bits differ from run to run, and this
is what `deterministic=False` permits. An order was tried, each tile waiting for the one before: then the
programs of a head follow one another, and nothing is left of the lead over the pair.
"""

import triton
import triton.language as tl

from .backward import plus_zero, where_live
from .numerics import (
    LOG2_E,
    STRIDES_AND_LENGTHS,
    add_product,
    head_base,
    is_visible,
    load_tile,
    n_slices,
    rounded,
    row_pointers,
    row_step,
    scores,
    slice_width,
    store_tile,
    times,
    zeros,
)
from .position import key_tile, query_tile
from .ragged import listed_tile
from .sums import add_to_sums, padded_dim, place


@triton.jit
def load_row(base, rows, Sq, other, RAGGED: tl.constexpr):
    """A value per query row [len(rows)]; a dense batch has rows enough for whole tiles."""
    if RAGGED:
        return tl.load(base + rows, mask=rows < Sq, other=other)
    else:
        return tl.load(base + rows)


@triton.jit
def first_row_of_sums(Tiles, heads, first_row, BM: tl.constexpr):
    """Of the sequence of this program's tile: each begins with a tile of its own."""
    _, _, _, _, _, s = listed_tile(Tiles, tl.program_id(0) // heads)
    return (first_row // BM + s) * BM


@triton.jit
def gather_gradients(
    dk, dv, k, v, q_base, do_base, lse_base, delta_base, Sums, start, end, first, keys, Sq, Sk,
    exponent_scale, stride_qm, stride_qd, stride_dom, stride_dod,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, MASKED: tl.constexpr, VECTOR: tl.constexpr,
    INTERPRETED: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
):  # fmt: skip
    """The query rows [start, end), in whole tiles: adds what they give to dk and dv of a tile of keys, and to
    their dq what that gives to them.

    Rows past Sq need no mask: q and dO are 0 there and the lse is inf, so that P is 0. Rows before `first`
    see no key at all: what q and dO hold there, NaN perhaps, is never read.
    """
    COLUMNS: tl.constexpr = padded_dim(D, WIDTH)
    rows_of_tile = start + tl.arange(0, BM)
    q_rows = row_pointers(q_base, rows_of_tile, stride_qm, VECTOR)
    do_rows = row_pointers(do_base, rows_of_tile, stride_dom, VECTOR)
    Sums += tl.cast(start, tl.int64) * COLUMNS
    for i in range(start, end, BM):
        rows = i + tl.arange(0, BM)
        read = tl.where(rows >= first, rows, Sq) if MASKED else rows
        q = load_tile(q_rows, read, Sq, stride_qd, D, WIDTH, VECTOR, True, EMULATE_BF16)  # [BM, D]
        dO = load_tile(do_rows, read, Sq, stride_dod, DV, WIDTH, VECTOR, True, EMULATE_BF16)  # [BM, DV]
        lse = load_row(lse_base, rows, Sq, float("inf"), RAGGED)  # in units of log 2
        delta = load_row(delta_base, rows, Sq, 0.0, RAGGED)
        S = scores(k, q, D, WIDTH, PRECISION)  # [BN, BM]
        P = tl.exp2(S * exponent_scale - lse[None, :])
        if MASKED:
            visible = is_visible(rows[None, :], keys[:, None], Sq, Sk, CAUSAL)
            P = tl.where(visible, P, 0.0)
        dv = add_product(dv, rounded(P, dO[0].dtype, EMULATE_BF16), dO, DV, WIDTH, PRECISION)
        dP = scores(v, dO, DV, WIDTH, PRECISION)  # [BN, BM]
        dS = rounded(P * (dP - delta[None, :]), q[0].dtype, EMULATE_BF16)
        dk = add_product(dk, dS, q, D, WIDTH, PRECISION)  # [BN, D]
        add_to_sums(Sums, dS, k, D, WIDTH, BM, INTERPRETED, PRECISION)
        q_rows += row_step(stride_qm, VECTOR) * BM
        do_rows += row_step(stride_dom, VECTOR) * BM
        Sums += BM * COLUMNS
    return dk, dv


@triton.jit(do_not_specialize=STRIDES_AND_LENGTHS)
def attention_backward_fused(
    Q, K, V, DOut, Lse, Delta, Sums, DK, DV_, Tiles,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd,
    stride_dvb, stride_dvh, stride_dvn, stride_dvd, stride_lb, stride_lh,
    scale, Hkv, group, Sq, Sk, padded_rows,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    VECTOR: tl.constexpr, INTERPRETED: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
):  # fmt: skip
    """DK (B, Hkv, Sk, D), DV_ (B, Hkv, Sk, DV) and the sums of dq; Lse and Delta as `prepare` leaves them.

    Grid: B * Hkv * ceil(Sk / BN). Ragged: see `position`.
    """
    b_q, b_k, h_kv, start_n, Sq, Sk = key_tile(Tiles, Hkv, Sq, Sk, BN, RAGGED)
    keys = start_n + tl.arange(0, BN)

    k_base = head_base(K, b_k, stride_kb, h_kv, stride_kh, VECTOR)
    v_base = head_base(V, b_k, stride_vb, h_kv, stride_vh, VECTOR)
    k_rows = tl.where(Sq > 0, Sk, 0)  # what lies behind the last sequence is not read
    k = load_tile(row_pointers(k_base, keys, stride_kn, VECTOR), keys, k_rows, stride_kd, D, WIDTH, VECTOR,
                  True, EMULATE_BF16)  # fmt: skip
    v = load_tile(row_pointers(v_base, keys, stride_vn, VECTOR), keys, k_rows, stride_vd, DV, WIDTH, VECTOR,
                  True, EMULATE_BF16)  # fmt: skip
    exponent_scale = scale * LOG2_E

    # Row i sees key j iff i >= j - (Sk - Sq): from `start` on a row sees some of the tile, from `full` on all
    # of it, both in whole tiles of rows, which is how the sums lie.
    end = tl.cdiv(Sq, BM) * BM
    if CAUSAL:
        first = tl.maximum(Sq - Sk, 0)
        start = tl.minimum(tl.maximum(start_n - (Sk - Sq), 0) // BM * BM, end)
        full = tl.minimum(tl.cdiv(tl.maximum(start_n + BN - 1 - (Sk - Sq), 0), BM) * BM, end)
    else:
        first = 0
        start = 0
        full = 0
    if start_n + BN > Sk:  # keys past the end would give to dq
        full = end
    dk = zeros(BN, D, WIDTH)
    dv = zeros(BN, DV, WIDTH)
    for g in range(group):
        h = h_kv * group + g
        q_base = head_base(Q, b_q, stride_qb, h, stride_qh, VECTOR)
        do_base = head_base(DOut, b_q, stride_dob, h, stride_doh, VECTOR)
        lse_base = head_base(Lse, b_q, stride_lb, h, stride_lh, 1)
        delta_base = head_base(Delta, b_q, stride_lb, h, stride_lh, 1)
        if RAGGED:
            rows_before = h * padded_rows + first_row_of_sums(Tiles, Hkv, b_q, BM)
        else:
            rows_before = (b_q * Hkv * group + h) * padded_rows
        sums = Sums + rows_before * padded_dim(D, WIDTH)
        dk, dv = gather_gradients(
            dk, dv, k, v, q_base, do_base, lse_base, delta_base, sums,
            start, full, first, keys, Sq, Sk, exponent_scale, stride_qm, stride_qd, stride_dom, stride_dod,
            D, DV, WIDTH, BM, CAUSAL, RAGGED, True, VECTOR, INTERPRETED, PRECISION, EMULATE_BF16)  # fmt: skip
        dk, dv = gather_gradients(
            dk, dv, k, v, q_base, do_base, lse_base, delta_base, sums,
            full, end, first, keys, Sq, Sk, exponent_scale, stride_qm, stride_qd, stride_dom, stride_dod,
            D, DV, WIDTH, BM, CAUSAL, RAGGED, False, VECTOR, INTERPRETED, PRECISION,
            EMULATE_BF16)  # fmt: skip

    dk_base = head_base(DK, b_k, stride_dkb, h_kv, stride_dkh, VECTOR)
    dv_base = head_base(DV_, b_k, stride_dvb, h_kv, stride_dvh, VECTOR)
    dk_rows = row_pointers(dk_base, keys, stride_dkn, VECTOR)
    # + 0.0: keys that no query sees get 0, not -0, whatever the sign of the scale
    dk = plus_zero(times(dk, scale, D, WIDTH), D, WIDTH)
    store_tile(dk_rows, dk, keys, Sk, stride_dkd, D, WIDTH, VECTOR, EMULATE_BF16)
    dv_rows = row_pointers(dv_base, keys, stride_dvn, VECTOR)
    store_tile(dv_rows, dv, keys, Sk, stride_dvd, DV, WIDTH, VECTOR, EMULATE_BF16)


@triton.jit(do_not_specialize=STRIDES_AND_LENGTHS)
def attention_round_dq(
    Sums, DQ, Tiles, stride_dqb, stride_dqh, stride_dqm, stride_dqd, scale, Hq, Sq, Sk, padded_rows,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, VECTOR: tl.constexpr, EMULATE_BF16: tl.constexpr,
):  # fmt: skip
    """DQ (B, Hq, Sq, D): scale times the sums, rounded. Grid: B * Hq * ceil(Sq / ROWS).

    Ragged: see `position`.
    """
    b, _, h, start_m, Sq, Sk = query_tile(Tiles, Hq, Sq, Sk, ROWS, RAGGED)
    if RAGGED:
        rows_before = h * padded_rows + first_row_of_sums(Tiles, Hq, b, BM)
    else:
        rows_before = (b * Hq + h) * padded_rows
    rows = start_m + tl.arange(0, ROWS)
    live = is_visible(rows, 0, Sq, Sk, CAUSAL)  # a dead row's scale * 0 may be -0
    COLUMNS: tl.constexpr = padded_dim(D, WIDTH)
    sums = Sums + (rows_before + start_m) * COLUMNS
    dq = ()
    for i in tl.static_range(n_slices(D, WIDTH)):
        dims = i * WIDTH + tl.arange(0, slice_width(i, D, WIDTH))
        where = sums + place(tl.arange(0, ROWS), dims, COLUMNS)
        dq = dq + (tl.load(where, mask=(live & (rows < Sq))[:, None], other=0.0),)
    dq = where_live(times(dq, scale, D, WIDTH), live, D, WIDTH)
    dq_rows = row_pointers(head_base(DQ, b, stride_dqb, h, stride_dqh, VECTOR), rows, stride_dqm, VECTOR)
    store_tile(dq_rows, dq, rows, Sq, stride_dqd, D, WIDTH, VECTOR, EMULATE_BF16)
