"""Results of a kernel, judged by the budgets that a vector holds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from reference.budget import DTYPES
from reference.error_model import Estimate
from reference.oracle import Result
from reports.records import TensorSummary, Verdict
from tests import ragged
from tests.cases import Case, parse_case
from tests.judge import judge
from tests.ragged import Part

from ..errors import ReportError
from . import content, format
from .content import by_heads, results_of
from .format import INDEX, SUFFIX, Index, Layout, Loaded

if TYPE_CHECKING:
    from tests.session import Session

Array = NDArray[np.float64]
Results = dict[str, Array]

FROM_DELTA = ("dq", "dk")
"""What hangs on delta, which a kernel takes from its own out."""


@dataclass(frozen=True)
class Judgement:
    """What was found of one tensor.

    Attributes:
        case, tensor: of which.
        summary: how far it was off; None where there is no such tensor.
        failed: the rules that broke, worst first.
    """

    case: str
    tensor: str
    summary: TensorSummary | None
    failed: list[Verdict]

    @property
    def state(self) -> str:
        """ "held", "broken", "no power" (nothing of it could be judged) or "missing"."""
        if self.failed:
            return "broken"
        if self.summary is None:
            return "missing"
        return "held" if self.summary.judged or not self.summary.elements else "no power"


# ---------------------------------------------------------------- read


def read(folder: Path, cases: list[str] | None = None) -> list[Loaded]:
    """The vectors of a folder, their tensors as they were written.

    Args:
        folder: that `python -m reports vectors --out` wrote.
        cases: ids of those to read; None: all.

    Raises:
        ReportError: if a file is missing, truncated, foreign, of another version, not the one that the index
            was written for, or has not the tensors that it must have; says which and what.
    """
    index = format.read_index(folder)
    known = [vector.case for vector in index.vectors]
    for case in cases or ():
        if case not in known:
            raise ReportError(
                f"{folder / INDEX}: there is no case {case}; it has {', '.join(known) or 'none'}"
            )
    return [_read(folder, index, n) for n, case in enumerate(known) if cases is None or case in cases]


def _read(folder: Path, index: Index, number: int) -> Loaded:
    vector = index.vectors[number]
    where = f"{folder / INDEX}: vectors[{number}]"
    try:
        case = parse_case(vector.case)
    except ValueError as error:
        raise ReportError(f"{where}: {error}") from None
    if vector.case != case.id or vector.file != vector.case + SUFFIX:
        raise ReportError(f"{where}: file is {vector.file!r}; it may be {case.id + SUFFIX!r}")
    if vector.options != content.options_of(case):
        raise ReportError(f"{where}: options are not those of case {case.id}: {content.options_of(case)}")
    format.check_layouts(f"{where}: results", vector.results, content.results_layouts(case))
    return format.read_vector(folder, vector, content.expected(case, vector.tensors))


def read_results(folder: Path, loaded: Loaded) -> Results | None:
    """What a kernel gave for a case, float64, by heads; None if it gave nothing.

    Args:
        folder: with `<case>.safetensors` in it. Each tensor is in the dtype that it is judged in, or in
            float32 or float64 if all its numbers are of that dtype.
        loaded: the case.

    Raises:
        ReportError: if that is no file of tensors, or one of them is none of the case's results, or not of
            the shape or dtype that it must be.
    """
    path = folder / loaded.vector.file
    if not path.exists():
        return None
    case = parse_case(loaded.vector.case)
    found = format.read_tensors(path)
    wanted = content.results_layouts(case)
    for name in sorted(found):
        if name not in wanted:
            raise ReportError(f"{path}: {name} is there; it may have {', '.join(wanted)}")
        _check(path, name, found[name], wanted[name])
    return {name: by_heads(case, found[name].double().numpy()) for name in wanted if name in found}


def _check(path: Path, name: str, t: Tensor, wanted: Layout) -> None:
    was, shape = format.layout(t), f"{wanted.dtype} {wanted.shape}"
    dtypes = list(dict.fromkeys((wanted.dtype, "float32", "float64")))
    if was.shape != wanted.shape or was.dtype not in dtypes:
        others = f", or {' or '.join(dtypes[1:])} with such numbers" if len(dtypes) > 1 else ""
        raise ReportError(f"{path}: {name} is {was.dtype} {was.shape}; it must be {shape}{others}")
    if was.dtype != wanted.dtype:
        x = t.double()
        other = ~((x.to(content.NATIVE[wanted.dtype]).double() == x) | x.isnan())
        if other.any():
            first = other.nonzero()[0].tolist()
            raise ReportError(
                f"{path}: {name} is {x[tuple(first)].item()!r} at {first}; it must be a number of"
                f" {wanted.dtype}, to which the kernel rounds"
            )


def strangers(folder: Path, vectors: list[Loaded]) -> list[str]:
    """The files of results that are those of no vector: a name that is not quite a case's."""
    known = {loaded.vector.file for loaded in vectors}
    return sorted(path.name for path in folder.glob(f"*{SUFFIX}") if path.name not in known)


