"""Calls made again: what the host works out for a call is kept, and the next one like it only launches.

The first call on tensors of some shapes, strides, dtypes and devices is checked, finds tiles, strides and
grids, and has kernels compiled. What it launched then is a plan: kernels, grids, and arguments in which
tensors are places. A call like it puts its own tensors there. That takes a third of the time of the whole,
which is longer than a short kernel runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

ALIGNED = 16
"""Bytes: kernels of a plan are compiled for addresses that are multiples of this."""

MOST = 4096
"""Plans that are kept: of the lengths of all batches of a training run there may be more."""


def more_is_asked(*kernels: Any) -> bool:
    """Whether Triton is told to compile for debugging, instrumented, or through somebody's hook, or to call
    one before it launches one of these: then launching is left to it."""
    runtime = knobs.runtime
    hook = getattr(runtime, "add_stages_inspection_hook", None)
    if runtime.debug or knobs.compilation.instrumentation_mode or hook:
        return True
    return any(kernel.pre_run_hooks for kernel in kernels)


class Launch(NamedTuple):
    """One kernel of triton.jit, launched: `run(*arguments)`."""

    run: Callable[..., None]
    arguments: tuple[Any, ...]
    kernel: Any


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


def _aligned(tensors: Sequence[Tensor | None]) -> bool:
    return all(t is None or t.data_ptr() % ALIGNED == 0 for t in tensors)


class Plan:
    """What a call launched, for others like it.

    Args:
        inputs: the call's tensors.
        results: what it returned.
        launches: what it launched.
    """

    def __init__(
        self, inputs: Sequence[Tensor | None], results: Sequence[Tensor], launches: Sequence[Launch]
    ) -> None:
        tensors: list[Tensor | None] = [*inputs, *results]
        places = {id(t): place for place, t in enumerate(tensors) if t is not None}
        for launch in launches:  # and what it allocated on the way
            for x in launch.arguments:
                if isinstance(x, Tensor) and id(x) not in places:
                    places[id(x)] = len(tensors)
                    tensors.append(x)
        made = tensors[len(inputs) :]
        self._made = [(t.shape, t.dtype) for t in made if t is not None]
        self._results = len(results)
        self._kernels = [launch.kernel for launch in launches]
        self._launches = []
        for run, arguments, _ in launches:
            holes = [(i, places[id(x)]) for i, x in enumerate(arguments) if isinstance(x, Tensor)]
            template = [None if isinstance(x, Tensor) else x for x in arguments]
            self._launches.append((run, template, holes))

    def __call__(self, inputs: tuple[Tensor | None, ...]) -> Any:
        """The results of a call; None if a tensor lies where the kernels of this plan cannot read it, or its
        device is not the current one, or Triton is to do more than launch."""
        like = inputs[0]
        assert like is not None
        if like.is_cuda and like.device.index != torch.cuda.current_device():
            return None
        if not _aligned(inputs) or more_is_asked(*self._kernels):
            return None
        made = [like.new_empty(shape, dtype=dtype) for shape, dtype in self._made]
        if not _aligned(made):
            return None
        tensors = [*inputs, *made]
        for run, template, holes in self._launches:
            arguments = template.copy()
            for position, place in holes:
                arguments[position] = tensors[place]
            run(*arguments)
        return tuple(tensors[len(inputs) : len(inputs) + self._results])


_plans: dict[tuple[Any, ...], Plan] = {}


def key_of(inputs: tuple[Tensor | None, ...], *options: Any) -> tuple[Any, ...]:
    """All that decides what a call launches, but for addresses."""
    return (
        *[None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in inputs],
        torch.cuda.current_device(),
        knobs.runtime.override_arch,
        *options,
    )


def known(key: tuple[Any, ...]) -> Plan | None:
    """The plan of a call like this one, if there was one."""
    return _plans.get(key)


def kept(
    key: tuple[Any, ...], inputs: tuple[Tensor | None, ...], call: Callable[[], tuple[Tensor, ...]]
) -> Any:
    """What a call returns; a plan is made of it if it can be repeated."""
    with recorded() as launches:
        results = call()
    if len({id(t) for t in inputs if t is not None}) < sum(t is not None for t in inputs):
        return results  # one tensor in two places: the next call may have two
    again = [launch for launch in launches if launch is not None]
    if again and len(again) == len(launches):
        if len(_plans) >= MOST:
            _plans.clear()
        _plans[key] = Plan(inputs, results, again)
    return results


def launched(
    inputs: tuple[Tensor | None, ...], options: tuple[Any, ...], call: Callable[[], tuple[Tensor, ...]]
) -> Any:
    """What a call returns: by the plan of one like it, else by calling, and a plan is made of that."""
    key = key_of(inputs, *options)
    plan = known(key)
    found = plan(inputs) if plan is not None else None
    return kept(key, inputs, call) if found is None else found
