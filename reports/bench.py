"""Two ways to compute attention beside each other, in seconds: `python -m reports bench`."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from . import timings
from .errors import ReportError
from .timings import CONVENTION, MEASURES, PASSES, Contest, Curve, Speed

if TYPE_CHECKING:
    from tests.speed.bench import Bench, OnProblem
    from tests.speed.problems import Problem

MODES = {
    "custom": "triton",
    "sdpa": "sdpa",
    "naive": "sdpa-math",
    "flash": "sdpa-flash",
    "efficient": "sdpa-efficient",
    "cudnn": "sdpa-cudnn",
    "flex": "flex",
    "flash-attn": "flash-attn",
    "flash-attn-4": "flash-attn-4",
    "xformers": "xformers",
}
"""Short names of contenders."""

NAMES = (*dict.fromkeys((*MODES, *MODES.values(), "pytorch")),)
"""All that may be given, but for a user's own."""

OWN_SPECS = ("module:callable", "path/file.py:callable")

DTYPES = ("float16", "bfloat16", "float32")

DESCRIPTION = f"""\
Average latency and peak memory of one way to compute attention beside another, on the GPU that is there.

Both are timed in turns in one process, then judged: a wrong result has no figure. What can be claimed of
the ratio of their times is said of pairs of rounds.

  eager   time {MEASURES["eager"]}
  device  time {MEASURES["device"]}
  peak    bytes of device memory beyond inputs and results, at the peak of a call

MODE and REF may be
  custom         triton: this project's own kernels
  sdpa           PyTorch's scaled_dot_product_attention, with the backend that it chooses
  naive          sdpa-math: all scores are stored
  flash, efficient, cudnn    sdpa-flash, sdpa-efficient, sdpa-cudnn: with that backend
  flex, flash-attn, flash-attn-4, xformers, pytorch    as the suite's --impl
  {" or ".join(OWN_SPECS)}    your own, as the suite's --impl; its gradients, and dtypes
                 other than float16 and float32, are timed if a manifest claims them

Exit status: 0 measured, whatever the ratio; 1 one of them has no figure: its result is wrong, it raised, or
does not take the problem; 2 wrong use; 3 no GPU that can be used (nothing is timed through Triton's
interpreter).
"""

MEASURED, WITHOUT_FIGURE, WRONG_USE, NO_GPU = range(4)

COUNTS = ("batch", "heads", "kv_heads", "length", "dim")

FORWARD, _, BOTH = PASSES
EAGER, DEVICE = "eager", "device"

MISSING = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", default="custom", help="what is timed; default: %(default)s")
    parser.add_argument(
        "--ref", action="append", metavar="REF",
        help="what it is compared with; may be given several times; default: sdpa",
    )  # fmt: skip
    parser.add_argument("--manifest", metavar="FILE", help="what a --mode of your own claims; as the suite's")
    parser.add_argument("--batch", metavar="B", default="1", help="default: %(default)s")
    parser.add_argument("--heads", metavar="H", default="8", help="query heads; default: %(default)s")
    parser.add_argument("--kv-heads", metavar="H", help="default: as many as query heads")
    parser.add_argument("--length", metavar="T", default="1024", help="default: %(default)s")
    parser.add_argument("--dim", metavar="D", default="64", help="of a head; default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="float16", help="default: %(default)s")
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", help="with a causal mask, the default")
    mask.add_argument("--full", action="store_true", help="without a mask")
    parser.add_argument("--rounds", metavar="N", default="15", help="pairs of times; default: %(default)s")
    parser.add_argument("--backward", action="store_true", help="time forward + backward too")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write what was measured (reports/timings.py: Speed)"
    )


def main(args: argparse.Namespace) -> int:
    began = time.perf_counter()
    refs = args.ref or ["sdpa"]
    specs = _specs(args, refs)
    counts, rounds = _counts(args)
    if args.json and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        raise ReportError(f"--json is {args.json}; it must be a file in a folder that exists")

    from tests.speed.machine import why_not_here

    if why := why_not_here():
        print(f"python -m reports bench: {why}", file=sys.stderr)
        return NO_GPU

    import torch

    from tests.speed.problems import Problem

    batch, heads, kv_heads, length, dim = counts
    problem = Problem(batch, heads, kv_heads, length, dim, not args.full, args.dtype)
    bench = _bench(args, specs)
    labels = {bench.subject.name: args.mode}
    labels |= {spec: word for word, spec in specs.items() if word in refs}
    try:
        with bench.on(problem, list(labels)) as those:
            parts = [
                _part(those, step, rounds) for step in ((FORWARD, BOTH) if args.backward else (FORWARD,))
            ]
    except torch.OutOfMemoryError:
        print(f"python -m reports bench: not enough memory for {problem.title}", file=sys.stderr)
        return WITHOUT_FIGURE
    found = speed(bench, args, problem, parts, time.perf_counter() - began)
    print(report(found, problem.title, parts, labels))
    if args.json:
        try:
            timings.write(found, args.json)
        except OSError as error:
            raise ReportError(f"--json is {args.json}: {error.strerror}") from None
    return status(parts)


