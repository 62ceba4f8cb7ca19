"""Backward algebra: delta, dS, the scale, and which tensor meets which."""

from __future__ import annotations

from .mutant import Change, Mutant, each_slice

KIND = "backward algebra"

DQ = "b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0"
DK = "b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=k_nodlse_seed0"
DV = "b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=v_nodlse_seed0"
D_LSE = "b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=qk_dlse_seed0"

FIRST_COLUMNS = each_slice(
    "backward.py",
    "first_columns",
    "tl.where((i * WIDTH + tl.arange(0, tiles[i].shape[1]) < COLUMNS)[None, :], tiles[i], 0.0)",
    "COLUMNS: tl.constexpr",
)
"""The device function that keeps as many columns and sets the others to 0."""

SUM = each_slice("backward.py", "sum_of", "tiles[i] + others[i]", "others")
"""The device function that adds two tiles."""

LAST_ROWS = "whole - BM + tl.arange(0, BM)"
"""Of the last tile of dK/dV's loop over whole ones."""

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "dk-without-scale",
        KIND,
        "dk is not multiplied by the scale.",
        (Change("backward.py", "times(dk, scale, D, WIDTH)", "dk"),),
        witness=DK,
        report="H10",
        tensors=("dk",),
    ),
    Mutant(
        "dq-without-scale",
        KIND,
        "dq is not multiplied by the scale.",
        (Change("backward.py", "times(dq, scale, D, WIDTH)", "dq"),),
        witness=DQ,
        tensors=("dq",),
    ),
    Mutant(
        "dq-with-the-scale-of-exp2",
        KIND,
        "dq is multiplied by the scale times log2 e, which is meant for the exponents.",
        (Change("backward.py", "times(dq, scale, D", "times(dq, exponent_scale, D"),),
        witness=DQ,
        tensors=("dq",),
    ),
    Mutant(
        "dv-with-scale",
        KIND,
        "dv is multiplied by the scale, as dk is.",
        (
            Change(
                "backward.py", "store_tile(dv_rows, dv,", "store_tile(dv_rows, times(dv, scale, DV, WIDTH),"
            ),
        ),
        witness=DV,
        tensors=("dv",),
    ),
    Mutant(
        "delta-left-out",
        KIND,
        "dS is P dP: delta is not subtracted.",
        (
            Change("backward.py", "dP - delta[None, :]", "dP"),
            Change("backward.py", "dP - delta[:, None]", "dP"),
        ),
        witness="b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=qk_nodlse_seed0",
        tensors=("dq", "dk"),
    ),
    Mutant(
        "delta-added-for-dk",
        KIND,
        "dS is P (dP + delta) where it meets q.",
        (Change("backward.py", "dP - delta[None, :]", "dP + delta[None, :]"),),
        witness=DK,
        tensors=("dk",),
    ),
    Mutant(
        "gradient-of-the-lse-not-in-delta",
        KIND,
        "What flows into the lse is not subtracted from delta.",
        (Change("launch.py", "HAS_DLSE=d_lse is not None", "HAS_DLSE=False"),),
        witness=D_LSE,
        tensors=("dq", "dk"),
    ),
    Mutant(
        "gradient-of-the-lse-added-to-delta",
        KIND,
        "What flows into the lse enters delta with the wrong sign.",
        (Change("backward.py", "delta -= tl.load(dlse_base", "delta += tl.load(dlse_base"),),
        witness=D_LSE,
        tensors=("dq", "dk"),
    ),
    Mutant(
        "delta-of-the-kv-head-in-dk",
        KIND,
        "dk reads the delta of the query head that has the number of the KV head.",
        (
            Change(
                "backward.py",
                "        delta_base = head_base(Delta, b_q, stride_lb, h,",
                "        delta_base = head_base(Delta, b_q, stride_lb, h_kv,",
            ),
        ),
        witness="b1_h2x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=k_nodlse_seed0",
        report="C8",
        tensors=("dk",),
    ),
    Mutant(
        "dv-from-p-that-is-not-masked",
        KIND,
        "dv adds P before the mask is put on it.",
        (
            Change(
                "backward.py",
                "    if MASKED:\n        visible = is_visible(rows[None, :]",
                "    unmasked = P\n    if MASKED:\n        visible = is_visible(rows[None, :]",
            ),
            Change("backward.py", "add_product(dv, rounded(P,", "add_product(dv, rounded(unmasked,"),
        ),
        witness="b1_h1x1_s5x5_d16x16_float16_causal_scale=auto_normal_bhsd_grad=v_nodlse_seed0",
        report="H8",
        tensors=("dv",),
    ),
    Mutant(
        "dv-from-ds",
        KIND,
        "dv adds what dk adds: dS, and not P.",
        (
            Change(
                "backward.py",
                "    dv = add_product(dv, rounded(P, dO[0].dtype, EMULATE_BF16), dO, DV, WIDTH, PRECISION)\n",
                "",
            ),
            Change(
                "backward.py",
                "    dk = add_product(dk, dS,",
                "    dv = add_product(dv, dS, dO, DV, WIDTH, PRECISION)\n    dk = add_product(dk, dS,",
            ),
        ),
        witness=DV,
        tensors=("dv",),
    ),
    Mutant(
        "dk-from-dp",
        KIND,
        "dk adds dP - delta, and not P times it.",
        (Change("backward.py", "P * (dP - delta[None, :])", "dP - delta[None, :]"),),
        witness=DK,
        tensors=("dk",),
    ),
    Mutant(
        "columns-of-d-out-as-many-as-of-q",
        KIND,
        "For dk and dv, dO is loaded as far as D, and not as far as Dv.",
        (
            Change("backward.py", "    n_slices,\n", "    n_slices,\n    operand,\n    slice_pointers,\n"),
            each_slice(
                "backward.py",
                "as_far_as",
                "operand(tl.load(slice_pointers(pointers, i, stride_dim, DIM, WIDTH, VECTOR),"
                " mask=(rows < n_rows)[:, None]"
                " & (i * WIDTH + tl.arange(0, tiles[i].shape[1]) < COLUMNS)[None, :], other=0.0),"
                " EMULATE_BF16)",
                "COLUMNS: tl.constexpr",
                *("pointers", "rows", "n_rows", "stride_dim"),
                *("VECTOR: tl.constexpr", "EMULATE_BF16: tl.constexpr"),
            ),
            Change(
                "backward.py",
                "    delta = load_row(delta_base, rows, Sq, 0.0, MASKED)\n",
                "    dO = as_far_as(dO, D, do_rows, rows, Sq, stride_dod, VECTOR, EMULATE_BF16, DV, WIDTH)\n"
                "    delta = load_row(delta_base, rows, Sq, 0.0, MASKED)\n",
            ),
        ),
        witness="b1_h1x1_s5x5_d16x32_float16_full_scale=auto_normal_bhsd_grad=kv_nodlse_seed0",
        report="H2",
        tensors=("dk", "dv"),
    ),
    Mutant(
        "dk-added-to-what-was-there",
        KIND,
        "dk is added to memory that nobody has cleared.",
        (
            SUM,
            Change(
                "backward.py",
                "dk = plus_zero(times(dk, scale, D, WIDTH), D, WIDTH)",
                "there = load_tile(dk_rows, keys, Sk, stride_dkd, D, WIDTH, VECTOR, True, EMULATE_BF16)\n"
                "    dk = sum_of(times(dk, scale, D, WIDTH), there, D, WIDTH)",
            ),
        ),
        witness=DK,
        report="H7",
        tensors=("dk",),
    ),
    Mutant(
        "dq-of-rows-without-keys-not-written",
        KIND,
        "Where there is no key, dq is left as it was allocated.",
        (
            Change(
                "backward.py",
                "store_tile(dq_rows, dq, rows, Sq,",
                "store_tile(dq_rows, dq, rows, q_rows,",
            ),
        ),
        witness="b1_h1x1_s5x0_d16x16_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        report="K7",
        tensors=("dq",),
    ),
    Mutant(
        "delta-of-the-first-16-columns",
        KIND,
        "delta is summed over the first 16 columns, however many there are.",
        (
            FIRST_COLUMNS,
            Change(
                "backward.py",
                "    delta = tl.zeros([BM], tl.float32)\n",
                "    out = first_columns(out, 16, DV, WIDTH)\n    delta = tl.zeros([BM], tl.float32)\n",
            ),
        ),
        witness="b1_h1x1_s5x5_d16x32_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        report="A11",
        tensors=("dq",),
    ),
    Mutant(
        "query-rows-of-dk-in-reverse",
        KIND,
        "dk and dv add whole tiles of query rows from the last to the first.",
        (
            Change("backward.py", "first = full + tl.arange(0, BM)", f"first = {LAST_ROWS}"),
            Change("backward.py", "rows = i + tl.arange(0, BM)", f"rows = {LAST_ROWS} - (i - full)"),
            Change("backward.py", "q_rows += row_step(", "q_rows -= row_step("),
            Change("backward.py", "do_rows += row_step(", "do_rows -= row_step("),
        ),
        equivalent="the same tiles in another order, which is the implementation's own affair",
    ),
)
