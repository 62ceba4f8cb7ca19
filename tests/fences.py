"""Memory that Python code allocates through torch, poisoned and fenced.

Under `fenced`, `torch.empty` and its kind give memory filled with poison, and all memory lies between guard
bands of poison that are compared bit for bit afterwards: what a kernel forgets to write shows in its
results, what it writes beside its outputs and its scratch shows here.

Only calls from Python are seen, and of those only what is looked up when it is called: not a function that
was taken from torch before (`from torch import empty`), nor what an operator returns (`clone`, `torch.rand`).
A fenced tensor begins at an offset of its storage, where the guards are too: `as_strided` needs that offset,
not 0.

PyTorch's deterministic mode would also fill what C++ code allocates
(`torch.utils.deterministic.fill_uninitialized_memory`). It is not used: with warn_only=True PyTorch's fused
attentions are chosen and computed as ever (cuDNN is refused, and the backwards of FlashAttention and of
memory-efficient attention sum in another order, only with warn_only=False: `sdp_utils.cpp`,
`attention_backward.cu`), but index_add, index_put, scatter_add and more switch to other kernels all the
same, what torch.compile made is made anew, and what is tested would no longer be what is used.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from . import layouts
from .layouts import GUARD, beside_words, own_places, whole_memory

UNINITIALISED = {
    torch: ("empty", "empty_like", "empty_strided", "empty_permuted"),
    Tensor: ("new_empty", "new_empty_strided"),
}
INITIALISED = {
    torch: ("zeros", "zeros_like", "ones", "ones_like", "full", "full_like"),
    Tensor: ("new_zeros", "new_ones", "new_full"),
}
"""What is fenced: functions of torch and methods of its tensors."""

ALLOCATORS_OF_THEIR_OWN = frozenset({"torch", "triton"})
"""Packages whose own calls are left alone. What they allocate for themselves is no implementation's:
Triton's interpreter makes an empty tensor for each argument of a launch and lets it share the argument's
memory, its autotuner clears the cache with one; torch.compile plans its memory by itself."""

_full = torch.full
_set = Tensor.set_


@dataclass(frozen=True)
class Allocation:
    """One fenced tensor.

    Attributes:
        tensor: what the caller got, detached.
        poison: one element of what lies beside it, uint8 (bytes,).
        given: what the caller got, as long as it lives.
    """

    tensor: Tensor
    poison: Tensor
    given: weakref.ref[Tensor]

    def violation(self) -> str:
        """What was written beside the tensor; empty if nothing was, or if it was resized, into its guards."""
        given = self.given()
        if given is not None and given.shape != self.tensor.shape:
            return ""
        itemsize = self.tensor.element_size()
        memory = whole_memory(self.tensor).view(-1, itemsize)
        start, extent = int(self.tensor.storage_offset()), _extent(self.tensor)
        guards = (memory[:start], memory[start + extent :])
        gaps = extent > self.tensor.numel()
        if not gaps and not any((guard != self.poison).any() for guard in guards):
            return ""
        own = own_places(self.tensor)
        beside = (memory != self.poison).any(1) & ~own
        if not beside.any():
            return ""
        return beside_words(beside, own, start)

    @property
    def words(self) -> str:
        return f"{str(self.tensor.dtype).removeprefix('torch.')} {tuple(self.tensor.shape)}"

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in this memory."""
        return tensor.untyped_storage().data_ptr() == self.tensor.untyped_storage().data_ptr()


