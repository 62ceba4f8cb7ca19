"""A page of a run: one HTML file that needs nothing else, made from what the run left.

It is made from the records (`records.jsonl`), from what the run was (`run.json`), and, to say what has
changed, from what an earlier run came to (`outcomes`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from . import records
from .capabilities import by_dtype, parsed
from .coverage import Table, tables
from .errors import ReportError
from .outcomes import PREVIOUS, Outcome, Report, changes, outcome, read, report
from .plots import Picture
from .records import ErrorMap, Record, Verdict
from .repeats import always
from .run import RUN, Run
from .summary import EXECUTED, LAW, LEGEND, RECORDS, comparisons, counts

DESCRIPTION = """\
A page of a run: one HTML file that needs nothing else, readable on a phone and in the dark.

Each run writes it into its folder (reports/out, or FA_REPORT_DIR) as report.html, from what lies there:
records.jsonl, run.json and, if an earlier run left it, previous-report.json. This writes it again.

Exit status: 0 it was written; 2 wrong use, or a file that cannot be read."""

PAGE = "report.html"
"""The file."""

TEMPLATES = Path(__file__).parent / "templates"

DETAILED = 12
"""Failures that are shown with all that is known of them."""

PICTURES = 24
"""Error maps that are drawn; of more there are the words. A tenth of a second each."""

LISTED = 5_000
"""Rows of the table of comparisons: those that came closest to a limit."""

FEW = 20
"""Of fewer comparisons there are no figures and no tables of what was covered."""

TITLE = 2
"""Rules that the title of a failure names."""

CHANGES = 30
"""Newly broken comparisons that are listed, and mended ones."""

VERDICTS = {
    0: ("held", "Every claim that could run here held"),
    1: ("broken", "Something broke"),
    2: ("other", "The run did not come to a result"),
    3: ("other", "Nothing was executed"),
}
"""By exit status: a class, and the page's headline."""


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="of the run (default: where runs write)")
    parser.add_argument("--out", metavar="FILE", help=f"the page (default: {PAGE} in that folder)")
    parser.add_argument(
        "--baseline", metavar="FOLDER", help="of the run to compare with, instead of the one before"
    )


def main(args: argparse.Namespace) -> int:
    folder = Path(args.folder or os.environ.get("FA_REPORT_DIR") or Path(__file__).parent / "out")
    found, run = load(folder)
    earlier: Report | None = None
    label = "the previous run"
    if args.baseline:
        earlier, label = report(*load(Path(args.baseline))), f"the run in {args.baseline}"
    elif (folder / PREVIOUS).exists():
        earlier = read(folder / PREVIOUS)
    out = Path(args.out) if args.out else folder / PAGE
    try:
        page = render(found, run, earlier, label)
    except ReportError as error:
        raise ReportError(f"{folder / RECORDS}: {error}") from None
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{out}: {error.strerror}") from None
    print(f"page: {out}")
    return 0


def load(folder: Path) -> tuple[list[Record], Run | None]:
    """What a run left: its records, and what it was; None if it did not come to its end.

    Raises:
        ReportError: if there are no records, or a file cannot be read.
    """
    if not folder.is_dir():
        raise ReportError(f"FOLDER is {str(folder)!r}: no folder; it must be one that a run wrote into")
    if not (folder / RECORDS).is_file():
        raise ReportError(
            f"FOLDER is {str(folder)!r}: it has no {RECORDS}; it must be one that a run wrote into"
        )
    found = records.read(folder / RECORDS)
    path = folder / RUN
    if not path.exists():
        return found, None
    try:
        return found, msgspec.json.decode(path.read_bytes(), type=Run)
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: it does not say what a run was ({error})") from None


# ---------------------------------------------------------------- what is on the page


@dataclass(frozen=True)
class Failure:
    """A red comparison, or a red law.

    Attributes:
        anchor: unique on the page.
        title: what broke, shortly.
        record: of it.
        broken: its verdicts that do not hold, worst first.
        repeated, because: whether it is broken always, and how that is known.
        shrunk: how small the case is, in words.
        smallest: the smallest red comparison of the run that breaks one of the same rules, if it is another.
        pictures: of where it is wrong.
    """

    anchor: str
    title: str
    record: Record
    broken: list[Verdict]
    repeated: str
    because: str
    shrunk: str
    smallest: Record | None
    pictures: list[Picture]


