"""Which case shows which planted fault, from the committed kill matrix; and the cases to begin with.

Only what the numbers of one call show counts, for contiguous tensors: a vector carries no strides, and
whoever reads it makes no second call amid other memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.cases import Case, parse_case
from tests.mutants import matrix
from tests.mutants.catalogue import CATALOGUE

from ..errors import ReportError
from .format import Fault

NUMERIC = frozenset({"hard bound", "largest z", "rms z", "bias", "exact"})
"""Columns of the matrix whose rules a vector's budget can apply."""

KEEP_STATE = frozenset({"configuration and caching"})
"""Kinds of faults that may hang on the call before: they count where the first call of all showed them."""

MOST, LARGEST = 24, 350_000
"""Cases of the default set, and the bytes of one of them, about."""

BROAD = (
    "b1_h2x1_s17x21_d16x16_float16_causal_scale=0.3_normal_bhsd_grad=qkv_dlse_seed0",
    "b1_h2x1_s17x21_d16x16_float32_full_scale=-0.2_normal_bhsd_grad=qkv_nodlse_seed0",
    "b1_h2x1_s17x19_d16x16_float16_causal_scale=auto_exact_bhsd_grad=qkv_dlse_seed0",
    "b1_h4x2_s17x40_d16x24_bfloat16_causal_scale=auto_normal_bhsd_grad=qkv_nodlse_seed0",
)
"""Begin the default set, whatever the matrix says of them. It knows where a fault showed first, not where
else: a set made for it alone has hardly a group of heads, and no exact result. Few kernels take a gradient of
the lse: of each dtype there are gradients without it."""


def catches(path: Path = matrix.COMMITTED) -> dict[str, list[Fault]]:
    """The planted faults that a case shows in its numbers, by the case's id.

    Args:
        path: of a kill matrix.

    Raises:
        ReportError: if it cannot be read.
    """
    try:
        scores = matrix.read(path)
    except (OSError, ValueError) as error:
        raise ReportError(f"{path}: {error}") from None
    planted = {mutant.name: mutant for mutant in CATALOGUE}
    found: dict[str, list[Fault]] = {}
    for score in scores:
        mutant = planted.get(score.name)
        if mutant is None or mutant.equivalent or mutant.lane != "cpu":
            continue
        kept = mutant.kind in KEEP_STATE
        kills = [kill for column, kill in score.found.items() if column in NUMERIC]
        cases = {kill.case for kill in kills if kill.cases == 1 or not kept}
        if NUMERIC & score.witness.keys() and not (kept or mutant.witnessed_by_test):
            cases.add(mutant.witness)
        for case in sorted(cases):
            if _in_memory_as_it_is_written(parse_case(case), mutant.kind):
                found.setdefault(case, []).append(Fault(mutant.name, mutant.kind, mutant.does))
    return found


def _in_memory_as_it_is_written(case: Case, kind: str) -> bool:
    """Whether the case's memory is that of a vector, as far as a fault of this kind can tell.

    The gradient of a ragged lse is not contiguous in the suite: (total, heads) as (heads, total).
    """
    if case.ragged:
        return case.layout in ("bshd", "sbhd") and kind != "strides"
    return case.layout == "bhsd"


def default_set(
    found: Mapping[str, list[Fault]] | None = None, most: int = MOST, largest: int = LARGEST
) -> list[Case]:
    """Few small cases that show many faults: `BROAD`, then always the one that adds most to those before.

    Args:
        found: what each case catches; of the committed matrix if None.
        most: cases.
        largest: bytes of one's file, about. Of cases that add as much the smallest is taken.
    """
    found = catches() if found is None else found
    sizes = {id: size(parse_case(id)) for id in found}
    left = {id: {fault.name for fault in found[id]} for id in found if sizes[id] <= largest}
    chosen = list(BROAD[:most])
    shown = {fault.name for id in chosen for fault in found.get(id, [])}
    while len(chosen) < most and any(names - shown for names in left.values()):
        chosen.append(min(left, key=lambda id: (-len(left[id] - shown), sizes[id], id)))
        shown |= left[chosen[-1]]
    return [parse_case(id) for id in chosen]


def size(case: Case) -> int:
    """About how many bytes the numbers of a case's vector take."""
    entries = 1 if case.ragged else case.batch
    queries, keys = entries * case.heads_q * case.len_q, entries * case.heads_kv * case.len_k
    elements = queries * case.dim_v
    if case.backward:
        elements += (queries + keys) * case.dim + keys * case.dim_v
    value, errors, own = 8, 8, 4 if case.dtype == "float32" else 2
    alternatives = 0 if case.dtype == "float32" else 16
    return elements * (value + errors + alternatives + own)
