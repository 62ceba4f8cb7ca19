"""How a case is run through an implementation: amid hostile memory, and what is owed whatever the values are.

The judged run has NaN beside everything: inputs lie amid NaN (`layouts`), what the implementation allocates
is NaN at first and lies amid NaN (`fences`). Two further runs must give the same: one amid infinities, and
one in plain memory, with zeros beside the inputs and whatever fresh memory holds.

The last run is in the very memory of the one before it, v and d_out negated in place: out and dv must come
out negated, lse, dq and dk as they were (dP = dO V^T and delta = dO . out do not change). A sign costs no
rounding, so this holds to the bit; what was kept from an earlier call, by shape, by address or for whoever
calls next, does not follow.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reports.records import Verdict

from .cases import Case
from .fences import Fences, fenced
from .implementations import Implementation
from .layouts import difference, own_places, place, whole_memory
from .values import Inputs

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Surroundings:
    """What memory holds beside the tensors.

    Attributes:
        floats, integers: beside tensors of such dtypes; in a ragged batch `floats` also fills the rows
            past the last sequence, which nothing may read.
        fenced: whether they also fill, and fence, what the implementation allocates.
    """

    floats: float
    integers: int
    fenced: bool = True


HOSTILE = Surroundings(nan, 2**31 - 1)
REPEATS = {
    "the same amid infinities": Surroundings(inf, -(2**31)),
    "the same in plain memory": Surroundings(0.0, 0, fenced=False),
}
"""The further runs, by the rule that their results are judged by, in order."""

FOLLOWS = "sees the inputs of this call"
"""The rule of the last run, and what is negated for it and comes out negated."""
NEGATED = frozenset({"v", "d_out", "out", "dv"})

SHAPE = "a tensor of the right shape, dtype and device"
UNCHANGED = "input unchanged"
BESIDE = "nothing written beside what it allocated"
OWN_MEMORY = "memory of its own"


@dataclass(frozen=True)
class Execution:
    """What came of a case.

    Attributes:
        results: the tensors of the judged run by name ("out", "lse", "dq", "dk", "dv"), float64:
            (B, H, S, D), (B, H, S); of a ragged batch (1, H, total, D), (1, H, total).
        verdicts: what is owed whatever the values are.
        repeats: the tensors of each further run, by its rule (`REPEATS`, `FOLLOWS`), of the last one with the
            sign of the judged run. Where results are claimed to be deterministic they have a verdict already;
            others may differ within the budget.
    """

    results: dict[str, Array]
    verdicts: list[Verdict]
    repeats: dict[str, dict[str, Array]] = field(default_factory=dict)


def run(
    implementation: Implementation,
    case: Case,
    inputs: Inputs,
    device: torch.device,
    hostile: bool = True,
) -> Execution:
    """Runs a case amid NaN and, if `hostile`, amid infinities, in plain memory, and there with other signs.

    Not once more after a run that broke the contract: in plain memory nothing catches what is written
    beside a tensor, and this process may not survive it.
    """
    results, verdicts = _run(implementation, case, inputs, device, HOSTILE)
    repeats: dict[str, dict[str, Array]] = {}
    if not hostile:
        return Execution(results, verdicts, repeats)
    claims = implementation.claims
    for rule, surroundings in REPEATS.items():
        if _unsafe(verdicts):
            return Execution(results, verdicts, repeats)
        placed = _placed(implementation, case, inputs, device, surroundings)
        repeated, more = _run_on(implementation, case, placed, device, surroundings)
        repeats[rule] = repeated
        verdicts = _merged(verdicts, more, rule.removeprefix("the same "))
        for name, x in results.items():
            if claims.repeatable(name):
                verdicts.append(_same(name, x, repeated.get(name), rule))
    if _unsafe(verdicts):
        return Execution(results, verdicts, repeats)
    _negate(placed)
    negated, more = _run_on(implementation, case, placed, device, surroundings)
    verdicts = _merged(verdicts, more, "v and d_out negated")
    verdicts += [
        verdict
        for name, x in results.items()
        if (verdict := _follows(name, x, negated.get(name), repeated.get(name), claims.repeatable(name)))
    ]
    repeats[FOLLOWS] = {name: -x if name in NEGATED else x for name, x in negated.items()}
    return Execution(results, verdicts, repeats)


def _unsafe(verdicts: list[Verdict]) -> bool:
    """Whether a run broke what keeps this process whole."""
    return any(not v.held and v.rule in (SHAPE, UNCHANGED, BESIDE) for v in verdicts)


def _run(
    implementation: Implementation, case: Case, inputs: Inputs, device: torch.device, around: Surroundings
) -> tuple[dict[str, Array], list[Verdict]]:
    """One run amid some surroundings: results, and verdicts against the contract."""
    placed = _placed(implementation, case, inputs, device, around)
    return _run_on(implementation, case, placed, device, around)


def _placed(
    implementation: Implementation, case: Case, inputs: Inputs, device: torch.device, around: Surroundings
) -> dict[str, Tensor]:
    """The inputs, laid out as the case says."""
    layouts = {"d_lse": implementation.claims.layout_of_d_lse(case.layout)}
    placed = {name: place(name, t, layouts.get(name, case.layout), device, around.floats)
              for name, t in vars(inputs).items() if t is not None}  # fmt: skip
    placed |= {name: place(name, t, case.layout, device, around.integers)
               for name, t in _cu_seqlens(case).items()}  # fmt: skip
    _fill_past(case, placed, around.floats)
    return placed


def _negate(placed: dict[str, Tensor]) -> None:
    """Negates v and d_out where they lie."""
    for name in NEGATED & placed.keys():
        _memory_of_heads(placed[name]).neg_()


def _memory_of_heads(x: Tensor) -> Tensor:
    """(B, H, S, .) without the heads that another's memory serves: expanded ones have one."""
    return x[:, :1] if x.stride(1) == 0 else x


