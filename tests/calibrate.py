"""How much of their limits correct implementations use: random cases over several of them, in one table.

    python -m tests.calibrate --seed 1000 --seconds 480 --out FOLDER

draws cases, runs them through our own kernels (natively, and on a GPU newer than Ampere also as Triton
compiles them for an A100) and PyTorch's attentions, judges all by one oracle result, and reports the
distribution of what is used of each limit. Limits are derived (`tests.thresholds`), never fitted: the seeds
below only say on which cases the model was looked at while it was made, and on which it is verified.

A campaign is kept in reports/baselines/ledger.json, its tables beside it; with --out in a folder instead,
which --merge adds to the ledger later, from whatever machine it came.

Exit status: 0 nothing was red; 1 something was, or too many elements could not be judged; 2 wrong use, or a
file that cannot be used; 3 nothing was executed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from reports import ledger, records
from reports.ledger import LEDGER, Count, Entry, Exceptional, LedgerError, Refusal

from . import drawing, gpu_paths, thresholds
from .campaign import OVERRIDE, UNKNOWN, Done, Numbers, Plan, Sample, conduct
from .cases import DTYPES

HELD, BROKE, WRONG_USE, NOTHING_EXECUTED = range(4)

SEEDS = {"calibration": range(0, 1000), "verification": range(1000, 2000)}
"""The cases that the model may be looked at on, and those that it is verified on, by their seeds."""

ON_GPU = ("triton", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math")
ON_CPU = ("emulation", "sdpa-math")

STATISTICS = ("budget", "largest", "rms", "bias", "emulation")
"""What is used of a limit (`campaign.Numbers`), in the order of the tables."""

OUT = ("entry.json", "tables.md", "reds.jsonl")
CHECKPOINT = 60.0
"""Seconds between the files of --out being written, in case the end never comes."""

ALIKE = 20
"""Records of red comparisons that are kept whole, of those that are red alike."""

Rows = list[tuple[str, ...]]


class Misuse(Exception):
    """A command line that cannot be followed; says what is wrong."""


# ---------------------------------------------------------------- what is found


class Findings:
    """All that a campaign found so far."""

    def __init__(self) -> None:
        self.cases = 0
        self.comparisons: Counter[tuple[str, str, str]] = Counter()
        self.powerless: Counter[tuple[str, str, str]] = Counter()
        self.refused: Counter[str] = Counter()
        self.example: dict[str, str] = {}
        self.red: list[Exceptional] = []
        self.elements = self.judged = 0
        # by tensor (implementation, path, dtype, tensor) and by regime (regime, dtype)
        self.used: dict[tuple[str, ...], dict[str, array[float]]] = {}
        self.busy = 0.0  # seconds of all workers
        self.spent: defaultdict[str, float] = defaultdict(float)  # seconds by stage and implementation

    def take(self, done: Done) -> None:
        self.cases += any(s.implementation != UNKNOWN for s in done.samples)
        self.busy += done.seconds
        for sample in done.samples:
            self._take(sample)

    def _take(self, s: Sample) -> None:
        for stage, seconds in s.seconds.items():
            self.spent[f"{s.implementation} {s.path}" if stage == "implementation" else stage] += seconds
        if s.status == "refused":
            self.refused[s.implementation] += 1
            self.example.setdefault(s.implementation, s.case)
            return
        key = s.implementation, s.path, s.dtype
        if s.status == "no power":
            self.powerless[key] += 1
        elif s.implementation != UNKNOWN:
            self.comparisons[key] += 1
        if s.status == "broken":
            self.red.append(Exceptional(s.case, s.implementation, s.path, s.reason))
        for tensor, numbers in s.tensors.items():
            self.elements += numbers.elements
            self.judged += numbers.judged
            if s.status != "broken":
                self._use((*key, tensor), numbers)
                self._use((s.values, s.dtype), numbers)

    def _use(self, key: tuple[str, ...], numbers: Numbers) -> None:
        group = self.used.setdefault(key, {name: array("d") for name in (*STATISTICS, "max_z")})
        for name, kept in group.items():
            value = getattr(numbers, name)
            if value is not None:
                kept.append(value)

    @property
    def no_power(self) -> float:
        """Share of the elements that could not be judged."""
        return 1 - self.judged / self.elements if self.elements else 0.0

    @property
    def enough_power(self) -> bool:
        return self.elements - self.judged <= thresholds.NO_POWER * self.elements

    @property
    def total(self) -> int:
        return sum(self.comparisons.values())

    def closest(self) -> dict[str, float]:
        return {
            name: round(max((max(group[name], default=0.0) for group in self.used.values()), default=0.0), 4)
            for name in STATISTICS
        }

    def status(self) -> int:
        if self.red or not self.enough_power:
            return BROKE
        return HELD if self.total else NOTHING_EXECUTED


# ---------------------------------------------------------------- tables

HEADINGS = (
    "comparisons",
    "budget",
    "largest z / limit",
    "max z",
    "rms z / limit",
    "bias / limit",
    "emulation / limit",
)


def by_tensor(found: Findings) -> tuple[Sequence[str], Rows]:
    groups = {key: group for key, group in found.used.items() if len(key) == 4}
    ordered = sorted(groups, key=lambda key: (key[2], _ORDER(key[3]), key[:2]))
    rows = [
        (dtype, tensor, name, path, *_cells(groups[name, path, dtype, tensor], 50))
        for name, path, dtype, tensor in ordered
    ]
    return ("dtype", "tensor", "implementation", "path", *HEADINGS), rows


def by_regime(found: Findings) -> tuple[Sequence[str], Rows]:
    groups = {key: group for key, group in found.used.items() if len(key) == 2}
    rows = [(*key, *_cells(groups[key])) for key in sorted(groups)]
    return ("values", "dtype", *HEADINGS), rows


_ORDER: Callable[[str], int] = ("out", "lse", "dq", "dk", "dv").index


def _cells(group: dict[str, array[float]], *below: float) -> list[str]:
    """The number of tensors, and of each statistic the given percentiles, the 99th and the maximum."""
    cells = [str(len(group["budget"]))]
    for name in ("budget", "largest", "max_z", "rms", "bias", "emulation"):
        x = np.frombuffer(group[name]) if len(group[name]) else None
        if x is None:
            cells.append("-")
        elif name == "max_z":
            cells.append(f"{x.max():.2f}")
        else:
            cells.append(" ".join(f"{n:.2f}" for n in (*np.percentile(x, [*below, 99]), x.max())))
    return cells


def comparisons(found: Findings) -> tuple[Sequence[str], Rows]:
    keys = sorted({*found.comparisons, *found.powerless})
    red = Counter((r.implementation, r.path) for r in found.red)
    groups = sorted({key[:2] for key in keys} | set(red))
    rows = []
    for name, path in groups:
        of_dtype = [found.comparisons[name, path, dtype] for dtype in DTYPES]
        powerless = sum(found.powerless[name, path, dtype] for dtype in DTYPES)
        executed = sum(of_dtype) + powerless
        each = f"{1e3 * found.spent[f'{name} {path}'] / executed:.1f}" if executed else "-"
        numbers = (*of_dtype, sum(of_dtype), powerless, red[name, path], found.refused[name])
        rows.append((name, path, *map(str, numbers), each))
    headings = ("implementation", "path", *DTYPES, "comparisons", "no power", "red", "refused", "ms each")
    return headings, rows


def exceptions(found: Findings) -> tuple[Sequence[str], Rows]:
    """Alike ones together: a fault of a backend may be in thousands of cases."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for red in found.red:
        alike.setdefault((red.implementation, red.path, red.reason), []).append(red.case)
    rows: Rows = [
        (str(len(ids)), name, path, reason[:200], ids[0])
        for (name, path, reason), ids in sorted(alike.items(), key=lambda item: -len(item[1]))
    ]
    return ("how many", "implementation", "path", "what broke", "the first case"), rows


