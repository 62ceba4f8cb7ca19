"""Every implementation that the suite knows by name, one after the other: `--impl all`.

Each is a pytest of its own, with the same arguments and with results of its own in FA_REPORT_DIR/<name>: what
one does to its process, or to a GPU, is not the next one's. At the end there is one table of all.

Exit status: the worst of all. An implementation about which nothing could be executed counts only if that is
so of all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from reports import capabilities
from reports.run import RUN
from reports.summary import RECORDS

from . import backends
from .gpu_paths import HELD, MISUSED, NOTHING_RAN, WORDS, CodePath, combine, run
from .session import ROOT, report_dir

OVERRIDE = "TRITON_OVERRIDE_ARCH"


def of_command_line(config: pytest.Config) -> int:
    """What `--impl all` does in the place of pytest: its status."""
    from conftest import ABOUT_IMPLEMENTATIONS

    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for a GPU must not start CUDA
    if config.option.manifest is not None:
        print("ERROR: --impl is 'all' and --manifest is given, which says what one claims", file=sys.stderr)
        return MISUSED
    files: list[str] = []
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        files = [os.path.relpath(ROOT / "tests" / name) for name in ABOUT_IMPLEMENTATIONS]
    try:
        return main([*config.invocation_params.args, *files], config.option.require_gpu)
    except KeyboardInterrupt:  # the pytest that ran got it too, and has printed its summary
        return MISUSED


def main(arguments: Sequence[str], require_gpu: bool = False) -> int:
    """Runs all of them and prints the table.

    Args:
        arguments: pytest's, with --impl all among them.
        require_gpu: whether nothing may run on the CPU.
    """
    reports = report_dir()
    reasons = {name: why_not(name, require_gpu) for name in backends.BUILT_IN}
    rows, statuses = [], []
    for name in (name for name, reason in reasons.items() if not reason):
        folder = reports / name
        for left in (RUN, RECORDS):  # by an earlier run: if this one dies it leaves none
            (folder / left).unlink(missing_ok=True)
        print(f"all: {name}, results in {folder}", flush=True)
        command = [sys.executable, "-m", "pytest", *with_implementation(arguments, name)]
        statuses.append(run(CodePath(name), command, reports, {}))
        rows.append(capabilities.row(name, folder, statuses[-1]))
    found = capabilities.Capabilities(
        rows=rows, not_runnable={name: reason for name, reason in reasons.items() if reason}
    )
    capabilities.show(found)
    print()
    for path in capabilities.write(found, reports):
        print(f"table: {min(str(path), os.path.relpath(path), key=len)}")
    status = combined(statuses)
    print(f"all: {WORDS[status]} ({status})")
    return status


def combined(statuses: Sequence[int]) -> int:
    """The worst of the statuses; that nothing was executed only if it is so of all."""
    if all(status == NOTHING_RAN for status in statuses):
        return NOTHING_RAN
    return combine(HELD if status == NOTHING_RAN else status for status in statuses)


def why_not(name: str, require_gpu: bool = False) -> str:
    """Why an implementation does not run here; empty if it does."""
    if os.environ.get(OVERRIDE) and name not in backends.TRITON:
        return f"not Triton, runs natively only, and {OVERRIDE} is set"
    return backends.available(name, require_gpu)


def with_implementation(arguments: Sequence[str], name: str) -> list[str]:
    """The arguments of one pytest: this implementation, and its own file where they name one for JUnit."""
    found, expected = [], ""
    for argument in arguments:
        if expected == "--impl" or argument.startswith("--impl="):
            pass
        elif expected:
            found.append(_of(argument, name))
        elif argument.startswith(JUNIT):
            option, equals, path = argument.partition("=")
            found.append(f"{option}={_of(path, name)}" if equals else option)
        elif argument != "--impl":
            found.append(argument)
        expected = argument if argument in ("--impl", *JUNIT) and not expected else ""
    return ["--impl", name, *found]


JUNIT = ("--junitxml", "--junit-xml")


def _of(path: str, name: str) -> str:
    """A file's path with the name of an implementation in it."""
    return str(Path(path).with_name(f"{Path(path).stem}-{name}{Path(path).suffix}"))
