"""Strides: tensors that do not lie as the kernels or their launch code think."""

from __future__ import annotations

from .mutant import Change, Mutant

KIND = "strides"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "gradient-of-out-read-with-the-strides-of-out",
        KIND,
        "The pass for delta takes d_out to lie as out does.",
        (Change("launch.py", "*_strides(out), *_strides(d_out),", "*_strides(out), *_strides(out),"),),
        witness="b1_h2x2_s2x2_d16x16_float16_full_scale=auto_normal_gradient_grad=q_nodlse_seed0",
        report="D1",
        tensors=("dq",),
    ),
    Mutant(
        "last-dimension-without-gaps",
        KIND,
        "The stride of the last dimension is taken to be 1.",
        (Change("numerics.py", "(dims.to(tl.int64) * stride_dim)", "dims.to(tl.int64)"),),
        witness="b1_h1x1_s1x1_d16x16_float16_full_scale=auto_normal_strided_grad=none_nodlse_seed0",
        report="D2",
        tensors=("out",),
    ),
    Mutant(
        "expanded-is-contiguous",
        KIND,
        "A tensor with a stride of 0 is taken to be contiguous.",
        (
            Change(
                "launch.py",
                "    return t.stride()\n",
                "    return t.new_empty(t.shape).stride() if 0 in t.stride() else t.stride()\n",
            ),
        ),
        witness="b1_h2x2_s1x1_d16x16_float16_full_scale=auto_normal_expanded_grad=none_nodlse_seed0",
        report="D4",
        tensors=("out",),
    ),
    Mutant(
        "dk-allocated-like-k-and-written-as-contiguous",
        KIND,
        "dk has the strides of k, and the kernel is told those of a contiguous tensor.",
        (
            Change("launch.py", "k.new_empty(k.shape if need_dkdv else (0,))", "torch.empty_like(k)"),
            Change("launch.py", "*_strides(dk),", "*_strides(dk.new_empty(dk.shape)),"),
        ),
        witness="b1_h2x2_s2x2_d16x16_float16_full_scale=auto_normal_bshd_grad=k_nodlse_seed0",
        report="D5",
        tensors=("dk",),
    ),
    Mutant(
        "fake-dv-like-v",
        KIND,
        "The fake backward foresees dv with the strides of v.",
        (
            Change(
                "attention.py",
                "    return launch.new_gradients(q, k, v, need_dq, need_dkdv)",
                "    dq, dk, dv = launch.new_gradients(q, k, v, need_dq, need_dkdv)\n"
                "    return dq, dk, torch.empty_like(v) if need_dkdv else dv",
            ),
        ),
        witness="tests/test_flash_attention_operators.py::test_the_fake_operators_foresee_shapes_dtypes_and_strides",
        report="D8",
    ),
    Mutant(
        "stride-of-the-batch-rebuilt-from-rows",
        KIND,
        "The stride of the batch is taken to be that of a row times the rows.",
        (
            Change(
                "launch.py",
                "    return t.stride()\n",
                "    return t.shape[2] * t.stride(2), *t.stride()[1:]\n",
            ),
        ),
        witness="b2_h2x2_s1x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="D7",
        tensors=("out",),
    ),
    Mutant(
        "strides-of-k-for-v",
        KIND,
        "The forward reads V with the strides of K.",
        (
            Change(
                "launch.py",
                "*_strides(k), *_strides(v), *_strides(out)",
                "*_strides(k), *_strides(k), *_strides(out)",
            ),
        ),
        witness="b1_h1x1_s1x2_d16x32_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("out",),
    ),
    Mutant(
        "dq-written-with-the-strides-of-q",
        KIND,
        "dq, which is contiguous, is written as if it lay as q does.",
        (Change("launch.py", "*_strides(d_out), *_strides(dq),", "*_strides(d_out), *_strides(q),"),),
        witness="b1_h2x2_s2x2_d16x16_float16_full_scale=auto_normal_bshd_grad=q_nodlse_seed0",
        tensors=("dq",),
    ),
    Mutant(
        "gradient-of-the-lse-taken-for-contiguous",
        KIND,
        "The rows of d_lse are taken to have no gaps.",
        (Change("backward.py", "rows.to(tl.int64) * stride_dlm, mask", "rows.to(tl.int64), mask"),),
        witness="b1_h2x2_s2x2_d16x16_float16_full_scale=auto_normal_gradient_grad=q_dlse_seed0",
        tensors=("dq",),
    ),
    Mutant(
        "lse-of-all-batch-entries-in-one-place",
        KIND,
        "lse and delta are addressed without the batch entry: right as long as there is one.",
        (Change("launch.py", "else (lse.stride(0), lse.stride(1))", "else (0, lse.stride(1))"),),
        witness="b2_h1x1_s1x1_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="L2",
        tensors=("lse",),
    ),
    Mutant(
        "vectors-promised-across-gaps",
        KIND,
        "16-byte accesses are promised though rows begin at any element.",
        (Change("launch.py", "if stride % width and size > 1:", "if False:"),),
        witness="b1_h1x1_s2x2_d17x17_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("out",),
    ),
    Mutant(
        "vectors-promised-without-asking-the-gradient-of-out",
        KIND,
        "The pass for delta promises 16-byte accesses to d_out because out allows them.",
        (Change("launch.py", "VECTOR=_vector(out, d_out)", "VECTOR=_vector(out)"),),
        witness="b1_h1x1_s1x2_d16x16_float16_full_scale=auto_normal_strided_grad=q_nodlse_seed0",
        tensors=("dq",),
    ),
)
