"""A batch as the dense batches that the references and the judge know, and their findings as one.

Sequences of equal lengths are one dense batch, each an entry: what holds for the entries of a batch holds
for them, and 70,000 sequences of one row each are one call of the oracle. A dense batch is its own only part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from reports.records import TensorSummary, Verdict

from .cases import Case

BY_KEY = frozenset({"k", "v", "dk", "dv"})
"""Tensors whose rows are keys; those of all others are queries."""


def handed_over(tensor: str, head: int, row: int, *dimension: int) -> tuple[int, ...]:
    """A place in a ragged batch's tensor as that is handed over: (row, head, dimension); lse (head, row)."""
    return (head, row) if tensor == "lse" else (row, head, *dimension)


@dataclass(frozen=True)
class Part:
    """What is computed in one piece.

    Attributes:
        case: dense.
        sequences: of a ragged batch, which of its sequences each batch entry is; of a dense one None.
        rows_q, rows_k: the first row of each of these sequences in the ragged tensors.
    """

    case: Case
    sequences: tuple[int, ...] | None = None
    rows_q: tuple[int, ...] = ()
    rows_k: tuple[int, ...] = ()

    def of(self, name: str, x: Any) -> Any:
        """This part of a tensor.

        Args:
            name: which tensor it is: "q", "d_lse", "out", "dk", ...
            x: (1, H, total, ...), an array of NumPy or PyTorch; of a dense batch (B, H, S, ...).

        Returns:
            (B, H, S, ...), B being the number of sequences.
        """
        if self.sequences is None:
            return x
        first, length = (self.rows_k, self.case.len_k) if name in BY_KEY else (self.rows_q, self.case.len_q)
        rows = np.array(first)[:, None] + np.arange(length)
        return x[0][:, rows].swapaxes(0, 1)

    def located(self, verdict: Verdict) -> Verdict:
        """A verdict about this part as one about the whole batch: its place, and which sequence it is in.

        Places are in the tensors as they are handed over: (row, head, dimension), of the lse (head, row).
        """
        if self.sequences is None:
            return verdict
        where, about = verdict.where, None
        if where is not None:
            entry, head, row, *dimension = where
            about = self.sequences[entry]
            row += (self.rows_k if verdict.tensor in BY_KEY else self.rows_q)[entry]
            where = handed_over(verdict.tensor, head, row, *dimension)
        elif len(self.sequences) == 1:
            about = self.sequences[0]
        which = f"{len(self.sequences)} sequences" if about is None else f"sequence {about}"
        note = f"{which}: {self.case.len_q} queries on {self.case.len_k} keys"
        note += f"; {verdict.note}" if verdict.note else ""
        return msgspec.structs.replace(verdict, where=where, note=note)


def parts(case: Case) -> list[Part]:
    """The parts of a case, in the order of their first sequences."""
    if case.lengths is None:
        return [Part(case)]
    rows_q, rows_k = (
        [0, *np.cumsum([pair[side] for pair in case.lengths], dtype=int).tolist()] for side in (0, 1)
    )
    groups: dict[tuple[int, int], list[int]] = {}
    for number, pair in enumerate(case.lengths):
        groups.setdefault(pair, []).append(number)
    sequences = case.sequences()
    return [
        Part(
            replace(sequences[numbers[0]], batch=len(numbers)),
            tuple(numbers),
            tuple(rows_q[number] for number in numbers),
            tuple(rows_k[number] for number in numbers),
        )
        for numbers in groups.values()
    ]


def past_rows(case: Case, results: Mapping[str, NDArray[np.float64]]) -> list[Verdict]:
    """Whether the rows past the last sequence are what an empty one's would be: 0, the lse -inf.

    Args:
        case: ragged, or dense and then without such rows.
        results: the implementation's tensors, (1, H, total, ...).
    """
    found = []
    for name, x in results.items():
        past = case.past[name in BY_KEY]
        if not past:
            continue
        first = x.shape[2] - past
        behind = x[:, :, first:]
        nothing = -math.inf if name == "lse" else 0.0
        wrong = (behind != nothing) | (np.signbit(behind) != (name == "lse"))
        count = int(wrong.sum())
        where, note = None, ""
        if count:
            _, head, row, *dimension = (int(i) for i in np.argwhere(wrong)[0])
            where = handed_over(name, head, first + row, *dimension)
            note = f"{count} elements differ; the first is {behind[wrong][0]:.8g}"
        rule = f"rows past the last sequence: {'-inf' if name == 'lse' else '0'}"
        found.append(Verdict(name, "contract", rule, not count, float(count), 0.0, where, note))
    return found


def worst(found: Iterable[Verdict]) -> list[Verdict]:
    """Of each rule for each tensor one verdict: that which failed by most, or came closest to it."""
    kept: dict[tuple[str, str, str], Verdict] = {}
    for verdict in found:
        key = verdict.tensor, verdict.reference, verdict.rule
        if key not in kept or _badness(verdict) > _badness(kept[key]):
            kept[key] = verdict
    return list(kept.values())


def _badness(verdict: Verdict) -> tuple[bool, float]:
    return not verdict.held, verdict.margin


def total(summaries: list[TensorSummary]) -> TensorSummary:
    """The summary of a tensor from those of its parts."""

    def largest(name: str) -> float:
        return float(np.max([getattr(s, name) for s in summaries], initial=0.0))  # a NaN is the largest

    judged = sum(s.judged for s in summaries)
    squares = sum(s.judged * (s.rms_z or 0.0) ** 2 for s in summaries)
    fa2 = [s.fa2 for s in summaries if s.fa2 is not None]
    return TensorSummary(
        elements=sum(s.elements for s in summaries),
        judged=judged,
        budget_use=largest("budget_use"),
        max_z=largest("max_z"),
        rms_z=math.sqrt(squares / judged) if judged else 0.0,
        fa2=max(fa2, default=None),
        histogram=tuple(map(sum, zip(*(s.histogram for s in summaries if s.histogram), strict=True))),
    )
