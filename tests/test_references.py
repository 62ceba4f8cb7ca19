"""The main job: an implementation against the three references, tensor by tensor, rule by rule.

In this order: the corpus, recipes of faults seen in the field, the edges, generated cases. `--case ID`
runs the given cases and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, seed
from hypothesis.errors import Flaky

from conftest import SEED, SESSION
from reports.repeats import NOT_AGAIN

from .cases import Case
from .comparison import explain
from .corpus import read_corpus
from .edges import edges, long
from .recipes import recipes
from .session import GENERATED, Broke, Session, interpreted
from .strategies import PROFILES, SHARD, cases, generation, shard_of

Property = Callable[[str, object], None]
"""pytest's fixture record_property."""

LARGEST_INTERPRETED = 9_000
LARGEST_COMPILED = 400_000
"""Most scores of a generated case: some two seconds of the interpreter, or a tenth of the oracle."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    session = config.stash[SESSION]
    if "case" in metafunc.fixturenames:
        name = metafunc.function.__name__
        claims = session.implementation.claims

        def narrowed(case: Case) -> Case:  # of an unclaimed backward the forward is left
            if name != "test_replay":
                case = claims.nearest(case, of_any=name == "test_edge")
            return claims.narrowed(case)

        if name == "test_recipe":
            listed = recipes(session.tile(Case(dim=16, dim_v=16))) if not config.option.case else {}
            pairs = [(number, case) for number, cases in listed.items()
                     for case in dict.fromkeys(map(narrowed, cases))]  # fmt: skip
            ids = [f"{number}-{case.id}" for number, case in pairs]
            metafunc.parametrize(("number", "case"), pairs, ids=ids)
            return
        if name == "test_replay":
            found = config.option.case
        elif config.option.case:
            found = []
        elif name == "test_corpus":
            found = read_corpus()
        else:
            found = edges(session.tile(Case(dim=32, dim_v=32)), interpreted())
            found += long() if session.implementation.tiles is None else []
        metafunc.parametrize("case", list(dict.fromkeys(map(narrowed, found))), ids=lambda case: case.id)
    if "shard" in metafunc.fixturenames:
        profile = PROFILES[config.option.profile]
        examples = config.option.examples or (profile.interpreted if interpreted() else profile.compiled)
        count = 0 if config.option.case else -(-examples // SHARD)
        metafunc.parametrize("shard", range(count))


def test_replay(case: Case, session: Session, record_property: Property) -> None:
    with _explained(session, "replay"):
        record_property("comparison", session.check(case, "replay").status)


def test_corpus(case: Case, session: Session, record_property: Property) -> None:
    with _explained(session, "corpus"):
        record_property("comparison", session.check(case, "corpus").status)


def test_recipe(number: str, case: Case, session: Session, record_property: Property) -> None:
    """What broke kernels in the field, by its number in field_bugs.md."""
    with _explained(session, "recipe"):
        record_property("comparison", session.check(case, "recipe").status)


def test_edge(case: Case, session: Session, record_property: Property) -> None:
    with _explained(session, "edge"):
        record_property("comparison", session.check(case, "edge").status)


def test_generated(shard: int, session: Session) -> None:
    dtype, dims = shard_of(shard, session.implementation.claims, interpreted())
    tile = session.tile(Case(dim=dims[0], dim_v=dims[1], dtype=dtype))
    largest = LARGEST_INTERPRETED if interpreted() else LARGEST_COMPILED

    @seed(int(os.environ[SEED]) * 100_003 + shard)
    @generation(SHARD)
    @given(cases(session.implementation.claims, dtype, dims, tile, largest))
    def generated(case: Case) -> None:
        session.check(case, GENERATED)

    with _explained(session, GENERATED):
        generated()


@contextmanager
def _explained(session: Session, origin: str) -> Iterator[None]:
    """A red comparison is written, and fails the test with its explanation instead of a traceback."""
    try:
        yield
        return
    except (Broke, Flaky) as error:
        record = session.write_broken(origin, "" if isinstance(error, Broke) else NOT_AGAIN)
        if record is None:
            raise
    raise pytest.fail.Exception(f"{record.reason}\n\n{explain(record)}", pytrace=False) from None
