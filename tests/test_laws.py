"""Laws of attention on the implementation under test: no reference, hence any size.

Generated cases, one law a test; `--case ID` runs all laws on the given cases. On a GPU also lengths at
which the float64 oracle is too slow.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec
import pytest
import torch
from hypothesis import given, seed

from conftest import SEED, SESSION
from reports.records import Record, Verdict

from .cases import Case
from .comparison import account, begun, describe, replay
from .implementations import Implementation
from .known_failures import LAW, STATUS
from .laws import LAWS, Finding, Outcome, Trial, outcome
from .session import LARGEST_CASE, Session, interpreted
from .strategies import PROFILES, cases, generation, shard_of

LARGEST_INTERPRETED = 2_500
LARGEST_COMPILED = 100_000
"""Most scores of a generated case: a law makes up to four calls."""

INTERPRETED, COMPILED = 280, 40
"""Of how many comparisons that a profile generates a law gets one."""

PART = 10
"""Cases that one test generates."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.option
    session = metafunc.config.stash[SESSION]
    if "case" in metafunc.fixturenames and metafunc.function is test_replay:
        metafunc.parametrize("case", option.case, ids=lambda case: case.id)
    if "part" in metafunc.fixturenames:
        profile = PROFILES[option.profile]
        count = profile.interpreted // INTERPRETED if interpreted() else profile.compiled // COMPILED
        count = max(1, option.examples // len(LAWS) if option.examples else count)
        parts = [min(PART, count - first) for first in range(0, count, PART)]
        numbered = [(name, number, part) for name in LAWS for number, part in enumerate(parts)]
        ids = [f"{name}-{number}" for name, number, _ in numbered]
        metafunc.parametrize(("law", "number", "part"), numbered, ids=ids)
    if "long" in metafunc.fixturenames:
        found = long_cases(session.implementation)
        metafunc.parametrize("long", found, ids=lambda case: case.id)


def test_replay(case: Case, session: Session, record_property: Callable[[str, object], None]) -> None:
    trial = Trial(case, session.implementation, session.device)
    found = [judged(law, trial, case, session) for law in LAWS]
    statuses = {of_law.record.status for of_law in found}
    if statuses == {"not claimed"} or STATUS in statuses:
        record_property("comparison", STATUS if STATUS in statuses else "not claimed")
    _fail(session, case, found)


def test_generated(law: str, number: int, part: int, session: Session) -> None:
    """A law on cases about which it says something, as far as there are some within the claims."""
    claims = session.implementation.claims
    shard = list(LAWS).index(law) + number
    dtype, dims = shard_of(shard, claims, interpreted())
    tile = session.tile(Case(dim=dims[0], dim_v=dims[1], dtype=dtype))
    largest = LARGEST_INTERPRETED if interpreted() else LARGEST_COMPILED
    tried: list[Outcome] = []
    red: list[tuple[Case, Judged]] = []

    @seed(int(os.environ[SEED]) * 100_003 + shard)
    @generation(part)
    @given(cases(claims, dtype, dims, tile, largest))
    def generated(case: Case) -> None:
        case = claims.narrowed(LAWS[law].suited(case))
        of_law = judged(law, Trial(case, session.implementation, session.device), case, session)
        tried.append(of_law.outcome)
        if of_law.record.status == "broken":
            red.append((case, of_law))
            raise AssertionError(law)

    try:
        generated()
    except Exception:
        if not red:
            raise
        case, of_law = red[-1]  # the smallest
        _fail(session, case, [of_law])
    if all(of_law.status == "not claimed" for of_law in tried):
        pytest.skip(f"not claimed: {tried[-1].reason}")


# ---------------------------------------------------------------- where the oracle is too slow

LONG = 65536
LONG_LAWS = ("split_keys", "permuted_keys", "prefix_of_queries", "ragged_is_separate", "hull_of_values",
             "sum_of_dv", "sum_of_dk", "dq_q_is_dk_k", "d_out_out_is_dv_v")  # fmt: skip


def long_cases(implementation: Implementation) -> list[Case]:
    """64k keys, within the claims: as many queries, and few; causal and not; both 16-bit dtypes."""
    found = []
    for dim, dtype in ((64, "float16"), (128, "bfloat16"), (128, "float16"), (64, "bfloat16")):
        for causal in (False, True):
            for heads, len_q in ((1, LONG), (2, 65)):
                case = Case(heads_q=heads, heads_kv=1, len_q=len_q, len_k=LONG, dim=dim, dim_v=dim,
                            dtype=dtype, causal=causal, d_lse=True)  # fmt: skip
                found.append(implementation.claims.narrowed(case))
    ragged = tuple((n, n) for n in (LONG // 2, 1, LONG // 4, 1000, LONG // 8))
    base = Case(heads_q=2, heads_kv=1, lengths=ragged, dim=64, dim_v=64, causal=True, layout="bshd")
    found += [implementation.claims.narrowed(replace(base, dtype=dtype)) for dtype in ("float16", "bfloat16")]
    return [case for case in found if not implementation.claims.refusal(case)]


@lru_cache(maxsize=1)
def _trial(case: Case, session: _Hashed) -> Trial:
    """The case's own call and its bounds are made once for all laws."""
    return Trial(case, session.session.implementation, session.session.device)


class _Hashed:
    """A session as a key of a cache: there is one."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __hash__(self) -> int:
        return id(self.session)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and other.session is self.session


@pytest.mark.parametrize("law", LONG_LAWS)
def test_long(long: Case, law: str, session: Session, gpu: torch.device) -> None:
    if session.device.type != "cuda":
        pytest.skip("the implementation does not claim to run on a GPU")
    of_law = judged(law, _trial(long, _Hashed(session)), long, session)
    _fail(session, long, [of_law])
    found = of_law.outcome
    if found.status in ("not claimed", "not applicable"):
        pytest.skip(f"{found.status}: {found.reason}")
    assert of_law.record.status in ("held", STATUS), found


@pytest.fixture(scope="module", autouse=True)
def _memory_given_back(session: Session):
    """Others may share the GPU: the long tensors do not stay with this process."""
    yield
    _trial.cache_clear()
    if torch.cuda.is_available() and not interpreted() and not session.lost:
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- a law on a case


@dataclass(frozen=True)
class Judged:
    """A law on a case.

    Attributes:
        outcome: what became of it.
        record: of that, with a known failure as one.
    """

    outcome: Outcome
    record: Record


def judged(law: str, trial: Trial, case: Case, session: Session) -> Judged:
    """Runs a law, and records it unless it is red, if a known failure is about it.

    An exception of the implementation is a broken claim, as in a comparison.
    """
    path = session.implementation.path(session.device)
    record = begun(case, session.implementation, path, LAW)(status="running", reason=f"in law {law}")
    record = msgspec.structs.replace(record, replay=_replay(case, session, path))
    trial.guard = lambda: session.guard(record)
    try:
        found = outcome(LAWS[law], trial)
        wrong = [Verdict(f.tensor, LAW, law, False, f.statistic, f.limit, f.where, f.note)
                 for f in found.findings]  # fmt: skip
    except (Exception, SystemExit) as error:
        if error is not trial.raised:
            raise
        told = account(error)
        found = Outcome(law, "broken", f"raised {told.splitlines()[0]}, in law {law}")
        wrong = [Verdict("out", "contract", "does not raise", False, note=told)]
    verdicts = wrong or [Verdict("out", LAW, law, True)]
    reason = found.reason or "; ".join(dict.fromkeys(f"{v.tensor}: {v.rule}" for v in wrong))
    record = msgspec.structs.replace(record, status=found.status, reason=reason, verdicts=verdicts)
    record = session.known.settled(record)
    if record.status == STATUS or (record.status == "held" and session.known.mentions(record)):
        session.write(record)
    return Judged(found, record)


# ---------------------------------------------------------------- messages


def _fail(session: Session, case: Case, found: Sequence[Judged]) -> None:
    """Fails the test with what is broken, where and how to see it again, if anything is; records it."""
    red = [of_law for of_law in found if of_law.record.status == "broken"]
    if not red:
        return
    for of_law in red:
        session.write(of_law.record)
    findings = [finding for of_law in red for finding in of_law.outcome.findings]
    record = red[0].record
    lines = [f"{record.implementation} on {record.path}: {case.words()}", ""]
    lines += [explain(finding) for finding in sorted(findings, key=lambda finding: -finding.margin)]
    for of_law in red:
        if not of_law.outcome.findings:
            (verdict,) = of_law.record.verdicts
            lines.append(f"  {of_law.outcome.law}: {describe(verdict)}".replace("\n", "\n      "))
    pytest.fail("\n".join([*lines, "", "  replay: " + record.replay]), pytrace=False)


def explain(finding: Finding) -> str:
    """One finding for a reader."""
    text = f"  {finding.law}: {LAWS[finding.law].statement}\n      {finding.tensor}: {finding.note}"
    if finding.limit or finding.margin < torch.inf:
        text += f"; off by {finding.statistic:.4g}, at most {finding.limit:.4g} ({finding.margin:.3g} x)"
    return text + (f" at {list(finding.where)}" if finding.where is not None else "")


def _replay(case: Case, session: Session, path: str) -> str:
    """The line that repeats the laws on this case; what `--case` refuses to hold is a test of its own."""
    line = replay(case, session.implementation, path).replace("test_references.py", "test_laws.py")
    if sum(case.heads_q * q * k for q, k in case.pairs) < LARGEST_CASE // 2:
        return line
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    return line.partition("tests/test_laws.py")[0] + shlex.quote(test)
