"""Ragged and edge cases for NVIDIA's compute-sanitizer, which sees what no number shows.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    for tool in "memcheck --padding 65536" initcheck racecheck; do
        compute-sanitizer --tool $tool --error-exitcode 9 python -m tests.sanitized
    done

Padding: else what lies beyond an allocation may belong to the next one, where memcheck lets it be read.
Nothing is poisoned or fenced: to initcheck that would be a first writing. Every tensor ends where a block
of 512 bytes ends, PyTorch's unit of allocation, so that one byte further is outside of the allocation.
`--overrun` reads a row too many, to show that the checker sees it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl

from .calls import Lengths, Offsets, attend, inputs_of, ragged_inputs_of
from .values import Inputs

RAGGED: Lengths = [(33, 65), (0, 7), (70, 3), (0, 0), (5, 0), (20, 53)]
"""128 queries and 128 keys: any head dimension then fills whole blocks."""

BROKEN = ([0, 200, 3, 128, 2**31 - 1, -5, 128], [0, 128, 2**31 - 1, -(2**31), 64, 64, 128])
"""Offsets that point outside, and back."""


def problems(device: torch.device) -> Iterator[tuple[str, Inputs, Offsets | None, bool]]:
    """Name, tensors, offsets, causal."""
    for dtype in ("float16", "bfloat16", "float32"):
        for dim in (32, 72, 128):
            if (dtype, dim) != ("bfloat16", 32):
                x = inputs_of(device, dtype=dtype, dim=dim, len_q=128, len_k=64)
                yield f"dense {dtype} D{dim}, dead rows", x, None, True
        x = ragged_inputs_of(device, RAGGED, dtype=dtype, dim=64)
        yield f"ragged {dtype}", x, Offsets.of(RAGGED, device), dtype == "float16"
    x = inputs_of(device, dim=40, len_q=64, len_k=192, heads_q=4, heads_kv=2)
    yield "dense, last dimension strided", replace(x, v=x.v.mT.contiguous().mT), None, False
    x = ragged_inputs_of(device, [(1, 1)] * 64, dim=64)
    yield "ragged, single rows", x, Offsets.of([(1, 1)] * 64, device), True
    x = ragged_inputs_of(device, [], past=(128, 128), dim=64)
    yield "ragged, no sequence", x, Offsets.of([], device), False
    x = ragged_inputs_of(device, RAGGED, dim=64)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in BROKEN)
    yield "ragged, offsets that point outside", x, Offsets(cu_q, cu_k, 1, 1), True


@triton.jit
def attention_overrun(X, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(X + i, tl.load(X + n + i))


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        print("needs a GPU", file=sys.stderr)
        return 3
    device = torch.device("cuda", torch.cuda.current_device())
    if arguments == ["--overrun"]:
        x = torch.zeros(1024, device=device)
        attention_overrun[1,](x, 1024, BLOCK=128)
        torch.cuda.synchronize()
        return 0
    for name, inputs, offsets, causal in problems(device):
        attend(inputs, offsets, causal=causal)
        torch.cuda.synchronize()
        print(name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
