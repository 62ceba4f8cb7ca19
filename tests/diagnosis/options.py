"""Results that are right for something else that was asked for: other options, or an earlier call."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from reference.oracle import Result

from ..cases import Case
from .piece import Calls, Fit, Piece, are, how_sure, joined, no_surer, sure, tensors_of

LARGEST = 2**19
"""Most scores for which other options are tried: each costs an oracle."""


def other_options(pieces: Sequence[Piece]) -> Iterator[str]:
    """Results that are right for other options than those that were given."""
    if sum(piece.scores for piece in pieces) > LARGEST:
        return
    for words, changes in _options([piece.case for piece in pieces]):
        exact = [piece.under(**changes) for piece in pieces]
        tried = [
            {name: Fit.of(x, getattr(other, name), other.dtype) for name, x in piece.results.items()}
            for piece, other in zip(pieces, exact, strict=True)
        ]
        # where what is right fits them too, they tell nothing
        vague = {name for name in tensors_of(pieces) if _alike(name, pieces, exact)}
        yield from _explained(pieces, exact, tried, f"as with {words}", vague)


def _alike(name: str, pieces: Sequence[Piece], others: Sequence[Result]) -> bool:
    """Whether the right values of a tensor, or zeros, would do for others too, in most of what is wrong.

    Zeros do where an element's own rounding error may be as large as it is.
    """

    def would_do(by: float) -> bool:
        with np.errstate(invalid="ignore"):  # 0 times the lse of a row that sees no key
            found = joined(
                Fit.of(by * getattr(piece.exact, name).value, getattr(other, name), other.dtype).within[
                    piece.fits[name].wrong & (getattr(other, name).value != 0)
                ]
                for piece, other in zip(pieces, others, strict=True)
            )
        return bool(found.size) and bool(found.mean() > 0.5)

    return would_do(1.0) or would_do(0.0)


def _options(cases: Sequence[Case]) -> Iterator[tuple[str, dict[str, Any]]]:
    case = cases[0]
    if case.causal:
        yield "causal=False", {"causal": False}
        if any(each.len_q != each.len_k for each in cases):
            yield "a causal mask aligned at the top left", {"alignment": "top-left"}
    else:
        yield "causal=True", {"causal": True}
    if case.scale is None:
        yield "scale=1", {"scale": 1.0}
    else:
        yield "the default scale", {"scale": None}


def earlier_call(pieces: Sequence[Piece], calls: Calls) -> Iterator[str]:
    """A result that is right for the inputs of an earlier call. (Its last run may have had v negated.)"""
    if len(pieces) != 1 or "out" not in pieces[0].results:
        return
    (piece,) = pieces
    x, wrong = piece.results["out"], piece.fits["out"].wrong
    for which, call in calls.of_shape(x.shape):
        if call.case.dtype != piece.case.dtype or _same_numbers(call.case, piece.case):
            continue
        signed = [Fit.of(sign * call.out.value, piece.exact.out, call.dtype) for sign in (1, -1)]
        if any(fit.within.all() for fit in signed):
            continue  # of the same inputs: that would tell nothing
        for sign in (1, -1):
            fit = Fit.of(sign * x, call.out, call.dtype)
            words = f"out is the result of {which} ({call.case.id})"
            if sentences := list(sure(fit.within | ~fit.judged, fit.judged & wrong, wrong, words)):
                yield from sentences
                return


def _same_numbers(one: Case, other: Case) -> bool:
    """Whether two cases have the same inputs, whatever is asked of them."""
    asked = {name: getattr(other, name) for name in ("causal", "scale", "layout", "grad", "d_lse")}
    return replace(one, **asked) == other


def _explained(
    pieces: Sequence[Piece],
    exact: Sequence[Result],
    tried: Sequence[Mapping[str, Fit]],
    words: str,
    vague: Container[str],
) -> Iterator[str]:
    """The tensors that a hypothesis explains, but for some, as one sentence for each degree of certainty."""
    found: dict[str, list[str]] = {}
    for name in tensors_of(pieces):
        if name in vague:
            continue
        wrong = joined(piece.fits[name].wrong for piece in pieces)
        within = joined(fits[name].within | ~fits[name].judged for fits in tried)
        judged = joined(fits[name].judged for fits in tried)
        if (wrong & ~judged).any():  # with those options nothing could be said about what is wrong
            continue
        with np.errstate(invalid="ignore"):
            x = joined(piece.results[name] for piece in pieces)[wrong]
            left, error = (
                np.abs(x - joined(getattr(of, name).value for of in those)[wrong])
                for those in (exact, [piece.exact for piece in pieces])
            )
        if how := no_surer(how_sure(within, judged, wrong), left, error):
            found.setdefault(how, []).append(name)
    for how, names in found.items():
        yield f"{how}: {are(names)} {words}"
