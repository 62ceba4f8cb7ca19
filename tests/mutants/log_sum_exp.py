"""The lse: what is stored, where, in which base; and how the backward reads it."""

from __future__ import annotations

from .mutant import Change, Mutant

KIND = "lse"

SMALL = "b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "lse-in-base-2",
        KIND,
        "The lse is a logarithm in base 2.",
        (Change("forward.py", "m + tl.log(l)", "m * LOG2_E + tl.log2(l)"),),
        witness=SMALL,
        report="G1",
        tensors=("lse",),
    ),
    Mutant(
        "sum-in-base-2-maximum-in-base-e",
        KIND,
        "The logarithm of l is one in base 2, added to a maximum in base e.",
        (Change("forward.py", "tl.log(l)", "tl.log2(l)"),),
        witness=SMALL,
        tensors=("lse",),
    ),
    Mutant(
        "maximum-in-base-2-sum-in-base-e",
        KIND,
        "The maximum in the lse is as it was subtracted, for exp2, and the logarithm of l is natural.",
        (Change("forward.py", "else LN_2), rows < Sq", "else 1.0), rows < Sq"),),
        witness=SMALL,
        report="G1",
        tensors=("lse",),
    ),
    Mutant(
        "maximum-turned-to-base-2-once-more",
        KIND,
        "The maximum in the lse is multiplied by log2 e where it should be divided.",
        (Change("forward.py", "else LN_2), rows < Sq", "else LOG2_E), rows < Sq"),),
        witness=SMALL,
        tensors=("lse",),
    ),
    Mutant(
        "lse-without-the-maximum",
        KIND,
        "The lse is relative to the row's maximum.",
        (Change("forward.py", "m + tl.log(l)", "tl.log(l)"),),
        witness=SMALL,
        report="G4",
        tensors=("lse",),
    ),
    Mutant(
        "maximum-not-scaled-in-the-lse",
        KIND,
        "The lse adds the maximum of the scores as they are before the scale.",
        (Change("forward.py", "m * (tl.abs(scale) if exact else LN_2)", "m / (1.0 if exact else c)"),),
        witness=SMALL,
        tensors=("lse",),
    ),
    Mutant(
        "lse-with-the-sign-of-the-scale",
        KIND,
        "The maximum in the lse has the sign of the scale, and not of the scores times it.",
        (Change("forward.py", "m * (tl.abs(scale) if exact", "m * SIGN * (tl.abs(scale) if exact"),),
        witness="b1_h1x1_s5x5_d16x16_float16_full_scale=-0.25_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("lse",),
    ),
    Mutant(
        "lse-in-the-dtype-of-q",
        KIND,
        "The lse is stored in 16 bit.",
        (Change("launch.py", "q.new_empty(rows, dtype=torch.float32)", "q.new_empty(rows)"),),
        witness=SMALL,
        tensors=("lse",),
    ),
    Mutant(
        "lse-of-one-batch-entry",
        KIND,
        "The stride of the batch of the lse and delta is 0: right for a batch of one.",
        (Change("launch.py", "(lse.stride(0), lse.stride(1))", "(0, lse.stride(1))"),),
        witness="b2_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="L2",
        tensors=("lse",),
    ),
    Mutant(
        "lse-of-a-sequence-without-keys-in-the-first-rows",
        KIND,
        "Where a sequence has no key, its -inf goes to the rows of the first sequence.",
        (
            Change(
                "forward.py",
                "lse_base = head_base(Lse, b_q, stride_lb",
                "lse_base = head_base(Lse, tl.where(Sk > 0, b_q, 0), stride_lb",
            ),
        ),
        witness="b2_h1x1_r5x5+3x0_past0x0_d16x16_float16_full_scale=auto_normal_bshd_grad=none_nodlse_seed0",
        report="G2",
        tensors=("lse",),
    ),
    Mutant(
        "backward-takes-the-lse-for-base-2",
        KIND,
        "The recomputed P of dq subtracts the natural lse from an exponent of exp2.",
        (
            Change(
                "backward.py",
                'lse = load_row(lse_base, rows, q_rows, float("inf"), True) * LOG2_E',
                'lse = load_row(lse_base, rows, q_rows, float("inf"), True)',
            ),
        ),
        witness="b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        report="G1",
        tensors=("dq",),
    ),
    Mutant(
        "lse-of-the-kv-head-in-dk-dv",
        KIND,
        "dk and dv read the lse of the query head that has the number of the KV head.",
        (
            Change(
                "backward.py",
                "        lse_base = head_base(Lse, b_q, stride_lb, h, stride_lh, 1)",
                "        lse_base = head_base(Lse, b_q, stride_lb, h_kv, stride_lh, 1)",
            ),
        ),
        witness="b1_h2x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=kv_nodlse_seed0",
        tensors=("dk", "dv"),
    ),
)
