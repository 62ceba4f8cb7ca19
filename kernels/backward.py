"""The backward kernels: FlashAttention-2 (Dao 2023, arXiv:2307.08691), Algorithm 2, in three passes.

    delta = rowsum(dO out) - dlse                        (one pass over the rows)
    P     = exp(scale S - lse),  dP = dO V^T,  dS = P (dP - delta)
    dv    = P^T dO,  dk = scale dS^T q                   (one program per tile of keys)
    dq    = scale dS K                                   (one program per tile of query rows)

P is recomputed from the lse; nothing of size Sq x Sk is stored; every sum has one owner and a fixed
order, so the result is the same bit for bit in every run.
"""

import triton
import triton.language as tl

from .numerics import (
    LOG2_E,
    STRIDES_AND_LENGTHS,
    add_product,
    head_base,
    is_visible,
    key_range,
    load_tile,
    n_slices,
    rounded,
    row_pointers,
    row_step,
    scores,
    store_tile,
    times,
    zeros,
)
from .position import key_tile, query_tile


@triton.jit(do_not_specialize=STRIDES_AND_LENGTHS)
def attention_delta(
    Out, DOut, DLse, Delta, CuSeqlens,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dlb, stride_dlh, stride_dlm, stride_lb, stride_lh,
    Hq, Sq, batch, DV: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, HAS_DLSE: tl.constexpr,
    RAGGED: tl.constexpr, VECTOR: tl.constexpr, EMULATE_BF16: tl.constexpr,
):  # fmt: skip
    """Delta (B, Hq, Sq), float32, its rows contiguous. Grid: B * Hq * ceil(Sq / BM).

    A row need not know its sequence. Ragged: one batch entry of all rows, as far as there are sequences.
    """
    b, _, h, start_m, Sq, _ = query_tile(CuSeqlens, Hq, Sq, Sq, BM, False)
    if RAGGED:
        Sq = tl.minimum(Sq, tl.load(CuSeqlens + batch))
    rows = start_m + tl.arange(0, BM)

    o_base = head_base(Out, b, stride_ob, h, stride_oh, VECTOR)
    do_base = head_base(DOut, b, stride_dob, h, stride_doh, VECTOR)
    out = load_tile(row_pointers(o_base, rows, stride_om, VECTOR), rows, Sq, stride_od, DV, WIDTH, VECTOR,
                    True, EMULATE_BF16)  # fmt: skip
    dO = load_tile(row_pointers(do_base, rows, stride_dom, VECTOR), rows, Sq, stride_dod, DV, WIDTH, VECTOR,
                   True, EMULATE_BF16)  # fmt: skip
    delta = tl.zeros([BM], tl.float32)
    for i in tl.static_range(n_slices(DV, WIDTH)):
        delta += tl.sum(out[i].to(tl.float32) * dO[i].to(tl.float32), 1)
    if HAS_DLSE:
        dlse_base = head_base(DLse, b, stride_dlb, h, stride_dlh, 1)
        delta -= tl.load(dlse_base + rows.to(tl.int64) * stride_dlm, mask=rows < Sq, other=0.0)
    tl.store(head_base(Delta, b, stride_lb, h, stride_lh, 1) + rows, delta, mask=rows < Sq)


