"""Online softmax: the running maximum, the running sum, and what is rescaled when the maximum moves."""

from __future__ import annotations

from .mutant import Change, Mutant

KIND = "online softmax"

TWO_TILES = "b1_h1x1_s5x17_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0"
SCALE_0 = "b1_h1x1_s5x5_d16x16_float16_full_scale=0.0_normal_bhsd_grad=none_nodlse_seed0"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "accumulator-not-rescaled",
        KIND,
        "What earlier tiles gave to out keeps the weight of the old maximum.",
        (Change("forward.py", "times(acc, alpha[:, None], DV, WIDTH)", "acc"),),
        witness=TWO_TILES,
        tensors=("out",),
    ),
    Mutant(
        "accumulator-rescaled-after-the-product",
        KIND,
        "The newest tile is rescaled along with the earlier ones.",
        (
            Change(
                "forward.py",
                "add_product(times(acc, alpha[:, None], DV, WIDTH), P, v, DV, WIDTH, PRECISION)",
                "times(add_product(acc, P, v, DV, WIDTH, PRECISION), alpha[:, None], DV, WIDTH)",
            ),
        ),
        witness=TWO_TILES,
        tensors=("out",),
    ),
    Mutant(
        "sum-not-rescaled",
        KIND,
        "What earlier tiles gave to l keeps the weight of the old maximum.",
        (Change("forward.py", "l = l * alpha[:, None] + tl.sum(", "l = l + tl.sum("),),
        witness=TWO_TILES,
        tensors=("out", "lse"),
    ),
    Mutant(
        "maximum-not-kept",
        KIND,
        "The maximum is not carried to the next tile: each tile begins anew.",
        (Change("forward.py", "m = m_new\n", "m = m\n"),),
        witness=TWO_TILES,
        tensors=("out", "lse"),
    ),
    Mutant(
        "maximum-of-the-latest-tile",
        KIND,
        "The maximum forgets earlier tiles; a tile in which a row sees nothing makes it -inf.",
        (
            Change("forward.py", "m_new = tl.maximum(m, tl.max(S, 1) * c)", "m_new = tl.max(S, 1) * c"),
            Change("forward.py", "m_new = tl.maximum(m, tl.max(S, 1))", "m_new = tl.max(S, 1)"),
        ),
        witness="b1_h1x1_s17x17_d16x16_float16_causal_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("lse",),
    ),
    Mutant(
        "one-maximum-for-all-rows-of-a-tile",
        KIND,
        "All rows of a tile subtract the largest score of any of them: others underflow.",
        (Change("forward.py", "tl.maximum(m, tl.max(S, 1)", "tl.maximum(m, tl.max(tl.max(S, 1), 0)", 2),),
        witness="b1_h1x1_s5x17_d16x16_float16_full_scale=auto_large_bhsd_grad=none_nodlse_seed0",
        tensors=("out",),
    ),
    Mutant(
        "rescaled-by-exp-instead-of-exp2",
        KIND,
        "The factor of earlier tiles is exp of an exponent that is meant for exp2.",
        (
            Change("forward.py", "tl.exp2(m - m_new)", "tl.exp(m - m_new)"),
            Change("forward.py", "tl.exp2((m - m_finite)", "tl.exp((m - m_finite)"),
        ),
        witness=TWO_TILES,
        tensors=("out", "lse"),
    ),
    Mutant(
        "factor-of-the-exponents-0-with-the-scale",
        KIND,
        "Where the scale is 0 so is the factor of the exponents: minus infinity times it is NaN.",
        (Change("forward.py", "c = 1.0  #", "c = 0.0  #"),),
        witness=SCALE_0,
        tensors=("out", "lse"),
    ),
    Mutant(
        "sign-of-a-scale-of-0",
        KIND,
        "A scale of 0 is taken for a positive one: the scores stay, and the factor of the exponents is 1.",
        (Change("forward.py", "if SIGN != 1:", "if SIGN < 0:"),),
        witness=SCALE_0,
        tensors=("out", "lse"),
    ),
    Mutant(
        "maximum-begins-above-the-scores",
        KIND,
        "The maximum begins at -5e3: rows whose scores are all lower are taken to have seen it.",
        (Change("forward.py", 'tl.full([BM], float("-inf") if exact else -LARGEST,', "tl.full([BM], -5e3,"),),
        witness="b1_h1x1_s5x1_d64x64_float16_full_scale=auto_very-negative_bhsd_grad=none_nodlse_seed0",
        report="F2",
        tensors=("out", "lse"),
    ),
    Mutant(
        "masked-scores-are-a-finite-number",
        KIND,
        "Masked scores are -1e4, which is more than true scores may be.",
        (Change("forward.py", 'tl.where(visible, S, float("-inf"))', "tl.where(visible, S, -1e4)"),),
        witness="b1_h1x1_s5x5_d64x64_float16_causal_scale=auto_very-negative_bhsd_grad=none_nodlse_seed0",
        report="F2",
        tensors=("out", "lse"),
    ),
    Mutant(
        "maximum-taken-before-a-negative-scale",
        KIND,
        "The largest score is subtracted where a negative scale makes the smallest the largest.",
        (
            Change("forward.py", "if SIGN != 1:", "if SIGN == 0:"),
            Change("forward.py", "c = tl.abs(scale) * LOG2_E", "c = scale * LOG2_E"),
            Change("forward.py", "l, m * tl.abs(scale), is_lost", "l, m * scale, is_lost"),
        ),
        witness="b1_h1x1_s5x17_d16x16_float16_full_scale=-3.0_normal_bhsd_grad=none_nodlse_seed0",
        report="H10",
        tensors=("out",),
    ),
    Mutant(
        "sign-of-a-negative-scale-left-out",
        KIND,
        "q is not multiplied by the sign of a negative scale, of which only the magnitude is left.",
        (Change("forward.py", "if SIGN != 1:", "if SIGN == 0:"),),
        witness="b1_h1x1_s5x5_d16x16_float16_full_scale=-0.25_normal_bhsd_grad=none_nodlse_seed0",
        report="H10",
        tensors=("out", "lse"),
    ),
    Mutant(
        "every-scale-taken-for-positive",
        KIND,
        "The launch code says that the scale is positive, whatever it is.",
        (Change("launch.py", "SIGN=(scale > 0) - (scale < 0)", "SIGN=1"),),
        witness=SCALE_0,
        tensors=("out", "lse"),
    ),
    Mutant(
        "only-the-first-of-the-partial-sums",
        KIND,
        "l is the first of the sums over every eighth key, and not all of them.",
        (
            Change(
                "forward.py",
                "l = tl.sum(l, 1)",
                "l = tl.sum(tl.where((tl.arange(0, l.shape[1]) == 0)[None, :], l, 0.0), 1)",
            ),
        ),
        witness=TWO_TILES,
        tensors=("out", "lse"),
    ),
    Mutant(
        "a-partial-sum-counted-twice",
        KIND,
        "Of the sums over every eighth key, which l adds up, it adds the last twice.",
        (
            Change(
                "forward.py",
                "l = tl.sum(l, 1)",
                "l = tl.sum(tl.where((tl.arange(0, l.shape[1]) == l.shape[1] - 1)[None, :], 2 * l, l), 1)",
            ),
        ),
        witness=TWO_TILES,
        tensors=("out", "lse"),
    ),
    Mutant(
        "partial-sums-of-the-latest-tile-alone",
        KIND,
        "The sums over every eighth key begin anew with each tile.",
        (Change("forward.py", "l = l * alpha[:, None] + tl.sum(", "l = l * 0.0 + tl.sum("),),
        witness=TWO_TILES,
        tensors=("out", "lse"),
    ),
    Mutant(
        "first-tile-rescales-by-1",
        KIND,
        "Where nothing has been seen yet, the factor of earlier tiles is 1, not 0.",
        (
            Change(
                "forward.py",
                "alpha = tl.exp2((m - m_finite) * c)",
                'alpha = tl.where(m == float("-inf"), 1.0, tl.exp2((m - m_finite) * c))',
            ),
        ),
        equivalent="l and acc are 0 there: it does not matter what they are multiplied by",
    ),
)
