"""The first call in a process, and calls in another order: caches change no bit.

Each order runs in a process of its own that has compiled nothing yet.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .calls import Offsets, attend, bits, every, inputs_of, ragged_inputs_of
from .layouts import place
from .session import interpreted

ROOT = Path(__file__).parent.parent

ORDERS = ("ABCDA", "DCBAD", "BADCB")


def call(name: str, device: torch.device) -> dict[str, Any]:
    """Calls that a cache may take for one another: of one dtype and mask, and little else in common."""
    if name == "D":
        batch = [(9, 40), (0, 3), (33, 5)]
        return attend(ragged_inputs_of(device, batch), Offsets.of(batch, device), causal=True, scale=0.2)
    lengths = {"A": (64, 64), "B": (65, 63), "C": (1, 1)}[name]
    x = inputs_of(device, len_q=lengths[0], len_k=lengths[1], dim=16, heads_q=1 if name == "C" else 2)
    if name == "B":  # behind an aligned call one that is an element off
        x = every(x, lambda which, t: place(which, t.cpu(), "offset", device))
    return attend(x, causal=True, scale=0.2 if name == "A" else -0.3)


def fingerprint(results: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    for name, t in sorted(results.items()):
        digest.update(name.encode() + bits(t).cpu().numpy().tobytes())
    return digest.hexdigest()


def print_fingerprints(order: str) -> None:
    """In a child process."""
    if interpreted():
        from .interpreter import patch_once_per_launch

        patch_once_per_launch()
    device = torch.device("cpu" if interpreted() else "cuda")
    print(json.dumps([fingerprint(call(name, device)) for name in order]))


@pytest.mark.parametrize("order", ORDERS)
def test_the_first_call_and_any_order_give_the_same_bits(
    order: str, device: torch.device, tmp_path: Path
) -> None:
    """M1, M4, M5, M10: shapes A, B, A; C is one of everything."""
    program = f"from tests.test_first_calls import print_fingerprints; print_fingerprints({order!r})"
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    child = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True,
                           text=True, timeout=300)  # fmt: skip
    assert child.returncode == 0, child.stderr
    here = {name: fingerprint(call(name, device)) for name in set(order)}
    assert json.loads(child.stdout.splitlines()[-1]) == [here[name] for name in order]
