"""Tails and bounds: the last tile of rows, of keys, of the head dimension."""

from __future__ import annotations

from .mutant import Change, Mutant

KIND = "tails and bounds"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "no-length-mask-in-the-last-key-tile",
        KIND,
        "Keys past the last one take part with score 0.",
        (Change("numerics.py", "return keys < Sk + 0 * rows", "return keys >= 0 * rows"),),
        witness="b1_h1x1_s1x1_d16x16_float16_full_scale=auto_negative_bhsd_grad=qkv_nodlse_seed0",
        report="A1",
        tensors=("out", "lse"),
    ),
    Mutant(
        "only-causal-scores-are-masked",
        KIND,
        "The forward masks its last keys only if the call is causal.",
        (Change("forward.py", "if MASKED:", "if MASKED and CAUSAL:"),),
        witness="b1_h1x1_s1x17_d16x16_float16_full_scale=auto_negative_bhsd_grad=none_nodlse_seed0",
        tensors=("out", "lse"),
    ),
    Mutant(
        "keys-past-the-end-not-masked-in-dq",
        KIND,
        "dq masks its last keys only if the call is causal: P of a key of score 0 may overflow.",
        (
            Change(
                "backward.py",
                "if MASKED:\n            visible = is_visible(rows[:, None]",
                "if MASKED and CAUSAL:\n            visible = is_visible(rows[:, None]",
            ),
        ),
        witness="b1_h1x1_s1x1_d64x64_float16_full_scale=auto_very-negative_bhsd_grad=qkv_nodlse_seed0",
        tensors=("dq",),
    ),
    Mutant(
        "keys-read-past-their-end-in-dq",
        KIND,
        "dq loads K without a bound in the last tile: 0 times NaN.",
        (
            Change(
                "backward.py",
                "k = load_tile(k_rows, keys, Sk, stride_kd, D, WIDTH, VECTOR, MASKED, EMULATE_BF16)",
                "k = load_tile(k_rows, keys, Sk, stride_kd, D, WIDTH, VECTOR, False, EMULATE_BF16)",
            ),
        ),
        witness="b1_h1x1_s1x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        report="A10",
        tensors=("dq",),
    ),
    Mutant(
        "values-read-past-their-end-in-the-forward",
        KIND,
        "The forward loads V without a bound in the last tile, right as long as memory holds finite numbers.",
        (
            Change(
                "forward.py",
                "v = load_tile(v_rows, keys, Sk, stride_vd, DV, WIDTH, VECTOR, MASKED, EMULATE_BF16)",
                "v = load_tile(v_rows, keys, Sk, stride_vd, DV, WIDTH, VECTOR, False, EMULATE_BF16)",
            ),
        ),
        witness="b1_h1x1_s1x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="N8",
        tensors=("out",),
    ),
    Mutant(
        "keys-read-past-their-end-in-the-forward",
        KIND,
        "The forward loads K without a bound in the last tile; the scores are masked all the same.",
        (
            Change(
                "forward.py",
                "k = load_tile(k_rows, keys, Sk, stride_kd, D, WIDTH, VECTOR, MASKED, EMULATE_BF16)",
                "k = load_tile(k_rows, keys, Sk, stride_kd, D, WIDTH, VECTOR, False, EMULATE_BF16)",
            ),
        ),
        witness="memcheck",
        report="A13",
        lane="sanitizer",
    ),
    Mutant(
        "keys-read-past-their-end-in-dkdv",
        KIND,
        "dK/dV loads its tile of K without a bound, beyond the sequence; those rows of dk are not stored.",
        (
            Change(
                "backward.py",
                "keys, of_k, stride_kd, D, WIDTH, VECTOR,\n                  True,",
                "keys, of_k, stride_kd, D, WIDTH, VECTOR,\n                  False,",
            ),
        ),
        witness="memcheck",
        report="A14",
        lane="sanitizer",
    ),
    Mutant(
        "queries-read-past-their-end-in-the-forward",
        KIND,
        "The forward loads its tile of Q without a bound; those rows of out are not stored.",
        (
            Change(
                "forward.py",
                "rows, q_rows, stride_qd, D, WIDTH,\n                  VECTOR, True,",
                "rows, q_rows, stride_qd, D, WIDTH,\n                  VECTOR, False,",
            ),
        ),
        witness="memcheck",
        lane="sanitizer",
    ),
    Mutant(
        "store-of-a-row-too-many",
        KIND,
        "Every store of a tile writes the row behind the last one too.",
        (
            Change(
                "numerics.py",
                "tl.store(where, x, mask=(rows < n_rows)[:, None]",
                "tl.store(where, x, mask=(rows < n_rows + 1)[:, None]",
            ),
        ),
        witness="b1_h1x1_s1x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="A4",
        tensors=("memory",),
    ),
    Mutant(
        "store-of-dv-not-bounded",
        KIND,
        "The last tile of dv is stored whole, over the next head.",
        (
            Change(
                "backward.py",
                "store_tile(dv_rows, dv, keys, Sk, stride_dvd,",
                "store_tile(dv_rows, dv, keys, start_n + BN, stride_dvd,",
            ),
        ),
        witness="b1_h1x1_s1x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=v_nodlse_seed0",
        report="A5",
        tensors=("memory",),
    ),
    Mutant(
        "store-of-lse-not-bounded",
        KIND,
        "The last tile of the lse is stored whole, over the next head.",
        (Change("forward.py", "+ rows, lse, mask=stored < Sq)", "+ rows, lse)"),),
        witness="b1_h1x1_s1x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("memory",),
    ),
    Mutant(
        "store-of-delta-not-bounded",
        KIND,
        "The last tile of delta, which no caller sees, is stored whole.",
        (Change("backward.py", "+ rows, delta, mask=rows < Sq)", "+ rows, delta)"),),
        witness="b1_h1x1_s1x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        tensors=("memory",),
    ),
    Mutant(
        "lse-and-delta-read-past-their-end",
        KIND,
        "The backward reads lse and delta without a bound: 0 times NaN in dk and dv.",
        (Change("backward.py", "tl.load(base + rows, mask=rows < Sq, other=other)", "tl.load(base + rows)"),),
        witness="b1_h1x1_s1x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=k_nodlse_seed0",
        report="A10",
        tensors=("dk",),
    ),
    Mutant(
        "gradient-of-out-read-past-its-end-in-dkdv",
        KIND,
        "dK/dV loads d_out without a bound in the last tile of rows: 0 times NaN.",
        (
            Change(
                "backward.py",
                "dO = load_tile(do_rows, rows, Sq, stride_dod, DV, WIDTH, VECTOR, MASKED, EMULATE_BF16)",
                "dO = load_tile(do_rows, rows, Sq, stride_dod, DV, WIDTH, VECTOR, False, EMULATE_BF16)",
            ),
        ),
        witness="b1_h1x1_s1x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=v_nodlse_seed0",
        tensors=("dv",),
    ),
    Mutant(
        "queries-read-past-their-end-in-dkdv",
        KIND,
        "dK/dV loads q without a bound in the last tile of rows: 0 times NaN.",
        (
            Change(
                "backward.py",
                "q = load_tile(q_rows, rows, Sq, stride_qd, D, WIDTH, VECTOR, MASKED, EMULATE_BF16)",
                "q = load_tile(q_rows, rows, Sq, stride_qd, D, WIDTH, VECTOR, False, EMULATE_BF16)",
            ),
        ),
        witness="b1_h1x1_s1x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=k_nodlse_seed0",
        tensors=("dk",),
    ),
    Mutant(
        "last-tile-of-rows-in-dkdv-left-out",
        KIND,
        "Query rows that do not fill a tile give nothing to dk and dv.",
        (Change("backward.py", "behind = tl.where(whole < Sq, 1, 0)", "behind = 0"),),
        witness="b1_h1x1_s17x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=v_nodlse_seed0",
        tensors=("dv",),
    ),
    Mutant(
        "last-tile-of-rows-in-dkdv-taken-for-whole",
        KIND,
        "The range of rows that dK/dV reads unchecked is rounded up: it ends past the last query.",
        (
            Change(
                "backward.py",
                "whole = full + (Sq - full) // BM * BM",
                "whole = full + tl.cdiv(Sq - full, BM) * BM",
            ),
        ),
        witness="b1_h1x1_s1x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=kv_nodlse_seed0",
        report="N1",
        tensors=("dk", "dv"),
    ),
    Mutant(
        "rows-beside-whole-tiles-in-dkdv-not-checked",
        KIND,
        "dK/dV takes the tiles before and behind the whole ones for whole: no mask, no bound.",
        (
            Change(
                "backward.py",
                "CAUSAL, True, VECTOR,\n            PRECISION",
                "CAUSAL, False, VECTOR,\n            PRECISION",
            ),
        ),
        witness="b1_h1x1_s17x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=kv_nodlse_seed0",
        tensors=("dk", "dv"),
    ),
    Mutant(
        "padding-of-the-head-dimension-not-zeroed",
        KIND,
        "In whole tiles the columns past the head dimension hold what lies behind each row.",
        (Change("numerics.py", "return tl.load(where, mask=inside, other=0.0)", "return tl.load(where)"),),
        witness="b1_h1x1_s1x16_d17x17_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="A7",
        tensors=("out", "lse"),
    ),
    Mutant(
        "columns-past-the-head-dimension-in-the-last-tile",
        KIND,
        "In tiles whose rows are checked the columns are not: the next row's begin where a row ends.",
        (
            Change(
                "numerics.py",
                "mask=(rows < n_rows)[:, None] & inside, other=0.0)",
                "mask=(rows < n_rows)[:, None], other=0.0)",
            ),
        ),
        witness="b1_h1x1_s2x2_d17x17_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("out", "lse"),
    ),
    Mutant(
        "padding-columns-of-dq-stored",
        KIND,
        "dq is stored as wide as it is padded, over the row behind.",
        (
            Change(
                "backward.py",
                "store_tile(dq_rows, dq, rows, Sq, stride_dqd, D, WIDTH,",
                "store_tile(dq_rows, dq, rows, Sq, stride_dqd, (D + 15) // 16 * 16, WIDTH,",
            ),
        ),
        witness="b1_h1x1_s1x1_d17x17_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        report="A8",
        tensors=("memory",),
    ),
    Mutant(
        "only-the-first-64-columns",
        KIND,
        "The width of the tiles of q and k is at most 64.",
        (Change("launch.py", '"D": q.shape[-1],', '"D": min(q.shape[-1], 64),'),),
        witness="b1_h1x1_s1x2_d65x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="A11",
        tensors=("out", "lse"),
    ),
    Mutant(
        "last-tile-of-keys-reads-the-next-head",
        KIND,
        "The forward counts its keys up to whole tiles: the last one ends in the next head.",
        (
            Change(
                "forward.py",
                "k_base, v_base, full, end, rows, Sq, Sk,",
                "k_base, v_base, full, end, rows, Sq, tl.cdiv(Sk, BN) * BN,",
            ),
        ),
        witness="b1_h2x2_s1x17_d16x16_float16_full_scale=auto_loud_bhsd_grad=none_nodlse_seed0",
        report="A2",
        tensors=("out", "lse"),
    ),
    Mutant(
        "last-tile-of-keys-left-out",
        KIND,
        "Keys that do not fill a tile are not visited.",
        (Change("numerics.py", "end = Sk\n", "end = Sk // BN * BN\n"),),
        witness="b1_h1x1_s1x17_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("out", "lse"),
    ),
    Mutant(
        "last-tile-of-keys-taken-for-whole",
        KIND,
        "The range of tiles that need no mask is rounded up: the path for even lengths takes the last one.",
        (
            Change(
                "numerics.py",
                "return seen_by_first // BN * BN, end",
                "return tl.cdiv(seen_by_first, BN) * BN, end",
            ),
        ),
        witness="b1_h1x1_s1x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="N1",
        tensors=("out", "lse"),
    ),
    Mutant(
        "last-tile-of-rows-not-launched",
        KIND,
        "The grid has a program only for each whole tile of rows.",
        (
            Change(
                "launch.py",
                "programs = heads * -(-length // rows)",
                "programs = heads * max(length // rows, 1)",
            ),
            Change("position.py", "n_tiles = tl.cdiv(Sq, BM)", "n_tiles = tl.maximum(Sq // BM, 1)"),
            Change("position.py", "n_tiles = tl.cdiv(Sk, BN)", "n_tiles = tl.maximum(Sk // BN, 1)"),
        ),
        witness="b1_h1x1_s33x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("out", "lse"),
    ),
)
