"""One comparison: a case through an implementation, against the three references, into a record."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from reference import emulation, oracle, sdpa
from reference.budget import Rounding
from reports.records import Record, TensorSummary, Verdict

from . import execution as executing
from . import fences, ragged
from .cases import Case
from .execution import run
from .implementations import OWN, Implementation, environment
from .judge import judge, judge_again
from .values import Inputs, make_inputs

Array = NDArray[np.float64]

REPEATED = frozenset({"recipe", "corpus", "replay"})
"""Which cases run three times through an implementation on the CPU, where that is slow; on a GPU all do."""


SUITE = frozenset(str(module) for module in (__file__, executing.__file__, fences.__file__))
"""Files whose lines in a traceback say nothing about the implementation."""

FRAMES, TEXT = 10, 2000
"""Lines of a traceback that are kept, the innermost, and characters of an exception's text."""


def compare(
    case: Case, implementation: Implementation, device: torch.device, origin: str = "replay"
) -> Record:
    """Runs a case through an implementation and judges every tensor against every reference.

    An exception of the implementation is a broken claim: it took a case that it claims. Of a ragged batch
    each sequence is judged as a dense case is; of each rule the worst verdict is recorded.
    """
    path = implementation.path(device)
    record = functools.partial(
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
    claims = implementation.claims
    refusal = claims.refusal(case)
    if refusal:
        return record(status="not claimed", reason=refusal)

    clock = _Clock()
    with clock("inputs"):
        inputs = make_inputs(case)
    try:
        with clock("implementation"):
            hostile = device.type == "cuda" or origin in REPEATED
            execution = run(implementation, case, inputs, device, hostile)
        results = execution.results
        verdicts = [_handed_over(case, verdict) for verdict in execution.verdicts]
    except (Exception, SystemExit) as error:  # what a kernel does must not end the run
        raised = _raised(error)
        verdict = Verdict("out", "contract", "does not raise", False, note=raised)
        return record(
            status="broken",
            reason=f"raised {raised.splitlines()[0]}",
            verdicts=[verdict],
            seconds=clock.seconds,
        )

    tiles = implementation.tiles(case, device) if implementation.tiles is not None else None
    judged: list[Verdict] = []
    found: dict[str, list[TensorSummary]] = {name: [] for name in results}
    for part in ragged.parts(case):
        given: dict[str, Any] = {
            name: None if t is None else part.of(name, t) for name, t in vars(inputs).items()
        }
        of_part, summaries_of_part = _judged(
            part.case,
            Inputs(**given),
            {name: part.of(name, x) for name, x in results.items()},
            {
                rule: {name: part.of(name, x) for name, x in again.items() if not claims.repeatable(name)}
                for rule, again in execution.repeats.items()
            },
            claims.rounding,
            tiles,
            clock,
        )
        judged += map(part.located, of_part)
        for name, summary in summaries_of_part.items():
            found[name].append(summary)
    verdicts += [*ragged.past_rows(case, results), *ragged.worst(judged)]
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


def _judged(
    case: Case,
    inputs: Inputs,
    results: Mapping[str, Array],
    repeats: Mapping[str, Mapping[str, Array]],
    rounding: Rounding,
    tiles: emulation.Tiles | None,
    clock: _Clock,
) -> tuple[list[Verdict], dict[str, TensorSummary]]:
    """Judges the results of a dense case against the three references.

    Args:
        case, inputs, results, repeats: of `run`.
        rounding: where the implementation rounds.
        tiles: those of the implementation, if known.
        clock: takes the time of each reference.
    """
    tensors = (inputs.q, inputs.k, inputs.v, inputs.d_out, inputs.d_lse)
    q, k, v, d_out, d_lse = (None if t is None else t.double().numpy() for t in tensors)
    assert q is not None and k is not None and v is not None
    with clock("oracle"):
        exact = oracle.attention(
            q,
            k,
            v,
            d_out,
            d_lse,
            causal=case.causal,
            scale=case.scale,
            dtype=case.dtype,
            out_given=results.get("out"),
            rounding=rounding,
        )
    with clock("sdpa"):
        in_float64 = _arrays(sdpa.attention(*tensors, causal=case.causal, scale=case.scale))
        in_own = _arrays(sdpa.attention(*tensors, causal=case.causal, scale=case.scale, dtype=inputs.q.dtype))
    out_given = torch.from_numpy(results["out"]).to(inputs.q.dtype) if "out" in results else None
    with clock("emulation"):
        emulated = _arrays(
            emulation.attention(
                *tensors,
                causal=case.causal,
                scale=case.scale,
                tiles=emulation.DEFAULT_TILES if tiles is None else tiles,
                out_given=out_given,
            )
        )
    with clock("judge"):
        verdicts, summaries = judge(case, results, exact, in_float64, emulated, tiles is not None, in_own)
        for rule, again in repeats.items():
            verdicts += judge_again(case, again, exact, rule)
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
