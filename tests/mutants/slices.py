"""Slices: the head dimension in several tiles, and row pointers that go on from tile to tile."""

from __future__ import annotations

from .mutant import Change, Mutant

KIND = "slices and row pointers"

TWO_SLICES = "b1_h1x1_s5x5_d40x40_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0"
TWO_SLICES_DQ = "b1_h1x1_s5x5_d40x40_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0"
SEVERAL_TILES = "b1_h1x1_s5x33_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "every-slice-read-where-the-first-lies",
        KIND,
        "All slices of a tile are loaded with the pointers of the first.",
        (
            Change(
                "numerics.py",
                "stride_dim, DIM, WIDTH, VECTOR)\n    columns: tl",
                "stride_dim, DIM, WIDTH, VECTOR) - i * WIDTH * stride_dim\n    columns: tl",
            ),
        ),
        witness="b1_h1x1_s5x5_d64x64_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="A11",
        tensors=("out", "lse"),
    ),
    Mutant(
        "every-slice-stored-where-the-first-lies",
        KIND,
        "All slices of a result are stored over the first.",
        (
            Change(
                "numerics.py",
                "stride_dim, DIM, WIDTH, VECTOR)\n    columns = i",
                "stride_dim, DIM, WIDTH, VECTOR) - i * WIDTH * stride_dim\n    columns = i",
            ),
        ),
        witness=TWO_SLICES,
        tensors=("out",),
    ),
    Mutant(
        "products-with-the-first-slice-alone",
        KIND,
        "Every slice of out, dq, dk and dv adds the product with the first slice of what is multiplied.",
        (Change("numerics.py", "tl.dot(a, b[i], acc[i],", "tl.dot(a, b[0], acc[i],"),),
        witness="b1_h1x1_s5x5_d64x64_float16_full_scale=auto_normal_bhsd_grad=qkv_nodlse_seed0",
        tensors=("out", "dq", "dk", "dv"),
    ),
    Mutant(
        "scores-of-the-last-slice",
        KIND,
        "The sum of the scores begins anew with each slice.",
        (Change("numerics.py", "tl.trans(b[i]), x, input", "tl.trans(b[i]), input"),),
        witness=TWO_SLICES,
        tensors=("out", "lse"),
    ),
    Mutant(
        "only-the-first-slice-of-out-rescaled",
        KIND,
        "When the maximum moves, all slices of the accumulator but the first keep their weight.",
        (
            Change(
                "forward.py",
                "times(acc, alpha[:, None], DV, WIDTH)",
                "(acc[0] * alpha[:, None],) + acc[1:]",
            ),
        ),
        witness="b1_h1x1_s5x17_d16x40_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("out",),
    ),
    Mutant(
        "sign-of-the-scale-for-the-first-slice-alone",
        KIND,
        "A negative scale turns the sign of the first slice of q, and not that of the others.",
        (Change("forward.py", "times(q, SIGN, D, WIDTH)", "(q[0] * SIGN,) + q[1:]"),),
        witness="b1_h1x1_s5x5_d40x40_float16_full_scale=-0.25_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("out", "lse"),
    ),
    Mutant(
        "slices-of-d-for-dp",
        KIND,
        "dP of dq is summed over as many slices as q has, not over those of v.",
        (Change("backward.py", "scores(dO, v, DV, WIDTH", "scores(dO, v, D, WIDTH"),),
        witness="b1_h1x1_s5x5_d16x64_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        report="H2",
        tensors=("dq",),
    ),
    Mutant(
        "last-slice-too-narrow",
        KIND,
        "The last slice is the power of two that is in what is left, not the one that holds it.",
        (Change("numerics.py", "1 << (left - 1).bit_length()", "1 << left.bit_length() - 1"),),
        witness="b1_h1x1_s5x5_d56x56_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="A11",
        tensors=("out", "lse"),
    ),
    Mutant(
        "columns-that-fill-no-slice-left-out",
        KIND,
        "The number of slices is rounded down.",
        (Change("numerics.py", "return -(-DIM // WIDTH)", "return max(DIM // WIDTH, 1)"),),
        witness=TWO_SLICES,
        report="A11",
        tensors=("out", "lse"),
    ),
    Mutant(
        "columns-of-each-slice-counted-from-0",
        KIND,
        "The last slice is loaded past the head dimension: its mask does not know where it begins.",
        (Change("numerics.py", "inside = (i * WIDTH + tl.arange", "inside = (tl.arange"),),
        witness=TWO_SLICES,
        report="A7",
        tensors=("out", "lse"),
    ),
    Mutant(
        "columns-of-each-stored-slice-counted-from-0",
        KIND,
        "The last slice is stored past the head dimension, over the row behind.",
        (Change("numerics.py", "columns = i * WIDTH + tl.arange(", "columns = tl.arange("),),
        witness=TWO_SLICES,
        report="A8",
        tensors=("memory",),
    ),
    Mutant(
        "pointers-of-k-do-not-go-on",
        KIND,
        "The forward reads the first tile of keys of each loop again and again: its pointers do not go on.",
        (Change("forward.py", "        k_rows += row_step(stride_kn, VECTOR) * BN\n", ""),),
        witness=SEVERAL_TILES,
        tensors=("out", "lse"),
    ),
    Mutant(
        "pointers-of-v-go-on-by-the-other-tile",
        KIND,
        "For dq the pointers of V go on by as many rows as a tile of queries has.",
        (
            Change(
                "backward.py",
                "v_rows += row_step(stride_vn, VECTOR) * BN",
                "v_rows += row_step(stride_vn, VECTOR) * rows.shape[0]",
            ),
        ),
        witness="b1_h1x1_s5x33_d16x16_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        tensors=("dq",),
    ),
    Mutant(
        "pointers-of-d-out-go-on-by-the-stride-of-q",
        KIND,
        "For dk and dv the pointers of d_out go on by the stride of the rows of q.",
        (
            Change(
                "backward.py",
                "do_rows += row_step(stride_dom, VECTOR) * BM",
                "do_rows += row_step(stride_qm, VECTOR) * BM",
            ),
        ),
        witness="b1_h1x1_s33x5_d16x32_float16_full_scale=auto_normal_bhsd_grad=kv_nodlse_seed0",
        tensors=("dk", "dv"),
    ),
    Mutant(
        "pointers-of-the-masked-keys-begin-at-0",
        KIND,
        "The forward's loop over the keys that need a mask reads from the first key on.",
        (Change("forward.py", "first = start + tl.arange(0, BN)", "first = tl.arange(0, BN)"),),
        witness="b1_h1x1_s5x17_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("out", "lse"),
    ),
)
