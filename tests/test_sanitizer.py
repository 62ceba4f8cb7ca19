"""NVIDIA's compute-sanitizer over a selection of ragged and edge cases (`sanitized`)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .sanitizer import ENVIRONMENT, FOUND, MISSING, command

pytestmark = pytest.mark.usefixtures("gpu")

ROOT = Path(__file__).parent.parent


def sanitized(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = command(tool, *arguments)
    if not words:
        pytest.skip(MISSING)
    environment = os.environ | ENVIRONMENT
    run = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    if "Target application terminated before first instrumented API call" in run.stdout:
        pytest.skip("compute-sanitizer cannot attach here")
    return run


@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    """A13: accesses outside, reads of what nobody wrote, races in shared memory."""
    run = sanitized(tool)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "ragged, offsets that point outside" in run.stdout  # all of it ran


def test_memcheck_sees_a_read_past_the_end() -> None:
    """Else the test above shows little."""
    run = sanitized("memcheck", "--overrun")
    assert run.returncode == FOUND, run.stdout + run.stderr
    assert "Invalid __global__ read" in run.stdout
