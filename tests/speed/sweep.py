"""Times tiles of the kernels on a GPU, beside what each takes of a multiprocessor.

    python -m tests.speed.sweep [--kernel forward,dkdv,dq] [--dims 64,128,256] [--dtype float16]
        [--lengths 2048] [--out FOLDER] [-n WORKERS] [--seconds 400] [--quick]

For each kernel and head dimension a grid of tiles goes through three steps. What cannot fit is pruned. The
others are compiled, by processes that do what a launch does but launch nothing: a tiny problem is compiled to
the same kernel as a large one, since neither strides nor lengths are specialised, and Triton's cache has it
afterwards. Then, on a machine that does nothing else, one process times them in turns, in rounds, each in
another order; the shipped tile takes part. The best of them and the shipped one have more rounds of their
own, which decide what is claimed. Timed is the kernel in question alone, launched with the arguments that
`kernels.launch` makes: no allocation, and for dkdv and dq not the delta kernel, which runs once, before.
Afterwards each tile's result is compared with that of the shipped one.

A tile that does not compile, or launch, or that takes its process with it, is an entry with its reason.
Written are tiles.json, tiles.md and tiles.png (`reports.tile_sweep`).

Exit status: 0 tiles were timed; 1 none could be; 2 wrong use; 3 there is no GPU, or Triton interprets.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
import triton
from torch import Tensor

from kernels import launch
from kernels.architecture import Architecture, effective_architecture
from kernels.tiles import Tile, Tiles, choose_tiles, shared_memory
from reports import tile_sweep
from reports.tile_sweep import FAILED, MEASURED, PRUNED, UNMEASURED, WRONG, Program, TileEntry, TileSweep

from ..offline import KERNELS, TILED
from .machine import why_not_here
from .occupancy import CHIPS, REGISTERS_OF_A_THREAD, Residence, resident_blocks
from .pairs import FEWEST

DIMS = (16, 32, 64, 128, 256)
"""Head dimensions that the tile tables have."""

DTYPES = ("float16", "bfloat16")
"""float32 has a table of its own, of tiles that do without tensor cores."""

ITEMSIZE = 2
TOKENS = 16_384
WIDTH = 2048
"""H D."""

MASKS = {"causal": True, "full": False}

ROUNDS = FEWEST
FINAL_ROUNDS = 15
FINALISTS = 3

COMPILING = 0.6
"""Of the time, at most."""

A_COMPILATION, A_GROUP = 120.0, 180.0
"""Seconds after which a process is ended that compiles a tile, or times those of a kernel and dimension."""

GRACE = 60.0
"""Seconds that a process may need beyond the end of the time, to check what it has timed."""

TOLERANCE = 1e-2
"""Relative error, by the Frobenius norm, between results of two tiles.