def limits(found: Findings) -> tuple[Sequence[str], Rows]:
    headings = ("rule", f"limit (alpha = {thresholds.FALSE_ALARM:g})", "margin of the model")
    return headings, thresholds.table()


TABLES = {
    "Comparisons": comparisons,
    "Red": exceptions,
    "Limits": limits,
    "By tensor: median, 99 % and maximum of what is used of each limit; max z itself": by_tensor,
    "By regime, all implementations and tensors: 99 % and maximum": by_regime,
}


def no_power_words(found: Findings) -> str:
    words = (
        f"elements with no power: {found.elements - found.judged} of {found.elements} ({found.no_power:.2%})"
    )
    return f"{words}, at most {thresholds.NO_POWER:.0%}" + ("" if found.enough_power else ": TOO MANY")


def markdown(entry: Entry, found: Findings) -> str:
    where = entry.machine + (f", driver {entry.driver}" if entry.driver else "")
    ended = "" if entry.complete else ", ended by the time"
    lines = [
        f"# Calibration: seed {entry.seed} ({entry.seeds})",
        "",
        f"{entry.date}, {where}, torch {entry.torch}, Triton {entry.triton}, code {entry.code}.",
        f"{entry.cases} cases, {entry.total} comparisons, {len(entry.red)} red, in {entry.seconds:.0f} s with"
        f" {entry.workers} workers{ended}.",
        no_power_words(found) + ".",
    ]
    for title, table in TABLES.items():
        headings, rows = table(found)
        if rows:
            lines += ["", f"## {title}", "", "| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
            lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def show(found: Findings, console: Console) -> None:
    for title, table in TABLES.items():
        headings, rows = table(found)
        if not rows:
            continue
        shown = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for heading in headings:
            shown.add_column(heading, overflow="fold")
        for row in rows:
            shown.add_row(*row)
        console.print(shown)
        console.print()
    console.print(no_power_words(found))
    stages = sorted(found.spent.items(), key=lambda item: -item[1])
    words = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in stages)
    console.print(f"seconds of all workers: {found.busy:.1f}, of which {words}")


