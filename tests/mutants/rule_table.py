"""What the rules of other suites find of the planted faults, beside what ours does, on the same inputs.

    python -m tests.mutants.rule_table                 # all of them; writes rule-table.json and rule-table.md
    python -m tests.mutants.rule_table --jobs 1 NAME   # these only

Every fault that a case can show through the interpreter is planted, and three sets of inputs go through it,
each case once amid ordinary numbers. Those results are judged by every rule of `tests.rules` and by our
judge. Where our judge sees nothing in a whole set, our suite then runs that set as it always does, amid
hostile memory; but not the long case, which costs too much: what memory shows there, short cases show.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from .. import execution as executing
from ..cases import Case
from ..comparison import Outcome, Prepared, compare, judged
from ..execution import Execution, Surroundings
from ..implementations import OWN, Implementation, load
from ..interpreter import patch_once_per_launch
from ..ragged import BY_KEY
from ..rules import JUDGED, RULES, own_precision
from .catalogue import CATALOGUE
from .mutant import ROOT, DoesNotApply, Mutant, plant
from .runner import environment
from .score import ADDRESS_SPACE, BROKEN_CODE

Array = NDArray[np.float64]

OUT = ROOT / "reports" / "out" / "rules"
CPU = torch.device("cpu")
ORDINARY = Surroundings(1.0, 1)
"""Memory like a GPU's that is used again and again: numbers beside the inputs and in what is allocated, and
room for what is written too far. In a CPU's plain memory that crashes, now and then."""

OURS, JUDGE = "this suite", "this suite's judge alone"
"""Our rows: with what the suite does about memory, and only judging the results that all rules judge."""

ALL = (OURS, JUDGE, *RULES)

SECONDS = 90
"""That a mutant may take; one that takes longer hangs: every rule kills it."""

_USUAL = Case(dim=64, dim_v=64, len_q=128, len_k=128)
_EDGE = Case(heads_q=2, heads_kv=2, dim=32, dim_v=32, d_lse=True)

SETS: Mapping[str, tuple[Case, ...]] = {
    # N(0, 1), square, contiguous, multiples of the tile and one length that is none
    "as their tests": (
        replace(_USUAL, batch=2, causal=True),
        replace(_USUAL, dtype="bfloat16"),
        replace(_USUAL, len_q=113, len_k=113, dtype="bfloat16", causal=True),
        replace(_USUAL, heads_q=2, heads_kv=2, dim=40, dim_v=40),
    ),
    # the first rows see few keys and are large, the last ones many and small
    "long causal": (replace(_USUAL, len_q=512, len_k=512, dtype="bfloat16", causal=True),),
    "our edges": (
        # a key that leaks in with score 0 dominates
        replace(_EDGE, len_q=65, len_k=67, values="negative"),
        # sums of terms of one sign; groups of heads
        replace(_EDGE, heads_q=6, len_q=17, len_k=19, values="mean", dtype="bfloat16", causal=True),
        # heads that must not be mixed up; aligned at the bottom right
        replace(_EDGE, heads_q=4, len_q=5, len_k=70, values="loud", causal=True),
        # rows that see no key
        replace(_EDGE, len_q=70, len_k=5, dtype="bfloat16", causal=True),
        replace(
            _EDGE, heads_q=4, lengths=((33, 65), (7, 3), (1, 20)), past=(2, 1), layout="bshd", causal=True
        ),
        replace(_EDGE, batch=2, len_q=33, len_k=40, dim=40, dim_v=24, values="large", layout="strided"),
    ),
}
"""What the faults are looked for with, by the name of the set."""

AMID_HOSTILE = {"as their tests": False, "our edges": True}
"""Sets that our suite also runs in its own way, and whether amid infinities too, as it runs named cases."""


class Seen(msgspec.Struct):
    """A case that was judged.

    Attributes:
        red: by rule, the tensors that broke it.
        failed_to_compile: the planted code is none.
    """

    of_set: str
    case: str
    red: dict[str, list[str]]
    failed_to_compile: bool = False


class Event(msgspec.Struct, omit_defaults=True):
    """A line of what the process with the fault writes: a case that begins, one that was judged, or the end.

    Attributes:
        begins: [set, case].
        amid_hostile: whether it is our suite's own run of it.
    """

    begins: list[str] = []
    amid_hostile: bool = False
    seen: Seen | None = None
    done: bool = False


