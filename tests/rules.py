"""The rules by which other suites judge an attention kernel, each as a function: what ours is compared with.

x is a kernel's result, r the reference in float64, p the reference in the kernel's own precision, all of them
float64 arrays of one shape. A rule judges a tensor as a whole and says whether it held.

Theirs are emulated, not imported, and differ in what surrounds the rule:

- r is the float64 value. Most of theirs is float32, rounded to the dtype; where a suite compares with one
  in the kernel's own precision (Triton's tutorial, Liger, KernelBench, gpu-mode), that one's error is gone.
- p is what that suite's own would be, to the order of its roundings: `OWN_PRECISIONS`.
- All rules judge out, dq, dk and dv. KernelBench and gpu-mode have no backward: their rule is applied to
  gradients too, in their favour. By the rules given here none of these suites judges the lse of attention.

Constants are of 16-bit inputs, for which these suites are mostly run; those of float32 where they have some.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference import sdpa

Array = NDArray[np.float64]

JUDGED = ("out", "dq", "dk", "dv")
"""The tensors that these rules judge."""

Own = Literal["in the dtype", "rounded at the end", "float32 softmax"]

OWN_PRECISIONS: Mapping[Own, str] = {
    "in the dtype": "every step of SDPA MATH is rounded to the dtype",
    "rounded at the end": "SDPA MATH in float32, rounded once; what it does by default since PyTorch 2.5",
    "float32 softmax": "products in the dtype, the softmax between them in float32",
}
"""What p may be."""


@dataclass(frozen=True)
class Rule:
    """How one project decides.

    Attributes:
        project: whose it is.
        where: in its repository.
        what: the rule in a formula.
        held: takes the name of a tensor, x, r, p and the name of the dtype.
        own: what p is.
    """

    project: str
    where: str
    what: str
    held: Callable[[str, Array, Array, Array, str], bool]
    own: Own = "in the dtype"


# ---------------------------------------------------------------- relative to the error of p


def flash_attention_2(name: str, x: Array, r: Array, p: Array, dtype: str) -> bool:
    """No more than twice (out) or three times (gradients) the largest error of p."""
    return _largest(x - r) <= (2 if name == "out" else 3) * _largest(p - r)


def flash_attention_3(name: str, x: Array, r: Array, p: Array, dtype: str) -> bool:
    """No more than twice the largest error of p, and twice what adding 0.3 and taking it away does to r.

    The factor is 2 for gradients as well, 3 only with a softcap.
    """
    rounded = torch.from_numpy(r).to(getattr(torch, dtype))
    floor = 2 * _largest((rounded + 0.3 - 0.3 - rounded).double().numpy())
    return _largest(x - r) <= 2 * _largest(p - r) + floor


NEWER_FACTORS = {"out": 4.0, "dq": 180.0, "dk": 16.0, "dv": 4.0}
"""Of test_flash_attention_vs_math_ref_grads on CUDA; its neighbour with CUDA graphs has 3, 110, 8 and 3."""


def sdpa_newer(name: str, x: Array, r: Array, p: Array, dtype: str) -> bool:
    """A multiple of the largest error of p, and never less than 1e-5. NaN passes where p has it too."""
    error, own = _largest(x - r), _largest(p - r)
    if math.isnan(error):
        return math.isnan(own)
    return not error > max(1e-5, NEWER_FACTORS[name] * own)


DEFAULT_ATOL = {"float16": 1e-3, "bfloat16": 1e-3, "float32": 1e-5}
DEFAULT_RTOL = {"float16": 1e-3, "bfloat16": 1.6e-2, "float32": 1.3e-6}


def sdpa_older(name: str, x: Array, r: Array, p: Array, dtype: str) -> bool:
    """allclose, with the largest absolute and the largest relative error of p for tolerances.

    The relative one has no ceiling: where r is nearly 0, p is off by any multiple of it, and this multiple
    is then granted to every element. Only beyond 1e30 (r exactly 0) the default replaces it.
    """
    factor = 4 if name == "dq" else 1
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.abs((r - p) / r)
    relative = np.where(np.isnan(relative), DEFAULT_RTOL[dtype], relative)
    atol = factor * _maximum(_largest(r - p), DEFAULT_ATOL[dtype])
    rtol = factor * max(_largest(relative), DEFAULT_RTOL[dtype])
    if rtol > 1e30:
        rtol = DEFAULT_RTOL[dtype]
    return _close(x, _rounded(r, dtype), atol, rtol, equal_nan=True)


def flex_attention(name: str, x: Array, r: Array, p: Array, dtype: str) -> bool:
    """The mean error is at most 1.1 times that of p; in float32, 10 times."""
    factor = 10 if dtype == "float32" else 1.1
    return float(np.abs(r - x).mean()) <= factor * float(np.abs(r - p).mean())


# ---------------------------------------------------------------- fixed tolerances

XFORMERS_OUT = {"float16": (4e-3, 4e-4), "bfloat16": (2e-2, 5e-3), "float32": (3e-4, 2e-5)}
XFORMERS_GRADIENTS = {"float16": (9e-2, 2e-2), "bfloat16": (0.7, 0.1), "float32": (5e-4, 1e-4)}
"""(atol, rtol). Of gradients those of the base class; later versions have 0.2 and 0.9 for the atol."""


def xformers(name: str, x: Array, r: Array, p: Array, dtype: str) -> bool:
    """allclose, with fixed tolerances by dtype."""
    return _close(x, r, *(XFORMERS_OUT if name == "out" else XFORMERS_GRADIENTS)[dtype])


def triton_tutorial(name: str, x: Array, r: Array, p: Array, dtype: str) -> bool:
    """|x - r| <= 1e-2. It knows float16 (and float8) only."""
    return _close(x, r, 1e-2, 0.0)


def triton_kernels(name: str, x: Array, r: Array, p: Array, dtype: str) -> bool:
    """|x - r| / max(rms of r, |r|): at most 2e-2, and 4e-3 in the root mean square. Infinities must agree."""
    if not np.array_equal(np.isinf(x), np.isinf(r)):
        return False
    x, r = (np.where(np.isinf(values), 0.0, values) for values in (x, r))
    size = float(np.sqrt((r**2).mean())) + 1e-30
    error = np.abs(x - r) / np.maximum(size, np.abs(r))
    return _largest(error) <= 2e-2 and float(np.sqrt((error**2).mean())) <= 4e-3


def fla(name: str, x: Array, r: Array, p: Array, dtype: str) -> bool:
    """The root mean square of x - r is less than 0.005 of that of r, or nothing is off by more than 1e-6."""
    return _largest(x - r) <= 1e-6 or _rms_ratio(x, r) < 0.005


def fla_in_ci(name: str, x: Array, r: Array, p: Array, dtype: str) -> bool:
    """The same, but only a warning if the ratio is less than 0.01 or nothing is off by more than 0.3."""
    return fla(name, x, r, p, dtype) or _rms_ratio(x, r) < 0.01 or _largest(x - r) <= 0.3


def liger(name: str, x: Array, r: Array, p: Array, dtype: str) -> bool:
    """allclose with 3e-2 and half of |r|; NaN where r has it."""
    return _close(x, r, 3e-2, 0.5, equal_nan=True)


def kernel_bench(name: str, x: Array, r: Array, p: Array, dtype: str) -> bool:
    """allclose with 1e-2 for both tolerances; 1e-4 in float32."""
    tolerance = 1e-4 if dtype == "float32" else 1e-2
    return _close(x, r, tolerance, tolerance)


def gpu_mode(name: str, x: Array, r: Array, p: Array, dtype: str) -> bool:
    """allclose with 1e-1 for both tolerances, but for 5 % of the elements, whatever these are."""
    wrong = ~np.isclose(x, r, rtol=0.1, atol=0.1, equal_nan=True)
    return float(wrong.mean()) <= 0.05


RULES: Mapping[str, Rule] = {
    "FlashAttention-2": Rule(
        "Dao-AILab/flash-attention",
        "tests/test_flash_attn.py, test_flash_attn_output",
        "max|x-r| <= c max|p-r|, c = 2 (out), 3 (gradients)",
        flash_attention_2,
    ),
    "FlashAttention-3/4": Rule(
        "Dao-AILab/flash-attention",
        "hopper/test_flash_attn.py and tests/cute/test_flash_attn.py",
        "max|x-r| <= 2 max|p-r| + 2 max|(r + 0.3 - 0.3) - r|",
        flash_attention_3,
    ),
    "PyTorch SDPA, newer": Rule(
        "pytorch/pytorch",
        "test/test_transformers.py, check_out_and_grad, since 2.5",
        "max|x-r| <= max(1e-5, f max|p-r|), f = 4 (out, dv), 16 (dk), 180 (dq)",
        sdpa_newer,
        "rounded at the end",
    ),
    "PyTorch SDPA, older": Rule(
        "pytorch/pytorch",
        "test/test_transformers.py, get_tolerances, 2.1 to 2.4",
        "allclose; atol = max|p-r|, rtol = max|p-r|/|r|, for dq 4 times both",
        sdpa_older,
    ),
    "FlexAttention": Rule(
        "pytorch/pytorch",
        "test/inductor/test_flex_attention.py, _check_out_and_grad",
        "mean|x-r| <= 1.1 mean|p-r|",
        flex_attention,
        "float32 softmax",
    ),
    "xFormers": Rule(
        "facebookresearch/xformers",
        "xformers/ops/fmha/common.py, ERROR_ATOL and ERROR_RTOL",
        "allclose; out 4e-3/4e-4 (float16), 2e-2/5e-3 (bfloat16), gradients 9e-2/2e-2, 0.7/0.1",
        xformers,
    ),
    "Triton tutorial": Rule(
        "triton-lang/triton",
        "python/tutorials/06-fused-attention.py, test_op",
        "|x-r| <= 1e-2",
        triton_tutorial,
    ),
    "triton_kernels": Rule(
        "triton-lang/triton",
        "python/triton_kernels/triton_kernels/testing.py, assert_close",
        "e = |x-r| / max(rms r, |r|); max e <= 2e-2, rms e <= 4e-3",
        triton_kernels,
    ),
    "fla": Rule(
        "fla-org/flash-linear-attention",
        "fla/utils.py, assert_close, as tests/ops/test_attn.py calls it",
        "rms(x-r) < 0.005 rms(r)",
        fla,
    ),
    "fla, in its CI": Rule(
        "fla-org/flash-linear-attention",
        "fla/utils.py, assert_close with FLA_CI_ENV",
        "the same or rms(x-r) < 0.01 rms(r) or max|x-r| <= 0.3",
        fla_in_ci,
    ),
    "Liger": Rule(
        "linkedin/Liger-Kernel",
        "test/utils.py, assert_verbose_allclose, in bfloat16",
        "allclose; 3e-2 and 0.5",
        liger,
    ),
    "KernelBench": Rule(
        "ScalingIntelligence/KernelBench",
        "src/kernelbench/eval.py, get_tolerance_for_precision",
        "allclose; 1e-2 and 1e-2",
        kernel_bench,
    ),
    "gpu-mode": Rule(
        "gpu-mode/reference-kernels",
        "the attention problems' check_implementation",
        "allclose; 1e-1 and 1e-1, 5 % of the elements exempt",
        gpu_mode,
    ),
}
"""By the name that tables have."""


# ---------------------------------------------------------------- p


def own_precision(
    own: Own,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor | None = None,
    d_lse: Tensor | None = None,
    *,
    causal: bool,
    scale: float | None,
) -> dict[str, Array]:
    """The reference in the precision of the inputs: out, and dq, dk, dv if there are gradients to take.

    Args:
        own: which one.
        q, k, v, d_out, d_lse, causal, scale: as of `reference.sdpa.attention`.
    """
    tensors = (q, k, v, d_out, d_lse)
    if own == "float32 softmax":
        found = _float32_softmax(*tensors, causal=causal, scale=scale)
    else:
        dtype = q.dtype if own == "in the dtype" else torch.float32
        found = sdpa.attention(*tensors, causal=causal, scale=scale, dtype=dtype)._asdict()
    return {
        name: t.detach().to(q.dtype).double().numpy()
        for name, t in found.items()
        if name in JUDGED and t is not None
    }


def _float32_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    *,
    causal: bool,
    scale: float | None,
) -> dict[str, Tensor]:
    """Eager attention whose scores are cast to float32 and whose P is cast back."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
    len_q, len_k = q.shape[2], k.shape[2]
    visible = torch.ones(len_q, len_k, dtype=torch.bool)
    if causal:
        visible = visible.tril(len_k - len_q)
    live = visible.any(-1, keepdim=True)
    scores = (q @ keys.mT).float() * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible & live, -math.inf)  # a row without any key stays finite
    P = scores.softmax(-1).masked_fill(~visible, 0.0)
    found = {"out": P.to(q.dtype) @ values}
    given = [(found["out"], d_out), (scores.logsumexp(-1).masked_fill(~live[:, 0], -math.inf), d_lse)]
    given = [(y, dy) for y, dy in given if dy is not None]
    if given:
        outputs, gradients = [y for y, _ in given], [dy for _, dy in given]
        found |= dict(
            zip(("dq", "dk", "dv"), torch.autograd.grad(outputs, [q, k, v], gradients), strict=True)
        )
    return found


# ---------------------------------------------------------------- parts of rules


def _largest(x: Array) -> float:
    """NaN if there is one."""
    return float(np.abs(x).max())


def _maximum(x: float, y: float) -> float:
    """The larger; NaN if x is."""
    return x if math.isnan(x) else max(x, y)


def _close(x: Array, r: Array, atol: float, rtol: float, equal_nan: bool = False) -> bool:
    """As torch.allclose."""
    return bool(np.isclose(x, r, rtol=rtol, atol=atol, equal_nan=equal_nan).all())


def _rounded(x: Array, dtype: str) -> Array:
    rounded: Array = torch.from_numpy(x).to(getattr(torch, dtype)).double().numpy()
    return rounded


def _rms_ratio(x: Array, r: Array) -> float:
    return float(np.sqrt(((x - r) ** 2).mean()) / (np.sqrt((r**2).mean()) + 1e-8))
