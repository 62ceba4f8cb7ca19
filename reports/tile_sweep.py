"""Tile sizes: measured time beside registers, spills, shared memory, resident blocks and occupancy.

    python -m reports.tile_sweep FILE      writes the table and the plot of a sweep beside its file again

`tests.speed.sweep` measures and writes the file. Times are in seconds, of the kernel alone, memory in bytes.
Residence is worked out from registers and shared memory (`tests.speed.occupancy`), not measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tests.speed import pairs
from tests.speed.occupancy import KIB, Residence

from . import versioned
from .errors import ReportError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE, PAGE, PLOT = "tiles.json", "tiles.md", "tiles.png"
"""What a sweep leaves in its folder."""

VERSION = 1

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


class TileEntry(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A tile of a kernel at a head dimension.

    Attributes:
        kernel: "forward", "dkdv", "dq".
        dim: head dimension.
        BM, BN, warps, stages: as of `kernels.tiles.Tile`.
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
    reason: str = ""
    shipped: bool = False
    programs: dict[str, Program] = {}
    residence: dict[str, Residence] = {}
    seconds: dict[str, list[float]] = {}
    final: dict[str, list[float]] = {}

    @property
    def tile(self) -> tuple[int, int, int, int]:
        return self.BM, self.BN, self.warps, self.stages

    @property
    def name(self) -> str:
        return f"{self.BM}x{self.BN} w{self.warps} s{self.stages}"

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
        """Seconds: geometric mean over the problems of the median of the rounds."""
        return statistics.geometric_mean([statistics.median(rounds) for rounds in self.seconds.values()])


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


# ---------------------------------------------------------------- what can be claimed


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The best tile of a kernel and head dimension that spills nothing, against the shipped one.

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

    The final rounds decide, which no tile was chosen by: the smallest of many medians is too small. What
    spills is left out: it could not be shipped.
    """
    shipped = shipped_of(entries)
    others = [entry for entry in entries if entry.final and not entry.shipped and not entry.spilled]
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
    """One for each kernel and head dimension where something was compared."""
    found = [claim(entries, sweep.controls.get(f"{kernel} {dim}", {}))
             for (kernel, dim), entries in groups(sweep).items()]  # fmt: skip
    return [of for of in found if of is not None]


def _by_round(seconds: Mapping[str, Sequence[float]]) -> list[float]:
    """Of each round the geometric mean over the problems."""
    return [statistics.geometric_mean(of_round) for of_round in zip(*seconds.values(), strict=False)]


# ---------------------------------------------------------------- for a reader


def markdown(sweep: TileSweep) -> str:
    """The page: a table for each kernel and head dimension, and what follows for the tile table."""
    versions = ", ".join(f"{name} {version}" for name, version in sweep.versions.items())
    counts = Counter(entry.status for entry in sweep.entries)
    lines = [
        f"### Tiles on {sweep.device}, {sweep.path}",
        "",
        f"{sweep.dtype}, {sweep.tokens:,} tokens, H D = 2048; {versions}; {sweep.seconds:.0f} s."
        f" Of {len(sweep.entries)} tiles"
        f" {', '.join(f'{counts[status]} {status}' for status in STATUSES if counts[status])}.",
        "",
        "Times are of the kernel alone, on a cold L2, with the host hidden: medians over the rounds, in which"
        " all tiles take turns. “x shipped” is the shipped tile's time over this one's, geometric mean over"
        " the problems: above 1 is faster. Registers and spilled bytes are of a thread, shared memory is of a"
        " block; of the causal and the full kernel the one that takes more. Blocks are those that a"
        " multiprocessor can hold at once, and what allows no more; occupancy is theoretical: resident warps"
        " over most warps.",
    ]
    if sweep.compiled_for != sweep.chip:
        lines += [
            "",
            f"The code is that for {sweep.compiled_for}, assembled for {sweep.chip} and timed there: on"
            f" {sweep.compiled_for} itself registers may differ a little, and times do.",
        ]
    for (kernel, dim), entries in groups(sweep).items():
        lines += ["", f"#### {kernel}, D = {dim}", "", *_table(sweep, entries)]
    return "\n".join([*lines, *_for_the_tile_table(sweep)]) + "\n"


def _table(sweep: TileSweep, entries: Sequence[TileEntry]) -> list[str]:
    ranked, shipped = fastest_first(entries), shipped_of(entries)
    lines = []
    if ranked:
        problems = list(ranked[0].seconds)
        chips = list(dict.fromkeys((sweep.chip, sweep.compiled_for)))
        residence = [head for chip in chips for head in (f"blocks, {chip}", "limited by", "occupancy")]
        head = ["BM", "BN", "warps", "stages", *(f"{name}, ms" for name in problems), "x shipped",
                "registers", "spilled, B", "shared, KiB", *residence]  # fmt: skip
        lines = [f"| {' | '.join(head)} |", "|" + "---:|" * len(head)]
        lines += [_row(entry, problems, chips, shipped) for entry in ranked]
        lines.append("")
        if shipped is not None:
            lines.append(f"Bold: the shipped tile, {shipped.name}.")
        else:
            lines.append("The shipped tile has no time: nothing is compared with it.")
    else:
        lines.append("No tile has a time.")
    return [*lines, *_left_out(entries)]


