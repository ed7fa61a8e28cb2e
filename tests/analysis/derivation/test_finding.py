"""A verdict follows from the checks and from nothing else."""

import math
from itertools import product

import pytest

from analysis.derivation.finding import Check, Experiment, Finding
from analysis.derivation.page import code, measured, number


def check(measured: float, error: float = 0.0, premise: bool = False) -> Check:
    return Check("a number", measured, 1.0, 2.0, "1 to 2", error, premise)


HOLDS, FAILS, UNDECIDED = check(1.5, 0.1), check(2.5, 0.1), check(2.0, 0.1)


@pytest.mark.parametrize(
    ("value", "error", "holds"),
    [
        (1.0, 0.0, True),  # bounds are within
        (2.0, 0.0, True),
        (1.5, 0.5, True),
        (1.5, 0.6, None),
        (0.9, 0.1, None),
        (0.8, 0.1, False),
        (2.2, 0.1, False),
        (math.inf, 0.0, False),
        (math.nan, 0.0, False),
        (1.5, math.nan, False),
        (1.5, math.inf, None),
    ],
)
def test_a_check_holds_where_all_of_its_interval_is_within_the_bounds(value, error, holds):
    assert check(value, error).holds is holds


def test_a_smaller_error_decides_and_never_turns_a_decision_round():
    for value in (0.5, 0.99, 1.01, 1.5, 1.99, 2.01, 2.5):
        found = [check(value, error).holds for error in (4, 2, 1, 0.5, 0.1, 0.0)]
        decided = [holds for holds in found if holds is not None]
        assert len({*decided}) == 1
        assert found == [None] * (len(found) - len(decided)) + decided


def test_the_verdict_says_whether_all_checks_hold_none_or_some():
    assert Finding([HOLDS, HOLDS]).verdict == "holds"
    assert Finding([FAILS, FAILS]).verdict == "does not hold"
    assert Finding([HOLDS, FAILS]).verdict == "holds in part"
    assert Finding([HOLDS, UNDECIDED]).verdict == "holds in part"
    assert Finding([FAILS, UNDECIDED]).verdict == "does not hold"
    assert Finding([UNDECIDED]).verdict == Finding().verdict == "not measured"


def test_what_a_verdict_rests_on_is_told_so_that_undecided_is_not_read_as_refuted():
    assert Finding([HOLDS, HOLDS, UNDECIDED]).tally == "Checks: 2 hold, 1 undecided."
    assert Finding([HOLDS, FAILS]).tally == "Checks: 1 hold, 1 fail."
    assert Finding([HOLDS], missing=["more"]).tally == "Checks: 1 hold. A part is not measured: see below."
    broken = check(2.5, premise=True)
    assert Finding([HOLDS, broken]).tally == "Checks: 1 hold. Premises that do not hold: 1."
    assert Finding([check(1.5, premise=True)], missing=["all"]).tally == ""


def test_no_order_of_checks_changes_the_verdict():
    for checks in product([HOLDS, FAILS, UNDECIDED], repeat=3):
        assert Finding(checks).verdict == Finding(checks[::-1]).verdict


def test_a_premise_that_does_not_hold_overturns_what_stands_on_it_and_supports_nothing_alone():
    assert Finding([HOLDS, check(1.5, premise=True)]).verdict == "holds"
    assert Finding([check(1.5, premise=True)]).verdict == "not measured"
    for broken in (check(2.5, premise=True), check(2.0, 0.1, premise=True), check(math.nan, premise=True)):
        assert Finding([HOLDS, broken]).verdict == "does not hold"


def test_findings_of_parts_add_up_to_one_that_has_all():
    parts = Finding([HOLDS], ["first"], missing=["more"]) + Finding([FAILS], ["second"])
    assert (parts.checks, parts.says, parts.missing) == ([HOLDS, FAILS], ["first", "second"], ["more"])
    assert parts.verdict == "holds in part"


def test_the_docstring_of_an_experiment_is_its_claim_and_what_stands_below():
    def turned(given):
        """Water
        is wet.

        Method: it
        is touched.

        Expected: wet.
        """

    experiment = Experiment(1, "I", "w", turned)
    assert experiment.claim == "Water is wet."
    assert experiment.about == ["Method: it is touched.", "Expected: wet."]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (11.3137, "11.31"),
        (134217728, "134,217,728"),
        (0.0, "0"),
        (4.213e-7, "4.213e-07"),
        (123456.7, "123,457"),
        (math.inf, "inf"),
        (-0.5, "-0.5"),
    ],
)
def test_numbers_are_shown_to_four_digits(value, shown):
    assert number(value) == shown


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (11.3137, 0.0213, "11.314 ± 0.021"),
        (0.5003, 0.0048, "0.5003 ± 0.0048"),
        (12345.6, 120, "12,346 ± 120"),
        (1.23456789e-5, 2e-9, "1.23e-05 ± 2e-09"),
        (3.0, 0.0, "3"),
        (math.nan, 0.1, "nan"),
    ],
)
def test_a_measured_number_is_shown_to_the_second_digit_of_its_error(value, error, shown):
    assert measured(check(value, error)) == shown


def test_what_stands_between_backticks_is_code_and_markup_is_text():
    assert code("run `a <b>` & c") == "run <code>a &lt;b&gt;</code> &amp; c"