def render(
    found: Sequence[Record], run: Run | None, earlier: Report | None = None, label: str = "the previous run"
) -> str:
    """The page.

    Args:
        found, run: what the run left.
        earlier: what another run came to.
        label: what to call that.
    """
    import jinja2
    from markupsafe import Markup

    red = sorted((r for r in found if r.status == "broken"), key=_badness)
    known = [record for record in found if _is_case(record.case)]
    many = sum(record.status in EXECUTED for record in comparisons(known)) >= FEW
    covered = tables(known, run.claims if run else {}) if many else []
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"number": number, "place": place}
    chosen = _detailed(red)
    smallest = _smallest(red)
    failures: list[Failure] = []
    for n, record in enumerate(chosen, 1):
        left = PICTURES - sum(len(failure.pictures) for failure in failures)
        failures.append(_failure(record, n, smallest, max(left, 0)))
    kind, headline = _headline(run, red)
    return environment.get_template("page.html").render(
        style=Markup((TEMPLATES / "style.css").read_text()),
        script=Markup((TEMPLATES / "script.js").read_text()),
        svg=Markup,
        kind=kind,
        headline=headline,
        reason=run.reason if run else "",
        facts=_facts(found, run),
        counts=counts(found),
        laws=_laws(run, found),
        failures=failures,
        red=len(red),
        others=[r for r in red if not any(r is f.record for f in failures)][:LISTED],
        changes=changes(report(found, run), earlier, label) if earlier else None,
        listed=CHANGES,
        matrix=by_dtype(known, run),
        figures=_figures(known) if many else [],
        few=FEW,
        coverage=covered,
        shade=_shade,
        rows=_rows(found),
        comparisons=len(comparisons(found)),
        unknown=len(found) - len(known),
        legend=LEGEND,
    )


def _is_case(text: str) -> bool:
    """Whether this is the id of a case: a file may come from anywhere."""
    try:
        parsed(text)
    except ValueError:
        return False
    return True


def _badness(record: Record) -> float:
    return -record.worst.margin if record.worst else 0.0


def _headline(run: Run | None, red: Sequence[Record]) -> tuple[str, str]:
    if run is None:
        return ("broken" if red else "other"), "The run did not come to its end"
    if run.status == 1 and red:
        laws = sum(record.origin == LAW for record in red)
        words = [f"{n} {what}{'s' if n > 1 else ''}" for n, what in
                 ((len(red) - laws, "red comparison"), (laws, "red law")) if n]  # fmt: skip
        return "broken", " and ".join(words)
    return VERDICTS.get(run.status, ("other", f"The run ended with status {run.status}"))


def _facts(found: Sequence[Record], run: Run | None) -> list[tuple[str, str]]:
    """What ran, where, with which versions."""
    paths = sorted({record.path for record in found})
    if run is None:
        names = sorted({record.implementation for record in found})
        return [("implementation", ", ".join(names)), ("code path", ", ".join(paths))]
    ended = f"{run.ended.replace('T', ' ').replace('+00:00', ' UTC')}, after {run.seconds:g} s"
    python = f", Python {run.python}" if run.python else ""
    facts = [
        ("implementation", run.implementation),
        ("manifest", run.manifest),
        ("code path", ", ".join(paths)),
        ("machine", run.machine + (", Triton interpreted" if "interpreter" in paths else "")),
        ("versions", f"torch {run.torch}, Triton {run.triton}{python}"),
        ("ended", ended if run.ended else ""),
        ("exit status", str(run.status)),
        ("arguments", " ".join(run.arguments)),
    ]  # fmt: skip
    return [(name, value) for name, value in facts if value]


def _laws(run: Run | None, found: Sequence[Record]) -> list[str]:
    """What became of the tests of the laws."""
    if run is None or not run.laws:
        return []
    outcomes = [law.outcome for law in run.laws]
    lines = [f"tests of laws: {outcomes.count('passed')} held, {outcomes.count('failed')} red,"
             f" {outcomes.count('skipped')} skipped"]  # fmt: skip
    lines += [f"red: {law.name}" for law in run.laws if law.outcome == "failed"]
    return lines


# ---------------------------------------------------------------- failures


def _detailed(red: Sequence[Record]) -> list[Record]:
    """Failures to show in full: of each set of broken rules the smallest, then the next; pictures first."""
    rank: dict[str, int] = {}
    ranked = []
    for record in sorted(red, key=_size):
        of_kind = rank[record.reason] = rank.get(record.reason, -1) + 1
        ranked.append((of_kind, not record.maps, _badness(record), _size(record), record))
    return [record for *_, record in sorted(ranked, key=lambda item: item[:-1])[:DETAILED]]