They differ in the order of float32 sums, and in the maximum that P was computed with before it was rounded:
by about an ulp at most, 2^-10 of float16 and 2^-7 of bfloat16, in the root mean square by less than half of
it. A tile of keys that is left out, or there twice, changes a result by the root of its share: 9 % for 16 of
2,048."""

TIME_OVER = "the time was over"


# ---------------------------------------------------------------- which tiles


def grid(kernel: str, dim: int, quick: bool = False) -> list[Tile]:
    """The tiles that are looked at, before anything is pruned.

    Args:
        kernel: of `tests.offline.TILED`.
        dim: head dimension. At 256 the streamed keys may be 16; for dkdv they stay, and 16 are too few.
        quick: a few of them.
    """
    if quick:
        return [Tile(*tile) for tile in product((64, 128), (32, 64, 128), (4, 8), (2,))]
    columns = (16, 32, 64, 128) if dim == 256 and kernel != "dkdv" else (32, 64, 128)
    return [Tile(*tile) for tile in product((32, 64, 128), columns, (4, 8), (1, 2, 3))]


NO_MEMORY = "may take more shared memory than a block has (the bound that kernels.tiles chooses by)"
NO_REGISTERS = f"its accumulators alone take more than {REGISTERS_OF_A_THREAD} registers a thread"


def why_pruned(arch: Architecture, kernel: str, tile: Tile, dim: int, itemsize: int = ITEMSIZE) -> str:
    """Why a tile need not be compiled; empty if it is to be."""
    if shared_memory(arch, kernel, tile, dim, itemsize) > arch.shared_memory:
        return NO_MEMORY
    if accumulators(kernel, tile, dim) > REGISTERS_OF_A_THREAD:
        return NO_REGISTERS
    return ""


def accumulators(kernel: str, tile: Tile, dim: int) -> float:
    """Registers a thread of the float32 tiles that live at once: results, and S, and P beside dP."""
    BM, BN = tile.BM, tile.BN
    elements = {
        "forward": BM * dim + BM * BN,
        "dkdv": 2 * BN * dim + 2 * BM * BN,
        "dq": BM * dim + 2 * BM * BN,
    }[kernel]
    return elements / (32 * tile.warps)


# ---------------------------------------------------------------- one launch


@dataclass(frozen=True)
class Tensors:
    """Of a dense problem: q, k, v, out and gradients (B, H, T, D), lse (B, H, T) in float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    @staticmethod
    def of(batch: int, heads: int, length: int, dim: int, dtype: torch.dtype, device: str) -> Tensors:
        """Memory for all."""
        shape = (batch, heads, length, dim)
        q, k, v, d_out, out, dq, dk, dv = (torch.empty(shape, dtype=dtype, device=device) for _ in range(8))
        lse = torch.empty(shape[:-1], dtype=torch.float32, device=device)
        return Tensors(q, k, v, d_out, out, lse, dq, dk, dv)

    def draw(self) -> Tensors:
        """Fills the inputs with normal values."""
        for t in (self.q, self.k, self.v, self.d_out):
            t.normal_()
        return self

    def results(self, kernel: str) -> dict[str, Tensor]:
        """What a kernel writes, by name."""
        return {
            "forward": {"out": self.out, "lse": self.lse},
            "dkdv": {"dk": self.dk, "dv": self.dv},
            "dq": {"dq": self.dq},
        }[kernel]


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel with all that it is launched with; called, it launches and returns the compiled kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def __call__(self) -> Any:
        return self.kernel[self.grid](*self.arguments, **self.keywords)

    def compile(self) -> Any:
        """What a launch does before it launches: into Triton's cache, if it is not there."""
        return self.kernel.warmup(*self.arguments, grid=self.grid, **self.keywords)


def launches(arch: Architecture, tile: Tile, x: Tensors, causal: bool) -> dict[str, Launch]:
    """What `kernels.launch` launches with this tile for all kernels, by name; nothing is launched.

    Args:
        arch: what is compiled for.
        tile: instead of those of `kernels.tiles`.
        x: the tensors; results go there.
        causal: the mask.
    """
    made: dict[str, Launch] = {}

    class Kept:
        """Stands for a kernel."""

        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(launch, KERNELS[name]).kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def keep(*arguments: Any, **keywords: Any) -> None:
                made[self.name] = Launch(self.kernel, grid, arguments, keywords)

            return keep

    stand_ins: dict[str, Any] = {KERNELS[name]: Kept(name) for name in ("delta", *TILED)}
    stand_ins |= {
        "effective_architecture": lambda device: arch,
        "choose_tiles": lambda *of: Tiles(tile, tile, tile),
        "new_results": lambda q, v: (x.out, x.lse),
        "new_gradients": lambda q, k, v, need_dq, need_dkdv: (x.dq, x.dk, x.dv),
    }
    scale = 1 / math.sqrt(x.q.shape[-1])
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(launch, name, stand_in))
        launch.forward(x.q, x.k, x.v, causal, scale, False)
        launch.backward(x.d_out, None, x.q, x.k, x.v, x.out, x.lse, causal, scale, False, True, True)
    return made


# ---------------------------------------------------------------- processes that may die


@dataclass(frozen=True)
class Failure:
    """Instead of an answer.

    Attributes:
        reason: what was raised, or became of the process.
        of: what it is about, if that is known.
    """

    reason: str
    of: Any = None


