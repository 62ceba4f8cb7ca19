"""What an implementation under test may do to its process, and how a run tells of it and goes on.

A kernel that reads where nothing is ends its process, one that waits for itself never ends, and after an
illegal access no call to the GPU succeeds any more. Tests run in workers of pytest-xdist; before an
implementation is called, its worker writes down which case is under way. When a worker dies, the main process
reads that, records the case as broken, says so in the test's report, and another worker runs the rest.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest
import torch

from reports import records
from reports.folder import Folder
from reports.records import Record, Verdict

from .comparison import FRAMES, SUITE, account, explain
from .gpu_paths import SLOT
from .known_failures import KnownFailures

HANG_AFTER = 300
"""Seconds without a result after which a case hangs, unless the caller says otherwise. What is right may be
slow: it compiles and tunes at first, and three runs of a long case through an interpreter take minutes.
pytest's own limit for a whole test is twice that."""

MOST_CRASHES = 20
"""Crashes and hangs after which a run stops. Each costs a new process, which imports torch and collects all
tests: at some five seconds an implementation that dies in every case is given up after two minutes."""

CRASH, HANG, UNUSABLE = "does not crash", "does not hang", "leaves the GPU usable"
"""The rules that a worker's death breaks."""

STOP = "attention_stop"
"""In what pytest-xdist hands a worker: the file that ends the run."""

GIVEN_UP = 70
"""Exit status of a worker that ends since its GPU is of no use."""


class GpuLost(BaseException):
    """No call to the GPU succeeds any more, by the fault of a case.

    Not an Exception: Hypothesis would look for smaller cases, in a process in which every case fails.
    """

    def __init__(self, record: Record) -> None:
        super().__init__(record.reason)
        self.record = record


class Journal:
    """What an implementation has under way in this process, on disk while it lasts.

    Args:
        part: the file of this process's records; the journal is beside it.
        hang_after: seconds that a call may take; None: any.
        isolated: whether this process is a worker, of whose death another tells.
        test_limit: pytest's own seconds for a test, or 0: there is one clock, which a call takes from it.
        ends: whether the process ends then.
    """

    def __init__(
        self,
        part: Path,
        hang_after: float | None,
        isolated: bool,
        test_limit: float = 0,
        ends: bool = False,
    ) -> None:
        self.path = running(part)
        self.hang_after, self.isolated = hang_after, isolated
        self.test_limit, self.ends = test_limit, ends
        self.said: IO[bytes] | int
        if isolated:
            stacks(part).parent.mkdir(parents=True, exist_ok=True)
            self.said = stacks(part).open("wb")
        else:
            self.said = os.dup(2)  # stderr is still itself when pytest reads its options, not during a test
        self.listening = False

    @contextmanager
    def running(self, record: Record, device: torch.device) -> Iterator[None]:
        """Around a call of the implementation, and around nothing else.

        Args:
            record: of what is known before.
            device: where it runs.

        Raises:
            GpuLost: if the device is of no use afterwards and this process is not isolated; else it ends.
        """
        if self.isolated and not self.listening:
            faulthandler.enable(file=self.said)
            self.listening = True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(records.encode(record))
        if self.hang_after is not None:
            faulthandler.dump_traceback_later(self.hang_after, exit=True, file=self.said)
        try:
            try:
                yield
            except (Exception, SystemExit) as error:
                self._require_usable(device, record, error)
                raise
            self._require_usable(device, record)
        finally:
            if self.hang_after is not None:
                faulthandler.cancel_dump_traceback_later()
                if self.test_limit > 0:
                    faulthandler.dump_traceback_later(self.test_limit, exit=self.ends, file=self.said)
            self.path.unlink(missing_ok=True)

    def _require_usable(
        self, device: torch.device, record: Record, error: BaseException | None = None
    ) -> None:
        trouble = _trouble(device)
        if trouble is None:
            return
        told = f"{type(trouble).__name__}: {trouble}".splitlines()[0]
        raised = "" if error is None else account(error)
        note = raised if told in raised else f"{told}\nraised {raised}" if raised else told
        record = broken(record, UNUSABLE, "left the GPU unusable", note)
        if self.isolated:
            self.path.write_bytes(records.encode(record))
            os._exit(GIVEN_UP)  # before pytest reports anything: the main process does, once
        raise GpuLost(record)


