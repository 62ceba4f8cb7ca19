"""Which architecture the kernels are compiled for, and what it can hold.

Everything that chooses tiles or paths asks here. The architecture is not always that of the device:
`TRITON_OVERRIDE_ARCH=sm80` makes Triton generate Ampere code on a newer GPU, and under
`TRITON_INTERPRET=1` there is no device at all. Triton's own `get_current_target()` and the device's
properties know neither.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import torch
import triton

KIB = 1024

SHARED_MEMORY = {80: 163 * KIB, 86: 99 * KIB, 87: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB,
                 100: 227 * KIB, 103: 227 * KIB, 120: 99 * KIB, 121: 99 * KIB}  # fmt: skip
"""Most shared memory of one block, in bytes, by compute capability (CUDA C++ Programming Guide,
table of technical specifications per compute capability)."""

OLDEST = 80
"""Older GPUs lack what the kernels are made of: bf16 products and asynchronous copies."""


@dataclass(frozen=True)
class Architecture:
    """What code is generated for.

    Attributes:
        name: "sm80", "sm90", ..., or "interpreter".
        capability: compute capability, major * 10 + minor; 0 for the interpreter.
        shared_memory: most shared memory of one block, in bytes.
        overridden: whether TRITON_OVERRIDE_ARCH chose it.
    """

    name: str
    capability: int
    shared_memory: int
    overridden: bool = False

    @property
    def interpreted(self) -> bool:
        return self.capability == 0


INTERPRETER = Architecture("interpreter", 0, 227 * KIB)


def effective_architecture(device: torch.device | str | int | None = None) -> Architecture:
    """The architecture that kernels launched on `device` are compiled for.

    Args:
        device: a CUDA device; the current one if None. Ignored under TRITON_INTERPRET=1.

    Raises:
        RuntimeError: if the device is not a CUDA device of compute capability 8.0 or newer (and
            Triton does not interpret), or TRITON_OVERRIDE_ARCH names no such architecture.
    """
    if triton.knobs.runtime.interpret:
        return INTERPRETER
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        raise RuntimeError(
            f"device is {device}; the kernels run on CUDA devices, or on the CPU if TRITON_INTERPRET=1"
            " is set before triton is imported"
        )
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"device is {device}, but torch.cuda finds no usable GPU; the kernels run on CUDA devices,"
            " or on the CPU if TRITON_INTERPRET=1 is set before triton is imported"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    return _of_device(index, triton.knobs.runtime.override_arch)


@functools.cache
def _of_device(index: int, override: str | None) -> Architecture:
    major, minor = torch.cuda.get_device_capability(index)
    capability, found = 10 * major + minor, torch.cuda.get_device_name(index)
    if capability < OLDEST:
        raise RuntimeError(
            f"device cuda:{index} is a {found} of compute capability {major}.{minor};"
            " the kernels need 8.0 (Ampere) or newer"
        )
    if override:
        match = re.fullmatch(r"sm(\d+)", override)  # the form that Triton reads
        if match is None or not OLDEST <= int(match[1]) <= capability:
            raise RuntimeError(
                f"TRITON_OVERRIDE_ARCH is {override!r}; it may be sm80 or newer, up to the device's"
                f" own sm{capability}"
            )
        # sm80 code on an sm86 still has no more than the chip's 99 KiB
        shared_memory = min(_shared_memory(index, capability), _shared_memory(index, int(match[1])))
        return Architecture(f"sm{match[1]}", int(match[1]), shared_memory, overridden=True)
    return Architecture(f"sm{capability}", capability, _shared_memory(index, capability))


def _shared_memory(index: int, capability: int) -> int:
    if capability in SHARED_MEMORY:
        return SHARED_MEMORY[capability]
    # a chip newer than this table: what it says of itself
    return int(torch.cuda.get_device_properties(index).shared_memory_per_block_optin)  # type: ignore[attr-defined]
