"""Whether a comparison is broken always or sometimes, as far as its record tells."""

from __future__ import annotations

from .records import Record

NOT_AGAIN = "not red when it was repeated: "
"""What the reason of such a record begins with."""


def always(record: Record) -> tuple[str, str]:
    """One of "always", "sometimes", "once", and why that is said.

    A case that runs three times has a verdict on each further run, by tensor: that it gave the same bits,
    where that is claimed; else what broke its hard bound.
    """
    from tests.execution import REPEATS

    if record.reason.startswith(NOT_AGAIN):
        return "sometimes", "the same case was not red when it ran again"
    further = [
        v
        for v in record.verdicts
        if v.reference in ("contract", "oracle") and v.rule.startswith(tuple(REPEATS))
    ]
    exact = [v for v in further if v.rule in REPEATS]
    if differ := [v for v in exact if not v.held]:
        names = ", ".join(dict.fromkeys(v.tensor for v in differ))
        which = " and ".join(dict.fromkeys(v.rule.removeprefix("the same ") for v in differ))
        return "sometimes", f"runs of the same case differ: {names} {which}"
    bounds = [v for v in further if v not in exact]
    tensors = {
        v.tensor
        for v in record.verdicts
        if not v.held and v.rule in ("hard bound", "finite where it should be")
    }
    of_run = {
        rule: [v for v in bounds if v.rule.startswith(rule) and v.tensor in tensors] for rule in REPEATS
    }
    held = [rule for rule, verdicts in of_run.items() if verdicts and all(v.held for v in verdicts)]
    if held:
        which = " and ".join(rule.removeprefix("the same ") for rule in held)
        return "sometimes", f"further runs of the same case were within the hard bound: {which}"
    runs = 1 + len({rule for rule in REPEATS if any(v.rule.startswith(rule) for v in further)})
    if exact and runs > 1:
        return "always", f"{runs} runs gave the same bits"
    if bounds and runs > 1 and tensors:
        return "always", f"each of {runs} runs broke its hard bound"
    if record.origin == "generated":
        return "always", "it was red again when it was repeated"
    return "once", "it ran once here: the replay line runs it three times"