# ---------------------------------------------------------------- judged


def judged(loaded: Loaded, results: Results, owed: list[Verdict] | None = None) -> list[Judgement]:
    """Judges the results of a case, each as far as it is there.

    Args:
        loaded: the case.
        results: by name, float64, (B, H, S, ...), of a ragged batch (1, H, total, ...).
        owed: what else was found about them, whatever their values are.

    Returns:
        One for each result that the case asks for, and for whatever else broke.
    """
    case = parse_case(loaded.vector.case)
    arrays = {name: by_heads(case, t) for name, t in _arrays(loaded).items()}
    found, summaries = list(owed or ()), dict[str, list[TensorSummary]]()
    of_parts: list[Verdict] = []
    for part in ragged.parts(case):
        of_part = {name: part.of(name, x) for name, x in results.items()}
        exact = _exact(part, case, arrays, of_part.get("out"))
        values = {name: getattr(exact, name).value for name in of_part}
        verdicts, of_this = judge(part.case, of_part, exact, values, None)
        of_parts += [part.located(v) for v in verdicts if v.reference == "oracle" and fair(v, results)]
        for name, summary in of_this.items():
            summaries.setdefault(name, []).append(summary)
    found += [*ragged.past_rows(case, results), *ragged.worst(of_parts)]
    broken = sorted((v for v in found if not v.held), key=lambda v: -v.margin)
    names = dict.fromkeys([*results_of(case), *(v.tensor for v in broken)])
    return [
        Judgement(
            case.id,
            name,
            ragged.total(summaries.get(name, [])) if name in results else None,
            [v for v in broken if v.tensor == name],
        )
        for name in names
    ]


def fair(verdict: Verdict, results: Results) -> bool:
    """Whether a rule says something of a kernel whose out is not known: dq and dk have its delta's error,
    for which the hard bound allows, and no statistic of z does."""
    known = "out" in results or verdict.tensor not in FROM_DELTA
    return known or not (" z" in verdict.rule or verdict.rule == "bias")


def _arrays(loaded: Loaded) -> dict[str, NDArray[Any]]:
    found = {}
    for name, t in loaded.tensors.items():
        if not name.startswith("cu_seqlens"):
            found[name] = t.double().numpy() if t.is_floating_point() else t.numpy()
    return found


def _exact(part: Part, case: Case, arrays: Mapping[str, NDArray[Any]], out: Array | None) -> Result:
    """The oracle's result for a part, as far as the judge needs it, from a vector's tensors."""

    def of(name: str, field: str = "") -> NDArray[Any]:
        x = arrays[f"{name}.{field}" if field else name]
        return part.of(name, x)

    estimates: dict[str, Estimate | None] = dict.fromkeys(("out", "lse", "dq", "dk", "dv"))
    moved = moved_by_delta(part.case, of, out) if out is not None and "d_out" in arrays else {}
    for name in results_of(case):
        value = of(name)
        sides = [of(name, side) if f"{name}.{side}" in arrays else value for side in ("low", "high")]
        shifts = [0.0, *([moved[name]] if name in moved else [])]
        low, high = (np.stack([side + shift for shift in shifts]) for side in sides)
        sigma, none = of(name, "sigma"), np.zeros_like(value)
        zero = of(name, "zero") if f"{name}.zero" in arrays else none
        estimates[name] = Estimate(
            value=value, bound=of(name, "bound"), sigma=sigma, low=low, high=high,
            sigma_emulation=sigma, drift_low=none, drift_high=none,  # of what is not compared with
            magnitude=1.0 - zero, concentration=of(name, "concentration"),
            powerless=of(name, "powerless").astype(bool), nonfinite=of(name, "nonfinite").astype(bool),
        )  # fmt: skip
    return Result(
        **estimates,  # type: ignore[arg-type]
        visible_keys=of("visible_keys"),
        score_terms=0.0,
        dtype=DTYPES[case.dtype],
    )


