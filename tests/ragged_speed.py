"""Ragged batches against dense ones at equal work, on a GPU.

    python -m tests.ragged_speed

16,384 tokens, causal, float16: 8 sequences of 2,048 in a dense batch, against 64 sequences whose lengths are
drawn from heavy-tailed distributions, of the draws those whose work (visible pairs) is within a tenth of the
dense batch's. All are timed in turns in one process, on a cold L2, behind a pause that hides the host; the
figure is the ratio of the rates, in pairs per second: 1 is as fast as dense. Results are checked afterwards.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import effective_architecture, flash_attention, flash_attention_varlen

from .calls import Lengths, Offsets

TOKENS, SEQUENCES, DENSE = 16_384, 64, 2_048
DRAWS = {
    "lognormal, sigma 1.5": lambda generator: generator.lognormal(0, 1.5, SEQUENCES),
    "Pareto, alpha 1.1": lambda generator: generator.pareto(1.1, SEQUENCES) + 0.05,
}
ROUNDS = 15
L2_BYTES = 2**28
"""Written between two calls: more than any L2 holds."""

PAUSE = 3_000_000
"""Clock cycles of the device: longer than the host takes to launch a call."""


def pairs(lengths: Lengths) -> int:
    """Visible pairs of query and key, causal, as many queries as keys."""
    return sum(n * (n + 1) // 2 for n, _ in lengths)


def draws(kind: str) -> Iterator[Lengths]:
    """Lengths of about the work of the dense batch."""
    work = pairs([(DENSE, DENSE)] * (TOKENS // DENSE))
    for seed in range(10_000):
        x = DRAWS[kind](np.random.default_rng(seed))
        n = np.maximum(1, np.floor(x / x.sum() * TOKENS)).astype(int)
        n[n.argmax()] += TOKENS - n.sum()
        lengths = [(int(length), int(length)) for length in n]
        if 0.9 < pairs(lengths) / work < 1.1:
            yield lengths


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float16, device="cuda").requires_grad_()


def calls(heads: tuple[int, int], dim: int, lengths: Lengths | None) -> dict[str, Callable[[], Any]]:
    """Forward and backward, of random values; dense without lengths."""
    Hq, Hkv = heads
    if lengths is None:
        B = TOKENS // DENSE
        leaves = [random(B, h, DENSE, dim) for h in (Hq, Hkv, Hkv)]
        where: tuple[Any, ...] = ()
        attention: Callable[..., Any] = flash_attention
    else:
        leaves = [random(TOKENS, h, dim) for h in (Hq, Hkv, Hkv)]
        where = tuple(vars(Offsets.of(lengths, leaves[0].device)).values())
        attention = flash_attention_varlen
    out = attention(*leaves, *where, causal=True)
    d_out = torch.randn_like(out)

    def forward() -> Any:
        with torch.no_grad():
            return attention(*leaves, *where, causal=True)

    def backward() -> Any:
        return torch.autograd.grad(out, leaves, d_out, retain_graph=True)

    assert torch.equal(forward(), out)
    return {"forward": forward, "backward": backward}


def milliseconds(functions: dict[Any, Callable[[], Any]]) -> dict[Any, float]:
    """Median time of each."""
    cold = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")
    expected = {name: function() for name, function in functions.items()}
    times: dict[Any, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cold.zero_()
            torch.cuda._sleep(PAUSE)
            start.record()
            found = function()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end))
            torch.testing.assert_close(found, expected[name], rtol=0, atol=0)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> int:
    if not torch.cuda.is_available():
        print("needs a GPU", file=sys.stderr)
        return 3
    torch.manual_seed(0)
    arch = effective_architecture()
    print(f"{torch.cuda.get_device_name()}, code for {arch.name}, torch {torch.__version__}")
    batches: dict[str, Lengths | None] = {"dense 8 x 2048": None, "ragged 8 x 2048": [(DENSE, DENSE)] * 8}
    for kind in DRAWS:
        batches |= {f"{kind}, draw {i}": lengths for i, lengths in enumerate(islice(draws(kind), 3))}
    dense_work = pairs([(DENSE, DENSE)] * 8)
    for dim, heads in ((128, (16, 16)), (128, (16, 2)), (64, (16, 16))):
        functions: dict[Any, Callable[[], Any]] = {}
        for name, lengths in batches.items():
            functions |= {(name, which): call for which, call in calls(heads, dim, lengths).items()}
        times = milliseconds(functions)
        print(f"\nD {dim}, {heads[0]} query heads on {heads[1]} KV heads: ms, and rate over that of dense")
        for name, lengths in batches.items():
            work = dense_work if lengths is None else pairs(lengths)
            longest = DENSE if lengths is None else max(n for n, _ in lengths)
            line = f"  {name:26} longest {longest:5}  work {work / dense_work:.2f}"
            for which in ("forward", "backward"):
                ratio = times["dense 8 x 2048", which] / dense_work / (times[name, which] / work)
                line += f"  {which} {times[name, which]:6.3f} {ratio:.3f}"
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