def _run_on(
    implementation: Implementation,
    case: Case,
    placed: dict[str, Tensor],
    device: torch.device,
    around: Surroundings,
) -> tuple[dict[str, Array], list[Verdict]]:
    """One run on inputs that lie in memory: all of that memory is compared with a copy."""
    before = {name: whole_memory(t).clone() for name, t in placed.items()}

    given = {name: _of_rows(case, t) for name, t in placed.items()}
    guarded = fenced(device, around.floats, around.integers) if around.fenced else nullcontext()
    with guarded as fences:
        tensors, verdicts = _call(implementation, case, given, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)

    for name, t in placed.items():
        what = difference(t, before[name])
        verdicts.append(Verdict(name, "contract", UNCHANGED, not what, note=what))
    if fences is not None:
        verdicts.append(_nothing_beside(fences, tensors))
    misshapen = {verdict.tensor for verdict in verdicts if not verdict.held and verdict.rule == SHAPE}
    return {
        name: _of_heads(case, t).detach().cpu().double().numpy()
        for name, t in tensors.items()
        if name not in misshapen
    }, verdicts


def _call(
    implementation: Implementation, case: Case, given: dict[str, Tensor], device: torch.device
) -> tuple[dict[str, Any], list[Verdict]]:
    """Calls the function, and autograd; what both return, and whether it is what was asked for."""
    leaves = {name: given[name].detach() for name in "qkv"}
    wanted = [name for name in "qkv" if case.backward and name in case.grad]
    for name in wanted:
        leaves[name].requires_grad_()

    options = {"causal": case.causal, "scale": case.scale, "return_lse": implementation.claims.lse}
    if case.ragged:
        assert implementation.varlen is not None
        longest = (max((pair[i] for pair in case.pairs), default=0) for i in (0, 1))
        cu_seqlens = (given["cu_seqlens_q"], given["cu_seqlens_k"])
        found = implementation.varlen(*leaves.values(), *cu_seqlens, *longest, **options)
    else:
        found = implementation.function(*leaves.values(), **options)
    tensors: dict[str, Any] = {"out": found}
    if implementation.claims.lse:
        pair = isinstance(found, tuple | list) and len(found) == 2
        tensors = dict(zip(("out", "lse"), found if pair else (found, None), strict=True))

    q = leaves["q"]
    verdicts = [_contract("out", tensors["out"], (*q.shape[:-1], case.dim_v), q.dtype, device)]
    if "lse" in tensors:
        rows = (case.heads_q, case.len_q)
        shape = rows if case.ragged else (case.batch, *rows)
        verdicts.append(_contract("lse", tensors["lse"], shape, torch.float32, device))
    returned = dict(tensors)
    if wanted and all(verdict.held for verdict in verdicts):
        outputs, gradients = [tensors["out"]], [given["d_out"]]
        if case.d_lse and (wanted != ["v"] or tensors["lse"].requires_grad):  # of which v is no part
            outputs.append(tensors["lse"])
            gradients.append(given["d_lse"])
        of_leaves = [leaves[name] for name in wanted]
        found = torch.autograd.grad(outputs, of_leaves, gradients, allow_unused=True)
        for name, gradient in zip(wanted, found, strict=True):
            x = leaves[name]
            verdicts.append(_contract(f"d{name}", gradient, tuple(x.shape), x.dtype, device))
            if isinstance(gradient, Tensor):
                tensors[f"d{name}"] = gradient
    for name, t in returned.items():
        others = given | {other: u for other, u in returned.items() if other != name}
        if isinstance(t, Tensor) and t.layout == torch.strided:
            verdicts.append(_own_memory(name, t, others))
    return tensors, verdicts


