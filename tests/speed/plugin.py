"""The pytest side of `tox -e bench`: options, fixtures, what is written and printed at the end.

It stands in the place of the suite's conftest.py (`--noconftest -p tests.speed.plugin`): here nothing is a
comparison, and nothing may run in several processes.
"""

from __future__ import annotations

import importlib.util
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reports.timings import SPEED, Contest, Curve, FirstCall, Gate, HostTime, Noise, Speed

OWN = "triton"
ROUNDS = 15
HELD, BROKE, WRONG_USE, NOTHING_EXECUTED = range(4)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # before its own options, which are given too, are refused as unknown
    if pluginmanager.is_blocked("benchmark") or not importlib.util.find_spec("pytest_benchmark"):
        raise pytest.UsageError("pytest-benchmark is not installed, or switched off: nothing is timed")
    group = parser.getgroup("speed")
    group.addoption("--impl", default=None, metavar="SPEC", help="what others are compared with (triton)")
    group.addoption("--manifest", default=None, metavar="FILE", help="what it claims (README.md)")
    group.addoption(
        "--contenders", default=None, metavar="NAMES",
        help="others, with commas between them (default: all that are installed); the gates need sdpa-math",
    )  # fmt: skip
    group.addoption("--rounds", default=str(ROUNDS), metavar="N", help="of a contest (default: %(default)s)")
    group.addoption("--asked", default=None, metavar="WORDS", help="of the command line, for the report")
    # `python -m tests.speed` takes --strict, which to pytest is something else
    group.addoption("--strict-verdicts", action="store_true", help="what cannot be told is red too")


@dataclass
class Found:
    """What the tests of a run have measured."""

    contests: list[Contest] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)
    noise: Noise | None = None
    curves: list[Curve] = field(default_factory=list)
    first_calls: list[FirstCall] = field(default_factory=list)
    host_times: list[HostTime] = field(default_factory=list)
    ceilings: tuple[float, float] = (0.0, 0.0)

    def __bool__(self) -> bool:
        """Whether anything was."""
        return self != Found()


FOUND: pytest.StashKey[Found] = pytest.StashKey()
BENCH: pytest.StashKey[Any] = pytest.StashKey()
BEGAN: pytest.StashKey[float] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    rounds = config.option.rounds
    from .pairs import FEWEST

    if not rounds.isdecimal() or int(rounds) < FEWEST:
        pytest.exit(f"--rounds is {rounds!r}; it must be a whole number, at least {FEWEST}", WRONG_USE)
    config.stash[FOUND] = Found()
    config.stash[BEGAN] = time.time()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Once it is known that something is to be run: what is under test, and who is there."""
    config = session.config
    if config.option.collectonly or not session.items:
        return
    from ..implementations import ImplementationError
    from .bench import Bench
    from .contenders import DEFAULT, OTHERS, AbsentError

    names = OTHERS
    if config.option.contenders is not None:
        names = tuple(filter(None, (name.strip() for name in config.option.contenders.split(","))))
        if unknown := [name for name in names if name not in (*OTHERS, DEFAULT, OWN)]:
            pytest.exit(
                f"--contenders has {', '.join(map(repr, unknown))}; it may have {', '.join(OTHERS)}",
                WRONG_USE,
            )
    spec = config.option.impl or (None if config.option.manifest else OWN)
    try:
        config.stash[BENCH] = Bench(spec, names, config.option.manifest)
    except ImplementationError as error:
        pytest.exit(str(error), WRONG_USE)
    except AbsentError as error:
        pytest.exit(f"--impl is {spec!r}: {error}", NOTHING_EXECUTED)


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest) -> Any:
    """The contenders that are here (`bench.Bench`)."""
    return request.config.stash[BENCH]


@pytest.fixture(scope="session")
def found(request: pytest.FixtureRequest) -> Found:
    """What this run has measured so far."""
    return request.config.stash[FOUND]


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    """Of a contest."""
    return int(request.config.option.rounds)


@pytest.fixture(scope="session")
def strict(request: pytest.FixtureRequest) -> bool:
    """Whether what cannot be told is red."""
    return bool(request.config.option.strict_verdicts)


# ---------------------------------------------------------------- the end


def speed_of(config: pytest.Config) -> Speed:
    """What the run was and found."""
    from .machine import described

    found = vars(config.stash[FOUND]).copy()
    matmul, copy = found.pop("ceilings")
    subject, asked = config.stash[BENCH].subject, config.option.asked
    arguments = list(map(str, config.invocation_params.args)) if asked is None else shlex.split(asked)
    of_run = described(subject.name, subject.path, arguments, time.time() - config.stash[BEGAN])
    return msgspec.structs.replace(of_run, **found, matmul=matmul, copy=copy)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = config.stash[FOUND]
    if BENCH not in config.stash or not found:
        return
    import os

    from reports import speed as shown
    from reports import timings

    folder = Path(os.environ.get("FA_REPORT_DIR") or config.rootpath / "reports" / "out")
    folder.mkdir(parents=True, exist_ok=True)
    of_run = speed_of(config)
    timings.write(of_run, folder / SPEED)
    written = shown.write(of_run, folder)
    terminalreporter.section("speed", sep="=")
    terminalreporter.write_line(shown.markdown(of_run))
    terminalreporter.write_line("written: " + ", ".join(map(str, [folder / SPEED, *written])))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run in which nothing was measured is not green."""
    measured = bool(session.config.stash[FOUND])
    if exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly and not measured:
        session.exitstatus = NOTHING_EXECUTED
