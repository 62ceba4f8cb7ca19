"""Launches a kernel again without working out again what Triton compiled for.

Triton looks at every argument of every launch, to find out what to specialise the code for; with the forty
arguments of these kernels that takes longer than a short kernel runs. What it would find is known here:
integers are never specialised, floats are float32, and pointers are aligned to 16 bytes. Where that does not
hold, or Triton would do something besides launching, the launch is Triton's.

What launches in the end is a function in C, which differs from one version of Triton to another. How it is
called is not known here, but seen: Triton's launcher is called once with a function in its place. In that
call grid and stream are replaced, and tensors by their addresses: else C asks each tensor, and the driver.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from .plans import ALIGNED, Launch, current_device, current_stream, more_is_asked, record

INT32 = range(-(2**31), 2**31)

MORE_THAN_A_LAUNCH = (
    "global_scratch_size",
    "profile_scratch_size",
    "launch_cooperative_grid",
    "launch_pdl",
)
"""What a kernel may need of Triton's launcher beside; none of these kernels does."""


def direct(compiled: Any, arguments: Sequence[Any]) -> Callable[..., None] | None:
    """`launch(*grid, stream, arguments)`: how Triton's launcher calls its function in C.

    Args:
        compiled: a kernel that was launched.
        arguments: of that, constants among them; only how many there are matters.

    Returns:
        None if the launcher does more than to call that function, or does not call it with the grid, the
        stream, things that are the same in every launch, and the arguments, one by one or in a tuple.
    """
    launcher = compiled.run
    if any(getattr(launcher, name, True) for name in MORE_THAN_A_LAUNCH):
        return None
    calls: list[tuple[Any, ...]] = []
    seen = copy.copy(launcher)
    seen.launch = lambda *call: calls.append(call)
    grid_and_stream = [object() for _ in range(4)]
    places = tuple(object() for _ in arguments)
    try:
        seen(*grid_and_stream, compiled.function, compiled.packed_metadata, None, None, None, *places)
    except Exception:  # whatever a launcher of another form says to these objects
        return None
    if len(calls) != 1 or list(calls[0][:4]) != grid_and_stream:
        return None
    function, call = launcher.launch, calls[0]
    if call[-1] == places:
        same = call[4:-1]
        return lambda x, y, z, stream, arguments: function(x, y, z, stream, *same, arguments)
    if call[-len(places) :] == places:
        same = call[4 : -len(places)]
        return lambda x, y, z, stream, arguments: function(x, y, z, stream, *same, *arguments)
    return None


class Launcher:
    """A kernel, launched as Triton's are: `launcher[grid](*arguments, **constants_and_options)`.

    Args:
        kernel: of triton.jit, all of whose integers are in `do_not_specialize`; or of Triton's interpreter.

    Attributes:
        kernel: the same.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...], Any]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if isinstance(self.kernel, JITFunction):
            return functools.partial(self._launch, grid)
        return self.kernel[grid]

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **keywords: Any) -> None:
        dtypes = []
        by_address: list[Any] = []
        for x in arguments:
            if isinstance(x, Tensor):
                address = x.data_ptr()
                if address % ALIGNED:
                    break
                dtypes.append(x.dtype)
                by_address.append(address)
            elif isinstance(x, int) and x not in INT32:
                break
            else:
                by_address.append(x)
        else:
            # the device of the tensors is current; each has a kernel of its own
            device = current_device()
            key = (device, *dtypes, *keywords.items())
            found = self._compiled.get(key)
            more = more_is_asked(self.kernel)
            if found is not None and not more:
                compiled, constants, directly = found
                grid = (*grid, 1, 1)[:3]
                if directly is not None:
                    run = functools.partial(directly, *grid)
                    run(current_stream(device), (*by_address, *constants))
                else:
                    run = functools.partial(_by_runner, compiled[grid])
                    run(0, (*arguments, *constants))
                record(Launch(run, (*arguments, *constants), self.kernel, directly is not None))
                return
            compiled = self.kernel[grid](*arguments, **keywords)
            if isinstance(compiled, CompiledKernel) and not more:  # else it is not what others want
                constants = tuple(keywords[name] for name in self.kernel.arg_names[len(arguments) :])
                self._compiled[key] = compiled, constants, direct(compiled, (*arguments, *constants))
            record(None)
            return
        self.kernel[grid](*arguments, **keywords)
        record(None)


def _by_runner(runner: Callable[..., None], stream: int, arguments: Sequence[Any]) -> None:
    """Launches as Triton does, which finds the stream by itself."""
    runner(*arguments)
