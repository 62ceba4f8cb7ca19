"""Times the tiles of a kernel and head dimension in turns, round by round, and checks their results."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from kernels.architecture import effective_architecture
from kernels.tiles import Tile
from reports.tiles import FAILED, MEASURED, WRONG, Program

from ..first_call import Compilations
from ..pairs import FEWEST
from ..problems import TOKENS
from ..timer import Timer
from .grid import shipped_tile
from .launches import MASKS, Launch, Tensors, launches
from .outcomes import Outcome
from .processes import ContextLostError, in_a_line

WIDTH = 2048
"""H D."""

ROUNDS = FEWEST
FINAL_ROUNDS = 15
FINALISTS = 3

TOLERANCE = 1e-2
"""Relative error, by the Frobenius norm, between results of two tiles.

They differ in the order of float32 sums, and in the maximum that P was computed with before it was rounded:
by about an ulp at most, 2^-10 of float16 and 2^-7 of bfloat16, in the root mean square by less than half of
it. A tile of keys that is left out, or there twice, changes a result by the root of its share: 9 % for 16 of
2,048."""


@dataclass(frozen=True)
class Group:
    """The tiles of a kernel and head dimension, to be timed.

    Attributes:
        dtype: of q, k, v, by name.
        lengths: T of the problems, of `TOKENS` tokens each, with either mask.
        shipped: also one of the tiles.
        until: no round begins later (`time.monotonic`).
    """

    kernel: str
    dim: int
    dtype: str
    lengths: tuple[int, ...]
    tiles: tuple[Tile, ...]
    shipped: Tile
    until: float


@dataclass
class Measured:
    """What was measured of a group.

    Attributes:
        control: seconds of the shipped tile in the final rounds, by problem, at another place.
        compiled: kernels that Triton's cache did not have.
    """

    outcomes: dict[Tile, Outcome]
    control: dict[str, list[float]]
    compiled: int


def measure(group: Group) -> Measured:
    """Times the tiles of a group on the GPU; in a process that is there for it.

    Raises:
        ContextLostError: if a tile took the GPU's context with it.
        Exception: of Triton, CUDA, if the shipped tile cannot be launched.
    """
    return GroupTiming(group, Timer().device).measured()


class GroupTiming:
    """One group's.

    Args:
        group: what is timed.
        seconds_of: times a call.
        device: where the tensors are.
    """

    def __init__(self, group: Group, seconds_of: Callable[[Launch], float], device: str = "cuda") -> None:
        self.group, self.seconds_of = group, seconds_of
        self.arch = effective_architecture(device)
        self.outcomes = {tile: Outcome() for tile in group.tiles}
        self.calls: dict[Tile, dict[str, Launch]] = {}
        self.control: dict[str, list[float]] = {}
        torch.manual_seed(0)
        self.problems: dict[str, tuple[str, Tensors]] = {}
        for length, mask in product(group.lengths, MASKS):
            batch, heads, dtype = TOKENS // length, WIDTH // group.dim, getattr(torch, group.dtype)
            x = Tensors.of(batch, heads, length, group.dim, dtype, device).draw()
            self.problems[f"T {length} {mask}"] = mask, x
        self.expected: dict[str, dict[str, Tensor]] = {}

    def measured(self) -> Measured:
        """All of it, as far as there is time.

        Raises:
            ContextLostError: if a tile took the GPU's context with it.
            Exception: of Triton, CUDA, if the shipped tile cannot be launched.
        """
        counted = Compilations()
        with mock.patch.object(triton.knobs.compilation, "listener", counted, create=True):
            self._compute_expected()
            self._first_calls()
        self._rounds()
        self._check()
        self._final_rounds()
        return Measured(self.outcomes, self.control, counted.compiled)

    def _call(self, tile: Tile, problem: str) -> Launch:
        """The launch of a tile; the delta that it reads is computed."""
        mask, x = self.problems[problem]
        made = launches(self.arch, tile, x, MASKS[mask])
        if self.group.kernel != "forward":
            made["delta"]()
        return made[self.group.kernel]

    def _compute_expected(self) -> None:
        """The shipped tile's results, and before them out and lse, which the backward needs."""
        kernel, shipped = self.group.kernel, self.group.shipped
        forward = shipped_tile(self.arch, "forward", self.group.dim)
        for name, (mask, x) in self.problems.items():
            with blamed_on(shipped):
                launches(self.arch, forward, x, MASKS[mask])["forward"]()
                self._call(shipped, name)()
                torch.cuda.synchronize()
            self.expected[name] = {key: t.clone() for key, t in x.results(kernel).items()}

    def _first_calls(self) -> None:
        """Loads every kernel and launches it once, the shipped one first."""
        for tile in sorted(self.group.tiles, key=lambda tile: tile != self.group.shipped):
            if self._time_is_over():
                return
            outcome, calls = self.outcomes[tile], {}
            try:
                with blamed_on(tile):
                    for name, (mask, _) in self.problems.items():
                        calls[name] = self._call(tile, name)
                        outcome.programs[mask] = program(calls[name]())
                        torch.cuda.synchronize()
            except ContextLostError:
                raise
            except Exception as error:  # of Triton, CUDA: each has its own kinds
                outcome.status, outcome.reason = FAILED, in_a_line(error)
                continue
            self.calls[tile] = calls

    def _rounds(self) -> None:
        for number in range(ROUNDS):
            if self._time_is_over():
                break
            order = list(self.calls)
            random.Random(number).shuffle(order)
            for tile in order:
                self._time(tile, self.outcomes[tile].seconds)
        for tile in self.calls:
            if self.outcomes[tile].seconds:
                self.outcomes[tile].status, self.outcomes[tile].reason = MEASURED, ""

    def _time(self, tile: Tile, into: dict[str, list[float]]) -> None:
        with blamed_on(tile):
            for name, call in self.calls[tile].items():
                into.setdefault(name, []).append(self.seconds_of(call))

    def _time_is_over(self) -> bool:
        return time.monotonic() > self.group.until

    def _check(self) -> None:
        """Computes all again where NaN was written before, and compares."""
        for tile, calls in self.calls.items():
            outcome = self.outcomes[tile]
            if outcome.status != MEASURED:
                continue
            for name, call in calls.items():
                results = self.problems[name][1].results(self.group.kernel)
                with blamed_on(tile):
                    for t in results.values():
                        t.fill_(math.nan)
                    call()
                    wrong = why_wrong(results, self.expected[name])
                if wrong:
                    outcome.status, outcome.reason, outcome.seconds = WRONG, f"{name}: {wrong}", {}
                    break

    def _final_rounds(self) -> None:
        """Of the best, and of the shipped one, twice."""
        right = [tile for tile, of in self.outcomes.items() if of.status == MEASURED]
        ranked = sorted(right, key=lambda tile: self.outcomes[tile].time)
        best = [tile for tile in ranked if tile != self.group.shipped][:FINALISTS]
        if self.group.shipped not in right or not best:
            return
        turns = [(tile, self.outcomes[tile].final) for tile in (self.group.shipped, *best)]
        turns.append((self.group.shipped, self.control))
        for number in range(FINAL_ROUNDS):
            if self._time_is_over():
                return
            for tile, into in random.Random(number).sample(turns, len(turns)):
                self._time(tile, into)


@contextmanager
def blamed_on(tile: Tile) -> Iterator[None]:
    """Around what is done with a tile: an error that the GPU's context does not survive is the tile's.

    Raises:
        ContextLostError: instead of such an error.
    """
    try:
        yield
    except Exception as error:
        if context_lives():
            raise
        raise ContextLostError(in_a_line(error), tile) from error


def context_lives() -> bool:
    """Whether the GPU still does something for this process."""
    try:
        torch.cuda.synchronize()
        return torch.ones(1, device="cuda").item() == 1
    except Exception:
        return False


def program(binary: Any) -> Program:
    """Of a kernel that is loaded."""
    return Program(
        registers=binary.n_regs,
        spilled=4 * binary.n_spills,  # Triton has local memory in words
        shared=binary.metadata.shared,
    )


def why_wrong(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """What is wrong with a result, or empty (`TOLERANCE`)."""
    for name, right in expected.items():
        is_ = found[name].float()
        if not bool(is_.isfinite().all()):
            return f"{name} is not finite"
        error = float((is_ - right.float()).norm() / right.float().norm())
        if not error <= TOLERANCE:
            return f"{name} is off by {error:.2g} of its norm; {TOLERANCE:g} is allowed"
    return ""
