"""The baseline of speed: how fast an implementation is beside FLASH, so that what costs speed is red.

Kept is the ratio of FLASH's time to the implementation's on each problem of a grid, forward and backward
(`tests.speed.ratios`): above 1 it is faster. Times themselves follow the clocks of the day; the two of a
ratio were measured in turns, within milliseconds.

What remains differs from process to process rather than within one: where tensors lie in memory, which clocks
power and temperature allow, and which of the two these slow more. No interval over the rounds of one run
knows of that. So a baseline is made of several runs, each a process, and the band of an entry is as wide as
its noise (`_allowed`), which shows in two ways: how far apart the runs are, and how far from 1 the ratio of
the implementation to itself is in each of them (A/A, the control of a contest).

A check compares some 60 ratios, and none may be red by chance. What looks worse is measured again in a fresh
process, and red only if it is worse there too.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from . import error_baseline, kept, timings
from .error_baseline import Target
from .errors import ReportError
from .kept import Difference, Key
from .timings import SPEED, Contest, Speed

KIND = "speed"
VERSION = 1

REFERENCE = "sdpa-flash"
"""What the ratios are to."""

RUNS = 3
"""That a band is made of. Each is a process, and takes a minute or two. Few runs may agree by chance: an
entry that varies by 3 % among quiet ones is falsely red in one check of 170, with 5 runs in one of 1200."""

FEWEST = 2
"""Runs with a figure that an entry needs."""

LEAST = 0.03
"""The least drop that can be red. From one process to the next a ratio changes by about 1 % (`LEAST` of
`tests.speed.pairs`); three standard deviations of that are beyond what a check of 60 entries sees twice."""

WIDE = 3
"""How many times its noise an entry may drop. Of three runs the largest deviation from their median is about
one standard deviation."""

MARGIN = 2
"""How many times its noise a drop has to be beyond the band to be found in both runs of a check."""

SLOWER = 0.1
"""A kernel that takes so much longer is to be found: `Ratios.coarse` lists where that is not sure."""

FINEST = 1e-8
"""Seconds: nearer times differ by their rounding."""

NOT_HERE = 3
"""The status of a run where speed cannot be measured."""

LONGEST = 1800
"""Seconds after which a run is ended."""

UNCLAIMED = "not claimed"


class NotHereError(ReportError):
    """Why speed cannot be measured on this machine, or of this implementation."""


class Entry(msgspec.Struct, frozen=True):
    """A problem and a step.

    Attributes:
        ratio: of FLASH's time to the subject's: of each run the median over its rounds, of these the median.
        spread: the largest relative deviation of a run from that.
        control: the largest |ratio - 1| of the subject to itself in a run.
        allowed: the relative drop of the ratio that may still be noise.
        ms: median milliseconds of the subject, for a reader: they are not compared.
    """

    ratio: float
    spread: float
    control: float
    allowed: float
    ms: float


class Ratios(msgspec.Struct, frozen=True, kw_only=True):
    """A baseline.

    Attributes:
        version: of the format.
        implementation, device, torch, triton, path: as of `kept.Key`.
        runs: how many it is made of.
        reference: what the ratios are to.
        noise: the median of the entries' spread.
        entries: by problem and step, "b1_h8x8_s1024_d64_float16_causal forward".
        left_out: by problem and step, why there is no ratio.
        coarse: entries with so much noise that a kernel that takes `SLOWER` longer may not be found there.
    """

    version: int = VERSION
    implementation: str
    device: str
    torch: str
    triton: str
    path: str
    runs: int
    reference: str = REFERENCE
    noise: float
    entries: dict[str, Entry]
    left_out: dict[str, str] = {}
    coarse: list[str] = []

    @property
    def key(self) -> Key:
        return Key(KIND, self.implementation, self.device, self.torch, self.triton, self.path)


# ---------------------------------------------------------------- measuring


def targets(spec: str | None, manifest: str | None) -> list[Target]:
    """One for each code path of this machine that the implementation has.

    Raises:
        NotHereError: if there is no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise NotHereError("needs a GPU")
    return error_baseline.targets(spec, manifest, "1")


