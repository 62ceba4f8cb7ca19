"""What somebody writes to test a kernel of a signature of its own: README.md shows it.

tox -e here -- --manifest tests/example/manifest.toml
"""

import torch

from tests.example import raw_kernel  # yours: an extension, a Triton launcher, ...


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, softmax_scale, causal):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # as the kernel knows them: (B, S, H, D)
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device)
        raw_kernel.forward(q, k, v, softmax_scale, causal, out, lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.softmax_scale, ctx.causal = softmax_scale, causal
        ctx.mark_non_differentiable(lse)
        return out.transpose(1, 2), lse

    @staticmethod
    def backward(ctx, d_out, _):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        d_out = d_out.transpose(1, 2)
        raw_kernel.backward(d_out, q, k, v, out, lse, ctx.softmax_scale, ctx.causal, dq, dk, dv)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), None, None


def attention(q, k, v, *, causal, scale, return_lse):
    out, lse = _Attention.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, causal)
    return (out, lse) if return_lse else out
