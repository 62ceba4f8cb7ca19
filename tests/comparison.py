"""One comparison: a case through an implementation, against the three references, into a record."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from reference import emulation, oracle, sdpa
from reference.budget import Rounding
from reference.emulation import Tiles
from reports.records import Record, TensorSummary, Verdict

from . import execution as executing
from . import fences, ragged
from .cases import Case
from .execution import Execution, run
from .implementations import OWN, Implementation, environment
from .judge import judge, judge_again
from .ragged import Part
from .values import Inputs, make_inputs

Array = NDArray[np.float64]

REPEATED = frozenset({"recipe", "corpus", "replay"})
"""Which cases run three times through an implementation on the CPU, where that is slow; on a GPU all do."""


SUITE = frozenset(str(module) for module in (__file__, executing.__file__, fences.__file__))
"""Files whose lines in a traceback say nothing about the implementation."""

FRAMES, TEXT = 10, 2000
"""Lines of a traceback that are kept, the innermost, and characters of an exception's text."""


@dataclass(frozen=True)
class Outcome:
    """What an implementation made of a case, in this process or in another.

    Attributes:
        path: the code that ran.
        tiles: those of the implementation, if known.
        execution: what came of it; None if it raised.
        raised: the exception, by `_raised`.
        seconds: that it took.
    """

    path: str
    tiles: Tiles | None = None
    execution: Execution | None = None
    raised: str = ""
    seconds: float = 0.0


class Prepared:
    """A case's inputs and what its references make of them, once for any number of implementations.

    Args:
        case: what the inputs follow from. Its memory layout does not matter, but for "expanded".
        fa2: whether SDPA is also computed in the dtype of the inputs, for FlashAttention-2's rule.
    """

    def __init__(self, case: Case, fa2: bool = True) -> None:
        self.case = case
        self.inputs = make_inputs(case)
        self.parts: list[tuple[Part, _References]] = []
        for part in ragged.parts(case):
            given: dict[str, Any] = {
                name: None if t is None else part.of(name, t) for name, t in vars(self.inputs).items()
            }
            self.parts.append((part, _References(part.case, Inputs(**given), fa2)))


def compare(
    case: Case,
    implementation: Implementation,
    device: torch.device,
    origin: str = "replay",
    prepared: Prepared | None = None,
    hostile: bool | None = None,
) -> Record:
    """Runs a case through an implementation and judges every tensor against every reference.

    An exception of the implementation is a broken claim: it took a case that it claims. Of a ragged batch
    each sequence is judged as a dense case is; of each rule the worst verdict is recorded.

    Args:
        case, implementation, device, origin: what is compared, and for the record where it is from.
        prepared: its inputs and references, if they serve other implementations too.
        hostile: as of `execution.run`; by default on a GPU always, on the CPU for `REPEATED`.
    """
    refusal = implementation.claims.refusal(case)
    if refusal:
        record = _record(case, implementation, implementation.path(device), origin)
        return record(status="not claimed", reason=refusal)
    clock = _Clock()
    with clock("inputs"):
        prepared = Prepared(case) if prepared is None else prepared
    if hostile is None:
        hostile = device.type == "cuda" or origin in REPEATED
    outcome = execute(case, implementation, device, prepared.inputs, hostile)
    return judged(case, implementation, outcome, prepared, origin, clock)


def execute(
    case: Case, implementation: Implementation, device: torch.device, inputs: Inputs, hostile: bool
) -> Outcome:
    """Runs a claimed case through an implementation, whatever that raises."""
    path = implementation.path(device)
    clock = _Clock()
    try:
        with clock("implementation"):
            execution = run(implementation, case, inputs, device, hostile)
    except (Exception, SystemExit) as error:  # what a kernel does must not end the run
        return Outcome(path, raised=_raised(error), seconds=clock.seconds.get("implementation", 0.0))
    tiles = implementation.tiles(case, device) if implementation.tiles is not None else None
    return Outcome(path, tiles, execution, seconds=clock.seconds["implementation"])