def key_of(target: Target) -> Key:
    """What would be measured of a target here: a process says it, since this one must not start CUDA.

    Raises:
        NotHereError: if speed cannot be measured here.
        ReportError: if there is no such implementation.
    """
    found = executed(target, [])
    return Key(KIND, found.implementation, found.device, found.torch, found.triton, found.path)


def executed(target: Target, problems: Sequence[str] | None = None) -> Speed:
    """One run, in a process of its own, which prints a line a problem. If it ended early: what it has.

    Args:
        target: what is measured.
        problems: ids; None: the grid.

    Raises:
        NotHereError: if speed cannot be measured here.
        ReportError: if nothing was measured; says how the process ended.
    """
    from tests.gpu_paths import variables

    environment = {**os.environ, **variables(target.override)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / SPEED
        command = [sys.executable, "-m", "tests.speed.ratios", "--out", str(path), *target.options]
        if problems is not None:
            command += ["--problems", *problems]
        sys.stdout.flush()
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        with process:
            try:
                said = process.communicate(timeout=LONGEST)[1]
                ended = f"ended with {process.returncode}" if process.returncode else ""
            except BaseException as error:
                process.kill()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                said, ended = process.communicate()[1], f"was ended after {LONGEST} s"
        lines = said.strip().splitlines() or [""]
        if process.returncode == NOT_HERE:
            raise NotHereError(lines[-1])
        found = timings.read(path) if path.is_file() else None
    if found is None or (problems != [] and not found.contests):
        last = "\n".join(lines[-15:])
        raise ReportError(f"no speed was measured; tests.speed.ratios {ended or 'wrote nothing'}:\n{last}")
    if ended:
        print(f"tests.speed.ratios {ended}, and left {len(found.contests)} contests: {lines[-1]}")
    return found


def made(target: Target, key: Key) -> tuple[Ratios, str] | str:
    """A baseline, and of what; or why there is none."""
    runs = [executed(target) for _ in range(RUNS)]
    if told := red(runs):
        return told
    found = baseline(key, runs)
    of = f"of {len(found.entries)} ratios, {len(found.left_out)} left out; a kernel that takes {SLOWER:.0%}"
    missed = f"longer is found on all but {len(found.coarse)} of them" if found.coarse else "longer is found"
    busy = next((run.others_busy for run in runs if run.others_busy), "")
    return found, f"{of} {missed}" + f"; {busy}" * bool(busy)


def compared(target: Target, path: Path) -> tuple[str, list[Difference]]:
    """A run against a baseline: how much was compared, and what differs. Measures again what looks worse."""
    committed = kept.decode(path, Ratios, VERSION)
    found = executed(target)
    again = None
    if worse := doubtful(committed, found):
        problems = sorted({name.partition(" ")[0] for name in worse})
        print(f"{len(worse)} ratios look worse, measured again:")
        again = executed(target, problems)
    of = figures(found)
    count = sum(isinstance(of.get(name), Figure) for name in committed.entries)
    return f"{count} of {len(committed.entries)} ratios compared", differences(committed, found, again)


# ---------------------------------------------------------------- figures of a run


@dataclass(frozen=True)
class Figure:
    """What a run says of a problem and a step.

    Attributes:
        ratio: of FLASH's time to the subject's, the median over the rounds.
        control: |ratio - 1| of the subject to itself.
        tick: relative change of the ratio if both times change by a step of the clock.
        seconds: of the subject, median.
    """

    ratio: float
    control: float
    tick: float
    seconds: float


@dataclass(frozen=True)
class Nothing:
    """Why a run has no figure.

    Attributes:
        why: for a reader.
        red: whether the subject is to blame.
    """

    why: str
    red: bool = False


def figures(found: Speed) -> dict[str, Figure | Nothing]:
    """By problem and step."""
    contests = [contest for contest in found.contests if contest.measure == "device"]
    tick = _tick(contests)
    return {f"{of.problem} {of.step}": _figure(of, found.implementation, tick) for of in contests}


def _figure(contest: Contest, subject: str, tick: float) -> Figure | Nothing:
    from tests.speed import pairs

    for name in (subject, REFERENCE):
        entry = contest.entries.get(name)
        absent = "it was not timed" if entry is None else entry.absent
        if absent:
            to_blame = name == subject and not absent.startswith(UNCLAIMED)
            return Nothing(absent if name == subject else f"{name}: {absent}", to_blame)
    ours, theirs = (contest.entries[name].seconds for name in (subject, REFERENCE))
    try:
        of, control = pairs.ratio(ours, theirs), pairs.ratio(ours, contest.control)
    except ValueError:
        return Nothing(f"cannot tell: fewer than {pairs.FEWEST} rounds")
    if not pairs.is_quiet(control):
        return Nothing(f"cannot tell: not quiet, its ratio to itself is {control}")
    seconds = statistics.median(ours)
    ticks = tick / seconds + tick / statistics.median(theirs)
    return Figure(of.median, abs(control.median - 1), ticks, seconds)


def _tick(contests: Iterable[Contest]) -> float:
    """Seconds between the two nearest times of a run that differ: the clock of the events has steps, on some
    GPUs of a microsecond, and a median in the middle of a step may fall to either side."""
    times = sorted({x for of in contests for entry in of.entries.values() for x in entry.seconds})
    return min((b - a for a, b in pairwise(times) if b - a > FINEST), default=0.0)


# ---------------------------------------------------------------- a baseline


def expected() -> list[str]:
    """The problems and steps of the grid."""
    from tests.speed.problems import BACKWARD, FORWARD, GRID

    return [f"{problem.id} {step}" for problem in GRID for step in (FORWARD, BACKWARD)]


def red(runs: Sequence[Speed]) -> str:
    """What is wrong and hence no measure; empty if nothing is."""
    each = [figures(run) for run in runs]
    nothing = [(name, of) for run in each for name, of in run.items() if isinstance(of, Nothing)]
    if wrong := [(name, of) for name, of in nothing if of.red]:
        name, of = wrong[0]
        return f"{len(wrong)} contests in {len(runs)} runs have no right result, the first {name}: {of.why}"
    for number, run in enumerate(each, 1):
        if missing := [name for name in expected() if name not in run]:
            return f"run {number} has not measured {len(missing)} of the grid, the first {missing[0]}"
    if len(nothing) == sum(map(len, each)):
        return f"there is no ratio to {REFERENCE}: {nothing[0][1].why}"
    return ""


def baseline(key: Key, runs: Sequence[Speed]) -> Ratios:
    """The baseline of several runs.

    Raises:
        ReportError: if something is wrong, or was not measured.
    """
    if told := red(runs):
        raise ReportError(told)
    each = [figures(run) for run in runs]
    chosen: dict[str, list[Figure]] = {}
    left_out: dict[str, str] = {}
    for name in each[0]:
        of_runs = [run[name] for run in each if name in run]
        here = [of for of in of_runs if isinstance(of, Figure)]
        if len(here) >= FEWEST:
            chosen[name] = here
        else:
            left_out[name] = next(of.why for of in of_runs if isinstance(of, Nothing))
    ratios = {name: statistics.median(of.ratio for of in here) for name, here in chosen.items()}
    spreads = {name: max(abs(of.ratio / ratios[name] - 1) for of in here) for name, here in chosen.items()}
    noise = statistics.median(spreads.values()) if spreads else 0.0
    entries, coarse = {}, []
    for name, here in chosen.items():
        spread, control = spreads[name], max(of.control for of in here)
        largest = max(spread, control, noise)
        allowed = _allowed(largest, max(of.tick for of in here))
        ms = 1e3 * statistics.median(of.seconds for of in here)
        entries[name] = Entry(*map(_short, (ratios[name], spread, control, allowed, ms)))
        if allowed + MARGIN * largest > 1 - 1 / (1 + SLOWER):
            coarse.append(name)
    return Ratios(
        implementation=key.implementation, device=key.device, torch=key.torch, triton=key.triton,
        path=key.path, runs=len(runs), noise=_short(noise), entries=entries, left_out=left_out, coarse=coarse,
    )  # fmt: skip


def _allowed(noise: float, tick: float) -> float:
    """The relative drop of a ratio that may be noise.

    Args:
        noise: the largest of: how far apart the runs are, how far apart those of half of the entries are (few
            runs may agree by chance), and how far from 1 the subject's ratio to itself is.
        tick: of the clock, which few runs may not have shown.
    """
    return max(LEAST + tick, WIDE * noise)


def _short(x: float) -> float:
    return float(f"{x:.4g}")


# ---------------------------------------------------------------- a check


def _drop(committed: Ratios, name: str, now: Figure) -> float:
    """Relative; negative if the ratio rose."""
    return 1 - now.ratio / committed.entries[name].ratio


def _is_worse(committed: Ratios, name: str, now: Figure) -> bool:
    return not _drop(committed, name, now) <= committed.entries[name].allowed


def doubtful(committed: Ratios, found: Speed) -> list[str]:
    """The problems and steps that look worse."""
    return [
        name
        for name, now in figures(found).items()
        if name in committed.entries and isinstance(now, Figure) and _is_worse(committed, name, now)
    ]


def differences(committed: Ratios, found: Speed, again: Speed | None = None) -> list[Difference]:
    """What a run has otherwise than the baseline; empty if it is as fast.

    Args:
        committed: the baseline.
        found: the run.
        again: another one, of what looks worse in the first; None: what looks worse is.
    """
    now, later = figures(found), figures(again) if again else {}
    wrong = {
        name: of.why for run in (later, now) for name, of in run.items() if isinstance(of, Nothing) and of.red
    }
    differs = [Difference(f"{name}: {why}", True) for name, why in wrong.items()]
    if busy := found.others_busy or (again.others_busy if again else ""):
        differs.append(Difference(f"not alone: {busy}", False))
    missing = [name for name in (*committed.entries, *committed.left_out) if name not in now]
    if missing:
        differs.append(Difference(f"{len(missing)} were not measured, the first {missing[0]}", True))
    unclaimed = []
    count = untold = 0
    for name in committed.entries:
        of = now.get(name)
        if isinstance(of, Figure):
            count += 1
            differs += _of_entry(committed, name, of, again is not None, later.get(name))
        elif of is not None and of.why.startswith(UNCLAIMED):
            unclaimed.append(name)
        elif of is not None and not of.red:
            untold += 1
            differs.append(Difference(f"{name}: not compared: {of.why}", False))
    if unclaimed:
        differs.append(Difference(f"{len(unclaimed)} are not claimed, hence not compared", False))
    if not count and not unclaimed:
        differs.append(Difference("nothing was compared", True))
    elif untold > count:
        what = f"{untold} of {untold + count} could not be compared: that is no check; measure again"
        differs.append(Difference(what, True))
    new = [name for name, of in now.items() if isinstance(of, Figure) and name not in committed.entries]
    if new:
        differs.append(Difference(f"{len(new)} are not in the baseline, the first {new[0]}", False))
    return differs


def _of_entry(
    committed: Ratios, name: str, now: Figure, is_again: bool, later: Figure | Nothing | None
) -> list[Difference]:
    before = committed.entries[name]
    drop = _drop(committed, name, now)
    told = f"{name}: {now.ratio:.3f} times as fast as {REFERENCE}, {before.ratio:.3f} in the baseline"
    if drop < -before.allowed:
        return [Difference(f"{told}: {-drop:.1%} more: the baseline may be updated", False)]
    if not _is_worse(committed, name, now):
        return []
    told += f": {drop:.1%} less, and up to {before.allowed:.1%} may be noise"
    if not is_again:
        return [Difference(told, True)]
    if isinstance(later, Figure):
        second = f"measured again it is {later.ratio:.3f}"
        return [Difference(f"{told}; {second}", _is_worse(committed, name, later))]
    if later is None:
        return [Difference(f"{told}; it was not measured again", True)]
    return [Difference(f"{told}; measured again: {later.why}", later.red)]
