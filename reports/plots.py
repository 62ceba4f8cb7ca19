"""Figures as inline SVG, in the colours of the page around them, and those of a whole run.

matplotlib is imported where something is drawn: a page without figures, and `--help`, need none of it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from .capabilities import parsed
from .records import Z_END, Z_STEP, Record, TensorSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOREGROUND = "#123456"
"""Stands for the colour of the page's text, which a reader in the dark has light."""

BLUE, VERMILION, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
"""Of Okabe and Ito's palette: apart for the colour blind too."""

DTYPES = {"float16": (BLUE, "o"), "bfloat16": (VERMILION, "s"), "float32": (GREEN, "^")}
"""Colour and marker: neither is needed to tell them apart."""

WIDTH = 4.6
"""Inches; a page shows 96 pixels an inch, or as many as a phone has."""


@dataclass(frozen=True)
class Picture:
    """A figure for a page.

    Attributes:
        title: a sentence: what it shows.
        svg: the figure.
        alt: the same for somebody who does not see it.
        note: how to read it.
    """

    title: str
    svg: str
    alt: str
    note: str = ""


def figure(height: float, width: float = WIDTH) -> Figure:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def placed(drawn: Figure, left: float, bottom: float, width: float, height: float, **more: Any) -> Axes:
    """Axes at a place of a figure, in inches: an engine that finds places takes longer than all drawing."""
    across, up = drawn.get_size_inches()
    return drawn.add_axes((left / across, bottom / up, width / across, height / up), **more)


STYLE: Mapping[str, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.labelsize": 9,
    "axes.titlesize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), FOREGROUND
    ),
}  # fmt: skip


def styled(**more: Any) -> AbstractContextManager[None]:
    """Around what is drawn: the style of all figures."""
    from matplotlib import rc_context

    changes: Any = {**STYLE, **more}
    return rc_context(changes)


def svg(drawn: Figure, name: str) -> str:
    """A figure as an element of a page; `name` makes its ids its own."""
    text = StringIO()
    with styled(**{"svg.hashsalt": name}):
        drawn.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    found = text.getvalue()
    found = found[found.index("<svg") :]
    found = re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
    found = re.sub(r'<g id="[A-Za-z][\w.]*_\d+"', "<g", found)  # nothing refers to them
    found = re.sub(r'(<svg[^>]*?) width="([\d.]+)pt" height="[\d.]+pt"', _sized, found, count=1)
    found = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", found)
    found = re.sub(r"\n\s*", "\n", found)
    return found.replace(FOREGROUND, "currentColor").replace(
        ' xmlns:xlink="http://www.w3.org/1999/xlink"', ""
    )


def _sized(match: re.Match[str]) -> str:
    return f'{match[1]} style="max-width: {float(match[2]) / 72:.2f}in"'


# ---------------------------------------------------------------- a whole run


def of_run(found: Sequence[Record]) -> list[Picture]:
    """The figures of a run: errors by length and dtype, and how z is distributed."""
    executed = [record for record in found if record.tensors]
    if not executed:
        return []
    drawn = [
        _by_length(executed, "rms_z", "rms of z"),
        _by_length(executed, "budget_use", "largest error / hard bound"),
        _distribution(executed),
    ]  # fmt: skip
    return [picture for picture in drawn if picture is not None]


def lengths(record: Record) -> tuple[int, int]:
    """(Sq, Sk) of a record's case; of a ragged batch of its longest sequence of each."""
    pairs = parsed(record.case).pairs
    return max((q for q, _ in pairs), default=0), max((k for _, k in pairs), default=0)


