"""The forward kernel: FlashAttention-2 (Dao 2023, arXiv:2307.08691), Algorithm 1.

    S = q K^T,  m = rowmax(S),  P = exp(scale (S - m)),  l = rowsum(P),  out = P V / l

over tiles of keys, with running (m, l, acc). One program per (sequence, head, tile of query rows).
m is kept in units of the unscaled scores and subtracted before the scale is multiplied in: then the
largest P of a row is exactly 1, however large the scores are.
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
from .position import query_tile


@triton.jit
def attend(acc, l, m, q, k_base, v_base, start, end, rows, Sq, Sk, exponent_scale,
           stride_kn, stride_kd, stride_vn, stride_vd,
           D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
           BN: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
           VECTOR: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr):  # fmt: skip
    """The online softmax over the keys [start, end), in whole tiles: updates acc, l, m."""
    first = start + tl.arange(0, BN)
    k_rows = row_pointers(k_base, first, stride_kn, VECTOR)
    v_rows = row_pointers(v_base, first, stride_vn, VECTOR)
    for n in range(start, end, BN):
        keys = n + tl.arange(0, BN)
        k = load_tile(k_rows, keys, Sk, stride_kd, D, WIDTH, VECTOR, MASKED, EMULATE_BF16)  # [BN, D]
        v = load_tile(v_rows, keys, Sk, stride_vd, DV, WIDTH, VECTOR, MASKED, EMULATE_BF16)  # [BN, DV]
        S = scores(q, k, D, WIDTH, PRECISION)  # [BM, BN]
        if MASKED:
            visible = is_visible(rows[:, None], keys[None, :], Sq, Sk, CAUSAL)
            S = tl.where(visible, S, float("-inf"))
        m_new = tl.maximum(m, tl.max(S, 1))  # [BM]
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        P = tl.exp2((S - m_finite[:, None]) * exponent_scale)
        alpha = tl.exp2((m - m_finite) * exponent_scale)
        l = l * alpha + tl.sum(P, 1)
        P = rounded(P, v[0].dtype, EMULATE_BF16)
        acc = add_product(times(acc, alpha[:, None], DV, WIDTH), P, v, DV, WIDTH, PRECISION)  # [BM, DV]
        m = m_new
        k_rows += row_step(stride_kn, VECTOR) * BN
        v_rows += row_step(stride_vn, VECTOR) * BN
    return acc, l, m


@triton.jit
def divided(acc, l, live, DV: tl.constexpr, WIDTH: tl.constexpr):
    """out = acc / l; 0 in rows that see no key."""
    out = ()
    for i in tl.static_range(n_slices(DV, WIDTH)):
        out = out + (tl.where(live[:, None], acc[i] / l[:, None], 0.0),)
    return out


@triton.jit(do_not_specialize=STRIDES_AND_LENGTHS)
def attention_forward(
    Q, K, V, Out, Lse, Tiles,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od, stride_lb, stride_lh,
    scale, Hq, group, Sq, Sk,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    VECTOR: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
):  # fmt: skip
    """Out (B, Hq, Sq, DV) and Lse (B, Hq, Sq), float32, its rows contiguous.

    Grid: B * Hq * ceil(Sq / BM). Ragged: see `position`.
    """
    b_q, b_k, h, start_m, Sq, Sk = query_tile(Tiles, Hq, Sq, Sk, BM, RAGGED)
    rows = start_m + tl.arange(0, BM)

    q_base = head_base(Q, b_q, stride_qb, h, stride_qh, VECTOR)
    k_base = head_base(K, b_k, stride_kb, h // group, stride_kh, VECTOR)
    v_base = head_base(V, b_k, stride_vb, h // group, stride_vh, VECTOR)
    q_rows = tl.where(Sk > 0, Sq, 0)  # what lies behind the last sequence is not read
    q = load_tile(row_pointers(q_base, rows, stride_qm, VECTOR), rows, q_rows, stride_qd, D, WIDTH, VECTOR,
                  True, EMULATE_BF16)  # fmt: skip
    # Exact; from here on the scale is |scale| and m a maximum. Where it is 0 all scores are, NaN but for
    # finite q and k: then any factor will do, and one that is not 0 keeps -inf what it is.
    sign = tl.where(scale < 0, -1.0, tl.where(scale == 0, 0.0, 1.0)).to(q[0].dtype)
    q = times(q, sign, D, WIDTH)
    exponent_scale = tl.where(scale == 0, 1.0, tl.abs(scale) * LOG2_E)

    acc = zeros(BM, DV, WIDTH)
    l = tl.zeros([BM], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    full, end = key_range(start_m, Sq, Sk, BM, BN, CAUSAL)
    acc, l, m = attend(acc, l, m, q, k_base, v_base, 0, full, rows, Sq, Sk, exponent_scale,
                       stride_kn, stride_kd, stride_vn, stride_vd, D, DV, WIDTH,
                       BN, CAUSAL, False, VECTOR, PRECISION, EMULATE_BF16)  # fmt: skip
    acc, l, m = attend(acc, l, m, q, k_base, v_base, full, end, rows, Sq, Sk, exponent_scale,
                       stride_kn, stride_kd, stride_vn, stride_vd, D, DV, WIDTH,
                       BN, CAUSAL, True, VECTOR, PRECISION, EMULATE_BF16)  # fmt: skip

    # Dead rows are known by their index, not by l = 0: a row of -inf scores must come out as NaN.
    live = is_visible(rows, 0, Sq, Sk, CAUSAL)
    lse = tl.where(live, m * tl.abs(scale) + tl.log(l), float("-inf"))
    out = divided(acc, l, live, DV, WIDTH)
    o_base = head_base(Out, b_q, stride_ob, h, stride_oh, VECTOR)
    o_rows = row_pointers(o_base, rows, stride_om, VECTOR)
    store_tile(o_rows, out, rows, Sq, stride_od, DV, WIDTH, VECTOR, EMULATE_BF16)
    tl.store(head_base(Lse, b_q, stride_lb, h, stride_lh, 1) + rows, lse, mask=rows < Sq)
