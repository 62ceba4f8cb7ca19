"""A kernel with a tile of choice and the arguments of `kernels.launch`: compiled, or launched."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kernels import launch
from kernels.architecture import Architecture, effective_architecture
from kernels.tiles import Tile, Tiles

from ...offline import KERNELS, TILED

MASKS = {"causal": True, "full": False}
"""Each is compiled to a kernel of its own."""


@dataclass(frozen=True)
class Tensors:
    """Of a dense problem: q, k, v, out and gradients (B, H, T, D), lse (B, H, T) in float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    @staticmethod
    def of(batch: int, heads: int, length: int, dim: int, dtype: torch.dtype, device: str) -> Tensors:
        """Memory for all."""
        shape = (batch, heads, length, dim)
        q, k, v, d_out, out, dq, dk, dv = (torch.empty(shape, dtype=dtype, device=device) for _ in range(8))
        lse = torch.empty(shape[:-1], dtype=torch.float32, device=device)
        return Tensors(q, k, v, d_out, out, lse, dq, dk, dv)

    def draw(self) -> Tensors:
        """Fills the inputs with normal values."""
        for t in (self.q, self.k, self.v, self.d_out):
            t.normal_()
        return self

    def results(self, kernel: str) -> dict[str, Tensor]:
        """What a kernel writes, by name."""
        return {
            "forward": {"out": self.out, "lse": self.lse},
            "dkdv": {"dk": self.dk, "dv": self.dv},
            "dq": {"dq": self.dq},
        }[kernel]


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel with all that it is launched with; called, it launches and returns the compiled kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def __call__(self) -> Any:
        return self.kernel[self.grid](*self.arguments, **self.keywords)

    def compile(self) -> Any:
        """What a launch does before it launches: into Triton's cache, if it is not there."""
        return self.kernel.warmup(*self.arguments, grid=self.grid, **self.keywords)


def launches(arch: Architecture, tile: Tile, x: Tensors, causal: bool) -> dict[str, Launch]:
    """What `kernels.launch` launches with this tile, "delta" and those of `TILED`; nothing is launched.

    Args:
        arch: what is compiled for.
        tile: instead of those of `kernels.tiles`.
        x: the tensors; results go there.
        causal: the mask.
    """
    made: dict[str, Launch] = {}

    class StandIn:
        """For a kernel."""

        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(launch, KERNELS[name]).kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **keywords: made.update(
                {self.name: Launch(self.kernel, grid, args, keywords)}
            )

    stand_ins: dict[str, Any] = {KERNELS[name]: StandIn(name) for name in ("delta", *TILED)}
    stand_ins |= {
        "effective_architecture": lambda device: arch,
        "choose_tiles": lambda *of: Tiles(tile, tile, tile),
        "new_results": lambda q, v: (x.out, x.lse),
        "new_gradients": lambda q, k, v, need_dq, need_dkdv: (x.dq, x.dk, x.dv),
    }
    scale = 1 / math.sqrt(x.q.shape[-1])
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(launch, name, stand_in))
        launch.forward(x.q, x.k, x.v, causal, scale, False)
        launch.backward(x.d_out, None, x.q, x.k, x.v, x.out, x.lse, causal, scale, False, True, True)
    return made


@dataclass(frozen=True)
class Compilation:
    """A kernel to be compiled for the GPU that is there.

    Attributes:
        dtype: by name, of torch.
        mask: of `MASKS`.
    """

    kernel: str
    dim: int
    tile: Tile
    dtype: str
    mask: str


def compile_tile(task: Compilation) -> None:
    """Compiles; in a process that is there for it.

    Raises:
        Exception: of Triton, LLVM or ptxas, if the tile cannot be compiled: each has its own kinds.
    """
    torch.cuda.init()
    x = Tensors.of(1, 1, 16, task.dim, getattr(torch, task.dtype), "cuda")
    launches(effective_architecture("cuda"), task.tile, x, MASKS[task.mask])[task.kernel].compile()