# ---------------------------------------------------------------- ragged batches


def _cu_seqlens(case: Case) -> dict[str, Tensor]:
    """Where the sequences of a ragged batch begin and the last one ends, int32 (B + 1,)."""
    if case.lengths is None:
        return {}
    ends = np.cumsum([(0, 0), *case.lengths], axis=0, dtype=np.int32)
    return {f"cu_seqlens_{name}": torch.from_numpy(ends[:, i].copy()) for i, name in enumerate("qk")}


def _fill_past(case: Case, placed: dict[str, Tensor], value: float) -> None:
    """Fills the rows past the last sequence of a ragged batch."""
    for name, past in zip(("q", "d_out", "d_lse", "k", "v"), (case.past[0],) * 3 + (case.past[1],) * 2,
                          strict=True):  # fmt: skip
        if past and name in placed:
            x = placed[name]
            _memory_of_heads(x)[:, :, x.shape[2] - past :] = value


def _of_rows(case: Case, x: Tensor) -> Tensor:
    """(1, H, total, D) as a ragged batch has it, (total, H, D); (1, H, total) as (H, total)."""
    if not case.ragged or x.ndim == 1:
        return x
    return x[0].transpose(0, 1) if x.ndim == 4 else x[0]


def _of_heads(case: Case, x: Tensor) -> Tensor:
    """The inverse."""
    if not case.ragged:
        return x
    return x.transpose(0, 1)[None] if x.ndim == 3 else x[None]


# ---------------------------------------------------------------- verdicts


_shapes_before: dict[str, tuple[int, ...]] = {}
"""What each result's shape had to be in the call before."""


