"""The same for ragged batches: sequences of different lengths, one behind the other, without padding."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import launch
from .attention import NAMESPACE, gradients
from .checks import (
    check_cu_seqlens,
    check_flags,
    check_lengths,
    check_no_tangents,
    check_ragged_tensors,
    checked_max_seqlen,
    checked_scale,
)
from .dispatch import needs_operator, wants_gradients
from .launch import Ragged


@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, causal: bool = ..., scale: float | None = ...,
    return_lse: Literal[False] = ..., deterministic: bool = ..., allow_tf32: bool = ...,
    validate: bool = ...,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, causal: bool = ..., scale: float | None = ...,
    return_lse: Literal[True], deterministic: bool = ..., allow_tf32: bool = ...,
    validate: bool = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    allow_tf32: bool = False,
    validate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` of each sequence of a ragged batch; differentiable in q, k, v.

    Sequence b has the query rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] and the keys cu_seqlens_k[b] to
    cu_seqlens_k[b + 1]; either may be none. The host never waits for the device, so a CUDA graph may be
    replayed with other offsets. Rows behind the last sequence are not read; their out and gradients
    are 0, their lse -inf.

    Args:
        q: (total_q, Hq, D), float16, bfloat16 or float32, any strides; D from 16 to 256.
        k: (total_k, Hkv, D), Hq a multiple of Hkv; query head h reads KV head h // (Hq // Hkv).
        v: (total_k, Hkv, Dv), Dv from 16 to 256.
        cu_seqlens_q: (B + 1,), int32, contiguous, on the device of q: 0, then where each sequence ends.
        cu_seqlens_k: the same for k and v.
        max_seqlen_q: no sequence has more query rows. Results and speed do not depend on it.
        max_seqlen_k: no sequence has more keys. The same.
        causal: query i of a sequence of Sq queries and Sk keys sees its keys j <= i + Sk - Sq.
        scale: of the scores; D ** -0.5 if None. Any finite number, up to 2.3586e38 in magnitude.
        return_lse: also return the natural logarithm of the sum of the exponentials of each row's
            scores; gradients flow through it too.
        deterministic: False permits a backward whose sums have no fixed order. There is none today.
        allow_tf32: let float32 products go through tensor cores with a 10-bit mantissa.
        validate: check the values of cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k too,
            for which the host waits for the device. Otherwise offsets that break the rules give wrong
            results, but no access outside of the tensors.

    Returns:
        out (total_q, Hq, Dv) in the dtype of q; with return_lse also lse (Hq, total_q), float32. A row
        that sees no key has out 0 and lse -inf.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes or devices that do not fit, a head dimension out of range, a scale that is not
            finite; with `validate`, offsets that decrease or point past the tensors, or a sequence
            longer than max_seqlen_q or max_seqlen_k.
        RuntimeError: a device that the kernels do not run on; forward-mode differentiation; `validate`
            while a CUDA graph is captured.
    """
    check_flags(causal=causal, return_lse=return_lse, deterministic=deterministic,
                allow_tf32=allow_tf32, validate=validate)  # fmt: skip
    check_ragged_tensors(q, k, v)
    check_no_tangents(q=q, k=k, v=v)
    check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, q)
    max_seqlen_q = checked_max_seqlen("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = checked_max_seqlen("max_seqlen_k", max_seqlen_k)
    scale = checked_scale(scale, q.shape[2])
    out, lse = _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale,
                        allow_tf32, validate)  # fmt: skip
    return (out, lse) if return_lse else out


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    tensors = inputs[:5]
    if needs_operator(*tensors):
        return _forward_operator(*inputs)
    if wants_gradients(*tensors[:3]):
        return _Attention.apply(*inputs)
    return _launched(*inputs)


def _launched(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    scale: float,
    allow_tf32: bool,
    validate: bool,
) -> tuple[Tensor, Tensor]:
    if validate:  # in here, for a compiler would drop an operator that gives nothing
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "validate is True while a CUDA graph is captured; it must be False there: the host cannot"
                " wait for the device"
            )
        check_lengths("q", cu_seqlens_q, q.shape[0], max_seqlen_q)
        check_lengths("k", cu_seqlens_k, k.shape[0], max_seqlen_k)
    return launch.forward(q, k, v, causal, scale, allow_tf32, Ragged(cu_seqlens_q, cu_seqlens_k))


_forward_operator = torch.library.custom_op(
    f"{NAMESPACE}::flash_attention_varlen_forward", _launched, mutates_args=()
)


@_forward_operator.register_fake
def _(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale, allow_tf32,
      validate):  # fmt: skip
    return launch.new_results(q, v)


def _launched_backward(
    d_out: Tensor | None,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    allow_tf32: bool,
    need_dq: bool,
    need_dkdv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return launch.backward(d_out, d_lse, q, k, v, out, lse, causal, scale, allow_tf32, need_dq,
                           need_dkdv, Ragged(cu_seqlens_q, cu_seqlens_k))  # fmt: skip


_backward_operator = torch.library.custom_op(
    f"{NAMESPACE}::flash_attention_varlen_backward", _launched_backward, mutates_args=()
)


@_backward_operator.register_fake
def _(d_out, d_lse, q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, causal, scale, allow_tf32, need_dq,
      need_dkdv):  # fmt: skip
    return launch.new_gradients(q, k, v, need_dq, need_dkdv)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, _, _, ctx.causal, ctx.scale, ctx.allow_tf32, _ = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(d_out: Tensor | None, d_lse: Tensor | None, *saved: Any) -> tuple[Tensor, Tensor, Tensor]:
    # with gradients enabled a second derivative is wanted: the operator refuses it
    if torch.is_grad_enabled() or needs_operator(
        *(t for t in (d_out, d_lse, *saved) if isinstance(t, Tensor))
    ):
        return _backward_operator(d_out, d_lse, *saved)
    return _launched_backward(d_out, d_lse, *saved)


def _differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    return gradients(_backward, ctx, d_out, d_lse)


_forward_operator.register_autograd(_differentiate, setup_context=_save)


class _Attention(torch.autograd.Function):
    """The formulas of the operators, without the forward's."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _launched(*inputs)
        _save(ctx, inputs, output)
        return output

    backward = staticmethod(_differentiate)
