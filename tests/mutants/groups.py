"""Groups of query heads on one KV head."""

from __future__ import annotations

from .mutant import Change, Mutant
from .numerics import in_bfloat16

KIND = "groups of heads"

NOT_SQUARE = "b1_h6x2_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "group-overwritten-instead-of-summed",
        KIND,
        "dk and dv hold what the last query head of the group gives.",
        (
            Change(
                "backward.py",
                "        h = h_kv * group + g\n",
                "        h = h_kv * group + g\n        dk = zeros(BN, D, WIDTH)\n"
                "        dv = zeros(BN, DV, WIDTH)\n",
            ),
        ),
        witness="b1_h2x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=kv_nodlse_seed0",
        tensors=("dk", "dv"),
    ),
    Mutant(
        "group-without-its-last-head",
        KIND,
        "dk and dv leave out the last query head of a group.",
        (Change("backward.py", "for g in range(group):", "for g in range(tl.maximum(group - 1, 1)):"),),
        witness="b1_h2x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=kv_nodlse_seed0",
        tensors=("dk", "dv"),
    ),
    Mutant(
        "kv-head-by-remainder-in-the-forward",
        KIND,
        "Query head h reads KV head h % Hkv.",
        (Change("forward.py", "h // group", "h % (Hq // group)", 2),),
        witness=NOT_SQUARE,
        report="H1",
        tensors=("out", "lse"),
    ),
    Mutant(
        "kv-head-by-remainder-for-dq",
        KIND,
        "dq of query head h reads KV head h % Hkv.",
        (Change("backward.py", "h // group", "h % (Hq // group)", 2),),
        witness="b1_h6x2_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        tensors=("dq",),
    ),
    Mutant(
        "heads-of-a-group-apart",
        KIND,
        "dk and dv of KV head h add the query heads h, h + Hkv, h + 2 Hkv, ...",
        (Change("backward.py", "h = h_kv * group + g", "h = g * Hkv + h_kv"),),
        witness="b1_h6x2_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=kv_nodlse_seed0",
        report="H1",
        tensors=("dk", "dv"),
    ),
    Mutant(
        "group-summed-in-bfloat16",
        KIND,
        "dk and dv are rounded to bfloat16 after each query head of the group.",
        (
            Change(
                "backward.py",
                "        h = h_kv * group + g\n",
                "        h = h_kv * group + g\n        dk = in_bfloat16(dk, D, WIDTH)\n"
                "        dv = in_bfloat16(dv, DV, WIDTH)\n",
            ),
            in_bfloat16("backward.py"),
        ),
        witness="b1_h8x1_s17x17_d16x16_bfloat16_full_scale=auto_mean_bhsd_grad=kv_nodlse_seed0",
        report="H4",
        tensors=("dv",),
    ),
    Mutant(
        "group-of-a-power-of-two",
        KIND,
        "The number of query heads on a KV head is rounded down to a power of two.",
        (
            Change(
                "launch.py",
                "return self.Hq // self.Hkv",
                "return 1 << (self.Hq // self.Hkv).bit_length() - 1",
            ),
        ),
        witness="b1_h5x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=kv_nodlse_seed0",
        report="L8",
        tensors=("dk", "dv"),
    ),
    Mutant(
        "v-of-the-first-kv-head",
        KIND,
        "All query heads read V of the first KV head.",
        (
            Change(
                "forward.py",
                "head_base(V, b_k, stride_vb, h // group,",
                "head_base(V, b_k, stride_vb, h * 0,",
            ),
        ),
        witness="b1_h2x2_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="C8",
        tensors=("out",),
    ),
)
