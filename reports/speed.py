"""What a run of speed came to: tables as Markdown, and a page.

Both are made of the same sheets, and those of what the run left (`timings`). Ratios and their verdicts are
worked out from the rounds, by `tests.speed.pairs`.
"""

from __future__ import annotations

import html
import math
import re
import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.speed.pairs import (
    ALIKE,
    CANNOT_TELL,
    FASTER,
    FEWEST,
    SAME,
    SLOWER,
    VERDICTS,
    Ratio,
    is_quiet,
    ratio,
    verdict,
)

from .timings import CONVENTION, MEASURES, PASSES, Contest, Curve, Gate, Noise, Speed

if TYPE_CHECKING:
    from tests.speed.problems import Problem

    from .plots import Picture
    from .plots_of_speed import Drawing

TABLES, PAGE = "speed.md", "speed.html"
"""The files, in the folder of a run."""

MEMORY, LATENCY, ROOFLINE = "memory.png", "latency.png", "roofline.png"

TEMPLATES = Path(__file__).parent / "templates"

MARKS = {FASTER: "▲", SAME: "=", SLOWER: "▼", CANNOT_TELL: "?"}

MISSING = "–"

NAMED = 4
"""Problems that are named where something is absent; of more, the first few and how many."""

REASON = 300
"""Characters of a reason that are shown."""

KERNELS = 8
"""Kernels of a contender that are named: those of most contests."""


# ---------------------------------------------------------------- numbers


def digits(x: float) -> str:
    """Three significant digits, without an exponent."""
    if not math.isfinite(x) or x == 0:
        return f"{x:g}"
    rounded = float(f"{x:.2e}")
    return f"{rounded:.{max(2 - math.floor(math.log10(abs(rounded))), 0)}f}"


def duration(seconds: float) -> str:
    """A time in the unit in which it is at least 1."""
    rounded = float(f"{seconds:.2e}")
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if rounded >= size:
            return f"{digits(seconds / size)} {unit}"
    return f"{digits(seconds / 1e-6)} µs"


