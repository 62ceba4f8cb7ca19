"""Calls made again: what the host works out for a call is kept, and the next one like it only launches.

The first call on tensors of some shapes, strides, dtypes and devices is checked, finds tiles, strides and
grids, and has kernels compiled. What it launched then is a plan: kernels, grids, and arguments in which
tensors are places. A call like it puts its own tensors there.

Whether a call is like one before is a key of shapes, strides, dtypes and devices. To make that key takes as
long as everything else together, and most calls are like the one just before: of the latest call with the
same options a guard of PyTorch's compiler is kept, which looks at all of that, and at who looks on, in one
call into C++.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""The same, without asking first whether CUDA runs: tensors on it are at hand."""

current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
"""The handle of a device's current stream."""

ALIGNED = 16
"""Bytes: kernels of a plan are compiled for addresses that are multiples of this."""

MOST = 4096
"""Plans that are kept: of the lengths of all batches of a training run there may be more."""


def more_is_asked(*kernels: Any) -> bool:
    """Whether Triton is told to compile for debugging, instrumented, or through somebody's hook, or to call
    one before or after it launches one of these: then launching is left to it."""
    runtime = knobs.runtime
    hook = getattr(runtime, "add_stages_inspection_hook", None)
    if runtime.debug or knobs.compilation.instrumentation_mode or hook:
        return True
    for hooks in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hooks is not None and getattr(hooks, "calls", True):
            return True
    return any(kernel.pre_run_hooks for kernel in kernels)


class Launch(NamedTuple):
    """One kernel of triton.jit, launched: `run(stream, arguments)`.

    Attributes:
        run: what launches it; the stream is a handle.
        arguments: of the kernel, constants among them.
        kernel: the same.
        by_address: whether `run` takes addresses in the place of tensors, or takes tensors (and asks for the
            stream itself).
    """

    run: Callable[[int, Sequence[Any]], None]
    arguments: tuple[Any, ...]
    kernel: Any
    by_address: bool = False


class _Recording(threading.local):
    """What this thread has launched since it began to record; None in it is a launch that is not to be
    repeated without Triton. A backward runs in a thread of its own."""

    launches: list[Launch | None] | None = None


_recording = _Recording()


def record(launch: Launch | None) -> None:
    """Notes a launch, if somebody records."""
    if _recording.launches is not None:
        _recording.launches.append(launch)


@contextmanager
def recorded() -> Iterator[list[Launch | None]]:
    """Within, launches are noted."""
    launches: list[Launch | None] = []
    before, _recording.launches = _recording.launches, launches
    try:
        yield launches
    finally:
        _recording.launches = before


def aligned(addresses: Sequence[int]) -> bool:
    """Whether kernels that were compiled for aligned addresses may be given these."""
    return not functools.reduce(operator.or_, addresses, 0) % ALIGNED


def _empty(device: torch.device) -> Callable[..., Tensor]:
    """Makes tensors on a device, which is current, of a size, strides and a dtype."""
    directly = getattr(guards, "_empty_strided_cuda", None)  # what compiled graphs of PyTorch allocate by
    if directly is not None and device.type == "cuda":
        return directly
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


class Plan:
    """What a call launched, for others like it.

    Args:
        inputs: the call's tensors.
        results: what it returned.
        launches: what it launched.

    Attributes:
        device: the index of the CUDA device that it is for, None if it is not for one.
        again: the latest call that was made by it.
    """

    def __init__(
        self, inputs: Sequence[Tensor], results: Sequence[Tensor], launches: Sequence[Launch]
    ) -> None:
        self.device = inputs[0].device.index if inputs[0].is_cuda else None
        self.again: Again | None = None
        tensors = [*inputs, *results]
        places = {id(t): place for place, t in enumerate(tensors)}
        for launch in launches:  # and what it allocated on the way
            for x in launch.arguments:
                if isinstance(x, Tensor) and id(x) not in places:
                    places[id(x)] = len(tensors)
                    tensors.append(x)
        self._made = [(tuple(t.shape), t.stride(), t.dtype) for t in tensors[len(inputs) :]]
        self._empty = _empty(inputs[0].device)
        self._results = slice(len(inputs), len(inputs) + len(results))
        self._kernels = [launch.kernel for launch in launches]
        self._launches = []
        for run, arguments, _, by_address in launches:
            holes = [(i, places[id(x)]) for i, x in enumerate(arguments) if isinstance(x, Tensor)]
            template = [None if isinstance(x, Tensor) else x for x in arguments]
            self._launches.append((run, template, holes, by_address))

    def __call__(self, inputs: tuple[Tensor, ...]) -> Any:
        """The results of a call; None if a tensor lies where the kernels of this plan cannot read it, or its
        device is not the current one, or Triton is to do more than launch."""
        stream, device = 0, self.device
        if device is not None:
            if device != current_device():
                return None
            stream = current_stream(device)
        if more_is_asked(*self._kernels):
            return None
        empty = self._empty
        tensors = [*inputs, *[empty(size, stride, dtype) for size, stride, dtype in self._made]]
        addresses = [*map(Tensor.data_ptr, tensors)]
        if not aligned(addresses):
            return None
        for run, template, holes, by_address in self._launches:
            arguments = template.copy()
            values: list[Any] = addresses if by_address else tensors
            for position, place in holes:
                arguments[position] = values[place]
            run(stream, arguments)
        return tuple(tensors[self._results])