# ---------------------------------------------------------------- what was asked for


def spec(option: str, word: str) -> str:
    """The contender of a word of the command line.

    Raises:
        ReportError: if it can be none.
    """
    if word in MODES:
        return MODES[word]
    if word in NAMES or ":" in word:
        return word
    raise ReportError(f"{option} is {word!r}; it may be {', '.join((*NAMES, *OWN_SPECS))}")


def _specs(args: argparse.Namespace, refs: Sequence[str]) -> dict[str, str]:
    """Contenders by the words that were given, the mode first."""
    found = {args.mode: spec("--mode", args.mode)}
    for word in refs:
        one = spec("--ref", word)
        if one in found.values():
            raise ReportError(f"--ref is {word!r}, and that is named already; it may be anything else")
        found[word] = one
    if args.manifest and ":" not in args.mode:
        raise ReportError(
            f"--manifest is {args.manifest!r}, and --mode is {args.mode!r}, which has its own claims; it may"
            f" be {' or '.join(OWN_SPECS)}"
        )
    return found


def _counts(args: argparse.Namespace) -> tuple[list[int], int]:
    from tests.speed.pairs import FEWEST

    if args.kv_heads is None:
        args.kv_heads = args.heads
    counts = [_count(f"--{name.replace('_', '-')}", getattr(args, name)) for name in COUNTS]
    rounds = _count("--rounds", args.rounds, FEWEST)
    heads, kv_heads = counts[1:3]
    if heads % kv_heads:
        raise ReportError(f"--kv-heads is {kv_heads}; it may be a divisor of --heads, which is {heads}")
    return counts, rounds


def _count(option: str, word: str, least: int = 1) -> int:
    if not (word.isascii() and word.isdecimal() and int(word) >= least):
        raise ReportError(f"{option} is {word!r}; it may be a whole number, at least {least}")
    return int(word)


def _bench(args: argparse.Namespace, specs: Mapping[str, str]) -> Bench:
    from tests.implementations import ImplementationError
    from tests.speed.bench import Bench
    from tests.speed.contenders import AbsentError, contender

    mode, *refs = specs
    for word in refs:  # beforehand: in a bench nobody would know which of them it was
        try:
            contender(specs[word])
        except AbsentError as error:
            raise ReportError(f"--ref is {word!r}, which {error}") from None
        except ImplementationError as error:
            raise ReportError(str(error).replace("--impl is", "--ref is", 1)) from None
    try:
        return Bench(specs[mode], [specs[word] for word in refs], args.manifest)
    except AbsentError as error:
        raise ReportError(f"--mode is {mode!r}, which {error}") from None
    except ImplementationError as error:
        raise ReportError(str(error).replace("--impl is", "--mode is", 1)) from None


# ---------------------------------------------------------------- what is measured


@dataclass(frozen=True)
class Part:
    """What was measured of a step.

    Attributes:
        eager, device: contests of these measures; whoever is absent from one has its reason there.
        peaks: bytes, by contender; None if there is no figure.
    """

    eager: Contest
    device: Contest
    peaks: Mapping[str, int | None]

    def absent(self, name: str) -> str:
        """Why a contender has no figure; empty if it has all."""
        return self.eager.entries[name].absent or self.device.entries[name].absent


def _part(those: OnProblem, step: str, rounds: int) -> Part:
    import torch

    from tests.speed.memory import peak

    eager, device = (those.contest(step, measure, rounds) for measure in (EAGER, DEVICE))
    part = Part(eager, device, {})
    peaks: dict[str, int | None] = {}
    for name, calls in those.calls.items():
        peaks[name] = None
        if isinstance(calls, str) or part.absent(name):
            continue
        try:
            with calls.of.chosen():
                peaks[name] = peak(calls.step(step), (*calls.x.leaves, calls.x.d_out))
        except torch.OutOfMemoryError:
            continue
    return Part(eager, device, peaks)


def status(parts: Sequence[Part]) -> int:
    """Of the command: whether everybody has figures."""
    absent = any(part.absent(name) for part in parts for name in part.device.entries)
    return WITHOUT_FIGURE if absent else MEASURED


