"""Backward algebra: delta, dS, the scale, and which tensor meets which."""

from __future__ import annotations

from .mutant import Change, Mutant

KIND = "backward algebra"

DQ = "b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0"
DK = "b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=k_nodlse_seed0"
DV = "b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=v_nodlse_seed0"
D_LSE = "b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=qk_dlse_seed0"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "dk-without-scale",
        KIND,
        "dk is not multiplied by the scale.",
        (Change("backward.py", "dk * scale", "dk"),),
        witness=DK,
        report="H10",
        tensors=("dk",),
    ),
    Mutant(
        "dq-without-scale",
        KIND,
        "dq is not multiplied by the scale.",
        (Change("backward.py", "dq * scale", "dq"),),
        witness=DQ,
        tensors=("dq",),
    ),
    Mutant(
        "dq-with-the-scale-of-exp2",
        KIND,
        "dq is multiplied by the scale times log2 e, which is meant for the exponents.",
        (Change("backward.py", "dq * scale", "dq * exponent_scale"),),
        witness=DQ,
        tensors=("dq",),
    ),
    Mutant(
        "dv-with-scale",
        KIND,
        "dv is multiplied by the scale, as dk is.",
        (Change("backward.py", "store_tile(dv_pointers, dv,", "store_tile(dv_pointers, dv * scale,"),),
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
                "        if MASKED:\n            visible = is_visible(rows[None, :]",
                "        unmasked = P\n        if MASKED:\n            visible = is_visible(rows[None, :]",
            ),
            Change("backward.py", "dv = tl.dot(rounded(P, dO", "dv = tl.dot(rounded(unmasked, dO"),
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
                "        dv = tl.dot(rounded(P, dO.dtype, EMULATE_BF16), dO, dv,"
                " input_precision=PRECISION)\n",
                "",
            ),
            Change(
                "backward.py",
                "        dk = tl.dot(dS, q, dk,",
                "        dv = tl.dot(dS, dO, dv, input_precision=PRECISION)\n        dk = tl.dot(dS, q, dk,",
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
            Change(
                "backward.py",
                "        dO = load_tile(do_base, rows, stride_dom, stride_dod, Sq, DV,",
                "        dO = load_tile(do_base, rows, stride_dom, stride_dod, Sq, D,",
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
            Change(
                "backward.py",
                "dk * scale + 0.0",
                "dk * scale + operand(load_tile(dk_base, keys, stride_dkn, stride_dkd, Sk, D, BLOCK_D,"
                " VECTOR, True), EMULATE_BF16)",
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
                "store_tile(dq_pointers, dq, rows, Sq,",
                "store_tile(dq_pointers, dq, rows, q_rows,",
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
            Change(
                "backward.py",
                "out = load_tile(o_base, rows, stride_om, stride_od, Sq, DV, BLOCK_DV, VECTOR, True)",
                "out = load_tile(o_base, rows, stride_om, stride_od, Sq, 16, BLOCK_DV, VECTOR, True)",
            ),
        ),
        witness="b1_h1x1_s5x5_d16x32_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        report="A11",
        tensors=("dq",),
    ),
    Mutant(
        "query-rows-of-dk-in-reverse",
        KIND,
        "dk and dv of full tiles add the query rows from the last to the first.",
        (
            Change(
                "backward.py",
                "        rows = i + tl.arange(0, BM)\n        q = load_tile",
                "        rows = start + (end - 1 - start) // BM * BM - (i - start) + tl.arange(0, BM)\n"
                "        q = load_tile",
            ),
        ),
        equivalent="the same tiles in another order, which is the implementation's own affair",
    ),
)