class Row(msgspec.Struct):
    """What became of a mutant.

    Attributes:
        outcome: "measured"; or why it counts for nothing: "does not apply", "compile error", "trouble".
        red: by set and rule, the tensors that broke it: "case tensor"; "crash" or "hang" for any.
        seconds: that it took.
        trouble: what is to be known about it.
    """

    name: str
    kind: str
    outcome: str = "measured"
    red: dict[str, dict[str, list[str]]] = {}
    seconds: float = 0.0
    trouble: str = ""

    def add(self, of_set: str, rule: str, what: Sequence[str]) -> None:
        found = self.red.setdefault(of_set, {}).setdefault(rule, [])
        found += [one for one in what if one not in found]


class Table(msgspec.Struct):
    """A run.

    Attributes:
        sets: ids of cases.
        control: what is red without a fault: no kill where it is red with one.
    """

    version: int
    machine: str
    date: str
    sets: dict[str, list[str]]
    control: Row
    rows: list[Row]


# ---------------------------------------------------------------- in the process that has the fault


@dataclass(frozen=True)
class References:
    """Of a case: the exact tensors, and those in the precision of the inputs by kind."""

    r: dict[str, Array]
    p: dict[str, dict[str, Array]]


def references(prepared: Prepared) -> References:
    """Of a whole case; the sequences of a ragged batch, no two of equal lengths, lie behind one another.

    Rows past the last one are 0.
    """
    kinds = {rule.own for rule in RULES.values()}
    exact: list[dict[str, Array]] = []
    own: dict[str, list[dict[str, Array]]] = {kind: [] for kind in kinds}
    for _, of_part in prepared.parts:
        exact.append(of_part.in_float64)
        for kind in kinds:
            own[kind].append(
                own_precision(kind, *of_part.tensors, causal=of_part.case.causal, scale=of_part.case.scale)
            )
    past = prepared.case.past
    return References(_joined(exact, past), {kind: _joined(parts, past) for kind, parts in own.items()})


def _joined(parts: Sequence[Mapping[str, Array]], past: tuple[int, int]) -> dict[str, Array]:
    joined = {name: np.concatenate([part[name] for part in parts], axis=2) for name in JUDGED}
    return {
        name: np.pad(x, ((0, 0), (0, 0), (0, past[name in BY_KEY]), (0, 0))) for name, x in joined.items()
    }


def by_rules(results: Mapping[str, Array], known: References, dtype: str) -> dict[str, list[str]]:
    """The tensors that break each rule; one that is missing breaks all."""
    with np.errstate(invalid="ignore", over="ignore"):
        return {
            name: [
                tensor
                for tensor in JUDGED
                if tensor not in results
                or not rule.held(tensor, results[tensor], known.r[tensor], known.p[rule.own][tensor], dtype)
            ]
            for name, rule in RULES.items()
        }


def by_judge(results: dict[str, Array], case: Case, of: Implementation, prepared: Prepared) -> list[str]:
    """The tensors that our judge finds red in the results that the others judge."""
    missing = {"lse", *JUDGED} - set(results)
    tiles = of.tiles(case, CPU) if of.tiles is not None else None
    record = judged(case, of, Outcome(of.path(CPU), tiles, Execution(results, [])), prepared, "replay")
    return sorted(missing | {v.tensor for v in record.verdicts if not v.held})


def amid_ordinary_numbers(of_set: str, case: Case, of: Implementation, prepared: Prepared) -> Seen:
    """Runs a case once and judges the results by all rules. What raises is red for everybody."""
    try:
        results, _ = executing._run(of, case, prepared.inputs, CPU, ORDINARY)
    except (Exception, SystemExit) as error:  # what a planted fault does must not end the process
        text = f"{type(error).__name__}: {error} {type(error.__cause__).__name__}: {error.__cause__}"
        red = {rule: ["raises"] for rule in ALL if rule != OURS}
        return Seen(of_set, case.id, red, bool(BROKEN_CODE.search(text)))
    red = by_rules(results, references(prepared), case.dtype)
    red[JUDGE] = by_judge(results, case, of, prepared)
    return Seen(of_set, case.id, {rule: tensors for rule, tensors in red.items() if tensors})


def watched(events: Path, names: Sequence[str], control: bool) -> None:
    """Runs sets and writes what it sees.

    All ordinary runs come before our suite's own, which leaves NaN in memory that is then handed out again.

    Args:
        events: the file that it writes to.
        names: of sets.
        control: nothing is planted: everything runs, whatever was seen.
    """
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    patch_once_per_launch()
    of = load(OWN)
    known = {case: Prepared(case) for name in names for case in SETS[name]}
    found: set[str] = set()
    with open(events, "ab", buffering=0) as file:

        def write(event: Event) -> None:
            file.write(msgspec.json.encode(event) + b"\n")

        for name in names:
            for case in SETS[name]:
                write(Event(begins=[name, case.id]))
                seen = amid_ordinary_numbers(name, case, of, known[case])
                if JUDGE in seen.red:
                    found.add(name)
                write(Event(seen=seen))
        for name in names:
            if name not in AMID_HOSTILE or (name in found and not control):
                continue
            for case in SETS[name]:
                write(Event(begins=[name, case.id], amid_hostile=True))
                record = compare(case, of, CPU, prepared=known[case], hostile=AMID_HOSTILE[name])
                red = sorted({v.tensor for v in record.verdicts if not v.held})
                write(Event(seen=Seen(name, case.id, {OURS: red} if red else {})))
                if red and not control:
                    break
        write(Event(done=True))