_plans: dict[tuple[Any, ...], Plan] = {}


def key_of(inputs: tuple[Tensor, ...], *options: Any) -> tuple[Any, ...]:
    """All that decides what a call launches, but for addresses."""
    return (
        *[(t.shape, t.stride(), t.dtype, t.device) for t in inputs],
        current_device(),
        knobs.runtime.override_arch,
        *options,
    )


def known(key: tuple[Any, ...]) -> Plan | None:
    """The plan of a call like this one, if there was one."""
    return _plans.get(key)


def kept(key: tuple[Any, ...], inputs: tuple[Tensor, ...], call: Callable[[], tuple[Tensor, ...]]) -> Any:
    """What a call returns; a plan is made of it if it can be repeated."""
    with recorded() as launches:
        results = call()
    if len({id(t) for t in inputs}) < len(inputs):
        return results  # one tensor in two places: the next call may have two
    again = [launch for launch in launches if launch is not None]
    if again and len(again) == len(launches):
        if len(_plans) >= MOST:
            _plans.clear()
        _plans[key] = Plan(inputs, results, again)
    return results


def launched(
    inputs: tuple[Tensor, ...], options: tuple[Any, ...], call: Callable[[], tuple[Tensor, ...]]
) -> Any:
    """What a call returns: by the plan of one like it, else by calling, and a plan is made of that."""
    key = key_of(inputs, *options)
    plan = known(key)
    found = plan(inputs) if plan is not None else None
    if plan is None or found is None:
        return kept(key, inputs, call)
    remember(options, inputs, options, plan)
    return found


# ---------------------------------------------------------------- the latest call


class Again(NamedTuple):
    """A call that was made by a plan, and may be made again.

    Attributes:
        alike: whether tensors are like those of it: in type, dtype, device, shape, strides and
            `requires_grad`, without memory to be read otherwise than it is (pending negations, sparse, meta),
            and no transformation, tracer or autocasting on that there was not.
        differentiable: whether one of them requires gradients.
        options: all that decides about it beside tensors.
        plan: what it launched.
    """

    alike: Callable[..., bool]
    differentiable: bool
    options: tuple[Any, ...]
    plan: Plan


_latest: dict[tuple[Any, ...], Again] = {}
_is_nested = operator.attrgetter("is_nested")


def _alike(inputs: tuple[Tensor, ...]) -> Callable[..., bool] | None:
    """See `Again`; None if this PyTorch has no such guards, or none for these."""
    if not hasattr(guards, "TensorGuards") or len({id(t) for t in inputs}) < len(inputs):
        return None
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, inputs)):  # of a transformation that ended
        return None
    guard = guards.TensorGuards(
        *inputs,
        dynamic_dims_sizes=[list(t.shape) for t in inputs],
        dynamic_dims_strides=[list(t.stride()) for t in inputs],
    )
    return guard.check if guard.check(*inputs) else None


def _asked(asked: tuple[Any, ...], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of what the latest call is kept. With the types: a guard must be asked about nothing but tensors."""
    return (*map(type, inputs), knobs.runtime.override_arch, *asked)


def remember(
    asked: tuple[Any, ...], inputs: tuple[Tensor, ...], options: tuple[Any, ...], plan: Plan
) -> None:
    """Keeps a call as the latest.

    Args:
        asked: how its options were given; `latest` finds it by them.
        inputs: its tensors.
        options: what the options came to.
        plan: what it was made by.
    """
    again = plan.again
    if again is None or not again.alike(*inputs):
        alike = _alike(inputs)
        if alike is None:
            return
        again = plan.again = Again(alike, any(t.requires_grad for t in inputs), options, plan)
    if len(_latest) >= MOST:
        _latest.clear()
    _latest[_asked(asked, inputs)] = again


def latest(asked: tuple[Any, ...], inputs: tuple[Any, ...]) -> Again | None:
    """The latest call with these options, if this is one like it that nobody looks on; the caller has seen
    that nobody compiles."""
    again = _latest.get(_asked(asked, inputs))
    if again is None or any(map(_is_nested, inputs)):
        return None  # a guard that looks at a nested tensor ends the process
    if not again.alike(*inputs) or torch._C._len_torch_dispatch_stack():
        return None
    return again


def forget() -> None:
    """As if there had been no calls."""
    _plans.clear()
    _latest.clear()
