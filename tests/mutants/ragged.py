"""Ragged batches: offsets of sequences, the table of tiles, sequences without rows, rows behind the last."""

from __future__ import annotations

from .mutant import Change, Mutant

KIND = "ragged batches"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "lse-of-another-sequence",
        KIND,
        "dK/dV reads the lse at the rows where the keys of its sequence begin.",
        (
            Change(
                "backward.py",
                "        lse_base = head_base(Lse, b_q, stride_lb, h, stride_lh, 1)",
                "        lse_base = head_base(Lse, b_k, stride_lb, h, stride_lh, 1)",
            ),
        ),
        witness="b2_h1x1_r2x1+1x1_past0x0_d16x16_float16_full_scale=auto_normal_bshd_grad=kv_nodlse_seed0",
        report="C8",
        tensors=("dv",),
    ),
    Mutant(
        "delta-of-the-first-sequence",
        KIND,
        "dq reads delta from the batch's first row on, whatever its sequence is.",
        (
            Change(
                "backward.py",
                "    delta_base = head_base(Delta, b_q, stride_lb, h, stride_lh, 1)\n    q_rows",
                "    delta_base = head_base(Delta, 0, stride_lb, h, stride_lh, 1)\n    q_rows",
            ),
        ),
        witness="b2_h1x1_r2of1x2_past0x0_d16x16_float16_full_scale=auto_normal_bshd_grad=q_nodlse_seed0",
        report="C8",
        tensors=("dq",),
    ),
    Mutant(
        "keys-begin-where-the-queries-do",
        KIND,
        "The table gives a sequence's own first row for both sides.",
        (Change("ragged.py", "tl.store(entry + 3, first_other", "tl.store(entry + 3, first"),),
        witness="b2_h1x1_r1x2+1x1_past0x0_d16x16_float16_full_scale=auto_normal_bshd_grad=none_nodlse_seed0",
        tensors=("out",),
    ),
    Mutant(
        "keys-of-all-sequences",
        KIND,
        "A sequence's length on the other side is that of the whole buffer.",
        (Change("ragged.py", "tl.store(entry + 4, length_other", "tl.store(entry + 4, total_other"),),
        witness="b2_h1x1_r2of1x1_past0x0_d16x16_float16_full_scale=auto_normal_bshd_grad=none_nodlse_seed0",
        report="L10",
        tensors=("out",),
    ),
    Mutant(
        "causal-offset-from-all-keys",
        KIND,
        "The forward aligns its mask by the keys of all sequences, not by those of its own.",
        (
            Change("forward.py", "    b_q, b_k, h, start_m", "    longest = Sk\n    b_q, b_k, h, start_m"),
            Change(
                "forward.py",
                "v_base, full, end, rows, Sq, Sk,",
                "v_base, full, end, rows + longest - Sk, Sq, Sk,",
            ),
        ),
        witness="b2_h1x1_r2x2+1x1_past0x0_d16x16_float16_causal_scale=auto_normal_bshd_grad=none_nodlse_seed0",
        report="L4",
        tensors=("out", "lse"),
    ),
    Mutant(
        "keys-of-a-sequence-without-queries-not-written",
        KIND,
        "dK/dV stores nothing for a sequence that has no query.",
        (
            Change(
                "backward.py", "store_tile(dk_rows, dk, keys, Sk,", "store_tile(dk_rows, dk, keys, k_rows,"
            ),
            Change(
                "backward.py", "store_tile(dv_rows, dv, keys, Sk,", "store_tile(dv_rows, dv, keys, k_rows,"
            ),
        ),
        witness="b2_h1x1_r0x1+1x1_past0x0_d16x16_float16_full_scale=auto_normal_bshd_grad=kv_nodlse_seed0",
        report="C1",
        tensors=("dk", "dv"),
    ),
    Mutant(
        "rows-of-a-sequence-without-keys-not-written",
        KIND,
        "The forward stores no out for a sequence that has no key.",
        (
            Change(
                "forward.py",
                "out, stored, Sq, stride_od,",
                "out, stored, tl.where(Sk > 0, Sq, 0), stride_od,",
            ),
        ),
        witness="b2_h1x1_r1x0+1x1_past0x0_d16x16_float16_full_scale=auto_normal_bshd_grad=none_nodlse_seed0",
        report="C2",
        tensors=("out",),
    ),
    Mutant(
        "dq-masked-by-tiles",
        KIND,
        "For dq a sequence's keys are counted up to whole tiles: the last one ends in the next sequence.",
        (
            Change(
                "backward.py",
                "k_base, v_base, full, end, rows, Sq, Sk,",
                "k_base, v_base, full, end, rows, Sq, tl.cdiv(Sk, BN) * BN,",
            ),
        ),
        witness="b2_h1x1_r2of1x2_past0x0_d16x16_float16_full_scale=auto_normal_bshd_grad=q_nodlse_seed0",
        report="C4",
        tensors=("dq",),
    ),
    Mutant(
        "rows-behind-the-last-sequence-not-written",
        KIND,
        "Rows behind the last sequence have no place in the table of tiles.",
        (Change("ragged.py", "mask=s < batch, other=total)", "mask=s < batch, other=0)"),),
        witness="b1_h1x1_r1x1_past1x1_d16x16_float16_full_scale=auto_normal_bshd_grad=qkv_nodlse_seed0",
        report="C5",
        tensors=("dk", "dv"),
    ),
    Mutant(
        "rows-behind-the-last-sequence-attend",
        KIND,
        "Rows behind the last sequence attend to the keys behind it.",
        (Change("ragged.py", "return start, tl.where(s < batch, length, 0)", "return start, length"),),
        witness="b0_h1x1_r_past1x1_d16x16_float16_full_scale=auto_normal_bshd_grad=none_nodlse_seed0",
        tensors=("out",),
    ),
    Mutant(
        "offsets-of-int64-are-taken",
        KIND,
        "cu_seqlens may be int64, which the kernels read as they do int32.",
        (Change("checks.py", "if t.dtype != torch.int32:", "if t.dtype not in (torch.int32, torch.int64):"),),
        witness="tests/test_flash_attention_varlen_refusals.py::test_it_says_what_was_wrong_and_what_may_be",
        report="C7",
    ),
    Mutant(
        "offsets-past-the-tensor-are-taken",
        KIND,
        "With validate=True offsets may point past the tensors.",
        (Change("checks.py", "if offsets[-1] > total:", "if offsets[-1] < 0:"),),
        witness="tests/test_flash_attention_varlen_refusals.py::test_with_validate_it_says_what_the_offsets_break",
        report="C10",
    ),
    Mutant(
        "offsets-not-clipped",
        KIND,
        "Offsets that break the rules lead outside of the tensors.",
        (
            Change(
                "ragged.py",
                "    start = tl.minimum(tl.maximum(start, 0), total)\n"
                "    end = tl.minimum(tl.maximum(end, start), total)\n",
                "",
            ),
        ),
        witness="tests/test_flash_attention_varlen.py::test_offsets_that_break_the_rules_lead_to_no_access_outside[negative]",
        report="C10",
    ),
    Mutant(
        "no-queries-no-gradients",
        KIND,
        "Without any query the backward returns before it writes dk and dv.",
        (
            Change(
                "launch.py", "if dk.numel() or dv.numel():", "if lse.numel() and (dk.numel() or dv.numel()):"
            ),
        ),
        witness="b1_h1x1_r0x1_past0x0_d16x16_float16_full_scale=auto_normal_bshd_grad=kv_nodlse_seed0",
        report="C11",
        tensors=("dk", "dv"),
    ),
    Mutant(
        "table-as-long-as-for-one-sequence",
        KIND,
        "The table of tiles has room for the tiles of all rows, not for a broken one of each sequence.",
        (
            Change(
                "launch.py",
                "n_tiles = total // rows + min(batch + 1, total)",
                "n_tiles = -(-total // rows)",
            ),
        ),
        witness="b2_h1x1_r2of1x1_past0x0_d16x16_float16_full_scale=auto_normal_bshd_grad=none_nodlse_seed0",
        tensors=("out", "lse"),
    ),
    Mutant(
        "table-without-room-for-the-rows-behind",
        KIND,
        "The table of tiles counts a broken tile of each sequence, but none of the rows behind the last.",
        (Change("launch.py", "min(batch + 1, total)", "min(batch, total)"),),
        witness="b1_h1x1_r1x1_past1x0_d16x16_float16_full_scale=auto_normal_bshd_grad=none_nodlse_seed0",
        tensors=("out", "lse"),
    ),
    Mutant(
        "rest-of-the-table-not-cleared",
        KIND,
        "Entries of the table that stand for no tile are what memory held.",
        (Change("ragged.py", "    if s == batch:\n", "    if s > batch:\n"),),
        witness="b1_h1x1_r2x2_past0x0_d16x16_float16_full_scale=auto_normal_bshd_grad=none_nodlse_seed0",
        report="K7",
    ),
    Mutant(
        "sequences-of-equal-weight-share-a-place",
        KIND,
        "Sequences with as many keys as each other write the same entries of the table.",
        (
            Change(
                "ragged.py",
                "heavier = (rows_other > length_other) | ((rows_other == length_other) & (t < s))",
                "heavier = rows_other > length_other",
            ),
        ),
        witness="b2_h1x1_r2of1x1_past0x0_d16x16_float16_full_scale=auto_normal_bshd_grad=none_nodlse_seed0",
    ),
    Mutant(
        "tiles-of-a-sequence-counted-from-one",
        KIND,
        "With the last tile first, the numbers of a sequence's tiles are one too high.",
        (
            Change(
                "ragged.py",
                "tile = own_tiles - 1 - i if LAST_FIRST else i",
                "tile = own_tiles - i if LAST_FIRST else i",
            ),
        ),
        witness="b1_h1x1_r1x1_past0x0_d16x16_float16_full_scale=auto_normal_bshd_grad=none_nodlse_seed0",
        tensors=("out", "lse"),
    ),
    Mutant(
        "only-the-first-1024-sequences-are-compared",
        KIND,
        "A sequence's place in the table is found among the first 1024 alone.",
        (
            Change(
                "ragged.py",
                "for start in range(0, batch + 1, BLOCK):",
                "for start in range(0, tl.minimum(batch + 1, BLOCK), BLOCK):",
            ),
        ),
        witness="tests/test_flash_attention_gpu.py::test_more_sequences_than_a_grid_has_in_its_second_dimension",
        lane="gpu",
        tensors=("out",),
    ),
    Mutant(
        "shortest-sequences-first",
        KIND,
        "The table lists the tiles with the fewest rows on the other side first.",
        (Change("ragged.py", "(rows_other > length_other)", "(rows_other < length_other)"),),
        witness="b2_h1x1_r1x2+1x1_past0x0_d16x16_float16_full_scale=auto_normal_bshd_grad=qkv_nodlse_seed0",
        equivalent="each tile has an entry of its own: their order costs time only",
    ),
    Mutant(
        "delta-of-rows-behind-the-last-sequence",
        KIND,
        "delta is computed of the rows behind the last sequence too, whose d_out may be NaN.",
        (
            Change(
                "backward.py",
                "    if RAGGED:\n        Sq = tl.minimum(Sq, tl.load(CuSeqlens + batch))\n",
                "",
            ),
        ),
        witness="b1_h1x1_r1x1_past1x1_d16x16_float16_full_scale=auto_normal_bshd_grad=qkv_dlse_seed0",
        equivalent="nothing reads the delta of these rows, which exist; it is a promise kept, and time",
    ),
)
