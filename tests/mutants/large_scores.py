"""Large scores: rows that are lost where a rounded maximum is subtracted, and are worked out again."""

from __future__ import annotations

from .mutant import Change, Mutant

KIND = "large scores"

VALUES = "tests/test_flash_attention_values.py"
ONE_KEY = "b1_h2x2_s1x1_d64x64_bfloat16_full_scale=10000000000.0_normal_bhsd_grad=none_nodlse_seed0"
ONE_KEY_BELOW = "b1_h2x2_s1x1_d64x64_bfloat16_full_scale=-10000000000.0_normal_bhsd_grad=none_nodlse_seed0"
LARGEST = f"{VALUES}::test_the_largest_scores_are_exact_and_leave_their_neighbours_alone"
NAN_IN_Q = f"{VALUES}::test_a_nan_in_q_shows_in_its_own_row_alone"

IS_LOST = "return ~(tl.abs(m) < LARGEST)"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "lost-rows-not-worked-out-again",
        KIND,
        "Rows whose scores are too large for a rounded maximum stay as they were.",
        (Change("forward.py", "is_lost(m), 1, 0), 0) > 0:", "is_lost(m), 1, 0), 0) > 1:"),),
        witness=ONE_KEY_BELOW,
        report="F1",
        tensors=("out", "lse"),
    ),
    Mutant(
        "rows-below-not-worked-out-again",
        KIND,
        "Rows whose scores are all lower than what the maximum begins with are taken to have seen it.",
        (Change("forward.py", IS_LOST, "return ~(m < LARGEST)"),),
        witness=ONE_KEY_BELOW,
        report="F2",
        tensors=("out", "lse"),
    ),
    Mutant(
        "all-rows-beside-a-lost-one-stored-again",
        KIND,
        "Where one row is lost, all of its tile are stored as they are worked out again: other bits.",
        (Change("forward.py", "is_lost(m * c), o_base", "rows < Sq, o_base"),),
        witness=NAN_IN_Q,
        tensors=("out", "lse"),
    ),
    Mutant(
        "only-the-first-16-rows-worked-out-again",
        KIND,
        "Of a tile only the first 16 rows are worked out again.",
        (
            Change(
                "forward.py", "range(start_m, start_m + BM, EXACT_ROWS)", "range(start_m, start_m + BM, BM)"
            ),
        ),
        witness=LARGEST,
        tensors=("out", "lse"),
    ),
    Mutant(
        "rows-worked-out-again-from-the-first-tile-of-keys",
        KIND,
        "Rows that are worked out again see the first 16 keys alone.",
        (
            Change(
                "forward.py",
                "v_base, 0, end, rows, Sq, Sk, c,",
                "v_base, 0, tl.minimum(end, EXACT_KEYS), rows, Sq, Sk, c,",
            ),
        ),
        witness=LARGEST,
        tensors=("out", "lse"),
    ),
    Mutant(
        "rows-worked-out-again-without-a-mask",
        KIND,
        "Rows that are worked out again see all keys of the tiles that they visit.",
        (Change("forward.py", "EXACT_KEYS, CAUSAL, True, True,", "EXACT_KEYS, CAUSAL, False, True,"),),
        witness=ONE_KEY_BELOW,
        tensors=("out", "lse"),
    ),
    Mutant(
        "rows-worked-out-again-as-if-not-causal",
        KIND,
        "Rows that are worked out again see keys above the diagonal.",
        (Change("forward.py", "EXACT_KEYS, CAUSAL, True, True,", "EXACT_KEYS, False, True, True,"),),
        witness=LARGEST,
        report="B13",
        tensors=("out", "lse"),
    ),
    Mutant(
        "maximum-not-scaled-in-the-lse-of-rows-worked-out-again",
        KIND,
        "In rows that are worked out again the lse adds the maximum of the scores before the scale.",
        (Change("forward.py", "l, m * tl.abs(scale), is_lost", "l, m, is_lost"),),
        witness="b1_h1x1_s5x5_d64x64_float16_full_scale=auto_very-negative_bhsd_grad=none_nodlse_seed0",
        tensors=("lse",),
    ),
    Mutant(
        "lse-of-rows-worked-out-again-with-the-sign-of-the-scale",
        KIND,
        "In rows that are worked out again the maximum in the lse has the sign of the scale.",
        (Change("forward.py", "l, m * tl.abs(scale), is_lost", "l, m * scale, is_lost"),),
        witness=LARGEST,
        tensors=("lse",),
    ),
    Mutant(
        "sign-of-the-scale-left-out-of-rows-worked-out-again",
        KIND,
        "Rows that are worked out again take a negative scale for its magnitude.",
        (
            Change(
                "forward.py",
                "D, WIDTH, SIGN, VECTOR, EMULATE_BF16)\n        acc =",
                "D, WIDTH, 1, VECTOR, EMULATE_BF16)\n        acc =",
            ),
        ),
        witness=LARGEST,
        tensors=("lse",),
    ),
    Mutant(
        "maximum-begins-above-the-scores-of-rows-worked-out-again",
        KIND,
        "The maximum of rows that are worked out again begins at -5e4.",
        (
            Change(
                "forward.py",
                'tl.full([EXACT_ROWS], float("-inf"), tl.float32)',
                "tl.full([EXACT_ROWS], -5e4, tl.float32)",
            ),
        ),
        witness=LARGEST,
        report="F2",
        tensors=("out", "lse"),
    ),
)
