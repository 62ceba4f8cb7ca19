"""What a diagnosis looks at: the results of a call, what they should be, and which elements are wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from reference.budget import Dtype
from reference.emulation import Tiles
from reference.error_model import Estimate
from reference.oracle import Result

from ..cases import Case
from .variations import Attention

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

CERTAIN, LIKELY = "certain", "likely"

NEARLY_ALL = 0.95
"""Of the elements that are judged, and of those that are wrong, how many a likely hypothesis explains."""

LARGEST_KEPT, MOST_KEPT = 2**13, 64
"""Elements of an earlier call's out, and calls, that are kept to compare with."""

FAR = 10.0
"""Standard deviations beyond which an element is not called right, whatever its bound is."""

LISTED = 4
"""Rows that are listed; more are counted."""


@dataclass(frozen=True)
class Piece:
    """What one dense call gave, of a ragged batch its sequences of one length.

    Attributes:
        case: dense.
        results: by name, (B, H, S, D); of the lse (B, H, S).
        exact: what they should be.
        under: the exact result if the options (causal, scale, alignment) were others.
        sequences: of a ragged batch, which of its sequences each batch entry is; of a dense one None.
        tensors: q, k, v, d_out and d_lse, the last two None if there is none; empty if not known.
        tiles: those of the implementation, if known.
        tile: else query and key rows of the tiles that it has, perhaps.
        repeats: the results of the further runs (`execution.REPEATS`), by rule, if there were any.
    """

    case: Case
    results: Mapping[str, Array]
    exact: Result
    under: Callable[..., Result]
    sequences: tuple[int, ...] | None = None
    tensors: Sequence[Tensor | None] = ()
    tiles: Tiles | None = None
    tile: tuple[int, int] = (64, 64)
    repeats: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)

    @property
    def entries(self) -> Sequence[int]:
        """What the batch entries are called."""
        return range(self.case.batch) if self.sequences is None else self.sequences

    @property
    def entry(self) -> str:
        return "batch entry" if self.sequences is None else "sequence"

    @cached_property
    def fits(self) -> dict[str, Fit]:
        return {
            name: Fit.of(x, getattr(self.exact, name), self.exact.dtype) for name, x in self.results.items()
        }

    @property
    def scores(self) -> int:
        """How many there are."""
        case = self.case
        return case.batch * case.heads_q * case.len_q * case.len_k

    def tile_of(self, name: str) -> tuple[int, int]:
        """Query rows and keys of a tile of the kernel that makes a tensor."""
        if self.tiles is None:
            return self.tile
        kernel = {"dq": "dq", "dk": "dkdv", "dv": "dkdv"}.get(name, "forward")
        tile: tuple[int, int] = getattr(self.tiles, kernel)
        return tile

    @cached_property
    def attention(self) -> Attention | None:
        """The same attention, to be computed with a fault; None if its inputs are not known or not finite."""
        if not self.tensors:
            return None
        arrays = [None if t is None else t.detach().cpu().double().numpy() for t in self.tensors]
        q, k, v = arrays[:3]
        if q is None or k is None or v is None or not all(np.isfinite(x).all() for x in (q, k, v)):
            return None
        case = self.case
        return Attention.of(q, k, v, arrays[3], arrays[4], causal=case.causal, scale=case.effective_scale)


@dataclass(frozen=True)
class Fit:
    """Which elements of a tensor are within the hard bounds of exact values, and which can be judged.

    Attributes:
        within, judged: those.
        far: those that are improbably far off, though they may be within the bounds.
    """

    within: Mask
    judged: Mask
    far: Mask

    @classmethod
    def of(cls, x: Array, e: Estimate, dtype: Dtype) -> Fit:
        lse = x.ndim == 3
        rows = ~e.powerless & ~e.nonfinite
        judged = np.broadcast_to(rows if lse else rows[..., None], x.shape)
        overflow = np.inf if lse else dtype.overflow
        with np.errstate(invalid="ignore", over="ignore"):
            within = (x == e.value) | (np.abs(x - e.value) <= e.bound)
            within |= np.isinf(x) & (np.sign(x) * e.value + e.bound >= overflow)
            far = (np.maximum(x - e.high, e.low - x) > FAR * e.sigma).all(0)
        return cls(within, judged, far & np.isfinite(e.value))

    @cached_property
    def wrong(self) -> Mask:
        return self.judged & ~self.within

    @cached_property
    def suspect(self) -> Mask:
        """What is wrong, or may be: where it is said what is right, none of it is."""
        return self.judged & (~self.within | self.far)


@dataclass(frozen=True)
class Earlier:
    """A dense call of the same implementation: its case, and what out should have been."""

    case: Case
    out: Estimate
    dtype: Dtype


class Calls:
    """The calls of an implementation whose results it may have kept: the last one, and small ones before."""

    def __init__(self) -> None:
        self._last: Earlier | None = None
        self._small: deque[Earlier] = deque(maxlen=MOST_KEPT)

    def add(self, call: Earlier) -> None:
        self._last = call
        if call.out.value.size <= LARGEST_KEPT:
            self._small.append(call)

    def of_shape(self, shape: tuple[int, ...]) -> Iterator[tuple[str, Earlier]]:
        """What to call each of them, and it; the last first."""
        if self._last is not None and self._last.out.value.shape == shape:
            yield "the call before", self._last
        for call in reversed(self._small):
            if call.out.value.shape == shape and call is not self._last:
                yield "an earlier call", call


# ---------------------------------------------------------------- how sure a hypothesis is


def sure(fits: Mask, judged: Mask, wrong: Mask, words: str) -> Iterator[str]:
    if how := how_sure(fits, judged, wrong):
        yield f"{how}: {words}"


def how_sure(fits: Mask, judged: Mask, wrong: Mask) -> str:
    """How sure a hypothesis is that fits these elements; empty if it explains nothing or little."""
    if not wrong.any():
        return ""
    if fits[judged].all():
        return CERTAIN
    return LIKELY if min(fits[judged].mean(), fits[wrong].mean()) >= NEARLY_ALL else ""


CLOSE, CLOSER = 0.1, 0.3
"""Of the error, what a certain and a likely hypothesis may leave: where bounds are wide anything fits."""


def no_surer(how: str, left: Array, error: Array) -> str:
    """How sure a hypothesis is by what it leaves of the errors of the elements that are wrong."""
    finite = np.isfinite(left) & np.isfinite(error)
    share = float(left[finite].sum()) / max(float(error[finite].sum()), 1e-300) if finite.any() else 0.0
    if how == CERTAIN and share > CLOSE:
        how = LIKELY
    return "" if share > CLOSER else how


def joined(arrays: Iterable[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate([array.ravel() for array in arrays])


def tensors_of(pieces: Sequence[Piece]) -> list[str]:
    """The tensors that every piece has."""
    return [name for name in pieces[0].results if all(name in piece.results for piece in pieces)]


def wrong_tensors(pieces: Sequence[Piece]) -> list[str]:
    return [name for name in tensors_of(pieces) if any(p.fits[name].wrong.any() for p in pieces)]


def listed(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - LISTED} more" if len(numbers) > LISTED else ""
    return ", ".join(map(str, numbers[:LISTED])) + more


def are(names: Sequence[str]) -> str:
    """The tensors of a sentence and its verb."""
    return f"{', '.join(names)} {'are' if len(names) > 1 else 'is'}"
