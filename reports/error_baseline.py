"""The baseline of errors: how accurate an implementation is, so that one that stays legal but becomes less
accurate is red.

The cases are those of `tests.accuracy`, run several times with other values. Of every dtype and tensor it
keeps a band for the root mean square of z over all cases and one for the largest use of the hard bound; of
every case the mean of its rms z, so that it can say where an error has grown.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from . import records
from .errors import ReportError
from .kept import Difference, Key
from .records import Record
from .run import RUN
from .run import read as read_run
from .summary import RECORDS

KIND = "errors"
VERSION = 1

RUNS = 5
"""Of the corpus, each with other values, that a band is made of."""

SIGMAS = 6
"""Half the width of the band of a mean over all cases, in standard deviations between runs."""

LEAST = 0.005
"""Of a mean: the least standard deviation that few runs are believed to have."""

FAR = 4
"""How many times the largest deviation of a single case between runs another may be away from its mean: a few
rows decide what a case has, and some thousand numbers are compared."""

MORE = 0.1
"""By how much the largest of few runs may be exceeded, besides twice what they are apart."""

WORST = 5
"""Cases that are named."""


class Group(msgspec.Struct, frozen=True):
    """A dtype and a tensor.

    Attributes:
        rms_z: band of the root mean square, over all cases, of z's root mean square.
        budget_use: the largest |x - reference| / bound of all cases may be at most the second of these; the
            first is the smallest of the runs.
        spread: the largest relative deviation of a case's rms z from its mean over the runs.
    """

    rms_z: tuple[float, float]
    budget_use: tuple[float, float]
    spread: float


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """A baseline.

    Attributes:
        version: of the format.
        implementation, device, torch, triton, path: as of `kept.Key`.
        runs: how many it is made of.
        groups: by dtype and tensor, "float16 out".
        cases: by id, with the seed of the first run: by tensor the mean of the rms z.
    """

    version: int = VERSION
    implementation: str
    device: str
    torch: str
    triton: str
    path: str
    runs: int
    groups: dict[str, Group]
    cases: dict[str, dict[str, float]]

    @property
    def key(self) -> Key:
        return Key(KIND, self.implementation, self.device, self.torch, self.triton, self.path)


# ---------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Target:
    """What is measured.

    Attributes:
        spec, manifest: as --impl and --manifest gave them.
        override: the architecture that Triton is told to compile for, if it is.
        workers: processes of pytest.
    """

    spec: str | None = None
    manifest: str | None = None
    override: str | None = None
    workers: str = "auto"

    @property
    def options(self) -> list[str]:
        given = (("--impl", self.spec), ("--manifest", self.manifest))
        return [f"{name}={value}" for name, value in given if value is not None]


def targets(spec: str | None, manifest: str | None, workers: str) -> list[Target]:
    """One for each code path of this machine that the implementation has."""
    from tests.gpu_paths import ask_machine, code_paths, why_unusable

    machine = ask_machine()
    own = manifest is None and spec in (None, "triton", "flex")
    override = os.environ.get("TRITON_OVERRIDE_ARCH")
    if why_unusable(machine) is not None or not (own or override):
        return [Target(spec, manifest, override, workers)]
    paths = code_paths(machine.usable, override)
    return [Target(spec, manifest, path.override_arch, workers) for path in paths]


def key_of(target: Target) -> Key:
    """What would be measured of a target here.

    Raises:
        ReportError: if there is no such implementation.
    """
    import torch
    import triton

    from tests.implementations import ImplementationError
    from tests.session import Session

    session = Session(target.spec, Path(), target.manifest)
    try:
        implementation = session.implementation
    except ImplementationError as error:
        raise ReportError(str(error)) from None
    device = session.device
    path = f"{target.override}-override" if target.override else implementation.path(device)
    return Key(
        KIND, implementation.name, device_name(device), str(torch.__version__), triton.__version__, path
    )


def device_name(device: object) -> str:
    """What a baseline calls a device (a torch.device)."""
    import platform

    import torch

    assert isinstance(device, torch.device)
    on_gpu = device.type == "cuda"
    return torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()} CPU"


def executed(target: Target, runs: Sequence[int]) -> list[list[Record]]:
    """The records of the corpus through an implementation, of each run.

    Raises:
        ReportError: if nothing could be executed; says what the suite printed.
    """
    from tests.accuracy import ANOTHER, corpus
    from tests.cases import parse_case
    from tests.gpu_paths import variables

    root = Path(__file__).parent.parent
    cases = [case.id for run in runs for case in corpus(run)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "FA_REPORT_DIR": folder, **variables(target.override)}
        command = [sys.executable, "-m", "tests", "-q", "-p", "no:benchmark", "-n", target.workers,
                   "--dist", "worksteal", *target.options, *(f"--case={case}" for case in cases),
                   str(root / "tests" / "test_references.py")]  # fmt: skip
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        path = Path(folder) / RECORDS
        found = records.read(path) if path.is_file() else []
        note = read_run(Path(folder) / RUN)
    if note is None or not any(record.tensors for record in found):
        last = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise ReportError(f"nothing could be measured; the suite ended with {done.returncode}:\n{last}")
    by_run: dict[int, list[Record]] = {run: [] for run in runs}
    for record in found:
        by_run[parse_case(record.case).seed // ANOTHER].append(record)
    return list(by_run.values())


def name_of(record: Record) -> str:
    """The id of a record's case with the seed of the first run."""
    from dataclasses import replace

    from tests.accuracy import ANOTHER
    from tests.cases import parse_case

    case = parse_case(record.case)
    return replace(case, seed=case.seed % ANOTHER).id


