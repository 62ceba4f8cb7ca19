"""Which implementation has which property: a table of several runs, from their records.

A property is claimed or it is not; what is claimed was executed so many times, and held or broke. Of what
broke, the smallest case is listed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import records
from .records import Record, Verdict
from .run import RUN, LawTest, Run
from .run import read as read_run
from .summary import RECORDS

if TYPE_CHECKING:
    from tests.cases import Case

CAPABILITIES = "capabilities"
"""The files, but for .md and .json."""

VERSION = 1
"""Of the JSON file."""

LAWS = "laws"
REASON = 100
"""Characters of a note that are kept."""

WIDTH = 160
"""Of the table, where the terminal does not say."""


class Cell(msgspec.Struct, frozen=True):
    """What became of a property of an implementation.

    Attributes:
        state: "held", "broken", "not claimed", "not run" (claimed, and in no case that ran).
        executed: comparisons in which it could have broken; of the laws, how many laws.
        broken, known: in how many of them it did, and did as is known.
        smallest: the smallest case in which it broke; of the laws, their names.
        why: what broke there.
    """

    state: str
    executed: int = 0
    broken: int = 0
    known: int = 0
    smallest: str = ""
    why: str = ""

    def __str__(self) -> str:
        if self.state not in ("held", "broken"):
            return self.state
        known = f", {self.known} known" if self.known else ""
        if self.state == "held":
            return f"held {self.executed}{known}"
        return f"broken {self.broken} of {self.executed}{known}"


class Row(msgspec.Struct, frozen=True):
    """An implementation.

    Attributes:
        name: by which `--impl` knows it.
        status: exit status of its run.
        reason: why that is so.
        paths: the code that ran: "sm90", "interpreter", ...
        machine, torch, triton: as of `run.Run`; empty if the run did not come to its end.
        cells: by property.
    """

    name: str
    status: int
    reason: str
    paths: list[str]
    machine: str
    torch: str
    triton: str
    cells: dict[str, Cell]


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The whole: what ran, and what could not run here, and why."""

    version: int = VERSION
    rows: list[Row]
    not_runnable: dict[str, str]


# ---------------------------------------------------------------- properties

Claims = Mapping[str, Any]


@dataclass(frozen=True)
class Property:
    """A column of the design: a kind of case, or a kind of rule.

    Attributes:
        claimed: whether claims say so.
        of_case: whether a case (`tests.cases.Case`) is about it, for somebody who claims that.
        of_verdict: whether a verdict is.
    """

    claimed: Callable[[Claims], bool]
    of_case: Callable[[Any, Claims], bool] = lambda case, claims: True
    of_verdict: Callable[[Verdict], bool] = lambda verdict: True


def _said(name: str) -> Callable[[Claims], bool]:
    return lambda claims: bool(claims.get(name))


def _contract(v: Verdict) -> bool:
    return v.reference == "contract" and not _repeated(v) and not _follows(v)


def _repeated(v: Verdict) -> bool:
    from tests.execution import REPEATS

    return v.rule.startswith(tuple(REPEATS))


def _follows(v: Verdict) -> bool:
    from tests.execution import FOLLOWS

    return v.rule.startswith(FOLLOWS)


def _about(*tensors: str) -> Callable[[Verdict], bool]:
    """Verdicts on the numbers of some tensors."""
    return lambda v: v.tensor in tensors and v.reference != "contract" and not (_repeated(v) or _follows(v))


def _strided(case: Any, claims: Claims) -> bool:
    return case.layout != ("bshd" if case.ragged else claims.get("contiguous", "bhsd"))


DTYPES = ("float16", "bfloat16", "float32")
GRADIENTS = ("dq", "dk", "dv")

