"""PyTorch's FlexAttention, compiled, with the causal mask of this project.

What it claims is what its documentation and its lowering say (`torch/nn/attention/flex_attention.py`,
`torch/_inductor/kernel/flex/`): on a GPU any of the three dtypes, head dimensions padded to powers of two,
Dv != D, any number of query heads a KV head, Sq != Sk, rows that see no key ("Handle fully masked out rows"),
gradients through the lse (`grad_logsumexp`). Lengths of 0 are refused, strides are not mentioned, and nothing
promises the same bits in every run. On a CPU it has no backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cases import DTYPES
from ..implementations import Claims, Implementation, foreign_path

CLAIMS = Claims(
    dtypes=DTYPES,
    devices=("cuda",),
    equal_dims=False,
    gqa=True,
    cross_lengths=True,
    dead_rows=True,
    backward=True,
    lse=True,
    lse_grad=True,
)

RECOMPILATIONS = 100_000
"""Head dimensions, dtypes, heads and scales are constants of the compiled code: each costs a compilation."""


def load(name: str) -> Implementation:
    """The implementation. Inductor makes Triton of it, so another architecture's code may be asked for."""
    return Implementation(name, attention, CLAIMS, foreign_path)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool) -> Any:
    """FlexAttention of the native convention; its block mask is made anew in each call."""
    mask = None
    if causal:
        from torch.nn.attention.flex_attention import create_block_mask

        shift = torch.tensor(k.shape[2] - q.shape[2], device=q.device)
        visible = functools.partial(_visible, shift)
        mask = create_block_mask(visible, None, None, q.shape[2], k.shape[2], device=q.device)
    with torch._dynamo.config.patch(
        recompile_limit=RECOMPILATIONS, accumulated_recompile_limit=RECOMPILATIONS
    ):
        return _compiled()(q, k, v, mask, scale, q.shape[1] != k.shape[1], return_lse)


def _visible(shift: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j <= i + shift


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def flex(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, gqa: bool, lse: bool) -> Any:
        if not lse:
            return flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=gqa)
        wanted = AuxRequest(lse=True)
        out, aux = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=gqa, return_aux=wanted)
        return out, aux.lse

    return torch.compile(flex, dynamic=True, fullgraph=True)