def speed(
    bench: Bench, args: argparse.Namespace, problem: Problem, parts: Sequence[Part], seconds: float
) -> Speed:
    """What `reports.speed` can show."""
    from tests.speed.machine import described

    # a curve is of one head dimension, causal, float16
    as_a_curve = problem.causal and problem.dtype == "float16" and problem.heads_q == problem.heads_kv
    return msgspec.structs.replace(
        described(bench.subject.name, bench.subject.path, _words(args), seconds),
        contests=[contest for part in parts for contest in (part.eager, part.device)],
        curves=_curves(problem, parts) if as_a_curve else [],
    )


def _curves(problem: Problem, parts: Sequence[Part]) -> list[Curve]:
    """Peaks, each a curve of one T."""
    return [
        Curve(contender=name, step=part.device.step, heads=problem.batch * problem.heads_q, dim=problem.dim,
              lengths=[problem.length], peak=[peak],
              seconds=[statistics.median(part.device.entries[name].seconds)], exponent=None)
        for part in parts for name, peak in part.peaks.items() if peak is not None
    ]  # fmt: skip


def _words(args: argparse.Namespace) -> list[str]:
    """The options, whether they were given or not."""
    words = ["bench", "--mode", args.mode]
    for ref in args.ref or ["sdpa"]:
        words += ["--ref", ref]
    if args.manifest:
        words += ["--manifest", args.manifest]
    for name in (*COUNTS, "dtype", "rounds"):
        words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    return [*words, "--full" if args.full else "--causal", *(["--backward"] if args.backward else [])]


# ---------------------------------------------------------------- what is told


def report(found: Speed, title: str, parts: Sequence[Part], labels: Mapping[str, str]) -> str:
    """All that is printed.

    Args:
        found: the run.
        title: of the problem.
        parts: of its steps.
        labels: what contenders were called on the command line, the subject first.
    """
    lines = [title]
    for part in parts:
        lines += ["", part.device.step, "", aligned(rows(part, labels)), "", *claims(part, labels)]
    versions = {"torch": found.torch, "Triton": found.triton, "cuDNN": found.cudnn, "driver": found.driver}
    machine = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    lines += ["", *(f"{name}: time {MEASURES[name]}" for name in (EAGER, DEVICE))]
    lines += ["peak: of device memory, beyond inputs and results", CONVENTION]
    lines += ["", f"{found.device}, {found.path}; {machine}"]
    if found.others_busy:
        lines.append(f"not alone: {found.others_busy}")
    return "\n".join(lines)


def rows(part: Part, labels: Mapping[str, str]) -> list[list[str]]:
    """Of the table of a step: words, the head first."""
    made = [["mode", "eager ms", "device ms", "peak MiB", "TFLOP/s of device"]]
    for name, label in labels.items():
        if part.absent(name):
            made.append([_called(name, label), *(MISSING,) * 4])
            continue
        eager = [1e3 * t for t in part.eager.entries[name].seconds]
        device = statistics.median(part.device.entries[name].seconds)
        peak = part.peaks.get(name)
        made.append([
            _called(name, label),
            f"{statistics.fmean(eager):.4f} ± {statistics.stdev(eager):.4f}",
            f"{1e3 * device:.4f}",
            MISSING if peak is None else f"{peak / 2**20:.3f}",
            f"{part.device.flops / device / 1e12:.1f}",
        ])  # fmt: skip
    return made


def _called(name: str, label: str) -> str:
    return label if name == label else f"{label} ({name})"


def claims(part: Part, labels: Mapping[str, str]) -> list[str]:
    """Why somebody has no figure, and what can be claimed of the ratios."""
    lines = [f"{label}: {part.absent(name)}" for name, label in labels.items() if part.absent(name)]
    subject, *others = labels
    if not part.absent(subject):
        for other in others:
            if not part.absent(other):
                lines += [f"{labels[other]} / {labels[subject]}, {contest.measure}: "
                          f"{claim(contest, subject, other, labels[subject])}"
                          for contest in (part.eager, part.device)]  # fmt: skip
    return lines


def claim(contest: Contest, subject: str, other: str, label: str) -> str:
    """The ratio of another's time to the subject's, and its verdict."""
    from tests.speed.pairs import CANNOT_TELL, FASTER, SAME, SLOWER, is_quiet, ratio, verdict

    ours = contest.entries[subject].seconds
    found, control = ratio(ours, contest.entries[other].seconds), ratio(ours, contest.control)
    said = {
        FASTER: f"{label} is faster",
        SLOWER: f"{label} is slower",
        SAME: "the same",
        CANNOT_TELL: "cannot tell" if is_quiet(control) else "cannot tell, the machine is not quiet",
    }
    return f"{found}: {said[verdict(found, control)]}"


def aligned(rows: Sequence[Sequence[str]], labels: int = 1) -> str:
    """Rows as lines. Words of the first `labels` columns begin below one another, those of others end so."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            word.ljust(width) if i < labels else word.rjust(width)
            for i, (word, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
