"""Launches a kernel again without working out again what Triton compiled for.

Triton looks at every argument of every launch, to find out what to specialise the code for; with the forty
arguments of these kernels that takes longer than a short kernel runs. What it would find is known here:
integers are never specialised, floats are float32, and pointers are aligned to 16 bytes. Where that does not
hold, or Triton would do something besides launching, the launch is Triton's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from .plans import ALIGNED, Launch, more_is_asked, record

INT32 = range(-(2**31), 2**31)


class Launcher:
    """A kernel, launched as Triton's are: `launcher[grid](*arguments, **constants_and_options)`.

    Args:
        kernel: of triton.jit, all of whose integers are in `do_not_specialize`; or of Triton's interpreter.

    Attributes:
        kernel: the same.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if isinstance(self.kernel, JITFunction):
            return functools.partial(self._launch, grid)
        return self.kernel[grid]

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **keywords: Any) -> None:
        dtypes = []
        for x in arguments:
            if isinstance(x, Tensor):
                if x.data_ptr() % ALIGNED:
                    break
                dtypes.append(x.dtype)
            elif isinstance(x, int) and x not in INT32:
                break
        else:
            # the device of the tensors is current; each has a kernel of its own
            key = (torch.cuda.current_device(), *dtypes, *keywords.items())
            found = self._compiled.get(key)
            more = more_is_asked(self.kernel)
            if found is not None and not more:
                compiled, constants = found
                launch = Launch(compiled[(*grid, 1, 1)[:3]], (*arguments, *constants), self.kernel)
                launch.run(*launch.arguments)
                record(launch)
                return
            compiled = self.kernel[grid](*arguments, **keywords)
            if isinstance(compiled, CompiledKernel) and not more:  # else it is not what others want
                rest = self.kernel.arg_names[len(arguments) :]
                self._compiled[key] = compiled, tuple(keywords[name] for name in rest)
            record(None)
            return
        self.kernel[grid](*arguments, **keywords)
        record(None)
