"""Attention that is right but for some lengths, at each of which it does to its GPU what a kernel may do."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.meta.plain import attention as right


@triton.jit
def write_far_away(p):
    far = tl.full((), 1 << 40, tl.int64)
    tl.store(p + far, 1.0)


@triton.jit
def wait_for(flag):
    seen = tl.load(flag, volatile=True)
    while seen == 0:
        seen = tl.load(flag, volatile=True)


def attention(q: Tensor, *tensors: Tensor, **options: Any) -> Any:
    length = q.shape[2]
    if length == 17:
        write_far_away[(1,)](torch.empty(4, device=q.device))
    elif length == 18:
        wait_for[(1,)](torch.zeros(1, device=q.device, dtype=torch.int32))
    elif length == 19:
        torch.zeros(4, device=q.device)[torch.tensor([9], device=q.device)]
    return right(q, *tensors, **options)
