"""Memory beyond inputs and outputs: grows with T^2 for naive attention, with T for ours."""

from __future__ import annotations

import pytest

from . import memory
from .bench import Bench
from .contenders import FLASH, NAIVE, OWN
from .plugin import Found
from .problems import BACKWARD, FORWARD


@pytest.mark.parametrize("step", [FORWARD, BACKWARD])
@pytest.mark.parametrize("name", [OWN, NAIVE, FLASH])
def test_memory_against_length(name: str, step: str, bench: Bench, found: Found) -> None:
    if name not in bench.contenders:
        pytest.skip(f"{name} is not among the contenders")
    curve = memory.curve(bench, name, step)
    found.curves.append(curve)
    expected = memory.EXPONENTS.get(name)
    if expected is None:
        return
    assert curve.exponent is not None, curve
    assert abs(curve.exponent - expected) <= memory.TOLERANCE, curve