# ---------------------------------------------------------------- the machine


def machine_words(gpus: Iterable[gpu_paths.Gpu]) -> str:
    names = Counter(gpu.name for gpu in gpus)
    return ", ".join(f"{n} x {name}" if n > 1 else name for name, n in names.items()) or (
        f"CPU ({platform.machine()})"
    )


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.split("\n")[0].strip()


def versions() -> tuple[str, str]:
    """Of torch and Triton."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in ("torch", "triton"):
        try:
            found.append(version(name))
        except PackageNotFoundError:
            found.append("none")
    return found[0], found[1]


# ---------------------------------------------------------------- the command


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m tests.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sets = ", ".join(f"{seeds.start} to {seeds.stop - 1} for {name}" for name, seeds in SEEDS.items())
    for name, kind, metavar, words in (
        ("seed", int, "S", f"of the cases: {sets} (default 0)"),
        ("cases", int, "N", "how many; by default as many as there is time for"),
        ("seconds", float, "LIMIT", "after which no case is begun; the last take up to half a minute more"
         " (default 480)"),
        ("workers", int, "W", "processes that draw and judge (default: cores - 1)"),
        ("pairs", int, "P", "how many dtypes and head dimensions, each of which is compiled (default: one a"
         " worker, at least 4)"),
        ("out", Path, "FOLDER", f"where {', '.join(OUT)} go, in the ledger's place"),
        ("merge", Path, "FOLDER", "add what --out left in a folder to the ledger, and do nothing else"),
    ):  # fmt: skip
        found.add_argument(f"--{name}", type=kind, metavar=metavar, help=words)
    found.add_argument(
        "--implementations",
        nargs="+",
        metavar="NAME",
        help=f"as --impl takes them (default: {' '.join(ON_GPU)}; without a GPU {' '.join(ON_CPU)})",
    )
    found.add_argument("--ledger", action="store_true", help="print what all campaigns come to")
    found.set_defaults(seed=0, cases=10**6, seconds=480.0)
    return found


def main(arguments: Sequence[str], path: Path = LEDGER) -> int:
    """The command; `path` is the ledger's."""
    options = parser().parse_args(arguments)  # exits with status 2 itself
    try:
        if options.merge is not None:
            return merge(options.merge, path)
        if options.ledger:
            return print_ledger(path)
        return campaign(options, path)
    except (Misuse, LedgerError) as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return WRONG_USE