PROPERTIES: dict[str, Property] = {
    **{
        dtype: Property(
            lambda claims, dtype=dtype: dtype in claims.get("dtypes", ()),  # type: ignore[misc]
            lambda case, claims, dtype=dtype: case.dtype == dtype,  # type: ignore[misc]
        )
        for dtype in DTYPES
    },
    "out": Property(lambda claims: True, of_verdict=_about("out")),
    "lse": Property(_said("lse"), of_verdict=_about("lse")),
    "gradients": Property(_said("backward"), lambda case, claims: case.backward, _about(*GRADIENTS)),
    "gradients through lse": Property(_said("lse_grad"), lambda case, claims: case.d_lse, _about(*GRADIENTS)),
    "causal": Property(lambda claims: "causal" in claims.get("masks", ()), lambda case, claims: case.causal),
    "Sq != Sk": Property(_said("cross_lengths"), lambda case, claims: any(q != k for q, k in case.pairs)),
    "Dv != D": Property(
        lambda claims: not claims.get("equal_dims"), lambda case, claims: case.dim != case.dim_v
    ),
    "several query heads a KV head": Property(
        _said("gqa"), lambda case, claims: case.heads_q != case.heads_kv
    ),
    "rows that see no key": Property(_said("dead_rows"), lambda case, claims: case.dead_rows),
    "empty inputs": Property(_said("empty"), lambda case, claims: case.empty),
    "strided inputs": Property(_said("strided"), _strided),
    "ragged batches": Property(_said("ragged"), lambda case, claims: case.ragged),
    "same bits again": Property(
        lambda claims: bool(claims.get("deterministic") or claims.get("deterministic_backward")),
        of_verdict=lambda v: _repeated(v) and v.reference == "contract" and ":" not in v.rule,
    ),
    "no state between calls": Property(lambda claims: True, of_verdict=_follows),
    "contract": Property(lambda claims: True, of_verdict=_contract),
}
"""By name, in the order of the table. (Shape, dtype, device, inputs unchanged, nothing written beside, memory
of its own and no exception, crash or hang are the contract: where there is no result, that and what the case
is about are broken.)"""


def row(name: str, folder: Path, status: int) -> Row:
    """An implementation, from what its run left.

    Args:
        name: by which `--impl` knows it.
        folder: of the run.
        status: how it ended.
    """
    run = read_run(folder / RUN)
    path = folder / RECORDS
    found = records.read(path) if path.is_file() else []
    reason = run.reason if run else "the run did not come to its end: see what it printed"
    cells = {name: _cell(of, found, run) for name, of in PROPERTIES.items()}
    cells[LAWS] = _laws(run.laws if run else [])
    return Row(
        name=name,
        status=status,
        reason=reason,
        paths=sorted({record.path for record in found}),
        machine=run.machine if run else "",
        torch=run.torch if run else "",
        triton=run.triton if run else "",
        cells=cells,
    )


def by_dtype(found: Sequence[Record], run: Run | None) -> dict[str, dict[str, Cell]]:
    """What became of each property that is no dtype, by dtype: of one run."""
    dtypes = [name for name in DTYPES if run is None or PROPERTIES[name].claimed(run.claims)]
    of_dtype = {dtype: [record for record in found if record.dtype == dtype] for dtype in dtypes}
    return {
        name: {dtype: _cell(of, records_of, run) for dtype, records_of in of_dtype.items()}
        for name, of in PROPERTIES.items()
        if name not in DTYPES
    }


@functools.lru_cache(maxsize=10_000)
def parsed(case: str) -> Case:
    """The case of an id; tables ask for the same ones again and again."""
    from tests.cases import parse_case

    return parse_case(case)


def _cell(of: Property, found: Iterable[Record], run: Run | None) -> Cell:
    from tests.known_failures import LAW, STATUS

    if run is not None and not of.claimed(run.claims):
        return Cell("not claimed")
    executed = broken = known = 0
    smallest: list[tuple[int, str, str]] = []
    for record in found:
        if record.status not in ("held", "broken", STATUS) or record.origin == LAW:
            continue
        case = parsed(record.case)
        if not of.of_case(case, run.claims if run else {}):
            continue
        broke = {(v.tensor, v.rule) for v in record.verdicts if not v.held}
        verdicts = [v for v in record.verdicts if of.of_verdict(v) and not _echoes(v, broke)]
        if not verdicts:
            continue
        executed += 1
        if failed := next((v for v in verdicts if not v.held), None):
            known += record.status == STATUS
            broken += record.status != STATUS
            size = case.heads_q * sum(q * k for q, k in case.pairs) * (1 if case.ragged else case.batch)
            why = f"{failed.tensor}: {failed.rule}"
            if failed.note:
                why += f"; {failed.note.splitlines()[0][:REASON]}"
            smallest.append((size + case.dim + case.dim_v, record.case, why))
    if not executed:
        return Cell("not run")
    _, first, why = min(smallest, default=(0, "", ""))
    return Cell("broken" if broken else "held", executed, broken, known, first, why)


