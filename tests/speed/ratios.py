"""An implementation against FLASH on the grid, forward and backward: a run of the baseline of speed.

    python -m tests.speed.ratios --out FILE [--impl SPEC] [--manifest FILE] [--grid full|quick]
        [--problems ID ...]

Contests of measure "device" between the two, all in this process. FILE (`reports.timings.Speed`) is written
after every problem, so that a run that is ended leaves what it has. `--problems` without an id measures
nothing, and says what would be measured.

Exit status: 0 all is measured, whatever came of it; 2 wrong use; 3 no speed can be measured here: no GPU of
compute capability 8.0 or newer, Triton interprets, the implementation runs on the CPU only, or is FLASH.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch

from reports import timings
from reports.speed import versus
from reports.timings import Contest, Speed

from ..implementations import Implementation, ImplementationError, load
from .bench import Bench
from .contenders import FLASH, AbsentError
from .machine import described, others_busy, why_not_here
from .problems import BACKWARD, FORWARD, GRID, parse

MEASURED, WRONG_USE, NOT_HERE = 0, 2, 3

STEPS = (FORWARD, BACKWARD)

GRIDS = {
    "full": GRID,
    "quick": tuple(problem for problem in GRID if problem.length == 2048),
}

WARM = 0.5
"""Seconds of work after which an idle GPU's clocks have risen."""


def main(words: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(words)
    if why := why_not_here():
        print(why, file=sys.stderr)
        return NOT_HERE
    try:
        problems = GRIDS[args.grid] if args.problems is None else [parse(text) for text in args.problems]
        implementation = load(args.impl, args.manifest)
    except (ValueError, ImplementationError) as error:
        print(error, file=sys.stderr)
        return WRONG_USE
    if why := why_not(implementation):
        print(why, file=sys.stderr)
        return NOT_HERE
    found = begun(implementation, sys.argv[1:] if words is None else words)
    timings.write(found, args.out)
    if not problems:
        return MEASURED
    warm()
    try:
        bench = Bench(args.impl, (FLASH,), args.manifest)
    except AbsentError as error:
        print(error, file=sys.stderr)
        return NOT_HERE
    start = time.monotonic()
    for problem in problems:
        with bench.on(problem, (bench.subject.name, FLASH)) as those:
            contests = [those.contest(step) for step in STEPS]
        found = msgspec.structs.replace(
            found,
            contests=[*found.contests, *contests],
            ended=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - start, 1),
        )
        timings.write(found, args.out)
        told = "  ".join(f"{contest.step} {_told(contest, found.implementation)}" for contest in contests)
        print(f"{problem.id}: {told}", flush=True)
    if not found.others_busy:
        timings.write(msgspec.structs.replace(found, others_busy=others_busy()), args.out)
    return MEASURED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.speed.ratios",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", metavar="FILE", type=Path, required=True)
    parser.add_argument("--impl", metavar="SPEC", help="as the suite's --impl; default: triton")
    parser.add_argument("--manifest", metavar="FILE", help="as the suite's --manifest")
    parser.add_argument("--grid", choices=GRIDS, default="full", help="quick: those of length 2048")
    parser.add_argument("--problems", metavar="ID", nargs="*", help="these, instead of a grid")
    return parser


def why_not(implementation: Implementation) -> str:
    """Why there are no such ratios of an implementation; empty if there are."""
    if "cuda" not in implementation.claims.devices:
        return f"{implementation.name} runs on the CPU only"
    if implementation.name == FLASH:
        return f"{FLASH} is what others are compared with"
    return ""


def begun(implementation: Implementation, arguments: Sequence[str]) -> Speed:
    """What is measured, without a contest."""
    device = torch.device("cuda", torch.cuda.current_device())
    override = os.environ.get("TRITON_OVERRIDE_ARCH")
    path = f"{override}-override" if override else implementation.path(device)
    return described(implementation.name, path, arguments)


def warm() -> None:
    """Keeps the GPU at work for `WARM` seconds."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    end = time.monotonic() + WARM
    while time.monotonic() < end:
        for _ in range(10):
            x @ x
        torch.cuda.synchronize()


def _told(contest: Contest, subject: str) -> str:
    for name in (subject, FLASH):
        if absent := contest.entries[name].absent:
            return f"– ({name}: {absent})"
    found = versus(contest, subject, FLASH)
    return f"{found.ratio.median:.3f}" if found and found.ratio else "–"


if __name__ == "__main__":
    sys.exit(main())