class ContextLostError(Exception):
    """The GPU does nothing more for this process.

    Args:
        reason: what the GPU said.
        of: the tile that did it.
    """

    def __init__(self, reason: str, of: Tile) -> None:
        super().__init__(reason)
        self.reason, self.of = reason, of


def in_a_line(error: BaseException) -> str:
    """An exception in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def _serve(of: connection.Connection, function: Callable[[Any], Any], log: str) -> None:
    """Answers until nobody asks. What compilers print goes into the log."""
    with open(log, "wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    while True:
        try:
            task = of.recv()
        except (EOFError, OSError):
            return
        try:
            answer = function(task)
        except ContextLostError as error:
            of.send(Failure(error.reason, error.of))
            os._exit(1)  # an orderly end would wait for a GPU that is gone
        except Exception as error:  # of Triton, LLVM, ptxas, CUDA: each has its own kinds
            answer = Failure(in_a_line(error))
        of.send(answer)


class _Process:
    """One that does a task at a time."""

    def __init__(self, function: Callable[[Any], Any], log: Path) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA and LLVM have threads: no fork
        self.connection, theirs = context.Pipe()
        self._log = log
        self._process = context.Process(target=_serve, args=(theirs, function, str(log)), daemon=True)
        self._process.start()
        theirs.close()
        self.task: Any = None
        self.busy = False
        self.ends = math.inf

    def give(self, task: Any, seconds: float) -> None:
        self.task, self.busy, self.ends = task, True, time.monotonic() + seconds
        with suppress(OSError):  # it is dead: its answer will say so
            self.connection.send(task)

    def answer(self) -> Any:
        """Waits for it.

        Raises:
            EOFError: if the process ended instead.
        """
        try:
            found = self.connection.recv()
        except OSError:
            raise EOFError from None
        self.busy = False
        return found

    def epitaph(self) -> str:
        """How it ended, and its last words."""
        self._process.join(10)
        code = self._process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"status {code}"
        with suppress(OSError):
            said = self._log.read_text(errors="replace").strip().splitlines()
            if said:
                return f"its process ended with {how}: {said[-1][:200]}"
        return f"its process ended with {how}"

    def end(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.join(10)


def answers(
    function: Callable[[Any], Any], tasks: deque[Any], workers: int, until: float, seconds: float
) -> Iterator[tuple[Any, Any]]:
    """Does tasks in processes: (task, what the function returns), or a `Failure`, as they are done.

    Args:
        function: of a module, so that another process finds it.
        tasks: in order; those that are taken are removed, and more may be added meanwhile.
        workers: processes at most.
        until: when it ends (`time.monotonic`): what is not done by then is lost.
        seconds: that a task may take.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes: list[_Process] = []
        started = 0
        try:
            while True:
                for one in processes:
                    if tasks and not one.busy:
                        one.give(tasks.popleft(), seconds)
                while tasks and len(processes) < workers:
                    started += 1
                    processes.append(_Process(function, Path(folder) / f"{started}.log"))
                    processes[-1].give(tasks.popleft(), seconds)
                busy = [one for one in processes if one.busy]
                now = time.monotonic()
                if not busy or now >= until:
                    return
                wait = max(min(until, *(one.ends for one in busy)) - now, 0)
                ready = connection.wait([one.connection for one in busy], wait)
                for one in busy:
                    if one.connection in ready:
                        try:
                            answer = one.answer()
                        except EOFError:
                            answer = Failure(one.epitaph())
                        if isinstance(answer, Failure) and (one.busy or answer.of is not None):
                            one.end()
                            processes.remove(one)
                        yield one.task, answer
                    elif time.monotonic() >= one.ends:
                        one.end()
                        processes.remove(one)
                        yield one.task, Failure(f"not done after {seconds:.0f} s")
        finally:
            for one in processes:
                one.end()


# ---------------------------------------------------------------- compiling


@dataclass(frozen=True)
class Compilation:
    """A kernel to be compiled for the GPU that is there."""

    kernel: str
    dim: int
    tile: Tile
    dtype: str
    mask: str


