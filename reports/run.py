"""What a run was: a small file beside its records, for whoever looks at several runs together."""

from __future__ import annotations

import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from .folder import Folder

RUN = "run.json"
"""The file."""

LAWS = Path("tests/test_laws.py")


class LawTest(msgspec.Struct, frozen=True):
    """What became of one test of the laws.

    Attributes:
        name: of the test.
        outcome: "passed", "failed" or "skipped".
        reason: why it was skipped.
    """

    name: str
    outcome: str
    reason: str = ""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run, but for its records.

    Attributes:
        implementation, manifest: what was under test; the manifest is empty if there is none.
        claims: of the implementation (`tests.implementations.Claims`).
        machine: the GPU, or the processor if nothing ran on one.
        interpreted: whether Triton's kernels were.
        torch, triton, python: versions.
        arguments: of pytest.
        ended: when, UTC.
        seconds: that it took.
        status, reason: how it ended.
        laws: the tests of the laws; they leave no records unless they fail.
    """

    implementation: str
    manifest: str = ""
    claims: dict[str, Any] = {}
    machine: str
    interpreted: bool = False
    torch: str
    triton: str
    python: str = ""
    arguments: list[str] = []
    ended: str = ""
    seconds: float = 0.0
    status: int
    reason: str = ""
    laws: list[LawTest] = []


def read(path: Path) -> Run | None:
    """The run of such a file; None if there is none that can be read: the run did not come to its end."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Run)
    except (OSError, msgspec.DecodeError):
        return None


class RunFile:
    """A pytest plugin of the main process: writes the file at the end of the run.

    Args:
        config: pytest's.
        folder: of the run.
    """

    def __init__(self, config: pytest.Config, folder: Folder) -> None:
        self.config, self.folder = config, folder
        self.laws: dict[str, LawTest] = {}
        self.began = time.time()

    @pytest.hookimpl(trylast=True)  # the folder can be written
    def pytest_sessionstart(self) -> None:
        if not self.config.option.collectonly:
            (self.folder.path / RUN).unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, name = report.nodeid.partition("::")
        if Path(file) != LAWS:
            return
        if report.when == "call" or not report.passed:
            reason = ""
            if report.skipped and isinstance(report.longrepr, tuple):
                reason = report.longrepr[2].removeprefix("Skipped: ")
            self.laws[name] = LawTest(name, report.outcome, reason)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # all others have decided how it ended
    def pytest_sessionfinish(self, session: pytest.Session) -> Any:
        result = yield
        if not self.config.option.collectonly:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            path = self.folder.path / RUN
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self.run(session))) + b"\n")
        return result

    def run(self, session: pytest.Session) -> Run:
        """What the run was, once it is decided how it ended."""
        import torch
        import triton

        from conftest import SESSION
        from tests.session import interpreted

        under_test = self.config.stash[SESSION].implementation
        summary = self.config.pluginmanager.get_plugin("attention-summary")
        on_gpu = torch.cuda.is_available() and not interpreted() and "cuda" in under_test.claims.devices
        return Run(
            implementation=under_test.name,
            manifest=under_test.manifest,
            claims=msgspec.to_builtins(under_test.claims),
            machine=torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU",
            interpreted=interpreted(),
            torch=str(torch.__version__),
            triton=triton.__version__,
            python=platform.python_version(),
            arguments=list(self.config.invocation_params.args),
            ended=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(time.time() - self.began, 1),
            status=int(session.exitstatus),
            reason=getattr(summary, "reason", ""),
            laws=list(self.laws.values()),
        )