@triton.jit
def plus_zero(tiles, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The same without -0."""
    found = ()
    for i in tl.static_range(n_slices(DIM, WIDTH)):
        found = found + (tiles[i] + 0.0,)
    return found


@triton.jit
def load_row(base, rows, Sq, other, CHECK_ROWS: tl.constexpr):
    """A value per query row [len(rows)] of a contiguous float32 vector; `other` past Sq."""
    if CHECK_ROWS:
        return tl.load(base + rows, mask=rows < Sq, other=other)
    else:
        return tl.load(base + rows)


@triton.jit
def add_key_gradients(
    dk, dv, k, v, q_rows, do_rows, lse_base, delta_base, rows, keys, Sq, Sk, exponent_scale,
    stride_qd, stride_dod, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
):  # fmt: skip
    """Adds what a tile of query rows gives to dk and dv of a tile of keys.

    Rows past Sq need no mask on P: q and dO are 0 there and the lse is inf, so that P is 0. Keys past Sk
    need none at all: they give only to rows of dk and dv that are not stored.
    """
    q = load_tile(q_rows, rows, Sq, stride_qd, D, WIDTH, VECTOR, MASKED, EMULATE_BF16)  # [BM, D]
    dO = load_tile(do_rows, rows, Sq, stride_dod, DV, WIDTH, VECTOR, MASKED, EMULATE_BF16)  # [BM, DV]
    lse = load_row(lse_base, rows, Sq, float("inf"), MASKED) * LOG2_E
    delta = load_row(delta_base, rows, Sq, 0.0, MASKED)
    S = scores(k, q, D, WIDTH, PRECISION)  # [BN, BM]
    P = tl.exp2(S * exponent_scale - lse[None, :])
    if MASKED:
        visible = is_visible(rows[None, :], keys[:, None], Sq, Sk, CAUSAL)
        P = tl.where(visible, P, 0.0)
    dv = add_product(dv, rounded(P, dO[0].dtype, EMULATE_BF16), dO, DV, WIDTH, PRECISION)
    dP = scores(v, dO, DV, WIDTH, PRECISION)  # [BN, BM]
    dS = rounded(P * (dP - delta[None, :]), q[0].dtype, EMULATE_BF16)
    dk = add_product(dk, dS, q, D, WIDTH, PRECISION)  # [BN, D]
    return dk, dv


@triton.jit
def gather_key_gradients(
    dk, dv, k, v, q_base, do_base, lse_base, delta_base, start, full, whole, keys, Sq, Sk, exponent_scale,
    stride_qm, stride_qd, stride_dom, stride_dod,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, CAUSAL: tl.constexpr, VECTOR: tl.constexpr,
    PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
):  # fmt: skip
    """Adds what the query rows [start, Sq) of a head give to dk and dv of a tile of keys.

    [full, whole) are whole tiles of rows that see all keys. The others, before and behind, are few and go
    through one loop: code for each would take registers from the loop that matters.
    """
    first = full + tl.arange(0, BM)
    q_rows = row_pointers(q_base, first, stride_qm, VECTOR)
    do_rows = row_pointers(do_base, first, stride_dom, VECTOR)
    for i in range(full, whole, BM):
        rows = i + tl.arange(0, BM)
        dk, dv = add_key_gradients(
            dk, dv, k, v, q_rows, do_rows, lse_base, delta_base, rows, keys, Sq, Sk, exponent_scale,
            stride_qd, stride_dod, D, DV, WIDTH, CAUSAL, False, VECTOR, PRECISION, EMULATE_BF16)  # fmt: skip
        q_rows += row_step(stride_qm, VECTOR) * BM
        do_rows += row_step(stride_dom, VECTOR) * BM

    before = tl.cdiv(full - start, BM)
    behind = tl.where(whole < Sq, 1, 0)
    # Not pipelined, if that takes fewer registers: float32, and several slices, would have to wait in some.
    small: tl.constexpr = n_slices(D, WIDTH) == 1 and q_base.dtype.element_ty != tl.float32
    for n in tl.range(0, before + behind, num_stages=1 if small else None):
        rows = tl.where(n < before, start + n * BM, whole) + tl.arange(0, BM)
        dk, dv = add_key_gradients(
            dk, dv, k, v, row_pointers(q_base, rows, stride_qm, VECTOR),
            row_pointers(do_base, rows, stride_dom, VECTOR), lse_base, delta_base, rows, keys, Sq, Sk,
            exponent_scale, stride_qd, stride_dod, D, DV, WIDTH, CAUSAL, True, VECTOR,
            PRECISION, EMULATE_BF16)  # fmt: skip
    return dk, dv


@triton.jit(do_not_specialize=STRIDES_AND_LENGTHS)
def attention_backward_dkdv(
    Q, K, V, DOut, Lse, Delta, DK, DV_, Tiles,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd,
    stride_dvb, stride_dvh, stride_dvn, stride_dvd, stride_lb, stride_lh,
    scale, Hkv, group, Sq, Sk,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    VECTOR: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
):  # fmt: skip
    """DK (B, Hkv, Sk, D) and DV_ (B, Hkv, Sk, DV). Grid: B * Hkv * ceil(Sk / BN). Ragged: see `position`."""
    b_q, b_k, h_kv, start_n, Sq, Sk = key_tile(Tiles, Hkv, Sq, Sk, BN, RAGGED)
    keys = start_n + tl.arange(0, BN)

    k_base = head_base(K, b_k, stride_kb, h_kv, stride_kh, VECTOR)
    v_base = head_base(V, b_k, stride_vb, h_kv, stride_vh, VECTOR)
    k_rows = tl.where(Sq > 0, Sk, 0)  # what lies behind the last sequence is not read
    of_k = tl.where(scale == 0, 0, k_rows)  # all scores are 0 then, as in the forward, however large q k^T is
    k = load_tile(row_pointers(k_base, keys, stride_kn, VECTOR), keys, of_k, stride_kd, D, WIDTH, VECTOR,
                  True, EMULATE_BF16)  # fmt: skip
    v = load_tile(row_pointers(v_base, keys, stride_vn, VECTOR), keys, k_rows, stride_vd, DV, WIDTH, VECTOR,
                  True, EMULATE_BF16)  # fmt: skip
    exponent_scale = scale * LOG2_E

    if CAUSAL:
        # Row i sees key j iff i >= j - (Sk - Sq): from `start` on a row sees some of the tile, from `full`
        # on all of it. No tile of rows begins before the first row that sees a key: what dO and dlse hold
        # at dead rows, NaN perhaps, is never read.
        start = tl.maximum(start_n - (Sk - Sq), 0)
        seen_whole = tl.maximum(start_n + BN - 1 - (Sk - Sq), 0)
        full = tl.minimum(start + tl.cdiv(seen_whole - start, BM) * BM, Sq)
    else:
        start = 0
        full = 0
    whole = full + (Sq - full) // BM * BM  # whole tiles of rows end here
    dk = zeros(BN, D, WIDTH)
    dv = zeros(BN, DV, WIDTH)
    for g in range(group):
        h = h_kv * group + g
        q_base = head_base(Q, b_q, stride_qb, h, stride_qh, VECTOR)
        do_base = head_base(DOut, b_q, stride_dob, h, stride_doh, VECTOR)
        lse_base = head_base(Lse, b_q, stride_lb, h, stride_lh, 1)
        delta_base = head_base(Delta, b_q, stride_lb, h, stride_lh, 1)
        dk, dv = gather_key_gradients(
            dk, dv, k, v, q_base, do_base, lse_base, delta_base, start, full, whole, keys, Sq, Sk,
            exponent_scale, stride_qm, stride_qd, stride_dom, stride_dod,
            D, DV, WIDTH, BM, CAUSAL, VECTOR, PRECISION, EMULATE_BF16)  # fmt: skip

    dk_base = head_base(DK, b_k, stride_dkb, h_kv, stride_dkh, VECTOR)
    dv_base = head_base(DV_, b_k, stride_dvb, h_kv, stride_dvh, VECTOR)
    dk_rows = row_pointers(dk_base, keys, stride_dkn, VECTOR)
    # + 0.0: keys that no query sees get 0, not -0, whatever the sign of the scale
    dk = plus_zero(times(dk, scale, D, WIDTH), D, WIDTH)
    store_tile(dk_rows, dk, keys, Sk, stride_dkd, D, WIDTH, VECTOR, EMULATE_BF16)
    dv_rows = row_pointers(dv_base, keys, stride_dvn, VECTOR)
    store_tile(dv_rows, dv, keys, Sk, stride_dvd, DV, WIDTH, VECTOR, EMULATE_BF16)


@triton.jit
def where_live(tiles, live, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """0 in rows that see no key."""
    found = ()
    for i in tl.static_range(n_slices(DIM, WIDTH)):
        found = found + (tl.where(live[:, None], tiles[i], 0.0),)
    return found


@triton.jit
def gather_query_gradients(
    dq, q, dO, lse, delta, k_base, v_base, start, end, rows, Sq, Sk, exponent_scale,
    stride_kn, stride_kd, stride_vn, stride_vd,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    BN: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, VECTOR: tl.constexpr,
    PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
):  # fmt: skip
    """Adds what the keys [start, end) give to dq of a tile of query rows."""
    first = start + tl.arange(0, BN)
    k_rows = row_pointers(k_base, first, stride_kn, VECTOR)
    v_rows = row_pointers(v_base, first, stride_vn, VECTOR)
    for n in range(start, end, BN):
        keys = n + tl.arange(0, BN)
        k = load_tile(k_rows, keys, Sk, stride_kd, D, WIDTH, VECTOR, MASKED, EMULATE_BF16)  # [BN, D]
        v = load_tile(v_rows, keys, Sk, stride_vd, DV, WIDTH, VECTOR, MASKED, EMULATE_BF16)  # [BN, DV]
        S = scores(q, k, D, WIDTH, PRECISION)  # [BM, BN]
        P = tl.exp2(S * exponent_scale - lse[:, None])
        if MASKED:
            visible = is_visible(rows[:, None], keys[None, :], Sq, Sk, CAUSAL)
            P = tl.where(visible, P, 0.0)
        dP = scores(dO, v, DV, WIDTH, PRECISION)  # [BM, BN]
        dS = rounded(P * (dP - delta[:, None]), k[0].dtype, EMULATE_BF16)
        dq = add_product(dq, dS, k, D, WIDTH, PRECISION)  # [BM, D]
        k_rows += row_step(stride_kn, VECTOR) * BN
        v_rows += row_step(stride_vn, VECTOR) * BN
    return dq


@triton.jit(do_not_specialize=STRIDES_AND_LENGTHS)
def attention_backward_dq(
    Q, K, V, DOut, Lse, Delta, DQ, Tiles,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dqb, stride_dqh, stride_dqm, stride_dqd, stride_lb, stride_lh,
    scale, Hq, group, Sq, Sk,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    VECTOR: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
):  # fmt: skip
    """DQ (B, Hq, Sq, D). Grid: B * Hq * ceil(Sq / BM). Ragged: see `position`."""
    b_q, b_k, h, start_m, Sq, Sk = query_tile(Tiles, Hq, Sq, Sk, BM, RAGGED)
    rows = start_m + tl.arange(0, BM)

    q_base = head_base(Q, b_q, stride_qb, h, stride_qh, VECTOR)
    k_base = head_base(K, b_k, stride_kb, h // group, stride_kh, VECTOR)
    v_base = head_base(V, b_k, stride_vb, h // group, stride_vh, VECTOR)
    do_base = head_base(DOut, b_q, stride_dob, h, stride_doh, VECTOR)
    lse_base = head_base(Lse, b_q, stride_lb, h, stride_lh, 1)
    delta_base = head_base(Delta, b_q, stride_lb, h, stride_lh, 1)
    q_rows = tl.where(Sk > 0, Sq, 0)  # what lies behind the last sequence is not read
    of_q = tl.where(scale == 0, 0, q_rows)  # all scores are 0 then, as in the forward, however large q k^T is
    q = load_tile(row_pointers(q_base, rows, stride_qm, VECTOR), rows, of_q, stride_qd, D, WIDTH, VECTOR,
                  True, EMULATE_BF16)  # fmt: skip
    dO = load_tile(row_pointers(do_base, rows, stride_dom, VECTOR), rows, q_rows, stride_dod, DV, WIDTH,
                   VECTOR, True, EMULATE_BF16)  # fmt: skip
    lse = load_row(lse_base, rows, q_rows, float("inf"), True) * LOG2_E  # [BM]
    delta = load_row(delta_base, rows, q_rows, 0.0, True)  # [BM]
    exponent_scale = scale * LOG2_E

    dq = zeros(BM, D, WIDTH)
    full, end = key_range(start_m, Sq, Sk, BM, BN, CAUSAL)
    dq = gather_query_gradients(dq, q, dO, lse, delta, k_base, v_base, 0, full, rows, Sq, Sk,
                                exponent_scale, stride_kn, stride_kd, stride_vn, stride_vd,
                                D, DV, WIDTH, BN, CAUSAL, False, VECTOR,
                                PRECISION, EMULATE_BF16)  # fmt: skip
    dq = gather_query_gradients(dq, q, dO, lse, delta, k_base, v_base, full, end, rows, Sq, Sk,
                                exponent_scale, stride_kn, stride_kd, stride_vn, stride_vd,
                                D, DV, WIDTH, BN, CAUSAL, True, VECTOR,
                                PRECISION, EMULATE_BF16)  # fmt: skip

    live = is_visible(rows, 0, Sq, Sk, CAUSAL)  # a dead row's dO and dlse may be NaN
    dq = where_live(times(dq, scale, D, WIDTH), live, D, WIDTH)
    dq_base = head_base(DQ, b_q, stride_dqb, h, stride_dqh, VECTOR)
    dq_rows = row_pointers(dq_base, rows, stride_dqm, VECTOR)
    store_tile(dq_rows, dq, rows, Sq, stride_dqd, D, WIDTH, VECTOR, EMULATE_BF16)