# ---------------------------------------------------------------- a baseline


class Numbers:
    """What a run of the corpus measured.

    Attributes:
        rms: by dtype and tensor: by case its rms z.
        budget: by dtype and tensor: the largest use, and the case that has it.
    """

    def __init__(self, found: Iterable[Record]) -> None:
        self.rms: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self.budget: dict[str, tuple[float, str]] = {}
        for record in found:
            name = name_of(record)
            for tensor, summary in record.tensors.items():
                group = f"{record.dtype} {tensor}"
                if not summary.judged:
                    continue
                self.rms[group][name] = math.inf if summary.rms_z is None else summary.rms_z
                use = math.inf if summary.budget_use is None else summary.budget_use
                self.budget[group] = max(self.budget.get(group, (0.0, "")), (use, name))

    def total(self, group: str) -> float:
        """Root mean square over the cases."""
        values = list(self.rms[group].values())
        return math.sqrt(sum(x * x for x in values) / len(values))


def red(runs: Sequence[Sequence[Record]]) -> str:
    """What is wrong and hence no measure; empty if nothing is."""
    found = [record for run in runs for record in run if record.status == "broken"]
    if not found:
        return ""
    cases = {name_of(record) for record in found}
    return (
        f"{len(found)} comparisons are red, of {len(cases)} cases in {len(runs)} runs, so that no baseline is"
        f" made of them; the first: {found[0].case}: {found[0].reason}"
    )


def baseline(key: Key, runs: Sequence[Sequence[Record]]) -> Errors:
    """The baseline of several runs.

    Raises:
        ReportError: if a comparison is red: what is wrong is no measure.
    """
    if told := red(runs):
        raise ReportError(told)
    numbers = [Numbers(run) for run in runs]
    groups, cases = {}, defaultdict[str, dict[str, float]](dict)
    for group in sorted(numbers[0].rms):
        totals = [one.total(group) for one in numbers]
        uses = [one.budget[group][0] for one in numbers]
        low, high = _band(totals)
        spread = LEAST
        for name in sorted(numbers[0].rms[group]):
            values = [one.rms[group][name] for one in numbers if name in one.rms[group]]
            mean = sum(values) / len(values)
            cases[name][group.partition(" ")[2]] = _short(mean)
            if mean > 0:
                spread = max(spread, *(abs(x / mean - 1) for x in values))
        most = (1 + MORE) * max(uses) + 2 * (max(uses) - min(uses))
        groups[group] = Group((low, high), (_short(min(uses)), _short(most)), _short(spread))
    return Errors(
        implementation=key.implementation, device=key.device, torch=key.torch, triton=key.triton,
        path=key.path, runs=len(runs), groups=groups, cases=dict(sorted(cases.items())),
    )  # fmt: skip


def _band(values: Sequence[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    half = SIGMAS * max(_deviation(values), LEAST * mean)
    return _short(max(mean - half, 0.0)), _short(mean + half)


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))


def _short(x: float) -> float:
    return float(f"{x:.4g}")


def differences(committed: Errors, found: Sequence[Record]) -> list[Difference]:
    """What a run of the corpus has otherwise than the baseline; empty if it is as accurate."""
    differs = [
        Difference(f"{record.case}: {record.reason}", True) for record in found if record.status == "broken"
    ]
    now = Numbers(found)
    unclaimed = [record for record in found if record.status == "not claimed"]
    if unclaimed:
        differs.append(Difference(f"{len(unclaimed)} cases are not claimed, hence not compared", False))
    missing = committed.cases.keys() - {
        name_of(record) for record in found if record.tensors or record.status in ("broken", "not claimed")
    }
    if missing:
        differs.append(Difference(f"{len(missing)} cases were not executed, the first {min(missing)}", True))
    for group, kept in committed.groups.items():
        if group not in now.rms:
            differs.append(Difference(f"{group}: nothing was compared", not unclaimed))
            continue
        differs += _of_group(group, kept, now, _expected(committed.cases, group))
    new = now.rms.keys() - committed.groups.keys()
    differs += [Difference(f"{group}: not in the baseline", False) for group in sorted(new)]
    return differs


def _expected(cases: Mapping[str, Mapping[str, float]], group: str) -> dict[str, float]:
    from tests.cases import parse_case

    dtype, _, tensor = group.partition(" ")
    return {
        name: of[tensor] for name, of in cases.items() if tensor in of and parse_case(name).dtype == dtype
    }


def _of_group(group: str, kept: Group, now: Numbers, expected: Mapping[str, float]) -> list[Difference]:
    found = []
    total, (low, high) = now.total(group), kept.rms_z
    grown = sorted(
        ((x / expected[name], name) for name, x in now.rms[group].items() if expected.get(name)),
        reverse=True,
    )
    if total > high:
        most = "; ".join(f"{name} {ratio:.2f} times" for ratio, name in grown[:WORST])
        found.append(
            Difference(f"{group}: rms z {total:.4g}, at most {high:.4g}; it rose most in {most}", True)
        )
    elif total < low:
        found.append(
            Difference(f"{group}: rms z {total:.4g}, less than {low:.4g}: the baseline may be updated", False)
        )
    else:
        limit = 1 + FAR * kept.spread
        for ratio, name in grown[:WORST]:
            if ratio > limit:
                rose = (
                    f"{group}: rms z {ratio:.2f} times that of the baseline, at most {limit:.2f}, in {name}"
                )
                found.append(Difference(rose, True))
    use, name = now.budget[group]
    if use > kept.budget_use[1]:
        found.append(
            Difference(f"{group}: budget use {use:.4g}, at most {kept.budget_use[1]:.4g}, in {name}", True)
        )
    return found