def judged(
    case: Case,
    implementation: Implementation,
    outcome: Outcome,
    prepared: Prepared,
    origin: str,
    clock: _Clock | None = None,
) -> Record:
    """The record of an outcome, every tensor of which is judged against every reference.

    Args:
        case, implementation, outcome: what was executed.
        prepared: the inputs and references of the case.
        origin: of the case.
        clock: has taken the time of what came before.
    """
    clock = _Clock() if clock is None else clock
    clock.seconds["implementation"] = outcome.seconds
    record = _record(case, implementation, outcome.path, origin)
    execution = outcome.execution
    if execution is None:
        verdict = Verdict("out", "contract", "does not raise", False, note=outcome.raised)
        return record(
            status="broken",
            reason=f"raised {outcome.raised.splitlines()[0]}",
            verdicts=[verdict],
            seconds=clock.seconds,
        )

    claims = implementation.claims
    results = execution.results
    verdicts = [_handed_over(case, verdict) for verdict in execution.verdicts]
    of_parts: list[Verdict] = []
    found: dict[str, list[TensorSummary]] = {name: [] for name in results}
    for part, references in prepared.parts:
        of_part, summaries_of_part = references.judged(
            {name: part.of(name, x) for name, x in results.items()},
            {
                rule: {name: part.of(name, x) for name, x in again.items() if not claims.repeatable(name)}
                for rule, again in execution.repeats.items()
            },
            claims.rounding,
            outcome.tiles,
            clock,
        )
        of_parts += map(part.located, of_part)
        for name, summary in summaries_of_part.items():
            found[name].append(summary)
    verdicts += [*ragged.past_rows(case, results), *ragged.worst(of_parts)]
    summaries = {name: ragged.total(of_tensor) for name, of_tensor in found.items()}

    elements = sum(summary.elements for summary in summaries.values())
    power = sum(summary.judged for summary in summaries.values())
    failed = [verdict for verdict in verdicts if not verdict.held]
    status, reason = "held", ""
    if failed:
        status = "broken"
        reason = "; ".join(dict.fromkeys(f"{v.tensor}: {v.rule}" for v in failed))
    elif elements and not power:
        status, reason = "no power", "rounding errors may be as large as the values everywhere"
    return record(status=status, reason=reason, verdicts=verdicts, tensors=summaries, seconds=clock.seconds)


def _record(case: Case, implementation: Implementation, path: str, origin: str) -> Callable[..., Record]:
    """Makes a record of what is known before anything runs."""
    return functools.partial(
        Record,
        case=case.id,
        words=case.words(),
        origin=origin,
        implementation=implementation.name,
        path=path,
        dtype=case.dtype,
        backward=case.backward,
        replay=replay(case, implementation, path),
    )


def _raised(error: BaseException) -> str:
    """An exception and what caused it, by their texts, and below them the innermost lines that led there.

    Triton's interpreter raises its own from that of the kernel.
    """
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    texts, frames = [], []
    for raised in chain:
        text = f"{type(raised).__name__}: {raised}".strip()
        texts.append(text if len(text) <= TEXT else text[:TEXT] + " ...")
        for frame, line in traceback.walk_tb(raised.__traceback__):
            code = frame.f_code
            if code.co_filename not in SUITE:
                file = min(code.co_filename, os.path.relpath(code.co_filename), key=len)
                frames.append(f"  at {file}:{line} {code.co_qualname}")
    return "\n".join((*"\ncaused by ".join(texts).splitlines(), *frames[-FRAMES:]))


def _handed_over(case: Case, verdict: Verdict) -> Verdict:
    """A verdict about the results of a ragged batch, its place as in the tensors that were handed over."""
    if not case.ragged or verdict.where is None:
        return verdict
    _, *place = verdict.where
    return msgspec.structs.replace(verdict, where=ragged.handed_over(verdict.tensor, *place))


