"""Mutants that nobody thought of: a random sample of those that cosmic-ray makes of the kernels.

    pip install cosmic-ray
    python -m tests.mutants.machine_made --sample 80 --seed 1 --out FOLDER

Each is looked for like those of the catalogue, through the interpreter. Survivors are for a person to look
at, one by one: equivalent, or a hole in the suite. What came of it is kept in reports/baselines/.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

from . import matrix
from .mutant import ROOT, Change, Mutant
from .runner import Options, Score, look_for_all

KERNELS = ("forward.py", "backward.py", "numerics.py", "ragged.py", "position.py")
"""Files of device code."""

KIND = "machine-made"


def sample(size: int, random_seed: int) -> tuple[list[Mutant], int]:
    """Mutants drawn at random, and of how many: each is a change of one place by one operator.

    Changes that leave the program as it is (of annotations, say) are among them: cosmic-ray does not know.
    """
    import cosmic_ray.plugins as plugins  # type: ignore[import-not-found]
    from cosmic_ray.ast import get_ast  # type: ignore[import-not-found]
    from cosmic_ray.mutating import MutationVisitor  # type: ignore[import-not-found]

    def mutated(file: str, operator: Any, occurrence: int) -> tuple[Any, str]:
        visitor: Any = MutationVisitor(occurrence, operator)
        return visitor, visitor.walk(get_ast(texts[file])).get_code()

    texts = {file: (ROOT / "kernels" / file).read_text() for file in KERNELS}
    places = []
    for name in plugins.operator_names():
        operator = plugins.get_operator(name)
        if operator.__init__ is not object.__init__:  # wants to be told names of the program
            continue
        for file in KERNELS:
            visitor, _ = mutated(file, operator(), sys.maxsize)
            places += [(file, name, occurrence) for occurrence in range(visitor._count)]
    drawn = Random(random_seed).sample(places, min(size, len(places)))
    return [
        _mutant(file, name.removeprefix("core/"), occurrence, texts[file],
                mutated(file, plugins.get_operator(name)(), occurrence)[1])
        for file, name, occurrence in drawn
    ], len(places)  # fmt: skip


def _mutant(file: str, operator: str, occurrence: int, text: str, mutated: str) -> Mutant:
    before, after = text.splitlines(), mutated.splitlines()
    diff = [line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[:1] in "-+"][2:]
    line = next((i for i, (a, b) in enumerate(zip(before, after, strict=False), 1) if a != b), len(after))
    does = " => ".join(part[1:].strip() for part in diff)
    return Mutant(f"{file}:{line}:{operator}:{occurrence}", KIND, does, (Change(file, text, mutated),))


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.machine_made", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--sample", type=int, default=80, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (%(default)s)")
    parser.add_argument("--seconds", type=float, default=24, help="of cases for each (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=matrix.OUT.with_name("machine-made"))
    parser.add_argument("--list", action="store_true", help="only say which")
    arguments = parser.parse_args(words)
    chosen, made = sample(arguments.sample, arguments.seed)
    print(f"{made} mutants, of which {len(chosen)} drawn with seed {arguments.seed}", flush=True)
    if arguments.list:
        for mutant in chosen:
            print(f"{mutant.name}: {mutant.does}")
        return 0

    def tell(score: Score) -> None:
        print(score.line(), flush=True)

    options = Options(seconds=arguments.seconds, quick=True, laws=False)
    scores = look_for_all(chosen, options, arguments.jobs, tell)
    return matrix.write(scores, arguments.out, {mutant.name: mutant.does for mutant in chosen})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
