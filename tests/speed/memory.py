"""Memory that a call takes, and how it grows with T.

Bytes are those that were asked of PyTorch's allocator. What it hands out may be larger by up to a mebibyte a
tensor, as the blocks happen to lie that it has, which is more than all that a lean kernel needs.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from reports.timings import Curve

from .bench import Bench, OnProblem
from .contenders import NAIVE, OWN, AbsentError, Call
from .contest import release
from .problems import Problem

LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)

QUADRATIC = 16_384
"""The longest T of what keeps all scores: 4 GiB a copy of them here, in 16 bits."""

KEEP_SCORES = (NAIVE, "pytorch")

CHECKED = 16_384
"""The longest T whose results are held against exact ones."""

CALLS = 7

EXPONENTS = {NAIVE: 2.0, OWN: 1.0}
"""Of peak memory against T, forward as well as backward."""

TOLERANCE = 0.15


def peak(call: Call, inputs: Sequence[Tensor] = ()) -> int:
    """Bytes of device memory that a call takes at its peak, beyond what there was and what it returns.

    The largest sum of all that is allocated at once during the call, less that just before it, less the
    storages of the tensors that it returns, each counted once and whole. So

        of a forward that autograd is to differentiate, what is saved for the backward counts (lse, or P),
        but for the inputs and out;
        of a backward, made of a forward that was done before, what that one has saved does not count; delta
        and whatever else lives during the call do.

    The call is made once before: what a library sets up at its first call and keeps (cuBLAS' workspace) is
    not counted. Memory that is not asked of PyTorch's allocator is not seen.

    Args:
        call: any; it may return tensors, and tuples, lists, dicts of them.
        inputs: tensors that were there before; results that lie in their storages do not count as results.

    Raises:
        torch.OutOfMemoryError: if there is not enough.
    """
    call()
    gc.collect()  # what is freed during the call would hide as much
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    most = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    there = {t.untyped_storage().data_ptr() for t in inputs}
    storages = (t.untyped_storage() for t in _tensors(result))
    returned = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return int(most - before - sum(size for where, size in returned.items() if where not in there))


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, dict):
        yield from _tensors(list(result.values()))
    elif isinstance(result, (tuple, list)):
        for each in result:
            yield from _tensors(each)


def curve(
    bench: Bench, name: str, step: str, lengths: Sequence[int] | None = None, checked: int = CHECKED
) -> Curve:
    """Peak memory and GPU time of a contender against T: B 1, H 8, D 64, causal, float16.

    The first T for which there is not enough memory, or that the contender refuses, is the last of the curve
    and has no figures. One whose result is wrong has none either.

    Args:
        bench: has the contender.
        name: of the contender, a key of `Bench.contenders`.
        step: of `reports.timings.PASSES`.
        lengths: T, ascending; if None `LENGTHS`, of what keeps all scores up to `QUADRATIC`.
        checked: the longest T whose results are held against exact ones, after it was timed.

    Raises:
        AbsentError: if the contender is not here.
    """
    one = bench.contenders.get(name, f"{name!r} is not among the contenders")
    if isinstance(one, str):
        raise AbsentError(one)
    if lengths is None:
        lengths = [n for n in LENGTHS if n <= QUADRATIC or name not in KEEP_SCORES]
    peaks: list[int | None] = []
    seconds: list[float | None] = []
    for length in lengths:
        with bench.on(_problem(length), [name]) as those:
            taken, median, goes_on = _point(those, name, step, length <= checked)
        peaks.append(taken)
        seconds.append(median)
        if not goes_on:
            break
    tried = list(lengths)[: len(peaks)]
    of = _problem(1)
    return Curve(contender=name, step=step, heads=of.batch * of.heads_q, dim=of.dim, lengths=tried,
                 peak=peaks, seconds=seconds, exponent=exponent(tried, peaks))  # fmt: skip


def _problem(length: int) -> Problem:
    return Problem(1, 8, 8, length, 64)


def _point(those: OnProblem, name: str, step: str, check: bool) -> tuple[int | None, float | None, bool]:
    """Peak, seconds, and whether a longer one is worth trying."""
    made = those.calls[name]
    if isinstance(made, str):
        return None, None, False
    turns = those.in_turns(step)  # where the kernels that must run are asked for
    if not turns.here:
        return None, None, False
    try:
        with made.of.chosen():
            taken = peak(made.step(step), (*made.x.leaves, made.x.d_out))
    except torch.OutOfMemoryError:
        release()
        return None, None, False
    for _ in range(CALLS + 1):
        turns.round()
    turns.forget_first()
    if check and turns.here:
        turns.judge(lambda: those.expected)
    entry = turns.contest().entries[name]
    if entry.absent:
        return None, None, entry.absent.startswith("wrong")
    return taken, statistics.median(entry.seconds), True


def exponent(lengths: Sequence[int], peaks: Sequence[int | None]) -> float | None:
    """Of peak against T: the slope of a least-squares line through the logarithms, over the longer half of
    the points that there are, rounded up.

    None if there are fewer than 3, or a peak among those is 0.
    """
    points = sorted((n, p) for n, p in zip(lengths, peaks, strict=True) if p is not None)
    longer = points[len(points) // 2 :]
    if len(points) < 3 or any(p <= 0 for _, p in longer):
        return None
    slope, _ = statistics.linear_regression(
        *zip(*((math.log(n), math.log(p)) for n, p in longer), strict=True)
    )
    return slope
