"""The kill matrix: mutant x property, as JSON to keep and as Markdown to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from .catalogue import CATALOGUE
from .mutant import ROOT
from .runner import KILLS, Score
from .score import PROPERTIES
from .stream import LIKELIEST

OUT = ROOT / "reports" / "out" / "mutants"
COMMITTED = ROOT / "reports" / "baselines" / "kill-matrix.json"


DOES = {m.name: m.does for m in CATALOGUE}


class Matrix(msgspec.Struct):
    """All scores of a run."""

    version: int
    scores: list[Score]


def read(path: Path) -> list[Score]:
    """Raises ValueError for a file that is not a matrix."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Matrix).scores
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no kill matrix: {error}") from None


def killers(path: Path = COMMITTED) -> dict[str, list[str]]:
    """The case that found each mutant soonest in the committed matrix."""
    if not path.exists():
        return {}
    found = {}
    for score in read(path):
        first = score.first
        if first is not None and first.case.startswith("b"):
            found[score.name] = [first.case]
    return found


def write(scores: Sequence[Score], out: Path, does: Mapping[str, str] = DOES) -> int:
    """Prints the summary, writes matrix.json and matrix.md; 0 if every mutant that should be was found."""
    out.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(Matrix(1, list(scores))), indent=1)
    (out / "kill-matrix.json").write_bytes(content)
    text = markdown(scores, does)
    (out / "kill-matrix.md").write_text(text)
    print()
    print(summary(scores))
    print(f"\nmatrix: {out / 'kill-matrix.md'}")
    return 1 if [s for s in scores if not s.equivalent and not s.killed and s.outcome != "not run"] else 0


def summary(scores: Sequence[Score]) -> str:
    """The figures, and the survivors by name."""
    counted = [s for s in scores if not s.equivalent]
    killed = [s for s in counted if s.killed]
    outcomes = Counter(s.outcome for s in counted)
    lines = [
        f"mutants: {len(counted)} and {len(scores) - len(counted)} equivalent; found: {len(killed)}"
        f" ({', '.join(f'{n} {what}' for what, n in sorted(outcomes.items()))})"
    ]
    reports = {s.report for s in counted if s.report}
    lines.append(f"distinct public reports: {len(reports)}")
    seconds = [s.first.seconds for s in killed if s.first is not None and s.lane == "cpu" and s.cases]
    if seconds:
        lines.append(
            f"through the interpreter: found after {median(seconds):.1f} s (median), {max(seconds):.1f} s at"
            " most, the start of Python, PyTorch and Triton included"
        )
    alone = Counter(next(iter(s.found)) for s in killed if len(s.found) == 1)
    if alone:
        lines.append("seen by one property only: " + ", ".join(f"{n} by {p}" for p, n in alone.most_common()))
    for s in counted:
        if s.outcome == "not run":
            lines.append(f"not run here: {s.name} ({s.kind}): {s.trouble}")
        elif not s.killed:
            lines.append(f"NOT FOUND: {s.name} ({s.kind}): {s.outcome} {s.trouble}".strip())
        elif not s.witness_red and s.wants_witness:
            lines.append(f"found, but its witness is not red: {s.name} {s.trouble}".strip())
    lines += [f"said to be equivalent, and found: {s.name}" for s in scores if s.equivalent and s.killed]
    return "\n".join(lines)


def markdown(scores: Sequence[Score], does: Mapping[str, str] = DOES) -> str:
    """One table a kind. A cell: cases and seconds until the property showed it, and times over its limit."""
    used = [p for p in PROPERTIES if any(p in s.found for s in scores)]
    lines = ["# Kill matrix", "", *(f"- {line}" for line in summary(scores).splitlines()), ""]
    lines += [
        "A cell: cases / seconds until the property showed it / how many times over its limit then.",
        "",
    ]
    for kind in dict.fromkeys(s.kind for s in scores):
        lines += [f"## {kind[0].upper()}{kind[1:]}", ""]
        lines += ["| mutant | report | outcome | first | " + " | ".join(used) + " |"]
        lines += ["|" + "---|" * (4 + len(used))]
        for s in (s for s in scores if s.kind == kind):
            first = s.first
            when = f"{first.cases} / {first.seconds:.1f} s" if first else ""
            outcome = "equivalent" if s.equivalent and not s.killed else s.outcome
            row = [f"{s.name}: {does.get(s.name, '')}", s.report, outcome, when]
            row += [_cell(s, p) for p in used]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(score: Score, name: str) -> str:
    found = score.found.get(name)
    return "" if found is None else f"{found.cases} / {found.seconds:.0f} / {_times(found.margin)}"


def _times(margin: float) -> str:
    return "inf" if margin >= 1e300 else f"{margin:.3g}"


def write_order(path: Path) -> int:
    """Writes likeliest.txt: cases in the order in which each finds the most of what those before do not."""
    left = {
        s.name: {f.case for f in s.found.values() if f.case.startswith("b")}
        for s in read(path)
        if s.outcome in KILLS
    }
    left = {name: cases for name, cases in left.items() if cases}
    order: list[str] = []
    while left:
        best, _ = Counter(case for cases in left.values() for case in cases).most_common(1)[0]
        order.append(best)
        left = {name: cases for name, cases in left.items() if best not in cases}
    head = "# Written by `python -m tests.mutants order`: the cases that find most mutants, the most first."
    LIKELIEST.write_text("\n".join((head, *order, "")))
    print(f"{len(order)} cases in {LIKELIEST}")
    return 0
