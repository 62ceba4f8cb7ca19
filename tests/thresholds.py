"""Every limit that the judge applies: the law that it follows from, and the margin that the model is given.

A limit is a function of the number of elements, of how much of their errors is common, and of `FALSE_ALARM`.
Nothing here was fitted to results: the laws are theorems about rounding errors, which are uniform and hence
strictly sub-Gaussian; each margin names what the model leaves out. `python -m tests.calibrate` prints how
much of each limit correct implementations use.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FALSE_ALARM = 1e-9
"""alpha: chance that one statistic of one comparison is red for a correct implementation. A campaign of
100,000 comparisons, five tensors of six statistics each, has 3 million: one such campaign in 300 is wrongly
red, at most."""

# ---------------------------------------------------------------- the hard bound

HARD_BOUND = 1.0
"""Of |x - r| / B. The bound is proved, not statistical; no margin."""

SDPA_BOUND = 1.0 + 1e-6
"""The same about SDPA's float64 value, which may itself be off by `AGREEMENT` of what is summed."""

EMULATION_BOUND = 2.0
"""The same about the emulation, which may itself be off by B."""

AGREEMENT = 1e-12
"""Relative error of float64 references among themselves: some thousand roundings of 2**-53, in step."""

# ---------------------------------------------------------------- statistics of z


def largest_z(n: Any, alpha: float = FALSE_ALARM) -> Any:
    """Limit of max |z| over n elements: t = sqrt(2 ln(2 n / alpha)).

    Law: |z| > t has probability 2 exp(-t**2 / 2) at most if z is strictly sub-Gaussian, as is any sum of
    independent rounding errors; the union over n elements needs no independence. Margin: none.
    """
    return np.sqrt(2 * np.log(2 * n / alpha))


def rms_z(groups: Any, share: Any, alpha: float = FALSE_ALARM) -> Any:
    """Limit of the root mean square of z in a group.

    That is sqrt(1 + 2 sqrt(share x) + 2 share x) with x = ln(groups / alpha).

    Law: the mean of z**2 over n elements whose correlation matrix has the largest eigenvalue n share exceeds
    1 + 2 sqrt(share x) + 2 share x with probability exp(-x) (Laurent, Massart, Ann. Statist. 28(5), 2000;
    for sub-Gaussian vectors Hsu, Kakade, Zhang, Electron. Commun. Probab. 17, 2012). Margin: none; sigma is
    an upper estimate, so that correct kernels stay below 1 on the mean.

    Args:
        groups: how many of them are looked at (rows, tiles, heads; 1 for the tensor).
        share: 1 / (the number of independent errors in the group), at most 1.
    """
    x = np.log(groups / alpha)
    return np.sqrt(1 + 2 * np.sqrt(share * x) + 2 * share * x)


def rms_z_emulation(rows: float, alpha: float = FALSE_ALARM) -> float:
    """Limit of the root of the mean over rows of min(mean of z**2, FLIPPED), z against the emulation.

    That is sqrt(1 + b + sqrt(b**2 + 2 FLIPPED x / rows)) with x = ln(1 / alpha), b = FLIPPED x / (3 rows).

    Law: Bernstein's inequality for independent numbers in [0, FLIPPED] of mean 1, hence variance FLIPPED
    at most (Boucheron, Lugosi, Massart, Concentration Inequalities, 2013, section 2.8). z is not sub-Gaussian
    here: flips are rare and large. Margin: none.

    Args:
        rows: whose errors are independent.
    """
    x = np.log(1 / alpha)
    b = FLIPPED * x / (3 * rows)
    return float(np.sqrt(1 + b + np.sqrt(b**2 + 2 * FLIPPED * x / rows)))


BIAS = 0.2
"""Mean of z that a correct kernel may have: sums of the last bits are never quite centred."""


def bias(variance: float, count: float, alpha: float = FALSE_ALARM) -> float:
    """Limit of |mean of z sign(r)| over `count` elements whose sum of z has the variance `variance`.

    Law: sub-Gaussian, as of `largest_z`, for a single number. Margin: `BIAS`.
    """
    return float(BIAS + np.sqrt(2 * np.log(2 / alpha) * variance) / count)


# ---------------------------------------------------------------- where a statistic is taken

TILE_ROWS = 64
"""Rows of a tile, for the statistic by tile: the commonest size of the kernels under test."""

RESOLVED = 8
"""Half steps of the subnormal numbers: smaller values are left out of the bias, since a value of a step or
less has fewer places to go away from zero than towards it."""

FLIPPED = 9.0
"""Most that a row's mean of z**2 counts against the emulation: there a rounding of P or dS that flips is as
rare as it is large. It moves a whole row, by 600 sigma where one P in 10**5 decides the row."""

ROWS_FOR_EMULATION = 32
"""Fewer rows say little about the emulation: the limit comes near `FLIPPED`."""

# ---------------------------------------------------------------- campaigns

NO_POWER = 0.05
"""Largest share of the elements of a campaign that may be left unjudged: where a score's own error may
exceed 1, or a float16 dS may overflow. Of the cases that are drawn a twelfth has scores near -60000 and a
seventh the scale 1, which together (1.2 %) lose everything in large head dimensions; another twelfth has
values of 8 and scores of 16 and more, whose dS overflow float16 here and there. More would mean that the
cases, or the error model, have changed."""


def table() -> list[tuple[str, ...]]:
    """Rule, limit and margin for a reader: the figures at 1,000 and 1,000,000 elements of a head of 64."""

    def both(limit: Any) -> str:
        return " and ".join(f"{limit(n):.3g}" for n in (10**3, 10**6))

    return [
        ("hard bound", f"{HARD_BOUND:g}", "none: proved"),
        ("hard bound about SDPA", f"{SDPA_BOUND:.6f}", "1e-6: float64's own error"),
        ("twice the hard bound, about the emulation", f"{EMULATION_BOUND:g}", "none: proved"),
        ("references agree", f"{AGREEMENT:g}", "some thousand float64 roundings in step"),
        ("largest z", f"sqrt(2 ln(2 n / alpha)): {both(largest_z)}", "none"),
        (
            "rms z",
            "sqrt(1 + 2 sqrt(s x) + 2 s x), x = ln(groups / alpha), s = 1 / independent errors: "
            + both(lambda n: rms_z(1, 64 / n)) + " if rows are independent",
            "none",
        ),
        (
            "rms z, about the emulation",
            f"sqrt(1 + b + sqrt(b^2 + {2 * FLIPPED:g} x / rows)), b = {FLIPPED / 3:g} x / rows, x as above: "
            + both(lambda n: rms_z_emulation(n / 64)),
            "none",
        ),
        (
            "bias",
            f"{BIAS:g} + sqrt(2 ln(2 / alpha) var) / n: "
            + both(lambda n: bias(n, n)) + " if all are independent",
            f"{BIAS:g}: the last bits of sums are not centred",
        ),
        ("no power", f"{NO_POWER:.0%} of a campaign's elements", "what the cases are"),
    ]  # fmt: skip
