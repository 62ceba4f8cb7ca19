"""The process that looks for one planted fault, from within the copy of the project that has it.

    python -m tests.mutants.score NAME --events FILE ...

It runs cases through the planted kernels, judges them as the suite does, and writes what it sees as it sees
it, a JSON object a line: whoever waits outside knows the last case when this process crashes or hangs.
"""

from __future__ import annotations

import argparse
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from reports.records import Record, Verdict

from ..cases import Case, parse_case
from ..comparison import compare
from ..execution import BESIDE, FOLLOWS, OWN_MEMORY, REPEATS, SHAPE, UNCHANGED
from ..implementations import Implementation, load
from ..session import interpreted
from . import stream

LAWFUL = (
    "b1_h2x1_s17x21_d16x16_float16_causal_scale=0.3_normal_bhsd_grad=qkv_dlse_seed0",
    "b1_h2x1_s17x21_d16x16_float32_full_scale=-0.2_normal_bhsd_grad=qkv_dlse_seed0",
    "b2_h2x1_r9x17+5x9_past1x2_d16x16_float32_causal_scale=0.3_normal_bshd_grad=qkv_dlse_seed0",
)
"""Cases for the laws, which call the implementation many times: until one breaks, or time is up."""

LAWS_SECONDS = 5

ADDRESS_SPACE = 12 * 2**30
"""Bytes that a process that interprets may have."""

BROKEN_CODE = re.compile(
    r"\b(CompilationError|UnsupportedLanguageConstruct|NameError|SyntaxError|UnboundLocalError|PTXASError)\b"
)
"""In the text of an exception: the planted code is none. That is no kill."""


class Seen(msgspec.Struct, omit_defaults=True):
    """A case that ran: which properties were broken, and by how much.

    Attributes:
        stage: "stream", "laws" or "witness".
        broken: property: (margin, rule with its tensor).
    """

    stage: str
    case: str
    seconds: float
    """Since the run began, this process's start included."""
    broken: dict[str, tuple[float, str]] = {}
    failed_to_compile: bool = False
    tensors: list[str] = []


class Event(msgspec.Struct, omit_defaults=True):
    """A line of the file: a case that begins, one that was judged, or the end."""

    begins: str = ""
    seen: Seen | None = None
    done: bool = False


PROPERTIES = (
    "hard bound",
    "largest z",
    "rms z",
    "bias",
    "exact",
    "emulation",
    "memory",
    "surroundings",
    "contract",
    "laws",
    "raises",
    "crash",
    "hang",
    "tests",
    "sanitizer",
)
"""The columns of the matrix: rules of the judge by kind, and what is seen from outside of the process."""


def property_of(verdict: Verdict) -> str:
    """The column of a rule."""
    rule = verdict.rule
    if rule == "does not raise":
        return "raises"
    if rule in (BESIDE, UNCHANGED, OWN_MEMORY):
        return "memory"
    if rule.startswith((*REPEATS, FOLLOWS)):
        return "surroundings"
    if rule == SHAPE:
        return "contract"
    if verdict.reference == "emulation":
        return "emulation"
    if rule.startswith("rms z"):
        return "rms z"
    return rule if rule in PROPERTIES else "exact"


def seen(stage: str, record: Record, seconds: float) -> Seen:
    """What a record says of the properties, each by its worst rule."""
    broken: dict[str, tuple[float, str]] = {}
    for v in record.verdicts:
        if not v.held:
            found = (float(min(v.margin, 1e300)), f"{v.tensor} against {v.reference}: {v.rule}")
            name = property_of(v)
            broken[name] = max(broken.get(name, found), found)
    raised = [v.note for v in record.verdicts if not v.held and v.rule == "does not raise"]
    tensors = sorted({v.tensor for v in record.verdicts if not v.held})
    return Seen(stage, record.case, seconds, broken, any(map(BROKEN_CODE.search, raised)), tensors)


def by_laws(case: Case, implementation: Implementation, device: torch.device) -> dict[str, tuple[float, str]]:
    """The first law that a case breaks, if any does."""
    from ..laws import LAWS, Trial, outcome

    end = time.time() + LAWS_SECONDS / len(LAWFUL)
    trial = Trial(case, implementation, device, None)
    for law in LAWS.values():
        if findings := outcome(law, trial).findings:
            return {"laws": max((float(min(f.margin, 1e300)), f"{f.tensor}: {f.law}") for f in findings)}
        if time.time() > end:
            break
    return {}


def run(arguments: argparse.Namespace) -> None:
    with open(arguments.events, "ab", buffering=0) as file:

        def write(event: Event) -> None:
            file.write(msgspec.json.encode(event) + b"\n")

        if interpreted():  # a planted size must not take the machine's memory
            resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
        implementation = load("triton")
        device = torch.device("cpu") if interpreted() else torch.device("cuda", 0)
        deadline = arguments.started + arguments.seconds

        def judged(stage: str, case: Case, origin: str) -> bool:
            write(Event(begins=case.id))
            record = compare(case, implementation, device, origin)
            found = seen(stage, record, time.time() - arguments.started)
            write(Event(seen=found))
            return bool(found.broken)

        def lawful(case: Case) -> bool:
            write(Event(begins=case.id))
            try:
                broken = by_laws(case, implementation, device)
            except Exception as error:  # a kernel that raises is one of the properties
                broken = {"raises": (1.0, f"laws: {type(error).__name__}")}
            write(Event(seen=Seen("laws", case.id, time.time() - arguments.started, broken)))
            return bool(broken)

        def look_in_stream() -> None:
            first = [(parse_case(case), "recipe") for case in arguments.first]
            found, left = False, arguments.after
            suite = stream.cases(device)
            if device.type == "cuda":  # each case compiles: begin with the witness, if the suite has it
                witnesses = set(map(parse_case, arguments.witness))
                first += [pair for pair in suite if pair[0] in witnesses]
            for case, origin in _unique([*first, *suite]):
                if time.time() > deadline:
                    break
                found |= judged("stream", case, origin)
                if found and arguments.quick:
                    break
                left -= found
                if left < 0:  # for the matrix: which other properties see it
                    break

        if arguments.seconds:
            look_in_stream()
        if arguments.laws and arguments.seconds:
            any(lawful(parse_case(case)) for case in LAWFUL)
        for case in arguments.witness:
            judged("witness", parse_case(case), "replay")
        write(Event(done=True))


def _unique(cases: list[tuple[Case, str]]) -> Iterator[tuple[Case, str]]:
    done = set()
    for case, origin in cases:
        if case not in done:
            done.add(case)
            yield case, origin


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.score", description=__doc__)
    parser.add_argument("--events", type=Path, required=True, help="file that the lines are appended to")
    parser.add_argument("--started", type=float, required=True, help="when the run began (time.time())")
    parser.add_argument("--seconds", type=float, default=0, help="of the stream of cases; 0: none")
    parser.add_argument("--quick", action="store_true", help="stop at the first case that is red")
    parser.add_argument(
        "--after", type=int, default=2, help="cases more than the first that is red (%(default)s)"
    )
    parser.add_argument("--laws", action="store_true", help="laws too")
    parser.add_argument("--first", action="append", default=[], metavar="CASE", help="before the stream")
    parser.add_argument("--witness", action="append", default=[], metavar="CASE", help="after the stream")
    run(parser.parse_args(words))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
