"""Options and fixtures of the suite. Everything else is in tests/."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
SEED = "FA_SEED"
OWN = "triton"

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
    worker = hasattr(config, "workerinput")
    import torch

    if not worker and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
        for library in ("OMP", "OPENBLAS", "MKL"):  # workers share the cores; they inherit this
            os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    gpu = torch.cuda.is_available()
    if config.option.require_gpu and not worker:
        _require_gpu(gpu)
    if not gpu and "TRITON_INTERPRET" not in os.environ and not _compiles_only(config):
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported; workers inherit it
    _guard_against_a_package_named_kernels()

    from tests import session, strategies
    from tests.cases import parse_case
    from tests.implementations import ImplementationError

    options = config.option
    if options.profile not in strategies.PROFILES:
        _wrong_use(f"--profile is {options.profile!r}; it may be {', '.join(strategies.PROFILES)}")
    if options.examples is not None:
        if not options.examples.isdecimal() or int(options.examples) < 1:
            _wrong_use(f"--examples is {options.examples!r}; it must be a whole number, at least 1")
        options.examples = int(options.examples)
    try:
        options.case = [parse_case(text) for text in options.case]
    except ValueError as error:
        _wrong_use(f"--case: {error}")
    profile = strategies.PROFILES[options.profile]
    os.environ.setdefault(SEED, str(random.randrange(2**31) if profile.random else 0))
    if session.interpreted():
        from tests.interpreter import patch_once_per_launch

        patch_once_per_launch()
    name = config.workerinput["workerid"] if worker else "main"  # type: ignore[attr-defined]
    config.stash[SESSION] = session.Session(options.impl, name)
    try:
        _ = config.stash[SESSION].implementation  # before any worker starts: one message, one status
    except ImplementationError as error:
        _wrong_use(str(error))
    if not worker:
        from reports.figures import Figures
        from reports.summary import Summary

        config.pluginmanager.register(Figures(), "attention-figures")
        config.pluginmanager.register(Summary(config, session.report_dir()), "attention-summary")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --case only the replay runs; with --impl only what is about the implementation; corpus first."""

    def runs(item: pytest.Item) -> bool:
        if item.name.startswith("test_replay[") or config.option.case:
            return item.name.startswith("test_replay[") and bool(config.option.case)
        return config.option.impl == OWN or item.path.name == "test_references.py"

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
        pytest.exit("--require-gpu was given, and TRITON_INTERPRET is set", 3)
    if not gpu:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        pytest.exit(
            f"--require-gpu was given, and torch {torch.__version__} ({built}) finds no usable GPU", 3
        )
    oldest = min(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    if oldest < (8, 0):
        pytest.exit(
            f"--require-gpu was given, and a GPU has compute capability {oldest[0]}.{oldest[1]}, not 8.0", 3
        )


def _guard_against_a_package_named_kernels() -> None:
    import kernels

    found = Path(kernels.__file__ or "").resolve()
    if ROOT.resolve() not in found.parents:
        pytest.exit(
            f"`import kernels` found {found}, not the folder in {ROOT}: run pytest from there, without"
            " --import-mode=importlib, or uninstall the package of that name",
            2,
        )


def _wrong_use(message: str) -> None:
    pytest.exit(message, 2)
