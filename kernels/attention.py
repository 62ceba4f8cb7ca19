"""The function that a user calls, and its operators in torch.library.

The operators have autograd formulas and fake implementations, so that torch.compile, torch.export
and torch.library.opcheck take them. A call that nobody looks on goes round them (`dispatch`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import launch, plans
from .checks import check_flags, check_no_tangents, check_tensors, checked_scale
from .dispatch import needs_operator, wants_gradients

NAMESPACE = "attention_proving_ground"


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., scale: float | None = ...,
    return_lse: Literal[False] = ..., deterministic: bool = ..., allow_tf32: bool = ...,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., scale: float | None = ...,
    return_lse: Literal[True], deterministic: bool = ..., allow_tf32: bool = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    allow_tf32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v without ever storing the scores; differentiable in q, k, v.

    FlashAttention-2 (Dao 2023, arXiv:2307.08691). Products accumulate in float32.

    Args:
        q: (B, Hq, Sq, D), float16, bfloat16 or float32, any strides; D from 16 to 256.
        k: (B, Hkv, Sk, D), Hq a multiple of Hkv; query head h reads KV head h // (Hq // Hkv).
        v: (B, Hkv, Sk, Dv), Dv from 16 to 256.
        causal: query i sees the keys j <= i + Sk - Sq (aligned at the bottom right).
        scale: of the scores; D ** -0.5 if None. Any finite number, up to 2.3586e38 in magnitude.
        return_lse: also return the natural logarithm of the sum of the exponentials of each row's
            scores; gradients flow through it too.
        deterministic: False permits a backward whose sums have no fixed order. There is none today:
            the gradients are the same bit for bit in every run either way.
        allow_tf32: let float32 products go through tensor cores with a 10-bit mantissa.

    Returns:
        out (B, Hq, Sq, Dv) in the dtype of q; with return_lse also lse (B, Hq, Sq), float32. A row
        that sees no key has out 0 and lse -inf.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes that do not fit, a head dimension out of range, a scale that is not finite.
        RuntimeError: a device that the kernels do not run on; forward-mode differentiation.
    """
    if type(causal) is type(return_lse) is type(deterministic) is type(allow_tf32) is bool:
        found = _again(q, k, v, causal, scale, allow_tf32)
        if found is not None:
            return found if return_lse else found[0]
    check_flags(causal=causal, return_lse=return_lse, deterministic=deterministic,
                allow_tf32=allow_tf32)  # fmt: skip
    check_tensors(q, k, v)
    check_no_tangents(q=q, k=k, v=v)
    scale = checked_scale(scale, q.shape[3])
    out, lse = _forward(q, k, v, causal, scale, allow_tf32)
    return (out, lse) if return_lse else out


def _again(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, allow_tf32: bool
) -> tuple[Tensor, Tensor] | None:
    """A call like one before, which was checked; None if there is no plan of it."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return None
    if scale is not None and type(scale) is not float:
        return None
    inputs, asked = (q, k, v), (causal, scale, allow_tf32)
    latest = plans.latest(asked, inputs)
    if latest is not None:
        if latest.differentiable and torch.is_grad_enabled():
            return _apply(q, k, v, (latest.options, latest.plan))  # the guard has looked for functorch
        return latest.plan(inputs)
    if needs_operator(q, k, v) or not q.is_cuda:
        return None
    if any(t.is_nested or t.layout is not torch.strided for t in inputs):
        return None
    if scale is None:
        scale = q.shape[3] ** -0.5 if q.ndim == 4 and q.shape[3] else None
    if scale is None:
        return None
    options = causal, scale or 0.0, allow_tf32  # -0.0 has the key of 0.0
    plan = plans.known(plans.key_of(inputs, *options))
    if plan is None:
        return None
    plans.remember(asked, inputs, options, plan)
    if wants_gradients(q, k, v):
        return _Attention.apply(q, k, v, (options, plan))
    return plan(inputs)


def _launched(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, allow_tf32: bool
) -> tuple[Tensor, Tensor]:
    """Launches by a plan; the first time, makes one."""
    if not q.is_cuda:
        return launch.forward(q, k, v, causal, scale, allow_tf32)
    return plans.launched(
        (q, k, v), (causal, scale, allow_tf32), lambda: launch.forward(q, k, v, causal, scale, allow_tf32)
    )


def _tensors(d_out: Tensor, d_lse: Tensor | None, *saved: Tensor) -> tuple[Tensor, ...]:
    """Of a backward, as its plans know them."""
    return (*saved, d_out) if d_lse is None else (*saved, d_out, d_lse)


def _launched_backward(
    d_out: Tensor | None, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, scale: float, allow_tf32: bool, need_dq: bool, need_dkdv: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same for the backward."""
    if not q.is_cuda or d_out is None:
        return launch.backward(d_out, d_lse, q, k, v, out, lse, causal, scale, allow_tf32, need_dq, need_dkdv)
    return plans.launched(
        _tensors(d_out, d_lse, q, k, v, out, lse), (causal, scale, allow_tf32, need_dq, need_dkdv),
        lambda: launch.backward(
            d_out, d_lse, q, k, v, out, lse, causal, scale, allow_tf32, need_dq, need_dkdv
        ),
    )  # fmt: skip


