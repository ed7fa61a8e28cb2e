"""The learning rate of every step of every schedule: above 0, at most the peak, up and then down."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Optimizer
from training.schedules import rate_share

DECAYING = st.sampled_from(["linear", "wsd"])
EDGES = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))
SCHEDULES = st.one_of(
    st.builds(lambda share: {"schedule": "cosine", "final_lr": share}, EDGES),
    st.builds(lambda name, share: {"schedule": name, "decay_share": share}, DECAYING, EDGES),
    st.just({"schedule": "constant"}),
)


def shares(steps: int, **values) -> list[float]:
    config = Optimizer(**values)
    return [rate_share(step, steps, config) for step in range(1, steps + 1)]


@given(st.integers(1, 200), st.integers(0, 300), SCHEDULES)
def test_every_step_has_a_rate_that_rises_to_the_peak_at_most_and_then_falls(steps, warmup, schedule):
    found = shares(steps, warmup_steps=warmup, **schedule)
    assert all(0 < share <= 1 for share in found)
    top = found.index(max(found))
    assert all(before <= after for before, after in pairwise(found[: top + 1]))
    assert all(before >= after for before, after in pairwise(found[top:]))


@given(st.integers(1, 200), st.integers(1, 300), SCHEDULES)
def test_warm_up_is_linear_whatever_the_length_of_the_run(steps, warmup, schedule):
    found = shares(steps, warmup_steps=warmup, **schedule)
    assert found[:warmup] == pytest.approx([(i + 1) / warmup for i in range(min(warmup, steps))])


@given(st.integers(1, 200), st.floats(0.001, 1))
def test_cosine_is_symmetric_about_its_middle_and_ends_at_its_final_rate(half, final):
    found = [1, *shares(2 * half, warmup_steps=0, schedule="cosine", final_lr=final)]
    assert found[-1] == pytest.approx(final)
    assert [a + b for a, b in zip(found, reversed(found), strict=True)] == pytest.approx(
        [1 + final] * len(found)
    )


def test_linear_is_constant_and_then_steps_down_evenly_to_the_step_after_the_last():
    found = shares(10, warmup_steps=2, schedule="linear", decay_share=0.4)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_wsd_is_constant_and_then_goes_down_by_one_minus_the_root_to_the_step_after_the_last():
    found = shares(20, warmup_steps=2, schedule="wsd", decay_share=0.4)
    assert found[:12] == pytest.approx([0.5] + [1] * 11)
    assert found[12:] == pytest.approx([1 - math.sqrt(i / 9) for i in range(1, 9)])


@given(st.integers(1, 200), st.integers(0, 100), EDGES)
def test_wsd_goes_down_where_linear_does_and_first_faster_than_it(steps, warmup, share):
    """1 - sqrt(x) is below 1 - x, and they meet at both ends."""
    linear, wsd = (
        shares(steps, warmup_steps=warmup, schedule=name, decay_share=share) for name in ("linear", "wsd")
    )
    for step, (one, other) in enumerate(zip(linear, wsd, strict=True), 1):
        if step <= warmup or one == 1:
            assert other == one
        else:
            assert (1 - other) ** 2 == pytest.approx(1 - one)


@pytest.mark.parametrize(
    "schedule",
    [
        {"schedule": "cosine", "final_lr": 1},
        {"schedule": "linear", "decay_share": 0},
        {"schedule": "wsd", "decay_share": 0},
        {"schedule": "constant"},
    ],
    ids=str,
)
def test_without_warm_up_and_decay_the_rate_is_the_peak(schedule):
    assert shares(7, warmup_steps=0, **schedule) == [1] * 7
