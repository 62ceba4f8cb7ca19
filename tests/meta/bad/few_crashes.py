"""A pytest plugin by which a run stops at the second crash."""

from __future__ import annotations


def pytest_sessionstart() -> None:
    from tests import isolation

    isolation.MOST_CRASHES = 2