def running(part: Path) -> Path:
    """The journal beside the records of a process: a case while it is under way, else nothing."""
    return part.with_suffix(".running")


def stacks(part: Path) -> Path:
    """Where a worker that dies leaves its stacks, beside its records."""
    return part.with_suffix(".stacks")


def broken(record: Record, rule: str, what: str, note: str) -> Record:
    """A record of a call that came to no result.

    Args:
        record: of what was known before, its reason where in the suite it was.
        rule: that is broken.
        what: became of it, for `Record.reason`.
        note: the rest.
    """
    where = f", {record.reason}" if record.reason else ""
    first, *rest = note.splitlines()
    verdict = Verdict("out", "contract", rule, False, note="\n".join([first + where, *rest]))
    return msgspec.structs.replace(record, status="broken", reason=what + where, verdicts=[verdict])


def _trouble(device: torch.device) -> RuntimeError | None:
    """Why nothing can be computed on a device any more, if it is so."""
    if device.type != "cuda":
        return None
    found: RuntimeError | None = None
    for _ in range(2):  # what is only told late, and does not stay, is told once
        try:
            torch.cuda.synchronize(device)
            return None
        except RuntimeError as error:
            found = error
    return found


# ---------------------------------------------------------------- in the process that runs tests


class Runner:
    """A pytest plugin of a process that runs tests: when they end early.

    Args:
        session: of tests.session.
        stop: a file that says why the run ends, once it does.
    """

    def __init__(self, session: Any, stop: Path | None) -> None:
        self.session, self.stop = session, stop

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if self.stop is None or not self.stop.exists():
            return None
        item.session.shouldstop = self.stop.read_text()
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        try:
            return (yield)
        except GpuLost as lost:
            record = self.session.known.settled(lost.record)
            self.session.write(record)
            self.session.lost = True
            item.session.shouldstop = f"the GPU cannot be used after case {record.case}; -n 1 runs the rest"
            text = f"{record.reason}\n\n{explain(record)}"
        pytest.fail(text, pytrace=False)


# ---------------------------------------------------------------- in the main process


@dataclass(frozen=True)
class Death:
    """How a worker ended.

    Attributes:
        ended: in words.
        said: the stacks that Python left.
        record: of the case that was under way, if one was.
    """

    ended: str
    said: str
    record: Record | None