def _row(entry: TileEntry, problems: Sequence[str], chips: Sequence[str], shipped: TileEntry | None) -> str:
    times = [f"{statistics.median(entry.seconds[name]) * 1e3:.3f}" for name in problems]
    ratio = f"{shipped.time / entry.time:.3f}" if shipped is not None else ""
    cells = [*map(str, entry.tile), *times, ratio, str(entry.registers), str(entry.spilled or ""),
             f"{entry.shared / KIB:.5g}"]  # fmt: skip
    for chip in chips:
        held = entry.residence.get(chip)
        cells += [str(held.blocks), ", ".join(held.limits), f"{held.occupancy:.1%}"] if held else [""] * 3
    if entry.shipped:
        cells = [f"**{cell}**" if cell else "" for cell in cells]
    return f"| {' | '.join(cells)} |"


def _left_out(entries: Sequence[TileEntry]) -> list[str]:
    """Those without a time, counted by reason; those that are wrong by name."""
    lines: list[str] = []
    for status in (PRUNED, FAILED, WRONG, UNMEASURED):
        reasons: dict[str, list[TileEntry]] = {}
        for entry in entries:
            if entry.status == status:
                reasons.setdefault(entry.reason, []).append(entry)
        for reason, of in reasons.items():
            names = "" if status == PRUNED else f" ({', '.join(entry.name for entry in of)})"
            words = reason.replace("|", "\\|").replace("\n", " ")
            lines.append(f"- {len(of)} {status}: {words}{names}")
    return ["", *lines] if lines else []


def _for_the_tile_table(sweep: TileSweep) -> list[str]:
    lines = ["", "### For the tile table", ""]
    found = claims(sweep)
    if not found:
        return [*lines, "Nothing was compared."]
    better = [of for of in found if of.verdict == pairs.FASTER]
    lines += [
        "The best tile without spills but the shipped one, timed again in rounds of their own against the"
        " shipped one: ratio of the shipped one's time to its own, by round, with an interval for the median"
        " (`tests.speed.pairs`).",
        "",
        "| kernel | D | shipped | best other | ratio | by problem | the other is |",
        "|---|---:|---|---|---|---|---|",
    ]
    for of in found:
        by_problem = "; ".join(f"{name} {ratio.median:.3f}" for name, ratio in of.by_problem.items())
        ratio = str(of.ratio) if of.ratio is not None else "too few rounds"
        lines.append(
            f"| {of.kernel} | {of.dim} | {of.shipped.name} | {of.best.name} | {ratio} | {by_problem}"
            f" | {of.verdict} |"
        )
    if not better:
        return [*lines, "", "No other tile is faster by more than noise: the table stays as it is."]
    lines += ["", f'Faster by more than noise, for the table "{sweep.table}" of `kernels/tiles.py`:', ""]
    lines.append("```python")
    for kernel in dict.fromkeys(of.kernel for of in better):
        lines.append(f'"{kernel}": {{')
        lines += [f"    {of.line}  # {of.ratio} against {of.shipped.tile}" for of in better
                  if of.kernel == kernel]  # fmt: skip
        lines.append("},")
    return [*lines, "```"]


# ---------------------------------------------------------------- the plot

_INK, _SHIPPED, _UNKNOWN = "#222222", "#d55e00", "#777777"
_SLOWEST = 8.0
"""Where the axis of times ends: slower ones are drawn there."""

_ACROSS, _UP = 3.0, 2.8
"""Inches from a panel to the next."""