def _contract(name: str, t: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Verdict:
    """Whether a result is a tensor of the right shape, dtype and device."""
    if not isinstance(t, Tensor):
        return Verdict(name, "contract", SHAPE, False, note=f"it is a {type(t).__name__}")
    wrong = []
    if tuple(t.shape) != shape:
        stale = ", but that of the call before" if tuple(t.shape) == _shapes_before.get(name) else ""
        wrong.append(f"shape {tuple(t.shape)}, not {shape}{stale}")
    _shapes_before[name] = shape
    if t.dtype != dtype:
        wrong.append(f"{t.dtype}, not {dtype}")
    if t.device.type != device.type:
        wrong.append(f"on {t.device}, not on {device}")
    return Verdict(name, "contract", SHAPE, not wrong, note="; ".join(wrong))


def _own_memory(name: str, t: Tensor, others: dict[str, Any]) -> Verdict:
    """Whether a result lies in memory that is neither an input's nor another result's, each element apart.

    Whoever writes into it, as `out += residual` does, would change that too.
    """
    start = t.untyped_storage().data_ptr()
    shared = [
        other
        for other, u in others.items()
        if isinstance(u, Tensor) and u.layout == torch.strided and t.numel() and u.numel()
        and u.untyped_storage().data_ptr() == start
    ]  # fmt: skip
    wrong = [f"it shares memory with {', '.join(shared)}"] if shared else []
    if _overlaps(t):
        wrong.append(f"its own elements share memory: shape {tuple(t.shape)}, strides {t.stride()}")
    return Verdict(name, "contract", OWN_MEMORY, not wrong, note="; ".join(wrong))


def _overlaps(t: Tensor) -> bool:
    """Whether two elements of a tensor are one place of memory."""
    extent = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride < extent:  # dimensions that interleave may yet be apart
            return t.numel() > 0 and bool(own_places(t).sum() < t.numel())
        extent += stride * (size - 1)
    return False


def _nothing_beside(fences: Fences, results: dict[str, Any]) -> Verdict:
    """Whether everything allocated in Python was written within its bounds."""
    violations = fences.violations(results)
    note = ". ".join(violations[:3])
    if len(violations) > 3:
        note += f". And {len(violations) - 3} more"
    return Verdict("memory", "contract", BESIDE, not violations, note=note)


def _same(name: str, x: Array, again: Array | None, rule: str) -> Verdict:
    """Whether a further run gave the same bits. NaN is NaN, whichever."""
    if again is None:
        return Verdict(name, "contract", rule, False, note="it did not give this tensor")
    differ = (x.view(np.int64) != again.view(np.int64)) & ~(np.isnan(x) & np.isnan(again))
    if not differ.any():
        return Verdict(name, "contract", rule, True)
    where = tuple(int(i) for i in np.argwhere(differ)[0])
    note = f"{differ.sum()} elements differ, the first {again[where]:g} there, {x[where]:g} amid NaN"
    return Verdict(name, "contract", rule, False, where=where, note=note)


def _follows(name: str, x: Array, again: Array | None, last: Array | None, exactly: bool) -> Verdict | None:
    """Whether a result of negated inputs is that of these inputs, and not what the call before gave.

    Args:
        name, x: a tensor of the judged run.
        again: of the run whose v and d_out are negated.
        last: of the run before that, in the same memory.
        exactly: whether each run is claimed to give the same bits. If not, the hard bound decides.
    """
    if again is None:
        return Verdict(name, "contract", FOLLOWS, False, note="it did not give this tensor")
    if name in NEGATED and last is not None and alike(again, last).all():
        kept = ~np.isnan(last) & (last != 0)
        if kept.any():
            where = tuple(int(i) for i in np.argwhere(kept)[0])
            note = f"it is the result of the call before, {last[where]:g}: v and d_out were negated since"
            return Verdict(name, "contract", FOLLOWS, False, where=where, note=note)
    if not exactly:
        return None
    expected, sign = (-x, "the negative of ") if name in NEGATED else (x, "")
    differ = ~alike(again, expected)
    if not differ.any():
        return Verdict(name, "contract", FOLLOWS, True)
    where = tuple(int(i) for i in np.argwhere(differ)[0])
    note = (
        f"with v and d_out negated it is not {sign}what it was: {differ.sum()} elements differ,"
        f" the first {again[where]:g}, not {expected[where]:g}"
    )
    return Verdict(name, "contract", FOLLOWS, False, where=where, note=note)


def alike(x: Array, y: Array) -> NDArray[np.bool_]:
    """Where numbers are equal; NaN is NaN, and zero has no sign."""
    return (x == y) | (np.isnan(x) & np.isnan(y))


def _merged(verdicts: list[Verdict], more: list[Verdict], run: str) -> list[Verdict]:
    """The verdicts of the judged run; where one held and a further run broke it, that run's."""
    later = {(v.tensor, v.rule): v for v in more if not v.held}
    return [
        Verdict(w.tensor, w.reference, w.rule, False, note=f"{run}: {w.note}")
        if v.held and (w := later.get((v.tensor, v.rule)))
        else v
        for v in verdicts
    ]