def size(count: float) -> str:
    """Bytes in a binary unit."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{digits(count / 2**power)} {unit}"
    return f"{count:g} B"


def percent(part: float) -> str:
    return f"{digits(100 * part)}%"


# ---------------------------------------------------------------- what was measured


def problem(name: str) -> Problem | None:
    """What an id says; None if it is none: a file may come from anywhere."""
    from tests.speed.problems import parse

    try:
        return parse(name)
    except ValueError:
        return None


def title(name: str) -> str:
    """A problem for a reader."""
    found = problem(name)
    return found.title if found else name.replace("_", " ")


def contenders(found: Speed) -> list[str]:
    """All that the run names, the subject first."""
    names = [found.implementation]
    for contest in found.contests:
        names += contest.entries
    names += [curve.contender for curve in found.curves]
    names += [host.contender for host in found.host_times]
    return list(dict.fromkeys(names))


def median(contest: Contest, name: str) -> float | None:
    """Seconds of a call; None if there is no figure."""
    entry = contest.entries.get(name)
    if entry is None or entry.absent or not entry.seconds:
        return None
    found = statistics.median(entry.seconds)
    return found if 0 < found < math.inf else None


LEAST_RATE, MOST_RATE = 1.0, 1e21
"""Operations a second that a machine may have: what is beyond is no measurement, and can be in no plot."""


def rate(contest: Contest, name: str) -> float | None:
    """Operations a second; None if there is no figure."""
    seconds = median(contest, name)
    found = 0.0 if seconds is None else contest.flops / seconds
    return found if LEAST_RATE < found < MOST_RATE else None


class Versus(NamedTuple):
    """The subject against another.

    Attributes:
        ratio: of the other's time to the subject's; None of fewer than `FEWEST` pairs.
        verdict: on the subject.
        pairs: how many rounds have both.
    """

    ratio: Ratio | None
    verdict: str
    pairs: int


def versus(contest: Contest, subject: str, other: str) -> Versus | None:
    """What can be claimed in a contest; None if one of the two has no figure."""
    if median(contest, subject) is None or median(contest, other) is None:
        return None
    ours, theirs = (contest.entries[name].seconds for name in (subject, other))
    pairs = min(len(ours), len(theirs))
    try:
        found = ratio(ours, theirs)
    except ValueError:
        return Versus(None, CANNOT_TELL, pairs)
    same = control(contest, subject)
    if contest.control and same is None:
        return Versus(found, CANNOT_TELL, pairs)
    return Versus(found, verdict(found, same), pairs)


def control(contest: Contest, subject: str) -> Ratio | None:
    """Of the subject with itself; None if there is none, or too few pairs."""
    if median(contest, subject) is None:
        return None
    try:
        return ratio(contest.entries[subject].seconds, contest.control)
    except ValueError:
        return None


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def contests(found: Speed) -> dict[tuple[str, str], list[Contest]]:
    """By step and measure, in the order of `PASSES` and `MEASURES`."""
    groups: dict[tuple[str, str], list[Contest]] = defaultdict(list)
    for contest in found.contests:
        groups[contest.step, contest.measure].append(contest)

    def position(group: tuple[str, str]) -> tuple[int, int]:
        step, measure = group
        measures = list(MEASURES)
        return (
            PASSES.index(step) if step in PASSES else len(PASSES),
            measures.index(measure) if measure in MEASURES else len(measures),
        )

    return {group: groups[group] for group in sorted(groups, key=position)}


# ---------------------------------------------------------------- sheets


@dataclass(frozen=True)
class Cell:
    """Of a table.

    Attributes:
        text: what stands in it.
        more: what stands beside that, smaller: a ratio and its mark.
        state: a class of its own: a verdict, "held", "broken", "loud".
        tip: more exactly.
    """

    text: str
    more: str = ""
    state: str = ""
    tip: str = ""


@dataclass(frozen=True)
class Absence:
    """Who has no figure, where, and why."""

    who: str
    where: str
    why: str


@dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
        title: what it shows.
        head: of the columns.
        labels: how many of them, the first, are words and not figures.
        rows: as long as the head.
        notes: what the figures mean: sentences.
        absent: what is missing in it.
    """

    title: str
    head: list[str]
    labels: int
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)
    absent: list[Absence] = field(default_factory=list)


def meanings(measures: Iterable[str]) -> list[str]:
    """What times are of, and what operations are counted."""
    named = [measure for measure in dict.fromkeys(measures) if measure in MEASURES]
    return [*(f"{measure}: time {MEASURES[measure]}." for measure in named), f"{CONVENTION}."]


def legend(subject: str) -> str:
    """How to read ratios."""
    return (
        f"A ratio is the time of the other over that of {subject}: the median over pairs of rounds; over 1x"
        f" {subject} is faster. {MARKS[FASTER]} {subject} is faster, {MARKS[SAME]} the same within"
        f" {ALIKE:.0%}, {MARKS[SLOWER]} slower, {MARKS[CANNOT_TELL]} cannot tell. Of fewer than {FEWEST}"
        f" pairs there is no ratio. A/A: {subject} measured a second time in the same rounds, over the first;"
        f" ! the machine was not quiet, and nothing can be told. {MISSING} has no figure, or did not take"
        " part."
    )


HELD = {FASTER: "held", SAME: "held", SLOWER: "broken"}
"""A gate, by the verdict on its ratio."""


