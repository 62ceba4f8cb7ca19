"""Errors that are small and everywhere: a lower precision somewhere inside, sums that lose digits."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from itertools import pairwise

import numpy as np

from .piece import LIKELY, Array, Mask, Piece, are, joined, tensors_of

SMALL = 2.0**-5
"""Errors of a lower precision are below, in terms of the magnitudes that are added up."""

SMALL_SUMS = 2.0**-7
"""Those of an accumulator in bfloat16, a few roundings."""

FEWEST, FEWEST_OF_LARGE = 48, 16
"""Elements of which something is said: of errors a little too large, and of errors much too large."""

MEDIAN_Z = 1.2
"""That of a correct kernel is less."""

SUDDEN = 8.0
"""Times that an error grows from one number of tiles to the next if it is another fault, of some rows."""

LARGE_Z = 3.0
"""Of most elements, if errors are larger than those of a correct kernel."""


def small_errors(pieces: Sequence[Piece], explained: Container[str]) -> Iterator[str]:
    """Errors that are throughout larger than a correct kernel's, yet small, of tensors not yet explained."""
    found: dict[str, list[str]] = {}
    names = tensors_of(pieces)
    if any(fit.wrong.any() for p in pieces for fit in (p.fits.get("out"), p.fits.get("lse")) if fit):
        names = [name for name in names if name in ("out", "lse")]  # the gradients follow from these
    for name in names:
        if name in explained:
            continue
        errors = [_Errors(piece, name) for piece in pieces]
        relative, z = (joined(getattr(e, field)[e.compared] for e in errors) for field in ("relative", "z"))
        if z.size < FEWEST_OF_LARGE or not all(e.finite for e in errors):
            continue
        rms = math.sqrt(float((relative**2).mean()))
        rms_z = math.sqrt(float(np.minimum(z**2, 1e6).mean()))
        if (
            rms_z < (1.5 if z.size >= FEWEST else 4.0)
            or not 0 < rms < SMALL
            or np.abs(relative).max() > 8 * SMALL
        ):
            continue
        words = _towards_zero(pieces, name)
        if not words and rms < SMALL_SUMS:
            words = _growing(errors, name)
        if not words and _throughout(errors) and rms < 2.0**-6:
            words = "off by a little throughout, as if something were rounded in a lower precision"
        if words:
            found.setdefault(words, []).append(name)
    for words, names in found.items():
        yield f"{LIKELY}: {are(names)} {words}"


class _Errors:
    """The errors of one tensor of a piece, in units of the magnitudes that are added up, and of sigma."""

    def __init__(self, piece: Piece, name: str) -> None:
        e, x, fit = getattr(piece.exact, name), piece.results[name], piece.fits[name]
        self.finite = bool(np.isfinite(x[fit.judged & np.isfinite(e.value)]).all())
        self.compared: Mask = fit.judged & np.isfinite(x) & np.isfinite(e.value) & (e.magnitude > 0)
        with np.errstate(all="ignore"):
            magnitude = np.maximum(e.magnitude, 1.0) if name == "lse" else e.magnitude
            self.relative: Array = (x - e.value) / magnitude
            beyond = np.maximum(x - e.high, 0) - np.maximum(e.low - x, 0)
            z = np.abs(beyond / e.sigma)
            self.z: Array = np.nan_to_num(z.min(0), nan=0.0, posinf=1e3)
        self.tiles = _tiles(piece, name)


def _tiles(piece: Piece, name: str) -> Array:
    """How many tiles are added up for each row (key) of a tensor, (S,)."""
    case = piece.case
    rows, keys = piece.tile_of(name)
    if name in ("dk", "dv"):
        first = np.maximum(np.arange(case.len_k) - (case.len_k - case.len_q), 0) if case.causal else 0
        seen = np.broadcast_to(np.maximum(case.len_q - first, 0), (case.len_k,))
        return np.ceil(seen / rows) * (case.heads_q // case.heads_kv)
    seen = (
        np.arange(case.len_q) + 1 + case.len_k - case.len_q
        if case.causal
        else np.full(case.len_q, case.len_k)
    )
    return np.ceil(np.clip(seen, 0, case.len_k) / keys)


def _throughout(errors: Sequence[_Errors]) -> bool:
    """Whether most elements are further off than a correct kernel's, in every head."""
    for e in errors:
        for head in range(e.z.shape[1]):
            z = np.abs(e.z[:, head][e.compared[:, head]])
            if z.size and float(np.median(z)) <= MEDIAN_Z:
                return False
    return True


def _growing(errors: Sequence[_Errors], name: str) -> str:
    """Whether rows that add up one tile are right, and the others the worse the more they add up."""
    groups: dict[int, list[Array]] = {}
    for e in errors:
        for count in np.unique(e.tiles):
            at = np.flatnonzero(e.tiles == count)
            z = np.abs(e.z[:, :, at][e.compared[:, :, at]])
            if count and z.size:
                groups.setdefault(int(count), []).append(z)
    sizes = sorted(groups)
    if len(sizes) < 2 or sizes[-1] < 2 * sizes[0]:
        return ""
    rms = [math.sqrt(float((np.concatenate(groups[n]) ** 2).mean())) for n in sizes]
    if rms[-1] < 2 or rms[-1] < 1.5 * rms[0] or any(b < 0.8 * a or b > SUDDEN * a for a, b in pairwise(rms)):
        return ""
    return (
        f"worse the more tiles are added up (rms z {rms[0]:.2g} of {sizes[0]}, {rms[-1]:.3g} of {sizes[-1]}):"
        " an accumulator in a low precision"
    )


def _towards_zero(pieces: Sequence[Piece], name: str) -> str:
    """Whether nearly all errors that can be told are towards zero."""
    if name == "lse":
        return ""
    signs = []
    for piece in pieces:
        e, fit = getattr(piece.exact, name), piece.fits[name]
        error = piece.results[name] - e.value
        told = fit.judged & np.isfinite(error) & (np.abs(error) > 0.25 * e.sigma) & (e.value != 0)
        signs.append((np.sign(error) * np.sign(e.value))[told])
    sign = joined(signs)
    if sign.size < FEWEST or sign.mean() > -0.8:
        return ""
    return "too small nearly everywhere, by a little: cut off where it should be rounded"
