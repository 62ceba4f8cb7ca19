"""What is made of records, on the command line.

python -m reports COMMAND --help
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from .errors import ReportError

COMMANDS = {
    "render": ("page", "a page of a run"),
    "diff": ("difference", "what two runs found, compared"),
    "show": ("show", "everything that is known of one case"),
    "baseline": ("baseline", "what is kept to compare with: written, or checked against"),
    "vectors": ("vectors", "cases with inputs, exact results and budgets for kernels in any language"),
    "bench": ("bench", "average latency and peak memory beside a reference, on a GPU"),
}
"""By name: the module that does it, and what that is."""

WRONG_USE = 2
NOT_READ = 141
"""As a shell says of a process that SIGPIPE ends."""


class Command(Protocol):
    """What such a module has.

    Attributes:
        DESCRIPTION: for --help: what it does, reads and writes, and its exit statuses.
    """

    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def main(self, args: argparse.Namespace) -> int: ...


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status, 2 if it cannot use what it was given."""
    parser = argparse.ArgumentParser(prog="python -m reports", description="What is made of records.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules: dict[str, Command] = {}
    for name, (module, text) in COMMANDS.items():
        modules[name] = importlib.import_module(f"reports.{module}")
        one = commands.add_parser(
            name,
            help=text,
            description=modules[name].DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        modules[name].add_arguments(one)
    args = parser.parse_args(words)
    try:
        status = modules[args.command].main(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_READ
    except ReportError as error:
        print(f"python -m reports {args.command}: {error}", file=sys.stderr)
        return WRONG_USE


if __name__ == "__main__":
    sys.exit(main())
