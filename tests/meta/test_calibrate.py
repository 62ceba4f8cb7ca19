"""Campaigns: what is drawn, what becomes of a fault, of a process that dies, and of the ledger."""

from __future__ import annotations

import itertools
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reports import ledger, records
from reports.ledger import Count, Entry, LedgerError
from tests import calibrate, drawing, gpu_paths, thresholds
from tests.calibrate import BROKE, HELD, NOTHING_EXECUTED, WRONG_USE, Findings
from tests.campaign import Companion, Done, Numbers, Plan, Sample
from tests.cases import REGIMES, Case, parse_case
from tests.implementations import load

PLAN = Plan(0, 50, ("emulation",), 1, 0.0, "", tuple(drawing.PAIRS[:4]))


# ---------------------------------------------------------------- what is drawn


@pytest.mark.parametrize("workers", [1, 3, 4, 7, 16])
def test_every_case_has_one_worker(workers: int) -> None:
    plan = replace(PLAN, workers=workers)
    numbers = [list(plan.numbers(worker)) for worker in range(workers)]
    assert sorted(itertools.chain(*numbers)) == list(range(plan.cases))
    assert list(plan.numbers(0, 20)) == [n for n in numbers[0] if n >= 20]


def test_a_worker_compiles_for_few_pairs() -> None:
    plan = replace(PLAN, workers=4)
    assert {len({plan.pair(n) for n in plan.numbers(worker)}) for worker in range(4)} == {1}


def test_seeds_take_turns_with_the_pairs() -> None:
    seen = {pair for seed in range(4) for pair in drawing.pairs(seed, 8)}
    assert seen == set(drawing.PAIRS)


def test_what_all_claim_is_claimed_by_all_and_spans_tiles() -> None:
    claims = {name: load(name).claims for name in calibrate.ON_GPU}
    pair = drawing.PAIRS[0]
    of_all = drawing.common(claims.values(), pair)
    cases = {n: drawing.draw(7, n, pair, claims["triton"], of_all) for n in range(400)}
    assert cases == {n: drawing.draw(7, n, pair, claims["triton"], of_all) for n in range(400)}
    common = [case for n, case in cases.items() if not drawing.is_free(7, n)]
    assert 0.6 < len(common) / len(cases) < 0.8
    refusals = {c.refusal(replace(case, layout="bhsd")) for case in common for c in claims.values()}
    assert refusals == {""}
    assert not any(claims["triton"].refusal(case) for case in cases.values())
    assert {case.values for case in cases.values()} == set(REGIMES)
    assert len({(case.len_q, case.len_k) for case in common}) <= drawing.SHAPES
    tile = drawing._tile(pair)
    several = [any(q > tile[0] and k > tile[1] for q, k in case.pairs) for case in cases.values()]
    assert sum(several) >= len(several) / 2
    free = [case for n, case in cases.items() if drawing.is_free(7, n)]
    for wanted in ("ragged", "d_lse", "dead_rows", "empty"):
        assert any(getattr(case, wanted) for case in free), wanted
    assert any(case.heads_q > case.heads_kv for case in free)


def test_the_sets_of_seeds_have_none_in_common() -> None:
    assert not set(calibrate.SEEDS["calibration"]) & set(calibrate.SEEDS["verification"])


