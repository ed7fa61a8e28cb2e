"""95 % intervals by the bootstrap over sequences, as wide as few sequences need them."""

import math

import torch
from scipy.special import ndtr, stdtrit
from torch import Tensor

RESAMPLES = 1000


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
    tail = ndtr(-math.sqrt(count / (count - 1)) * stdtrit(count - 1, 0.975))
    return resampled.quantile(resampled.new_tensor([tail, 1 - tail]), dim=0)
