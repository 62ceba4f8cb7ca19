"""The main job: an implementation against the three references, tensor by tensor, rule by rule.

In this order: the corpus, the edges, generated cases. `--case ID` runs the given cases and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import given, seed

from conftest import SEED, SESSION

from .cases import Case
from .corpus import read_corpus
from .edges import edges
from .implementations import ImplementationError
from .session import Session, interpreted
from .strategies import PROFILES, SHARD, cases, generation, shard_of

LARGEST_INTERPRETED = 9_000
LARGEST_COMPILED = 400_000
"""Most scores of a generated case: some two seconds of the interpreter, or a tenth of the oracle."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    session = config.stash[SESSION]
    try:
        claims = session.implementation.claims
    except ImplementationError as error:
        pytest.exit(str(error), 2)
    if "case" in metafunc.fixturenames:
        name = metafunc.function.__name__
        if name == "test_replay":
            found = config.option.case
        elif config.option.case:
            found = []
        elif name == "test_corpus":
            found = read_corpus()
        else:
            found = edges(session.tile(Case(dim=32, dim_v=32)), interpreted())
        metafunc.parametrize("case", found, ids=lambda case: case.id)
    if "shard" in metafunc.fixturenames:
        profile = PROFILES[config.option.profile]
        examples = config.option.examples or (profile.interpreted if interpreted() else profile.compiled)
        count = 0 if config.option.case or not claims else -(-examples // SHARD)
        metafunc.parametrize("shard", range(count))


def test_replay(case: Case, session: Session) -> None:
    _check(session, case, "replay")


def test_corpus(case: Case, session: Session) -> None:
    _check(session, case, "corpus")


def test_edge(case: Case, session: Session) -> None:
    _check(session, case, "edge")


def test_generated(shard: int, session: Session) -> None:
    dtype, dims = shard_of(shard, session.implementation.claims, interpreted())
    tile = session.tile(Case(dim=dims[0], dim_v=dims[1], dtype=dtype))
    largest = LARGEST_INTERPRETED if interpreted() else LARGEST_COMPILED

    @seed(int(os.environ[SEED]) * 100_003 + shard)
    @generation(SHARD)
    @given(cases(session.implementation.claims, dtype, dims, tile, largest))
    def generated(case: Case) -> None:
        session.check(case, "generated")

    _red_or_not(session, "generated", generated)


def _check(session: Session, case: Case, origin: str) -> None:
    _red_or_not(session, origin, lambda: session.check(case, origin))


def _red_or_not(session: Session, origin: str, check: Callable[[], None]) -> None:
    __tracebackhide__ = True
    explanation = None
    try:
        check()
    except AssertionError as error:
        explanation = str(error)
        session.write_broken(origin)
    if explanation is not None:  # outside of the handler: one explanation, no chain of tracebacks
        pytest.fail(explanation, pytrace=False)
