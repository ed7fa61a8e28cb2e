"""95 % intervals by the bootstrap over sequences, as wide as few sequences need them."""

import math

import torch
from torch import Tensor

RESAMPLES = 1000
Z = 1.959964  # of the normal distribution: 95 % lie within as many standard deviations


def redrawn(count: int, generator: torch.Generator) -> Tensor:
    """Which of `count` sequences each resample holds, R x count."""
    return torch.randint(count, (RESAMPLES, count), generator=generator)


def bounds(resampled: Tensor, count: int) -> Tensor:
    """Lower and upper end, 2 x ..., of the interval of `resampled` means, R x ..., of so many sequences.

    Percentiles, further out than 2.5 and 97.5 by what those of few are too near the mean: a resample of n
    varies by n - 1 instead of n, and Student's t has wider tails than the normal distribution (the expanded
    percentile interval of Hesterberg 2015, 1411.5279). NaN of a single one.
    """
    if count == 1:
        return torch.full_like(resampled[:2], math.nan)
    tail = math.erfc(math.sqrt(count / (count - 1)) * student(count - 1) / math.sqrt(2)) / 2
    return resampled.quantile(resampled.new_tensor([tail, 1 - tail]), dim=0)


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by its expansion in 1 / freedom (Abramowitz and Stegun, 26.7.5).

    Within 0.5 % from 4 degrees of freedom on; below it is too small.
    """
    terms = [
        Z,
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    ]
    return sum(term / freedom**power for power, term in enumerate(terms))
