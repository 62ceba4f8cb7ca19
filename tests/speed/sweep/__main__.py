"""Times tiles of the kernels on a GPU, beside registers, shared memory and occupancy.

    python -m tests.speed.sweep [--kernel forward,dkdv,dq] [--dims 64,128,256] [--dtype float16]
        [--lengths 2048] [--out FOLDER] [-n WORKERS] [--seconds 400] [--quick]

Exit status: 0 tiles were timed; 1 none could be; 2 wrong use; 3 there is no GPU, or Triton interprets.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from reports.tile_sweep import FILE, PAGE, PLOT
from reports.tiles import WRONG

from ...gpu_paths import ROOT
from ...offline import DIMS, TILED
from ..machine import why_not_here
from ..problems import TOKENS
from .run import Options, Sweep

TIMED, NOTHING_TIMED, WRONG_USE, NOT_HERE = range(4)

DTYPES = ("float16", "bfloat16")


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status."""
    options = Options(**vars(parser().parse_args(arguments)))
    if why := why_not_here():
        print(why, file=sys.stderr)
        return NOT_HERE
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"--out is {str(options.out)!r}: nothing can be written there ({error.strerror})"
        print(why, file=sys.stderr)
        return WRONG_USE
    found = Sweep(options, arguments).run()
    for name in (FILE, PAGE, PLOT):
        if (options.out / name).exists():
            print(options.out / name)
    for of in found.entries:
        if of.status == WRONG:
            print(f"WRONG: {of.kernel} {of.dim} {of.name}: {of.reason}", file=sys.stderr)
    return TIMED if any(of.seconds for of in found.entries) else NOTHING_TIMED


def parser() -> argparse.ArgumentParser:
    """Of the command line: the fields of `Options`."""
    found = argparse.ArgumentParser(
        prog="python -m tests.speed.sweep", allow_abbrev=False, description=(__doc__ or "").split("\n")[0]
    )
    add = found.add_argument
    add("--kernel", type=_names(TILED), default=TILED, metavar="NAMES",
        help=f"of {', '.join(TILED)} (default: all)")  # fmt: skip
    add("--dims", type=_dims, default=(64, 128, 256), metavar="DIMS",
        help=f"head dimensions, of {', '.join(map(str, DIMS))} (default: 64,128,256)")  # fmt: skip
    add("--dtype", type=_dtype, default="float16", metavar="DTYPE",
        help=f"{' or '.join(DTYPES)} (default: float16)")  # fmt: skip
    add("--lengths", type=_lengths, default=(2048,), metavar="LENGTHS",
        help=f"T, of {TOKENS} tokens each (default: 2048)")  # fmt: skip
    add("--out", type=Path, default=Path(os.environ.get("FA_REPORT_DIR") or ROOT / "reports" / "out"),
        metavar="FOLDER", help="for the results (default: FA_REPORT_DIR, or reports/out)")  # fmt: skip
    add("-n", "--workers", type=_workers, default=len(os.sched_getaffinity(0)), metavar="N",
        help="processes that compile (default: one a core)")  # fmt: skip
    add("--seconds", type=_seconds, default=400.0, metavar="SECONDS",
        help="no round begins later (default: 400)")  # fmt: skip
    add("--quick", action="store_true", help="a few tiles")
    return found


def _refused(text: str, allowed: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"is {text!r}; it may be {allowed}")


def _split(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.split(",")))


def _names(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        if not set(_split(text)) <= set(allowed):
            raise _refused(text, f"some of {', '.join(allowed)}, separated by commas")
        return _split(text)

    return parse


def _dims(text: str) -> tuple[int, ...]:
    return tuple(map(int, _names([str(dim) for dim in DIMS])(text)))


def _dtype(text: str) -> str:
    if text not in DTYPES:
        raise _refused(text, " or ".join(DTYPES))
    return text


def _lengths(text: str) -> tuple[int, ...]:
    if not all(word.isdecimal() and 1 <= int(word) <= TOKENS for word in _split(text)):
        raise _refused(text, f"numbers from 1 to {TOKENS}, separated by commas")
    return tuple(map(int, _split(text)))


def _workers(text: str) -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise _refused(text, "a number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise _refused(text, "a number greater than 0")
    return seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