def gates(found: Speed) -> Sheet | None:
    if not found.gates:
        return None
    rows = [
        [
            Cell(gate.name),
            Cell(title(gate.problem)),
            Cell(gate.step),
            Cell(gate.measure),
            Cell(f"{gate.other} / {gate.subject}"),
            Cell(f"{digits(gate.ratio)}x ({digits(gate.low)} to {digits(gate.high)})"),
            Cell(str(gate.pairs)),
            Cell(f"{digits(gate.least)}x"),
            Cell(_state(gate), "" if gate.verdict == _state(gate) else gate.verdict, _state(gate)),
        ]
        for gate in found.gates
    ]
    head = ["gate", "problem", "step", "measure", "of times", "ratio", "pairs", "at least", "verdict"]
    notes = [
        "The ratio is the median over pairs, beside it an interval for that. A gate is held if the ratio over"
        f" the least is faster, or the same within {ALIKE:.0%}; broken if it is slower.",
        *meanings(gate.measure for gate in found.gates),
    ]
    return Sheet("Gates", head, 5, rows, notes)


def _state(gate: Gate) -> str:
    return HELD.get(gate.verdict, CANNOT_TELL)


def headline(found: Iterable[Gate]) -> tuple[str, str]:
    """Of the gates: a class, "held", "broken" or "other", and a sentence."""
    states = Counter(map(_state, found))
    total = states.total()
    of = f"{total} gate{'' if total == 1 else 's'}"
    if not total:
        return "other", "No gate was measured"
    unknown = f"of {states[CANNOT_TELL]} nothing can be told" if states[CANNOT_TELL] else ""
    if states["broken"]:
        return "broken", f"Broken: {states['broken']} of {of}" + (f"; {unknown}" if unknown else "")
    if unknown:
        return "other", f"Held: {states['held']} of {of}; {unknown}"
    return "held", f"Held: all of {of}" if total > 1 else "Held: the one gate"


def shown(found: Speed) -> list[str]:
    """Those with a figure in any contest, the subject first."""
    return [
        name
        for name in contenders(found)
        if name == found.implementation or any(median(contest, name) for contest in found.contests)
    ]


def figures(found: Speed, step: str, measure: str, of: Sequence[Contest]) -> Sheet:
    """The contests of a step and measure: a row a problem, a column a contender."""
    subject = found.implementation
    names = [name for name in shown(found) if name == subject or any(name in c.entries for c in of)]
    rates = measure == "device"
    rows = []
    for contest in of:
        row = [Cell(title(contest.problem), tip=contest.problem)]
        if not rates:
            row.append(Cell(digits(contest.flops / 1e9)))
        row += [_figure(contest, subject, name, rates) for name in names]
        rows.append([*row, _control(contest, subject)])
    head = ["problem", *([] if rates else ["GFLOP"]), *names, "A/A"]
    unit = "TFLOP/s: operations over the median time." if rates else "Median time of a call."
    ratios = [] if len(names) == 1 else [f"Beside them: the time over that of {subject}, and the verdict."]
    return Sheet(
        f"{_capital(step)}, {measure}: {'TFLOP/s' if rates else 'time of a call'}",
        head,
        1,
        rows,
        [" ".join([unit, *ratios]), *meanings([measure])],
        absences(of, names),
    )


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _figure(contest: Contest, subject: str, name: str, rates: bool) -> Cell:
    seconds = median(contest, name)
    if seconds is None:
        return Cell(MISSING)
    text = digits(contest.flops / seconds / 1e12) if rates else duration(seconds)
    against = versus(contest, subject, name) if name != subject else None
    if against is None:
        return Cell(text)
    if against.ratio is None:
        pairs = f"{against.pairs} pair{'' if against.pairs == 1 else 's'}"
        return Cell(text, f"{pairs} {MARKS[CANNOT_TELL]}", CANNOT_TELL, "too few for a ratio")
    more = f"{digits(against.ratio.median)}x {MARKS[against.verdict]}"
    return Cell(text, more, against.verdict, f"{against.verdict}: {against.ratio}")


def _control(contest: Contest, subject: str) -> Cell:
    found = control(contest, subject)
    if found is None:
        return Cell(MISSING)
    quiet = is_quiet(found)
    return Cell(f"{found.median:.3f}{'' if quiet else ' !'}", "", "" if quiet else "loud", str(found))


