"""Where a case's tensors lie in memory. Everything beside the values is NaN."""

from __future__ import annotations

import torch
from torch import Tensor

EXPANDED = frozenset({"k", "v", "d_out"})
"""What the layout "expanded" expands over the heads; their values repeat there (`values`)."""


def place(name: str, x: Tensor, layout: str, device: torch.device) -> Tensor:
    """The values of x (dense, 3 or 4 dimensions: B, H, S[, D]) in a layout, as a view of poisoned memory.

    Args:
        name: which input it is: "q", "k", "v", "d_out", "d_lse".
        x: contiguous, on the CPU.
        layout: a name of `cases.LAYOUTS`.
        device: where the memory is.
    """
    if layout == "expanded" and name in EXPANDED:
        return place(name, x[:, :1], "bhsd", device).expand(x.shape)
    view = _empty_view(x, layout, device)
    view.copy_(x)
    return view


def _empty_view(x: Tensor, layout: str, device: torch.device) -> Tensor:
    B, H, S, *last = x.shape

    def poisoned(*shape: int) -> Tensor:
        return torch.full(shape, float("nan"), dtype=x.dtype, device=device)

    match layout:
        case "bshd":
            return poisoned(B, S, H, *last).transpose(1, 2)
        case "sbhd":
            return poisoned(S, B, H, *last).permute(1, 2, 0, *range(3, x.ndim))
        case "packed":
            return poisoned(B, S, 3, H, *last)[:, :, 1].transpose(1, 2)
        case "sliced":
            wider = [n + 5 for n in last]
            view = poisoned(B, H, S + 3, *wider)[:, :, 2 : S + 2]
            return view[..., 3:-2] if last else view
        case "strided":
            return poisoned(B, H, S, *last, 2)[..., 0]
        case "offset":
            return poisoned(x.numel() + 2)[1:-1].view(x.shape)
        case _:
            return poisoned(*x.shape)