class Isolation:
    """A pytest plugin of the main process: gives workers their places, and tells how they died.

    Args:
        config: pytest's.
        folder: where the workers write.
        known: failures that are expected.
    """

    def __init__(self, config: pytest.Config, folder: Folder, known: KnownFailures) -> None:
        self.config, self.folder, self.known = config, folder, known
        self.slots: dict[str, int] = {}
        self.deaths = 0
        self.died: dict[str, Death] = {}
        self.collected: Sequence[str] = ()
        self.ran: set[str] = set()
        self.stopped = ""

    def pytest_report_header(self) -> str:
        if self.config.pluginmanager.hasplugin("dsession"):
            return (
                "attention: a crash or a hang (no result after"
                f" {self.config.option.hang_after} s) is red on its case; the rest runs"
            )
        if not hasattr(self.config.option, "numprocesses"):
            return "attention: a crash or a hang ends the run: nothing is isolated without pytest-xdist"
        return "attention: a crash or a hang ends the run: nothing is isolated without -n 1 or more"

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Gives a worker its place; one that replaces another has that one's."""
        free = next(slot for slot in range(len(self.slots) + 1) if slot not in self.slots.values())
        self.slots[node.workerinput["workerid"]] = node.workerinput[SLOT] = free
        node.workerinput[STOP] = str(self._stop)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.collected = ids

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Records what a worker had under way when it died, and counts."""
        name = node.gateway.id
        self.slots.pop(name, None)
        if error is None or error == "keyboard-interrupt":
            return
        part = self.folder.part(name)
        said = stacks(part).read_text(errors="replace") if stacks(part).exists() else ""
        death = self.died[name] = self._death(part, ending(node), said)
        if death.record is None or death.record.status == "broken":
            self.deaths += 1
        if self.deaths >= MOST_CRASHES:
            self._give_up()

    def _death(self, part: Path, ended: str, said: str) -> Death:
        journal = running(part)
        try:
            (record,) = records.read(journal)
        except (records.RecordError, ValueError):
            return Death(ended, said, None)
        if record.status != "broken":
            hung = said.startswith("Timeout (")
            what = f"no result after {self.config.option.hang_after} s" if hung else ended
            note = "\n".join([what, *frames(said)])
            record = broken(record, HANG if hung else CRASH, "hung" if hung else f"crashed: {ended}", note)
        record = self.known.settled(record)
        records.append(self.folder.part("main"), record)
        journal.unlink()
        return Death(ended, said, record)

    @property
    def _stop(self) -> Path:
        return self.folder.own / "stop"

    def _give_up(self) -> None:
        """Ends the run: no new worker, and those that live stop after their test."""
        self.stopped = f"stopped after {self.deaths} crashes and hangs"
        self._stop.write_text(self.stopped)
        xdist = self.config.pluginmanager.getplugin("dsession")
        xdist.shouldstop = self.stopped
        if hasattr(xdist, "_max_worker_restart"):  # else each that dies is replaced once more
            xdist._max_worker_restart = MOST_CRASHES - 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: Any) -> None:
        """Tells in the report of a test which case ended its worker, and how."""
        # a worker that ends as if the user had interrupted it is no death
        death = self.died.get(report.node.gateway.id, Death("it ended as if it were interrupted", "", None))
        record = death.record
        report.location = (report.location[0], None, crashitem.rpartition("::")[2])
        if record is None:
            report.longrepr += f"\n\noutside of the implementation: {death.ended}\n{death.said}"
        elif record.status == "broken":
            report.longrepr = f"{record.reason}\n\n{explain(record)}"
        else:
            report.outcome, report.longrepr, report.when = "passed", None, "call"
            report.user_properties = [*report.user_properties, ("comparison", record.status)]

    def pytest_sessionfinish(self) -> None:
        """Removes what only this plugin reads, before the folder is given up.

        A worker that the user interrupts leaves its case too.
        """
        for pattern in ("*.running", "*.stacks", "stop"):
            for left in self.folder.own.glob(pattern):
                left.unlink()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.stopped:
            return
        terminalreporter.section("attention: stopped")
        terminalreporter.write_line(self.stopped, red=True)
        left = [node for node in self.collected if node not in self.ran]
        tests = Counter(node.partition("[")[0].rpartition("::")[2] for node in left)
        each = ", ".join(f"{name} ({n})" for name, n in tests.items())
        terminalreporter.write_line(f"not run: {len(left)} of {len(self.collected)} tests: {each}", red=True)


def ending(node: Any) -> str:
    """How the process of a worker of pytest-xdist ended."""
    process: Any = getattr(getattr(node.gateway, "_io", None), "popen", None)
    try:
        status = process.wait(timeout=10)
    except (AttributeError, subprocess.TimeoutExpired):
        return "its process is lost"
    if status >= 0:
        return f"ended its process with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    memory = ", as the system does when memory runs out" if -status == signal.SIGKILL else ""
    return f"its process was killed by {name}{memory}"


CALLERS = (str(Path(__file__).with_name("comparison.py")), str(Path(__file__).with_name("laws") / "trial.py"))
"""What calls an implementation."""


def frames(said: str) -> list[str]:
    """The innermost lines of an implementation's stack, from what Python says when it dies."""
    died: list[str] = []
    called: list[str] = []
    for thread in re.split(r"^(?=Thread 0x|Current thread 0x)", said, flags=re.MULTILINE):
        lines = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', thread, re.MULTILINE)
        own = next((i for i, (file, _, _) in enumerate(lines) if file in CALLERS), None)
        inner = [line for line in lines[:own] if line[0] not in SUITE]
        shown = [f"  at {min(file, os.path.relpath(file), key=len)}:{line} {name}"
                 for file, line, name in reversed(inner[:FRAMES])]  # fmt: skip
        if thread.startswith("Current thread"):  # there is one if a signal ended the process
            died = shown
        if own is not None:
            called = shown
    return died or called
