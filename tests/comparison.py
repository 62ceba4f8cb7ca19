"""One comparison: a case through an implementation, against the three references, into a record."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from reference import emulation, oracle, sdpa
from reports.records import Record, Verdict

from .cases import Case
from .implementations import OWN, Implementation, environment, run
from .judge import judge
from .values import make_inputs


def compare(
    case: Case, implementation: Implementation, device: torch.device, origin: str = "replay"
) -> Record:
    """Runs a case through an implementation and judges every tensor against every reference.

    An exception of the implementation is a broken claim: it took a case that it claims.
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
    refusal = implementation.claims.refusal(case)
    if refusal:
        return record(status="not claimed", reason=refusal)

    clock = _Clock()
    with clock("inputs"):
        inputs = make_inputs(case)
    try:
        with clock("implementation"):
            results, verdicts = run(implementation, case, inputs, device)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
        verdict = Verdict("out", "contract", "does not raise", False, note=raised)
        return record(
            status="broken",
            reason=f"raised {raised.splitlines()[0]}",
            verdicts=[verdict],
            seconds=clock.seconds,
        )

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
            rounding=implementation.claims.rounding,
        )
    with clock("sdpa"):
        in_float64 = _arrays(sdpa.attention(*tensors, causal=case.causal, scale=case.scale))
        in_own = _arrays(sdpa.attention(*tensors, causal=case.causal, scale=case.scale, dtype=inputs.q.dtype))
    tiles = (
        implementation.tiles(case, device) if implementation.tiles is not None else emulation.DEFAULT_TILES
    )
    out_given = torch.from_numpy(results["out"]).to(inputs.q.dtype) if "out" in results else None
    with clock("emulation"):
        emulated = _arrays(
            emulation.attention(
                *tensors, causal=case.causal, scale=case.scale, tiles=tiles, out_given=out_given
            )
        )
    with clock("judge"):
        judged, summaries = judge(
            case, results, exact, in_float64, emulated, implementation.tiles is not None, in_own
        )
    verdicts += judged

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
            lines.append("  " + describe(v))
    lines += ["", "  replay: " + record.replay]
    return "\n".join(lines)


def describe(v: Verdict) -> str:
    """One verdict in one line."""
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
