"""Numbers from repetitions: checks with the interval that they give, and the exponents of power laws."""

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from analysis.derivation.finding import Check


def checked(
    what: str, values: ArrayLike, low: float, high: float, expected: str, premise: bool = False
) -> Check:
    """A check of the mean of two or more independent repetitions, with its 95 % interval by Student's t."""
    values_R = np.asarray(values, dtype=float)
    error = stats.t.ppf(0.975, len(values_R) - 1) * stats.sem(values_R)
    return Check(what, float(values_R.mean()), low, high, expected, float(error), premise)


def exponents(x: ArrayLike, y: ArrayLike) -> np.ndarray:
    """`a` of `y ~ x^a` for each of R repetitions, `y` being R x N: the slope of ln y against ln x."""
    return np.polyfit(np.log(np.asarray(x, dtype=float)), np.log(np.asarray(y, dtype=float)).T, deg=1)[0]
