"""The kernels, compiled without a GPU for an architecture of choice, and what the compiler made of them.

`kernels.launch` is run on meta tensors, with stand-ins for the kernels that keep what they would be launched
with; that is what is compiled, for each architecture with the tiles chosen for it. Triton must neither
interpret nor be told of another architecture (TRITON_INTERPRET, TRITON_OVERRIDE_ARCH).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import launch
from kernels.architecture import SHARED_MEMORY, Architecture
from kernels.tiles import Tile

ARCHITECTURES = [Architecture(f"sm{cc}", cc, SHARED_MEMORY[cc]) for cc in (80, 86, 89, 90)]
ARITHMETICS = ("float16", "bfloat16", "float32", "tf32")
PADDED_DIMS = (16, 32, 64, 128, 256)
TILED = ("forward", "dkdv", "dq")
"""The kernels whose tiles are chosen (`kernels.tiles`)."""
KERNELS = {
    "forward": "attention_forward",
    "delta": "attention_delta",
    "list": "list_tiles",
    "dkdv": "attention_backward_dkdv",
    "dq": "attention_backward_dq",
}
POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32",
            torch.int32: "*i32"}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One kernel, on one architecture, for tensors (2, 4, 512, dim) or, ragged, (1024, 4, dim).

    Attributes:
        kernel: a key of KERNELS.
        arithmetic: a dtype of torch, by name; "tf32": float32 with TF32 allowed.
        dim, dim_v: head dimensions of q and k, and of v.
        unaligned: q, k, v are strided along the head dimension: no 16-byte accesses.
        ragged: a batch of two sequences.
    """

    kernel: str
    arch: Architecture
    arithmetic: str
    dim: int
    causal: bool = True
    dim_v: int = 0
    unaligned: bool = False
    ragged: bool = False

    def __str__(self) -> str:
        shape = f"D{self.dim}" + (f"x{self.dim_v}" if self.dim_v else "")
        path = "".join(
            f"-{what}"
            for what, it_is in (
                ("full", not self.causal), ("unaligned", self.unaligned), ("ragged", self.ragged)
            )
            if it_is
        )  # fmt: skip
        return f"{self.kernel}-{self.arch.name}-{self.arithmetic}-{shape}{path}"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.arithmetic == "tf32" else getattr(torch, self.arithmetic)


@dataclass(frozen=True)
class Program:
    """What the compiler made of a case.

    Attributes:
        tile: None for the kernels of one fixed shape.
        warps, stages: with which it was compiled.
        shared: bytes of shared memory of a block.
        stack: bytes of stack of a thread: registers that are spilled.
        registers: of a thread.
        ptx: the code, before it is assembled.
    """

    tile: Tile | None
    warps: int
    stages: int
    shared: int
    stack: int
    registers: int
    ptx: str


def shipped() -> Iterator[Case]:
    """Each tile configuration, in each arithmetic; float16 also without a causal mask, and ragged."""
    for arch in ARCHITECTURES:
        for dim in PADDED_DIMS:
            yield Case("delta", arch, "float16", dim)
        for kernel in TILED:
            for arithmetic in ARITHMETICS:
                for dim in PADDED_DIMS:
                    yield Case(kernel, arch, arithmetic, dim)
                    if arithmetic == "float16":
                        yield Case(kernel, arch, arithmetic, dim, causal=False)
                        yield Case(kernel, arch, arithmetic, dim, ragged=True)
        yield Case("list", arch, "float16", 64, ragged=True)


def unusual() -> Iterator[Case]:
    """Head dimensions that are padded, or differ, and strides that forbid 16-byte accesses."""
    for arch in ARCHITECTURES:
        for kernel in TILED:
            for dim, dim_v in ((80, 0), (96, 0), (192, 0), (192, 128)):
                yield Case(kernel, arch, "float16", dim, dim_v=dim_v)
            yield Case(kernel, arch, "float16", 128, unaligned=True)


def launched(case: Case) -> tuple[Any, tuple, dict[str, Any]]:
    """The kernel of a case, and the arguments and keyword arguments that it is launched with.

    Raises:
        RuntimeError: if no tile of the kernel, or of another that is launched with it, fits the architecture.
    """
    kept: dict[str, tuple] = {}

    class StandIn:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(launch, KERNELS[name]).kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **keywords: kept.update({self.name: (self.kernel, args, keywords)})

    def tensor(dim: int) -> Tensor:
        empty = partial(torch.empty, dtype=case.dtype, device="meta")
        if case.ragged:
            return empty(1024, 4, dim)
        return empty(2, 4, dim, 512).mT if case.unaligned else empty(2, 4, 512, dim)

    q, k, v = tensor(case.dim), tensor(case.dim), tensor(case.dim_v or case.dim)
    causal, scale, tf32 = case.causal, 1.0, case.arithmetic == "tf32"
    offsets = torch.empty(3, dtype=torch.int32, device="meta")
    ragged = launch.Ragged(offsets, offsets) if case.ragged else None
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(launch, "effective_architecture", lambda device: case.arch))
        for name, attribute in KERNELS.items():
            stack.enter_context(mock.patch.object(launch, attribute, StandIn(name)))
        out, lse = launch.forward(q, k, v, causal, scale, tf32, ragged)
        launch.backward(out, lse, q, k, v, out, lse, causal, scale, tf32, True, True, ragged)
    return kept[case.kernel]


def compiled(case: Case) -> Program:
    """Compiles a case for its architecture; takes about a second, or none if Triton's cache has it.

    Raises:
        RuntimeError: if no tile fits the architecture.
        AssertionError: if an argument would be specialised, so that there were more kernels than this one.
    """
    kernel, args, keywords = launched(case)
    constants = {name: keywords[name] for name in kernel.arg_names if name in keywords}
    options = {name: value for name, value in keywords.items() if name not in constants}
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    attributes = {}
    for i, (parameter, value) in enumerate(zip(kernel.params, args, strict=False)):
        if isinstance(value, Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            attributes[i,] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            assert parameter.do_not_specialize, f"{parameter.name}: compiled anew for 1 and for 16"
            signature[parameter.name] = "i32"
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", case.arch.capability, 32)
    binary = triton.compile(source, target=target, options=options)
    warps, stages = binary.metadata.num_warps, binary.metadata.num_stages
    tile = None
    if "BN" in constants:
        tile = Tile(constants["BM"], constants["BN"], warps, stages, constants["WIDTH"])
    registers, stack = _usage(binary.asm["cubin"])
    return Program(tile, warps, stages, binary.metadata.shared, stack, registers, binary.asm["ptx"])


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert used, usage
    registers, stack = map(int, used.groups())
    return registers, stack
