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
        (Change("forward.py", "l = l * alpha + tl.sum(P, 1)", "l = l + tl.sum(P, 1)"),),
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
        (Change("forward.py", "m_new = tl.maximum(m, tl.max(S, 1))", "m_new = tl.max(S, 1)"),),
        witness="b1_h1x1_s17x17_d16x16_float16_causal_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("lse",),
    ),
    Mutant(
        "one-maximum-for-all-rows-of-a-tile",
        KIND,
        "All rows of a tile subtract the largest score of any of them: others underflow.",
        (Change("forward.py", "tl.max(S, 1))", "tl.max(tl.max(S, 1), 0))"),),
        witness="b1_h1x1_s5x17_d16x16_float16_full_scale=auto_large_bhsd_grad=none_nodlse_seed0",
        tensors=("out",),
    ),
    Mutant(
        "rescaled-by-exp-instead-of-exp2",
        KIND,
        "The factor of earlier tiles is exp of an exponent that is meant for exp2.",
        (Change("forward.py", "tl.exp2((m - m_finite)", "tl.exp((m - m_finite)"),),
        witness=TWO_TILES,
        tensors=("out", "lse"),
    ),
    Mutant(
        "factor-of-the-exponents-0-with-the-scale",
        KIND,
        "Where the scale is 0 so is the factor of the exponents: minus infinity times it is NaN.",
        (
            Change(
                "forward.py", "tl.where(scale == 0, 1.0, tl.abs(scale) * LOG2_E)", "tl.abs(scale) * LOG2_E"
            ),
        ),
        witness=SCALE_0,
        tensors=("out", "lse"),
    ),
    Mutant(
        "sign-of-a-scale-of-0",
        KIND,
        "A scale of 0 is taken for a positive one: the scores stay, and the factor of the exponents is 1.",
        (Change("forward.py", "tl.where(scale == 0, 0.0, 1.0)", "1.0"),),
        witness=SCALE_0,
        tensors=("out", "lse"),
    ),
    Mutant(
        "maximum-begins-at-a-finite-number",
        KIND,
        "The maximum begins at -5e4: rows whose scores are all lower are taken to have seen it.",
        (
            Change(
                "forward.py", 'tl.full([BM], float("-inf"), tl.float32)', "tl.full([BM], -5e4, tl.float32)"
            ),
        ),
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
            Change("forward.py", "tl.where(scale < 0, -1.0,", "tl.where(scale < 0, 1.0,"),
            Change("forward.py", "1.0, tl.abs(scale) * LOG2_E)", "1.0, scale * LOG2_E)"),
            Change("forward.py", "m * tl.abs(scale) + tl.log(l)", "m * scale + tl.log(l)"),
        ),
        witness="b1_h1x1_s5x17_d16x16_float16_full_scale=-3.0_normal_bhsd_grad=none_nodlse_seed0",
        report="H10",
        tensors=("out",),
    ),
    Mutant(
        "first-tile-rescales-by-1",
        KIND,
        "Where nothing has been seen yet, the factor of earlier tiles is 1, not 0.",
        (
            Change(
                "forward.py",
                "alpha = tl.exp2((m - m_finite) * exponent_scale)",
                'alpha = tl.where(m == float("-inf"), 1.0, tl.exp2((m - m_finite) * exponent_scale))',
            ),
        ),
        equivalent="l and acc are 0 there: it does not matter what they are multiplied by",
    ),
)