def absences(of: Sequence[Contest], names: Iterable[str]) -> list[Absence]:
    """Who of these took part without a figure, and why; of one reason at the same problems they are one."""
    where: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in names:
        for contest in of:
            if name in contest.entries and median(contest, name) is None:
                where[name, _reason(contest, name)].append(contest.problem)
    who: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for (name, why), problems in where.items():
        who[why, tuple(problems)].append(name)
    everywhere = list(dict.fromkeys(contest.problem for contest in of))
    return [
        Absence(", ".join(names), _where(problems, everywhere), why) for (why, problems), names in who.items()
    ]


def _reason(contest: Contest, name: str) -> str:
    why = textwrap.shorten(contest.entries[name].absent, REASON, placeholder=" ...")
    return why or "no reason was given"


_KINDS: dict[str, Callable[[Problem], str]] = {
    "head dimension": lambda of: f"D {of.dim}",
    "dtype": lambda of: of.dtype,
    "length": lambda of: f"T {of.length}" if not of.kind else "ragged",
    "form": lambda of: "ragged" if of.kind else "dense",
    "lengths": lambda of: of.kind or "dense",
    "mask": lambda of: "causal" if of.causal else "without a mask",
    "heads": lambda of: "shared KV heads" if of.heads_q != of.heads_kv else "as many KV heads",
}
"""In what problems may differ from others."""


def _where(problems: Sequence[str], everywhere: Sequence[str]) -> str:
    """Problems of a table, in few words."""
    chosen = set(problems)
    if chosen >= set(everywhere):
        return "everywhere" if len(everywhere) > 1 else title(everywhere[0])
    if len(chosen) > 1:
        known = {name: of for name in everywhere if (of := problem(name))}
        for kind in _KINDS.values():
            kinds = {name: kind(of) for name, of in known.items()}
            here = dict.fromkeys(kinds[name] for name in problems if name in kinds)
            if chosen == {name for name in kinds if kinds[name] in here}:
                return f"all {', '.join(here)}"
    named = list(dict.fromkeys(map(title, problems)))
    if len(named) <= NAMED:
        return "; ".join(named)
    return f"{len(chosen)} of {len(everywhere)} problems: {'; '.join(named[: NAMED - 1])}; and others"


def never(found: Speed) -> list[Absence]:
    """Contenders that have no figure in any contest: they have no column."""
    present = shown(found)
    names = dict.fromkeys(name for contest in found.contests for name in contest.entries)
    reasons: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in names:
        if name not in present:
            why = dict.fromkeys(_reason(c, name) for c in found.contests if name in c.entries)
            reasons[tuple(why)].append(name)
    return [Absence(", ".join(names), "everywhere", "; ".join(why)) for why, names in reasons.items()]


def means(found: Speed) -> Sheet | None:
    """Geometric means of the ratios, by step, measure and head dimension."""
    subject = found.implementation
    others = shown(found)[1:]
    rows = []
    for (step, measure), of in contests(found).items():
        by_dim: dict[int | None, list[Contest]] = defaultdict(list)
        for contest in of:
            which = problem(contest.problem)
            by_dim[which.dim if which else None].append(contest)
        for dim in sorted(by_dim, key=lambda dim: (dim is None, dim)):
            cells = [_mean(by_dim[dim], subject, other) for other in others]
            if any(cell.text != MISSING for cell in cells):
                rows.append([Cell(step), Cell(measure), Cell(MISSING if dim is None else str(dim)), *cells])
    if not rows:
        return None
    note = (
        f"Of the ratios, the time of the other over that of {subject}, over the problems with at least"
        f" {FEWEST} pairs of both. Beside a mean: of how many, and their verdicts."
    )
    measures = (row[1].text for row in rows)
    return Sheet(
        "Geometric means of the ratios, by head dimension",
        ["step", "measure", "D", *others],
        3,
        rows,
        [note, *meanings(measures)],
    )


