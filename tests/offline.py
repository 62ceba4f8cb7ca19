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
from kernels.tiles import TABLES, Tile, choose_tiles, table_of

ARCHITECTURES = [Architecture(f"sm{cc}", cc, SHARED_MEMORY[cc]) for cc in (80, 86, 89, 90)]
TILED = ("forward", "dkdv", "dq")
"""The kernels whose tiles are chosen (`kernels.tiles`)."""
DIMS = tuple(sorted({dim for table in TABLES.values() for by_dim in table.values() for dim in by_dim}))
"""Head dimensions that a table of tiles has an entry for."""
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
        stack: bytes of stack of a thread: registers that are spilled, wherever they are.
        spilled_in_loops: instructions in loops over tiles that load or store spilled registers.
        spilled_in_a_loop: those of the loop that has most.
        registers: of a thread.
        ptx: the kernel's code before it is assembled, without that of functions that it calls.
    """

    tile: Tile | None
    warps: int
    stages: int
    shared: int
    stack: int
    spilled_in_loops: int
    spilled_in_a_loop: int
    registers: int
    ptx: str


def itemsize_of(arithmetic: str) -> int:
    """Bytes of an element."""
    return 2 if "16" in arithmetic else 4


def entry_dim(arch: Architecture, kernel: str, arithmetic: str, dim: int) -> int:
    """The largest head dimension that the table's entry for this one is for."""
    table = table_of(arch, itemsize_of(arithmetic))
    return min(largest for largest in table[kernel] if largest >= dim)


def chosen_dims(arch: Architecture, kernel: str, arithmetic: str) -> list[int]:
    """Of each tile that is chosen, the largest head dimension that it is chosen for, by entry of the table.

    Mostly that of the entry; where shared memory is so short that the entry's best tile fits smaller head
    dimensions only, the largest of those too.
    """
    itemsize = itemsize_of(arithmetic)
    largest: dict[tuple[int, Tile], int] = {}
    for dim in range(min(DIMS), max(DIMS) + 1):
        tile = getattr(choose_tiles(arch, dim, dim, itemsize), kernel)
        largest[entry_dim(arch, kernel, arithmetic, dim), tile] = dim
    return sorted(largest.values())


# What is not causal, or ragged, or bfloat16 instead of float16 has the same tiles and nearly the same loops:
# some head dimensions stand for all, of one slice and of several. The kernels without tiles of their own have
# one shape: the smallest and the largest do.
SOME_DIMS = (64, 128, 256)


def shipped() -> Iterator[Case]:
    """Each tile that is chosen, in each arithmetic; some also in bfloat16, without a mask, and ragged."""
    for arch in ARCHITECTURES:
        for dim in (min(DIMS), max(DIMS)):
            yield Case("delta", arch, "float16", dim)
        for kernel in TILED:
            for arithmetic in ("float16", "float32", "tf32"):
                for dim in chosen_dims(arch, kernel, arithmetic):
                    yield Case(kernel, arch, arithmetic, dim)
            for dim in SOME_DIMS:
                yield Case(kernel, arch, "bfloat16", dim)
                yield Case(kernel, arch, "float16", dim, causal=False)
                yield Case(kernel, arch, "float16", dim, ragged=True)
        yield Case("list", arch, "float16", 64, ragged=True)


def unusual() -> Iterator[Case]:
    """Head dimensions between those of the tables, whose last slice is narrower, or that differ, and strides
    without 16-byte accesses."""
    known = set(shipped())
    for arch in ARCHITECTURES:
        for kernel in TILED:
            for dim, dim_v in ((72, 0), (160, 0), (224, 0), (192, 128)):
                case = Case(kernel, arch, "float16", dim, dim_v=dim_v)
                if case not in known:
                    yield case
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
    by_loop = [0]
    if stack:  # else nothing is spilled, and to disassemble takes half as long as to compile
        loops = tile_loops(_dumped(binary.asm["cubin"], "--dump-sass"))
        assert loops or case.kernel not in TILED, "no loop over tiles is found in what is assembled"
        by_loop += spilled_in(loops)
    return Program(
        tile, warps, stages, binary.metadata.shared, stack, sum(by_loop), max(by_loop), registers,
        own_code(binary.asm["ptx"]),
    )  # fmt: skip


def own_code(ptx: str) -> str:
    """Of a module the kernel: functions that it calls are declared before it, and stand behind it."""
    return re.split(r"^\.func", ptx[ptx.index(".entry ") :], maxsplit=1, flags=re.MULTILINE)[0]


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    usage = _dumped(cubin, "--dump-resource-usage")
    used = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert used, usage
    registers, stack = map(int, used.groups())
    return registers, stack


def _dumped(cubin: bytes, what: str) -> str:
    """What cuobjdump prints."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, what, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# ---------------------------------------------------------------- loops of what is assembled

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)([^;]*);", re.MULTILINE)
_PRODUCTS = {"HMMA", "HGMMA", "FFMA"}
_LOCAL = {"LDL", "STL"}
"""Loads and stores of a thread's stack."""


def tile_loops(sass: str) -> list[list[str]]:
    """Of each innermost loop that multiplies, its instructions, by name.

    A loop is what lies between a branch backwards and where it goes. One that multiplies nothing, such as the
    branch to itself behind a kernel's end, is none over tiles, and what is around it may be innermost. What
    is called lies behind the kernel, and its loops are not the kernel's: it is there for what is rare.

    Args:
        sass: as cuobjdump prints it: `/*0a40*/  @P1 BRA 0x790 ;`.
    """
    names: dict[int, str] = {}
    ends: dict[int, int] = {}
    called: list[int] = []
    for instruction in _INSTRUCTION.finditer(sass):
        address, name = int(instruction[1], 16), instruction[2]
        names[address] = name
        if name in ("BRA", "CALL"):
            target = re.search(r"\b0x([0-9a-f]+)\s*$", instruction[3])
            assert target, f"where does it go? {instruction[0]}"
            if name == "CALL":
                called.append(int(target[1], 16))
            elif int(target[1], 16) <= address:
                ends[int(target[1], 16)] = address
    ends = {begin: end for begin, end in ends.items() if end < min(called, default=end + 1)}
    bodies = {
        (begin, end): [name for address, name in names.items() if begin <= address <= end]
        for begin, end in ends.items()
    }
    loops = {of: body for of, body in bodies.items() if not _PRODUCTS.isdisjoint(body)}
    return [
        body
        for (begin, end), body in loops.items()
        if not any(begin <= b and e <= end for b, e in loops if (b, e) != (begin, end))
    ]


def spilled_in(loops: list[list[str]]) -> list[int]:
    """How many instructions of each load or store spilled registers."""
    return [sum(name in _LOCAL for name in body) for body in loops]
