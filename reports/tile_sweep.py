"""Tile sizes: measured time beside registers, spills, shared memory, resident blocks and occupancy.

python -m reports.tile_sweep FILE      writes the table and the plot of a sweep beside its file again
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.speed.occupancy import KIB
from tests.speed.pairs import FASTER

from .errors import ReportError
from .plots_of_tiles import plot
from .tile_claims import claims
from .tiles import (
    FAILED,
    PRUNED,
    STATUSES,
    UNMEASURED,
    WHOLE,
    WRONG,
    TileEntry,
    TileSweep,
    encode,
    fastest_first,
    groups,
    read,
    shipped_of,
)

FILE, PAGE, PLOT = "tiles.json", "tiles.md", "tiles.png"
"""What a sweep leaves in its folder."""


def markdown(sweep: TileSweep) -> str:
    """The page: a table for each kernel and head dimension, and what follows for the tile table."""
    versions = ", ".join(f"{name} {version}" for name, version in sweep.versions.items())
    counts = Counter(entry.status for entry in sweep.entries)
    lines = [
        f"### Tiles on {sweep.device}, {sweep.path}",
        "",
        f"{sweep.dtype}, {sweep.tokens:,} tokens, H = 2048 // D; {versions}; {sweep.seconds:.0f} s."
        f" Of {len(sweep.entries)} tiles"
        f" {', '.join(f'{counts[status]} {status}' for status in STATUSES if counts[status])}.",
        "",
        "Times are of the kernel alone, on a cold L2, with the host hidden: medians over the rounds, in which"
        " all tiles take turns. “x shipped” is the shipped tile's time over this one's, geometric mean over"
        " the problems: above 1 is faster. Registers and spilled bytes are of a thread, shared memory is of a"
        " block; of the causal and the full kernel the one that takes more. Blocks are those that a"
        " multiprocessor can hold at once, and what allows no more; occupancy is theoretical: resident warps"
        " over most warps. The width is that of a slice of the head dimension, in columns.",
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
        head = ["BM", "BN", "warps", "stages", "width", *(f"{name}, ms" for name in problems), "x shipped",
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
    width = "whole" if entry.width == WHOLE else entry.width
    tile = entry.BM, entry.BN, entry.warps, entry.stages, width
    cells = [*map(str, tile), *times, ratio, str(entry.registers), str(entry.spilled or ""),
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
    lines += [
        "The best tile but the shipped one, timed again in rounds of their own against the shipped one: ratio"
        " of the shipped one's time to its own, by round, with an interval for the median"
        " (`tests.speed.pairs`). Bytes that are spilled stand behind a tile that spills.",
        "",
        "| kernel | D | shipped | best other | ratio | by problem | the other is |",
        "|---|---:|---|---|---|---|---|",
    ]
    for of in found:
        by_problem = "; ".join(f"{name} {ratio.median:.3f}" for name, ratio in of.by_problem.items())
        ratio = str(of.ratio) if of.ratio is not None else "too few rounds"
        lines.append(
            f"| {of.kernel} | {of.dim} | {of.shipped.name}{_spills(of.shipped)} |"
            f" {of.best.name}{_spills(of.best)} | {ratio} | {by_problem} | {of.verdict} |"
        )
    better = [of for of in found if of.verdict == FASTER]
    if not better:
        return [*lines, "", "No other tile is faster by more than noise: the table stays as it is."]
    lines += ["", f'Faster by more than noise, for the table "{sweep.table}" of `kernels/tiles.py`:', ""]
    lines.append("```python")
    for kernel in dict.fromkeys(of.kernel for of in better):
        lines.append(f'"{kernel}": {{')
        lines += [f"    {of.line}  # {of.ratio} against {of.shipped.tile}{_spills(of.best)}"
                  for of in better if of.kernel == kernel]  # fmt: skip
        lines.append("},")
    return [*lines, "```"]


def _spills(entry: TileEntry) -> str:
    return f", spills {entry.spilled} B" if entry.spilled else ""


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
