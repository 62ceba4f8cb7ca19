"""Causal alignment and loop bounds: which keys a row sees, and which tiles are visited for it."""

from __future__ import annotations

from .mutant import Change, Mutant

KIND = "causal alignment and loop bounds"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "strictly-below-the-diagonal",
        KIND,
        "A row does not see the key on its diagonal.",
        (Change("numerics.py", "rows + (Sk - Sq), Sk - 1)", "rows + (Sk - Sq) - 1, Sk - 1)"),),
        witness="b1_h1x1_s1x1_d16x16_float16_causal_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="B13",
        tensors=("out", "lse"),
    ),
    Mutant(
        "mask-aligned-at-the-top-left",
        KIND,
        "The mask is j <= i whatever the lengths are.",
        (Change("numerics.py", "rows + (Sk - Sq), Sk - 1)", "rows, Sk - 1)"),),
        witness="b1_h1x1_s1x2_d16x16_float16_causal_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="B1",
        tensors=("out", "lse"),
    ),
    Mutant(
        "keys-end-as-if-aligned-at-the-top-left",
        KIND,
        "The loop over keys ends without Sk - Sq; the mask is right.",
        (
            Change(
                "numerics.py",
                "end = tl.minimum(tl.maximum(start_m + BM + (Sk - Sq), 0), Sk)",
                "end = tl.minimum(start_m + BM, Sk)",
            ),
        ),
        witness="b1_h1x1_s1x33_d16x16_float16_causal_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="B2",
        tensors=("out", "lse"),
    ),
    Mutant(
        "keys-end-one-too-soon",
        KIND,
        "The loop over keys ends before the key that only the tile's last row sees.",
        (
            Change(
                "numerics.py",
                "end = tl.minimum(tl.maximum(start_m + BM + (Sk - Sq), 0), Sk)",
                "end = tl.minimum(tl.maximum(start_m + BM - 1 + (Sk - Sq), 0), Sk)",
            ),
        ),
        witness="b1_h1x1_s32x17_d16x16_float16_causal_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("out", "lse"),
    ),
    Mutant(
        "keys-without-a-mask-one-too-many",
        KIND,
        "A tile of keys is taken for whole though the first row does not see its last key.",
        (
            Change(
                "numerics.py",
                "seen_by_first = tl.minimum(tl.maximum(start_m + 1 +",
                "seen_by_first = tl.minimum(tl.maximum(start_m + 2 +",
            ),
        ),
        witness="b1_h1x1_s2x16_d16x16_float16_causal_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("out", "lse"),
    ),
    Mutant(
        "loop-over-keys-not-clamped-at-zero",
        KIND,
        "Where the first rows see nothing, the loop over keys begins before the first one.",
        (
            Change(
                "numerics.py",
                "seen_by_first = tl.minimum(tl.maximum(start_m + 1 + (Sk - Sq), 0), Sk)",
                "seen_by_first = tl.minimum(start_m + 1 + (Sk - Sq), Sk)",
            ),
        ),
        witness="b1_h1x1_s18x1_d16x16_float16_causal_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="I5",
        tensors=("out",),
    ),
    Mutant(
        "backward-ignores-causal",
        KIND,
        "Both backward kernels are told that the call is not causal.",
        (
            Change(
                "launch.py",
                "BM=tile.BM, BN=tile.BN, CAUSAL=causal, RAGGED=ragged is not None,\n                VECTOR",
                "BM=tile.BM, BN=tile.BN, CAUSAL=False, RAGGED=ragged is not None,\n                VECTOR",
                2,
            ),
        ),
        witness="b1_h1x1_s2x2_d16x16_float16_causal_scale=auto_normal_bhsd_grad=qkv_nodlse_seed0",
        report="B8",
        tensors=("dq", "dk", "dv"),
    ),
    Mutant(
        "backward-always-causal",
        KIND,
        "Both backward kernels are told that the call is causal.",
        (
            Change(
                "launch.py",
                "BM=tile.BM, BN=tile.BN, CAUSAL=causal, RAGGED=ragged is not None,\n                VECTOR",
                "BM=tile.BM, BN=tile.BN, CAUSAL=True, RAGGED=ragged is not None,\n                VECTOR",
                2,
            ),
        ),
        witness="b1_h1x1_s2x2_d16x16_float16_full_scale=auto_normal_bhsd_grad=qkv_nodlse_seed0",
        report="B8",
        tensors=("dq", "dk", "dv"),
    ),
    Mutant(
        "causal-mask-missing-in-the-forward",
        KIND,
        "The forward's tiles on the diagonal are masked by the length alone.",
        (
            Change(
                "forward.py",
                "visible = is_visible(rows[:, None], keys[None, :], Sq, Sk, CAUSAL)",
                "visible = is_visible(rows[:, None], keys[None, :], Sq, Sk, False)",
            ),
        ),
        witness="b1_h1x1_s2x2_d16x16_float16_causal_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("out", "lse"),
    ),
    Mutant(
        "causal-mask-missing-in-dq",
        KIND,
        "The tiles of dq on the diagonal are masked by the length alone.",
        (
            Change(
                "backward.py",
                "visible = is_visible(rows[:, None], keys[None, :], Sq, Sk, CAUSAL)",
                "visible = is_visible(rows[:, None], keys[None, :], Sq, Sk, False)",
            ),
        ),
        witness="b1_h1x1_s2x2_d16x16_float16_causal_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        tensors=("dq",),
    ),
    Mutant(
        "causal-mask-missing-in-dkdv",
        KIND,
        "The tiles of dk and dv on the diagonal are masked by the length alone.",
        (
            Change(
                "backward.py",
                "visible = is_visible(rows[None, :], keys[:, None], Sq, Sk, CAUSAL)",
                "visible = is_visible(rows[None, :], keys[:, None], Sq, Sk, False)",
            ),
        ),
        witness="b1_h1x1_s2x2_d16x16_float16_causal_scale=auto_normal_bhsd_grad=kv_nodlse_seed0",
        tensors=("dk", "dv"),
    ),
    Mutant(
        "dkdv-starts-a-tile-late",
        KIND,
        "The rows on the diagonal give nothing to dk and dv.",
        (
            Change(
                "backward.py",
                "start = tl.maximum(start_n - (Sk - Sq), 0)",
                "start = tl.maximum(start_n + BM - (Sk - Sq), 0)",
            ),
        ),
        witness="b1_h1x1_s1x1_d16x16_float16_causal_scale=auto_normal_bhsd_grad=v_nodlse_seed0",
        report="B13",
        tensors=("dv",),
    ),
    Mutant(
        "dkdv-starts-as-if-aligned-at-the-top-left",
        KIND,
        "The loop over rows begins at the tile's first key, without Sk - Sq.",
        (Change("backward.py", "start = tl.maximum(start_n - (Sk - Sq), 0)", "start = start_n"),),
        witness="b1_h1x1_s1x33_d16x16_float16_causal_scale=auto_normal_bhsd_grad=v_nodlse_seed0",
        tensors=("dv",),
    ),
    Mutant(
        "rows-of-dkdv-without-a-mask-one-too-many",
        KIND,
        "A tile of rows goes unmasked though its first row does not see the tile's last key.",
        (Change("backward.py", "tl.maximum(start_n + BN - 1 - (Sk", "tl.maximum(start_n + BN - 2 - (Sk"),),
        witness="b1_h1x1_s32x46_d16x16_float16_causal_scale=auto_normal_bhsd_grad=kv_nodlse_seed0",
        tensors=("dk", "dv"),
    ),
    Mutant(
        "rows-of-dkdv-end-one-too-soon",
        KIND,
        "The last query gives nothing to dk and dv where it begins a tile of its own.",
        (Change("backward.py", "tl.where(whole < Sq, 1, 0)", "tl.where(whole < Sq - 1, 1, 0)"),),
        witness="b1_h1x1_s17x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=v_nodlse_seed0",
        report="I7",
        tensors=("dv",),
    ),
    Mutant(
        "every-other-tile-of-rows-in-dkdv",
        KIND,
        "dK/dV steps over two whole tiles of rows at a time and visits the first of them.",
        (
            Change("backward.py", "for i in range(full, whole, BM):", "for i in range(full, whole, 2 * BM):"),
            Change("backward.py", "(stride_qm, VECTOR) * BM", "(stride_qm, VECTOR) * (2 * BM)"),
            Change("backward.py", "(stride_dom, VECTOR) * BM", "(stride_dom, VECTOR) * (2 * BM)"),
        ),
        witness="b1_h1x1_s64x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=v_nodlse_seed0",
        tensors=("dv",),
    ),
    Mutant(
        "rows-before-whole-tiles-in-dkdv-added-twice",
        KIND,
        "The loop over whole tiles of rows begins where the loop over masked ones does.",
        (
            Change("backward.py", "first = full + tl.arange(0, BM)", "first = start + tl.arange(0, BM)"),
            Change("backward.py", "for i in range(full, whole, BM):", "for i in range(start, whole, BM):"),
        ),
        witness="b1_h1x1_s2x2_d16x16_float16_causal_scale=auto_normal_bhsd_grad=kv_nodlse_seed0",
        tensors=("dk", "dv"),
    ),
    Mutant(
        "first-tile-of-masked-rows-in-dkdv-repeated",
        KIND,
        "Each turn of dK/dV's loop over masked rows takes the first tile of them.",
        (Change("backward.py", "n < before, start + n * BM, whole", "n < before, start, whole"),),
        witness="b1_h1x1_s32x32_d16x16_float16_causal_scale=auto_normal_bhsd_grad=kv_nodlse_seed0",
        tensors=("dk", "dv"),
    ),
    Mutant(
        "rows-behind-whole-tiles-in-dkdv-taken-from-before-them",
        KIND,
        "The loop over masked rows does not step over the whole tiles: it adds the first of them again.",
        (Change("backward.py", "tl.where(n < before, start + n * BM, whole) + tl", "start + n * BM + tl"),),
        witness="b1_h1x1_s17x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=v_nodlse_seed0",
        tensors=("dv",),
    ),
    Mutant(
        "dq-starts-a-tile-late",
        KIND,
        "The first tile of keys gives nothing to dq.",
        (
            Change(
                "backward.py",
                "delta, k_base, v_base, 0, full, rows,",
                "delta, k_base, v_base, BN, full, rows,",
            ),
        ),
        witness="b1_h1x1_s1x16_d16x16_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        tensors=("dq",),
    ),
    Mutant(
        "masked-rows-not-bounded-by-the-last",
        KIND,
        "The masked loop of dK/dV runs to the end of its last tile, past the last query.",
        (
            Change(
                "backward.py",
                "full = tl.minimum(start + tl.cdiv(seen_whole - start, BM) * BM, Sq)",
                "full = start + tl.cdiv(seen_whole - start, BM) * BM",
            ),
        ),
        witness="b1_h1x1_s1x1_d16x16_float16_causal_scale=auto_normal_bhsd_grad=kv_nodlse_seed0",
        equivalent="rows past the last are loaded as 0 with an lse of infinity, whichever loop visits them",
    ),
    Mutant(
        "lightest-tiles-first",
        KIND,
        "Tiles of query rows are worked on from the first to the last, though the last see most keys.",
        (
            Change(
                "position.py",
                "start_m = (n_tiles - 1 - program % n_tiles) * BM",
                "start_m = program % n_tiles * BM",
            ),
        ),
        witness="b1_h1x1_s33x17_d16x16_float16_causal_scale=auto_normal_bhsd_grad=qkv_nodlse_seed0",
        equivalent="each tile has a program of its own: their order costs time only",
    ),
)