class _References:
    """The three references of a dense case. What no implementation changes is computed once.

    Args:
        case, inputs, fa2: as of `Prepared`.
    """

    def __init__(self, case: Case, inputs: Inputs, fa2: bool) -> None:
        self.case, self.fa2 = case, fa2
        self.tensors = (inputs.q, inputs.k, inputs.v, inputs.d_out, inputs.d_lse)
        self.options: dict[str, Any] = {"causal": case.causal, "scale": case.scale}

    @functools.cached_property
    def problem(self) -> oracle.Problem:
        q, k, v, d_out, d_lse = (None if t is None else t.double().numpy() for t in self.tensors)
        assert q is not None and k is not None and v is not None
        return oracle.Problem.of(q, k, v, d_out, d_lse, dtype=self.case.dtype, **self.options)

    @functools.cached_property
    def in_float64(self) -> dict[str, Array]:
        return _arrays(sdpa.attention(*self.tensors, **self.options))

    @functools.cached_property
    def in_own(self) -> dict[str, Array] | None:
        if not self.fa2:
            return None
        return _arrays(sdpa.attention(*self.tensors, **self.options, dtype=self.tensors[0].dtype))

    def judged(
        self,
        results: Mapping[str, Array],
        repeats: Mapping[str, Mapping[str, Array]],
        rounding: Rounding,
        tiles: Tiles | None,
        clock: _Clock,
    ) -> tuple[list[Verdict], dict[str, TensorSummary]]:
        """Judges the results of an implementation against the three references.

        Args:
            results, repeats: of `run`.
            rounding: where the implementation rounds.
            tiles: those of the implementation, if known.
            clock: takes the time of each reference.
        """
        with clock("oracle"):
            exact = self.problem.result(results.get("out"), rounding)
        with clock("sdpa"):
            in_float64, in_own = self.in_float64, self.in_own
        out_given = torch.from_numpy(results["out"]).to(self.tensors[0].dtype) if "out" in results else None
        with clock("emulation"):
            emulated = _arrays(
                emulation.attention(
                    *self.tensors,
                    **self.options,
                    tiles=emulation.DEFAULT_TILES if tiles is None else tiles,
                    out_given=out_given,
                )
            )
        with clock("judge"):
            verdicts, summaries = judge(
                self.case, results, exact, in_float64, emulated, tiles is not None, in_own
            )
            for rule, again in repeats.items():
                verdicts += judge_again(self.case, again, exact, rule)
            return verdicts, summaries


def replay(case: Case, implementation: Implementation, path: str) -> str:
    """The line that repeats a comparison on this machine."""
    words = [f"{name}={value}" for name, value in environment(path).items()]
    words += [_python(), "-m", "pytest", os.path.relpath(Path(__file__).with_name("test_references.py"))]
    if implementation.name != OWN:
        words += ["--impl", implementation.name]
    return shlex.join([*words, "--case", case.id])


def _python() -> str:
    """This Python, which has what the suite needs, as the caller would write it."""
    if shutil.which("python") == sys.executable:
        return "python"
    return min(sys.executable, os.path.relpath(sys.executable), key=len)


def explain(record: Record) -> str:
    """A red record for a reader: what, how bad, where, and how to see it again."""
    lines = [f"{record.implementation} on {record.path}: {record.words}", ""]
    for v in sorted(record.verdicts, key=lambda v: -v.margin):
        if not v.held:
            lines.append("  " + describe(v).replace("\n", "\n      "))
    lines += ["", "  replay: " + record.replay]
    return "\n".join(lines)


def describe(v: Verdict) -> str:
    """One verdict in one line; of an exception more follow."""
    text = f"{v.tensor} against {v.reference}: {v.rule}"
    if v.statistic is not None and v.limit is not None:
        text += f": {v.statistic:.4g}, at most {v.limit:.4g}"
        if v.limit and np.isfinite(v.margin):
            text += f" ({v.margin:.3g} x)"
    if v.where is not None:
        text += f" at {list(v.where)}"
    return text + (f"; {v.note}" if v.note else "")


def _arrays(result: emulation.Result | sdpa.Result) -> dict[str, np.ndarray]:
    return {name: t.detach().double().cpu().numpy() for name, t in result._asdict().items() if t is not None}


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