# ---------------------------------------------------------------- from outside


def measure(mutant: Mutant, control: bool = False) -> Row:
    """Plants a mutant in a temporary copy of the project and runs all sets there."""
    row = Row(mutant.name, mutant.kind)
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="rules-") as name:
        folder = Path(name)
        try:
            plant(mutant, folder)
        except DoesNotApply as error:
            row.outcome, row.trouble = "does not apply", str(error)
            return row
        left = list(SETS)
        while left:
            left = _run(folder, left, started + (4 if control else 1) * SECONDS, row, control)
    for of_set in row.red.values():  # whatever the judge sees, the suite does
        if JUDGE in of_set:
            of_set[OURS] = list(dict.fromkeys([*of_set.get(OURS, []), *of_set[JUDGE]]))
    row.seconds = time.time() - started
    return row


def _run(folder: Path, names: list[str], until: float, row: Row, control: bool) -> list[str]:
    """One process for these sets; which of them are yet to be run, if it died amid one."""
    events = folder / "events"
    events.write_bytes(b"")
    command = [sys.executable, "-m", "tests.mutants.rule_table", "--events", str(events)]
    command += ["--control"] * control + ["--", *names]
    with open(folder / "said", "wb") as said:
        process = subprocess.Popen(command, cwd=folder, env=environment("cpu", folder), stdout=said,
                                   stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        hangs = False
        try:
            process.wait(max(until - time.time(), 1))
        except subprocess.TimeoutExpired:
            hangs = True
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    begins, done = Event(), False
    for line in events.read_bytes().splitlines():
        try:
            event = msgspec.json.decode(line, type=Event)
        except msgspec.DecodeError:  # cut short by a crash
            continue
        done |= event.done
        if event.begins:
            begins = event
        if event.seen is not None:
            seen = event.seen
            if seen.failed_to_compile:
                row.outcome, row.trouble = "compile error", seen.case
                return []
            for rule, tensors in seen.red.items():
                row.add(seen.of_set, rule, [f"{seen.case} {tensor}" for tensor in tensors])
    if done:
        return []
    if not begins.begins or (process.returncode == 1 and not hangs):  # ours, not the kernels'
        row.outcome, row.trouble = "trouble", (folder / "said").read_text(errors="replace")[-2000:].strip()
        return []
    died, what = begins.begins[0], "hang" if hangs else "crash"
    row.trouble = f"{what} ({process.returncode}) in {died}: {begins.begins[1]}"
    after = names[names.index(died) + 1 :]
    if begins.amid_hostile:  # the others' results are known
        row.add(died, OURS, [what])
        if hangs:
            for name in after:
                row.add(name, OURS, [what])
        return []
    for name in (died, *after) if hangs else (died,):
        for rule in ALL:
            row.add(name, rule, [what])
    return [] if hangs else after


def chosen(names: Sequence[str]) -> list[Mutant]:
    """The mutants that a case can show through the interpreter; of the named ones, those."""
    return [
        m
        for m in CATALOGUE
        if m.lane == "cpu"
        and not m.equivalent
        and m.witness
        and not m.witnessed_by_test
        and (not names or m.name in names)
    ]


def all_of(mutants: Sequence[Mutant], jobs: int, tell: Callable[[Row], None]) -> Table:
    """Measures the kernels without a fault, then all mutants, `jobs` at a time; `tell` hears of each."""
    control = measure(Mutant("without a fault", "control", "Nothing.", ()), control=True)
    tell(control)

    def one(mutant: Mutant) -> Row:
        row = measure(mutant)
        tell(row)
        return row

    with ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(one, mutants))
    sets = {name: [case.id for case in cases] for name, cases in SETS.items()}
    return Table(1, machine(), datetime.date.today().isoformat(), sets, control, rows)


def machine() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "triton", "numpy"))
    return f"Triton's interpreter on {platform.machine()}, Python {platform.python_version()}, {packages}"


# ---------------------------------------------------------------- the table


def kills(table: Table, row: Row, rule: str, of_set: str) -> bool:
    """Whether a rule sees a mutant: something is red that is not without a fault."""
    found = set(row.red.get(of_set, {}).get(rule, ()))
    return bool(found - set(table.control.red.get(of_set, {}).get(rule, ())))