def _echoes(v: Verdict, broke: Container[tuple[str, str]]) -> bool:
    """Whether a further run broke what the first had broken already: that says nothing of repetition."""
    rule = v.rule.partition(": ")[2]
    return bool(rule) and not v.held and (v.tensor, rule) in broke


def _laws(tests: Sequence[LawTest]) -> Cell:
    """How many laws held: those with a test that passed or failed."""
    from tests.laws import LAWS as named

    outcomes: dict[str, set[str]] = {}
    for test in tests:
        for law in named.keys() & set(re.split(r"[\[\]-]", test.name)):
            outcomes.setdefault(law, set()).add(test.outcome)
    tried = {law: found for law, found in outcomes.items() if found & {"passed", "failed"}}
    if not tried:
        return Cell("not claimed" if outcomes else "not run")
    broken = [law for law, found in tried.items() if "failed" in found]
    return Cell("broken" if broken else "held", len(tried), len(broken), 0, ", ".join(broken))


# ---------------------------------------------------------------- for a reader

STYLE = {"held": "green", "broken": "bold red", "not claimed": "dim", "not run": "yellow"}


def show(found: Capabilities, console: Console | None = None) -> None:
    """Prints the table, and below it what broke and what could not run."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(file=console.file, highlight=False, width=WIDTH)
    table = Table(title="attention: implementations and their properties", title_justify="left", box=None)
    table.add_column("property")
    for of in found.rows:
        table.add_column(of.name, justify="right")
    for name in (*PROPERTIES, LAWS):
        table.add_row(name, *(Text(str(c), STYLE[c.state]) for c in (of.cells[name] for of in found.rows)))
    console.print()
    console.print(table)
    for line in _below(found):
        console.print(Text(line))


def _below(found: Capabilities) -> list[str]:
    """What the table has no room for."""
    lines = [""]
    for of in found.rows:
        where = f" on {', '.join(of.paths)}" if of.paths else ""
        lines.append(f"{of.name}{where}: {of.reason} ({of.status})")
    broken: dict[tuple[str, str, str], list[str]] = {}
    for of in found.rows:
        for name, cell in of.cells.items():
            if cell.smallest:
                broken.setdefault((of.name, cell.smallest, cell.why), []).append(name)
    if broken:
        lines += ["", "broken, the smallest case of each:"]
        lines += [
            f"  {name}, {', '.join(properties)}: {case}" + (f" ({why})" if why else "")
            for (name, case, why), properties in broken.items()
        ]
    if found.not_runnable:
        lines += ["", "not runnable here:"]
        lines += [f"  {name}: {why}" for name, why in found.not_runnable.items()]
    return lines


def markdown(found: Capabilities) -> str:
    """The table as a page."""
    names = [of.name for of in found.rows]
    lines = ["### Attention: implementations and their properties", ""]
    lines += ["| property | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 1)]
    for name in (*PROPERTIES, LAWS):
        lines.append("| " + " | ".join([name, *(str(of.cells[name]) for of in found.rows)]) + " |")
    versions = dict.fromkeys((of.machine, of.torch, of.triton) for of in found.rows if of.torch)
    lines += ["", *(f"{machine}, torch {torch}, triton {triton}." for machine, torch, triton in versions)]
    lines += [f"- {line.strip()}" if line and not line.endswith(":") else f"\n{line}\n" if line else ""
              for line in _below(found)]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def write(found: Capabilities, folder: Path) -> list[Path]:
    """Writes the table as Markdown and as JSON; returns where."""
    folder.mkdir(parents=True, exist_ok=True)
    page, data = (folder / f"{CAPABILITIES}.{kind}" for kind in ("md", "json"))
    page.write_text(markdown(found))
    data.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return [page, data]
