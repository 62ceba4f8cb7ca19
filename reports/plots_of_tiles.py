"""The picture of a sweep of tile sizes: registers against time, by occupancy."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ReportError
from .plots import VERMILION, figure, placed, styled
from .tiles import TileEntry, TileSweep, fastest_first, groups, shipped_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

INK, UNKNOWN = "#222222", "#777777"
COLOURS = "viridis"
"""Of occupancy."""

SLOWEST = 8.0
"""Where the axis of times ends: slower ones are drawn there."""

ACROSS, UP = 3.0, 2.8
"""Inches from a panel to the next."""

Ranked = Mapping[tuple[str, int], Sequence[TileEntry]]
"""The tiles that have a time, fastest first, by kernel and head dimension."""


def plot(sweep: TileSweep, path: Path) -> None:
    """A PNG: a panel for each kernel and head dimension, registers against time, by occupancy.

    Raises:
        ImportError: if matplotlib is not installed.
        ReportError: if no tile has a time.
        OSError: if it cannot be written.
    """
    from matplotlib.colors import LogNorm

    found = {key: ranked for key, entries in groups(sweep).items() if (ranked := fastest_first(entries))}
    if not found:
        raise ReportError("no tile has a time: there is nothing to plot")
    kernels, dims = {kernel for kernel, _ in found}, {dim for _, dim in found}
    width, height = max(ACROSS * len(dims) + 1.6, 5.6), UP * len(kernels) + 1.3
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with styled(**dict.fromkeys(inked, INK)):
        drawn = figure(height, width)
        norm = LogNorm(1 / 32, 1.0)
        _panels(drawn, found, sweep.chip, norm)
        _bar(placed(drawn, ACROSS * len(dims) + 0.5, height / 2 - 0.9, 0.12, 1.7), norm)
        words = "\n".join(textwrap.fill(line, int(13 * width)) for line in _sentences(found, sweep))
        drawn.text(0.12 / width, 1 - 0.12 / height, words, va="top", fontsize=9.5)
        _legend(drawn)
        drawn.savefig(path, dpi=150, format="png", facecolor="white")


def _panels(drawn: Figure, found: Ranked, chip: str, norm: LogNorm) -> None:
    kernels = list(dict.fromkeys(kernel for kernel, _ in found))
    dims = sorted({dim for _, dim in found})
    height = drawn.get_size_inches()[1]
    across, up = _limits(list(found.values()))
    for (kernel, dim), ranked in found.items():
        row, column = kernels.index(kernel), dims.index(dim)
        bottom = height - 0.45 - UP * (row + 1)
        axes = placed(drawn, 0.6 + ACROSS * column, bottom, ACROSS - 0.45, UP - 0.95)
        _panel(axes, chip, ranked, norm)
        axes.set(xlim=across, ylim=up)
        axes.set_title(_title(kernel, dim, ranked, chip), loc="left", linespacing=1.25)
        if column == 0:
            axes.set_ylabel("time / that of the fastest")
        if row == len(kernels) - 1:
            axes.set_xlabel("registers a thread")


def _bar(axes: Axes, norm: LogNorm) -> None:
    """What the colours mean."""
    from matplotlib.cm import ScalarMappable

    assert axes.figure is not None
    bar = axes.figure.colorbar(ScalarMappable(norm, COLOURS), cax=axes)
    ticks = [1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]
    bar.set_ticks(ticks, labels=[f"{100 * tick:.3g} %" for tick in ticks])
    bar.minorticks_off()
    bar.set_label("theoretical occupancy")


def _legend(drawn: Figure) -> None:
    """What the markers mean."""
    from matplotlib.lines import Line2D

    width, height = drawn.get_size_inches()
    point: Any = {"marker": "o", "ls": "none", "color": INK}
    ring: Any = {"ms": 10, "mfc": "none", "color": VERMILION, "mew": 1.6}
    marks = [
        Line2D([], [], **point, ms=5, label="larger: more occupancy"),
        Line2D([], [], **point | {"marker": "X"}, ms=6, label="spills"),
        Line2D([], [], **point | ring, label="shipped"),
    ]
    drawn.legend(handles=marks, loc="lower left", bbox_to_anchor=(0.4 / width, 0.05 / height), ncols=3,
                 handletextpad=0.3, columnspacing=1.4)  # fmt: skip


def _panel(axes: Axes, chip: str, ranked: Sequence[TileEntry], norm: LogNorm) -> None:
    """The tiles of a kernel and head dimension."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    best = ranked[0]
    for entry in reversed(ranked):  # the fast ones on top
        x, y = entry.registers, min(entry.time / best.time, SLOWEST)
        held = _occupancy(entry, chip)
        colour: Any = {"c": [held], "cmap": COLOURS, "norm": norm} if held else {"color": UNKNOWN}
        axes.scatter([x], [y], s=_area(held), marker="X" if entry.spilled else "o", alpha=0.85, lw=0.5,
                     edgecolors="white", zorder=2, **colour)  # fmt: skip
        if entry.shipped:
            axes.scatter([x], [y], s=_area(held) + 90, facecolors="none", edgecolors=VERMILION, lw=1.6,
                         zorder=3)  # fmt: skip
    axes.set_yscale("log")
    axes.axvline(255, color=INK, lw=0.5, ls=":", zorder=0)
    axes.axhline(1, color=INK, lw=0.5, ls=":", zorder=0)
    axes.yaxis.set_major_locator(FixedLocator([1, 1.5, 2, 3, 4, 6, 8]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"≥{y:g}" if y == SLOWEST else f"{y:g}"))


