"""Pictures of a run of speed: memory and time against T, the roofline, ratios to each contender.

Each is drawn by one function, for the page (inline SVG, in its colours) and as a PNG on white.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.speed.pairs import CANNOT_TELL, VERDICTS

from .plots import BLUE, FOREGROUND, GREEN, PURPLE, VERMILION, WIDTH, Picture, figure, placed, styled, svg
from .roofline import arithmetic_intensity
from .speed import (
    MARKS,
    contenders,
    contests,
    digits,
    duration,
    geometric_mean,
    groups,
    percent,
    problem,
    rate,
    size,
    versus,
)
from .timings import CONVENTION, PASSES, Curve, Speed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

COLOURS = (BLUE, VERMILION, GREEN, PURPLE, "#e69f00", "#56b4e9", "#8c8c8c")
"""Okabe and Ito's, without black and yellow, which a page may have as its ground; and a grey."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")

LINES = dict(zip(PASSES, ("-", "--", ":"), strict=True))

INK = "#1c1c1a"
"""Text and axes on white."""

DPI = 150

DTYPES = ("float16", "bfloat16")
"""Those that the ceiling, a product of float16, is one for."""

FEWEST_RATIOS = 3
"""Of fewer there is no picture: the table says it."""

LONGEST_NAME = 26
"""Characters of a name in a picture."""


@dataclass(frozen=True)
class Drawing:
    """A figure that is not drawn yet.

    Attributes:
        title, alt, note: as of a `Picture`.
        draw: the figure, with text and axes in a colour.
    """

    title: str
    alt: str
    note: str
    draw: Callable[[str], Figure]

    def picture(self, name: str) -> Picture:
        """For a page, on which `name` is unique."""
        with styled():
            drawn = self.draw(FOREGROUND)
            return Picture(self.title, svg(drawn, name), self.alt, self.note)

    def png(self, path: Path) -> None:
        """A file, with the title above."""
        inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
        with styled(**dict.fromkeys(inked, INK)):
            drawn = self.draw(INK)
            title = "\n".join(textwrap.wrap(self.title, 72, break_on_hyphens=False))
            drawn.text(0.02, 1.01, _plain(title), va="bottom", fontsize=9, fontweight="bold")
            drawn.savefig(path, dpi=DPI, facecolor="white", bbox_inches="tight", pad_inches=0.12)


def styles(found: Speed) -> dict[str, tuple[str, str]]:
    """By contender a colour and a marker, the same in all pictures of a run."""
    return {
        name: (COLOURS[n % len(COLOURS)], MARKERS[n % len(MARKERS)])
        for n, name in enumerate(contenders(found))
    }


def _plain(name: str) -> str:
    """Text as it is: matplotlib reads mathematics between dollars, and hides what begins with a line."""
    return f"{' ' if name.startswith('_') else ''}{name}".replace("$", r"\$")


def _short(name: str) -> str:
    return _plain(name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 3] + "...")


