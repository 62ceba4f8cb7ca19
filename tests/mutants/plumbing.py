"""Autograd plumbing: what is kept for the backward, what it returns, and what the fake operators foresee."""

from __future__ import annotations

from .mutant import Change, Mutant

KIND = "autograd plumbing"

DK_ALONE = "b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=k_nodlse_seed0"
FAKES = "tests/test_flash_attention_operators.py::test_the_fake_operators_foresee_shapes_dtypes_and_strides"
RAGGED_FAKES = (
    "tests/test_flash_attention_operators.py"
    "::test_the_fake_ragged_operators_foresee_shapes_dtypes_and_strides"
)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "dk-and-dv-only-if-both-are-wanted",
        KIND,
        "Without a gradient of v that of k is not computed either.",
        (Change("attention.py", "need_dk or need_dv", "need_dk and need_dv"),),
        witness=DK_ALONE,
    ),
    Mutant(
        "dk-and-dv-mixed-up-if-one-is-wanted",
        KIND,
        "Whether dk is returned depends on v, and whether dv is on k.",
        (
            Change("attention.py", "dk if need_dk else None", "dk if need_dv else None"),
            Change("attention.py", "dv if need_dv else None", "dv if need_dk else None"),
        ),
        witness=DK_ALONE,
        tensors=("dk",),
    ),
    Mutant(
        "dq-only-with-dk",
        KIND,
        "Whether dq is computed depends on k.",
        (Change("attention.py", "need_dq, need_dk or need_dv)", "need_dk, need_dk or need_dv)"),),
        witness="b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        report="G5",
    ),
    Mutant(
        "delta-only-with-dq",
        KIND,
        "delta is computed only where dq is wanted: dk is made of memory as it was allocated.",
        (Change("launch.py", "if lse.numel():", "if lse.numel() and need_dq:"),),
        witness=DK_ALONE,
        report="N8",
        tensors=("dk",),
    ),
    Mutant(
        "lse-kept-only-with-a-gradient-of-q",
        KIND,
        "The lse is kept for the backward only where q requires a gradient.",
        (
            Change(
                "attention.py",
                "    ctx.save_for_backward(q, k, v, *output)\n",
                "    out, lse = output\n"
                "    lse = lse if ctx.needs_input_grad[0] else torch.zeros_like(lse)\n"
                "    ctx.save_for_backward(q, k, v, out, lse)\n",
            ),
        ),
        witness="b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=v_nodlse_seed0",
        report="G5",
        tensors=("dv",),
    ),
    Mutant(
        "scale-not-kept-for-the-backward",
        KIND,
        "The backward computes with the default scale.",
        (
            Change(
                "attention.py",
                "ctx.causal, ctx.scale, ctx.allow_tf32 = inputs\n",
                "ctx.causal, _, ctx.allow_tf32 = inputs\n    ctx.scale = q.shape[-1] ** -0.5\n",
            ),
        ),
        witness="b1_h1x1_s5x5_d16x16_float16_full_scale=1.0_normal_bhsd_grad=qkv_nodlse_seed0",
        report="H5",
        tensors=("dq", "dk", "dv"),
    ),
    Mutant(
        "causal-not-kept-for-the-ragged-backward",
        KIND,
        "The backward of a ragged batch is never causal.",
        (
            Change(
                "attention_varlen.py",
                "ctx.causal, ctx.scale, ctx.allow_tf32, _ = inputs\n",
                "_, ctx.scale, ctx.allow_tf32, _ = inputs\n    ctx.causal = False\n",
            ),
        ),
        witness="b1_h1x1_r5x5_past0x0_d16x16_float16_causal_scale=auto_normal_bshd_grad=qkv_nodlse_seed0",
        report="H5",
        tensors=("dq", "dk", "dv"),
    ),
    Mutant(
        "causal-only-where-lengths-are-equal",
        KIND,
        "Causal is ignored where there are more keys than queries, or fewer.",
        (
            Change(
                "attention.py",
                "out, lse = _forward(q, k, v, causal, scale",
                "out, lse = _forward(q, k, v, causal and q.shape[2] == k.shape[2], scale",
            ),
        ),
        witness="b1_h1x1_s3x5_d16x16_float16_causal_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="M11",
        tensors=("out", "lse"),
    ),
    Mutant(
        "gradient-of-the-lse-not-passed-on",
        KIND,
        "What flows into the lse does not reach the backward operator.",
        (Change("attention.py", "backward(d_out, d_lse, *ctx", "backward(d_out, None, *ctx"),),
        witness="b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=qk_dlse_seed0",
        tensors=("dq", "dk"),
    ),
    Mutant(
        "nothing-flows-back-through-the-lse-alone",
        KIND,
        "There are gradients only where something flows into out.",
        (Change("attention.py", "if d_out is not None or d_lse is not None:", "if d_out is not None:"),),
        witness="tests/test_flash_attention.py::test_an_output_that_is_not_used_has_gradient_zero[lse]",
    ),
    Mutant(
        "ones-flow-into-an-unused-out",
        KIND,
        "Where nothing flows into out, the backward takes it for ones.",
        (Change("launch.py", "q.new_zeros(()).expand(out.shape)", "q.new_ones(()).expand(out.shape)"),),
        witness="tests/test_flash_attention.py::test_an_output_that_is_not_used_has_gradient_zero[lse]",
    ),
    Mutant(
        "fake-out-with-the-layout-of-q",
        KIND,
        "The fake forward operator foresees an out with the shape and the strides of q.",
        (
            Change(
                "attention.py",
                "    return launch.new_results(q, v)",
                "    return torch.empty_like(q), launch.new_results(q, v)[1]",
            ),
        ),
        witness=FAKES,
        report="D8",
    ),
    Mutant(
        "fake-gradients-of-all-inputs",
        KIND,
        "The fake backward operator foresees gradients that are not computed.",
        (
            Change(
                "attention.py",
                "    return launch.new_gradients(q, k, v, need_dq, need_dkdv)",
                "    return launch.new_gradients(q, k, v, True, True)",
            ),
        ),
        witness=FAKES,
    ),
    Mutant(
        "fake-ragged-lse-with-rows-first",
        KIND,
        "The fake ragged forward operator foresees an lse of (rows, heads).",
        (
            Change(
                "attention_varlen.py",
                "    return launch.new_results(q, v)",
                "    out, lse = launch.new_results(q, v)\n    return out, lse.mT",
            ),
        ),
        witness=RAGGED_FAKES,
    ),
    Mutant(
        "fake-ragged-dk-with-the-layout-of-k",
        KIND,
        "The fake ragged backward operator foresees a dk with the strides of k.",
        (
            Change(
                "attention_varlen.py",
                "    return launch.new_gradients(q, k, v, need_dq, need_dkdv)",
                "    dq, dk, dv = launch.new_gradients(q, k, v, need_dq, need_dkdv)\n"
                "    return dq, torch.empty_like(k) if need_dkdv else dk, dv",
            ),
        ),
        witness=RAGGED_FAKES,
        report="D5",
    ),
    Mutant(
        "missing-gradients-as-zeros",
        KIND,
        "Where nothing flows into out or the lse, the backward is given zeros, not None.",
        (Change("attention.py", "    ctx.set_materialize_grads(False)\n", ""),),
        equivalent="the zeros give the same gradients; only their memory is spent",
    ),
)
