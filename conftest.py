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
OWN, ALL = "triton", "all"
WRONG_USE, NOTHING_EXECUTED = 2, 3  # of the exit statuses in tests/session.py, which imports torch

IMPL = (
    "implementation under test: triton (default), module:callable, path/file.py:callable, pytorch, flex,"
    " sdpa-flash, sdpa-efficient, sdpa-cudnn, sdpa-math, flash-attn, flash-attn-4, xformers, emulation; all"
)
MANIFEST = "what the implementation claims: a TOML file, which may name it too (README.md)"
CASE = "run only this case (may be given several times)"
PROFILE = "how much is generated: dev (default), ci, nightly, thorough"
EXAMPLES = "generate N comparisons, whatever the profile says"
HANG_AFTER = "seconds without a result after which a call of the implementation hangs (default: 300)"
KNOWN_FAILURES = "what is known to fail, and why: a TOML file (README.md)"
ACCEPT = "add what is red to that file; a person has to write the reasons"
REQUIRE_GPU = "fail unless everything runs on a GPU of compute capability 8.0 or newer"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.register(_All(), "attention-all")
    group = parser.getgroup("attention")
    group.addoption("--impl", default=None, metavar="SPEC", help=IMPL)
    group.addoption("--manifest", default=None, metavar="FILE", help=MANIFEST)
    group.addoption("--case", action="append", default=[], metavar="ID", help=CASE)
    group.addoption("--profile", default="dev", metavar="NAME", help=PROFILE)
    group.addoption("--examples", default=None, metavar="N", help=EXAMPLES)
    group.addoption("--hang-after", default=None, metavar="SECONDS", help=HANG_AFTER)
    group.addoption("--known-failures", default=None, metavar="FILE", help=KNOWN_FAILURES)
    group.addoption("--accept", action="store_true", help=ACCEPT)
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
    if given is not None:
        _take_gpu(given)
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
    from tests import isolation, session, strategies
    from tests.implementations import ImplementationError

    options = config.option
    if options.impl is None and options.manifest is None:
        options.impl = OWN
    if options.profile not in strategies.PROFILES:
        _wrong_use(f"--profile is {options.profile!r}; it may be {', '.join(strategies.PROFILES)}")
    if options.examples is not None:
        options.examples = _count("--examples", options.examples)
    options.hang_after = _count("--hang-after", options.hang_after or str(isolation.HANG_AFTER))
    known = _known_failures(options)
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
    config.stash[SESSION] = session.Session(options.impl, part, options.manifest, known)
    try:
        claims = config.stash[SESSION].implementation.claims  # before any worker: one message, one status
    except ImplementationError as error:
        _wrong_use(str(error))
    if not claims.dtypes:
        pytest.exit(config.stash[SESSION].implementation.not_here, NOTHING_EXECUTED)
    if "cpu" not in claims.devices and (not gpu or session.interpreted()):
        pytest.exit(
            f"{config.stash[SESSION].implementation.name} claims to run on a GPU only, and"
            f" {'Triton interprets here' if gpu else 'there is none that can be used'}",
            NOTHING_EXECUTED,
        )
    narrowed = {name: claims.narrowed(case) for name, case in asked.items()}
    options.case = list({case.id: case for case in narrowed.values()}.values())
    if not worker:
        from reports.figures import Figures
        from reports.run import RunFile
        from reports.written import PageFile

        less = {name: case.id for name, case in narrowed.items() if name != case.id}
        config.pluginmanager.register(Figures(), "attention-figures")
        run, summary = RunFile(config, folder), Summary(config, folder, less, known)
        config.pluginmanager.register(PageFile(config, folder, summary, run), "attention-page")
        config.pluginmanager.register(run, "attention-run")
        config.pluginmanager.register(summary, "attention-summary")
        config.pluginmanager.register(isolation.Isolation(config, folder, known), "attention-isolation")
    if worker or not _has_workers(config):
        from reports.junit import Properties

        limit = float(config.getini("faulthandler_timeout") or 0)
        seconds = None if options.usepdb or options.trace else options.hang_after
        config.stash[SESSION].journal = isolation.Journal(
            part, seconds, worker, limit, bool(config.getini("faulthandler_exit_on_timeout"))
        )
        stop = None if given is None else Path(given[isolation.STOP])
        config.pluginmanager.register(isolation.Runner(config.stash[SESSION], stop), "attention-runner")
        config.pluginmanager.register(Properties(config.stash[SESSION].written), "attention-properties")


class _All:
    """With `--impl all` this process runs no test, but a pytest for each implementation."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> int | None:
        if config.option.impl != ALL or config.option.help:
            return None
        from tests.all_implementations import of_command_line

        return of_command_line(config)


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    """An implementation that is not ours gets a worker. Wrong use that pytest finds once it has read its
    command line has the suite's status for it."""
    _isolate(config)
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
        about = item.path.parent == ROOT / "tests" and item.path.name in ABOUT_IMPLEMENTATIONS
        return config.option.impl == OWN or about

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = sorted(filter(runs, items), key=lambda item: not item.name.startswith("test_corpus["))


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """A comparison that was not claimed, or that could show nothing, is not counted as passed."""
    status = dict(getattr(report, "user_properties", ())).get("comparison")
    from reports.junit import NOT_PASSED

    if report.when == "call" and not report.failed and status in NOT_PASSED:
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


def _has_workers(config: pytest.Config) -> bool:
    """Whether tests run in workers of pytest-xdist and not in this process."""
    option = config.option
    asked = getattr(option, "dist", "no") != "no" and bool(getattr(option, "tx", ()))
    return asked and not option.collectonly


def _isolate(config: pytest.Config) -> None:
    """One worker for an implementation that is not ours, unless the caller says otherwise; and as many
    restarts as it takes: after how many deaths a run ends is `MOST_CRASHES` in tests/isolation.py."""
    option = config.option
    if hasattr(config, "workerinput") or not hasattr(option, "numprocesses"):
        return
    own = option.impl in (None, OWN) and option.manifest is None
    if option.numprocesses is None and not (own or option.usepdb or option.trace or option.tx):
        option.numprocesses = 1
    if option.maxworkerrestart is None:
        option.maxworkerrestart = "1000"


def _take_gpu(given: dict[str, Any]) -> None:
    """Lets a worker begin with another GPU than the others, of those that the caller allows."""
    import torch

    from tests.gpu_paths import SLOT, turned

    name = "CUDA_VISIBLE_DEVICES"
    if (visible := turned(os.environ.get(name), torch.cuda.device_count, given[SLOT])) is not None:
        os.environ[name] = visible


def _count(option: str, given: str) -> int:
    if not given.isdecimal() or int(given) < 1:
        _wrong_use(f"{option} is {given!r}; it must be a whole number, at least 1")
    return int(given)


def _known_failures(option: Any) -> Any:
    from tests import known_failures

    if option.known_failures is None:
        if option.accept:
            _wrong_use("--accept is given without --known-failures; it must say into which file")
        return known_failures.KnownFailures()
    path = Path(option.known_failures)
    if option.accept and not path.exists():
        return known_failures.KnownFailures()
    try:
        return known_failures.read(path, complete=not option.accept)
    except known_failures.KnownFailuresError as error:
        _wrong_use(f"--known-failures: {error}")


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
