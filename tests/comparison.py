"""One comparison: a case through an implementation, against the three references, into a record."""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import shutil
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from reports.records import ErrorMap, Record, TensorSummary, Verdict

from . import ragged
from .cases import Case
from .diagnosis import Calls, Earlier, Piece, diagnose
from .error_maps import error_maps
from .execution import Execution, run
from .implementations import Implementation, environment
from .judge import judge, judge_again
from .ragged import Part
from .values import Inputs, make_inputs

Array = NDArray[np.float64]

REPEATED = frozenset({"recipe", "corpus", "replay"})
"""Which cases run three times through an implementation on the CPU, where that is slow; on a GPU all do."""


SUITE = frozenset(
    str(Path(__file__).parent / file)
    for file in (
        "comparison.py",
        "conventions.py",
        "execution.py",
        "fences.py",
        "isolation.py",
        "laws/trial.py",
    )
)
"""Files whose lines in a traceback say nothing about the implementation."""

ONE_ROUNDING = 20
"""Times its limit beyond which a broken rule is not for one more rounding."""

FRAMES, TEXT = 10, 2000
"""Lines of a traceback that are kept, the innermost, and characters of an exception's text."""


@dataclass(frozen=True)
class Outcome:
    """What an implementation made of a case, in this process or in another.

    Attributes:
        path: the code that ran.
        tiles: those of the implementation, if known.
        execution: what came of it; None if it raised.
        raised: the exception, by `account`.
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
    guard: AbstractContextManager[None] | None = None,
    explained: bool = True,
) -> Record:
    """Runs a case through an implementation and judges every tensor against every reference.

    An exception of the implementation is a broken claim: it took a case that it claims. Of a ragged batch
    each sequence is judged as a dense case is; of each rule the worst verdict is recorded.

    Args:
        case, implementation, device, origin: what is compared, and for the record where it is from.
        prepared: its inputs and references, if they serve other implementations too.
        hostile: as of `execution.run`; by default on a GPU always, on the CPU for `REPEATED`.
        guard: around the execution, of nothing else.
        explained: whether a red record gets a diagnosis and error maps, which take longer than the judgement.
    """
    refusal = implementation.claims.refusal(case)
    if refusal:
        record = begun(case, implementation, implementation.path(device), origin)
        return record(status="not claimed", reason=refusal)
    clock = _Clock()
    with clock("inputs"):
        prepared = Prepared(case) if prepared is None else prepared
    if hostile is None:
        hostile = device.type == "cuda" or origin in REPEATED
    outcome = execute(case, implementation, device, prepared.inputs, hostile, guard)
    return judged(case, implementation, outcome, prepared, origin, clock, explained)


def execute(
    case: Case,
    implementation: Implementation,
    device: torch.device,
    inputs: Inputs,
    hostile: bool,
    guard: AbstractContextManager[None] | None = None,
) -> Outcome:
    """Runs a claimed case through an implementation, whatever that raises."""
    path = implementation.path(device)
    clock = _Clock()
    try:
        with guard or nullcontext(), clock("implementation"):
            execution = run(implementation, case, inputs, device, hostile)
    except (Exception, SystemExit) as error:  # what a kernel does must not end the run
        return Outcome(path, raised=account(error), seconds=clock.seconds.get("implementation", 0.0))
    tiles = implementation.tiles(case, device) if implementation.tiles is not None else None
    return Outcome(path, tiles, execution, seconds=clock.seconds["implementation"])


def judged(
    case: Case,
    implementation: Implementation,
    outcome: Outcome,
    prepared: Prepared,
    origin: str,
    clock: _Clock | None = None,
    explained: bool = True,
) -> Record:
    """The record of an outcome, every tensor of which is judged against every reference.

    Args:
        case, implementation, outcome: what was executed.
        prepared: the inputs and references of the case.
        origin: of the case.
        clock: has taken the time of what came before.
        explained: as of `compare`.
    """
    clock = _Clock() if clock is None else clock
    clock.seconds["implementation"] = outcome.seconds
    record = begun(case, implementation, outcome.path, origin)
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
    pieces: list[Piece] = []
    found: dict[str, list[TensorSummary]] = {name: [] for name in results}
    for part, references in prepared.parts:
        of_this = {name: part.of(name, x) for name, x in results.items()}
        of_part, summaries_of_part, exact = references.judged(
            of_this,
            {
                rule: {name: part.of(name, x) for name, x in again.items() if not claims.repeatable(name)}
                for rule, again in execution.repeats.items()
            },
            claims.rounding,
            outcome.tiles,
            clock,
        )
        of_parts += map(part.located, of_part)
        under = functools.partial(references.under, of_this.get("out"), claims.rounding)
        again = {
            rule: {name: part.of(name, x) for name, x in tensors.items()}
            for rule, tensors in execution.repeats.items()
        }
        pieces.append(
            Piece(part.case, of_this, exact, under, part.sequences, references.tensors, outcome.tiles,
                  implementation.tile, again)
        )  # fmt: skip
        for name, summary in summaries_of_part.items():
            found[name].append(summary)
    verdicts += [*ragged.past_rows(case, results), *ragged.worst(of_parts)]
    summaries = {name: ragged.total(of_tensor) for name, of_tensor in found.items()}

    elements = sum(summary.elements for summary in summaries.values())
    power = sum(summary.judged for summary in summaries.values())
    failed = [verdict for verdict in verdicts if not verdict.held]
    status, reason, diagnosis, maps = "held", "", list[str](), list[ErrorMap]()
    if failed:
        status = "broken"
        reason = "; ".join(dict.fromkeys(f"{v.tensor}: {v.rule}" for v in failed))
    if failed and explained:
        with clock("diagnosis"):
            diagnosis = [
                *diagnose(pieces, _calls[implementation.name]),
                *_undeclared(failed, execution, prepared, claims.rounding, outcome.tiles),
            ]
        with clock("maps"):
            maps = error_maps(pieces, {verdict.tensor for verdict in failed}, outcome.tiles)
    elif not failed and elements and not power:
        status, reason = "no power", "rounding errors may be as large as the values everywhere"
    if not case.ragged:
        exact = pieces[0].exact
        _calls[implementation.name].add(Earlier(case, exact.out, exact.dtype))
    return record(
        status=status,
        reason=reason,
        verdicts=verdicts,
        tensors=summaries,
        diagnosis=diagnosis,
        maps=maps,
        tile=None if outcome.tiles is None else outcome.tiles.largest,
        seconds=clock.seconds,
    )


def _undeclared(
    failed: list[Verdict], execution: Execution, prepared: Prepared, rounding: Rounding, tiles: Tiles | None
) -> Iterator[str]:
    """What an implementation may have to declare about its roundings: with it nothing would be red.

    One whose tiles are known has declared all: each try costs as much as the judgement did.
    """
    if tiles is not None or any(
        v.reference == "contract" or v.rule == "finite where it should be" or v.margin > ONE_ROUNDING
        for v in failed
    ):
        return
    for name in ("heads_rounded_before_group_sum", "p_rounded_before_ds", "l_from_rounded_p"):
        if getattr(rounding, name):
            continue
        declared: Rounding = dataclasses.replace(rounding, **dict[str, Any]({name: True}))
        if all(
            verdict.held
            for part, references in prepared.parts
            for verdict in references.judged(
                {tensor: part.of(tensor, x) for tensor, x in execution.results.items()},
                {}, declared, tiles, _Clock(),
            )[0]
        ):  # fmt: skip
            yield f"likely: it holds if a manifest declares {name} = true"


_calls: defaultdict[str, Calls] = defaultdict(Calls)
"""The calls of this process, by implementation: what one kept may come out of another."""


def begun(case: Case, implementation: Implementation, path: str, origin: str) -> Callable[..., Record]:
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


def account(error: BaseException) -> str:
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
        operands: as of `oracle.Problem.of`: what of the inputs enters a product.
    """

    def __init__(self, case: Case, inputs: Inputs, fa2: bool, operands: str = "as they are") -> None:
        self.case, self.inputs, self.fa2, self.operands = case, inputs, fa2, operands
        entering = oracle.OPERANDS[operands]

        def operand(t: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(entering(t.double().numpy())).to(t.dtype)

        q, k, v = operand(inputs.q), operand(inputs.k), operand(inputs.v)
        self.tensors = q, k, v, None if inputs.d_out is None else operand(inputs.d_out), inputs.d_lse
        self.options: dict[str, Any] = {"causal": case.causal, "scale": case.scale}

    @functools.cached_property
    def of_tf32(self) -> list[_References]:
        """The references where products take TF32: for each way to make it of float32."""
        ways = [way for way in oracle.OPERANDS if way != self.operands]
        return [_References(self.case, self.inputs, False, way) for way in ways]

    @functools.cached_property
    def problem(self) -> oracle.Problem:
        i = self.inputs
        q, k, v, d_out, d_lse = (
            None if t is None else t.double().numpy() for t in (i.q, i.k, i.v, i.d_out, i.d_lse)
        )
        assert q is not None and k is not None and v is not None
        return oracle.Problem.of(
            q, k, v, d_out, d_lse, dtype=self.case.dtype, operands=self.operands, **self.options
        )

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
    ) -> tuple[list[Verdict], dict[str, TensorSummary], oracle.Result]:
        """Judges the results of an implementation against the three references; also says what is exact.

        Args:
            results, repeats: of `run`.
            rounding: where the implementation rounds.
            tiles: those of the implementation, if known.
            clock: takes the time of each reference.
        """
        if rounding.products == "tf32" and self.case.dtype == "float32" and self.operands == "as they are":
            # how a chip makes TF32 of float32 is its own affair; the better one counts, for all tensors
            ways = [way.judged(results, repeats, rounding, tiles, clock) for way in self.of_tf32]
            return min(ways, key=lambda way: max((v.margin for v in way[0]), default=0.0))
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
            return verdicts, summaries, exact

    def under(self, out_given: Array | None, rounding: Rounding, **changes: Any) -> oracle.Result:
        """The exact result if some options were others than the case's."""
        q, k, v, d_out, d_lse = (None if t is None else t.double().numpy() for t in self.tensors)
        assert q is not None and k is not None and v is not None
        options: dict[str, Any] = {**self.options, **changes}
        options |= {"dtype": self.case.dtype, "out_given": out_given, "rounding": rounding}
        return oracle.attention(q, k, v, d_out, d_lse, **options)


def replay(case: Case, implementation: Implementation, path: str) -> str:
    """The line that repeats a comparison on this machine."""
    words = [f"{name}={value}" for name, value in environment(path).items()]
    words += [_python(), "-m", "pytest", os.path.relpath(Path(__file__).with_name("test_references.py"))]
    return shlex.join([*words, *implementation.options, "--case", case.id])


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
    if record.diagnosis:
        lines += ["", *(f"  {sentence}" for sentence in record.diagnosis)]
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
