"""What is kept to compare with: `python -m reports baseline update` writes it, `check` compares."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from . import kept
from .errors import ReportError
from .kept import Difference, Key

if TYPE_CHECKING:
    from .error_baseline import Target

DESCRIPTION = """\
Baselines: measurements that are committed, and what has changed against them.

  errors     of some 200 cases rms z and the largest use of the hard bound, by dtype and tensor, on each code
             path of this machine; one to three minutes a path on a GPU
  speed      the ratio to SDPA's FLASH on a grid of problems, forward and backward, on each code path of this
             machine; one to two minutes a run and path; needs a GPU, without which "all" leaves it out
  resources  shared memory, registers, spills and instructions of every shipped tile configuration, compiled
             offline for sm_80, 86, 89 and 90; no GPU is needed

A baseline is of one implementation, one kind of GPU, one version of PyTorch and of Triton, one code path; on
another there is none, and check says how one is made. update measures several times, and writes a band.

Exit status: 0 as the baselines have it, or better; 1 something is worse; 2 wrong use; 3 a baseline is
missing, or speed was asked for and cannot be measured here.
"""

HELD, WORSE, WRONG_USE, MISSING = range(4)

KINDS = ("errors", "speed", "resources")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("update", "check"))
    parser.add_argument("--kind", choices=(*KINDS, "all"), default="all", help="default: %(default)s")
    parser.add_argument(
        "--impl", metavar="SPEC", help="errors, speed: as the suite's --impl; default: triton"
    )
    parser.add_argument("--manifest", metavar="FILE", help="errors, speed: as the suite's --manifest")
    parser.add_argument(
        "--as", dest="like", metavar="NAME",
        help="errors, speed: check against the baseline of this implementation, say a variant against triton",
    )  # fmt: skip
    parser.add_argument(
        "--baseline-dir", metavar="FOLDER", type=Path, default=kept.FOLDER,
        help="where baselines are kept; default: reports/baselines of this checkout",
    )  # fmt: skip
    parser.add_argument("-n", dest="workers", metavar="N", default="auto", help="processes; default: auto")


def main(args: argparse.Namespace) -> int:
    if args.workers != "auto" and not (args.workers.isdecimal() and int(args.workers) > 0):
        raise ReportError(f"-n is {args.workers!r}; it may be auto or a whole number, at least 1")
    if args.baseline_dir.exists() and not args.baseline_dir.is_dir():
        raise ReportError(f"--baseline-dir is {args.baseline_dir}, a file; it must be a folder")
    if args.like and args.action == "update":
        raise ReportError("--as is given with update; it is for check")
    statuses = []
    if args.kind in ("speed", "all"):  # first, while nothing else of this command uses the GPU
        statuses += _speed(args)
    if args.kind in ("errors", "all"):
        statuses += _errors(args)
    if args.kind == "all":
        statuses.append(_resources_apart(args))
    elif args.kind == "resources":
        statuses.append(_resources(args))
    return next((status for status in (WORSE, WRONG_USE) if status in statuses), max(statuses))


def _errors(args: argparse.Namespace) -> list[int]:
    from . import error_baseline as errors

    _as_the_suite_does()

    def made(target: Target, key: Key) -> tuple[errors.Errors, str] | str:
        runs = errors.executed(target, range(errors.RUNS))
        if red := errors.red(runs):
            return red
        of = errors.baseline(key, runs)
        return of, f"of {len(of.cases)} cases"

    def compared(target: Target, path: Path) -> tuple[str, list[Difference]]:
        committed = kept.decode(path, errors.Errors, errors.VERSION)
        (found,) = errors.executed(target, [0])
        count = sum(bool(record.tensors) for record in found)
        return f"{count} of {len(committed.cases)} cases compared", errors.differences(committed, found)

    targets = errors.targets(args.impl, args.manifest, args.workers)
    return _on_each_path(args, [(target, errors.key_of(target)) for target in targets], made, compared)


def _speed(args: argparse.Namespace) -> list[int]:
    from . import speed_baseline as speed

    try:
        targets = [(target, speed.key_of(target)) for target in speed.targets(args.impl, args.manifest)]
    except speed.NotHereError as error:
        print(f"speed: {error}: not {'compared' if args.action == 'check' else 'written'}")
        return [] if args.kind == "all" else [MISSING]
    return _on_each_path(args, targets, speed.made, speed.compared)


def _on_each_path(
    args: argparse.Namespace,
    targets: Sequence[tuple[Target, Key]],
    made: Callable[[Target, Key], tuple[msgspec.Struct, str] | str],
    compared: Callable[[Target, Path], tuple[str, list[Difference]]],
) -> list[int]:
    """Statuses of what is measured on the code paths of this machine.

    Args:
        args: of the command line.
        targets: the paths, and what a baseline of each is of.
        made: measures a baseline; it, and of what; or why there is none.
        compared: measures, and compares with a file: how much was compared, and what differs.
    """
    statuses = []
    for target, key in targets:
        if args.action == "update":
            of = made(target, key)
            if isinstance(of, str):
                print(f"not written: {of}")
                statuses.append(WORSE)
            else:
                _write(args.baseline_dir / key.name, *of)
                statuses.append(HELD)
            continue
        if args.like:
            key = replace(key, implementation=args.like)
        path = args.baseline_dir / key.name
        if path.exists():
            statuses.append(_told(path, *compared(target, path)))
        else:
            statuses.append(_missing(path, key, args))
    return statuses


def _resources(args: argparse.Namespace) -> int:
    from . import resources

    key = resources.key()
    path = args.baseline_dir / key.name
    workers = (os.cpu_count() or 1) if args.workers == "auto" else int(args.workers)
    if args.action == "check" and not path.exists():
        return _missing(path, key, args)
    found = resources.measure(workers)
    limits = resources.limits(found)
    if args.action == "update":
        if any(limit.red for limit in limits):
            return _told(path, "not written", limits)
        resources.write(found, path)
        print(f"written: {path}, and a table beside it")
        return HELD
    committed = resources.read(path)
    return _told(
        path, f"{len(found.entries)} configurations", [*limits, *resources.differences(committed, found)]
    )


def _resources_apart(args: argparse.Namespace) -> int:
    """In a process of its own: where there is no GPU, Triton interprets in this one, and compiles nothing."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {name: os.environ[name] for name in ("TRITON_CACHE_DIR",) if name in os.environ}
    command = [sys.executable, "-m", "reports", "baseline", args.action, "--kind", "resources",
               "--baseline-dir", str(args.baseline_dir), "-n", args.workers]  # fmt: skip
    return subprocess.run(command, env=environment, check=False).returncode


