"""What a law is, and the list of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..cases import Case
from .trial import Trial


@dataclass(frozen=True)
class Law:
    """A statement about any attention.

    Attributes:
        name: the function's.
        statement: the mathematics, in one sentence.
        check: compares calls; what does not hold is among the trial's findings.
        suited: a case near the given one about which the law says something, if there is one.
    """

    name: str
    statement: str
    check: Callable[[Trial], None]
    suited: Callable[[Case], Case]


LAWS: dict[str, Law] = {}
"""All laws by name."""


def law(suited: Callable[[Case], Case] = lambda case: case) -> Callable[[Callable[[Trial], None]], Law]:
    """Registers a function; its docstring's first paragraph is the statement."""

    def registered(check: Callable[[Trial], None]) -> Law:
        statement = " ".join((check.__doc__ or "").split("\n\n")[0].split())
        LAWS[check.__name__] = found = Law(check.__name__, statement, check, suited)
        return found

    return registered


def with_backward(case: Case) -> Case:
    return replace(case, grad="qkv")


def of_two(case: Case) -> Case:
    """With two batch entries or sequences."""
    if case.batch >= 2:
        return case
    return replace(case, lengths=(case.lengths or ((3, 5),)) * 2) if case.ragged else replace(case, batch=2)
