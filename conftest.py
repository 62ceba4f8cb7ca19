"""Options and fixtures of the suite. Everything else is in tests/."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).parent
SEED = "FA_SEED"
OWN = "triton"
WRONG_USE, NOTHING_EXECUTED = 2, 3  # of the exit statuses in tests/session.py, which imports torch

IMPL = "implementation under test: triton (default), module:callable or path/file.py:callable"
CASE = "run only this case (may be given several times)"
PROFILE = "how much is generated: dev (default), ci, nightly, thorough"
EXAMPLES = "generate N comparisons, whatever the profile says"
REQUIRE_GPU = "fail unless everything runs on a GPU of compute capability 8.0 or newer"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attention")
    group.addoption("--impl", default=OWN, metavar="SPEC", help=IMPL)
    group.addoption("--case", action="append", default=[], metavar="ID", help=CASE)
    group.addoption("--profile", default="dev", metavar="NAME", help=PROFILE)
    group.addoption("--examples", default=None, metavar="N", help=EXAMPLES)
    group.addoption("--require-gpu", action="store_true", help=REQUIRE_GPU)


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for a GPU must not start CUDA
    given = getattr(config, "workerinput", None)
    worker = given is not None
    import torch

    if not worker and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
        for library in ("OMP", "OPENBLAS", "MKL"):  # workers share the cores; they inherit this
            os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    # each worker's compiler would start processes of its own, and wait for them at the end
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    gpu = torch.cuda.is_available()
    if config.option.require_gpu and not worker:
        _require_gpu(gpu)
    if not gpu and "TRITON_INTERPRET" not in os.environ and not _compiles_only(config):
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported; workers inherit it
    _guard_against_a_package_named_kernels()

    from reports.folder import Folder
    from reports.summary import PART, Summary
    from tests import session, strategies
    from tests.implementations import ImplementationError

    options = config.option
    if options.profile not in strategies.PROFILES:
        _wrong_use(f"--profile is {options.profile!r}; it may be {', '.join(strategies.PROFILES)}")
    if options.examples is not None:
        if not options.examples.isdecimal() or int(options.examples) < 1:
            _wrong_use(f"--examples is {options.examples!r}; it must be a whole number, at least 1")
        options.examples = int(options.examples)
    try:
        asked = {case.id: case for case in map(session.case_to_replay, options.case)}
    except ValueError as error:
        _wrong_use(f"--case: {error}")
    profile = strategies.PROFILES[options.profile]
    if not os.environ.get(SEED):
        os.environ[SEED] = str(random.randrange(2**31) if profile.random else 0)
    try:
        int(os.environ[SEED])
    except ValueError:
        _wrong_use(f"{SEED} is {os.environ[SEED]!r}; it must be a whole number")
    if not (gpu or session.interpreted() or _compiles_only(config)) and options.impl == OWN:
        pytest.exit(
            f"TRITON_INTERPRET is {os.environ['TRITON_INTERPRET']!r}, and torch {torch.__version__} finds no"
            " usable GPU: nothing can be executed. Without that variable Triton's interpreter would run it",
            NOTHING_EXECUTED,
        )
    if session.interpreted():
        from tests.interpreter import patch_once_per_launch

        patch_once_per_launch()
    folder = Folder(session.report_dir())
    part = folder.part("main") if given is None else Path(given[PART])
    config.stash[SESSION] = session.Session(options.impl, part)
    try:
        claims = config.stash[SESSION].implementation.claims  # before any worker: one message, one status
    except ImplementationError as error:
        _wrong_use(str(error))
    narrowed = {name: claims.narrowed(case) for name, case in asked.items()}
    options.case = list({case.id: case for case in narrowed.values()}.values())
    if not worker:
        from reports.figures import Figures

        less = {name: case.id for name, case in narrowed.items() if name != case.id}
        config.pluginmanager.register(Figures(), "attention-figures")
        config.pluginmanager.register(Summary(config, folder, less), "attention-summary")


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    """Wrong use that pytest finds once it has read its command line has the suite's status for it."""
    try:
        return (yield)
    except pytest.UsageError as error:
        for message in error.args:
            print(f"ERROR: {message}\n", file=sys.stderr)
        return WRONG_USE


ABOUT_IMPLEMENTATIONS = ("test_references.py", "test_laws.py")
"""Tests of whatever is under test; the others are about our own kernels, and about the suite."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --case only the replay runs; with --impl only what is about the implementation; corpus first."""

    def runs(item: pytest.Item) -> bool:
        if item.name.startswith("test_replay[") or config.option.case:
            return item.name.startswith("test_replay[") and bool(config.option.case)
        return config.option.impl == OWN or item.path.name in ABOUT_IMPLEMENTATIONS

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = sorted(filter(runs, items), key=lambda item: not item.name.startswith("test_corpus["))


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """A comparison that was not claimed, or that could show nothing, is not counted as passed."""
    status = dict(getattr(report, "user_properties", ())).get("comparison")
    if report.when == "call" and report.passed and status in ("not claimed", "no power"):
        return str(status), "-", str(status).upper()
    return None


SESSION: pytest.StashKey = pytest.StashKey()


@pytest.fixture(scope="session")
def session(request: pytest.FixtureRequest):
    """The run: implementation under test, device, records."""
    return request.config.stash[SESSION]


def _compiles_only(config: pytest.Config) -> bool:
    """Whether only the offline compilation was asked for, which needs Triton's compiler."""
    return bool(config.args) and all("test_compile" in str(arg) for arg in config.args)


def _require_gpu(gpu: bool) -> None:
    import torch

    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        pytest.exit("--require-gpu was given, and TRITON_INTERPRET is set", NOTHING_EXECUTED)
    if not gpu:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        pytest.exit(
            f"--require-gpu was given, and torch {torch.__version__} ({built}) finds no usable GPU",
            NOTHING_EXECUTED,
        )
    oldest = min(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    if oldest < (8, 0):
        pytest.exit(
            f"--require-gpu was given, and a GPU has compute capability {oldest[0]}.{oldest[1]}, not 8.0",
            NOTHING_EXECUTED,
        )


def _guard_against_a_package_named_kernels() -> None:
    import kernels

    found = Path(kernels.__file__ or "").resolve()
    if ROOT.resolve() not in found.parents:
        pytest.exit(
            f"`import kernels` found {found}, not the folder in {ROOT}: run pytest from there, without"
            " --import-mode=importlib, or uninstall the package of that name",
            WRONG_USE,
        )


def _wrong_use(message: str) -> NoReturn:
    pytest.exit(message, WRONG_USE)
