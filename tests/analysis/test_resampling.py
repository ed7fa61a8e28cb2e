"""Intervals cover what they say, also those of few sequences."""

import math

import pytest
import torch

from analysis.resampling import bounds, redrawn


@pytest.mark.parametrize(("count", "least"), [(4, 0.86), (8, 0.93), (16, 0.93)])
def test_nineteen_of_twenty_intervals_hold_the_true_mean(count: int, least: float) -> None:
    """Of normal sequences; plain percentiles cover 0.80, 0.89, 0.92. Four reach from least to most."""
    generator = torch.Generator().manual_seed(0)
    values_KN = torch.randn(2000, count, generator=generator, dtype=torch.float64)
    drawn_RN = redrawn(count, generator)
    low_K, high_K = bounds(values_KN[:, drawn_RN].mean(-1).T, count)
    covered = ((low_K < 0) & (high_K > 0)).double().mean().item()
    assert least < covered < 0.97


def test_one_sequence_has_no_interval_and_equal_ones_leave_no_doubt() -> None:
    alone = bounds(torch.full((1000, 1), 0.5).double(), 1)
    assert alone.isnan().all()
    same = bounds(torch.full((1000, 1), 0.5).double(), 4)
    assert same.tolist() == [[0.5], [0.5]]


def test_a_fault_in_a_resample_leaves_no_interval() -> None:
    resampled = torch.tensor([[0.5], [math.nan], [0.4]]).double()
    assert bounds(resampled, 3).isnan().all()
