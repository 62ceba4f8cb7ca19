"""Faults planted in a copy of the kernels: each makes the suite red, soon, and for the right tensor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from .session import REPORT_DIR, interpreted

ROOT = Path(__file__).parent.parent
SECONDS = 120
"""Within which a fault must be found, through the interpreter, on one core."""


@dataclass(frozen=True)
class Fault:
    """A change to a kernel.

    Attributes:
        name: what it does, as the test's id.
        file: in kernels/.
        changes: texts and what stands in their places; each text must be there.
        tensors: where it must show, at least.
    """

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    tensors: tuple[str, ...]


FAULTS = [
    Fault(
        "strictly-below-the-diagonal",
        "numerics.py",
        (("(keys <= rows + (Sk - Sq))", "(keys < rows + (Sk - Sq))"),),
        ("out", "lse"),
    ),
    Fault(
        "no-length-mask-in-the-last-key-tile",
        "numerics.py",
        (("return keys < Sk + 0 * rows", "return keys >= 0 * rows"),),
        ("out", "lse"),
    ),
    Fault(
        "accumulator-not-rescaled",
        "forward.py",
        (("acc * alpha[:, None]", "acc"),),
        ("out",),
    ),
    Fault(
        "lse-in-base-2",
        "forward.py",
        (("m * tl.abs(scale) + tl.log(l)", "m * tl.abs(scale) * LOG2_E + tl.log2(l)"),),
        ("lse",),
    ),
    Fault(
        "dk-without-scale",
        "backward.py",
        (("dk * scale", "dk"),),
        ("dk",),
    ),
    Fault(
        "delta-left-out",
        "backward.py",
        (("dP - delta[None, :]", "dP"), ("dP - delta[:, None]", "dP")),
        ("dq", "dk"),
    ),
    Fault(
        "group-overwritten-instead-of-summed",
        "backward.py",
        (
            (
                "        h = h_kv * group + g\n",
                "        h = h_kv * group + g\n        dk = dk * 0\n        dv = dv * 0\n",
            ),
        ),
        ("dk", "dv"),
    ),
    Fault(
        "dq-accumulated-in-bfloat16",
        "backward.py",
        (
            (
                "dq = tl.dot(dS, k, dq, input_precision=PRECISION)",
                "dq = rounded(tl.dot(dS, k, dq, input_precision=PRECISION), tl.bfloat16, True)",
            ),
        ),
        ("dq",),
    ),
    Fault(
        "store-of-a-row-too-many",
        "numerics.py",
        (("mask = (rows < n_rows)[:, None] & (tl", "mask = (rows < n_rows + 1)[:, None] & (tl"),),
        ("memory",),
    ),
    Fault(
        "lse-and-delta-read-past-their-end",
        "backward.py",
        (("tl.load(base + rows, mask=rows < Sq, other=other)", "tl.load(base + rows)"),),
        ("dk",),
    ),
    Fault(
        "lse-of-another-sequence",
        "backward.py",
        (
            (
                "        lse_base = head_base(Lse, b_q, stride_lb, h, stride_lh, 1)",
                "        lse_base = head_base(Lse, b_k, stride_lb, h, stride_lh, 1)",
            ),
        ),
        ("dk",),
    ),
    Fault(
        "rows-behind-the-last-sequence-not-written",
        "ragged.py",
        (("mask=s < batch, other=total)", "mask=s < batch, other=0)"),),
        ("dk", "dv"),
    ),
    Fault(
        "keys-of-all-sequences",
        "ragged.py",
        (("tl.store(entry + 4, length_other", "tl.store(entry + 4, total_other"),),
        ("out",),
    ),
]


@pytest.mark.skipif(
    not interpreted(), reason="planted through the interpreter; on a GPU each would be compiled anew"
)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(
    fault: Fault, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    for folder in ("kernels", "reference", "tests", "reports"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("out", "__pycache__"))
    for file in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    source = tmp_path / "kernels" / fault.file
    text = source.read_text()
    for old, new in fault.changes:
        assert old in text, f"{fault.file} no longer contains {old!r}: write the fault anew"
        text = text.replace(old, new)
    source.write_text(text)

    start = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/test_references.py", "-x", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**_without_xdist(), REPORT_DIR: str(tmp_path / "out")},
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
    )
    seconds = time.perf_counter() - start

    assert run.returncode == 1, run.stdout + run.stderr
    for tensor in fault.tensors:
        assert f"  {tensor} against " in run.stdout, run.stdout
    assert seconds < SECONDS
    margins = [line.strip() for line in run.stdout.splitlines() if " against " in line]
    record_property("figure", f"red after {seconds:.0f} s; worst: {margins[0]}")


def _without_xdist() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
