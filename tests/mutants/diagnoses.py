"""Which diagnosis each planted fault gets, and whether it is the right one.

    python -m tests.mutants.diagnoses                 # all of them; writes reports/baselines/diagnoses.md
    python -m tests.mutants.diagnoses --jobs 1 NAME   # these only; writes nothing

Every fault that a case can show through the interpreter is planted. The case that finds it soonest and its
witness are compared and diagnosed, as the suite does. `expected` has those whose pattern has a name.

Exit status: 0 at least two thirds of these are diagnosed, and nothing certain is wrong about a cause; 1 not;
2 wrong use.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from ..cases import parse_case
from ..comparison import compare
from ..diagnosis import CERTAIN
from ..implementations import load
from . import matrix
from .catalogue import CATALOGUE
from .expected import ALSO_TRUE, EXPECTED
from .mutant import ROOT, DoesNotApply, Mutant, plant
from .runner import environment

OUT = ROOT / "reports" / "baselines" / "diagnoses.md"

SECONDS = 90
"""That the cases of a mutant may take."""


CAUSES = re.compile(
    r"as if|as with|factor of|opposite sign|transposed|is that of|should be|the result of|rounded to"
)
"""In a sentence: it says what is wrong, not only where."""


class Seen(msgspec.Struct):
    """A case that was judged: whether it is red, what is said, and the seconds that the saying took."""

    case: str
    red: bool
    said: list[str]
    seconds: float


class Told(msgspec.Struct):
    """What is said of a mutant.

    Attributes:
        seen: its cases.
        trouble: why there are fewer than there should be.
    """

    name: str
    seen: list[Seen]
    trouble: str = ""

    @property
    def expected(self) -> str:
        return EXPECTED.get(self.name, "")

    @property
    def said(self) -> list[str]:
        return list(dict.fromkeys(sentence for seen in self.seen for sentence in seen.said))

    @property
    def right(self) -> bool:
        return bool(self.expected) and any(self.expected in sentence for sentence in self.said)

    @property
    def misleading(self) -> list[str]:
        """What is said to be certain, names a cause, and is not known to be true of this fault."""
        true = [words for words in (self.expected, *ALSO_TRUE.get(self.name, ())) if words]
        return [
            sentence
            for sentence in self.said
            if sentence.startswith(CERTAIN)
            and CAUSES.search(sentence)
            and not any(words in sentence for words in true)
        ]


def able(names: Sequence[str] = ()) -> list[Mutant]:
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


def diagnosed(mutant: Mutant, killers: Mapping[str, Sequence[str]]) -> Told:
    """Plants a mutant in a temporary copy of the project, and has its cases diagnosed there."""
    cases = list(dict.fromkeys([*killers.get(mutant.name, ()), mutant.witness]))
    told = Told(mutant.name, [])
    with tempfile.TemporaryDirectory(prefix="diagnoses-") as name:
        folder = Path(name)
        try:
            plant(mutant, folder)
        except DoesNotApply as error:
            return Told(mutant.name, [], f"does not apply: {error}")
        while cases:
            status, seen = _process(folder, cases)
            told.seen += seen
            cases = cases[len(seen) :]
            if cases:  # the first of them was too much; the others may be told
                told.trouble += f"exit status {status} in {cases.pop(0)}. "
    return told


def _process(folder: Path, cases: Sequence[str]) -> tuple[int, list[Seen]]:
    """Runs the process that has the fault; its exit status, and what it saw until then."""
    file = folder / "seen"
    file.write_bytes(b"")
    command = [sys.executable, "-m", "tests.mutants.diagnoses", "--seen", str(file), *cases]
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment("cpu", folder), stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, [
        msgspec.json.decode(line, type=Seen) for line in file.read_bytes().splitlines()
    ]


def look(cases: Sequence[str], file: Path) -> None:
    """In the process that has the fault: a line for each case."""
    implementation, device = load("triton"), torch.device("cpu")
    for case in cases:
        record = compare(parse_case(case), implementation, device)
        seen = Seen(case, record.status == "broken", record.diagnosis, record.seconds.get("diagnosis", 0.0))
        with open(file, "ab") as lines:
            lines.write(msgspec.json.encode(seen) + b"\n")


def all_of(mutants: Sequence[Mutant], jobs: int, tell: Callable[[Told], None]) -> list[Told]:
    """All of them, `jobs` at a time; `tell` hears of each."""
    killers = matrix.killers()

    def one(mutant: Mutant) -> Told:
        told = diagnosed(mutant, killers)
        tell(told)
        return told

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, mutants))


def summary(all_told: Sequence[Told]) -> str:
    named = [told for told in all_told if told.expected]
    right = sum(told.right for told in named)
    misleading = sum(len(told.misleading) for told in all_told)
    slowest = max((seen.seconds for told in all_told for seen in told.seen), default=0.0)
    return (
        f"{len(named)} of {len(all_told)} faults have a pattern with a name; of these {right} are diagnosed"
        f" ({100 * right / max(len(named), 1):.0f} %). Sentences that are certain, and wrong about the cause:"
        f" {misleading}. A diagnosis takes {slowest:.1f} s at most."
    )


def markdown(all_told: Sequence[Told]) -> str:
    does = {m.name: m.does for m in CATALOGUE}
    lines = [
        "# What is said of each planted fault",
        "",
        "Faults that a case shows through the interpreter, on the case that finds each soonest and on its"
        " witness. Expected is what must occur in a sentence of one of the two; where nothing is, the pattern"
        " has no name. `python -m tests.mutants.diagnoses`.",
        "",
        summary(all_told),
    ]
    for title, chosen in (
        ("Diagnosed", [t for t in all_told if t.right]),
        ("Not diagnosed", [t for t in all_told if t.expected and not t.right]),
        ("Nothing expected", [t for t in all_told if not t.expected]),
    ):
        lines += ["", f"## {title}", "", "| fault | expected | said |", "|---|---|---|"]
        for told in chosen:
            said = "<br>".join(sentence.replace("|", "\\|") for sentence in told.said)
            lines.append(f"| {told.name}: {does[told.name]} | {told.expected} | {said or told.trouble} |")
    return "\n".join(lines) + "\n"


def _progress(told: Told) -> None:
    verdict = "-" if not told.expected else "right" if told.right else "MISSED"
    print(f"{told.name:52} {verdict:6} {told.expected}", flush=True)
    for seen in told.seen:
        print(f"    {'red' if seen.red else 'HELD'} {seen.seconds:.2f} s {seen.case}")
        for sentence in seen.said:
            print(f"        {sentence}{'  MISLEADING' if sentence in told.misleading else ''}")
    if told.trouble:
        print(f"    {told.trouble}", flush=True)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.diagnoses", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("names", nargs="*", help="only these mutants")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time (%(default)s)"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="the table of all (%(default)s)")
    parser.add_argument("--seen", type=Path, help=argparse.SUPPRESS)  # of the process with the fault
    arguments = parser.parse_args(words)
    if arguments.seen:
        look(arguments.names, arguments.seen)
        return 0
    mutants = able(arguments.names)
    unknown = set(arguments.names) - {m.name for m in mutants}
    if unknown:
        parser.error(f"no mutant that a case shows through the interpreter: {', '.join(sorted(unknown))}")
    started = time.time()
    all_told = all_of(mutants, arguments.jobs, _progress)
    print(f"\n{summary(all_told)} {time.time() - started:.0f} s.")
    if not arguments.names:
        arguments.out.write_text(markdown(all_told))
        print(f"table: {arguments.out}")
    named = [told for told in all_told if told.expected]
    enough = 3 * sum(told.right for told in named) >= 2 * len(named)
    return 0 if enough and not any(told.misleading for told in all_told) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