def _mean(of: Sequence[Contest], subject: str, other: str) -> Cell:
    best: dict[str, tuple[int, float, str]] = {}
    for contest in of:
        found = versus(contest, subject, other)
        # a problem counts once, that of a gate too, which has a contest of its own
        if found and found.ratio and found.pairs > best.get(contest.problem, (0,))[0]:
            best[contest.problem] = found.pairs, found.ratio.median, found.verdict
    known = [(value, given) for _, value, given in best.values()]
    if not known:
        return Cell(MISSING)
    verdicts = Counter(given for _, given in known)
    told = " ".join(f"{verdicts[given]}{MARKS[given]}" for given in VERDICTS if verdicts[given])
    return Cell(f"{digits(geometric_mean(value for value, _ in known))}x", f"of {len(known)}: {told}")


def noise(found: Noise, subject: str) -> list[str]:
    """What the verdicts are worth, in sentences."""
    wrong = sum(count for given, count in found.verdicts.items() if given not in (SAME, CANNOT_TELL))
    given = ", ".join(f"{name} {found.verdicts.get(name, 0)}" for name in VERDICTS)
    lines = [f"{subject} against itself, {found.comparisons} comparisons: {given}; wrong are {wrong}."]
    if found.ratios:
        low, middle, high = min(found.ratios), statistics.median(found.ratios), max(found.ratios)
        lines.append(f"Medians of these ratios: {low:.3f} to {high:.3f}, half of them below {middle:.3f}.")
    if found.slowed:
        told = f"found in {found.found} of {found.slowed}"
        lines.append(f"Against itself made slower by {100 * found.delay:.3g}%: {told}.")
    return lines


Group = tuple[int, int]
"""B H and D of curves."""


def groups(found: Speed) -> dict[Group, list[Curve]]:
    """Curves of the same problem: by B H and D."""
    made: dict[Group, list[Curve]] = defaultdict(list)
    for curve in found.curves:
        made[curve.heads, curve.dim].append(curve)
    return dict(made)


def curves(found: Speed) -> list[Sheet]:
    """Memory and time against T."""
    sheets = []
    for (heads, dim), of in groups(found).items():
        lengths = sorted({length for curve in of for length in curve.lengths})
        where = f"B H {heads}, D {dim}, causal, float16"
        memory, latency = [], []
        for curve in of:
            who = [Cell(curve.contender), Cell(curve.step)]
            peaks = dict(zip(curve.lengths, curve.peak, strict=False))
            times = dict(zip(curve.lengths, curve.seconds, strict=False))
            exponent = MISSING if curve.exponent is None else f"{curve.exponent:.2f}"
            memory.append([*who, *(_cell(peaks.get(n), size) for n in lengths), Cell(exponent)])
            latency.append([*who, *(_cell(times.get(n), duration) for n in lengths)])
        head = ["contender", "step", *(f"T {length}" for length in lengths)]
        notes = [
            "Peak: bytes beyond inputs and outputs. Exponent: of the peak against T, fitted over the longer"
            f" half. {MISSING}: could not run.",
        ]
        sheets.append(Sheet(f"Peak memory against T: {where}", [*head, "exponent"], 2, memory, notes))
        notes = [f"Median time of a call. {MISSING}: could not run.", f"device: time {MEASURES['device']}."]
        sheets.append(Sheet(f"Time against T: {where}", head, 2, latency, notes))
    return sheets


def _cell(value: float | None, shown: Callable[[float], str]) -> Cell:
    return Cell(MISSING if value is None else shown(value))


def first_calls(found: Speed) -> Sheet | None:
    if not found.first_calls:
        return None
    rows = [
        [
            Cell(of.cache),
            *(Cell(duration(seconds)) for seconds in (of.imported, of.first, of.second)),
            Cell(str(of.compiled)),
            Cell(str(of.from_cache)),
        ]
        for of in found.first_calls
    ]
    head = ["Triton's cache", "import", "first call", "second call", "compiled", "cached"]
    note = "A forward and a backward in a fresh process, until the GPU is done. Compiled and cached: kernels."
    return Sheet("First call", head, 1, rows, [note])