def _size(record: Record) -> tuple[int, int]:
    """Of a case: its scores, then its rows times dimensions; what is no case is large."""
    if not _is_case(record.case):
        return 2**62, 0
    case = parsed(record.case)
    entries = 1 if case.ragged else case.batch
    scores = entries * case.heads_q * sum(q * k for q, k in case.pairs)
    rows = entries * case.heads_q * sum(q + k for q, k in case.pairs)
    return scores, rows * (case.dim + case.dim_v)


def _smallest(red: Sequence[Record]) -> dict[str, Record]:
    """By broken rule, the smallest red comparison."""
    found: dict[str, Record] = {}
    for record in sorted(comparisons(red), key=_size):
        for rule in _rules(record):
            found.setdefault(rule, record)
    return found


def _rules(record: Record) -> list[str]:
    """What a red record broke, by tensor."""
    return [f"{v.tensor}: {v.rule}" for v in record.verdicts if not v.held]


def _failure(record: Record, n: int, smallest: dict[str, Record], most: int) -> Failure:
    """What is shown of a red record, with at most so many pictures drawn."""
    broken = sorted((v for v in record.verdicts if not v.held), key=lambda v: -v.margin)
    repeated, because = always(record)
    others = [smallest[rule] for rule in _rules(record) if rule in smallest]
    least = min(others, key=_size, default=record)
    return Failure(
        anchor=f"failure-{n}",
        title=_title(record, broken),
        record=record,
        broken=broken,
        repeated=repeated,
        because=because,
        shrunk=_shrunk(record),
        smallest=least if _size(least) < _size(record) else None,
        pictures=[p for i, of in enumerate(record.maps) for p in _pictures(of, f"map-{n}-{i}", i < most)],
    )


def _title(record: Record, broken: Sequence[Verdict]) -> str:
    """The tensors that are wrong and the rules that say so; of many the first few."""
    tensors = list(dict.fromkeys(v.tensor for v in record.verdicts if not v.held))
    rules = list(dict.fromkeys(map(_rule, broken)))
    if not rules or record.reason.startswith("raised"):
        return record.reason or "broken"
    more = f" and {len(rules) - TITLE} more rules" if len(rules) > TITLE + 1 else ""
    return f"{', '.join(tensors)}: {', '.join(rules[:TITLE] if more else rules)}{more}"


def _rule(verdict: Verdict) -> str:
    """A rule, whichever of several runs of the case broke it."""
    from tests.execution import FOLLOWS, REPEATS

    run, colon, rule = verdict.rule.partition(": ")
    return rule if colon and run in (*REPEATS, FOLLOWS) else verdict.rule


def _shrunk(record: Record) -> str:
    if record.origin == "generated":
        return "Generated, and shrunk to the smallest case that fails."
    if record.origin == LAW:
        return "A law, not a comparison."
    return f"Not shrunk: it is from a list ({record.origin}), and runs as it stands there."


def _pictures(of: ErrorMap, name: str, drawn: bool) -> list[Picture]:
    from .plots_of_errors import in_words, pictures

    return pictures(of, name) if drawn else [in_words(of)]


def _figures(found: Sequence[Record]) -> list[Picture]:
    from .plots import of_run

    return of_run(comparisons(found))


# ---------------------------------------------------------------- tables


@dataclass(frozen=True)
class Row:
    """A row of the table of comparisons."""

    outcome: Outcome
    closest: str
    margin: float


def _rows(found: Sequence[Record]) -> list[Row]:
    """Worst first."""
    rows = []
    for record in comparisons(found):
        worst = record.worst
        rows.append(Row(
            outcome(record),
            f"{worst.tensor}: {worst.rule}" if worst else record.reason,
            worst.margin if worst else 0.0,
        ))  # fmt: skip
    rows.sort(key=lambda row: (row.outcome.status != "broken", -row.margin))
    return rows[:LISTED]


def _shade(table: Table) -> Callable[[int], str]:
    """How dark a count is, 0 to 1, by the square root: a few are to differ from none."""
    return lambda count: f"{(count / max(table.largest, 1)) ** 0.5:.2f}"


def number(x: float | None) -> str:
    """For a reader; None is what is not finite."""
    if x is None or x in (float("inf"), float("-inf")):
        return "∞"
    return f"{x:.0f}" if 100 <= abs(x) < 100_000 else f"{x:.3g}"


def place(where: Sequence[int] | None) -> str:
    return "" if where is None else f"[{', '.join(map(str, where))}]"