def compile_(task: Compilation) -> None:
    """Compiles; in a process that is there for it."""
    torch.cuda.init()
    x = Tensors.of(1, 1, 16, task.dim, getattr(torch, task.dtype), "cuda")
    launches(effective_architecture("cuda"), task.tile, x, MASKS[task.mask])[task.kernel].compile()


# ---------------------------------------------------------------- timing


@dataclass(frozen=True)
class Group:
    """The tiles of a kernel and head dimension, to be timed.

    Attributes:
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
class Outcome:
    """What was measured of a tile: as of `reports.tile_sweep.TileEntry`."""

    status: str = UNMEASURED
    reason: str = TIME_OVER
    programs: dict[str, Program] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    final: dict[str, list[float]] = field(default_factory=dict)

    @property
    def time(self) -> float:
        return statistics.geometric_mean([statistics.median(of) for of in self.seconds.values()])

    @property
    def spills(self) -> bool:
        return any(program.spilled for program in self.programs.values())


@dataclass
class Measured:
    """What was measured of a group.

    Attributes:
        control: the shipped tile in the final rounds, at another place.
        compiled: kernels that Triton's cache did not have.
    """

    outcomes: dict[Tile, Outcome]
    control: dict[str, list[float]]
    compiled: int


def problem_name(length: int, mask: str) -> str:
    return f"T {length} {mask}"


def measure(group: Group) -> Measured:
    """Times the tiles of a group on the GPU; in a process that is there for it.

    Raises:
        ContextLostError: if a tile took the GPU's context with it.
        RuntimeError: if the shipped tile cannot be launched.
    """
    from .timer import Timer

    return _Timing(group, Timer().device).measured()


class _Timing:
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
            self.problems[problem_name(length, mask)] = mask, x
        self.expected: dict[str, dict[str, Tensor]] = {}

    def measured(self) -> Measured:
        compiled = 0

        def count(*, cache_hit: bool, **_: Any) -> None:
            nonlocal compiled
            compiled += not cache_hit

        with mock.patch.object(triton.knobs.compilation, "listener", count, create=True):
            self._first_calls()
        self._rounds()
        self._check()
        self._final_rounds()
        return Measured(self.outcomes, self.control, compiled)

    def _first_calls(self) -> None:
        """Loads every kernel and launches it once."""
        group = self.group
        forward = choose_tiles(self.arch, group.dim, group.dim, ITEMSIZE).forward
        for name, (mask, x) in self.problems.items():  # the backward needs out and lse, the check a result
            with _Blame(group.shipped):
                launches(self.arch, forward, x, MASKS[mask])["forward"]()
                if group.kernel != "forward":
                    made = launches(self.arch, group.shipped, x, MASKS[mask])
                    made["delta"]()
                    made[group.kernel]()
                torch.cuda.synchronize()
            self.expected[name] = {key: t.clone() for key, t in x.results(group.kernel).items()}
        for tile in sorted(group.tiles, key=lambda tile: tile != group.shipped):
            if time.monotonic() > group.until:
                return
            outcome, calls = self.outcomes[tile], {}
            try:
                with _Blame(tile):
                    for name, (mask, x) in self.problems.items():
                        made = launches(self.arch, tile, x, MASKS[mask])
                        if group.kernel != "forward":
                            made["delta"]()
                        calls[name] = made[group.kernel]
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
            if time.monotonic() > self.group.until:
                break
            order = list(self.calls)
            random.Random(number).shuffle(order)
            for tile in order:
                self._time(tile, self.outcomes[tile].seconds)
        for tile in self.calls:
            if self.outcomes[tile].seconds:
                self.outcomes[tile].status, self.outcomes[tile].reason = MEASURED, ""

    def _time(self, tile: Tile, into: dict[str, list[float]]) -> None:
        with _Blame(tile):
            for name, call in self.calls[tile].items():
                into.setdefault(name, []).append(self.seconds_of(call))

    def _check(self) -> None:
        """Computes all again where NaN was written before, and compares."""
        for tile, calls in self.calls.items():
            outcome = self.outcomes[tile]
            if outcome.status != MEASURED:
                continue
            for name, call in calls.items():
                results = self.problems[name][1].results(self.group.kernel)
                with _Blame(tile):
                    for t in results.values():
                        t.fill_(math.nan)
                    call()
                    wrong = why_wrong(results, self.expected[name])
                if wrong:
                    outcome.status, outcome.reason, outcome.seconds = WRONG, f"{name}: {wrong}", {}
                    break

    def _final_rounds(self) -> None:
        """Of the best without spills, the best that spills if that is faster, and the shipped one, twice."""
        right = [tile for tile, of in self.outcomes.items() if of.status == MEASURED]
        ranked = sorted(right, key=lambda tile: self.outcomes[tile].time)
        others = [tile for tile in ranked if tile != self.group.shipped]
        best = [tile for tile in others if not self.outcomes[tile].spills][:FINALISTS]
        best += [tile for tile in others[:1] if tile not in best]
        if self.group.shipped not in right or not best:
            return
        turns = [(tile, self.outcomes[tile].final) for tile in (self.group.shipped, *best)]
        turns.append((self.group.shipped, self.control))
        for number in range(FINAL_ROUNDS):
            if time.monotonic() > self.group.until:
                return
            for tile, into in random.Random(number).sample(turns, len(turns)):
                self._time(tile, into)


class _Blame:
    """Around what is done with a tile: an error that the context does not survive is the tile's."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not context_lives():
            raise ContextLostError(in_a_line(error), self.tile) from error


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


