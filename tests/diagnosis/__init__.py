"""What a wrong result looks like: hypotheses about a red comparison, each tried on all of its elements.

What a result is instead is *certain* if every element that can be judged lies within its own hard bound under
that hypothesis (about twice that, if a fault is computed), some lie outside of the bound of what was asked
for, and no other hypothesis of its kind explains it; it is *likely* if nearly all do, or if several explain
it. Where a result is wrong is *certain* if all of that place is wrong and nothing else. No more is said. A
diagnosis explains and decides nothing: whether a result is right is decided by `judge`.

    places         batch entries, heads, rows, columns, tiles: where it is wrong
    memory         NaN, what was not written, what lies beside the tensors
    options        right for other options, or for an earlier call
    values         a factor, a sign, another place, another tensor, fewer digits
    suppositions   faults that are computed: keys left out or too many, heads mixed up, no delta
    precision      small errors everywhere: their size, their sign, whether they grow with the tiles
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from .memory import beside, nan_rows, not_written, zeros
from .options import earlier_call, other_options
from .piece import CERTAIN, LIKELY, Calls, Earlier, Fit, Piece
from .places import batch_entries, heads, kv_heads, rows
from .precision import small_errors
from .suppositions import as_if
from .values import digits, factor, moved, swapped

__all__ = ["CERTAIN", "LIKELY", "Calls", "Earlier", "Fit", "Piece", "diagnose"]

Hypothesis = Callable[[Sequence[Piece]], Iterator[str]]

MEMORY: tuple[Hypothesis, ...] = (nan_rows, not_written, beside, zeros)
PLACES: tuple[Hypothesis, ...] = (batch_entries, heads, kv_heads)
VALUES: tuple[Hypothesis, ...] = (other_options, factor, swapped, moved)


def diagnose(pieces: Sequence[Piece], calls: Calls | None = None) -> list[str]:
    """Sentences about a red comparison, what is certain first; none if nothing fits.

    It never raises: a hypothesis that does is named in a sentence, and the others are tried.

    Args:
        pieces: all of it.
        calls: the dense calls before, if they are known.
    """
    try:
        return _diagnosed(pieces, calls) if pieces else []
    except Exception as error:  # the reader of a red comparison must see it, whatever this makes of it
        return [f"no diagnosis: {type(error).__name__}: {error}"]


def _diagnosed(pieces: Sequence[Piece], calls: Calls | None) -> list[str]:
    found: list[str] = []
    whole: set[str] = set()
    explained: set[str] = set()

    def attempt(name: str, hypothesis: Callable[[], Iterator[str]]) -> list[str]:
        try:
            sentences = list(hypothesis())
        except Exception as error:  # the others may know
            sentences = [f"no diagnosis by {name}: {type(error).__name__}: {error}"]
        found.extend(sentences)
        return sentences

    if any(fit.wrong.any() for piece in pieces for fit in piece.fits.values()):
        for hypothesis in MEMORY:
            attempt(hypothesis.__name__, partial(hypothesis, pieces))
        values: list[str] = []
        for hypothesis in VALUES:
            values += attempt(hypothesis.__name__, partial(hypothesis, pieces))
        if calls is not None:
            values += attempt("earlier_call", partial(earlier_call, pieces, calls))
        values += attempt("as_if", partial(as_if, pieces, _tensors(values, CERTAIN)))
        whole, explained = _tensors(values, CERTAIN), _tensors(values, f"{CERTAIN}|{LIKELY}")
    attempt("digits", partial(digits, pieces))
    small = _tensors(attempt("small_errors", partial(small_errors, pieces, explained)), LIKELY)
    if not small:  # of which some happen to be large enough to be seen, anywhere
        for hypothesis in PLACES:
            attempt(hypothesis.__name__, partial(hypothesis, pieces))
    attempt("rows", partial(rows, pieces, whole | small))
    return sorted(dict.fromkeys(found), key=lambda sentence: not sentence.startswith(CERTAIN))


def _tensors(sentences: Sequence[str], how: str) -> set[str]:
    """The tensors that sentences of this certainty, a pattern, speak of."""
    tensor = "(?:out|lse|dq|dk|dv)"
    matches = (re.match(rf"(?:{how}): ({tensor}(?:, {tensor})*)\b", sentence) for sentence in sentences)
    return {name for match in matches if match for name in match[1].split(", ")}
