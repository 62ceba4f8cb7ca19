"""Tasks in processes that may die, hang, or lose the GPU."""

from __future__ import annotations

import math
import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

LONGEST_LINE = 200
"""Characters of what somebody said that are kept."""

TO_END = 10.0
"""Seconds that a process may take to end."""


@dataclass(frozen=True)
class Failure:
    """Instead of an answer.

    Attributes:
        reason: what was raised, or became of the process.
        of: what made the process useless (`ContextLostError`); None if it is as good as before, or ended.
    """

    reason: str
    of: Any = None


class ContextLostError(Exception):
    """The GPU does nothing more for this process.

    Args:
        reason: what the GPU said.
        of: the tile that did it.
    """

    def __init__(self, reason: str, of: Any) -> None:
        super().__init__(reason)
        self.reason, self.of = reason, of


def in_a_line(error: BaseException) -> str:
    """An exception in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:LONGEST_LINE] if lines else ''}"


def answers(
    function: Callable[[Any], Any], tasks: deque[Any], workers: int, until: float, seconds: float
) -> Iterator[tuple[Any, Any]]:
    """Does tasks in processes: (task, what the function returns), or a `Failure`, as they are done.

    Args:
        function: of a module, so that another process finds it.
        tasks: in order; those that are taken are removed, and more may be added meanwhile.
        workers: processes at most.
        until: when it ends (`time.monotonic`): what is not done by then is lost.
        seconds: that a task may take.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes: list[_Process] = []
        started = 0
        try:
            while True:
                idle = [one for one in processes if not one.busy]
                while tasks and (idle or len(processes) < workers):
                    if not idle:
                        started += 1
                        processes.append(_Process(function, Path(folder) / f"{started}.log"))
                        idle = processes[-1:]
                    idle.pop(0).give(tasks.popleft(), seconds)
                busy = [one for one in processes if one.busy]
                now = time.monotonic()
                if not busy or now >= until:
                    return
                wait = max(min(until, *(one.deadline for one in busy)) - now, 0)
                ready = connection.wait([one.connection for one in busy], wait)
                for one in busy:
                    if one.connection in ready:
                        answer = one.answer()
                    elif time.monotonic() >= one.deadline:
                        answer = one.given_up(f"not done after {seconds:.0f} s")
                    else:
                        continue
                    if one.useless:
                        one.end()
                        processes.remove(one)
                    yield one.task, answer
        finally:
            for one in processes:
                one.end()


class _Process:
    """One that does a task at a time.

    Args:
        function: does it.
        log: a file for what compilers print.

    Attributes:
        task: the last one; `busy` while it is not done.
        deadline: when it must be done (`time.monotonic`).
        useless: whether the process can do no other.
    """

    def __init__(self, function: Callable[[Any], Any], log: Path) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA and LLVM have threads: no fork
        self.connection, theirs = context.Pipe()
        self._log = log
        self._process = context.Process(target=_serve, args=(theirs, function, str(log)), daemon=True)
        self._process.start()
        theirs.close()
        self.task: Any = None
        self.busy = self.useless = False
        self.deadline = math.inf

    def give(self, task: Any, seconds: float) -> None:
        self.task, self.busy, self.deadline = task, True, time.monotonic() + seconds
        with suppress(OSError):  # it is dead: its answer will say so
            self.connection.send(task)

    def answer(self) -> Any:
        """Waits for it: what the function returned, or a `Failure`."""
        try:
            found = self.connection.recv()
        except (EOFError, OSError):
            return self.given_up(self._epitaph())
        self.busy = False
        self.useless = isinstance(found, Failure) and found.of is not None
        return found

    def given_up(self, reason: str) -> Failure:
        """Instead of an answer, which never comes."""
        self.useless = True
        return Failure(reason)

    def _epitaph(self) -> str:
        """How it ended, and its last words."""
        self._process.join(TO_END)
        code = self._process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"status {code}"
        with suppress(OSError):
            said = self._log.read_text(errors="replace").strip().splitlines()
            if said:
                return f"its process ended with {how}: {said[-1][:LONGEST_LINE]}"
        return f"its process ended with {how}"

    def end(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.join(TO_END)


def _serve(of: connection.Connection, function: Callable[[Any], Any], log: str) -> None:
    """Answers until nobody asks. What compilers print goes into the log."""
    with open(log, "wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    while True:
        try:
            task = of.recv()
        except (EOFError, OSError):
            return
        try:
            answer = function(task)
        except ContextLostError as error:
            of.send(Failure(error.reason, error.of))
            os._exit(1)  # an orderly end would wait for a GPU that is gone
        except Exception as error:  # of Triton, LLVM, ptxas, CUDA: each has its own kinds
            answer = Failure(in_a_line(error))
        of.send(answer)
