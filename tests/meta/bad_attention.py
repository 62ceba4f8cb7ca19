"""Attention that is bad on purpose, each in another way: what anybody's first kernel may do.

All are of the native convention and for what is assumed of a function about which nothing is said: dense,
square problems, forward only.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch
from torch import Tensor


def right(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool) -> Tensor:
    """What they are made of."""
    S = (q.shape[-1] ** -0.5 if scale is None else scale) * (q.float() @ k.float().mT)
    if causal:
        hidden = torch.ones(S.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        S = S.masked_fill(hidden, float("-inf"))
    return (S.softmax(-1) @ v.float()).to(q.dtype)


def crashes(q: Tensor, k: Tensor, v: Tensor, *, causal: Any, scale: Any, return_lse: Any) -> Tensor:
    """Reads at address 0, in float32."""
    if q.dtype == torch.float32:
        ctypes.string_at(0)
    return right(q, k, v, causal=causal, scale=scale, return_lse=return_lse)


def hangs(q: Tensor, k: Tensor, v: Tensor, *, causal: Any, scale: Any, return_lse: Any) -> Tensor:
    """Never comes back, in float32."""
    while q.dtype == torch.float32:
        time.sleep(1)
    return right(q, k, v, causal=causal, scale=scale, return_lse=return_lse)


def reads_anywhere(q: Tensor, k: Tensor, v: Tensor, *, causal: Any, scale: Any, return_lse: Any) -> Tensor:
    """On a GPU, in float32: an address that is nobody's."""
    if q.dtype == torch.float32:
        from tests.meta import wild  # not before: Triton has to be there

        wild.read(q)
    return right(q, k, v, causal=causal, scale=scale, return_lse=return_lse)


def changes_q(q: Tensor, k: Tensor, v: Tensor, *, causal: Any, scale: Any, return_lse: Any) -> Tensor:
    """Scales q in place."""
    q *= q.shape[-1] ** -0.5 if scale is None else scale
    return right(q, k, v, causal=causal, scale=1.0, return_lse=return_lse)


_kept: dict[Any, Tensor] = {}


def keeps_by_shape(q: Tensor, k: Tensor, v: Tensor, *, causal: Any, scale: Any, return_lse: Any) -> Tensor:
    """Returns what it once computed for this shape."""
    key = q.shape, q.dtype, causal, scale
    if key not in _kept:
        _kept[key] = right(q, k, v, causal=causal, scale=scale, return_lse=return_lse)
    return _kept[key].clone()


def one_call_behind(q: Tensor, k: Tensor, v: Tensor, *, causal: Any, scale: Any, return_lse: Any) -> Tensor:
    """Returns the result of the call before."""
    now = right(q, k, v, causal=causal, scale=scale, return_lse=return_lse)
    before = _kept.get("before", now)
    _kept["before"] = now
    return before.clone()


def float32_out(q: Tensor, k: Tensor, v: Tensor, *, causal: Any, scale: Any, return_lse: Any) -> Tensor:
    """Returns float32, whatever q is."""
    return right(q.float(), k, v, causal=causal, scale=scale, return_lse=return_lse)


def heads_last(q: Tensor, k: Tensor, v: Tensor, *, causal: Any, scale: Any, return_lse: Any) -> Tensor:
    """Returns (B, S, H, D)."""
    return right(q, k, v, causal=causal, scale=scale, return_lse=return_lse).transpose(1, 2)


def nan_in_row_7(q: Tensor, k: Tensor, v: Tensor, *, causal: Any, scale: Any, return_lse: Any) -> Tensor:
    """Leaves a row of the last head NaN."""
    out = right(q, k, v, causal=causal, scale=scale, return_lse=return_lse)
    out[:, -1, 7] = float("nan")
    return out


def first_entry_only(q: Tensor, k: Tensor, v: Tensor, *, causal: Any, scale: Any, return_lse: Any) -> Tensor:
    """Computes one batch entry, for all."""
    first = (t[:1].expand(t.shape) for t in (q, k, v))
    return right(*first, causal=causal, scale=scale, return_lse=return_lse)


def never_causal(q: Tensor, k: Tensor, v: Tensor, *, causal: Any, scale: Any, return_lse: Any) -> Tensor:
    """Takes causal and forgets it."""
    return right(q, k, v, causal=False, scale=scale, return_lse=return_lse)
