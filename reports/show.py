"""Everything that is known of one case: what it is, what runs found, what baselines have of it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from . import kept, records
from .errors import ReportError
from .records import Record, Verdict
from .summary import RECORDS

DESCRIPTION = """\
Prints what a case is in words, and of every record of it that runs have left in a folder: its status, every
rule with its number and limit, how far each tensor was off, what its results look like, and how it is run
again. Then what the baselines of errors have of it.

CASE is an id, or a part of one that only one case in the folder has.

Exit status: 0 if there is a record of it; 2 wrong use; 3 there is none.
"""

FOUND, NONE = 0, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    out = Path(os.environ.get("FA_REPORT_DIR") or Path(__file__).parent / "out")
    parser.add_argument("case", metavar="CASE")
    parser.add_argument(
        "--in", dest="folder", metavar="FOLDER", type=Path, default=out,
        help="where runs have written; its folders are searched too; default: FA_REPORT_DIR, or %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--baseline-dir", metavar="FOLDER", type=Path, default=kept.FOLDER, help="default: reports/baselines"
    )


def main(args: argparse.Namespace) -> int:
    from tests.cases import parse_case

    found = list(_records(args.folder))
    name = _named(args.case, {record.case for _, record in found})
    try:
        case = parse_case(name)
    except ValueError:
        print(f"no case in {args.folder} has {args.case!r} in its id, and it is no id of a case")
        return NONE
    of_case = [(path, record) for path, record in found if record.case == case.id]
    print(f"{case.id}\n{case.words()}")
    for path, record in of_case:
        print()
        print("\n".join(_about(path, record)))
    for line in _kept(case.id, args.baseline_dir):
        print(line)
    if of_case:
        return FOUND
    print(
        f"\nno record of it in {args.folder}; this makes one, with --impl or --manifest if it is of another:"
    )
    print(f"  python -m pytest tests/test_references.py --case {case.id}")
    return NONE


def _records(folder: Path) -> Iterator[tuple[Path, Record]]:
    if not folder.is_dir():
        raise ReportError(f"--in is {folder}: there is no such folder")
    for path in sorted(folder.rglob(RECORDS)):
        for record in records.read(path):
            yield path, record


def _named(text: str, cases: set[str]) -> str:
    """The case that somebody means."""
    if text in cases:
        return text
    like = sorted(case for case in cases if text in case)
    if len(like) > 1:
        some = "\n  ".join(like[:10])
        raise ReportError(f"CASE is {text!r}: {len(like)} cases have that in their ids, among them\n  {some}")
    return like[0] if like else text


def _about(path: Path, record: Record) -> list[str]:
    lines = [f"{record.implementation} on {record.path}: {record.status}, from {record.origin} in {path}"]
    if record.reason:
        lines.append(f"  {record.reason}")
    lines += [f"  {sentence}" for sentence in record.diagnosis]
    for tensor, of in record.tensors.items():
        numbers = ((of.budget_use, "of the bound"), (of.max_z, "largest z"), (of.rms_z, "rms z"),
                   (of.fa2, "by FlashAttention-2's rule"))  # fmt: skip
        told = ", ".join(f"{'inf' if x is None else f'{x:.4g}'} {what}" for x, what in numbers)
        lines.append(f"  {tensor}: {of.judged} of {of.elements} elements judged; {told}")
    verdicts = sorted(record.verdicts, key=lambda v: (v.held, -v.margin))
    lines += [f"  {_verdict(verdict)}" for verdict in verdicts]
    if record.replay:
        lines.append(f"  replay: {record.replay}")
    return lines


def _verdict(v: Verdict) -> str:
    from tests.comparison import describe

    return f"{'held' if v.held else 'BROKEN'}: {describe(v)}"


def _kept(case: str, folder: Path) -> Iterator[str]:
    """What baselines of errors have of a case."""
    from . import error_baseline as errors

    for path in sorted(folder.glob(f"{errors.KIND}-*.json")):
        baseline = kept.decode(path, errors.Errors, errors.VERSION)
        if case in baseline.cases:
            of = ", ".join(f"{tensor} {rms:.4g}" for tensor, rms in sorted(baseline.cases[case].items()))
            yield f"\n{path.name}: rms z of {of}"