# ---------------------------------------------------------------- a sweep


def entry(kernel: str, dim: int, tile: Tile, shipped: bool, of: Outcome, chips: Sequence[int]) -> TileEntry:
    """A tile's.

    Args:
        of: what was measured.
        chips: compute capabilities that residence is worked out for, as far as they are known.
    """
    residence: dict[str, Residence] = {}
    if of.programs:
        registers = max(program.registers for program in of.programs.values())
        shared = max(program.shared for program in of.programs.values())
        residence = {f"sm{chip}": resident_blocks(CHIPS[chip], tile.warps, registers, shared)
                     for chip in chips if chip in CHIPS}  # fmt: skip
    return TileEntry(
        kernel=kernel, dim=dim, BM=tile.BM, BN=tile.BN, warps=tile.warps, stages=tile.stages,
        status=of.status, reason=of.reason, shipped=shipped, programs=of.programs, residence=residence,
        seconds=of.seconds, final=of.final,
    )  # fmt: skip


class Sweep:
    """One on the GPU that is there.

    Args:
        options: of the command line.
        arch: what is compiled for.
        arguments: as they were given.
    """

    def __init__(self, options: argparse.Namespace, arch: Architecture, arguments: Sequence[str]) -> None:
        self.options, self.arch = options, arch
        self.begun = time.monotonic()
        self.until = self.begun + options.seconds
        capability = torch.cuda.get_device_capability()
        self.chips = list(dict.fromkeys((10 * capability[0] + capability[1], arch.capability)))
        self.keys: list[tuple[str, int]] = list(product(options.kernel, options.dims))
        self.shipped: dict[tuple[str, int], Tile] = {}
        self.outcomes: dict[tuple[str, int], dict[Tile, Outcome]] = {}
        for kernel, dim in self.keys:
            shipped = getattr(choose_tiles(arch, dim, dim, ITEMSIZE), kernel)
            self.shipped[kernel, dim] = shipped
            self.outcomes[kernel, dim] = of = {}
            for tile in dict.fromkeys((shipped, *grid(kernel, dim, options.quick))):
                why = "" if tile == shipped else why_pruned(arch, kernel, tile, dim)
                of[tile] = Outcome(PRUNED, why) if why else Outcome()
        self.compiled: set[tuple[str, int, Tile]] = set()
        self.controls: dict[str, dict[str, list[float]]] = {}
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
        """Compiles, times, writes after each group; returns what was found."""
        for (kernel, dim), of in self.outcomes.items():
            reasons = Counter(outcome.reason for outcome in of.values() if outcome.status == PRUNED)
            pruned = "".join(f"; {n} pruned: {reason}" for reason, n in reasons.items())
            self._say(f"{kernel} {dim}: {len(of)} tiles{pruned}")
        self._compile()
        self._time()
        sweep = self.found()
        tile_sweep.write(sweep, self.options.out)
        if why := tile_sweep.write_plot(sweep, self.options.out):
            self._say(f"no plot: {why}")
        return sweep

    def found(self) -> TileSweep:
        """What is known by now."""
        entries = [entry(*key, tile, tile == self.shipped[key], outcome, self.chips)
                   for key, of in self.outcomes.items() for tile, outcome in of.items()]  # fmt: skip
        return msgspec.structs.replace(
            self.head, entries=entries, controls=self.controls, seconds=time.monotonic() - self.begun
        )

    def _say(self, words: str) -> None:
        print(f"[{time.monotonic() - self.begun:4.0f} s] {words}", flush=True)

    def _compile(self) -> None:
        """What is not compiled in its time is not measured."""
        missing: Counter[tuple[str, int, Tile]] = Counter()
        tasks: deque[Compilation] = deque()
        for kernel, dim in self.keys:
            for tile, outcome in self.outcomes[kernel, dim].items():
                if outcome.status != PRUNED:
                    missing[kernel, dim, tile] = len(MASKS)
                    tasks += [Compilation(kernel, dim, tile, self.options.dtype, mask) for mask in MASKS]
        total = len(tasks)
        workers = min(self.options.workers, total)
        self._say(f"compiling {total} kernels in {workers} processes")
        until, done = self.begun + COMPILING * self.options.seconds, 0
        for task, answer in answers(compile_, tasks, workers, until, A_COMPILATION):
            done += 1
            if done % 100 == 0:
                self._say(f"compiled {done} of {total}")
            missing[task.kernel, task.dim, task.tile] -= 1
            if isinstance(answer, Failure):
                outcome = self.outcomes[task.kernel, task.dim][task.tile]
                outcome.status, outcome.reason = FAILED, f"{task.mask}: {answer.reason}"
        for (kernel, dim, tile), n in missing.items():
            if n and self.outcomes[kernel, dim][tile].status == UNMEASURED:
                self.outcomes[kernel, dim][tile].reason = "not compiled when the time for it was over"
        self._say(f"compiled {done} of {total}")
        self.compiled = {key for key, n in missing.items() if not n}

    def _time(self) -> None:
        groups: deque[Group] = deque()
        dtype, lengths = self.options.dtype, self.options.lengths
        for kernel, dim in self.keys:
            outcomes = self.outcomes[kernel, dim]
            tiles = tuple(
                tile
                for tile, outcome in outcomes.items()
                if outcome.status == UNMEASURED and (kernel, dim, tile) in self.compiled
            )
            shipped = self.shipped[kernel, dim]
            if shipped in tiles:
                groups.append(Group(kernel, dim, dtype, lengths, tiles, shipped, self.until))
                continue
            for tile in tiles:
                outcomes[tile].reason = "the shipped tile was not compiled"
        for group, answer in answers(measure, groups, 1, self.until + GRACE, A_GROUP):
            of = self.outcomes[group.kernel, group.dim]
            if isinstance(answer, Measured):
                of.update(answer.outcomes)
                self.controls[f"{group.kernel} {group.dim}"] = answer.control
                self._tell(group, answer)
            elif answer.of is not None and answer.of != group.shipped:
                of[answer.of] = replace(of[answer.of], status=FAILED, reason=answer.reason)
                self._say(f"{group.kernel} {group.dim}: {answer.of}: {answer.reason}; again without it")
                others = tuple(tile for tile in group.tiles if tile != answer.of)
                groups.appendleft(replace(group, tiles=others))
            else:
                for tile in group.tiles:
                    of[tile] = replace(of[tile], reason=answer.reason)
                self._say(f"{group.kernel} {group.dim}: {answer.reason}")
            tile_sweep.write(self.found(), self.options.out)

    def _tell(self, group: Group, found: Measured) -> None:
        counts = Counter(outcome.status for outcome in found.outcomes.values())
        words = ", ".join(f"{n} {status}" for status, n in counts.items())
        timed = {tile: of for tile, of in found.outcomes.items() if of.status == MEASURED}
        if timed:
            best = min(timed, key=lambda tile: timed[tile].time)
            words += f"; fastest {best}, {timed[best].time * 1e3:.3f} ms"
            if group.shipped in timed:
                words += f", shipped {timed[group.shipped].time * 1e3:.3f} ms"
        if found.compiled:
            words += f"; {found.compiled} compiled here, which Triton's cache should have had but for delta"
        self._say(f"{group.kernel} {group.dim}: {words}")


