"""A sample of the planted faults, each found and for what it is. `tox -e mutants` looks for all of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from .mutants import matrix
from .mutants.catalogue import CATALOGUE, KINDS, by_name
from .mutants.mutant import Mutant, plant
from .mutants.runner import Options, environment, look_for
from .session import interpreted

SECONDS = 60
"""Within which a fault must be found, through the interpreter, on one core that is shared."""

SAMPLE = 20


def sample() -> list[Mutant]:
    """One of each kind, the others from all; always the same."""
    random = Random(0)
    able = [m for m in CATALOGUE if m.lane == "cpu" and not m.equivalent and not m.witnessed_by_test]
    chosen = [random.choice([m for m in able if m.kind == kind]) for kind in KINDS
              if any(m.kind == kind for m in able)]  # fmt: skip
    rest = [m for m in able if m not in chosen]
    return [*chosen, *random.sample(rest, SAMPLE - len(chosen))]


pytestmark = pytest.mark.skipif(
    not interpreted(), reason="planted through the interpreter; on a GPU: python -m tests.mutants run"
)


@pytest.mark.parametrize("mutant", sample(), ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_found(mutant: Mutant, record_property: Callable[[str, object], None]) -> None:
    options = Options(seconds=SECONDS, quick=True, laws=False, first=matrix.killers())
    score = look_for(mutant, options)
    assert score.killed, f"{mutant.does} Survived {score.cases} cases. {score.trouble}"
    assert score.witness_red, f"{mutant.does} Its witness, {mutant.witness}, held. {score.trouble}"
    assert set(mutant.tensors) <= set(score.tensors)
    record_property("figure", score.line())


def test_a_run_of_the_suite_with_a_fault_is_red_and_says_where(tmp_path: Path) -> None:
    """From the outside: pytest's exit status and what it prints."""
    plant(by_name("dk-without-scale"), tmp_path)
    suite = "tests/test_references.py"
    command = [sys.executable, "-m", "pytest", suite, "-x", "-q", "-p", "no:cacheprovider"]
    kept = environment("cpu", tmp_path)
    run = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=240)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "  dk against oracle: hard bound" in run.stdout
    assert "  replay: TRITON_INTERPRET=1 " in run.stdout
