"""The runner behind `tox -e gpu`: what it decides, and what it makes of its children's ends.

The children are real processes, with a few lines of Python in the place of the suite.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests import gpu_paths
from tests.gpu_paths import GIB, CodePath, Gpu, Machine

A100 = Gpu("A100", (8, 0), 40 * GIB)
A10 = Gpu("A10", (8, 6), 24 * GIB)
L4 = Gpu("L4", (8, 9), 24 * GIB)
H200 = Gpu("H200", (9, 0), 141 * GIB)
T4 = Gpu("T4", (7, 5), 16 * GIB)


@pytest.mark.parametrize(
    ("gpus", "override", "expected"),
    [
        ([A100], None, ["native"]),
        ([A10], None, ["native"]),
        ([L4], None, ["native", "sm80"]),
        ([H200], None, ["native", "sm80"]),
        ([A100, H200], None, ["native", "sm80"]),
        ([H200], "sm80", ["sm80"]),
        ([H200], "sm86", ["sm86"]),
        ([A100], "sm80", ["sm80"]),
    ],
)
def test_paths_follow_from_the_gpu_unless_the_caller_chose_one(
    gpus: list[Gpu], override: str | None, expected: list[str]
) -> None:
    assert [path.name for path in gpu_paths.code_paths(gpus, override)] == expected


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        (Machine(trouble="ModuleNotFoundError: No module named 'torch'"), "cannot be imported"),
        (Machine("2.13.0+cpu", None, trouble="Torch not compiled with CUDA"), "without CUDA"),
        (
            Machine(
                "2.13.0",
                "13.0",
                trouble="RuntimeError: The NVIDIA driver on your system is too old"
                " (found version 12020). Please update",
            ),
            r"supports CUDA 12\.2, .* built for CUDA 13\.0",
        ),
        (Machine("2.13.0", "13.0", trouble="RuntimeError: No CUDA GPUs"), "no GPU .*No CUDA GPUs"),
        (Machine("2.13.0", "13.0", (T4,)), r"found: T4 \(compute capability 7\.5\)"),
    ],
)
def test_a_machine_without_a_usable_gpu_is_told_why(machine: Machine, says: str) -> None:
    reason = gpu_paths.why_unusable(machine)
    assert reason is not None and re.search(says, reason)


def test_one_usable_gpu_is_enough() -> None:
    assert gpu_paths.why_unusable(Machine("2.13.0", "13.0", (T4, A100))) is None


def test_workers_fit_into_memory_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Gpu("small", (8, 6), 2 * GIB)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16))
    assert gpu_paths.workers([small]) == 1
    assert gpu_paths.workers([A10]) == 6
    assert gpu_paths.workers([A10, small]) == 6
    assert gpu_paths.workers([A10, A10]) == 12
    assert gpu_paths.workers([H200]) == 16
    assert gpu_paths.workers([small] * 20) == 20  # one a GPU, whatever the cores are


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([0], 0),
        ([0, 0], 0),
        ([0, 3], 3),
        ([3, 0], 3),
        ([3, 2], 2),
        ([2, 1], 1),
        ([1, 3], 1),
    ],
)
def test_the_worst_status_is_the_status(statuses: list[int], expected: int) -> None:
    assert gpu_paths.combine(statuses) == expected


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("sys.exit(0)", gpu_paths.HELD),
        ("sys.exit(1)", gpu_paths.BROKE),
        ("sys.exit(2)", gpu_paths.MISUSED),
        ("sys.exit(3)", gpu_paths.NOTHING_RAN),
        ("sys.exit(4)", gpu_paths.MISUSED),
        ("sys.exit(5)", gpu_paths.NOTHING_RAN),
        ("sys.exit(134)", gpu_paths.BROKE),
        ("os.kill(os.getpid(), signal.SIGKILL)", gpu_paths.BROKE),
    ],
)
def test_the_end_of_a_child_in_the_terms_of_the_suite(end: str, expected: int, tmp_path: Path) -> None:
    child = [sys.executable, "-c", f"import os, signal, sys; {end}"]
    assert gpu_paths.run(CodePath("native"), child, tmp_path, {}) == expected


def test_all_paths_run_each_with_its_own_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest_of_the_child = tmp_path / "pytest.py"
    pytest_of_the_child.write_text(
        "import os, pathlib, sys\n"
        "results = pathlib.Path(os.environ['FA_REPORT_DIR'])\n"
        "results.mkdir(parents=True)\n"
        "arch = os.environ.get('TRITON_OVERRIDE_ARCH', '')\n"
        "(results / 'seen').write_text(' '.join([arch, *sys.argv[1:]]))\n"
        "sys.exit(0 if arch else 1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FA_REPORT_DIR", str(tmp_path / "out"))
    monkeypatch.delenv("TRITON_OVERRIDE_ARCH", raising=False)
    monkeypatch.setattr(gpu_paths, "ask_machine", lambda: Machine("2.13.0", "13.0", (H200,)))
    monkeypatch.chdir(tmp_path)  # `python -m pytest` finds the one here

    assert gpu_paths.main(["--case", "x"]) == gpu_paths.BROKE

    assert (tmp_path / "out/native/seen").read_text() == " --require-gpu --case=x"
    assert (tmp_path / "out/sm80/seen").read_text() == "sm80 --require-gpu --case=x"
    assert "path native: something broke (1)" in capfd.readouterr().out


def test_no_visible_gpu_is_status_3_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(gpu_paths, "run", lambda *_: pytest.fail("a path was run"))

    assert gpu_paths.main([]) == gpu_paths.NOTHING_RAN

    assert capfd.readouterr().err.startswith("gpu: ")


def test_values_that_are_files_elsewhere_do_not_lead_pytest_there() -> None:
    given = [
        "-q",
        "--manifest",
        "../k.toml",
        "--impl=x.py:f",
        "--case",
        "a",
        "--case",
        "b",
        "-k",
        "edge",
        "tests",
    ]
    assert gpu_paths.joined(given) == [
        "-q", "--manifest=../k.toml", "--impl=x.py:f", "--case=a", "--case=b", "-k", "edge", "tests"
    ]  # fmt: skip
    assert gpu_paths.joined(["--manifest"]) == ["--manifest"]


def test_compiled_code_of_one_path_is_not_the_other_s() -> None:
    """Inductor keeps code by what is compiled, not by what Triton compiles it for."""
    told = gpu_paths.variables("sm80")
    assert told["TRITON_OVERRIDE_ARCH"] == "sm80" and "sm80" in told["TORCHINDUCTOR_CACHE_DIR"]
    assert gpu_paths.variables(None) == {}
