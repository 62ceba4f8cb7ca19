"""Laws of attention on the implementation under test: no reference, hence any size.

Generated cases, one law a test; `--case ID` runs all laws on the given cases. On a GPU also lengths at
which the float64 oracle is too slow.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given, seed

from conftest import SEED, SESSION

from .cases import Case
from .comparison import replay
from .implementations import Implementation
from .laws import LAWS, Finding, Outcome, Trial, outcome, outcomes
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
    found = outcomes(case, session.implementation, session.device)
    if {of_law.status for of_law in found} == {"not claimed"}:
        record_property("comparison", "not claimed")
    _fail(case, session, [finding for of_law in found for finding in of_law.findings])


def test_generated(law: str, number: int, part: int, session: Session) -> None:
    """A law on cases about which it says something, as far as there are some within the claims."""
    claims = session.implementation.claims
    shard = list(LAWS).index(law) + number
    dtype, dims = shard_of(shard, claims, interpreted())
    tile = session.tile(Case(dim=dims[0], dim_v=dims[1], dtype=dtype))
    largest = LARGEST_INTERPRETED if interpreted() else LARGEST_COMPILED
    tried: list[Outcome] = []
    red: list[tuple[Case, Sequence[Finding]]] = []

    @seed(int(os.environ[SEED]) * 100_003 + shard)
    @generation(part)
    @given(cases(claims, dtype, dims, tile, largest))
    def generated(case: Case) -> None:
        case = claims.narrowed(LAWS[law].suited(case))
        tried.append(outcome(LAWS[law], Trial(case, session.implementation, session.device)))
        if tried[-1].findings:
            red.append((case, tried[-1].findings))
            raise AssertionError(law)

    try:
        generated()
    except Exception:
        if not red:
            raise
        _fail(red[-1][0], session, red[-1][1])  # of the smallest case
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
    of_law = outcome(LAWS[law], _trial(long, _Hashed(session)))
    _fail(long, session, of_law.findings)
    if of_law.status in ("not claimed", "not applicable"):
        pytest.skip(f"{of_law.status}: {of_law.reason}")
    assert of_law.status == "held", of_law


@pytest.fixture(scope="module", autouse=True)
def _memory_given_back():
    """Others may share the GPU: the long tensors do not stay with this process."""
    yield
    _trial.cache_clear()
    if torch.cuda.is_available() and not interpreted():
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- messages


def _fail(case: Case, session: Session, findings: Sequence[Finding]) -> None:
    """Fails the test with what is broken, where and how to see it again, if anything is."""
    if findings:
        path = session.implementation.path(session.device)
        lines = [f"{session.implementation.name} on {path}: {case.words()}", ""]
        lines += [explain(finding) for finding in sorted(findings, key=lambda finding: -finding.margin)]
        pytest.fail("\n".join([*lines, "", "  replay: " + _replay(case, session, path)]), pytrace=False)


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
