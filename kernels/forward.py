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
    head_base,
    is_visible,
    key_range,
    load_tile,
    operand,
    rounded,
    store_tile,
    tile_pointers,
)
from .position import query_tile


@triton.jit
def attend(acc, l, m, q, k_base, v_base, start, end, rows, Sq, Sk, exponent_scale,
           stride_kn, stride_kd, stride_vn, stride_vd,
           D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
           BN: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, VECTOR: tl.constexpr,
           PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr):  # fmt: skip
    """The online softmax over the keys [start, end), in whole tiles: updates acc, l, m."""
    for n in range(start, end, BN):
        keys = n + tl.arange(0, BN)
        k = load_tile(k_base, keys, stride_kn, stride_kd, Sk, D, BLOCK_D, VECTOR, MASKED)
        v = load_tile(v_base, keys, stride_vn, stride_vd, Sk, DV, BLOCK_DV, VECTOR, MASKED)
        k = operand(k, EMULATE_BF16)  # [BN, D]
        v = operand(v, EMULATE_BF16)  # [BN, DV]
        S = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BM, BN]
        if MASKED:
            visible = is_visible(rows[:, None], keys[None, :], Sq, Sk, CAUSAL)
            S = tl.where(visible, S, float("-inf"))
        m_new = tl.maximum(m, tl.max(S, 1))  # [BM]
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        P = tl.exp2((S - m_finite[:, None]) * exponent_scale)
        if MASKED:  # not left to exp2(-inf): with scale = 0 that would be exp2(nan)
            P = tl.where(visible, P, 0.0)
        alpha = tl.where(m == float("-inf"), 0.0, tl.exp2((m - m_finite) * exponent_scale))
        l = l * alpha + tl.sum(P, 1)
        P = rounded(P, v.dtype, EMULATE_BF16)
        acc = tl.dot(P, v, acc * alpha[:, None], input_precision=PRECISION)  # [BM, DV]
        m = m_new
    return acc, l, m


@triton.jit(do_not_specialize=STRIDES_AND_LENGTHS)
def attention_forward(
    Q, K, V, Out, Lse, Tiles,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od, stride_lb, stride_lh,
    scale, Hq, group, Sq, Sk,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
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
    q = load_tile(q_base, rows, stride_qm, stride_qd, q_rows, D, BLOCK_D, VECTOR, True)
    q = operand(q, EMULATE_BF16)
    q = tl.where(scale < 0, -q, q)  # exact; from here on the scale is |scale| and m a maximum
    exponent_scale = tl.abs(scale) * LOG2_E

    acc = tl.zeros([BM, BLOCK_DV], tl.float32)
    l = tl.zeros([BM], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    full, end = key_range(start_m, Sq, Sk, BM, BN, CAUSAL)
    acc, l, m = attend(acc, l, m, q, k_base, v_base, 0, full, rows, Sq, Sk, exponent_scale,
                       stride_kn, stride_kd, stride_vn, stride_vd, D, DV, BLOCK_D, BLOCK_DV,
                       BN, CAUSAL, False, VECTOR, PRECISION, EMULATE_BF16)  # fmt: skip
    acc, l, m = attend(acc, l, m, q, k_base, v_base, full, end, rows, Sq, Sk, exponent_scale,
                       stride_kn, stride_kd, stride_vn, stride_vd, D, DV, BLOCK_D, BLOCK_DV,
                       BN, CAUSAL, True, VECTOR, PRECISION, EMULATE_BF16)  # fmt: skip

    # Dead rows are known by their index, not by l = 0: a row of -inf scores must come out as NaN.
    live = is_visible(rows, 0, Sq, Sk, CAUSAL)
    out = tl.where(live[:, None], acc / l[:, None], 0.0)
    lse = tl.where(live, m * tl.abs(scale) + tl.log(l), float("-inf"))
    o_base = head_base(Out, b_q, stride_ob, h, stride_oh, VECTOR)
    o_pointers = tile_pointers(o_base, rows, stride_om, stride_od, BLOCK_DV, VECTOR)
    store_tile(o_pointers, out, rows, Sq, DV, BLOCK_DV, EMULATE_BF16)
    tl.store(head_base(Lse, b_q, stride_lb, h, stride_lh, 1) + rows, lse, mask=rows < Sq)
