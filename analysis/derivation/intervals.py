"""Numbers with half of their 95 % interval: means, medians, and exponents of power laws."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from analysis.derivation.finding import Check

LEVEL = 0.975  # of the upper end


def mean(values: ArrayLike) -> tuple[float, float]:
    """Of two or more independent values, by Student's t."""
    values_R = np.asarray(values, dtype=float)
    return float(values_R.mean()), float(stats.sem(values_R) * stats.t.ppf(LEVEL, len(values_R) - 1))


def median(values: np.ndarray) -> tuple[float, float]:
    """Of 6 values or more, by ranks: a few slow rounds move neither."""
    middle = float(np.median(values))
    low, high = stats.quantile_test(values, q=middle).confidence_interval(0.95)
    return middle, float(max(middle - low, high - middle))


def exponent(costs: Mapping[int, float]) -> tuple[float, float]:
    """The p of `cost ~ size^p`, least squares in logarithms, by Student's t over the sizes."""
    x, y = np.log([*costs]), np.log([*costs.values()])
    p, level = np.polyfit(x, y, 1)
    variance = ((y - p * x - level) ** 2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum()
    return float(p), float(variance**0.5 * stats.t.ppf(LEVEL, len(x) - 2))


def exponents(x: ArrayLike, y: ArrayLike) -> np.ndarray:
    """The p of `y ~ x^p` for each of R repetitions, `y` being R x N; their interval is that of a mean."""
    return np.polyfit(np.log(np.asarray(x, dtype=float)), np.log(np.asarray(y, dtype=float)).T, deg=1)[0]


def checked(
    what: str, values: ArrayLike, low: float, high: float, expected: str, premise: bool = False
) -> Check:
    """A check of the mean of repetitions."""
    measured, error = mean(values)
    return Check(what, measured, low, high, expected, error, premise)