def campaign(options: argparse.Namespace, path: Path) -> int:
    start = time.time()
    seeds = next((name for name, seeds in SEEDS.items() if options.seed in seeds), None)
    if seeds is None:
        sets = ", ".join(f"{s.start} to {s.stop - 1} ({name})" for name, s in SEEDS.items())
        raise Misuse(f"--seed is {options.seed}; it may be {sets}")
    for name in ("cases", "seconds", "workers", "pairs"):
        given = getattr(options, name)
        if given is not None and given <= 0:
            raise Misuse(f"--{name} is {given}; it must be greater than 0")
    found_here = gpu_paths.ask_machine()
    gpu = bool(found_here.usable) and os.environ.get("TRITON_INTERPRET", "0") in ("", "0")
    if not gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    for library in ("OMP", "OPENBLAS", "MKL"):  # workers share the cores, and inherit this
        os.environ[f"{library}_NUM_THREADS"] = "1"
    names = implementations(options.implementations, gpu)
    workers = options.workers or max(1, len(os.sched_getaffinity(0)) - 1)
    override = ""
    if gpu:
        paths = gpu_paths.code_paths(found_here.usable, os.environ.get(OVERRIDE))
        override = "" if os.environ.get(OVERRIDE) else (paths[-1].override_arch or "")

    torch_version, triton_version = versions()
    driver_version = driver() if gpu else ""
    machine, code = machine_words(found_here.usable if gpu else ()), ledger.code_digest()
    key = str(options.seed), code, machine, torch_version, triton_version
    if options.out is None:
        ledger.refuse_double(key, ledger.read(path), path)
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        for name in OUT:
            (options.out / name).unlink(missing_ok=True)

    plan = Plan(
        seed=options.seed,
        cases=options.cases,
        implementations=names,
        workers=workers,
        deadline=start + options.seconds,
        override=override,
        pairs=tuple(drawing.pairs(options.seed - SEEDS[seeds].start, options.pairs or max(4, workers))),
    )
    over = ", ".join(names) + (f", and triton as {override}" if override else "")
    print(f"calibrate: {machine}, torch {torch_version}, Triton {triton_version}; {over}", flush=True)
    found = Findings()
    kept = OUT[2] if options.out else f"calibration-seed{options.seed}-{OUT[2]}"
    reds: Path = (options.out or path.parent.parent / "out") / kept
    reds.unlink(missing_ok=True)
    alike: Counter[tuple[str, str, str]] = Counter()
    written = said = time.time()

    def entry(complete: bool) -> Entry:
        return Entry(
            machine=machine,
            driver=driver_version,
            torch=torch_version,
            triton=triton_version,
            code=code,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            seed=options.seed,
            seeds=seeds,
            complete=complete,
            seconds=round(time.time() - start, 1),
            workers=workers,
            cases=found.cases,
            comparisons=[
                Count(*key, found.comparisons[key], found.powerless[key])
                for key in sorted({*found.comparisons, *found.powerless})
            ],
            red=found.red,
            refused=[Refusal(name, n, found.example[name]) for name, n in sorted(found.refused.items())],
            elements=found.elements,
            no_power=found.elements - found.judged,
            closest=found.closest(),
        )

    def take(done: Done) -> None:
        nonlocal written, said
        found.take(done)
        for record in done.red:
            kind = record.implementation, record.path, record.reason
            alike[kind] += 1
            if alike[kind] <= ALIKE:
                records.append(reds, record)
        now = time.time()
        if now - said > 10:
            said = now
            print(f"{now - start:4.0f} s: {found.cases} cases, {found.total} comparisons,"
                  f" {len(found.red)} red, {sum(found.refused.values())} refused", flush=True)  # fmt: skip
        if options.out is not None and now - written > CHECKPOINT:
            written = now
            _write(options.out, entry(False), found)

    complete = conduct(plan, take, lambda words: print(f"calibrate: {words}", file=sys.stderr, flush=True))
    last = entry(complete)
    show(found, Console(width=200, highlight=False))
    if options.out is not None:
        _write(options.out, last, found)
        print(f"calibrate: {', '.join(OUT[:2])} are in {options.out}; --merge adds them to the ledger")
    elif found.total:
        ledger.add(last, path)
        page = baseline(last, path)
        page.write_text(markdown(last, found))
        print(f"calibrate: added to {path}; tables in {page}")
    status = found.status()
    words = {HELD: "nothing was red", BROKE: "red", NOTHING_EXECUTED: "nothing was executed"}[status]
    print(
        f"calibrate: {found.cases} cases, {found.total} comparisons, {len(found.red)} red: {words} ({status})"
    )
    return status


