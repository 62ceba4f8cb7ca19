"""The command line of the planted faults.

    python -m tests.mutants run          # look for all of them; prints and writes the kill matrix
    python -m tests.mutants witness NAME # one mutant, on the case or the test that proves it
    python -m tests.mutants list
    python -m tests.mutants order        # the likeliest cases first, from the committed matrix
    python -m tests.mutants merge A B    # several matrices into the one that is committed; the last counts

Exit status: 0 all were found that should be (of a witness: it is red, and held without the fault); 1 not;
2 wrong use.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import matrix
from .catalogue import CATALOGUE, by_name
from .mutant import LANES, Mutant
from .runner import Options, Score, held_without_fault, look_for, look_for_all


def _chosen(names: Sequence[str], lanes: Sequence[str]) -> list[Mutant]:
    return [m for m in CATALOGUE if m.lane in lanes and (not names or m.name in names)]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="look for mutants and write the kill matrix")
    run.add_argument("names", nargs="*", help="only these")
    run.add_argument(
        "--lane", action="append", choices=LANES, help="only these; default: cpu, and on a GPU all"
    )
    run.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time (%(default)s)")
    run.add_argument("--seconds", type=float, default=60, help="for a mutant, at most (%(default)s)")
    run.add_argument("--quick", action="store_true", help="stop at the first red case, likely killer first")
    run.add_argument("--out", type=Path, default=matrix.OUT, help="folder of the results (%(default)s)")
    witness = commands.add_parser("witness", help="one mutant on what proves it")
    witness.add_argument("names", nargs="+")
    commands.add_parser("list", help="name, kind, report and lane of all")
    order = commands.add_parser("order", help="write likeliest.txt from a matrix")
    order.add_argument("--matrix", type=Path, default=matrix.COMMITTED)
    merge = commands.add_parser("merge", help="several matrices into the one that is committed")
    merge.add_argument("files", nargs="+", type=Path, help="kill-matrix.json of runs")
    merge.add_argument("--out", type=Path, default=matrix.COMMITTED.parent, help="folder (%(default)s)")
    arguments = parser.parse_args(words)

    unknown = set(getattr(arguments, "names", ())) - {m.name for m in CATALOGUE}
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}; `list` names all")
    if arguments.command == "list":
        for m in CATALOGUE:
            print(f"{m.name:50} {m.kind:34} {m.report:4} {m.lane}{'  equivalent' if m.equivalent else ''}")
        return 0
    if arguments.command == "merge":
        found = {score.name: score for file in arguments.files for score in matrix.read(file)}
        return matrix.write([found[m.name] for m in CATALOGUE if m.name in found], arguments.out)
    if arguments.command == "order":
        return matrix.write_order(arguments.matrix)
    if arguments.command == "witness":
        return max(_witness(by_name(name)) for name in arguments.names)
    lanes = arguments.lane or (["cpu"] if not _gpu() else list(LANES))
    options = Options(seconds=arguments.seconds, quick=arguments.quick, first=matrix.killers())
    scores = look_for_all(_chosen(arguments.names, lanes), options, arguments.jobs, _progress)
    return matrix.write(scores, arguments.out)


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET")


def _progress(score: Score) -> None:
    print(score.line(), flush=True)


def _witness(mutant: Mutant) -> int:
    score = look_for(mutant, Options(seconds=0))
    print(
        f"{mutant.name}: {'red' if score.witness_red else score.outcome} on {mutant.witness} {score.trouble}"
    )
    for rule in score.witnessed:
        print("  " + rule)
    control = held_without_fault(mutant)
    print("  held without the fault" if control else "  RED WITHOUT THE FAULT")
    return 0 if score.witness_red and control else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
