"""Ragged batches against dense ones at equal work, on a GPU.

    python -m tests.speed.ragged

16,384 tokens, causal, float16: 8 sequences of 2,048 in a dense batch, against 64 sequences whose lengths are
drawn from heavy-tailed distributions (`problems.draws`: the work, in visible pairs, is within a tenth of the
dense batch's). All are timed in turns in one process, on a cold L2, the host hidden; the figure is the ratio
of the rates, in pairs per second: 1 is as fast as dense. A result that changes from call to call ends it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from kernels import flash_attention, flash_attention_varlen
from reports.roofline import visible_pairs

from ..calls import Offsets
from ..implementations import OWN
from .contenders import contender
from .machine import described, why_not_here
from .problems import BACKWARD, DENSE, FORWARD, LENGTHS, TOKENS, draws
from .timer import Timer

ROUNDS = 15
DRAWN = 3
"""Draws of each distribution."""

EQUAL = (DENSE,) * (TOKENS // DENSE)


def pairs(lengths: tuple[int, ...]) -> int:
    """Visible pairs of query and key, causal, as many queries as keys."""
    return sum(visible_pairs(n, n, True) for n in lengths)


def calls(heads: tuple[int, int], dim: int, lengths: tuple[int, ...] | None) -> dict[str, Callable[[], Any]]:
    """Forward and backward, of random values; dense without lengths."""
    Hq, Hkv = heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float16, device="cuda").requires_grad_()

    where: tuple[Any, ...] = ()
    attention: Callable[..., Any] = flash_attention
    if lengths is None:
        leaves = [normal(len(EQUAL), h, DENSE, dim) for h in (Hq, Hkv, Hkv)]
    else:
        leaves = [normal(TOKENS, h, dim) for h in (Hq, Hkv, Hkv)]
        where = tuple(vars(Offsets.of([(n, n) for n in lengths], leaves[0].device)).values())
        attention = flash_attention_varlen
    out = attention(*leaves, *where, causal=True)
    d_out = torch.randn_like(out)

    def forward() -> Any:
        with torch.no_grad():
            return (attention(*leaves, *where, causal=True),)

    def backward() -> Any:
        return torch.autograd.grad(out, leaves, d_out, retain_graph=True)

    return {FORWARD: forward, BACKWARD: backward}


def medians(functions: dict[Any, Callable[[], tuple[Tensor, ...]]], timer: Timer) -> dict[Any, float]:
    """Seconds of each, in turns.

    Raises:
        RuntimeError: if one of them gives other bits the second time.
    """
    expected = {name: function() for name, function in functions.items()}
    times: dict[Any, list[float]] = {name: [] for name in functions}
    order = list(functions)
    for number in range(ROUNDS):
        random.Random(number).shuffle(order)
        for name in order:
            times[name].append(timer.device(functions[name]))
    for name, function in functions.items():
        if not all(map(torch.equal, function(), expected[name])):
            raise RuntimeError(f"{name} gives other bits than at first")
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> int:
    argparse.ArgumentParser(prog="python -m tests.speed.ragged", description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()  # fmt: skip
    if why := why_not_here():
        print(f"ragged: {why}", file=sys.stderr)
        return 3
    torch.manual_seed(0)
    machine = described(OWN, contender(OWN).path, [])
    print(f"{machine.device}, {machine.path}, torch {machine.torch}, Triton {machine.triton}")
    timer = Timer()
    batches: dict[str, tuple[int, ...] | None] = {"dense 8 x 2048": None, "ragged 8 x 2048": EQUAL}
    for kind in LENGTHS:
        batches |= {f"{kind}, draw {i}": lengths for i, lengths in enumerate(islice(draws(kind), DRAWN))}
    for dim, heads in ((128, (16, 16)), (128, (16, 2)), (64, (16, 16))):
        functions: dict[Any, Callable[[], Any]] = {}
        for name, lengths in batches.items():
            functions |= {(name, step): call for step, call in calls(heads, dim, lengths).items()}
        found = medians(functions, timer)
        print(f"\nD {dim}, {heads[0]} query heads on {heads[1]} KV heads: ms, and rate over that of dense")
        for name, lengths in batches.items():
            work, longest = pairs(lengths or EQUAL), max(lengths or EQUAL)
            line = f"  {name:20} longest {longest:5}  work {work / pairs(EQUAL):.2f}"
            for step in (FORWARD, BACKWARD):
                ratio = found["dense 8 x 2048", step] / pairs(EQUAL) / (found[name, step] / work)
                line += f"  {step} {1e3 * found[name, step]:6.3f} {ratio:.3f}"
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
