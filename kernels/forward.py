"""The forward kernel: FlashAttention-2 (Dao 2023, arXiv:2307.08691), Algorithm 1.

    S = q K^T,  m = rowmax(S),  P = exp(scale (S - m)),  l = rowsum(P),  out = P V / l

over tiles of keys, with running (m, l, acc). One program per (sequence, head, tile of query rows).
m is kept as it is subtracted, in units of log2: with c = scale log2(e) and m = max(c S), P = 2^(c S - m) is
one multiply-add. What m was rounded by, up to half a unit of its last place, is then a factor of P, of l and
of acc alike, and falls out of acc / l and of the lse. But the largest P is not 1 by that factor, and from
|m| = 2^13 on float16 would see it: rows that come there (`is_lost`) are worked out again, with m in units of
the scores, subtracted before c is multiplied in. Then the largest P is exactly 1, however large the scores
are. float32 would see it everywhere, and has m in units of the scores from the first.
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

LN_2 = tl.constexpr(0.6931471805599453)

LARGEST = tl.constexpr(2.0**13)
"""|m| in units of log2, from which on it is subtracted in units of the scores. Below, m was rounded by at
most 2^-12: where one key is visible P is 1 in float16 and in bfloat16, and v / l rounds to v."""

EXACT_ROWS = tl.constexpr(16)
EXACT_KEYS = tl.constexpr(16)
"""The tile that works such rows out: one that any head dimension, dtype and architecture has room for."""


@triton.constexpr_function
def n_parts(DTYPE, PRECISION):
    """Parts of a row that are summed up for themselves: as many as an instruction of tensor cores has
    columns, since then no thread needs what another has. 1 where float32 is multiplied without them."""
    without = DTYPE == tl.float32 and PRECISION == "ieee"  # noqa: SIM300
    return 1 if without else 8


@triton.jit
def attend(acc, l, m, q, k_base, v_base, start, end, rows, Sq, Sk, c,
           stride_kn, stride_kd, stride_vn, stride_vd,
           D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
           BN: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
           VECTOR: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr):  # fmt: skip
    """The online softmax over the keys [start, end), in whole tiles: updates acc, l, m.

    l [BM, parts] is summed up at the end (`n_parts`). EXACT: m is in units of the scores, and -inf before the
    first.
    """
    parts: tl.constexpr = l.shape[1]
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
        if EXACT:
            m_new = tl.maximum(m, tl.max(S, 1))  # [BM]
            m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
            P = tl.exp2((S - m_finite[:, None]) * c)
            alpha = tl.exp2((m - m_finite) * c)
        else:
            m_new = tl.maximum(m, tl.max(S, 1) * c)  # [BM]
            P = tl.exp2(S * c - m_new[:, None])
            alpha = tl.exp2(m - m_new)
        l = l * alpha[:, None] + tl.sum(tl.reshape(P, [P.shape[0], BN // parts, parts]), 1)
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


@triton.jit
def load_queries(q_base, rows, Sq, Sk, stride_qm, stride_qd, D: tl.constexpr, WIDTH: tl.constexpr,
                 SIGN: tl.constexpr, VECTOR: tl.constexpr, EMULATE_BF16: tl.constexpr):  # fmt: skip
    """A tile of q times the sign of the scale: from here on the scale is |scale| and m a maximum.

    As it lies in memory where it can: tensor cores of sm_90 read it there, and take it from registers, with
    a copy for each tile of keys, if it was multiplied. With scale 0 all scores are 0, NaN but for finite q
    and k.
    """
    q_rows = tl.where(Sk > 0, Sq, 0)  # what lies behind the last sequence is not read
    q = load_tile(row_pointers(q_base, rows, stride_qm, VECTOR), rows, q_rows, stride_qd, D, WIDTH,
                  VECTOR, True, EMULATE_BF16)  # fmt: skip
    if SIGN != 1:
        q = times(q, SIGN, D, WIDTH)
    return q


@triton.jit
def is_lost(m):
    """Where m, in units of log2, is too large to be subtracted rounded, or no score was above its start."""
    return ~(tl.abs(m) < LARGEST)


@triton.jit
def store_results(acc, l, m, wanted, o_base, lse_base, rows, Sq, Sk, stride_om, stride_od,
                  DV: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, VECTOR: tl.constexpr,
                  EMULATE_BF16: tl.constexpr):  # fmt: skip
    """out = acc / l and lse = m + log(l) of the rows that are wanted, m in units of the natural logarithm."""
    stored = tl.where(wanted, rows, Sq)
    # Dead rows are known by their index, not by l = 0: a row of -inf scores must come out as NaN.
    live = is_visible(rows, 0, Sq, Sk, CAUSAL)
    l = tl.sum(l, 1)
    out = divided(acc, l, live, DV, WIDTH)
    o_rows = row_pointers(o_base, rows, stride_om, VECTOR)
    store_tile(o_rows, out, stored, Sq, stride_od, DV, WIDTH, VECTOR, EMULATE_BF16)
    lse = tl.where(live, m + tl.log(l), float("-inf"))
    tl.store(lse_base + rows, lse, mask=stored < Sq)


@triton.jit(noinline=True)
def attend_exactly(
    q_base, k_base, v_base, o_base, lse_base, start_m, end, Sq, Sk, scale, c,
    stride_qm, stride_qd, stride_kn, stride_kd, stride_vn, stride_vd, stride_om, stride_od,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, CAUSAL: tl.constexpr,
    SIGN: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
):  # fmt: skip
    """The lost rows of a tile anew, from all keys [0, end) that they see, whatever the scores are."""
    for start in range(start_m, start_m + BM, EXACT_ROWS):
        rows = start + tl.arange(0, EXACT_ROWS)
        q = load_queries(q_base, rows, Sq, Sk, stride_qm, stride_qd, D, WIDTH, SIGN, VECTOR, EMULATE_BF16)
        acc = zeros(EXACT_ROWS, DV, WIDTH)
        l = tl.zeros([EXACT_ROWS, n_parts(q[0].dtype, PRECISION)], tl.float32)
        m = tl.full([EXACT_ROWS], float("-inf"), tl.float32)
        acc, l, m = attend(acc, l, m, q, k_base, v_base, 0, end, rows, Sq, Sk, c,
                           stride_kn, stride_kd, stride_vn, stride_vd, D, DV, WIDTH,
                           EXACT_KEYS, CAUSAL, True, True, VECTOR, PRECISION, EMULATE_BF16)  # fmt: skip
        store_results(acc, l, m * tl.abs(scale), is_lost(m * c), o_base, lse_base, rows, Sq, Sk,
                      stride_om, stride_od, DV, WIDTH, CAUSAL, VECTOR, EMULATE_BF16)  # fmt: skip


@triton.jit(do_not_specialize=STRIDES_AND_LENGTHS)
def attention_forward(
    Q, K, V, Out, Lse, Tiles,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od, stride_lb, stride_lh,
    scale, Hq, group, Sq, Sk,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, SIGN: tl.constexpr, RAGGED: tl.constexpr,
    VECTOR: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
):  # fmt: skip
    """Out (B, Hq, Sq, DV) and Lse (B, Hq, Sq), float32, its rows contiguous.

    SIGN is that of the scale. Grid: B * Hq * ceil(Sq / BM). Ragged: see `position`.
    """
    b_q, b_k, h, start_m, Sq, Sk = query_tile(Tiles, Hq, Sq, Sk, BM, RAGGED)
    rows = start_m + tl.arange(0, BM)

    q_base = head_base(Q, b_q, stride_qb, h, stride_qh, VECTOR)
    k_base = head_base(K, b_k, stride_kb, h // group, stride_kh, VECTOR)
    v_base = head_base(V, b_k, stride_vb, h // group, stride_vh, VECTOR)
    o_base = head_base(Out, b_q, stride_ob, h, stride_oh, VECTOR)
    lse_base = head_base(Lse, b_q, stride_lb, h, stride_lh, 1)
    q = load_queries(q_base, rows, Sq, Sk, stride_qm, stride_qd, D, WIDTH, SIGN, VECTOR, EMULATE_BF16)
    if SIGN == 0:
        c = 1.0  # the scores are 0 without it, and 0 times -inf would be NaN
    else:
        c = tl.abs(scale) * LOG2_E

    exact: tl.constexpr = Q.dtype.element_ty == tl.float32
    acc = zeros(BM, DV, WIDTH)
    l = tl.zeros([BM, n_parts(q[0].dtype, PRECISION)], tl.float32)
    m = tl.full([BM], float("-inf") if exact else -LARGEST, tl.float32)
    full, end = key_range(start_m, Sq, Sk, BM, BN, CAUSAL)
    acc, l, m = attend(acc, l, m, q, k_base, v_base, 0, full, rows, Sq, Sk, c,
                       stride_kn, stride_kd, stride_vn, stride_vd, D, DV, WIDTH,
                       BN, CAUSAL, False, exact, VECTOR, PRECISION, EMULATE_BF16)  # fmt: skip
    acc, l, m = attend(acc, l, m, q, k_base, v_base, full, end, rows, Sq, Sk, c,
                       stride_kn, stride_kd, stride_vn, stride_vd, D, DV, WIDTH,
                       BN, CAUSAL, True, exact, VECTOR, PRECISION, EMULATE_BF16)  # fmt: skip

    store_results(acc, l, m * (tl.abs(scale) if exact else LN_2), rows < Sq, o_base, lse_base, rows, Sq, Sk,
                  stride_om, stride_od, DV, WIDTH, CAUSAL, VECTOR, EMULATE_BF16)  # fmt: skip
    if not exact:
        live = is_visible(rows, 0, Sq, Sk, CAUSAL) & (rows < Sq)
        if tl.max(tl.where(live & is_lost(m), 1, 0), 0) > 0:
            tl.debug_barrier()  # what is stored again is stored later
            attend_exactly(
                q_base, k_base, v_base, o_base, lse_base, start_m, end, Sq, Sk, scale, c,
                stride_qm, stride_qd, stride_kn, stride_kd, stride_vn, stride_vd, stride_om, stride_od,
                D, DV, WIDTH, BM, CAUSAL, SIGN, VECTOR, PRECISION, EMULATE_BF16)  # fmt: skip