# ---------------------------------------------------------------- the command


def _words(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(dict.fromkeys(text.split(",")))
        if not set(words) <= set(allowed):
            raise argparse.ArgumentTypeError(
                f"is {text!r}; it may be some of {', '.join(allowed)}, separated by commas"
            )
        return words

    return parse


def _dims(text: str) -> tuple[int, ...]:
    return tuple(map(int, _words([str(dim) for dim in DIMS])(text)))


def _lengths(text: str) -> tuple[int, ...]:
    words = tuple(dict.fromkeys(text.split(",")))
    if not all(word.isdecimal() and 1 <= int(word) <= TOKENS for word in words):
        raise argparse.ArgumentTypeError(
            f"is {text!r}; it may be numbers from 1 to {TOKENS}, separated by commas"
        )
    return tuple(map(int, words))


def _workers(text: str) -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"is {text!r}; it may be a number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}; it may be a number greater than 0")
    return seconds


def _dtype(text: str) -> str:
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"is {text!r}; it may be {' or '.join(DTYPES)}")
    return text


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    default = Path(os.environ.get("FA_REPORT_DIR") or Path(tile_sweep.__file__).parent / "out")
    cores = len(os.sched_getaffinity(0))
    found = argparse.ArgumentParser(
        prog="python -m tests.speed.sweep", allow_abbrev=False,
        description="Times tiles of the kernels on a GPU, beside registers, shared memory and occupancy.",
    )  # fmt: skip
    dims = ", ".join(map(str, DIMS))
    for names, kind, value, metavar, words in (
        (("--kernel",), _words(TILED), TILED, "NAMES", f"of {', '.join(TILED)} (default: all)"),
        (("--dims",), _dims, (64, 128, 256), "DIMS", f"head dimensions, of {dims} (default: 64,128,256)"),
        (("--dtype",), _dtype, "float16", "DTYPE", f"{' or '.join(DTYPES)} (default: float16)"),
        (("--lengths",), _lengths, (2048,), "LENGTHS", f"T, of {TOKENS} tokens each (default: 2048)"),
        (("--out",), Path, default, "FOLDER", "for the results (default: FA_REPORT_DIR, or reports/out)"),
        (("-n", "--workers"), _workers, cores, "N", "processes that compile (default: one a core)"),
        (("--seconds",), _seconds, 400.0, "SECONDS", "no round begins later (default: 400)"),
    ):  # fmt: skip
        found.add_argument(*names, type=kind, default=value, metavar=metavar, help=words)
    found.add_argument("--quick", action="store_true", help="a few tiles")
    return found


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status."""
    options = parser().parse_args(arguments)
    if why := why_not_here():
        print(why, file=sys.stderr)
        return 3
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"--out is {str(options.out)!r}: nothing can be written there ({error.strerror})"
        print(why, file=sys.stderr)
        return 2
    sweep = Sweep(options, effective_architecture("cuda"), arguments).run()
    for name in (tile_sweep.FILE, tile_sweep.PAGE, tile_sweep.PLOT):
        if (options.out / name).exists():
            print(options.out / name)
    for of in sweep.entries:
        if of.status == WRONG:
            print(f"WRONG: {of.kernel} {of.dim} {of.name}: {of.reason}", file=sys.stderr)
    return 0 if any(of.seconds for of in sweep.entries) else 1


if __name__ == "__main__":
    from tests.speed.sweep import main as command  # by its own name, under which other processes know it

    sys.exit(command(sys.argv[1:]))
