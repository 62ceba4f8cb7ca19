"""Where a case's tensors lie in memory: in the middle of a buffer whose other values must not matter."""

from __future__ import annotations

from math import nan

import torch
from torch import Tensor

EXPANDED = frozenset({"k", "v", "d_out"})
"""What the layout "expanded" expands over the heads; their values repeat there (`values`)."""

GUARD = 2**17
"""Elements before and after what is placed: 512 rows of 256, so that a whole tile of rows too many still
lands in them. A multiple of 512 bytes in every dtype: what lies between is as aligned as fresh memory."""

ODD_STRIDES = (1_000_003, 77, 5, 3)
"""Of dimensions of size 1 in the layout "odd": an address made with one of them points far away."""


def place(name: str, x: Tensor, layout: str, device: torch.device, surroundings: float = nan) -> Tensor:
    """The values of x in a layout, as a view of a buffer that holds `surroundings` everywhere else.

    Args:
        name: which input it is: "q", "k", "v", "d_out", "d_lse", or any other of one dimension.
        x: contiguous, on the CPU. (B, H, S, D), (B, H, S), or one dimension, which has no layout.
        layout: a name of `cases.LAYOUTS`.
        device: where the memory is.
        surroundings: of the dtype of x.

    Returns:
        A view; `whole_memory` of it is the buffer.
    """
    if layout == "expanded" and name in EXPANDED:
        return place(name, x[:, :1], "bhsd", device, surroundings).expand(x.shape)
    if layout == "gradient":
        layout = "bshd" if name in ("d_out", "d_lse") else "bhsd"
    if x.ndim == 1:
        layout = "bhsd"
    view = _view(x, layout, device, surroundings)
    view.copy_(x)
    return view


def _view(x: Tensor, layout: str, device: torch.device, surroundings: float) -> Tensor:
    """A view of the shape of x, not yet with its values."""

    def middle(*shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        buffer = torch.full((count + 2 * GUARD,), surroundings, dtype=x.dtype, device=device)
        return buffer[GUARD : GUARD + count].view(shape)

    if layout == "bhsd":
        return middle(*x.shape)
    B, H, S, *last = x.shape
    match layout:
        case "bshd":
            return middle(B, S, H, *last).transpose(1, 2)
        case "sbhd":
            return middle(S, B, H, *last).permute(1, 2, 0, *range(3, x.ndim))
        case "packed":
            return middle(B, S, 3, H, *last)[:, :, 1].transpose(1, 2)
        case "sliced":
            wider = [n + 5 for n in last]
            view = middle(B, H, S + 3, *wider)[:, :, 2 : S + 2]
            return view[..., 3:-2] if last else view
        case "strided":
            return middle(B, H, S, *last, 2)[..., 0]
        case "offset":
            return middle(x.numel() + 2)[1:-1].view(x.shape)
        case "odd":
            view = middle(*x.shape)
            strides = [odd if n == 1 else view.stride(i)
                       for i, (n, odd) in enumerate(zip(x.shape, ODD_STRIDES, strict=False))]  # fmt: skip
            return view.as_strided(view.shape, strides)
        case _:  # "expanded": what is not expanded
            return middle(*x.shape)


# ---------------------------------------------------------------- the memory that a view lies in


def whole_memory(view: Tensor) -> Tensor:
    """The bytes of all the memory that a view lies in, uint8 (bytes,); shares it."""
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())


def own_places(view: Tensor) -> Tensor:
    """Which elements of that memory are the view's own, bool (elements,)."""
    count = view.untyped_storage().nbytes() // view.element_size()
    own = torch.zeros(count, dtype=torch.bool, device=view.device)
    own.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    return own


def difference(view: Tensor, before: Tensor) -> str:
    """What of the memory that a view lies in is no longer as it was; empty if all is.

    Args:
        view: any strides.
        before: a copy of its `whole_memory`.
    """
    now = whole_memory(view)
    if torch.equal(now, before):
        return ""
    changed = (now != before).view(-1, view.element_size()).any(1)
    own = own_places(view)
    found = []
    if (changed & own).any():
        numbers = torch.arange(view.numel(), device=view.device).view(view.shape)
        inside = changed.as_strided(view.shape, view.stride(), view.storage_offset())
        first = int(numbers[inside][0])
        index = [int(i) for i in torch.unravel_index(torch.tensor(first), view.shape)]
        found.append(f"{int(inside.sum())} of its elements, the first at {index}")
    if (beside := changed & ~own).any():
        found.append(beside_words(beside, own, int(view.storage_offset())))
    return "; ".join(found)


def beside_words(beside: Tensor, own: Tensor, start: int) -> str:
    """Where elements beside a tensor are.

    Args:
        beside: which elements of the memory are meant, bool (elements,); at least one.
        own: which are the tensor's own.
        start: where its first is, or would be.
    """
    places = beside.nonzero().flatten()
    mine = own.nonzero().flatten()
    first, last = (int(mine[0]), int(mine[-1])) if len(mine) else (start, start - 1)
    words = []
    for side, chosen in (
        ("before it", places[places < first]),
        ("between its rows", places[(places > first) & (places < last)]),
        ("after it", places[places > last]),
    ):
        if len(chosen):
            count = f"{len(chosen)} element{'s' if len(chosen) > 1 else ''} {side}"
            match side:
                case "before it":
                    words.append(f"{count}, the nearest {first - int(chosen[-1])} before its first")
                case "after it":
                    words.append(f"{count}, the nearest {int(chosen[0]) - last} past its last")
                case _:
                    words.append(f"{count}, the first {int(chosen[0]) - first} past its first")
    return "; ".join(words)
