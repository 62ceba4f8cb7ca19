"""What can be claimed of the tiles of a sweep: which is faster than the shipped one by more than noise."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from tests.speed import pairs

from .tiles import TileEntry, TileSweep, groups, shipped_of


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The best tile of a kernel and head dimension against the shipped one.

    Attributes:
        kernel, dim: whose.
        best: the fastest in the final rounds but the shipped one.
        shipped: the shipped one.
        ratio: shipped time over best's, by round, the geometric mean over the problems; None if the final
            rounds are too few.
        by_problem: the same of each problem.
        verdict: of `tests.speed.pairs`: "faster" means the best is.
    """

    kernel: str
    dim: int
    best: TileEntry
    shipped: TileEntry
    ratio: pairs.Ratio | None = None
    by_problem: dict[str, pairs.Ratio] = {}
    verdict: str = pairs.CANNOT_TELL

    @property
    def line(self) -> str:
        """As `kernels/tiles.py` has it."""
        return f"{self.dim}: [{self.best.tile}],"


def claim(entries: Sequence[TileEntry], control: Mapping[str, Sequence[float]]) -> Claim | None:
    """What can be claimed of the best tile of a kernel and head dimension; None if nothing was compared.

    The final rounds decide, which no tile was chosen by: the smallest of many medians is too small. A tile
    that spills is one like others: if it is ahead all the same, it may be shipped, with its reason
    (`reports.resources.SPILLS`).

    Args:
        entries: all of the kernel and head dimension.
        control: as of `reports.tiles.TileSweep`, theirs.

    Raises:
        ValueError: if a time of the final rounds is not greater than 0.
    """
    shipped = shipped_of(entries)
    others = [entry for entry in entries if entry.final and not entry.shipped]
    if shipped is None or not others:
        return None
    best = min(others, key=lambda entry: statistics.median(_by_round(entry.final)))
    found = Claim(kernel=best.kernel, dim=best.dim, best=best, shipped=shipped)
    ours, theirs = _by_round(best.final), _by_round(shipped.final)
    if min(len(ours), len(theirs)) < pairs.FEWEST:
        return found
    ratio = pairs.ratio(ours, theirs)
    again = _by_round(control)
    quiet = pairs.ratio(theirs, again) if len(again) >= pairs.FEWEST else None
    return msgspec.structs.replace(
        found,
        ratio=ratio,
        by_problem={name: pairs.ratio(best.final[name], shipped.final[name]) for name in best.final},
        verdict=pairs.verdict(ratio, quiet),
    )


def claims(sweep: TileSweep) -> list[Claim]:
    """One for each kernel and head dimension where something was compared.

    Raises:
        ValueError: if a time of the final rounds is not greater than 0.
    """
    found = [claim(entries, sweep.controls.get(f"{kernel} {dim}", {}))
             for (kernel, dim), entries in groups(sweep).items()]  # fmt: skip
    return [of for of in found if of is not None]


def _by_round(seconds: Mapping[str, Sequence[float]]) -> list[float]:
    """Of each round the geometric mean over the problems."""
    return [statistics.geometric_mean(of_round) for of_round in zip(*seconds.values(), strict=False)]
