"""What a fresh process pays, what the host pays for each call, and what the GPU does at most."""

from __future__ import annotations

from . import first_call
from .bench import Bench
from .machine import ceilings
from .plugin import Found
from .problems import BOTH, FORWARD, SMALL


def test_a_warm_cache_compiles_nothing(found: Found) -> None:
    cold, warm = found.first_calls = first_call.first_calls()
    assert cold.compiled > 0 and warm.compiled == 0, found.first_calls
    assert warm.from_cache == cold.compiled, found.first_calls
    assert warm.first < cold.first, found.first_calls


def test_host_time(bench: Bench, found: Found) -> None:
    found.host_times = first_call.host_times(bench, SMALL[:1], [FORWARD, BOTH])
    assert found.host_times


def test_ceilings(bench: Bench, found: Found) -> None:
    found.ceilings = ceilings(bench.timer)
    assert min(found.ceilings) > 0
