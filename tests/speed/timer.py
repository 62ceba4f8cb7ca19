"""GPU time: events on a cold L2, with the host hidden or not, and replays of a CUDA graph.

`Timer` measures. pytest-benchmark reads a clock before and after what it calls: `now` is that clock, and
stands still but for `advance`, by which it is told what the GPU needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

_now = 0.0


def now() -> float:
    """Seconds of GPU time that were told of (`--benchmark-timer`)."""
    return _now


def advance(seconds: float) -> None:
    """Lets the clock of pytest-benchmark go on."""
    global _now
    _now += seconds


PAUSE = 3e-4
"""Seconds that the GPU waits before a call, at first: the host is to have launched all of it by then."""

LONGEST_PAUSE = 0.05
COLD_BYTES = 2**28
"""Written before each call, at least: more than any L2 holds."""


class Timer:
    """Times calls on the current GPU and stream.

    Attributes:
        pauses: seconds of the pause that a call was found to need.
    """

    def __init__(self) -> None:
        l2 = torch.cuda.get_device_properties().L2_cache_size
        self._cold = torch.empty(max(2 * l2, COLD_BYTES), dtype=torch.uint8, device="cuda")
        self._cycles = self._cycles_a_second()
        self.pauses: WeakKeyDictionary[Callable[[], Any], float] = WeakKeyDictionary()

    def device(self, call: Callable[[], Any]) -> float:
        """Seconds from the first to the last kernel of a call, its launches hidden behind a pause.

        If the host was not done when the pause ended, it is measured again behind a longer one. A call that
        waits for the GPU itself is never done by then: its waiting counts.
        """
        pause = self.pauses.get(call, PAUSE)
        while True:
            seconds, hidden = self._timed(call, pause)
            if hidden or pause >= LONGEST_PAUSE:
                self.pauses[call] = pause
                return seconds
            pause *= 2

    def eager(self, call: Callable[[], Any]) -> float:
        """Seconds of a call with an idle GPU, from its making to its end: what the host needs is in it."""
        return self._timed(call, 0.0)[0]

    def _timed(self, call: Callable[[], Any], pause: float) -> tuple[float, bool]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._cold.zero_()
        if pause:
            torch.cuda._sleep(int(pause * self._cycles))
        else:
            torch.cuda.synchronize()
        start.record()
        result = call()  # kept until the end: freeing it is not part of the call
        end.record()
        hidden = not start.query()
        end.synchronize()
        del result
        return start.elapsed_time(end) * 1e-3, hidden

    def _cycles_a_second(self) -> float:
        """Of the GPU's clock, as `_sleep` counts."""
        cycles = 10_000_000
        torch.cuda._sleep(cycles)  # loads it
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return cycles / (start.elapsed_time(end) * 1e-3)

    def sleep(self, seconds: float) -> None:
        """Lets the GPU wait, in the stream."""
        torch.cuda._sleep(int(seconds * self._cycles))


REPLAYED = 10
"""Calls of a captured graph."""


class Replay:
    """A call, captured `REPLAYED` times into a CUDA graph.

    Raises:
        RuntimeError: if it cannot be captured.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        # of its own: one that fails to capture leaves its stream unusable
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what a first call sets up must not be captured
            for _ in range(2):
                call()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            for _ in range(REPLAYED):
                self.result = call()

    def __call__(self) -> None:
        self._graph.replay()


def host_seconds(call: Callable[[], Any], calls: int = 200) -> float:
    """Median seconds that the host spends on a call while the GPU does not keep it waiting."""
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    taken = []
    for number in range(calls):
        if number % 20 == 0:
            torch.cuda.synchronize()  # the queue of launches never fills
        begin = time.perf_counter()
        result = call()
        taken.append(time.perf_counter() - begin)
        del result
    torch.cuda.synchronize()
    return sorted(taken)[calls // 2]
