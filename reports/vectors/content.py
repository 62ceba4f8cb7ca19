"""What a vector holds: the inputs of a case, its exact results, and the budget of each of their elements.

All tensors are as the functions take them: dense (B, H, S, D) and (B, H, S), ragged (total, H, D) and, of the
lse and of all that there is one of a row, (H, total).

The budget of dq and dk hangs on the implementation's own out, from which it takes delta. That is not known
here, so sigma and bound are those of the worst out that would itself be right; by how much the values move
is for the reader to say, `judging.moved_by_delta`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference.budget import DTYPES, FLOAT32, Dtype
from reference.error_model import Estimate
from reference.oracle import Problem, Result
from tests import ragged, thresholds
from tests.cases import Case
from tests.judge import judge
from tests.ragged import Part
from tests.values import Inputs, make_inputs

from . import format
from .format import Layout, Limits, Options, Vector

Array = NDArray[np.float64]

NATIVE = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

GIVEN = {
    "value": (np.float64, 0.0),
    "bound": (np.float32, 0.0),
    "sigma": (np.float32, 1.0),
    "low": (np.float64, 0.0),
    "high": (np.float64, 0.0),
    "zero": (np.uint8, 1),
    "concentration": (np.float32, 1.0),
    "powerless": (np.uint8, 0),
    "nonfinite": (np.uint8, 0),
}  # fmt: skip
"""What there is of each result: the dtype that it is written in, and what rows past the last sequence have.
The first is named as the result is, "dq", the others "dq.bound", ...; low and high are left out where the
value has no alternative, zero is there of gradients only."""

OF_ROWS = frozenset({"concentration", "powerless", "nonfinite"})
OPTIONAL = frozenset({"low", "high"})

RULES = {
    "hard bound": "|x - r| <= bound",
    "largest z": "max |z| <= sqrt(2 ln(2 n / alpha)), z: distance to [low, high] in sigmas, n elements",
    "rms z": "sqrt(mean z^2) <= sqrt(1 + 2 sqrt(s x) + 2 s x), x = ln(1 / alpha), s = 1 / independent errors",
    "bias": f"|mean of z sign(r)| <= {thresholds.BIAS:g} + sqrt(2 ln(2 / alpha) variance) / n, over all"
    f" |r| >= {thresholds.RESOLVED} eta",
}


def results_of(case: Case) -> list[str]:
    """The results that a case asks for."""
    return ["out", "lse", *(f"d{name}" for name in "qkv" if case.backward and name in case.grad)]


def handed_over(case: Case, x: Any) -> Any:
    """(1, H, total, ...) of a ragged batch as it is handed over; any other as it is. NumPy's or PyTorch's."""
    if not case.ragged:
        return x
    return x[0] if x.ndim == 3 else x[0].swapaxes(0, 1)


def by_heads(case: Case, x: Any) -> Any:
    """The reverse of `handed_over`."""
    if not case.ragged:
        return x
    return x[None] if x.ndim == 2 else x.swapaxes(0, 1)[None]


# ---------------------------------------------------------------- made


def make(case: Case) -> tuple[Vector, bytes]:
    """The entry of a case in the index, nothing caught yet, and its file.

    Raises:
        ReportError: if no file may have its name.
    """
    file = format.file_name(case.id)
    inputs = make_inputs(case)
    pieces = [(part, _budget(part, inputs)) for part in ragged.parts(case)]
    tensors = _inputs(case, inputs) | _results(case, pieces)
    data = format.encode(tensors)
    vector = Vector(
        case=case.id,
        words=replace(case, layout="bhsd").words(),  # in the file everything is contiguous
        file=file,
        sha256=format.sha256(data),
        options=options_of(case),
        results=results_layouts(case),
        tensors=format.layouts(tensors),
        parts=[_part(case, part, result) for part, result in pieces],
        catches=[],
    )
    return vector, data


def options_of(case: Case) -> Options:
    return Options(
        dtype=case.dtype,
        causal=case.causal,
        alignment="bottom-right",
        scale=float(case.effective_scale),
        batch=case.batch,
        heads_q=case.heads_q,
        heads_kv=case.heads_kv,
        dim=case.dim,
        dim_v=case.dim_v,
        ragged=case.ragged,
        max_seqlen_q=max((q for q, _ in case.pairs), default=0),
        max_seqlen_k=max((k for _, k in case.pairs), default=0),
        exact=case.exact,
    )


def _inputs(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    found = {name: handed_over(case, t) for name, t in vars(inputs).items() if t is not None}
    if case.lengths is not None:
        ends = np.cumsum([(0, 0), *case.lengths], axis=0, dtype=np.int32)
        found |= {f"cu_seqlens_{name}": torch.from_numpy(ends[:, i].copy()) for i, name in enumerate("qk")}
    return found


def _budget(part: Part, inputs: Inputs) -> Result:
    """The exact results of a part, and the budgets of a kernel whose out is any that is right."""
    arrays = {
        name: None if t is None else part.of(name, t.double().numpy()) for name, t in vars(inputs).items()
    }
    case = part.case
    problem = Problem.of(**arrays, causal=case.causal, scale=case.scale, dtype=case.dtype)  # type: ignore[arg-type]
    exact = problem.result()
    if exact.dq is None or exact.dk is None:
        return exact
    out = exact.out
    with np.errstate(invalid="ignore", over="ignore"):
        noise = thresholds.largest_z(max(out.value.size, 1)) * out.sigma
        apart = np.maximum(out.high[0] - out.value, out.value - out.low[0]) + noise
        apart = np.minimum(apart, out.bound) * np.sign(0.0 if arrays["d_out"] is None else arrays["d_out"])
    worst = [problem.result(out.value + side * apart) for side in (1, -1)]
    dq, dk = exact.dq, exact.dk
    for result in worst:
        assert result.dq is not None and result.dk is not None
        dq, dk = _wider(dq, result.dq), _wider(dk, result.dk)
    return replace(exact, dq=dq, dk=dk)


def _wider(a: Estimate, b: Estimate) -> Estimate:
    """The first with what the budget of either allows."""
    return replace(
        a,
        bound=np.maximum(a.bound, b.bound),
        sigma=np.maximum(a.sigma, b.sigma),
        concentration=np.maximum(a.concentration, b.concentration),
        powerless=a.powerless | b.powerless,
    )


def _results(case: Case, pieces: list[tuple[Part, Result]]) -> dict[str, Tensor]:
    """The exact results and their budgets, by the names of the file."""
    found: dict[str, Tensor] = {}
    shapes = {name: layout.shape for name, layout in results_layouts(case).items()}
    for name in results_of(case):
        whole = {}
        for field, (dtype, beyond) in GIVEN.items():
            if field == "zero" and name in ("out", "lse"):
                continue
            rows = field in OF_ROWS
            shape = _shape_of_rows(case, name) if rows else shapes[name]
            if name == "lse" and field in ("value", "low", "high"):
                beyond = -np.inf
            whole[field] = by_heads(case, np.full(shape, beyond, dtype))
            for part, result in pieces:
                _put(part, name, whole[field], _field(getattr(result, name), field))
        if np.array_equal(whole["low"], whole["value"]) and np.array_equal(whole["high"], whole["value"]):
            del whole["low"], whole["high"]
        for field, x in whole.items():
            key = name if field == "value" else f"{name}.{field}"
            found[key] = torch.from_numpy(np.ascontiguousarray(handed_over(case, x)))
    visible = by_heads(case, np.zeros(_shape_of_rows(case, "out"), np.int32))
    for part, result in pieces:
        _put(part, "out", visible, result.visible_keys)
    found["visible_keys"] = torch.from_numpy(np.ascontiguousarray(handed_over(case, visible)))
    return found


def _field(of: Estimate, name: str) -> NDArray[Any]:
    if name == "zero":
        return of.magnitude == 0
    x = getattr(of, name)
    if name in OPTIONAL:
        return x[0]  # the exact delta
    if name in ("bound", "sigma", "concentration"):
        return _rounded_up(x)
    return x


def _rounded_up(x: Array) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        y = x.astype(np.float32)
    return np.where(y < x, np.nextafter(y, np.float32(np.inf)), y)


def _put(part: Part, name: str, whole: NDArray[Any], piece: NDArray[Any]) -> None:
    """Writes a part of a result into the whole, the reverse of `Part.of`."""
    if part.sequences is None:
        whole[...] = piece
        return
    first = part.rows_k if name in ragged.BY_KEY else part.rows_q
    length = part.case.len_k if name in ragged.BY_KEY else part.case.len_q
    rows = np.array(first, dtype=int)[:, None] + np.arange(length)
    whole[0][:, rows] = piece.swapaxes(0, 1)


def _part(case: Case, part: Part, result: Result) -> format.Part:
    """What the judge would hold against the exact results of a part: its limits."""
    names = results_of(case)
    values = {name: getattr(result, name).value for name in names}
    dtypes = {name: FLOAT32 if name == "lse" else DTYPES[case.dtype] for name in names}
    verdicts, summaries = judge(
        part.case, {name: _rounded(dtypes[name], x) for name, x in values.items()}, result, values, None
    )
    limits = {}
    for name in names:
        of = {v.rule: v.limit for v in verdicts if v.tensor == name and v.reference == "oracle"}
        limits[name] = Limits(summaries[name].judged, of.get("largest z"), of.get("rms z"), of.get("bias"))
    sequences = None if part.sequences is None else list(part.sequences)
    return format.Part(sequences, part.case.len_q, part.case.len_k, limits)


def _rounded(dtype: Dtype, x: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(x), dtype.rounded(x), x)


# ---------------------------------------------------------------- what must be there


def _shape_of_rows(case: Case, name: str) -> tuple[int, ...]:
    """Of what there is one of a row: of a query, or of a key."""
    heads, rows = (case.heads_kv, case.len_k) if name in ragged.BY_KEY else (case.heads_q, case.len_q)
    return (heads, rows) if case.ragged else (case.batch, heads, rows)


def _shape(case: Case, name: str) -> list[int]:
    rows = _shape_of_rows(case, name)
    if name in ("lse", "d_lse"):
        return list(rows)
    dim = case.dim_v if name in ("v", "dv", "out", "d_out") else case.dim
    return [*(rows[::-1] if case.ragged else rows), dim]


def results_layouts(case: Case) -> dict[str, Layout]:
    """What a kernel is to give, by name."""
    return {
        name: Layout("float32" if name == "lse" else case.dtype, _shape(case, name))
        for name in results_of(case)
    }


def expected(case: Case, listed: Mapping[str, Layout]) -> dict[str, Layout]:
    """The tensors that a case's file must have; of those that may be left out, the ones that are listed."""
    names = ["q", "k", "v", *["d_out"] * case.backward, *["d_lse"] * case.d_lse]
    found = {name: Layout("float32" if name == "d_lse" else case.dtype, _shape(case, name)) for name in names}
    if case.ragged:
        found |= {f"cu_seqlens_{name}": Layout("int32", [case.batch + 1]) for name in "qk"}
    found["visible_keys"] = Layout("int32", list(_shape_of_rows(case, "out")))
    for name in results_of(case):
        for field, (dtype, _) in GIVEN.items():
            key = name if field == "value" else f"{name}.{field}"
            if (field == "zero" and name in ("out", "lse")) or (field in OPTIONAL and key not in listed):
                continue
            rows = field in OF_ROWS
            shape = list(_shape_of_rows(case, name)) if rows else _shape(case, name)
            found[key] = Layout(np.dtype(dtype).name, shape)
    return found