def implementations(asked: Sequence[str] | None, gpu: bool) -> tuple[str, ...]:
    """The implementations of a campaign, each of which can be loaded and runs here."""
    from .implementations import ImplementationError, load

    names = tuple(dict.fromkeys(asked or (ON_GPU if gpu else ON_CPU)))
    for name in names:
        try:
            claims = load(name).claims
        except ImplementationError as error:
            raise Misuse(f"--implementations: {str(error).replace('--impl is', 'one is')}") from None
        if ("cuda" if gpu else "cpu") not in claims.devices:
            raise Misuse(f"--implementations: {name} runs on {', '.join(claims.devices)} only")
    return names


def _write(folder: Path, entry: Entry, found: Findings) -> None:
    (folder / OUT[0]).write_bytes(ledger.encoded(entry))
    (folder / OUT[1]).write_text(markdown(entry, found))


def baseline(entry: Entry, path: Path) -> Path:
    """The file beside a ledger that has the tables of a campaign."""
    machine = re.sub(r"[^a-z0-9]+", "-", entry.machine.lower()).strip("-")
    return path.with_name(f"calibration-{machine}-seed{entry.seed}-{entry.code}.md")


def merge(folder: Path, path: Path) -> int:
    entry = ledger.read_entry(folder / OUT[0])
    tables = folder / OUT[1]
    if not tables.is_file():
        raise LedgerError(f"{tables}: is missing; {folder} is not what --out left, or not all of it")
    ledger.add(entry, path)
    page = baseline(entry, path)
    page.write_text(tables.read_text())
    print(f"calibrate: {entry.total} comparisons of seed {entry.seed} on {entry.machine} added to {path}")
    return HELD


def print_ledger(path: Path) -> int:
    entries = ledger.read(path)
    console = Console(width=160, highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading in (
        "date",
        "machine",
        "code",
        "seed",
        "set",
        "cases",
        "comparisons",
        "red",
        "refused",
        "no power",
    ):
        table.add_column(heading)
    for e in entries:
        red_ones = sum(one.count for one in e.red)
        table.add_row(
            e.date, e.machine, e.code, str(e.seed), e.seeds, str(e.cases), str(e.total), str(red_ones),
            str(sum(r.cases for r in e.refused)), f"{e.no_power / e.elements:.2%}" if e.elements else "-",
        )  # fmt: skip
    console.print(table)
    console.print()
    sums = Table(box=None, pad_edge=False)
    for heading in ("machine", "implementation", "path", "comparisons"):
        sums.add_column(heading)
    for key, n in ledger.totals(entries).items():
        sums.add_row(*key, str(n))
    console.print(sums)
    red = [red for e in entries for red in e.red]
    for one in red:
        console.print(f"red, {one.count}: {one.implementation} on {one.path}: {one.reason}; {one.case}")
        console.print(f"     {one.told or 'nobody has looked into it yet'}")
    total = sum(e.total for e in entries)
    untold = sum(one.count for one in red if not one.told)
    console.print(f"{len(entries)} campaigns, {total} comparisons, {sum(one.count for one in red)} red,"
                  f" of which {untold} not looked into")  # fmt: skip
    return HELD


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
