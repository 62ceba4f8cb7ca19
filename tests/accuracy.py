"""The corpus by which the accuracy of an implementation is followed from change to change.

Every case is legal ground for a kernel; none is an edge. What changes slowly is seen in averages: a P that is
cut off instead of rounded, an accumulator of fewer bits, a sum in another order. Lengths span several tiles
both ways, so that there are enough elements for a root mean square that hardly depends on the seed.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

from .cases import DTYPES, Case

DIMS = ((16, 16), (32, 32), (64, 64), (96, 96), (128, 128), (256, 256), (64, 32), (40, 104))
"""D and Dv."""

LENGTHS = ((129, 257), (200, 200), (65, 383), (300, 130))
"""Sq and Sk."""

VALUES = ("normal", "mean", "large", "normal", "growing", "normal", "tiny")
HEADS = ((2, 2), (4, 2), (2, 1))
LAYOUTS = ("bhsd", "bhsd", "bshd", "packed", "strided")

RAGGED = ((129, 129), (1, 200), (70, 31), (64, 257), (33, 33))
"""Sq and Sk of the sequences of a ragged batch."""

ANOTHER = 1000
"""What a seed differs by from that of the same case in another run."""


def corpus(run: int = 0) -> list[Case]:
    """About 200 cases.

    Args:
        run: number of the run: the same cases with other values for each.
    """
    values, heads, layouts = cycle(VALUES), cycle(HEADS), cycle(LAYOUTS)
    found: list[Case] = []
    for dtype, (dim, dim_v), causal, lengths in product(DTYPES, DIMS, (False, True), LENGTHS):
        heads_q, heads_kv = next(heads)
        found.append(
            Case(
                heads_q=heads_q,
                heads_kv=heads_kv,
                len_q=lengths[0],
                len_k=lengths[1],
                dim=dim,
                dim_v=dim_v,
                dtype=dtype,
                causal=causal,
                values=next(values),
                layout=next(layouts),
                d_lse=bool(len(found) % 2),
            )
        )
    for dtype, causal, dim in product(DTYPES, (False, True), (64, 128)):
        found.append(
            Case(heads_q=4, heads_kv=2, dim=dim, dim_v=dim, dtype=dtype, causal=causal, lengths=RAGGED,
                 layout="bshd")
        )  # fmt: skip
    return [replace(case, seed=number + ANOTHER * run) for number, case in enumerate(found)]