def host_times(found: Speed) -> Sheet | None:
    if not found.host_times:
        return None
    names = list(dict.fromkeys(of.contender for of in found.host_times))
    by_row: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for of in found.host_times:
        by_row[of.problem, of.step][of.contender] = of.seconds
    rows = [
        [Cell(title(name), tip=name), Cell(step), *(_cell(times.get(who), duration) for who in names)]
        for (name, step), times in by_row.items()
    ]
    note = "What the host spends on an eager call, while the GPU does not keep it waiting: the median."
    return Sheet("Host time", ["problem", "step", *names], 2, rows, [note])


def kernels(found: Speed) -> list[tuple[str, list[str], int]]:
    """By contender: the kernels that ran, those of most contests, and how many more there are."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for contest in found.contests:
        for name, entry in contest.entries.items():
            if not entry.absent:
                counts[name].update(dict.fromkeys(entry.kernels, 1))
    ran = [(name, [kernel for kernel, _ in of.most_common()]) for name, of in counts.items() if of]
    return [(name, of[:KERNELS], max(len(of) - KERNELS, 0)) for name, of in ran]


def facts(found: Speed) -> list[tuple[str, str]]:
    """What ran, where, with which versions; what the machine can do."""
    versions = {
        "torch": found.torch, "Triton": found.triton, "cuDNN": found.cudnn, "driver": found.driver,
    }  # fmt: skip
    ended = found.ended.replace("T", " ").replace("+00:00", " UTC")
    took = f"{found.seconds:.0f} s"
    ceilings = []
    if found.matmul > 0:
        ceilings.append(f"a large float16 product {digits(found.matmul / 1e12)} TFLOP/s")
    if found.copy > 0:
        ceilings.append(f"a large copy {digits(found.copy / 1e12)} TB/s, read and written")
    named = [
        ("implementation", found.implementation),
        ("machine", found.device),
        ("code path", found.path),
        ("versions", ", ".join(f"{name} {value}" for name, value in versions.items() if value)),
        ("ended", f"{ended}, after {took}" if ended else ""),
        ("arguments", " ".join(found.arguments)),
        ("ceilings", "; ".join(ceilings)),
        ("others on the GPU", found.others_busy),
    ]
    return [(name, value) for name, value in named if value]


# ---------------------------------------------------------------- Markdown


def markdown(found: Speed) -> str:
    """The tables of a run."""
    _, gist = headline(found.gates)
    lines = [f"### Speed of {_safe(found.implementation)} on {_safe(found.device)}, {_safe(found.path)}", ""]
    lines += [f"- {name}: {_safe(value)}" for name, value in facts(found)]
    lines += ["", f"{gist}."]
    if sheet := gates(found):
        lines += _in_markdown(sheet)
    if found.contests:
        lines += ["", "#### Contests", "", _safe(legend(found.implementation))]
        lines += _absent(never(found))
    for (step, measure), of in contests(found).items():
        lines += _in_markdown(figures(found, step, measure, of))
    if sheet := means(found):
        lines += _in_markdown(sheet)
    if found.noise:
        told = noise(found.noise, found.implementation)
        lines += ["", "#### Noise", "", *(f"- {_safe(line)}" for line in told)]
    for one in (*curves(found), first_calls(found), host_times(found)):
        if one:
            lines += _in_markdown(one)
    if ran := kernels(found):
        lines += ["", "#### Kernels that ran", ""]
        lines += [f"- {_safe(name)}: {', '.join(map(_code, some))}{_and(more)}" for name, some, more in ran]
    return "\n".join(lines) + "\n"


def _in_markdown(sheet: Sheet) -> list[str]:
    ruler = ["---" if i < sheet.labels else "---:" for i in range(len(sheet.head))]
    table = [_row(map(_safe, sheet.head)), _row(ruler).replace(" ", "")]
    for row in sheet.rows:
        table.append(_row(_safe(f"{of.text} ({of.more})" if of.more else of.text) for of in row))
    notes = [line for note in sheet.notes for line in ("", _safe(note))]
    return ["", f"#### {_safe(sheet.title)}", "", *table, *notes, *_absent(sheet.absent)]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _absent(found: Sequence[Absence]) -> list[str]:
    lines = [f"- absent: {_safe(one.who)} ({_safe(one.where)}): {_safe(one.why)}" for one in found]
    return ["", *lines] if lines else []


def _safe(text: str) -> str:
    """Text that is no markup and ends no cell."""
    return re.sub(r"([|\\`])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _code(text: str) -> str:
    return f"`{' '.join(text.split()).replace('`', '')}`"


def _and(more: int) -> str:
    return f" and {more} more" if more else ""


# ---------------------------------------------------------------- the page


@dataclass(frozen=True)
class Part:
    """A code path on the page.

    Attributes:
        anchor: unique on the page.
        contests: each table and the picture of its ratios.
        curves: memory and time against T.
    """

    anchor: str
    name: str
    facts: list[tuple[str, str]]
    gates: Sheet | None
    legend: str
    never: list[Absence]
    contests: list[tuple[Sheet, Picture | None]]
    means: Sheet | None
    noise: list[str]
    pictures: list[Picture]
    curves: list[Sheet]
    others: list[Sheet]
    kernels: list[tuple[str, list[str], int]]


def render(found: Sequence[Speed]) -> str:
    """The page: one HTML file that needs nothing else.

    Args:
        found: runs, each on a code path.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    kind, gist = headline(gate for one in found for gate in one.gates) if found else ("other", "Nothing ran")
    style = "".join((TEMPLATES / name).read_text() for name in ("style.css", "speed.css"))
    return environment.get_template("speed.html").render(
        style=Markup(style),
        svg=Markup,
        kind=kind,
        headline=gist,
        devices=", ".join(dict.fromkeys(one.device for one in found)),
        failed=[(one.path, of, _state(of)) for one in found for of in one.gates if _state(of) != "held"],
        digits=digits,
        parts=[_part(one, f"path-{n}") for n, one in enumerate(found, 1)],
    )