def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, allow_tf32: bool
) -> tuple[Tensor, Tensor]:
    if needs_operator(q, k, v):
        return _forward_operator(q, k, v, causal, scale, allow_tf32)
    if wants_gradients(q, k, v):
        return _Attention.apply(q, k, v, ((causal, scale, allow_tf32), None))
    return _launched(q, k, v, causal, scale, allow_tf32)


@torch.library.custom_op(f"{NAMESPACE}::flash_attention_forward", mutates_args=())
def _forward_operator(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, allow_tf32: bool
) -> tuple[Tensor, Tensor]:
    return launch.forward(q, k, v, causal, scale, allow_tf32)


@_forward_operator.register_fake
def _(q, k, v, causal, scale, allow_tf32):
    return launch.new_results(q, v)


@torch.library.custom_op(f"{NAMESPACE}::flash_attention_backward", mutates_args=())
def _backward_operator(
    d_out: Tensor | None,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    allow_tf32: bool,
    need_dq: bool,
    need_dkdv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return launch.backward(d_out, d_lse, q, k, v, out, lse, causal, scale, allow_tf32, need_dq,
                           need_dkdv)  # fmt: skip


@_backward_operator.register_fake
def _(d_out, d_lse, q, k, v, out, lse, causal, scale, allow_tf32, need_dq, need_dkdv):
    return launch.new_gradients(q, k, v, need_dq, need_dkdv)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, ctx.scale, ctx.allow_tf32 = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def gradients(
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]], ctx: Any, d_out: Tensor | None,
    d_lse: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """dq, dk, dv through a backward operator, and None for each other input of the forward; None for each
    that nobody wants, or that nothing flows into."""
    need_dq, need_dk, need_dv, *others = ctx.needs_input_grad
    found: tuple[Any, ...] = (None, None, None)
    if d_out is not None or d_lse is not None:
        dq, dk, dv = backward(d_out, d_lse, *ctx.saved_tensors, ctx.causal, ctx.scale, ctx.allow_tf32,
                              need_dq, need_dk or need_dv)  # fmt: skip
        found = dq if need_dq else None, dk if need_dk else None, dv if need_dv else None
    return *found, *(None for _ in others)


def _backward(d_out: Tensor | None, d_lse: Tensor | None, *saved: Any) -> tuple[Tensor, Tensor, Tensor]:
    if torch.is_grad_enabled():  # a second derivative is wanted: the operator refuses it
        return _backward_operator(d_out, d_lse, *saved)
    if d_out is not None and not torch.compiler.is_compiling():
        inputs = _tensors(d_out, d_lse, *saved[:5])
        latest = plans.latest(saved[5:], inputs)
        found = latest.plan(inputs) if latest is not None else None
        if found is not None:
            return found
    if needs_operator(*(t for t in (d_out, d_lse, *saved) if isinstance(t, Tensor))):
        return _backward_operator(d_out, d_lse, *saved)
    return _launched_backward(d_out, d_lse, *saved)


def _differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    return gradients(_backward, ctx, d_out, d_lse)


_forward_operator.register_autograd(_differentiate, setup_context=_save)


class _Attention(torch.autograd.Function):
    """The formulas of the operators, without the forward's. Its arguments are q, k, v, and in one, for each
    costs, the options and the plan of a call like this."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: Any) -> tuple[Tensor, Tensor]:
        options, plan = how
        output = plan((q, k, v)) if plan is not None else None
        if output is None:
            output = _launched(q, k, v, *options)
        _save(ctx, (q, k, v, *options), output)
        return output

    backward = staticmethod(_differentiate)


_apply = super(torch.autograd.Function, _Attention).apply
"""`_Attention.apply` where no transformation of functorch is, or was: it does not look for one."""
