"""Portable vectors: cases with inputs, exact results and budgets, for kernels in any language."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ReportError

if TYPE_CHECKING:
    from tests.cases import Case

    from .judging import Judgement

HELD, BROKE, WRONG_USE, NOTHING_CHECKED = range(4)
"""Exit statuses; wrong use is 2, of all reports."""

DESCRIPTION = """\
Cases with inputs, exact results and budgets, for kernels in any language.

    python -m reports vectors --out FOLDER                    # writes them
    python -m reports vectors --check FOLDER --results OTHER  # judges what a kernel made of them
    python -m reports vectors --check FOLDER --run            # runs this project's kernel on them
    python -m reports vectors --list                          # which cases these are, and what they catch

FOLDER/README.md, which is written too, says what attention is here, how the tensors lie, and how a result is
checked in any language. OTHER holds <case>.safetensors with out, lse, dq, dk, dv, as far as the kernel has
them: each is judged by all rules of the suite's judge that need no second run and no other reference.

Exit status: 0 all that is there holds; 1 something broke; 2 wrong use, or a file that cannot be used;
3 nothing was there to check.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FOLDER", help="write the vectors into this folder")
    what.add_argument("--check", type=Path, metavar="FOLDER", help="judge results of these vectors")
    what.add_argument("--list", action="store_true", help="print the cases, and how many faults each catches")
    parser.add_argument(
        "--case",
        action="append",
        metavar="ID",
        help="only this case, or with --out any (may be given several times; default: few small ones that"
        " catch many of the planted faults)",
    )
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="with --check: what a kernel gave")
    parser.add_argument("--run", action="store_true", help="with --check: run an implementation instead")
    parser.add_argument("--impl", metavar="SPEC", help="with --run: which (default: triton)")
    parser.add_argument("--manifest", metavar="FILE", help="with --run: what it claims")


def main(args: argparse.Namespace) -> int:
    """Writes, lists or checks; returns the exit status.

    Raises:
        ReportError: for words or files that cannot be used.
    """
    if args.check is None and (args.results or args.run):
        raise ReportError("--results and --run need --check, the folder of the vectors")
    if args.check is not None and bool(args.results) == args.run:
        given = "both are" if args.run else "neither is"
        raise ReportError(f"--check needs either --results, a folder, or --run; {given} given")
    if not args.run and (args.impl or args.manifest):
        raise ReportError("--impl and --manifest need --run")
    _interpret_without_a_gpu()
    if args.check is None:
        return _list(args.case) if args.list else _write(args.out, args.case)
    return _run(args) if args.run else _check(args)


def _interpret_without_a_gpu() -> None:
    """Triton reads the variable when it is imported."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


# ---------------------------------------------------------------- written


def _cases(ids: list[str] | None) -> list[Case]:
    from tests.session import case_to_replay

    from .faults import default_set

    if not ids:
        return default_set()
    try:
        return list(dict.fromkeys(map(case_to_replay, ids)))
    except ValueError as error:
        raise ReportError(f"--case: {error}") from None


def _list(ids: list[str] | None) -> int:
    from .faults import catches, size

    found = catches()
    cases = _cases(ids)
    for case in cases:
        print(f"{len(found.get(case.id, [])):4} faults {size(case):8} bytes  {case.id}")
    names = {fault.name for case in cases for fault in found.get(case.id, [])}
    print(f"{len(cases)} cases, {len(names)} planted faults")
    return HELD


def write(folder: Path, cases: list[Case]) -> tuple[int, int]:
    """Writes the vectors of cases: the same bytes each time, on the same processor and version of NumPy.

    Returns:
        How many planted faults they catch together, and bytes written.

    Raises:
        ReportError: if they cannot be written.
    """
    import msgspec

    from tests.thresholds import FALSE_ALARM

    from . import content, format
    from .faults import catches

    found = catches()
    made = [content.make(case) for case in cases]
    vectors = [msgspec.structs.replace(vector, catches=found.get(vector.case, [])) for vector, _ in made]
    index = format.Index(alpha=FALSE_ALARM, rules=content.RULES, vectors=vectors)
    size = format.write(folder, index, ((vector.file, data) for vector, data in made))
    return len({fault.name for vector in vectors for fault in vector.catches}), size


def _write(folder: Path, ids: list[str] | None) -> int:
    cases = _cases(ids)
    caught, size = write(folder, cases)
    print(f"{folder}: {len(cases)} vectors, {size / 1e6:.2f} MB; they catch {caught} of the planted faults")
    return HELD


# ---------------------------------------------------------------- checked


def _check(args: argparse.Namespace) -> int:
    from . import judging

    vectors = judging.read(args.check, args.case)
    if not args.results.is_dir():
        raise ReportError(
            f"{args.results}: there is no such folder; --results is one with <case>.safetensors"
        )
    found: list[Judgement] = []
    unusable = False
    for loaded in vectors:
        try:
            results = judging.read_results(args.results, loaded)
        except ReportError as error:  # the others are judged all the same
            print(f"python -m reports vectors: {error}", file=sys.stderr)
            unusable = True
            continue
        if results is None:
            print(f"missing   {loaded.vector.case}: there is no {loaded.vector.file}")
        else:
            found += _told(judging.judged(loaded, results))
    if not args.case:
        for name in judging.strangers(args.results, vectors):
            print(f"not used  {name}: the vectors have no such case")
    status = _status(found, len(vectors))
    return WRONG_USE if unusable and status != BROKE else status


def _run(args: argparse.Namespace) -> int:
    from tests.implementations import OURS

    from . import judging

    vectors = judging.read(args.check, args.case)
    session = judging.session_of(args.impl, args.manifest)
    if (rounding := session.implementation.claims.rounding) != OURS:
        print(f"note      {session.implementation.name} declares {rounding}; the budgets do not allow for it")
    found: list[Judgement] = []
    for loaded, made in judging.run(vectors, session):
        if made.not_claimed:
            print(f"not claimed  {loaded.vector.case}: {made.not_claimed}")
        else:
            found += _told(judging.judged(loaded, made.results, made.owed))
    return _status(found, len(vectors))


def _told(found: list[Judgement]) -> list[Judgement]:
    for judgement in found:
        print(line(judgement))
    return found


def line(of: Judgement) -> str:
    """A judgement for a reader."""
    from tests.comparison import describe

    head = f"{of.state:9} {of.case} {of.tensor}"
    if of.failed:
        texts = [describe(v).removeprefix(f"{v.tensor} against {v.reference}: ") for v in of.failed]
        return f"{head}: {'; '.join(texts)}"
    if of.summary is None:
        less = "; without it dq and dk are judged by the hard bound alone" if of.tensor == "out" else ""
        return f"{head}: there is no such tensor{less}"
    s = of.summary
    return (
        f"{head}: {s.judged} of {s.elements} elements judged, {s.budget_use or 0:.2f} of the bound,"
        f" largest z {s.max_z or 0:.2f}, rms z {s.rms_z or 0:.2f}"
    )


def _status(found: list[Judgement], cases: int) -> int:
    by = {
        state: [j for j in found if j.state == state] for state in ("held", "broken", "no power", "missing")
    }
    counts = ", ".join(f"{len(js)} {state}" for state, js in by.items())
    seen = len({j.case for j in found})
    print(f"{seen} of {cases} cases, their tensors: {counts}")
    if by["broken"]:
        return BROKE
    return HELD if by["held"] else NOTHING_CHECKED