# ---------------------------------------------------------------- campaigns


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_paths, "ask_machine", lambda: gpu_paths.Machine(torch="2"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for library in ("OMP", "OPENBLAS", "MKL"):  # which a campaign sets, for its workers
        monkeypatch.setenv(f"{library}_NUM_THREADS", "1")


def run(folder: Path, *arguments: str) -> tuple[int, Entry]:
    status = calibrate.main(
        ["--workers", "1", "--seconds", "60", "--out", str(folder), *arguments], folder / "ledger.json"
    )
    return status, ledger.read_entry(folder / "entry.json")


def test_a_campaign_of_right_implementations_holds_and_is_counted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, entry = run(tmp_path, "--cases", "8", "--seed", "1003")
    assert (status, entry.red, entry.cases, entry.complete) == (HELD, [], 8, True)
    assert entry.seeds == "verification"
    assert {count.implementation for count in entry.comparisons} == {"emulation", "sdpa-math"}
    assert 8 < entry.total <= 16
    assert 0 < entry.closest["largest"] < 1
    tables = (tmp_path / "tables.md").read_text()
    for heading in ("By tensor", "By regime", "Limits", "elements with no power"):
        assert heading in tables

    book = tmp_path / "book" / "ledger.json"
    assert calibrate.main(["--merge", str(tmp_path)], book) == HELD
    assert [e.total for e in ledger.read(book)] == [entry.total]
    (page,) = book.parent.glob("calibration-*-seed1003-*.md")
    assert page.read_text() == tables
    capsys.readouterr()
    assert calibrate.main(["--merge", str(tmp_path)], book) == WRONG_USE
    assert "seed 1003 by code" in capsys.readouterr().err
    assert len(ledger.read(book)) == 1
    assert calibrate.main(["--seed", "1003"], book) == WRONG_USE  # before anything runs
    assert calibrate.main(["--ledger"], book) == HELD
    assert f"1 campaigns, {entry.total} comparisons, 0 red" in capsys.readouterr().out


FAULTY = """
import os
from torch.nn.functional import scaled_dot_product_attention

def wrong(q, k, v, *, causal, scale, return_lse):
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    out[..., -1, 0] *= 1.01
    return out

def deadly(q, k, v, *, causal, scale, return_lse):
    os._exit(5)
"""


def test_a_planted_fault_is_red_and_its_case_is_in_the_entry(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    name = f"{tmp_path}/faulty.py:wrong"
    status, entry = run(tmp_path, "--cases", "4", "--pairs", "1", "--implementations", "sdpa-math", name)
    assert status == BROKE
    assert {red.implementation for red in entry.red} == {name}
    kept = records.read(tmp_path / "reds.jsonl")
    assert {record.case for record in kept} == {red.case for red in entry.red}
    assert all(not parse_case(red.case).backward and "out: " in red.reason for red in entry.red)
    assert "## Red" in (tmp_path / "tables.md").read_text()


def test_a_process_that_dies_is_red_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    name = f"{tmp_path}/faulty.py:deadly"
    cases = ("--cases", "2", "--pairs", "1")
    status, entry = run(tmp_path, *cases, "--implementations", "sdpa-math", "emulation", name)
    assert status == BROKE
    assert [red.reason for red in entry.red] == ["the process died, exit status 5"] * 2
    assert len({red.case for red in entry.red}) == 2
    assert entry.total == 0


def test_a_companion_answers_and_may_die(monkeypatch: pytest.MonkeyPatch) -> None:
    companion = Companion(replace(PLAN, override="sm80"))
    companion.ask(Case(grad="none"))
    outcome = companion.answer()
    assert outcome.path == "interpreter" and outcome.tiles is not None
    assert set(outcome.execution.results) == {"out", "lse"}
    assert companion.process is not None
    companion.process.kill()
    companion.process.join()
    monkeypatch.setattr(companion, "process", Unnoticed(companion.process))
    companion.ask(Case(grad="none"))
    outcome = companion.answer()
    assert outcome.raised == "ProcessError: the process of this path died with exit status -9"
    assert companion.process is None


class Unnoticed:
    """A process that has died since one last looked."""

    def __init__(self, process: BaseProcess) -> None:
        self.process = process
        self.looks = iter([True])

    def is_alive(self) -> bool:
        return next(self.looks, False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.process, name)


# ---------------------------------------------------------------- findings and the ledger


def numbers(judged: int = 100) -> Numbers:
    return Numbers(0.5, 0.25, 0.75, 0.1, None, 2.0, 100, judged)


def sample(status: str = "held", judged: int = 100) -> Sample:
    return Sample(
        "id", "mine", "sm90", "float16", "normal", status, "out: bias", {"out": numbers(judged)}, {}
    )


def found_of(*samples: Sample) -> Findings:
    found = Findings()
    found.take(Done(0, list(samples), [], 1.0))
    return found


def test_the_status_of_a_campaign() -> None:
    assert found_of(sample()).status() == HELD
    assert found_of(sample(), sample("broken")).status() == BROKE
    assert found_of(sample("refused")).status() == found_of().status() == NOTHING_EXECUTED
    allowed = 100 - int(100 * thresholds.NO_POWER)
    assert found_of(sample(judged=allowed)).status() == HELD
    assert found_of(sample(judged=allowed - 1)).status() == BROKE


def test_what_is_refused_or_without_power_is_no_comparison() -> None:
    found = found_of(sample(), sample("refused"), sample("no power", judged=0))
    assert found.total == 1
    assert (found.refused["mine"], found.powerless["mine", "sm90", "float16"]) == (1, 1)
    assert found.closest() == {"budget": 0.5, "largest": 0.25, "rms": 0.75, "bias": 0.1, "emulation": 0.0}


ENTRY = Entry(
    date="2026-01-01T00:00:00+00:00", machine="GPU", driver="1", torch="2", triton="3", code="abc", seed=1,
    seeds="calibration", complete=True, seconds=1.0, workers=1, cases=1,
    comparisons=[Count("triton", "sm90", "float16", 5)], red=[], refused=[], elements=10, no_power=0,
    closest={},
)  # fmt: skip


def test_the_same_campaign_elsewhere_counts_and_here_only_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    ledger.add(ENTRY, path)
    with pytest.raises(LedgerError, match="seed 1 by code abc on GPU already"):
        ledger.add(msgspec.structs.replace(ENTRY, date="2027-01-01T00:00:00+00:00"), path)
    ledger.add(msgspec.structs.replace(ENTRY, machine="other"), path)
    ledger.add(msgspec.structs.replace(ENTRY, seed=2), path)
    assert ledger.totals(ledger.read(path)) == {
        ("GPU", "triton", "sm90"): 10,
        ("other", "triton", "sm90"): 5,
    }
    with pytest.raises(LedgerError, match="made no comparison"):
        ledger.add(msgspec.structs.replace(ENTRY, seed=3, comparisons=[]), path)


WHOLE = ledger.encoded(ENTRY)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (WHOLE[: len(WHOLE) // 2], "not an entry, or not all of one"),
        (b"", "not an entry, or not all of one"),
        (b'{"version": 1, "name": "something else"}', "not an entry"),
        (b"[1, 2]", "not an entry"),
        (WHOLE.replace(b'"version": 1', b'"version": 9'), "of version 9; this reads version 1"),
        (WHOLE.replace(b'"seed": 1', b'"seed": "1"'), "not an entry"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_entry_is_refused(
    text: bytes | None, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "entry.json").write_bytes(text)
    assert calibrate.main(["--merge", str(tmp_path)], tmp_path / "ledger.json") == WRONG_USE
    assert what in capsys.readouterr().err
    assert not (tmp_path / "ledger.json").exists()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--seed", "2000"], "--seed is 2000; it may be 0 to 999 (calibration), 1000 to 1999 (verification)"),
        (["--cases", "0"], "--cases is 0; it must be greater than 0"),
        (["--implementations", "nothing"], "one is 'nothing'; it may be 'triton'"),
    ],
)
def test_wrong_use_is_named(
    arguments: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate.main(arguments, tmp_path / "ledger.json") == WRONG_USE
    assert what in capsys.readouterr().err


def test_the_committed_ledger_can_be_read() -> None:
    assert all(entry.total for entry in ledger.read())