def _part(found: Speed, anchor: str) -> Part:
    from . import plots_of_speed as plots

    tables: list[tuple[Sheet, Picture | None]] = []
    for n, ((step, measure), of) in enumerate(contests(found).items()):
        drawing = plots.ratios(found, step, measure)
        picture = drawing.picture(f"{anchor}-ratios-{n}") if drawing else None
        tables.append((figures(found, step, measure, of), picture))
    drawings = {name: draw(found) for name, draw in _drawings().items()}
    return Part(
        anchor=anchor,
        name=f"{found.implementation} on {found.device}, {found.path}",
        facts=facts(found),
        gates=gates(found),
        legend=legend(found.implementation),
        never=never(found),
        contests=tables,
        means=means(found),
        noise=noise(found.noise, found.implementation) if found.noise else [],
        pictures=[of.picture(f"{anchor}-{name[:-4]}") for name, of in drawings.items() if of],
        curves=curves(found),
        others=[sheet for sheet in (first_calls(found), host_times(found)) if sheet],
        kernels=kernels(found),
    )


def _drawings() -> Mapping[str, Callable[[Speed], Drawing | None]]:
    """By file, what draws it; None if there is nothing to draw."""
    from . import plots_of_speed as plots

    return {MEMORY: plots.memory, LATENCY: plots.latency, ROOFLINE: plots.roofline}


def write(found: Speed, folder: Path) -> list[Path]:
    """Writes the tables, the page and the pictures that there are data for; returns where.

    Raises:
        OSError: if a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / TABLES, folder / PAGE]
    written[0].write_text(markdown(found), encoding="utf-8")
    written[1].write_text(render([found]), encoding="utf-8")
    for name, draw in _drawings().items():
        path = folder / name
        if drawing := draw(found):
            drawing.png(path)
            written.append(path)
        else:
            path.unlink(missing_ok=True)  # of an earlier run
    return written
