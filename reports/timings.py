"""What the speed runs leave: one JSON file a code path (`tests.speed` writes it, `reports.speed` shows it).

Times are in seconds, rates in operations or bytes a second, memory in bytes. Every round is kept: what is
claimed of a contest can be worked out again.

FLOPs count the pairs of query and key that see each other exactly, 2 (D + Dv) operations a pair and head in
the forward, 2.5 times that in the backward, whatever a kernel computes on top.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from . import versioned

SPEED = "speed.json"
"""The file, in the folder of a run."""

VERSION = 1

CONVENTION = (
    "FLOPs: 4 D operations for each pair of query and key that see each other, counted exactly, times heads;"
    " the backward 2.5 times the forward"
)
"""Stands on every table that has a rate."""

MEASURES = {
    "device": "of the GPU alone: events around a call that a pause has let the host prepare, cold L2",
    "eager": "of a call as it is made: events around it with an idle GPU, cold L2, host time included",
    "graph": "of a call replayed from a CUDA graph, behind others of its kind: warm L2, no host time",
}
"""What a time is of."""

PASSES = ("forward", "backward", "forward + backward")


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A contender in a contest.

    Attributes:
        seconds: of each round, in order; those of the same index are pairs. Empty if it is absent.
        absent: why it has no figure: not installed, refused, another kernel ran, wrong results, no memory.
        kernels: the longest of those that ran, by the profiler.
    """

    seconds: list[float] = []
    absent: str = ""
    kernels: list[str] = []


class Contest(msgspec.Struct, frozen=True, kw_only=True):
    """Contenders on one problem, in turns, each round in another order.

    Attributes:
        problem: its id (`tests.speed.problems`).
        step: of `PASSES`.
        measure: of `MEASURES`.
        flops: of one call.
        entries: by contender. "triton" is ours.
        control: the subject (`Speed.implementation`) once more in each round, at another place: a second
            measurement of the same thing, whose ratio to the first is what noise looks like.
    """

    problem: str
    step: str
    measure: str
    flops: float
    entries: dict[str, Entry]
    control: list[float] = []


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """A ratio that must be reached.

    Attributes:
        name: of the gate.
        problem, step, measure: as of a contest.
        subject, other: contenders; the ratio is other's time over subject's.
        least: the ratio that must be reached.
        ratio, low, high: the median over pairs and an interval for it.
        pairs: how many.
        verdict: of the ratio over `least`: "faster", "same", "slower", "cannot tell".
    """

    name: str
    problem: str
    step: str
    measure: str
    subject: str
    other: str
    least: float
    ratio: float
    low: float
    high: float
    pairs: int
    verdict: str


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """What the verdicts say of a contender against itself, and against itself made slower.

    Attributes:
        comparisons: A/A comparisons.
        verdicts: how often each was given in them; right are "same" and "cannot tell".
        ratios: the medians, sorted.
        delay: the part of the time that was added in the others.
        slowed: how many comparisons with the slower one.
        found: in how many of them the verdict was "slower".
    """

    comparisons: int
    verdicts: dict[str, int]
    ratios: list[float]
    delay: float
    slowed: int
    found: int


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Memory and time of a contender against T.

    Attributes:
        contender: its name.
        step: of `PASSES`.
        heads, dim: B H and D of the problem; causal, float16.
        lengths: T.
        peak: bytes beyond inputs and outputs, for each T; None where it could not run.
        seconds: median time of a call, measure "device"; None likewise.
        exponent: of peak against T: the slope of a line through the logarithms, over the longer half.
    """

    contender: str
    step: str
    heads: int
    dim: int
    lengths: list[int]
    peak: list[int | None]
    seconds: list[float | None]
    exponent: float | None


class FirstCall(msgspec.Struct, frozen=True, kw_only=True):
    """A first forward and backward in a fresh process.

    Attributes:
        cache: "cold" (Triton's cache is empty) or "warm".
        imported: seconds until `kernels` was imported.
        first, second: seconds of the first forward and backward, and of the second, until the GPU is done.
        compiled, from_cache: kernels that were compiled, and that came from the cache.
    """

    cache: str
    imported: float
    first: float
    second: float
    compiled: int
    from_cache: int


class HostTime(msgspec.Struct, frozen=True, kw_only=True):
    """What the host spends on an eager call, while the GPU does not keep it waiting.

    Attributes:
        contender, problem, step: as of a contest.
        seconds: median of a call.
    """

    contender: str
    problem: str
    step: str
    seconds: float


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """A run on one code path.

    Attributes:
        version: of the file.
        implementation: what the others are compared with: "triton", or --impl.
        device, path: the GPU; the code that ran ("sm90", "sm80-override").
        torch, triton, cudnn, driver: versions.
        arguments: of the command line.
        ended: when, UTC; seconds: that it took.
        others_busy: what other processes were seen on the GPU; empty if none.
        matmul: operations a second of a large float16 product. copy: bytes a second of a large copy, read
            and written.
    """

    version: int = VERSION
    implementation: str
    device: str
    path: str
    torch: str
    triton: str
    cudnn: str = ""
    driver: str = ""
    arguments: list[str] = []
    ended: str = ""
    seconds: float = 0.0
    others_busy: str = ""
    matmul: float = 0.0
    copy: float = 0.0
    contests: list[Contest] = []
    gates: list[Gate] = []
    noise: Noise | None = None
    curves: list[Curve] = []
    first_calls: list[FirstCall] = []
    host_times: list[HostTime] = []


def read(path: Path) -> Speed:
    """A file that a run left.

    Raises:
        ReportError: if it is missing, truncated, of another version, or no such file.
    """
    return versioned.read(path, Speed, VERSION, "file of speed")


def write(found: Speed, path: Path) -> None:
    """All of it or, if the process is ended meanwhile, what was there before.

    Raises:
        OSError: if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.json.encode(found) + b"\n")
    part.replace(path)