def _line(name: str, colour: str, marker: str = "", style: str = "-") -> Line2D:
    """An entry of a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, marker=marker, ls=style, ms=5, lw=1.4, label=name)


def _legend(axes: Axes, handles: Sequence[Line2D], columns: int) -> None:
    """Above the axes."""
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1.01), ncols=columns, borderaxespad=0.2,
        columnspacing=1.2, handlelength=2.2,
    )  # fmt: skip


# ---------------------------------------------------------------- against T

Line = list[tuple[int, float | None]]
"""T, and what was measured there; None where a contender could not run."""


def memory(found: Speed) -> Drawing | None:
    """Peak memory against T; None if there is none, or of one T."""

    def values(curve: Curve) -> list[float | None]:
        return [peak or None for peak in curve.peak]  # a logarithm has no 0

    grown = {
        name: max(exponents)
        for name in contenders(found)
        if (exponents := [c.exponent for c in found.curves if c.contender == name and c.exponent is not None])
    }
    told = [f"{name} T^{grown[name]:.2f}" for name in grown if name == found.implementation]
    others = {name: grown[name] for name in grown if name != found.implementation}
    if others:
        steepest = max(others, key=lambda name: others[name])
        power = f"T^{others[steepest]:.2f}"
        told.append(f"others at most {power} ({steepest})" if len(others) > 1 else f"{steepest} {power}")
    title = f"Growth of the peak memory: {', '.join(told)}." if told else "Peak memory against T."
    return _against_length(
        found,
        title,
        "peak beyond inputs and outputs",
        values,
        lambda low, high: {2.0**power: _round(size(2**power)) for power in _powers(low, high)},
        "Bytes beyond inputs and outputs, where there are any. In the legend the fitted exponents of T,"
        " forward / backward.",
        exponents=True,
    )


def latency(found: Speed) -> Drawing | None:
    """Time against T; None if there is none, or of one T."""
    return _against_length(
        found,
        _longest(found),
        "median time of a call",
        lambda curve: list(curve.seconds),
        _times,
        "Median time of a call, of the GPU alone.",
        exponents=False,
    )


def _longest(found: Speed) -> str:
    """How long calls take at the longest T at which the subject and others ran."""
    for step in PASSES:
        for of in groups(found).values():
            times = {
                c.contender: {n: t for n, t in zip(c.lengths, c.seconds, strict=False) if t}
                for c in of
                if c.step == step
            }
            ours = times.pop(found.implementation, {})
            both = [n for n in ours if any(n in other for other in times.values())]
            if both:
                longest = max(both)
                rivals = {name: of[longest] for name, of in times.items() if longest in of}
                best = min(rivals, key=lambda name: rivals[name])
                least = f"the fastest other, {best}," if len(rivals) > 1 else best
                return (
                    f"At T {longest} the {step} takes {found.implementation} {duration(ours[longest])},"
                    f" {least} {duration(rivals[best])}."
                )
    return "Time of a call against T."


def _against_length(
    found: Speed,
    title: str,
    label: str,
    values: Callable[[Curve], Sequence[float | None]],
    ticks: Callable[[float, float], Mapping[float, str]],
    note: str,
    exponents: bool,
) -> Drawing | None:
    """A line a contender and step, on logarithmic axes: axes for each B H and D."""
    points: dict[tuple[int, int, str, str], Line] = {
        (c.heads, c.dim, c.contender, c.step): [
            (n, value)
            for n, value in zip(c.lengths, values(c), strict=False)
            if n > 0 and (value is None or value > 0)
        ]
        for c in found.curves
    }
    known = [value for line in points.values() for _, value in line if value is not None]
    if not known or len({n for line in points.values() for n, _ in line}) < 2:
        return None
    of_groups = groups(found)
    shown = [name for name in contenders(found) if any(key[2] == name for key in points)]
    steps = [step for step in PASSES if any(key[3] == step for key in points)]
    look = styles(found)
    entries = {name: _with_exponents(name, found.curves) if exponents else _short(name) for name in shown}
    columns = 2 if exponents or max(map(len, entries.values())) > 16 else 3

    def draw(ink: str) -> Figure:
        rows = -(-(len(shown) + len(steps)) // columns)
        top, each = 0.17 * rows + 0.1, 2.7
        height = top + each * len(of_groups)
        drawn = figure(height)
        for place, (heads, dim) in enumerate(of_groups):
            bottom = height - top - each * (place + 1)
            axes = placed(drawn, 0.75, bottom + 0.45, WIDTH - 0.9, each - 0.55)
            for (h, d, name, step), line in points.items():
                if (h, d) == (heads, dim) and line:
                    colour, marker = look[name]
                    y = [math.nan if value is None else value for _, value in line]
                    axes.plot(
                        [n for n, _ in line], y, color=colour, marker=marker, ls=LINES.get(step, "-."),
                        ms=4, lw=2 if name == found.implementation else 1.2,
                        zorder=3 if name == found.implementation else 2,
                    )  # fmt: skip
            _logarithmic(axes, "x", _lengths(points.values()))
            _logarithmic(axes, "y", ticks(min(known), max(known)))
            axes.set_ylim(min(known) / 1.5, max(known) * 1.5)
            axes.set_xlabel(f"T (B H {heads}, D {dim}, causal, float16)")
            axes.set_ylabel(label)
            if not place:
                handles = [_line(entries[name], *look[name]) for name in shown]
                handles += [_line(step, ink, style=LINES[step]) for step in steps]
                _legend(axes, handles, columns)
        return drawn

    ends = [
        f"{name} {step} {_last(line)}" for (_, _, name, step), line in points.items() if _last(line)
    ]  # fmt: skip
    form = size if exponents else duration
    alt = f"{title} Lines of {', '.join(shown)}, from {form(min(known))} to {form(max(known))}."
    if ends:
        alt += f" Not drawn to the end: {'; '.join(ends)}."
    return Drawing(title, alt, f"{note} A line ends where a contender could not run.", draw)


def _last(line: Line) -> str:
    """From which T on there is no figure; empty if there is one to the end."""
    reached = max((n for n, value in line if value is not None), default=0)
    return f"beyond T {reached}" if any(n > reached for n, _ in line) else ""


def _with_exponents(name: str, curves: Iterable[Curve]) -> str:
    own = [c for c in curves if c.contender == name]
    by_step = {c.step: c.exponent for c in own}
    steps = [step for step in PASSES if step in by_step]
    told = ["–" if (found := by_step[step]) is None else f"{found:.2f}" for step in steps]
    return f"{_short(name)}: {' / '.join(told)}"


def _lengths(lines: Iterable[Line]) -> dict[float, str]:
    """Ticks: of many some."""
    lengths = sorted({n for line in lines for n, _ in line})
    chosen = lengths[:: -(-len(lengths) // 8)]
    return {n: f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in chosen}


def _powers(low: float, high: float) -> range:
    """Of 2, at most 8 that span a range."""
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    step = max(1, -(-(last - first) // 7))
    return range(first - first % step, last + 1, step)


def _times(low: float, high: float) -> dict[float, str]:
    """Ticks in seconds: powers of 10, between them more if they are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    between = (1,) if last - first > 3 else (1, 2, 5)
    values = [factor * 10.0**power for power in range(first, last + 1) for factor in between]
    return {value: _round(duration(value)) for value in values}


