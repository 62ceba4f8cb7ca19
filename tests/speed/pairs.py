"""Ratios of paired rounds, and what can be claimed of them.

A round times every contender once, within milliseconds: what slows the machine slows both of a pair, and
their ratio hardly. Of n ratios r the claim is about the median, with an interval between two order
statistics: for independent pairs the median lies outside of [r_(k), r_(n+1-k)] with probability
2 P(Binomial(n, 1/2) < k), whatever their distribution (e.g. Conover, Practical Nonparametric Statistics,
section 3.2).

    faster, slower   the interval excludes 1, and the median is off by more than `LEAST`, by more than twice
                     the relative interquartile range, and by more than twice what the control is off
    same             the interval lies within `ALIKE` of 1
    cannot tell      neither; or the control, the same thing measured twice, is off or too wide: the machine
                     is not quiet
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FASTER, SLOWER, SAME, CANNOT_TELL = "faster", "slower", "same", "cannot tell"
VERDICTS = (FASTER, SAME, SLOWER, CANNOT_TELL)

FEWEST = 7
"""Pairs that a claim needs."""

ALPHA = 1e-3
"""Probability that the interval misses the median; of few pairs it is the whole range, and this larger."""

LEAST = 0.01
"""No smaller difference is claimed: clocks and the place of memory do as much from run to run."""

ALIKE = 0.03
"""Within so much two contenders are said to be the same."""

QUIET, STEADY = 0.05, 0.1
"""By how much the median of the control may be off, and half of its interval's width, on a quiet machine.
Nothing is claimed under twice what it is off."""


@dataclass(frozen=True)
class Ratio:
    """Of another's time to the subject's: above 1 the subject is faster.

    Attributes:
        median: of the pairs.
        low, high: an interval for it.
        spread: interquartile range over the median.
        pairs: how many.
    """

    median: float
    low: float
    high: float
    spread: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g}, {self.pairs} pairs)"


def rank(pairs: int, alpha: float = ALPHA) -> int:
    """The k of the interval [r_(k), r_(n+1-k)]: the largest whose error is at most alpha, at least 1."""
    k, tail = 0, 0.0
    while k < pairs // 2:
        tail += math.comb(pairs, k) / 2.0**pairs  # P(Binomial = k)
        if 2 * tail > alpha:
            break
        k += 1
    return max(k, 1)


def ratio(subject: Sequence[float], other: Sequence[float]) -> Ratio:
    """Of two contenders by their rounds; what has no partner is left out.

    Raises:
        ValueError: if there are fewer than `FEWEST` pairs, or a time is not greater than 0.
    """
    both = list(zip(subject, other, strict=False))
    if len(both) < FEWEST:
        raise ValueError(f"{len(both)} pairs; a ratio needs at least {FEWEST}")
    if not all(0 < t < math.inf for pair in both for t in pair):
        raise ValueError(f"a time is not a number greater than 0: {both}")
    found = sorted(theirs / ours for ours, theirs in both)
    k = rank(len(found))
    median = statistics.median(found)
    first, _, third = statistics.quantiles(found, n=4, method="inclusive")
    return Ratio(median, found[k - 1], found[-k], (third - first) / median, len(found))


def is_quiet(control: Ratio) -> bool:
    """Whether the same thing measured twice came out the same."""
    return abs(control.median - 1) <= QUIET and (control.high - control.low) / 2 <= STEADY


def verdict(of: Ratio, control: Ratio | None = None, least: float = 1.0) -> str:
    """What can be claimed.

    Args:
        of: the ratio.
        control: of the subject with itself, in the same rounds.
        least: what the ratio is compared with: 1, or what a gate asks for.
    """
    if control is not None and not is_quiet(control):
        return CANNOT_TELL
    low, median, high = (x / least for x in (of.low, of.median, of.high))
    off = max(median, 1 / median) - 1
    drift = abs(control.median - 1) if control is not None else 0.0
    if off > max(LEAST, 2 * of.spread, 2 * drift):
        if low > 1:
            return FASTER
        if high < 1:
            return SLOWER
    if low >= 1 - ALIKE and high <= 1 + ALIKE:
        return SAME
    return CANNOT_TELL
