"""The page of a run, and what the run came to, written at its end into its folder."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from .errors import ReportError
from .folder import Folder
from .outcomes import PREVIOUS, REPORT, Report, read, report
from .page import PAGE, render
from .run import RunFile
from .summary import Summary


class PageFile:
    """A pytest plugin of the main process. Its trouble is told and changes no status: a page decides nothing.

    Args:
        folder: of the run.
        summary, run: plugins that have the records, and what the run was.
    """

    def __init__(self, config: pytest.Config, folder: Folder, summary: Summary, run: RunFile) -> None:
        self.config, self.folder, self.summary, self.run = config, folder, summary, run
        self.trouble: list[str] = []
        self.written = False

    @pytest.hookimpl(trylast=True)  # the folder can be written
    def pytest_sessionstart(self) -> None:
        """What an earlier run came to is what this one is compared with; its page is not this run's."""
        if self.config.option.collectonly:
            return
        with suppress(FileNotFoundError):
            (self.folder.path / REPORT).replace(self.folder.path / PREVIOUS)
        (self.folder.path / PAGE).unlink(missing_ok=True)

    @pytest.hookimpl(wrapper=True, trylast=True)  # the records are read, and nothing is printed yet
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        result = yield
        if self.summary.found and not self.config.option.collectonly:
            try:
                self._write(self._files(session))
            except Exception as error:  # whatever it is, the run's own result stands
                self.trouble.append(f"{type(error).__name__}: {error}")
        return result

    def _files(self, session: pytest.Session) -> Mapping[str, bytes]:
        run = self.run.run(session)
        found = self.summary.found
        return {
            REPORT: msgspec.json.encode(report(found, run)) + b"\n",
            PAGE: render(found, run, self._earlier()).encode(),
        }

    def _earlier(self) -> Report | None:
        path = self.folder.path / PREVIOUS
        if not path.exists():
            return None
        try:
            return read(path)
        except ReportError as error:
            self.trouble.append(f"{error}; nothing is compared with it")
            return None

    def _write(self, files: Mapping[str, bytes]) -> None:
        self.folder.end(files, ())
        self.written = True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.written:
            path = str(self.folder.path / PAGE)
            terminalreporter.write_line(f"page: {min(path, os.path.relpath(path), key=len)}")
        for trouble in self.trouble:
            terminalreporter.write_line(f"page: {trouble}", yellow=True)
