"""Dead rows: queries that see no key."""

from __future__ import annotations

from .mutant import Change, Mutant

KIND = "dead rows"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "out-of-dead-rows-divided-by-zero",
        KIND,
        "out is acc / l in rows that see no key too: NaN.",
        (Change("forward.py", "tl.where(live[:, None], acc[i] / l[:, None], 0.0)", "acc[i] / l[:, None]"),),
        witness="b1_h1x1_s2x1_d16x16_float16_causal_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="B7",
        tensors=("out",),
    ),
    Mutant(
        "lse-of-dead-rows-finite",
        KIND,
        "The lse of a row that sees no key is 0.",
        (Change("forward.py", 'tl.log(l), float("-inf"))', "tl.log(l), 0.0)"),),
        witness="b1_h1x1_s2x1_d16x16_float16_causal_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="B5",
        tensors=("lse",),
    ),
    Mutant(
        "lse-of-dead-rows-where-the-maximum-begins",
        KIND,
        "The lse of a row that sees no key is what the maximum begins with, the sum counting as 1.",
        (
            Change(
                "forward.py",
                'lse = tl.where(live, m + tl.log(l), float("-inf"))',
                "lse = m + tl.log(tl.where(live, l, 1.0))",
            ),
        ),
        witness="b1_h1x1_s2x1_d16x16_float16_causal_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="B5",
        tensors=("lse",),
    ),
    Mutant(
        "dead-rows-known-by-the-place-in-the-tile",
        KIND,
        "Whether a row is dead is asked of its number in the tile: live rows of later tiles come out as 0.",
        (
            Change(
                "forward.py",
                "live = is_visible(rows, 0, Sq, Sk, CAUSAL)\n    l =",
                "live = is_visible(tl.arange(0, rows.shape[0]), 0, Sq, Sk, CAUSAL)\n    l =",
            ),
        ),
        witness="b1_h1x1_s33x1_d16x16_float16_causal_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="B11",
        tensors=("out", "lse"),
    ),
    Mutant(
        "dead-rows-known-by-their-sum",
        KIND,
        "A row counts as dead if its sum of exponentials is 0: one of scores of minus infinity too.",
        (
            Change(
                "forward.py",
                "live = is_visible(rows, 0, Sq, Sk, CAUSAL)\n    l =",
                "live = tl.sum(l, 1) > 0.0\n    l =",
            ),
        ),
        witness="tests/test_flash_attention_values.py::test_a_row_of_scores_of_minus_infinity_is_not_taken_for_a_dead_row",
        tensors=("out",),
    ),
    Mutant(
        "lse-of-dead-rows-unguarded-in-dq",
        KIND,
        "In dq P is multiplied by the mask and nothing is set to 0: exp(s + inf) of a dead row is NaN.",
        (
            Change(
                "backward.py",
                "P = tl.where(visible, P, 0.0)\n        dP = scores(dO,",
                "P = P * tl.where(visible, 1.0, 0.0)\n        dP = scores(dO,",
            ),
            Change(
                "backward.py",
                "dq = where_live(times(dq, scale, D, WIDTH), live, D, WIDTH)",
                "dq = times(dq, scale, D, WIDTH)",
            ),
        ),
        witness="b1_h1x1_s2x1_d16x16_float16_causal_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        report="B4",
        tensors=("dq",),
    ),
    Mutant(
        "mask-by-multiplication",
        KIND,
        "The backward multiplies P by the mask: where a key that is not seen overflows it, it is NaN.",
        (Change("backward.py", "P = tl.where(visible, P, 0.0)", "P = P * tl.where(visible, 1.0, 0.0)", 2),),
        witness="b1_h1x1_s16x16_d64x64_float16_causal_scale=8.0_normal_bhsd_grad=qkv_nodlse_seed0",
        tensors=("dq", "dk", "dv"),
    ),
    Mutant(
        "dead-rows-of-dq-not-set-to-zero",
        KIND,
        "dq of a row that sees no key is what 0 times its d_out gives: NaN if d_out is.",
        (
            Change(
                "backward.py",
                "dq = where_live(times(dq, scale, D, WIDTH), live, D, WIDTH)",
                "dq = times(dq, scale, D, WIDTH)",
            ),
        ),
        witness="tests/test_flash_attention.py::test_nothing_of_a_dead_row_reaches_a_result",
        tensors=("dq",),
    ),
    Mutant(
        "dkdv-starts-at-a-whole-tile",
        KIND,
        "The loop over rows begins at a multiple of its tile: among dead rows, whose d_out may be NaN.",
        (
            Change(
                "backward.py",
                "start = tl.maximum(start_n - (Sk - Sq), 0)",
                "start = tl.maximum(start_n - (Sk - Sq), 0) // BM * BM",
            ),
        ),
        witness="tests/test_flash_attention.py::test_nothing_of_a_dead_row_reaches_a_result",
        tensors=("dk", "dv"),
    ),
)
