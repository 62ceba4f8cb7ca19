"""Whether a call must go through the dispatcher of PyTorch, or may go round it.

A custom operator in Python takes longer to be dispatched than a short kernel runs. Where nobody looks on, a
call goes to the launch directly, through an autograd function if gradients are wanted. What looks on needs
the operator: a compiler or exporter, a tracer, a transformation of functorch, a mode, a subclass of Tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

PLAIN = (Tensor, Parameter)


def needs_operator(*tensors: Tensor) -> bool:
    """Whether somebody would miss the operator."""
    if torch.compiler.is_compiling():
        return True
    for t in tensors:
        if type(t) not in PLAIN or t.is_meta or torch._C._functorch.is_legacy_batchedtensor(t):
            return True
        if t.is_neg() or t._is_zerotensor():  # pending, or without memory: the dispatcher makes them real
            return True
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def wants_gradients(*tensors: Tensor) -> bool:
    """Whether a call on these tensors is to be differentiable."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
