"""Numerics: what is rounded, to which dtype, where, and in which dtype sums are kept."""

from __future__ import annotations

from .mutant import Change, Mutant, each_slice

KIND = "numerics and accumulators"

SUM = "l = l * alpha[:, None] + tl.sum(tl.reshape(P, [P.shape[0], BN // parts, parts]), 1)"
"""The running sum of the forward."""


def scaled_in_its_dtype(file: str) -> Change:
    """The device function that multiplies a tile by x and rounds it as it was."""
    makes = "rounded(tiles[i].to(tl.float32) * x, tiles[i].dtype, EMULATE_BF16)"
    return each_slice(file, "scaled", makes, "x", "EMULATE_BF16: tl.constexpr")


def in_float16(file: str) -> Change:
    """The device function that rounds an accumulator to float16."""
    return each_slice(file, "in_float16", "tiles[i].to(tl.float16).to(tl.float32)")


def in_bfloat16(file: str) -> Change:
    """The device function that rounds an accumulator to bfloat16."""
    return each_slice(file, "in_bfloat16", "rounded(tiles[i], tl.bfloat16, True)")


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "lse-of-a-maximum-in-16-bit",
        KIND,
        "The lse adds the maximum as the 16-bit dtype has it, and not the one that was subtracted.",
        (
            Change(
                "forward.py",
                "m * (tl.abs(scale) if exact",
                "rounded(m, Q.dtype.element_ty, EMULATE_BF16).to(tl.float32) * (tl.abs(scale) if exact",
            ),
        ),
        witness="b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("lse",),
    ),
    Mutant(
        "k-scaled-in-16-bit-for-dk-dv",
        KIND,
        "For dk and dv, K is multiplied by the scale in its own dtype: P no longer fits the stored lse.",
        (
            scaled_in_its_dtype("backward.py"),
            Change(
                "backward.py", "scores(k, q,", "scores(scaled(k, exponent_scale, EMULATE_BF16, D, WIDTH), q,"
            ),
            Change("backward.py", "S * exponent_scale - lse[None, :]", "S - lse[None, :]"),
        ),
        witness="b1_h1x1_s33x17_d16x16_bfloat16_full_scale=auto_near-tied_bhsd_grad=kv_nodlse_seed0",
        report="F10",
        tensors=("dv",),
    ),
    Mutant(
        "q-scaled-in-16-bit-for-dq",
        KIND,
        "For dq, Q is multiplied by the scale in its own dtype: P no longer fits the stored lse.",
        (
            scaled_in_its_dtype("backward.py"),
            Change(
                "backward.py", "scores(q, k,", "scores(scaled(q, exponent_scale, EMULATE_BF16, D, WIDTH), k,"
            ),
            Change("backward.py", "S * exponent_scale - lse[:, None]", "S - lse[:, None]"),
        ),
        witness="b1_h1x1_s5x17_d16x16_float16_full_scale=auto_near-tied_bhsd_grad=q_nodlse_seed0",
        report="F10",
        tensors=("dq",),
    ),
    Mutant(
        "q-scaled-in-16-bit-in-the-forward",
        KIND,
        "Q is multiplied by the scale in its own dtype before the scores are formed.",
        (
            scaled_in_its_dtype("forward.py"),
            Change(
                "forward.py",
                "    acc = zeros(BM, DV, WIDTH)\n",
                "    of_lost = c\n    if not exact:\n"
                "        q = scaled(q, c, EMULATE_BF16, D, WIDTH)\n        c = 1.0\n"
                "    acc = zeros(BM, DV, WIDTH)\n",
            ),
            Change(
                "forward.py",
                "Sq, Sk, scale, c,\n                stride",
                "Sq, Sk, scale, of_lost,\n                stride",
            ),
        ),
        witness="b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("lse",),
    ),
    Mutant(
        "p-rounded-to-bfloat16",
        KIND,
        "P enters the product with V with bfloat16's 8 bits, whatever the dtype.",
        (
            Change(
                "forward.py",
                "P = rounded(P, v[0].dtype, EMULATE_BF16)",
                "P = rounded(P, tl.bfloat16, True).to(v[0].dtype)",
            ),
        ),
        witness="b1_h1x1_s5x17_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("out",),
    ),
    Mutant(
        "small-p-flushed-to-zero",
        KIND,
        "P below float16's normal numbers is taken for 0, as hardware that flushes has it.",
        (
            Change(
                "forward.py",
                "P = rounded(P, v[0].dtype, EMULATE_BF16)",
                "P = rounded(tl.where(P < 6.1035e-5, 0.0, P), v[0].dtype, EMULATE_BF16)",
            ),
        ),
        witness="b1_h1x1_s33x33_d16x16_float32_full_scale=auto_large_bhsd_grad=none_nodlse_seed0",
        tensors=("out",),
    ),
    Mutant(
        "exponents-in-16-bit",
        KIND,
        "The exponent of P is rounded to float16 before the exponential is taken.",
        (
            Change(
                "forward.py",
                "P = tl.exp2(S * c - m_new[:, None])",
                "P = tl.exp2((S * c - m_new[:, None]).to(tl.float16).to(tl.float32))",
            ),
            Change(
                "forward.py",
                "P = tl.exp2((S - m_finite[:, None]) * c)",
                "P = tl.exp2(((S - m_finite[:, None]) * c).to(tl.float16).to(tl.float32))",
            ),
        ),
        witness="b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("lse",),
    ),
    Mutant(
        "sum-of-the-rounded-p",
        KIND,
        "l adds what P is rounded to, in 16 bit, and the lse with it.",
        (
            Change(
                "forward.py",
                f"{SUM}\n        P = rounded(P, v[0].dtype, EMULATE_BF16)\n",
                "P = rounded(P, v[0].dtype, EMULATE_BF16)\n"
                f"        {SUM.replace('reshape(P,', 'reshape(P.to(tl.float32),')}\n",
            ),
        ),
        witness="b1_h1x1_s5x17_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("lse",),
    ),
    Mutant(
        "sum-in-bfloat16",
        KIND,
        "l is kept in bfloat16 from tile to tile.",
        (
            Change(
                "forward.py",
                SUM,
                f"{SUM}\n        l = rounded(l, tl.bfloat16, True)",
            ),
        ),
        witness="b1_h1x1_s5x17_d16x16_bfloat16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("lse",),
    ),
    Mutant(
        "out-accumulated-in-float16",
        KIND,
        "The accumulator of out is kept in float16 from tile to tile.",
        (
            in_float16("forward.py"),
            Change(
                "forward.py",
                "        m = m_new\n",
                "        acc = in_float16(acc, DV, WIDTH)\n        m = m_new\n",
            ),
        ),
        witness="b1_h1x1_s17x131_d64x64_float16_full_scale=auto_mean_bhsd_grad=none_nodlse_seed0",
        tensors=("out",),
    ),
    Mutant(
        "dq-accumulated-in-bfloat16",
        KIND,
        "The accumulator of dq is kept in bfloat16 from tile to tile.",
        (
            Change(
                "backward.py",
                "dq = add_product(dq, dS, k, D, WIDTH, PRECISION)",
                "dq = in_bfloat16(add_product(dq, dS, k, D, WIDTH, PRECISION), D, WIDTH)",
            ),
            in_bfloat16("backward.py"),
        ),
        witness="b1_h1x1_s5x17_d16x16_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        tensors=("dq",),
    ),
    Mutant(
        "dk-accumulated-in-float16",
        KIND,
        "The accumulator of dk is kept in float16 from tile to tile.",
        (
            Change(
                "backward.py",
                "dk = add_product(dk, dS, q, D, WIDTH, PRECISION)",
                "dk = in_float16(add_product(dk, dS, q, D, WIDTH, PRECISION), D, WIDTH)",
            ),
            in_float16("backward.py"),
        ),
        witness="b1_h4x1_s67x17_d16x16_float16_full_scale=auto_normal_bhsd_grad=k_nodlse_seed0",
        tensors=("dk",),
    ),
    Mutant(
        "dv-accumulated-in-bfloat16",
        KIND,
        "The accumulator of dv is kept in bfloat16 from tile to tile.",
        (
            in_bfloat16("backward.py"),
            Change("backward.py", "dv = add_product(dv, ", "dv = add_product(in_bfloat16(dv, DV, WIDTH), "),
        ),
        witness="b1_h2x1_s67x17_d16x16_bfloat16_full_scale=auto_mean_bhsd_grad=v_nodlse_seed0",
        report="H4",
        tensors=("dv",),
    ),
    Mutant(
        "truncated-to-bfloat16",
        KIND,
        "Rounding to bfloat16 cuts the lower bits off, towards zero.",
        (
            Change(
                "numerics.py",
                "(bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000",
                "bits & 0xFFFF0000",
            ),
        ),
        witness="b1_h1x1_s33x33_d64x64_bfloat16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("out",),
    ),
    Mutant(
        "ds-truncated-for-dk",
        KIND,
        "dS is cut to bfloat16's bits on its way into dk, towards zero.",
        (
            Change(
                "backward.py",
                "dk = add_product(dk, dS,",
                "dk = add_product(dk, ((P * (dP - delta[None, :])).to(tl.uint32, bitcast=True) & 0xFFFF0000)"
                ".to(tl.float32, bitcast=True).to(q[0].dtype),",
            ),
        ),
        witness="b1_h1x1_s65x40_d32x32_bfloat16_full_scale=auto_normal_bhsd_grad=k_nodlse_seed0",
        tensors=("dk",),
    ),
    Mutant(
        "ds-rounded-to-bfloat16-for-dq",
        KIND,
        "dS enters the product with K with bfloat16's 8 bits, whatever the dtype.",
        (
            Change(
                "backward.py",
                "dS = rounded(P * (dP - delta[:, None]), k[0].dtype, EMULATE_BF16)",
                "dS = rounded(P * (dP - delta[:, None]), tl.bfloat16, True).to(k[0].dtype)",
            ),
        ),
        witness="b1_h1x1_s5x17_d16x16_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        tensors=("dq",),
    ),
    Mutant(
        "dp-in-float16",
        KIND,
        "dP is rounded to float16 before delta is subtracted from it.",
        (
            Change(
                "backward.py",
                "P * (dP - delta[:, None])",
                "P * (dP.to(tl.float16).to(tl.float32) - delta[:, None])",
            ),
        ),
        witness="b1_h1x1_s17x17_d16x16_float32_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        tensors=("dq",),
    ),
    Mutant(
        "scores-in-bfloat16-in-the-backward",
        KIND,
        "The scores that P is recomputed from for dk and dv are rounded to bfloat16.",
        (
            Change(
                "backward.py",
                "P = tl.exp2(S * exponent_scale - lse[None, :])",
                "P = tl.exp2(rounded(S, tl.bfloat16, True) * exponent_scale - lse[None, :])",
            ),
        ),
        witness="b1_h1x1_s17x17_d16x16_float16_full_scale=auto_normal_bhsd_grad=kv_nodlse_seed0",
        tensors=("dk", "dv"),
    ),
    Mutant(
        "delta-from-an-out-in-bfloat16",
        KIND,
        "delta is taken from an out that is rounded to bfloat16, while the one that is returned is not.",
        (
            Change(
                "backward.py",
                "out[i].to(tl.float32) *",
                "rounded(out[i].to(tl.float32), tl.bfloat16, True) *",
            ),
        ),
        witness="b1_h1x1_s17x17_d64x64_float16_full_scale=auto_mean_bhsd_grad=q_nodlse_seed0",
        report="F8",
        tensors=("dq",),
    ),
    Mutant(
        "delta-summed-in-float16",
        KIND,
        "The products that delta adds are rounded to float16.",
        (
            Change(
                "backward.py",
                "out[i].to(tl.float32) * dO[i].to(tl.float32)",
                "(out[i].to(tl.float32) * dO[i].to(tl.float32)).to(tl.float16).to(tl.float32)",
            ),
        ),
        witness="b1_h1x1_s17x17_d64x64_float32_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        tensors=("dq",),
    ),
    Mutant(
        "exp2-without-log2-e",
        KIND,
        "The forward takes exp2 of an exponent that is meant for exp.",
        (Change("forward.py", "tl.abs(scale) * LOG2_E", "tl.abs(scale)"),),
        witness="b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="J5",
        tensors=("out", "lse"),
    ),
    Mutant(
        "default-scale-of-three-decimals",
        KIND,
        "The default scale is rounded to three decimals: for D = 32 it is 0.13 % too large.",
        (Change("checks.py", "float(head_dim**-0.5)", "round(head_dim**-0.5, 3)"),),
        witness="b1_h1x1_s5x5_d32x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("lse",),
    ),
    Mutant(
        "float32-products-in-tf32",
        KIND,
        "Tensor cores multiply float32 inputs with a 10-bit mantissa, allowed or not.",
        (Change("launch.py", '"tf32" if tf32 else "ieee"', '"tf32"'),),
        witness="b1_h2x2_s128x128_d32x32_float32_causal_scale=auto_normal_bhsd_grad=qkv_dlse_seed0",
        report="F4",
        lane="gpu",
        tensors=("out", "lse", "dq", "dk", "dv"),
    ),
    Mutant(
        "one-product-with-the-default-precision",
        KIND,
        "The last product of dq does not say its precision, which is TF32 by default.",
        (
            Change(
                "backward.py",
                "add_product(dq, dS, k, D, WIDTH, PRECISION)",
                "add_product(dq, dS, k, D, WIDTH, None)",
            ),
        ),
        witness="b1_h2x2_s128x128_d32x32_float32_causal_scale=auto_normal_bhsd_grad=qkv_dlse_seed0",
        report="F4",
        lane="gpu",
        tensors=("dq",),
    ),
    Mutant(
        "ds-not-rounded-for-dq",
        KIND,
        "dS enters the product with K in float32: nearer to the truth, but not what the emulation computes.",
        (
            Change(
                "backward.py",
                "dS = rounded(P * (dP - delta[:, None]), k[0].dtype, EMULATE_BF16)\n"
                "        dq = add_product(dq, dS, k,",
                "dS = P * (dP - delta[:, None])\n        dq = add_product(dq, dS, in_float32(k, D, WIDTH),",
            ),
            each_slice("backward.py", "in_float32", "tiles[i].to(tl.float32)"),
        ),
        witness="b1_h1x1_s33x33_d16x16_bfloat16_full_scale=auto_normal_bhsd_grad=qkv_nodlse_seed0",
        tensors=("dq",),
    ),
)
