"""What tox.ini needs and tox 4 has not: environments that share a folder, and none at all.

tox loads this file by itself; `runner = ...` in tox.ini picks one of the classes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from tox.plugin import impl
from tox.tox_env.info import Info
from tox.tox_env.python.virtual_env.runner import VirtualEnvRunner
from tox.tox_env.register import ToxEnvRegister


class NamelessInfo(Info):
    """tox's notes on a virtual environment, less the name of the tox environment that made it."""

    @contextmanager
    def compare(
        self, value: Any, section: str, sub_section: str | None = None
    ) -> Iterator[tuple[bool, Any | None]]:
        if section == "ToxEnv":
            value = {**value, "name": "shared"}
        with super().compare(value, section, sub_section) as result:
            yield result


class SharedEnvironment(VirtualEnvRunner):
    """One virtual environment for all tox environments with this `env_dir` and these `deps`.

    tox 4 builds a folder anew whenever an environment of another name comes to it. Here the name
    does not count; a change of requirements or of Python still does.
    """

    _one_at_a_time: ClassVar[threading.Lock] = threading.Lock()
    _rebuilt: ClassVar[set[Path]] = set()

    @staticmethod
    def id() -> str:
        return "shared"

    @property
    def cache(self) -> Info:
        return NamelessInfo(self.env_dir)

    def setup(self) -> None:
        with self._one_at_a_time:  # `tox parallel` sets up in threads
            super().setup()

    def _clean(self, transitive: bool = False) -> None:
        if self.conf["recreate"] and self.env_dir in self._rebuilt:
            return  # `tox -r` means once, not once for each of the environments
        self._rebuilt.add(self.env_dir)
        super()._clean(transitive)


class CallersPython(VirtualEnvRunner):
    """No virtual environment on the path: `python` is the caller's, with all that it can import."""

    @staticmethod
    def id() -> str:
        return "caller"

    def prepend_env_var_path(self) -> list[Path]:
        return []


@impl
def tox_register_tox_env(register: ToxEnvRegister) -> None:
    register.add_run_env(SharedEnvironment)
    register.add_run_env(CallersPython)