class Fences:
    """What was allocated on one type of device while these fences stood.

    Attributes:
        device: on which memory is fenced, by its type.
        poison: what uninitialised floating-point memory and all guards hold.
        integers: the same of integers.
        allocations: in the order in which they were made; they live as long as this does.
    """

    def __init__(self, device: torch.device, poison: float, integers: int) -> None:
        self.device, self.poison, self.integers = device, poison, integers
        self.allocations: list[Allocation] = []

    def around(self, fresh: Tensor, initialised: bool) -> Tensor:
        """A fenced tensor in the place of one just allocated; that one if it is of no interest here."""
        if fresh.device.type != self.device.type or not _plain(fresh):
            return fresh
        poison = self._poison(fresh.dtype)
        if poison is None:
            return fresh
        with torch.no_grad():
            buffer = _full((_extent(fresh) + 2 * GUARD,), poison, dtype=fresh.dtype, device=fresh.device)
            # not a view of the buffer: to autograd it is as new as what it replaces
            tensor = _full((0,), poison, dtype=fresh.dtype, device=fresh.device)
            _set(tensor, buffer.untyped_storage(), GUARD, fresh.shape, fresh.stride())
            if initialised:
                tensor.copy_(fresh)
            poisoned = buffer[:1].view(torch.uint8).clone()
            allocation = Allocation(tensor.detach(), poisoned, weakref.ref(tensor))
        self.allocations.append(allocation)
        return tensor.requires_grad_(fresh.requires_grad)

    def _poison(self, dtype: torch.dtype) -> float | int | None:
        if dtype.is_floating_point or dtype.is_complex:
            return self.poison if dtype in _WITH_NAN else None
        if dtype == torch.bool:
            return True
        if dtype not in _INTEGERS:
            return None
        limits = torch.iinfo(dtype)
        return min(max(self.integers, limits.min), limits.max)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that was allocated here."""
        return any(allocation.holds(tensor) for allocation in self.allocations)

    def violations(self, named: Mapping[str, Any] | None = None) -> list[str]:
        """What was written beside each tensor, if anything was. Waits for the device.

        Args:
            named: names of results that may be among these tensors.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = []
        for allocation in self.allocations:
            if what := allocation.violation():
                names = [
                    name
                    for name, t in (named or {}).items()
                    if isinstance(t, Tensor) and t.layout == torch.strided and allocation.holds(t)
                ]
                found.append(f"{', '.join([*names, allocation.words])}: {what}")
        return found


_WITH_NAN = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128,
})  # fmt: skip
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is ordinary memory: not a subclass (fake, distributed), not sparse, not pinned."""
    return type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_pinned()


# ---------------------------------------------------------------- standing in for torch's functions

_standing: list[Fences] = []
_lock = threading.RLock()
_replaced: list[tuple[Any, str, bool, Any]] = []


@contextmanager
def fenced(device: torch.device, poison: float = nan, integers: int = 2**31 - 1) -> Iterator[Fences]:
    """Fences all memory that Python code allocates on a type of device, in all threads.

    (The backward of CUDA tensors runs in a thread of its own.) Of several at once the innermost counts.

    Args:
        device: on which.
        poison: of floating-point memory.
        integers: of integers, or the nearest number that their dtype has; booleans are True.

    Yields:
        The fences; ask them for violations when all is done.
    """
    fences = Fences(device, poison, integers)
    with _lock:
        if not _standing:
            _replace()
        _standing.append(fences)
    try:
        yield fences
    finally:
        with _lock:
            _standing.remove(fences)
            if not _standing:
                _restore()


def _replace() -> None:
    _let_torch_know_its_own()
    for initialised, functions in ((False, UNINITIALISED), (True, INITIALISED)):
        for owner, names in functions.items():
            for name in names:
                original = getattr(owner, name)
                _replaced.append((owner, name, name in vars(owner), original))
                setattr(owner, name, _standing_in(original, initialised))


def _let_torch_know_its_own() -> None:
    """Has PyTorch make the lists of its functions that it makes once: they must hold the originals.

    torch.set_default_device and torch.compile recognise functions by them.
    """
    from torch._dynamo import trace_rules  # takes a second: not whenever this module is imported

    trace_rules.get_torch_obj_rule_map()
    trace_rules.get_tensor_method()
    _device_constructors()


def _restore() -> None:
    while _replaced:
        owner, name, own, original = _replaced.pop()
        if own:
            setattr(owner, name, original)
        else:  # inherited
            delattr(owner, name)


def _standing_in(original: Callable[..., Any], initialised: bool) -> Callable[..., Any]:
    """The function that stands in for one of torch's: it allocates by it, and then moves in between guards.

    So everything that is wrong is refused as ever, and everything that is left out is as ever.
    """

    @functools.wraps(original)
    def allocate(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        fresh = original(*args, **kwargs)
        innermost = _standing[-1:]
        if not innermost or kwargs.get("out") is not None or _no_real_memory():
            return fresh
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller == layouts.__name__ or caller.partition(".")[0] in ALLOCATORS_OF_THEIR_OWN:
            return fresh
        return innermost[0].around(fresh, initialised)

    return allocate


def _no_real_memory() -> bool:
    """Whether a call only stands for one: it is traced, transformed, or captured in a graph.

    A captured call runs when the graph is replayed; its guards hold nothing before.
    """
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    )
