"""What became of a tile: while it is measured, and as an entry of the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import msgspec

from kernels.tiles import Tile
from reports.tiles import UNMEASURED, Program, TileEntry, typical

from ..occupancy import CHIPS, resident_blocks

TIME_OVER = "the time was over"


@dataclass
class Outcome:
    """What is known of a tile: as of `reports.tiles.TileEntry`; times in seconds."""

    status: str = UNMEASURED
    reason: str = TIME_OVER
    programs: dict[str, Program] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    final: dict[str, list[float]] = field(default_factory=dict)

    @property
    def time(self) -> float:
        return typical(self.seconds)


def entry(kernel: str, dim: int, tile: Tile, shipped: bool, of: Outcome, chips: Sequence[int]) -> TileEntry:
    """A tile's.

    Args:
        kernel, dim, shipped: as of `reports.tiles.TileEntry`.
        tile: whose.
        of: what is known of it.
        chips: compute capabilities that residence is worked out for, as far as they are known.
    """
    made = TileEntry(
        kernel=kernel, dim=dim, **asdict(tile), status=of.status, reason=of.reason, shipped=shipped,
        programs=of.programs, seconds=of.seconds, final=of.final,
    )  # fmt: skip
    if not of.programs:
        return made
    known = [CHIPS[chip] for chip in chips if chip in CHIPS]
    residence = {chip.name: resident_blocks(chip, tile.warps, made.registers, made.shared) for chip in known}
    return msgspec.structs.replace(made, residence=residence)