def _round(text: str) -> str:
    """A tick: "10.0 ms" is "10 ms"."""
    number, _, unit = text.partition(" ")
    return f"{float(number):g} {unit}"


def _logarithmic(axes: Axes, which: str, ticks: Mapping[float, str]) -> None:
    """A logarithmic axis with these ticks and no others."""
    from matplotlib.ticker import NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    if which == "x":
        axes.set_xscale("log")
    else:
        axes.set_yscale("log")
    axis.set_ticks(list(ticks), list(ticks.values()))
    axis.set_minor_locator(NullLocator())
    axis.grid(True, lw=0.4, alpha=0.25)


# ---------------------------------------------------------------- the roofline


def roofline(found: Speed) -> Drawing | None:
    """Rates of the forward beside what the machine can do; None if there are none."""
    points: dict[str, list[tuple[float, float]]] = {}
    for contest in contests(found).get(("forward", "device"), []):
        of = problem(contest.problem)
        if of is None or of.dtype not in DTYPES:
            continue
        x = arithmetic_intensity(round(contest.flops), of.least_bytes)
        for name in contest.entries:
            if (y := rate(contest, name)) is not None:
                points.setdefault(name, []).append((x, y))
    if not points:
        return None
    look = styles(found)
    shown = [name for name in contenders(found) if name in points]
    best = {name: max(y for _, y in points[name]) for name in shown}
    matmul, copy = found.matmul, found.copy
    title = _reached(found, best)
    columns = 3 if max(map(len, shown)) <= 14 else 2

    def draw(ink: str) -> Figure:
        rows = -(-len(shown) // columns)
        top = 0.165 * rows + 0.1
        height = top + 3.0
        drawn = figure(height)
        axes = placed(drawn, 0.62, 0.45, WIDTH - 0.77, 2.45)
        x = [x for line in points.values() for x, _ in line]
        y = [y for line in points.values() for _, y in line]
        ridge = matmul / copy if matmul and copy else None
        left, right = min([*x, ridge or x[0]]) / 2.5, max([*x, ridge or x[0]]) * 1.6
        bottom, upper = min(y) / 2, max([*y, matmul]) * 1.6
        if copy:
            end = ridge or right
            axes.plot([left, end], [copy * left / 1e12, copy * end / 1e12], color=ink, lw=1)
            # where the slope comes into view
            start = max(left, bottom / copy) * 1.15
            axes.annotate(
                f"copy {digits(copy / 1e12)} TB/s", (start, copy * start / 1e12), (4, 0),
                textcoords="offset points", ha="left", va="top", fontsize=8,
            )  # fmt: skip
        if matmul:
            axes.plot([ridge or left, right], [matmul / 1e12] * 2, color=ink, lw=1)
            axes.annotate(
                f"matmul {digits(matmul / 1e12)} TFLOP/s", (right, matmul / 1e12), (0, 3),
                textcoords="offset points", ha="right", va="bottom", fontsize=8,
            )  # fmt: skip
        for name in reversed(shown):  # the subject on top
            colour, marker = look[name]
            axes.plot(
                [x for x, _ in points[name]], [y / 1e12 for _, y in points[name]], marker, color=colour, ms=4,
                mec="none", alpha=0.85,
            )  # fmt: skip
        _logarithmic(axes, "x", {tick: f"{tick:g}" for tick in _decimal(left, right)})
        _logarithmic(axes, "y", {tick: f"{tick:g}" for tick in _decimal(bottom / 1e12, upper / 1e12)})
        axes.set_xlim(left, right)
        axes.set_ylim(bottom / 1e12, upper / 1e12)
        axes.set_xlabel("arithmetic intensity, FLOP a byte")
        axes.set_ylabel("TFLOP/s")
        _legend(axes, [_line(_short(name), *look[name], style="") for name in shown], columns)
        return drawn

    told = ", ".join(f"{name} {digits(best[name] / 1e12)}" for name in shown)
    return Drawing(
        title,
        f"Roofline of the forward. Highest rates in TFLOP/s: {told}.",
        "Forward, device time, float16 and bfloat16; a mark is a problem. Bytes: q, k, v read once, out and"
        " lse written once. Lines: a large float16 product, a large copy, measured in this run."
        f" {CONVENTION}.",
        draw,
    )


def _reached(found: Speed, best: Mapping[str, float]) -> str:
    """How close the subject comes to the ceiling, and the best of the others."""

    others = [name for name in best if name != found.implementation]
    named = [name for name in (found.implementation,) if name in best]
    named += [max(others, key=lambda name: best[name])] if others else []
    if found.matmul:
        told = [f"{name} {percent(best[name] / found.matmul)}" for name in named]
        return f"The forward reaches, of the rate of a large product: {', '.join(told)}."
    told = [f"{name} {digits(best[name] / 1e12)} TFLOP/s" for name in named]
    return f"The forward reaches: {', '.join(told)}."


def _decimal(low: float, high: float) -> list[float]:
    """Ticks 1, 2, 5 of each decade, or its first alone if they are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    ticks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    return [tick for tick in ticks if low <= tick <= high]


# ---------------------------------------------------------------- ratios


def ratios(found: Speed, step: str, measure: str) -> Drawing | None:
    """Ratios of the contests of a step and measure, a row a contender; None if there are hardly any."""
    subject = found.implementation
    points: dict[str, list[tuple[float, str, int | None]]] = {}
    for contest in contests(found).get((step, measure), []):
        of = problem(contest.problem)
        for name in contest.entries:
            against = versus(contest, subject, name) if name != subject else None
            if against is not None and against.ratio is not None:
                dim = of.dim if of else None
                points.setdefault(name, []).append((against.ratio.median, against.verdict, dim))
    if sum(map(len, points.values())) < FEWEST_RATIOS:
        return None
    shown = [name for name in contenders(found) if name in points]
    every = {dim for line in points.values() for *_, dim in line}
    dims = sorted(every, key=lambda dim: (dim is None, dim or 0))
    counts = {
        given: sum(verdict == given for line in points.values() for _, verdict, _ in line)
        for given in VERDICTS
    }  # fmt: skip
    total = sum(counts.values())
    told = ", ".join(f"{given} in {count}" for given, count in counts.items() if count)
    looks = [(COLOURS[n % len(COLOURS)], MARKERS[n % len(MARKERS)]) for n in range(len(dims))]
    averages = {name: geometric_mean(value for value, *_ in points[name]) for name in shown}

    def draw(ink: str) -> Figure:
        height = 0.3 * len(shown) + 1.05
        drawn = figure(height)
        axes = placed(drawn, 1.25, 0.45, WIDTH - 1.4, height - 0.85)
        values = [value for line in points.values() for value, *_ in line]
        low, high = min(*values, 1 / 1.2) / 1.08, max(*values, 1.2) * 1.08
        axes.axvline(1, color=ink, lw=0.9)
        for row, name in enumerate(shown):
            for value, verdict, dim in points[name]:
                n = dims.index(dim)
                colour, marker = looks[n]
                offset = (n - (len(dims) - 1) / 2) * 0.6 / max(len(dims), 3)
                axes.plot(
                    value, row + offset, marker, color=colour, ms=4.5, mew=1,
                    mfc="none" if verdict == CANNOT_TELL else colour, alpha=0.8,
                )  # fmt: skip
            axes.vlines(averages[name], row - 0.4, row + 0.4, ink, lw=1.6)
        _logarithmic(axes, "x", {tick: f"{tick:g}x" for tick in _of_ratios(low, high)})
        axes.set_xlim(low, high)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_yticks(range(len(shown)), list(map(_short, shown)))
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(_plain(f"time of the other / time of {subject}"))
        handles = [
            _line("other" if dim is None else f"D {dim}", *look, style="")
            for dim, look in zip(dims, looks, strict=True)
        ]
        axes.legend(
            handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=min(len(dims), 6),
            borderaxespad=0.1, columnspacing=0.9, handletextpad=0.1,
        )  # fmt: skip
        return drawn

    return Drawing(
        f"{step[:1].upper()}{step[1:]}, {measure}: of {total} ratios {subject} is {told}.",
        f"Ratios of time to {subject}; geometric means: "
        + ", ".join(f"{name} {digits(averages[name])}x" for name in shown) + ".",
        f"A mark is a problem; right of 1x {subject} is faster. Hollow: cannot tell ({MARKS[CANNOT_TELL]})."
        " The line in a row is the geometric mean.",
        draw,
    )  # fmt: skip


def _of_ratios(low: float, high: float) -> list[float]:
    """Ticks: the more the narrower the range."""
    wide = math.log10(high / low)
    if wide > 1.6:
        return [tick for tick in (*_decimal(low, high), 1.0) if low <= tick <= high]
    fine = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4) if wide < 0.45 else (0.7, 1.0, 1.5, 3.0)
    return sorted({tick for tick in (0.2, 0.3, 0.5, *fine, 2.0, 5.0, 10.0) if low <= tick <= high})
