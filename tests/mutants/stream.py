"""The cases that look for a fault, in order: the likeliest first, then the suite's own, mixed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from ..cases import Case
from ..corpus import read_corpus
from ..edges import edges
from ..implementations import load
from ..recipes import recipes
from ..session import Session, interpreted
from ..strategies import SHARD, shard_of
from ..strategies import cases as generated_cases

LIKELIEST = Path(__file__).with_name("likeliest.txt")
"""Case ids that find most mutants, the first the most: `python -m tests.mutants order` writes it."""

GENERATED = 240
LARGEST = 3_000
"""Cases that are generated, and most scores of each: half a second of the interpreter."""


def cases(device: torch.device) -> list[tuple[Case, str]]:
    """Cases and their origins. A recipe runs three times, amid different memory."""
    session = Session("triton", Path("/dev/null"))
    named = [
        (case, "recipe")
        for of_number in recipes(session.tile(Case(dim=16, dim_v=16))).values()
        for case in of_number
    ]
    listed = [(case, "edge") for case in edges(session.tile(Case(dim=32, dim_v=32)), interpreted())]
    drawn = [(case, "generated") for case in _generated()]
    likeliest = [(case, "recipe") for case in read_corpus(LIKELIEST)]
    rest = [*named, *listed]
    Random(0).shuffle(rest)  # as they are written, cases of a kind are neighbours
    # a generated case beside each two of the others
    mixed = [
        pair
        for number in range(len(rest) // 2 + 1)
        for pair in (*rest[2 * number : 2 * number + 2], *drawn[number : number + 1])
    ]
    return [*likeliest, *mixed, *drawn[len(rest) // 2 + 1 :]]


@cache
def _generated() -> list[Case]:
    """What the suite generates too, smaller; without running anything."""
    session = Session("triton", Path("/dev/null"))
    claims = load("triton").claims
    found: list[Case] = []
    for shard in range(GENERATED // SHARD):
        dtype, dims = shard_of(shard, claims, interpreted())
        tile = session.tile(Case(dim=dims[0], dim_v=dims[1], dtype=dtype))

        @seed(shard)
        @settings(max_examples=SHARD, deadline=None, database=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(generated_cases(claims, dtype, dims, tile, LARGEST))
        def collect(case: Case) -> None:
            found.append(case)

        collect()
    # dtypes and dimensions alternate
    return [case for offset in range(SHARD) for case in found[offset::SHARD]]