def false_alarms(table: Table, rule: str, of_set: str) -> int:
    """How many tensors are red without a fault."""
    return len(table.control.red.get(of_set, {}).get(rule, ()))


def markdown(table: Table) -> str:
    """The table, and what only our suite kills."""
    rows = [row for row in table.rows if row.outcome == "measured"]
    killed = {
        rule: {name: {row.name for row in rows if kills(table, row, rule, name)} for name in table.sets}
        for rule in ALL
    }
    total = {rule: set().union(*of_sets.values()) for rule, of_sets in killed.items()}
    cases = {name: len(ids) for name, ids in table.sets.items()}
    lines = [
        "# The same faults, judged by the rules of others",
        "",
        f"{len(rows)} faults planted in the kernels, three sets of inputs (so many cases); how many faults"
        " each rule kills, and in the last column how many tensors it finds red without any fault, of"
        f" {len(JUDGED) * sum(cases.values())} (what is red without a fault kills nothing)."
        f" {table.machine}; {table.date}; `python -m tests.mutants.rule_table`.",
        "",
        "| rule | " + " | ".join(f"{name} ({n})" for name, n in cases.items()) + " | all | false alarms |",
        "|---|" + "---|" * (len(cases) + 2),
    ]
    for rule in ALL:
        counts = [str(len(killed[rule][name])) for name in table.sets]
        alarms = sum(false_alarms(table, rule, name) for name in table.sets)
        name = f"**{rule}**" if rule in (OURS, JUDGE) else rule
        lines.append(f"| {name} | " + " | ".join(counts) + f" | {len(total[rule])} | {alarms} |")
    others = set().union(*(total[rule] for rule in RULES))
    everyone = {row.name for row in rows}
    for what, names in (
        ("Killed by this suite only", total[OURS] - others),
        ("Of these, seen only amid hostile memory", total[OURS] - others - total[JUDGE]),
        ("Killed by another rule, not by this suite", others - total[OURS]),
        (f"Killed by no rule on these {sum(cases.values())} cases", everyone - others - total[OURS]),
    ):
        lines += ["", f"{what}: {len(names)}. {', '.join(sorted(names))}".strip()]
    lines += [""]
    lines += ["The sets:", ""]
    lines += [f"- {name}: {', '.join(f'`{case}`' for case in ids)}" for name, ids in table.sets.items()]
    lines += ["", "The rules (x: the result; r: exact; p: a reference in the kernel's own precision):", ""]
    lines += [f"- {name}: {rule.what}. {rule.project}, {rule.where}" for name, rule in RULES.items()]
    skipped = [row for row in table.rows if row.outcome != "measured"]
    if skipped:
        lines += ["", "Not counted:", ""]
        lines += [f"- {row.name}: {row.outcome}" for row in skipped]
    return "\n".join(lines) + "\n"


def write(table: Table, out: Path) -> int:
    """Writes both files; 0 if our suite is silent without a fault and every mutant could be measured."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "rule-table.json").write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1))
    text = markdown(table)
    (out / "rule-table.md").write_text(text)
    print(f"\n{text}\ntable: {out / 'rule-table.md'}")
    ours = any(false_alarms(table, OURS, name) for name in table.sets)
    return 1 if ours or any(row.outcome != "measured" for row in (table.control, *table.rows)) else 0


def read(path: Path) -> Table:
    """Raises ValueError for a file that is not such a table."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Table)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no table of rules: {error}") from None


def _progress(row: Row) -> None:
    counts = [f"{sum(rule in of_set for rule in ALL)}" for of_set in (row.red.get(name, {}) for name in SETS)]
    told = f"red by {'/'.join(counts)} of {len(ALL)} rules" if row.outcome == "measured" else row.outcome
    trouble = f"  {row.trouble.splitlines()[-1]}" if row.trouble else ""
    print(f"{row.name:52} {row.seconds:5.1f} s  {told}{trouble}", flush=True)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.rule_table", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("names", nargs="*", help="only these mutants")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time (%(default)s)"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results (%(default)s)")
    parser.add_argument("--events", type=Path, help=argparse.SUPPRESS)  # of the process with the fault: names
    parser.add_argument("--control", action="store_true", help=argparse.SUPPRESS)  # are sets then
    arguments = parser.parse_args(words)
    if arguments.events:
        watched(arguments.events, arguments.names, arguments.control)
        return 0
    mutants = chosen(arguments.names)
    unknown = set(arguments.names) - {m.name for m in mutants}
    if unknown:
        parser.error(f"no mutant that a case shows through the interpreter: {', '.join(sorted(unknown))}")
    return write(all_of(mutants, arguments.jobs, _progress), arguments.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
