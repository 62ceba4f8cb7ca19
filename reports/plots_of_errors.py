"""Pictures of where a tensor is wrong: rows by head dimension, and the largest error along each axis."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .errors import ReportError
from .plots import FOREGROUND, PURPLE, VERMILION, WIDTH, Picture, figure, placed, styled, svg
from .records import LONGEST, NONFINITE, ErrorMap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize

ROWS = {"out": "query", "lse": "query", "dq": "query", "dk": "key", "dv": "key"}

SMALL = 0.05
"""|z| below this has the colour, and the bar, of nothing."""

MOST_TILES = 12
"""Tile edges that are labelled; of more, some."""

KINDS = ("none", "#b8b8b8", "#e69f00", "#56b4e9", "#0072b2", PURPLE)
"""Colours of `records.NONFINITE`."""


def cells(of: ErrorMap) -> NDArray[np.float32]:
    """Signed z by cell, rows x columns.

    Raises:
        ReportError: if they are not as many as the map says.
    """
    return _unpacked(of, of.z, "<f2").astype(np.float32)


def kinds(of: ErrorMap) -> NDArray[np.uint8] | None:
    """`NONFINITE` by cell; None if all is finite as it should be."""
    return _unpacked(of, of.nonfinite, "u1") if of.nonfinite else None


def checked(of: ErrorMap) -> ErrorMap:
    """The same, if it can be drawn: a file may come from anywhere.

    Raises:
        ReportError: if it cannot; says what is wrong with it.
    """
    dimensions = 3 if of.tensor == "lse" else 4
    if of.tensor not in ROWS or len(of.shape) != dimensions or min(of.shape) < 1:
        raise ReportError(f"a map of {of.tensor!r} of shape {list(of.shape)}: there is no such tensor")
    sizes = of.shape[2], _columns(of)
    if of.limit <= 0 or min(of.step) < 1 or any(
        not 0 < cells <= LARGEST or cells != -(-size // step)
        for cells, size, step in zip(of.cells, sizes, of.step, strict=True)
    ):  # fmt: skip
        what = f"{of.cells} cells of {of.step} for shape {list(of.shape)}"
        raise ReportError(f"a map of {of.tensor} has {what}, limit {of.limit}")
    if any(place is not None and len(place) != dimensions for place in (of.first, of.worst)):
        raise ReportError(f"a map of {of.tensor} of shape {list(of.shape)} has a place of another shape")
    if not (of.by_batch and of.by_head and of.by_row):
        raise ReportError(f"a map of {of.tensor} has no numbers along an axis")
    return of


LARGEST = 1024
"""Most cells along an axis that are drawn."""


def _unpacked(of: ErrorMap, packed: bytes, dtype: str) -> NDArray[Any]:
    count = of.cells[0] * of.cells[1]
    try:
        return np.frombuffer(zlib.decompress(packed), dtype, count).reshape(of.cells)
    except (ValueError, zlib.error) as error:
        raise ReportError(f"the map of {of.tensor} is not one of {of.cells} cells ({error})") from None


def pictures(of: ErrorMap, name: str) -> list[Picture]:
    """The error map of a tensor with its marginals and, where something is not finite, a map of that.

    Args:
        of: what is drawn.
        name: unique on the page.
    """
    found = [_errors(checked(of), name)]
    if (those := kinds(of)) is not None:
        found.append(_nonfinite(of, those, f"{name}-nonfinite"))
    return found


def in_words(of: ErrorMap) -> Picture:
    """The same without a picture."""
    return Picture(headline(checked(of)) + ".", "", "", described(of))


def headline(of: ErrorMap) -> str:
    """Where a tensor is wrong, in a sentence."""
    where = f"{of.tensor} of {shown(of)}"
    if of.rows is None or of.columns is None:
        return f"{where}: no single element is beyond its limit; together they are too far off"
    rows = _extent(of.rows, of.shape[2], f"{ROWS[of.tensor]} row")
    columns = _extent(of.columns, _columns(of), "head" if of.tensor == "lse" else "column")
    if SCATTERED in rows and SCATTERED in columns:
        return f"{where} is wrong here and there"
    told = "; ".join(filter(None, (rows, columns)))
    return f"{where} is wrong " + (f"in {told}" if told else "all over") + (_peak(of) if not rows else "")


def _peak(of: ErrorMap) -> str:
    """Where all rows are wrong, one stretch of them that is far worse than the others."""
    z = np.sqrt((cells(of) ** 2).mean(1))
    worse = z > PEAK * np.median(z)
    numbers = np.flatnonzero(worse)
    if not 0 < len(numbers) < len(z) / 2 or len(numbers) != numbers[-1] - numbers[0] + 1:
        return ""
    first, last = int(numbers[0]) * of.step[0], min((int(numbers[-1]) + 1) * of.step[0], of.shape[2]) - 1
    kind = ROWS[of.tensor]
    return f", worst in {kind} row{f's {first} to {last}' if last > first else f' {first}'}"


PEAK = 2.5
"""Times the median of the rows: far worse."""


def _columns(of: ErrorMap) -> int:
    """Of the picture, in elements."""
    return of.shape[1] if of.tensor == "lse" else of.shape[3]


SCATTERED = "of the"


def _extent(wrong: tuple[int, int, int], length: int, what: str) -> str:
    """Which of the rows or columns are wrong; empty if all are."""
    first, last, count = wrong
    if count == length:
        return ""
    if count == 1:
        return f"only {what} {first}, of {length}"
    if count == last - first + 1:
        return f"{what}s {first} to {last}, of {length}"
    if last - first + 1 > 0.8 * length:
        return f"{count} {SCATTERED} {length} {what}s"
    return f"some of {what}s {first} to {last}, of {length}"


def shown(of: ErrorMap) -> str:
    """Which batch entry or sequence, and which head."""
    entry = f"batch entry {of.entry}" if of.sequence is None else f"sequence {of.sequence}"
    return entry if of.tensor == "lse" else f"{entry}, head {of.head}"


def _errors(of: ErrorMap, name: str) -> Picture:
    z = cells(of)
    many = [(label, values) for label, values in
            (("batch entry" if of.sequence is None else "sequence", of.by_batch), ("head", of.by_head))
            if len(values) > 1]  # fmt: skip
    high = _height(of)
    with styled():
        under = 0.9 if many else 0.0
        drawn = figure(high + 0.65 + under)
        axes = placed(drawn, 0.55, under + 0.55, 2.5, high)
        beside = placed(drawn, 3.12, under + 0.55, 0.62, high, sharey=axes)
        norm, colours = _scale(z, of.limit)
        image = axes.imshow(
            z, norm=norm, cmap=colours, aspect="auto", interpolation="none", extent=_extent_of(of)
        )
        _over(axes, of)
        _grid(axes, of)
        _marks(axes, of)
        if np.abs(z).max() > SMALL:  # else there is no colour to explain
            bar = drawn.colorbar(
                image, cax=placed(drawn, 3.83, under + 0.55, 0.11, high), ticks=_ticks(norm, of.limit)
            )
            bar.ax.set_yticklabels([_tick(tick, of.limit) for tick in bar.get_ticks()])
            bar.ax.minorticks_off()
            bar.outline.set_visible(False)
            drawn.text(3.83 / WIDTH, (under + 0.25) / drawn.get_figheight(), "z, in σ")
        _by_row(beside, of)
        if many:
            width = 3.95 / len(many)
            for n, (label, values) in enumerate(many):
                low = placed(drawn, 0.55 + n * width, 0.45, width - 0.35 * (n < len(many) - 1), 0.38)
                chosen = of.head if label == "head" else of.entry if of.sequence is None else of.sequence
                _bars(low, values, label, of, chosen)
                if n == 0:
                    low.set_ylabel("max |z|")
        text = svg(drawn, name)
    return Picture(
        headline(of) + ".", text, f"Map of the error of {of.tensor}. {described(of)}", described(of)
    )


def described(of: ErrorMap) -> str:
    """The numbers of a map in words."""
    where = f"first at {list(of.first)}, " if of.first is not None else ""
    largest = "not finite" if of.worst_z is None else f"z = {of.worst_z:.4g}"
    sentence = (
        f"{of.wrong:,} of {of.elements:,} judged elements are beyond a limit; {where}worst at"
        f" {list(of.worst) if of.worst else '?'}: {largest} (at most {of.limit:.3g})."
    )
    if max(of.step) > 1:
        sentence += f" A cell is {of.step[0]} x {of.step[1]} elements and shows the worst of them."
    return sentence


def _height(of: ErrorMap) -> float:
    """Of the map, inches: more for more rows."""
    return 1.3 + 1.3 * min(of.cells[0] / 64, 1)


def _extent_of(of: ErrorMap) -> tuple[float, float, float, float]:
    rows, columns = of.cells
    return (0, columns * of.step[1], rows * of.step[0], 0)


def _scale(z: NDArray[np.float32], limit: float) -> tuple[Normalize, Colormap]:
    """Logarithmic beyond the limit, where the colours jump from pale to strong; blue is below 0."""
    from matplotlib.colors import LinearSegmentedColormap, Normalize, SymLogNorm

    largest = float(np.abs(z).max(initial=0.0))
    pale = [(0.0, "#7fa8c9"), (0.5, "#f4f4f2"), (1.0, "#dba985")]
    if largest <= limit:
        end = max(largest, SMALL)
        return Normalize(-end, end), LinearSegmentedColormap.from_list("within", pale)
    norm = SymLogNorm(linthresh=limit, linscale=0.5, vmin=-largest, vmax=largest)
    edge = float(norm(limit))
    inner = [(1 - edge, "#bccbd8"), (0.5, "#f4f4f2"), (edge, "#ddcbbb")]
    outer = [(0.0, "#00264d"), (1 - edge, "#3a8fd0")], [(edge, "#f08a3c"), (1.0, "#6b1a00")]
    return norm, LinearSegmentedColormap.from_list("beyond", [*outer[0], *inner, *outer[1]])


def _ticks(norm: Normalize, limit: float) -> list[float]:
    end = float(norm.vmax or 0)
    if end <= limit:
        return [-end, 0, end]
    powers = [10.0**p for p in range(1, 6) if limit * 2 < 10.0**p <= end]
    above = [limit, *(powers[-2:] if powers else [])]
    return [*(-x for x in reversed(above)), 0, *above]


def _tick(value: float, limit: float) -> str:
    if math.isclose(abs(value), limit):
        return f"limit {'-' if value < 0 else ''}{limit:.2g}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0e}".replace("e+0", "e")


def _over(axes: Axes, of: ErrorMap) -> None:
    """What is not finite and should be, or the reverse, has no z: its cells have a colour of their own."""
    from matplotlib.colors import to_rgba

    those = kinds(of)
    if those is not None and (wrong := those >= 2).any():
        layer = np.zeros((*those.shape, 4))
        layer[wrong] = to_rgba(PURPLE)
        axes.imshow(layer, aspect="auto", interpolation="none", extent=_extent_of(of))


def _grid(axes: Axes, of: ErrorMap) -> None:
    """Edges of the tiles, numbered by row; without tiles the rows are numbered as they come."""
    S, D = of.shape[2], _columns(of)
    axes.set_xlim(0, D)
    axes.set_ylim(S, 0)
    axes.set_ylabel(f"{ROWS[of.tensor]} row" + (f" (lines: tiles of {of.tile})" if of.tile else ""))
    every = max(1, _round(D / 4))
    if of.tensor == "lse":
        axes.set_xlabel("head")
        axes.set_xticks([x + 0.5 for x in range(0, D, every)], [str(x) for x in range(0, D, every)])
    else:
        axes.set_xlabel("head dimension")
        axes.set_xticks(list(range(0, D, every)))
    if of.tile and of.tile < S:
        edges = list(range(0, S, of.tile))
        for edge in edges[1:] if len(edges) <= 4 * MOST_TILES else ():
            axes.axhline(edge, color="#000000", lw=0.8, alpha=0.8)
        every = -(-len(edges) // MOST_TILES)
        axes.set_yticks([*edges[::every]])
    else:
        axes.set_yticks(list(range(0, S, max(1, _round(S / 5)))))


def _round(x: float) -> int:
    """The nearest of 1, 2, 4, 8, ...: lengths are powers of two, or near them."""
    return 1 << max(0, round(math.log2(max(x, 1))))


def _marks(axes: Axes, of: ErrorMap) -> None:
    """A ring about the worst element."""
    if of.worst is None:
        return
    _, head, row, *rest = of.worst
    x, y = (rest[0] if rest else head) + 0.5, row + 0.5
    for colour, width in (("#ffffff", 2.6), ("#000000", 1.1)):
        axes.plot([x], [y], "o", ms=8, mfc="none", mec=colour, mew=width, clip_on=False)


def _by_row(axes: Axes, of: ErrorMap) -> None:
    step = -(-of.shape[2] // LONGEST)
    heights, infinite = _heights(of.by_row, of.limit)
    edges = [min(i * step, of.shape[2]) for i in range(len(heights) + 1)]
    low = _low(heights, of.limit)
    axes.stairs(
        heights, edges, orientation="horizontal", fill=True, color=FOREGROUND, alpha=0.35, baseline=low
    )
    over = [h if h > of.limit else low for h in heights]
    axes.stairs(over, edges, orientation="horizontal", fill=True, color=VERMILION, baseline=low)
    axes.stairs([h if i else low for h, i in zip(heights, infinite, strict=True)], edges,
                orientation="horizontal", fill=True, color=PURPLE, baseline=low)  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(low, max(*heights, of.limit) * 1.5)
    axes.axvline(of.limit, color=FOREGROUND, lw=0.9, ls="--")
    axes.set_xticks([of.limit], [f"{of.limit:.2g}"])
    axes.minorticks_off()
    axes.tick_params(labelleft=False)
    axes.set_xlabel("max |z|\nby row")


def _heights(values: Sequence[float | None], limit: float) -> tuple[list[float], list[bool]]:
    """For a logarithmic axis; what is not finite is as high as the highest, and told apart by its colour."""
    highest = max((v for v in values if v is not None), default=limit)
    top = max(highest, 10 * limit)
    return [top if v is None else max(v, SMALL) for v in values], [v is None for v in values]


def _low(heights: Sequence[float], limit: float) -> float:
    """Where the axis begins: where all is far beyond the limit, differences are still to be seen."""
    return max(min(*heights, limit) / 4, SMALL / 2)


def _bars(axes: Axes, values: Sequence[float | None], label: str, of: ErrorMap, chosen: int | None) -> None:
    heights, infinite = _heights(values, of.limit)
    low = _low(heights, of.limit)
    count = {"head": of.shape[1], "batch entry": of.shape[0]}.get(label, len(values))
    step = -(-count // LONGEST) if label != "sequence" else 1
    for number, (height, is_infinite) in enumerate(zip(heights, infinite, strict=True)):
        over = height > of.limit
        colour = PURPLE if is_infinite else VERMILION if over else FOREGROUND
        axes.bar(number * step, height - low, 0.8 * step, low, color=colour, alpha=1 if over else 0.35)
    axes.set_yscale("log")
    axes.set_ylim(low, max(*heights, of.limit) * 1.5)
    axes.axhline(of.limit, color=FOREGROUND, lw=0.9, ls="--")
    axes.set_yticks([of.limit], [f"{of.limit:.2g}"])
    axes.minorticks_off()
    every = max(1, _round(len(values) / 8))
    axes.set_xticks([n * step for n in range(0, len(values), every)])
    axes.set_xlabel(label + (f" (map: {chosen})" if chosen is not None else ""))


def _nonfinite(of: ErrorMap, those: NDArray[np.uint8], name: str) -> Picture:
    from matplotlib.colors import ListedColormap, to_rgba
    from matplotlib.patches import Patch

    present = [kind for kind in range(1, len(NONFINITE)) if (those == kind).any()]
    with styled():
        high, above = _height(of), 0.08 + 0.22 * -(-len(present) // 2)
        drawn = figure(high + 0.5 + above, WIDTH * 0.75)
        axes = placed(drawn, 0.55, 0.5, 2.75, high)
        colours = ListedColormap([(0.5, 0.5, 0.5, 0.12), *(to_rgba(colour) for colour in KINDS[1:])])
        axes.imshow(
            those, cmap=colours, vmin=-0.5, vmax=len(KINDS) - 0.5, aspect="auto", interpolation="none",
            extent=_extent_of(of),
        )  # fmt: skip
        _grid(axes, of)
        axes.legend(
            handles=[Patch(color=KINDS[kind], label=NONFINITE[kind]) for kind in present],
            loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2,
        )  # fmt: skip
        text = svg(drawn, name)
    counts = ", ".join(f"{NONFINITE[kind]}: {int((those == kind).sum())}" for kind in present)
    return Picture(
        f"NaN and infinities in {of.tensor} of {shown(of)}.", text,
        f"Map of what is not finite in {of.tensor}: cells of {counts}.",
        f"Cells by what they hold: {counts}.",
    )  # fmt: skip
