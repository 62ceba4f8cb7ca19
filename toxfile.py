"""What tox.ini needs and tox 4 has not: environments that share a folder, and none at all; arguments
for one tool only.

tox loads this file by itself; `runner = ...` in tox.ini picks one of the classes, `{own_posargs}` is what
follows `--` if no other environment was asked for.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tox.config.sets import EnvConfigSet
from tox.plugin import impl
from tox.session.state import State
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


@dataclass(frozen=True)
class Words:
    """Arguments as they stand in a command. A str or a list of them would become one argument."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)


@impl
def tox_register_tox_env(register: ToxEnvRegister) -> None:
    register.add_run_env(SharedEnvironment)
    register.add_run_env(CallersPython)


@impl
def tox_add_env_config(env_conf: EnvConfigSet, state: State) -> None:
    """In a run of several environments what follows `--` is pytest's; ruff does not know its options."""
    asked = getattr(state.conf.options, "env", None)
    alone = asked is not None and len(list(asked)) == 1
    given = state.conf.pos_args(env_conf["change_dir"]) if alone else None
    env_conf.add_constant("own_posargs", "what follows -- if nothing else runs", Words(given or ()))