def _by_length(found: Sequence[Record], field: str, label: str) -> Picture | None:
    points: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in found:
        octave = max(max(lengths(record)), 1).bit_length() - 1
        for tensor in record.tensors.values():
            if tensor.judged:
                value = getattr(tensor, field)
                points[record.dtype][octave].append(math.inf if value is None else value)
    if not points:
        return None
    with styled():
        drawn = figure(2.7)
        axes = placed(drawn, 0.5, 0.45, WIDTH - 0.65, 1.9)
        largest = 0.0
        for number, (dtype, (colour, marker)) in enumerate(DTYPES.items()):
            by_octave = sorted(points.get(dtype, {}).items())
            if not by_octave:
                continue
            x = [octave + 0.5 + (number - 1) * 0.13 for octave, _ in by_octave]
            middle = [_quantile(values, 0.5) for _, values in by_octave]
            most = [_quantile(values, 1.0) for _, values in by_octave]
            largest = max(largest, *most)
            axes.vlines(x, middle, most, colour, lw=1, alpha=0.6)
            axes.plot(x, middle, marker, color=colour, ms=4.5, label=dtype, ls="none")
            axes.plot(x, most, "_", color=colour, ms=7)
        axes.axhline(1, color=FOREGROUND, lw=0.9, ls="--")
        axes.text(
            0.01, 1.02, "predicted at most", transform=axes.get_yaxis_transform(), va="bottom", fontsize=8
        )
        highest = max(largest if math.isfinite(largest) else 1e6, 1.0)
        if highest > 4:
            axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(0, highest * 1.18)
        octaves = sorted({octave for by_octave in points.values() for octave in by_octave})
        axes.set_xlim(octaves[0] - 0.1, octaves[-1] + 1.1)
        axes.set_xticks(
            range(octaves[0], octaves[-1] + 2), [str(2**o) for o in range(octaves[0], octaves[-1] + 2)]
        )
        axes.set_xlabel("longest sequence: max(Sq, Sk)")
        axes.set_ylabel(label)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, handletextpad=0.1)
        text = svg(drawn, field)
    if field == "rms_z":
        sentence = (
            f"The rms of z stays below 1 at every length, as predicted: at most {largest:.2g}."
            if largest < 1 else "The rms of z is larger than predicted."
        )  # fmt: skip
    else:
        sentence = f"The largest error is {largest:.3g} of its hard bound."
    return Picture(
        sentence,
        text,
        f"{label} by sequence length, from {2 ** octaves[0]} to {2 ** (octaves[-1] + 1)}, and dtype:"
        f" the largest is {largest:.3g}.",
        "A mark is the median of all tensors of that length and dtype, the line above it ends at the largest."
        + (" The error model predicts at most 1: sigma is an upper estimate." if field == "rms_z" else ""),
    )


def _quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


def _distribution(found: Sequence[Record]) -> Picture | None:
    totals = {dtype: histogram(record for record in found if record.dtype == dtype) for dtype in DTYPES}
    totals = {dtype: counts for dtype, counts in totals.items() if sum(counts)}
    if not totals:
        return None
    bins = round(2 * Z_END / Z_STEP)
    edges = [-Z_END + Z_STEP * i for i in range(bins + 1)]
    with styled():
        drawn = figure(2.7)
        axes = placed(drawn, 0.62, 0.45, WIDTH - 0.77, 1.6)
        for (dtype, counts), style in zip(totals.items(), ("-", "--", ":"), strict=False):
            n = sum(counts)
            shares = [count / n for count in counts[:-1]]
            heights = [shares[0] / Z_STEP, *(share / Z_STEP for share in shares[1:-1]), shares[-1] / Z_STEP]
            x = [edges[0] - Z_STEP, *edges, edges[-1] + Z_STEP]
            axes.stairs([max(h, 1e-12) for h in heights], x, color=DTYPES[dtype][0], ls=style, lw=1.6,
                        label=f"{dtype}: {counts[-1] / n:.0%} at 0")  # fmt: skip
        grid = [edges[0] - Z_STEP + 0.05 * i for i in range(round((2 * Z_END + 2 * Z_STEP) / 0.05) + 1)]
        axes.plot(grid, [math.exp(-z * z / 2) / math.sqrt(2 * math.pi) for z in grid], color=FOREGROUND, lw=1,
                  label="normal, variance 1")  # fmt: skip
        axes.vlines([-math.sqrt(3), math.sqrt(3)], 1e-9, 1 / (2 * math.sqrt(3)), FOREGROUND, lw=0.8, ls=":")
        axes.hlines(1 / (2 * math.sqrt(3)), -math.sqrt(3), math.sqrt(3), FOREGROUND, lw=0.8, ls=":",
                    label="uniform, variance 1")  # fmt: skip
        axes.set_yscale("log")
        axes.set_ylim(1e-7, 2)
        axes.set_xlim(edges[0] - Z_STEP, edges[-1] + Z_STEP)
        axes.set_xlabel("z: distance to the legal values in standard deviations")
        axes.set_ylabel("density")
        ticks = list(range(-int(Z_END), int(Z_END) + 1, 2))
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        text = svg(drawn, "distribution")
    beyond = {dtype: (counts[0] + counts[-2]) / sum(counts) for dtype, counts in totals.items()}
    narrow = all(share < 1e-4 for share in beyond.values())
    return Picture(
        "Rounding errors are narrower than the error model allows." if narrow
        else "Errors lie far outside of what the error model predicts.",
        text,
        "Density of z by dtype, on a logarithmic scale, beside a normal and a uniform density of variance 1."
        f" Share beyond {Z_END:g} standard deviations: "
        + ", ".join(f"{dtype} {share:.2g}" for dtype, share in beyond.items()) + ".",
        f"All elements of all tensors. The outermost steps hold all beyond ±{Z_END:g}. One rounding is"
        " uniform, a sum of many normal; what lies between the legal values has z = 0 and is in no step.",
    )  # fmt: skip


def histogram(found: Iterable[Record]) -> tuple[int, ...]:
    """Elements of all tensors by z, as of `TensorSummary.histogram`."""
    of_tensors: list[TensorSummary] = [t for record in found for t in record.tensors.values() if t.histogram]
    return tuple(map(sum, zip(*(t.histogram for t in of_tensors), strict=True)))
