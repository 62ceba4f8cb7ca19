"""The catalogue of planted faults is sound, and a fault of each outcome is scored as what it is."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cases import parse_case
from tests.implementations import load
from tests.meta.test_field_bugs import NUMBERS
from tests.mutants import matrix, runner
from tests.mutants.catalogue import CATALOGUE, KINDS, by_name
from tests.mutants.mutant import LANES, ROOT, Change, DoesNotApply, Mutant
from tests.mutants.runner import Options, look_for
from tests.session import interpreted

OTHERS = re.compile(r"[IJKLN]\d+")
"""Reports of kinds that our kernels have no feature for, whose fault has its like here all the same."""

TOOLS = ("memcheck", "initcheck", "racecheck")

WITNESS = "b1_h1x1_s33x17_d16x16_float16_full_scale=auto_normal_bhsd_grad=qkv_nodlse_seed0"


def test_there_are_enough_of_them() -> None:
    counted = [mutant for mutant in CATALOGUE if not mutant.equivalent]
    assert len(counted) >= 90
    assert len({mutant.report for mutant in counted if mutant.report}) >= 60


def test_names_and_changes_are_unique() -> None:
    assert len({mutant.name for mutant in CATALOGUE}) == len(CATALOGUE)
    assert len({mutant.changes for mutant in CATALOGUE}) == len(CATALOGUE)


@pytest.mark.parametrize("mutant", CATALOGUE, ids=lambda mutant: mutant.name)
def test_a_mutant_is_well_formed(mutant: Mutant) -> None:
    assert mutant in KINDS[mutant.kind].MUTANTS
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", mutant.name)
    assert mutant.does.endswith(".") and mutant.lane in LANES
    assert not mutant.report or mutant.report in NUMBERS or OTHERS.fullmatch(mutant.report)
    texts: dict[str, str] = {}
    for change in mutant.changes:
        text = texts.get(change.file) or (ROOT / "kernels" / change.file).read_text()
        texts[change.file] = change.applied(text)
        assert texts[change.file] != text
    for text in texts.values():
        ast.parse(text)
    if mutant.equivalent:
        return
    if mutant.lane == "sanitizer":
        assert mutant.witness in TOOLS
    elif mutant.witnessed_by_test:
        file, _, test = mutant.witness.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text()
    else:
        assert not load("triton").claims.refusal(parse_case(mutant.witness))


def test_a_change_that_does_not_fit_any_more_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DoesNotApply, match=r"kernels/numerics.py has 'no such text' 0 times, not 1"):
        Change("numerics.py", "no such text", "").applied((ROOT / "kernels" / "numerics.py").read_text())
    stale = replace(CATALOGUE[0], changes=(Change("numerics.py", "no such text", ""),))
    score = look_for(stale, Options(seconds=0))
    assert score.outcome == "does not apply" and not score.killed
    assert matrix.write([score], tmp_path) == 1


LAUNCH = '    """One program for each tile of `rows` rows of each head of each batch entry."""'


@pytest.mark.skipif(not interpreted(), reason="planted through the interpreter")
@pytest.mark.parametrize(
    ("outcome", "change"),
    [
        ("crash", Change("launch.py", LAUNCH, "    import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")),
        ("crash", Change("launch.py", LAUNCH, "    import os; os._exit(0)")),
        ("crash", Change("launch.py", LAUNCH, "    raise RuntimeError('planted')")),
        ("hang", Change("launch.py", LAUNCH, "    while True: pass")),
        ("compile error", Change("forward.py", "    full, end = key_range(", "    full, end = nonsense(")),
        ("wrong result", Change("forward.py", "acc[i] / l[:, None]", "acc[i] / l[:, None] * 1.01")),
        ("survived", Change("forward.py", "acc[i] / l[:, None]", "acc[i] / l[:, None] * 1.0")),
    ],
    ids=lambda value: value.new.strip()[:40] if isinstance(value, Change) else value,
)
def test_each_outcome_is_told_apart(outcome: str, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    if outcome == "hang":  # else a heavy case on a machine that others use too is taken for one
        monkeypatch.setitem(runner.HANG, "cpu", 20)
    mutant = Mutant("planted", "tails and bounds", "Something.", (change,), WITNESS)
    score = look_for(mutant, Options(seconds=20, quick=True, laws=False))
    assert score.outcome == outcome, score.trouble
    assert score.killed == (outcome in ("crash", "hang", "wrong result"))


def test_the_committed_matrix_has_every_mutant_and_none_survives() -> None:
    scores = {score.name: score for score in matrix.read(matrix.COMMITTED)}
    assert set(scores) == {mutant.name for mutant in CATALOGUE}
    for name, score in scores.items():
        if not by_name(name).equivalent:
            assert score.killed and score.witness_red, name


def test_a_file_that_is_no_matrix_is_named(tmp_path: Path) -> None:
    path = tmp_path / "foreign.json"
    path.write_text('{"version": 1}')
    with pytest.raises(ValueError, match=r"foreign.json is no kill matrix"):
        matrix.read(path)
