"""What a sweep of tiles leaves: one JSON file (`tests.speed.sweep` writes it, `reports.tile_sweep` shows it).

Times are in seconds, of the kernel alone, memory in bytes. Every round is kept. Residence is worked out from
registers and shared memory (`tests.speed.occupancy`), not measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tests.speed.occupancy import Residence

from . import versioned

VERSION = 1

WHOLE = 256
"""Columns of a slice that holds any head dimension, as of `kernels.tiles`."""

MEASURED = "measured"
PRUNED = "pruned"
FAILED = "failed"
WRONG = "wrong"
UNMEASURED = "not measured"
STATUSES = {
    MEASURED: "timed, and its result is right",
    PRUNED: "never compiled: it cannot fit, or not well",
    FAILED: "does not compile, load or launch",
    WRONG: "another result than the shipped tile's: it has no time",
    UNMEASURED: "the time was over, or the process that timed it ended",
}
"""What became of a tile."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What the assembler made of a kernel.

    Attributes:
        registers: of a thread.
        spilled: bytes of local memory of a thread.
        shared: bytes of shared memory of a block.
    """

    registers: int
    spilled: int
    shared: int


def typical(seconds: Mapping[str, Sequence[float]]) -> float:
    """Seconds: geometric mean over the problems of the median of the rounds.

    Raises:
        statistics.StatisticsError: if there is no problem, or one without a round.
    """
    return statistics.geometric_mean([statistics.median(rounds) for rounds in seconds.values()])


class TileEntry(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A tile of a kernel at a head dimension.

    Attributes:
        kernel: "forward", "dkdv", "dq".
        dim: head dimension.
        BM, BN, warps, stages, width: as of `kernels.tiles.Tile`.
        status: of `STATUSES`.
        reason: for the status, where there is one.
        shipped: whether it is the one that `kernels.tiles` chooses here.
        programs: by mask, "causal" and "full": each is a kernel of its own.
        residence: by chip, "sm90": of the program that takes more.
        seconds: by problem: of each round. Those of the same index belong to one round.
        final: the same, of the rounds that only the shipped tile and the best had, after the others.
    """

    kernel: str
    dim: int
    BM: int
    BN: int
    warps: int
    stages: int
    status: str
    width: int = WHOLE
    reason: str = ""
    shipped: bool = False
    programs: dict[str, Program] = {}
    residence: dict[str, Residence] = {}
    seconds: dict[str, list[float]] = {}
    final: dict[str, list[float]] = {}

    @property
    def tile(self) -> tuple[int, ...]:
        """As an entry of `kernels.tiles`: without the width where it is whole."""
        shape = self.BM, self.BN, self.warps, self.stages
        return shape if self.width == WHOLE else (*shape, self.width)

    @property
    def name(self) -> str:
        slices = "" if self.width == WHOLE else f" c{self.width}"
        return f"{self.BM}x{self.BN} w{self.warps} s{self.stages}{slices}"

    @property
    def registers(self) -> int:
        return max((program.registers for program in self.programs.values()), default=0)

    @property
    def spilled(self) -> int:
        return max((program.spilled for program in self.programs.values()), default=0)

    @property
    def shared(self) -> int:
        return max((program.shared for program in self.programs.values()), default=0)

    @property
    def time(self) -> float:
        return typical(self.seconds)


class TileSweep(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep on one GPU and code path.

    Attributes:
        version: of the file.
        device: the GPU.
        chip, compiled_for: architectures, "sm90": of the GPU, and of the code.
        path: the code that ran ("sm90", "sm80-override").
        versions: of torch, triton, ptxas, cuda.
        dtype: of q, k, v.
        table: of `kernels.tiles.TABLES`: where the tiles of this architecture and dtype stand.
        tokens: B T of each problem.
        arguments: of the command line.
        seconds: that it took.
        entries: all tiles.
        controls: by kernel and head dimension ("forward 64"), by problem: the shipped tile once more in each
            of the final rounds, at another place: what noise looks like.
    """

    version: int = VERSION
    device: str
    chip: str
    compiled_for: str
    path: str
    versions: dict[str, str] = {}
    dtype: str
    table: str
    tokens: int
    arguments: list[str] = []
    seconds: float = 0.0
    entries: list[TileEntry] = []
    controls: dict[str, dict[str, list[float]]] = {}


def read(path: Path) -> TileSweep:
    """A file that a sweep left.

    Raises:
        ReportError: if it is missing, truncated, of another version, or no such file.
    """
    return versioned.read(path, TileSweep, VERSION, "file of a tile sweep")


def encode(sweep: TileSweep) -> bytes:
    """The file."""
    return msgspec.json.format(msgspec.json.encode(sweep), indent=1) + b"\n"


def groups(sweep: TileSweep) -> dict[tuple[str, int], list[TileEntry]]:
    """The entries by kernel and head dimension, in the order of the file."""
    found: dict[tuple[str, int], list[TileEntry]] = {}
    for entry in sweep.entries:
        found.setdefault((entry.kernel, entry.dim), []).append(entry)
    return found


def fastest_first(entries: Sequence[TileEntry]) -> list[TileEntry]:
    """Those that have a time."""
    return sorted((entry for entry in entries if entry.seconds), key=lambda entry: entry.time)


def shipped_of(entries: Sequence[TileEntry]) -> TileEntry | None:
    """The shipped tile, if it has a time."""
    return next((entry for entry in entries if entry.shipped and entry.seconds), None)
