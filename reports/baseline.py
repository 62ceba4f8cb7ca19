"""What is kept to compare with: `python -m reports baseline update` writes it, `check` compares."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from . import kept
from .errors import ReportError
from .kept import Difference, Key

DESCRIPTION = """\
Baselines: measurements that are committed, and what has changed against them.

  errors     of some 200 cases rms z and the largest use of the hard bound, by dtype and tensor, on each code
             path of this machine; one to three minutes a path on a GPU
  resources  shared memory, registers, spills and instructions of every shipped tile configuration, compiled
             offline for sm_80, 86, 89 and 90; no GPU is needed

A baseline is of one implementation, one kind of GPU, one version of PyTorch and of Triton, one code path; on
another there is none, and check says how one is made. update measures several times, and writes a band.

Exit status: 0 as the baselines have it, or better; 1 something is worse; 2 wrong use; 3 a baseline is
missing.
"""

HELD, WORSE, WRONG_USE, MISSING = range(4)

KINDS = ("errors", "resources")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("update", "check"))
    parser.add_argument("--kind", choices=(*KINDS, "all"), default="all", help="default: %(default)s")
    parser.add_argument("--impl", metavar="SPEC", help="errors: as the suite's --impl; default: triton")
    parser.add_argument("--manifest", metavar="FILE", help="errors: as the suite's --manifest")
    parser.add_argument(
        "--as", dest="like", metavar="NAME",
        help="errors: check against the baseline of this implementation, say a variant against triton",
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
    statuses = []
    for target in errors.targets(args.impl, args.manifest, args.workers):
        key = errors.key_of(target)
        if args.action == "update":
            runs = errors.executed(target, range(errors.RUNS))
            if red := errors.red(runs):
                print(f"not written: {red}")
                statuses.append(WORSE)
                continue
            made = errors.baseline(key, runs)
            _write(args.baseline_dir / key.name, made, f"of {len(made.cases)} cases")
            statuses.append(HELD)
            continue
        if args.like:
            key = replace(key, implementation=args.like)
        path = args.baseline_dir / key.name
        if not path.exists():
            statuses.append(_missing(path, key, args))
            continue
        committed = kept.decode(path, errors.Errors, errors.VERSION)
        (found,) = errors.executed(target, [0])
        differs = errors.differences(committed, found)
        compared = sum(bool(record.tensors) for record in found)
        statuses.append(_told(path, f"{compared} of {len(committed.cases)} cases compared", differs))
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