_STYLE: Mapping[str, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.labelsize": 9,
    "axes.titlesize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}


def plot(sweep: TileSweep, path: Path) -> None:
    """A PNG: a panel for each kernel and head dimension, registers against time, by occupancy.

    Raises:
        ImportError: if matplotlib is not installed.
        ReportError: if no tile has a time.
    """
    from matplotlib import rc_context
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    found = {key: ranked for key, entries in groups(sweep).items() if (ranked := fastest_first(entries))}
    if not found:
        raise ReportError("no tile has a time: there is nothing to plot")
    kernels = list(dict.fromkeys(kernel for kernel, _ in found))
    dims = sorted({dim for _, dim in found})
    limits = _limits(list(found.values()))
    style: Any = dict(_STYLE)
    width, height = max(_ACROSS * len(dims) + 1.6, 5.6), _UP * len(kernels) + 1.3
    with rc_context(style):
        figure = Figure(figsize=(width, height), facecolor="white")

        def place(x: float, y: float, w: float, h: float) -> Axes:
            """In inches."""
            return figure.add_axes((x / width, y / height, w / width, h / height))

        norm = LogNorm(1 / 32, 1.0)
        for (kernel, dim), ranked in found.items():
            row, column = kernels.index(kernel), dims.index(dim)
            axes = place(0.6 + _ACROSS * column, height - 0.45 - _UP * (row + 1), _ACROSS - 0.45, _UP - 0.95)
            _panel(axes, sweep.chip, ranked, norm)
            axes.set(xlim=limits[0], ylim=limits[1])
            axes.set_title(_title(kernel, dim, ranked, sweep.chip), loc="left", linespacing=1.25)
            if column == 0:
                axes.set_ylabel("time / that of the fastest")
            if row == len(kernels) - 1:
                axes.set_xlabel("registers a thread")
        bar = figure.colorbar(
            ScalarMappable(norm, "viridis"), cax=place(_ACROSS * len(dims) + 0.5, height / 2 - 0.9, 0.12, 1.7)
        )
        ticks = [1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]
        bar.set_ticks(ticks, labels=[f"{100 * tick:.3g} %" for tick in ticks])
        bar.minorticks_off()
        bar.set_label("theoretical occupancy")
        words = "\n".join(textwrap.fill(line, int(13 * width)) for line in _sentences(found, sweep))
        figure.text(0.12 / width, 1 - 0.12 / height, words, va="top", fontsize=9.5)
        point: Any = {"marker": "o", "ls": "none", "color": _INK}
        ring: Any = {"ms": 10, "mfc": "none", "color": _SHIPPED, "mew": 1.6}
        marks = [
            Line2D([], [], **point, ms=5, label="larger: more occupancy"),
            Line2D([], [], **point | {"marker": "X"}, ms=6, label="spills"),
            Line2D([], [], **point | ring, label="shipped"),
        ]
        figure.legend(handles=marks, loc="lower left", bbox_to_anchor=(0.4 / width, 0.05 / height), ncols=3,
                      frameon=False, handletextpad=0.3, columnspacing=1.4)  # fmt: skip
        figure.savefig(path, dpi=150, format="png")


def _panel(axes: Axes, chip: str, ranked: Sequence[TileEntry], norm: Any) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    best = ranked[0]
    for entry in reversed(ranked):  # the fast ones on top
        x, y = entry.registers, min(entry.time / best.time, _SLOWEST)
        held = _occupancy(entry, chip)
        colour: Any = {"c": [held], "cmap": "viridis", "norm": norm} if held else {"color": _UNKNOWN}
        axes.scatter([x], [y], s=_area(held), marker="X" if entry.spilled else "o", alpha=0.85, lw=0.5,
                     edgecolors="white", zorder=2, **colour)  # fmt: skip
        if entry.shipped:
            axes.scatter([x], [y], s=_area(held) + 90, facecolors="none", edgecolors=_SHIPPED, lw=1.6,
                         zorder=3)  # fmt: skip
    axes.set_yscale("log")
    axes.axvline(255, color=_INK, lw=0.5, ls=":", zorder=0)
    axes.axhline(1, color=_INK, lw=0.5, ls=":", zorder=0)
    axes.yaxis.set_major_locator(FixedLocator([1, 1.5, 2, 3, 4, 6, 8]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"≥{y:g}" if y == _SLOWEST else f"{y:g}"))


def _limits(ranked: Sequence[Sequence[TileEntry]]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Of both axes, the same for all panels."""
    fewest = min(entry.registers for of in ranked for entry in of)
    slowest = max(min(of[-1].time / of[0].time, _SLOWEST) for of in ranked)
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


def _sentences(found: Mapping[tuple[str, int], Sequence[TileEntry]], sweep: TileSweep) -> Iterator[str]:
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


# ---------------------------------------------------------------- the files


def write(sweep: TileSweep, folder: Path) -> None:
    """Writes the file and the page into a folder.

    Raises:
        OSError: if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_bytes(encode(sweep))
    (folder / PAGE).write_text(markdown(sweep), encoding="utf-8")


def write_plot(sweep: TileSweep, folder: Path) -> str:
    """Writes the plot into a folder; returns why there is none, or nothing.

    Raises:
        OSError: if it cannot be written.
    """
    (folder / PLOT).unlink(missing_ok=True)  # that of another sweep
    try:
        plot(sweep, folder / PLOT)
    except ImportError as error:
        return f"{error}; where it is installed, python -m reports.tile_sweep {folder / FILE} draws it"
    except ReportError as error:
        return str(error)
    return ""


def main(arguments: Sequence[str]) -> int:
    """The command: 0, or 2 if the file cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m reports.tile_sweep", description="Writes table and plot of a tile sweep again."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help=f"{FILE} of a sweep")
    path: Path = parser.parse_args(arguments).file
    try:
        sweep = read(path)
    except ReportError as error:
        print(error, file=sys.stderr)
        return 2
    (path.parent / PAGE).write_text(markdown(sweep), encoding="utf-8")
    if missing := write_plot(sweep, path.parent):
        print(f"no plot: {missing}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
