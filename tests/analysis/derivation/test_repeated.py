"""Repetitions: the interval covers as often as it says, and a power law gives its exponent back."""

import numpy as np
import pytest

from analysis.derivation.repeated import checked, exponents


def test_the_interval_covers_the_mean_of_few_repetitions_in_95_of_100_cases():
    values = np.random.default_rng(1).normal(3.0, 2.0, size=(4000, 4))
    checks = [checked("", row, 0, 1, "") for row in values]
    covered = np.mean([abs(check.measured - 3.0) <= check.error for check in checks])
    assert covered == pytest.approx(0.95, abs=0.015)


def test_two_repetitions_have_an_interval_by_the_table_of_students_t():
    check = checked("", [1.0, 3.0], 0, 1, "")
    assert (check.measured, check.error) == pytest.approx((2.0, 12.706), rel=1e-4)


def test_a_power_law_gives_its_exponents_back():
    x = np.array([1.0, 2.0, 5.0, 9.0])
    assert exponents(x, [3 * x**0.5, 0.1 * x**-2]) == pytest.approx([0.5, -2.0])