def moved_by_delta(case: Case, of: Any, out: Array) -> dict[str, Array]:
    """By how much dq and dk move if delta is taken from the kernel's own output instead of the exact one.

        delta = dO . out;  dS = P (dP - delta + dlse);  dq = scale dS K;  dk = scale dS^T q

    Args:
        case: dense.
        of: gives a tensor by its name: "q", "k", "d_out", "out", "lse", "visible_keys".
        out: of the kernel, (B, Hq, Sq, Dv).
    """
    B, group, scale = case.batch, case.heads_q // case.heads_kv, case.effective_scale
    q, k = of("q"), np.repeat(of("k"), group, 1)
    seen = np.arange(case.len_k) < of("visible_keys")[..., None]  # (B, Hq, Sq, Sk)
    with np.errstate(invalid="ignore", over="ignore"):
        P = np.where(seen, np.exp(scale * (q @ k.swapaxes(-1, -2)) - of("lse")[..., None]), 0.0)
        apart = np.where(np.isfinite(out), out - of("out"), 0.0)
        delta = np.where(seen.any(-1), (of("d_out") * apart).sum(-1), 0.0)[..., None]
        of_head = -scale * (P * delta).swapaxes(-1, -2) @ q
    shape = (B, case.heads_kv, group, case.len_k, case.dim)
    return {"dq": -scale * delta * (P @ k), "dk": of_head.reshape(shape).sum(2)}


# ---------------------------------------------------------------- our own kernel, or any that runs here


@dataclass(frozen=True)
class Made:
    """What an implementation made of a case: its results and what they are owed, as of `judged`; or why it is
    none that it claims."""

    results: Results = field(default_factory=dict)
    owed: list[Verdict] = field(default_factory=list)
    not_claimed: str = ""


def session_of(spec: str | None, manifest: str | None) -> Session:
    """The implementation to run, and its device.

    Args:
        spec, manifest: as `--impl` and `--manifest` of the suite.

    Raises:
        ReportError: if there is no such implementation.
    """
    from tests.implementations import ImplementationError
    from tests.interpreter import patch_once_per_launch
    from tests.session import Session, interpreted

    session = Session(spec, Path(), manifest)
    try:
        _ = session.implementation
    except ImplementationError as error:
        raise ReportError(str(error)) from None
    if interpreted():
        patch_once_per_launch()
    return session


def run(vectors: list[Loaded], session: Session) -> Iterator[tuple[Loaded, Made]]:
    """Runs an implementation on vectors, the inputs amid NaN; yields what it made of each.

    Gradients that it does not claim are not asked for.
    """
    from tests.comparison import account
    from tests.execution import run as execute
    from tests.values import Inputs

    implementation = session.implementation
    for loaded in vectors:
        case = parse_case(loaded.vector.case)
        case = implementation.claims.narrowed(replace(case, layout="bshd" if case.ragged else "bhsd"))
        if "d_lse" in loaded.tensors and not case.d_lse:  # without it the gradients are others
            case = replace(case, grad="none")
        if refusal := implementation.claims.refusal(case):
            yield loaded, Made(not_claimed=refusal)
            continue
        given: dict[str, Any] = {
            name: by_heads(case, loaded.tensors[name]) if name in loaded.tensors else None
            for name in ("q", "k", "v", "d_out", "d_lse")
        }
        try:
            with warnings.catch_warnings():  # the interpreter computes with NumPy, which warns of 0 / 0
                warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
                execution = execute(implementation, case, Inputs(**given), session.device, hostile=False)
        except Exception as error:  # whatever a kernel raises, the next case is its own
            broken = Verdict("out", "contract", "does not raise", False, note=account(error).splitlines()[0])
            yield loaded, Made(owed=[broken])
            continue
        yield loaded, Made(execution.results, execution.verdicts)
