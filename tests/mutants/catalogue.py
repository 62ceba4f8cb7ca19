"""All mutants, by kind."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from . import (
    causal,
    configuration,
    dead_rows,
    gradients,
    groups,
    large_scores,
    log_sum_exp,
    numerics,
    offsets,
    online_softmax,
    plumbing,
    ragged,
    slices,
    strides,
    tails,
)
from .mutant import Mutant

KINDS: Mapping[str, ModuleType] = {
    "tails and bounds": tails,
    "causal alignment and loop bounds": causal,
    "dead rows": dead_rows,
    "ragged batches": ragged,
    "strides": strides,
    "slices and row pointers": slices,
    "32-bit offsets": offsets,
    "online softmax": online_softmax,
    "large scores": large_scores,
    "numerics and accumulators": numerics,
    "lse": log_sum_exp,
    "backward algebra": gradients,
    "groups of heads": groups,
    "autograd plumbing": plumbing,
    "configuration and caching": configuration,
}
"""The modules of the catalogue; each has a tuple MUTANTS, whose kind is the key here."""

CATALOGUE: tuple[Mutant, ...] = tuple(mutant for module in KINDS.values() for mutant in module.MUTANTS)


def by_name(name: str) -> Mutant:
    """Raises KeyError if there is none of that name."""
    return {mutant.name: mutant for mutant in CATALOGUE}[name]
