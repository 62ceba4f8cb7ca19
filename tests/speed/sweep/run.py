"""A whole sweep on the GPU that is there: compiles, times, writes after each kernel and head dimension."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import msgspec
import torch
import triton

from kernels.architecture import Architecture, effective_architecture
from kernels.tiles import Tile
from reports import tile_sweep
from reports.tiles import FAILED, MEASURED, PRUNED, TileSweep

from ..problems import TOKENS
from .grid import grid, shipped_tile, why_pruned
from .launches import MASKS, Compilation, compile_tile
from .outcomes import Outcome, entry
from .processes import Failure, answers
from .timing import Group, Measured, measure

SHARE_FOR_COMPILING = 0.6
"""Of the time, at most."""

LONGEST_COMPILATION, LONGEST_GROUP = 120.0, 180.0
"""Seconds after which a process is ended that compiles a tile, or times those of a kernel and dimension."""

GRACE = 60.0
"""Seconds that a process may need beyond the end of the time, to check what it has timed."""


@dataclass(frozen=True)
class Options:
    """Of the command line.

    Attributes:
        kernel: of `tests.offline.TILED`.
        dims: head dimensions.
        dtype: of q, k, v, by name.
        lengths: T, of `TOKENS` tokens each.
        out: folder for the results.
        workers: processes that compile.
        seconds: after which no round begins.
        quick: a few tiles.
    """

    kernel: tuple[str, ...]
    dims: tuple[int, ...]
    dtype: str
    lengths: tuple[int, ...]
    out: Path
    workers: int
    seconds: float
    quick: bool


@dataclass
class Candidates:
    """The tiles of a kernel and head dimension.

    Attributes:
        shipped: also one of them.
        outcomes: what is known of each.
        compiled: those that can be timed.
        control: as of `Measured`; None if nothing was timed.
    """

    kernel: str
    dim: int
    shipped: Tile
    outcomes: dict[Tile, Outcome]
    compiled: list[Tile] = field(default_factory=list)
    control: dict[str, list[float]] | None = None

    @staticmethod
    def of(arch: Architecture, kernel: str, dim: int, quick: bool) -> Candidates:
        """Those of the grid, and the shipped one, which is never pruned."""
        shipped = shipped_tile(arch, kernel, dim)
        outcomes = {shipped: Outcome()}
        for tile in grid(arch, kernel, dim, quick):
            if tile != shipped:
                why = why_pruned(arch, kernel, tile, dim)
                outcomes[tile] = Outcome(PRUNED, why) if why else Outcome()
        return Candidates(kernel, dim, shipped, outcomes)

    def __str__(self) -> str:
        return f"{self.kernel} {self.dim}"


class Sweep:
    """One on the GPU that is there.

    Args:
        options: of the command line.
        arguments: as they were given.
    """

    def __init__(self, options: Options, arguments: Sequence[str]) -> None:
        self.options, self.begun = options, time.monotonic()
        arch = effective_architecture("cuda")
        self.candidates = {
            (kernel, dim): Candidates.of(arch, kernel, dim, options.quick)
            for kernel, dim in product(options.kernel, options.dims)
        }
        major, minor = torch.cuda.get_device_capability()
        self.chips = list(dict.fromkeys((10 * major + minor, arch.capability)))
        self.head = TileSweep(
            device=torch.cuda.get_device_name(),
            chip=f"sm{self.chips[0]}",
            compiled_for=arch.name,
            path=f"{arch.name}-override" if arch.overridden else arch.name,
            versions={
                "torch": str(torch.__version__),
                "triton": triton.__version__,
                "ptxas": str(triton.knobs.nvidia.ptxas.version),
                "cuda": str(torch.version.cuda),
            },
            dtype=options.dtype,
            table="16 bit, sm_90" if 90 <= arch.capability < 100 else "16 bit",
            tokens=TOKENS,
            arguments=list(arguments),
        )

    def run(self) -> TileSweep:
        """Compiles, times, writes after each group; returns what was found.

        Raises:
            OSError: if it cannot be written.
        """
        for those in self.candidates.values():
            reasons = Counter(of.reason for of in those.outcomes.values() if of.status == PRUNED)
            pruned = "".join(f"; {n} pruned: {reason}" for reason, n in reasons.items())
            self._say(f"{those}: {len(those.outcomes)} tiles{pruned}")
        self._compile()
        self._time()
        found = self.found()
        tile_sweep.write(found, self.options.out)
        if why := tile_sweep.write_plot(found, self.options.out):
            self._say(f"no plot: {why}")
        return found

    def found(self) -> TileSweep:
        """What is known by now."""
        found = self.candidates.values()
        return msgspec.structs.replace(
            self.head,
            entries=[
                entry(of.kernel, of.dim, tile, tile == of.shipped, outcome, self.chips)
                for of in found
                for tile, outcome in of.outcomes.items()
            ],
            controls={str(of): of.control for of in found if of.control is not None},
            seconds=time.monotonic() - self.begun,
        )

    def _say(self, words: str) -> None:
        print(f"[{time.monotonic() - self.begun:4.0f} s] {words}", flush=True)

    def _compile(self) -> None:
        """What is not compiled in its time is not measured."""
        tasks = deque(
            Compilation(those.kernel, those.dim, tile, self.options.dtype, mask)
            for those in self.candidates.values()
            for tile, outcome in those.outcomes.items()
            if outcome.status != PRUNED
            for mask in MASKS
        )
        total, done = len(tasks), 0
        missing = Counter((task.kernel, task.dim, task.tile) for task in tasks)
        workers = min(self.options.workers, total)
        self._say(f"compiling {total} kernels in {workers} processes")
        until = self.begun + SHARE_FOR_COMPILING * self.options.seconds
        for task, answer in answers(compile_tile, tasks, workers, until, LONGEST_COMPILATION):
            done += 1
            if done % 100 == 0:
                self._say(f"compiled {done} of {total}")
            missing[task.kernel, task.dim, task.tile] -= 1
            if isinstance(answer, Failure):
                outcome = self.candidates[task.kernel, task.dim].outcomes[task.tile]
                outcome.status, outcome.reason = FAILED, f"{task.mask}: {answer.reason}"
        self._say(f"compiled {done} of {total}")
        for (kernel, dim, tile), n in missing.items():
            those = self.candidates[kernel, dim]
            if those.outcomes[tile].status == FAILED:
                continue
            if n:
                those.outcomes[tile].reason = "not compiled when the time for it was over"
            else:
                those.compiled.append(tile)

    def _time(self) -> None:
        """All groups, one after another, in a process that is replaced when a tile takes it with it."""
        until = self.begun + self.options.seconds
        groups: deque[Group] = deque()
        for those in self.candidates.values():
            if those.shipped in those.compiled:
                groups.append(
                    Group(
                        those.kernel, those.dim, self.options.dtype, self.options.lengths,
                        tuple(those.compiled), those.shipped, until,
                    )
                )  # fmt: skip
                continue
            for tile in those.compiled:
                those.outcomes[tile].reason = "the shipped tile was not compiled"
        for group, answer in answers(measure, groups, 1, until + GRACE, LONGEST_GROUP):
            if again := self._learn(group, answer):
                groups.appendleft(again)
            tile_sweep.write(self.found(), self.options.out)

    def _learn(self, group: Group, answer: Measured | Failure) -> Group | None:
        """Keeps what a group came to; returns it without the tile that took the GPU with it."""
        those = self.candidates[group.kernel, group.dim]
        if isinstance(answer, Measured):
            those.outcomes |= answer.outcomes
            those.control = answer.control
            self._say(f"{those}: {_told(group, answer)}")
            return None
        guilty = answer.of
        if guilty is None or guilty == group.shipped:
            for tile in group.tiles:
                those.outcomes[tile].reason = answer.reason
            self._say(f"{those}: {answer.reason}")
            return None
        those.outcomes[guilty].status, those.outcomes[guilty].reason = FAILED, answer.reason
        self._say(f"{those}: {guilty}: {answer.reason}; again without it")
        return replace(group, tiles=tuple(tile for tile in group.tiles if tile != guilty))


def _told(group: Group, found: Measured) -> str:
    counts = Counter(outcome.status for outcome in found.outcomes.values())
    words = ", ".join(f"{n} {status}" for status, n in counts.items())
    timed = {tile: of.time for tile, of in found.outcomes.items() if of.status == MEASURED}
    if timed:
        best = min(timed, key=lambda tile: timed[tile])
        words += f"; fastest {best}, {timed[best] * 1e3:.3f} ms"
        if group.shipped in timed:
            words += f", shipped {timed[group.shipped] * 1e3:.3f} ms"
    if found.compiled:
        words += f"; {found.compiled} compiled here, which Triton's cache should have had but for delta"
    return words
