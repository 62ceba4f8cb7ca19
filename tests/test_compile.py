"""Compiles the kernels for Ampere and newer without a GPU, and looks at what comes out.

`kernels.launch` is run on meta tensors, with stand-ins for the kernels that keep what they would be
launched with; that is what is compiled, for each architecture with the tiles chosen for it. Every
case checks that the program can be launched there at all (shared memory, registers), that nothing
spills, and that the instructions are those that the tiles were chosen for.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import launch
from kernels.architecture import SHARED_MEMORY, Architecture
from kernels.tiles import Tile, padded_head_dim, shared_memory

if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET=1: there is nothing to compile", allow_module_level=True)
if triton.knobs.runtime.override_arch:
    pytest.skip("TRITON_OVERRIDE_ARCH replaces what is compiled for", allow_module_level=True)

ARCHITECTURES = [Architecture(f"sm{cc}", cc, SHARED_MEMORY[cc]) for cc in (80, 86, 89, 90)]
REGISTERS = 65536
"""32-bit registers that the threads of a block share, on every architecture."""
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
    """What the compiler made of a case; tile is None for the delta kernel.

    Attributes:
        shared: bytes of shared memory of a block.
        stack: bytes of stack of a thread: registers that are spilled.
        registers: of a thread.
    """

    tile: Tile | None
    warps: int
    shared: int
    stack: int
    registers: int
    ptx: str


def launched(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, tuple, dict[str, Any]]:
    """The kernel of a case, and the arguments and keyword arguments that it is launched with."""
    kept: dict[str, tuple] = {}

    class StandIn:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(launch, KERNELS[name])

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **keywords: kept.update({self.name: (self.kernel, args, keywords)})

    def tensor(dim: int) -> Tensor:
        empty = partial(torch.empty, dtype=case.dtype, device="meta")
        if case.ragged:
            return empty(1024, 4, dim)
        return empty(2, 4, dim, 512).mT if case.unaligned else empty(2, 4, 512, dim)

    monkeypatch.setattr(launch, "effective_architecture", lambda device: case.arch)
    for name, attribute in KERNELS.items():
        monkeypatch.setattr(launch, attribute, StandIn(name))
    q, k, v = tensor(case.dim), tensor(case.dim), tensor(case.dim_v or case.dim)
    causal, scale, tf32 = case.causal, 1.0, case.arithmetic == "tf32"
    offsets = torch.empty(3, dtype=torch.int32, device="meta")
    ragged = launch.Ragged(offsets, offsets) if case.ragged else None
    out, lse = launch.forward(q, k, v, causal, scale, tf32, ragged)
    launch.backward(out, lse, q, k, v, out, lse, causal, scale, tf32, True, True, ragged)
    return kept[case.kernel]


def compiled(case: Case, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Program:
    kernel, args, keywords = launched(case, monkeypatch)
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

    cubin = folder / "kernel.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert used, usage
    warps, stages = binary.metadata.num_warps, binary.metadata.num_stages
    tile = Tile(constants["BM"], constants["BN"], warps, stages) if "BN" in constants else None
    registers, stack = map(int, used.groups())
    return Program(tile, warps, binary.metadata.shared, stack, registers, binary.asm["ptx"])


def check_that_it_fits(case: Case, program: Program) -> None:
    assert program.shared <= case.arch.shared_memory
    assert program.registers * 32 * program.warps <= REGISTERS
    if program.tile is not None:
        dim = padded_head_dim(max(case.dim, case.dim_v))
        bound = shared_memory(case.arch, case.kernel, program.tile, dim, case.dtype.itemsize)
        assert program.shared <= bound, "the bound by which tiles are chosen does not hold"


def check_instructions(case: Case, tile: Tile, ptx: str) -> None:
    # 16-byte accesses of global memory, in the loop asynchronous ones. Not for TF32, whose operands
    # Triton lays out twice, from registers.
    assert "ld.global.v4" in ptx
    assert "st.global.v4" in ptx
    if tile.stages > 1 and case.arithmetic != "tf32":
        assert re.search(r"cp\.async\.cg\.shared\.global [^;]*, 0x10,", ptx)

    # Tensor cores, except for float32, whose operands they would shorten.
    if case.arithmetic == "float32":
        assert "mma" not in ptx
    elif case.arithmetic == "tf32":
        assert ".tf32" in ptx
    else:
        rows = tile.BN if case.kernel == "dkdv" else tile.BM
        asynchronous = case.arch.capability >= 90 and rows >= 64  # wgmma takes no fewer
        assert ("wgmma.mma_async" in ptx, "mma.sync" in ptx) == (asynchronous, not asynchronous)


def shipped() -> Iterator[Case]:
    """Each tile configuration. float16 also without a causal mask; bfloat16 differs little."""
    dims = (16, 32, 64, 128, 256)
    for arch in ARCHITECTURES:
        for dim in dims:
            yield Case("delta", arch, "float16", dim)
        for kernel in ("forward", "dkdv", "dq"):
            for arithmetic in ("float16", "bfloat16", "float32", "tf32"):
                for dim in (64, 128) if arithmetic == "bfloat16" else dims:
                    yield Case(kernel, arch, arithmetic, dim)
                    if arithmetic == "float16":
                        yield Case(kernel, arch, arithmetic, dim, causal=False)
                        yield Case(kernel, arch, arithmetic, dim, ragged=True)
        yield Case("list", arch, "float16", 64, ragged=True)


def unusual() -> Iterator[Case]:
    """Head dimensions that are padded, or differ, and strides that forbid 16-byte accesses."""
    for kernel in ("forward", "dkdv", "dq"):
        for dim, dim_v in ((80, 0), (96, 0), (192, 0), (192, 128)):
            yield Case(kernel, ARCHITECTURES[0], "float16", dim, dim_v=dim_v)
        yield Case(kernel, ARCHITECTURES[0], "float16", 128, unaligned=True)


@pytest.mark.parametrize("case", list(shipped()), ids=str)
def test_shipped_tiles(case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """M8: shared memory of each architecture."""
    program = compiled(case, monkeypatch, tmp_path)
    check_that_it_fits(case, program)
    assert program.stack == 0, "registers are spilled"
    if program.tile is not None:
        check_instructions(case, program.tile, program.ptx)


@pytest.mark.parametrize("case", list(unusual()), ids=str)
def test_unusual_shapes(case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_that_it_fits(case, compiled(case, monkeypatch, tmp_path))
