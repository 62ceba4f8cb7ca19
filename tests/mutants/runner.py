"""Plants mutants and waits for what is seen of them, each in processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from .. import sanitizer
from .mutant import DoesNotApply, Lane, Mutant, plant
from .score import Event, Seen

HANG = {"cpu": 150, "gpu": 150, "sanitizer": 150}
"""Seconds without a line after which a process is taken to hang, by lane. A case takes the interpreter two,
the heaviest of the stream 50 where others use the cores too; on a GPU kernels are compiled."""

TEST_SECONDS = 400
"""That a test which is a witness, or the sanitizer, may take."""

QUIET_SECONDS = 20
"""Of cases, where they should find nothing: the mutant is equivalent, or a test is what sees it."""

OUTCOMES = (
    "wrong result", "crash", "hang", "compile error", "survived", "does not apply", "not run", "witness only"
)  # fmt: skip
KILLS = OUTCOMES[:3]


@dataclass(frozen=True)
class Options:
    """How mutants are looked for.

    Attributes:
        seconds: of cases at most, the start of the process included; 0: the witness only.
        quick: end with the first red case.
        laws: laws too.
        first: cases to begin with, by the mutant's name.
    """

    seconds: float = 60
    quick: bool = False
    laws: bool = True
    first: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Found(msgspec.Struct):
    """When a property first showed a mutant.

    Attributes:
        cases: how many had run, this one included.
        seconds: since the run began, the process's start included.
        margin: how many times over its limit, the most of that case.
        rule: which, with its tensor.
        case: its id.
    """

    cases: int
    seconds: float
    margin: float
    rule: str
    case: str


class Score(msgspec.Struct):
    """What came of a mutant.

    Attributes:
        outcome: one of `OUTCOMES`.
        found: by property.
        cases: of the stream, that ran.
        seconds: that the stream took.
        witness: properties that the witness broke, with the rule and its margin.
        tensors: that were red anywhere.
        wants_witness: whether it has one; machine-made mutants do not.
        trouble: the end of what a process said that failed.
    """

    name: str
    kind: str
    lane: Lane
    report: str
    equivalent: str
    wants_witness: bool = True
    outcome: str = "survived"
    found: dict[str, Found] = {}
    cases: int = 0
    seconds: float = 0.0
    witness: dict[str, tuple[float, str]] = {}
    tensors: list[str] = []
    trouble: str = ""

    @property
    def killed(self) -> bool:
        return self.outcome in KILLS

    @property
    def first(self) -> Found | None:
        return min(self.found.values(), key=lambda found: found.seconds, default=None)

    @property
    def witness_red(self) -> bool:
        return bool(self.witness)

    @property
    def witnessed(self) -> list[str]:
        return [f"{name}: {rule} ({margin:.3g} x)" for name, (margin, rule) in self.witness.items()]

    def line(self) -> str:
        """For a terminal."""
        first = self.first
        when = f"{first.seconds:5.1f} s, case {first.cases:3}, {first.rule}" if first else ""
        note = "" if self.witness or not self.wants_witness else "  WITNESS NOT RED"
        note = "  (equivalent)" if self.equivalent else note
        trouble = f"  {self.trouble.splitlines()[-1]}" if self.trouble else ""
        return f"{self.name:52} {self.outcome:14} {when}{note}{trouble}"


def look_for_all(
    mutants: Iterable[Mutant], options: Options, jobs: int, tell: Callable[[Score], None]
) -> list[Score]:
    """Looks for mutants, `jobs` at a time; `tell` hears of each as it is done."""

    def one(mutant: Mutant) -> Score:
        score = look_for(mutant, options)
        tell(score)
        return score

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, mutants))


def look_for(mutant: Mutant, options: Options) -> Score:
    """Plants a mutant in a temporary copy of the project and looks for it there."""
    score = Score(
        mutant.name, mutant.kind, mutant.lane, mutant.report, mutant.equivalent, bool(mutant.witness)
    )
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        try:
            plant(mutant, folder)
        except DoesNotApply as error:
            score.outcome, score.trouble = "does not apply", str(error)
            return score
        if mutant.lane == "sanitizer":
            _sanitize(mutant, folder, score)
            return score
        started = time.time()
        witness = [] if mutant.witnessed_by_test or not mutant.witness else [mutant.witness]
        if mutant.equivalent or mutant.witnessed_by_test:
            options = replace(options, seconds=min(options.seconds, QUIET_SECONDS))
        if options.seconds or witness:
            _watch(_command(folder, started, options, mutant.name, witness), folder, score, started)
        if mutant.witnessed_by_test and not (options.quick and score.found):
            _test(mutant, folder, score)
    _conclude(score)
    return score


def held_without_fault(mutant: Mutant) -> bool:
    """Whether the witness holds in the project as it is."""
    return not look_for(replace(mutant, changes=()), Options(seconds=0)).witness_red


def _command(folder: Path, started: float, options: Options, name: str, witness: Sequence[str]) -> list[str]:
    words = [sys.executable, "-m", "tests.mutants.score", "--events", str(folder / "events")]
    words += ["--started", repr(started), "--seconds", str(options.seconds)]
    words += ["--quick"] * options.quick + ["--laws"] * options.laws
    for case in options.first.get(name, ()):
        words += ["--first", case]
    for case in witness:
        words += ["--witness", case]
    return words


def environment(lane: Lane, folder: Path) -> dict[str, str]:
    """Of a process that works in a copy: of this one, less what is meant for this one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "FA_"))}
    kept |= {"FA_REPORT_DIR": str(folder / "out"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if lane == "cpu":
        kept |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        kept.pop("TRITON_OVERRIDE_ARCH", None)
    return kept


def _watch(command: list[str], folder: Path, score: Score, started: float) -> None:
    """Runs the process that looks for the mutant, and reads what it writes until it ends, dies or hangs."""
    events = folder / "events"
    events.touch()
    with open(folder / "said", "wb") as said:
        process = subprocess.Popen(command, cwd=folder, env=environment(score.lane, folder), stdout=said,
                                   stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        heard, size = time.time(), 0
        hangs = False
        while process.poll() is None:
            time.sleep(0.05)
            if events.stat().st_size != size:
                heard, size = time.time(), events.stat().st_size
            elif time.time() - heard > HANG[score.lane]:
                hangs = True
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    _read(events, folder / "said", process.returncode, hangs, score, started)


def _read(events: Path, said: Path, status: int, hangs: bool, score: Score, started: float) -> None:
    begins, stage, compiles = "", "stream", True
    done = False
    for line in events.read_bytes().splitlines():
        try:
            event = msgspec.json.decode(line, type=Event)
        except msgspec.DecodeError:  # cut short by a crash
            continue
        done |= event.done
        begins = event.begins or begins
        if event.seen is not None:
            _take(event.seen, score)
            compiles &= not event.seen.failed_to_compile
            begins, stage = "", event.seen.stage
    if not done:
        what = "hang" if hangs else "crash" if status != 1 else ""
        if what:
            rule = f"exit status {status}" if what == "crash" else "no answer"
            if begins and not score.cases and stage == "stream" and not score.found:
                score.cases = 1
            found = Found(score.cases, time.time() - started, 1.0, rule, begins)
            score.found.setdefault(what, found)
            score.witness.setdefault(what, (1.0, rule))
        else:
            score.trouble = said.read_text(errors="replace")[-2000:].strip()
    if not compiles and set(score.found) <= {"raises"} and set(score.witness) <= {"raises"}:
        score.found, score.witness, score.outcome = {}, {}, "compile error"


def _take(seen: Seen, score: Score) -> None:
    score.tensors = sorted({*score.tensors, *seen.tensors})
    if seen.stage == "witness":
        score.witness |= seen.broken
        return
    if seen.stage == "stream":
        score.cases += 1
    score.seconds = seen.seconds
    for name, (margin, rule) in seen.broken.items():
        score.found.setdefault(name, Found(max(score.cases, 1), seen.seconds, margin, rule, seen.case))


def _test(mutant: Mutant, folder: Path, score: Score) -> None:
    """Runs the test that is a witness."""
    started = time.time()
    command = [sys.executable, "-m", "pytest", mutant.witness, "-x", "-q", "-p", "no:cacheprovider"]
    try:
        run = subprocess.run(command, cwd=folder, env=environment(mutant.lane, folder), capture_output=True,
                             text=True, timeout=TEST_SECONDS)  # fmt: skip
    except subprocess.TimeoutExpired:
        run = None
    seconds = time.time() - started
    if run is not None and (run.returncode != 1 or " failed" not in run.stdout):
        if " skipped" in run.stdout and " passed" not in run.stdout:
            if not score.found:
                score.outcome, score.trouble = "not run", "its witness is skipped on this machine"
        elif run.returncode < 0:
            score.witness["crash"] = (1.0, f"signal {-run.returncode}")
            score.found["crash"] = Found(0, seconds, 1.0, mutant.witness, mutant.witness)
        elif run.returncode:
            score.trouble = (run.stdout + run.stderr)[-2000:].strip()
        return
    name = "tests" if run is not None else "hang"
    score.witness[name] = (1.0, mutant.witness)
    score.found[name] = Found(0, seconds, 1.0, mutant.witness, mutant.witness)


def _sanitize(mutant: Mutant, folder: Path, score: Score) -> None:
    command = sanitizer.command(mutant.witness)
    if not command:
        score.trouble = sanitizer.MISSING
        return
    started = time.time()
    kept = environment(mutant.lane, folder) | sanitizer.ENVIRONMENT
    try:
        run = subprocess.run(
            command, cwd=folder, env=kept, capture_output=True, text=True, timeout=TEST_SECONDS
        )
    except subprocess.TimeoutExpired:
        score.trouble = f"no answer within {TEST_SECONDS} s"
        return
    score.seconds = time.time() - started
    if run.returncode == sanitizer.FOUND:
        rule = f"compute-sanitizer --tool {mutant.witness}"
        score.found["sanitizer"] = Found(1, score.seconds, 1.0, rule, mutant.witness)
        score.witness["sanitizer"] = (1.0, rule)
    elif run.returncode:
        score.trouble = (run.stdout + run.stderr)[-2000:].strip()
    _conclude(score)


def _conclude(score: Score) -> None:
    """The outcome, from what was found."""
    if score.outcome in ("compile error", "does not apply", "not run"):
        return
    names = {*score.found}
    if names - {"raises", "crash", "hang"}:
        score.outcome = "wrong result"
    elif "crash" in names or "raises" in names:
        score.outcome = "crash"
    elif "hang" in names:
        score.outcome = "hang"
    elif score.witness and score.cases and not score.equivalent:
        score.outcome = "witness only"
