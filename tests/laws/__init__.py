"""Laws of attention that need no reference: they hold at any size, for any implementation.

A law compares calls of an implementation with each other, or one with a closed form. Where it holds to
rounding, each side has its own hard bound (`magnitudes`), and the limit of a difference is their sum: no
tolerance is tuned. Bitwise laws are judged so only where the implementation claims to be deterministic, or
batch invariant where something is computed at another place, to rounding elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..cases import Case
from ..implementations import Implementation
from . import algebra, parts, sums, symmetries
from .registry import LAWS, Law
from .trial import Finding, NotApplicable, NotClaimed, Trial

__all__ = ["LAWS", "Finding", "Law", "Outcome", "Trial", "broken", "outcome", "outcomes"]

MODULES = (symmetries, algebra, parts, sums)
"""Where the laws are; each module registers its own."""


@dataclass(frozen=True)
class Outcome:
    """What became of a law on a case.

    Attributes:
        law: its name.
        status: "held", "broken", "not claimed", "not applicable", or "no power": nothing could be judged.
        reason: why it was not judged.
        findings: where it does not hold.
        judged: elements that were compared.
    """

    law: str
    status: str
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    judged: int = 0


def broken(
    case: Case, implementation: Implementation, device: torch.device, dtype: torch.dtype | None = None
) -> list[Finding]:
    """All laws that say something about a case: what does not hold."""
    found = outcomes(case, implementation, device, dtype)
    return [finding for outcome in found for finding in outcome.findings]


def outcomes(
    case: Case, implementation: Implementation, device: torch.device, dtype: torch.dtype | None = None
) -> list[Outcome]:
    """What became of each law on a case.

    Args:
        case: any.
        implementation: under test.
        device: where it runs.
        dtype: instead of the case's; for float64, which proves the laws themselves.
    """
    trial = Trial(case, implementation, device, dtype)
    return [outcome(law, trial) for law in LAWS.values()]


def outcome(law: Law, trial: Trial) -> Outcome:
    """What became of one law; the trial's own call and bounds are kept for the next.

    Raises:
        Exception: whatever the implementation raises.
    """
    if refused := trial.claims.refusal(trial.case):
        return Outcome(law.name, "not claimed", refused)
    trial.findings, trial.judged, trial.law = [], 0, law.name
    try:
        law.check(trial)
    except (NotClaimed, NotApplicable) as why:
        if not trial.judged:
            status = "not claimed" if isinstance(why, NotClaimed) else "not applicable"
            return Outcome(law.name, status, str(why))
    findings = tuple(trial.findings)
    if findings:
        return Outcome(law.name, "broken", "", findings, trial.judged)
    status = "held" if trial.judged else "no power"
    reason = "" if trial.judged else "rounding errors may be as large as the values everywhere"
    return Outcome(law.name, status, reason, (), trial.judged)