def _limits(ranked: Sequence[Sequence[TileEntry]]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Of both axes, the same for all panels."""
    fewest = min(entry.registers for of in ranked for entry in of)
    slowest = max(min(of[-1].time / of[0].time, SLOWEST) for of in ranked)
    return (min(fewest, 160) - 10, 267), (0.85, max(slowest, 2.0) * 1.15)


def _area(occupancy: float) -> float:
    """Of a marker, in square points: that of 6 % can be seen, that of 50 % hides little."""
    return 16 + 130 * min(occupancy, 0.6)


def _occupancy(entry: TileEntry, chip: str) -> float:
    held = entry.residence.get(chip)
    return held.occupancy if held else 0.0


def _title(kernel: str, dim: int, ranked: Sequence[TileEntry], chip: str) -> str:
    """What is seen: the fastest, and the shipped one if that is another."""
    best, shipped = ranked[0], shipped_of(ranked)
    held = best.residence.get(chip)
    blocks = f", {held.blocks} block{'s' * (held.blocks != 1)} an SM" if held else ""
    if shipped is best:
        other = "which is the shipped one"
    elif shipped is None:
        other = "the shipped one has no time"
    else:
        other = f"shipped: {shipped.name}, {shipped.time / best.time:.2f} times as long"
    return f"{kernel}, D = {dim}\nfastest: {best.name}{blocks}\n{other}"


def _sentences(found: Ranked, sweep: TileSweep) -> Iterator[str]:
    """What the panels say together."""
    fastest = [ranked[0] for ranked in found.values()]
    occupancies = [round(100 * held) for entry in fastest if (held := _occupancy(entry, sweep.chip))]
    where = f" at {_range(occupancies)} % occupancy" if occupancies else ""
    registers = _range([entry.registers for entry in fastest])
    yield (
        f"{sweep.device}, {sweep.path}, {sweep.dtype}: the fastest tiles take {registers} registers a thread"
        f"{where}."
    )
    spilling = [entry.time / ranked[0].time for ranked in found.values() for entry in ranked if entry.spilled]
    if spilling:
        yield (
            f"Tiles that spill take at best {min(spilling):.2f} times as long as the fastest, in the median"
            f" {statistics.median(spilling):.2f} times."
        )


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"