def _as_the_suite_does() -> None:
    """Where there is no GPU, Triton interprets; it reads that when it is imported."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _write(path: Path, baseline: msgspec.Struct, of: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(kept.encode(baseline))
    print(f"written: {path}, {of}")


def _missing(path: Path, key: Key, args: argparse.Namespace) -> int:
    options = {"--impl": args.impl, "--manifest": args.manifest}
    if args.baseline_dir != kept.FOLDER:
        options["--baseline-dir"] = str(args.baseline_dir)
    given = {name: value for name, value in options.items() if value}
    if args.like:
        there = sorted(other.name for other in args.baseline_dir.glob(f"{key.kind}-*.json"))
        raise ReportError(
            f"--as is {args.like!r}, and there is no {path.name}; {args.baseline_dir} has"
            f" {', '.join(there) or 'none'}"
        )
    versions = f"torch {key.torch}, " if key.torch else ""
    where = f" on path {key.path}" if key.path else ""
    words = ["python -m reports baseline update --kind", key.kind, kept.command(given)]
    print(
        f"{key.kind}: no baseline of {key.implementation} on {key.device}{where} with {versions}triton"
        f" {key.triton}: nothing was compared. One is made by"
    )
    print(f"  {' '.join(filter(None, words))}")
    print(f"which writes {path}")
    return MISSING


def _told(path: Path, of: str, differs: Sequence[Difference]) -> int:
    red = [difference for difference in differs if difference.red]
    for difference in differs:
        print(f"  {'worse' if difference.red else 'other'}: {difference.what}")
    print(f"{path.name}: {of}, {len(red)} worse than the baseline" if red else f"{path.name}: {of}, as kept")
    return WORSE if red else HELD
