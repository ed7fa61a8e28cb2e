"""Verdicts on trainings follow from their numbers, seed by seed; what is not trained is not measured."""

from dataclasses import replace
from math import log
from operator import sub

import pytest
from scipy import stats

from analysis.derivation import ablations, sinks
from analysis.derivation.finding import Given
from tests.analysis.derivation.planting import GIVEN
from training.sweep import CONFIGS

bigram_loss = ablations.bigram_loss


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """The plays once more for each verdict would take a second each."""
    monkeypatch.setattr(ablations, "bigram_loss", lambda training, text: 2.5)


NUMBERS = dict.fromkeys(ablations.COLUMNS, 0.5)
PARTS = [ablations.directions, ablations.carried, ablations.learning, ablations.grouped, sinks.sinks]


def runs(seeds=(1, 2, 3), **numbers: float) -> list[dict]:
    """Of each seed the same, but for a bit that all settings share."""
    return [NUMBERS | {key: x + seed / 100 for key, x in numbers.items()} | {"seed": seed} for seed in seeds]


def given(**trained: list[dict]) -> Given:
    return replace(GIVEN, trained=trained)


SEPARATE = {"loss": 2.2, "repeat_loss_2": 0.1, "induction": 0.6, "learned_early": 2.2}
WORSE = {"loss": 2.4, "repeat_loss_2": 2.0, "induction": 0.1, "learned_early": 0.2}
AS_CLAIMED = {
    **dict.fromkeys(["separate", "learned", "no_norm"], SEPARATE),
    **dict.fromkeys(["qk_tied", "qk_identity", "learned_tied", "value_key", "value_identity"], WORSE),
    **dict.fromkeys(["scale_none", "no_norm_scale_none", "scale_linear", "no_norm_scale_linear"], WORSE),
    "kv_1": SEPARATE,
    "sink_none": {"sink": 0.8},
    **{name: {"sink": 0.02} for name in sinks.ELSEWHERE},
}


def test_a_mean_is_drawn_as_far_as_the_settings_that_are_compared_with_it():
    trained = {"separate": runs(loss=2.2), "qk_tied": runs(loss=2.3), "learned": runs(loss=2.4)}
    (axes,) = ablations.draw(trained, ["loss"]).axes
    ends = [
        [[round(float(x), 2) for x in point] for point in line.get_segments()[0]] for line in axes.collections
    ]
    assert ends == [[[-0.3, 2.22], [1.3, 2.22]], [[1.7, 2.42], [2.3, 2.42]]]
    assert not axes.texts


def verdicts(**other: dict) -> dict[str, str]:
    """Of all parts where the trainings come out as the text claims, but for `other` settings."""
    trained = {name: runs(**numbers) for name, numbers in {**AS_CLAIMED, **other}.items()}
    return {part.__name__: part(given(**trained)).verdict for part in PARTS}


def test_the_configs_are_those_that_the_parts_speak_of():
    assert AS_CLAIMED.keys() == {path.stem for path in CONFIGS.glob("*.yaml")}


def test_trainings_that_come_out_as_claimed_are_what_the_statements_say():
    held = dict.fromkeys(("directions", "carried", "learning", "sinks"), "holds")
    assert verdicts() == {**held, "grouped": "not measured"}


@pytest.mark.parametrize(
    ("part", "other", "verdict"),
    [
        ("directions", {"qk_tied": SEPARATE}, "holds in part"),
        ("directions", {"learned_tied": SEPARATE, "qk_tied": SEPARATE}, "holds in part"),
        ("directions", {"qk_identity": {**WORSE, "loss": 3.0}}, "holds in part"),
        ("carried", {"value_key": SEPARATE}, "holds in part"),
        ("carried", {"value_key": SEPARATE, "value_identity": SEPARATE}, "does not hold"),
        ("learning", {"scale_none": SEPARATE}, "holds in part"),
        ("learning", {"scale_none": {**WORSE, "learned_early": 1.0}}, "holds in part"),
        ("learning", {"scale_none": SEPARATE, "no_norm_scale_none": SEPARATE}, "does not hold"),
        ("sinks", {"sink_zero": {"sink": 0.5}}, "holds in part"),
        ("sinks", {name: {"sink": 0.5} for name in sinks.ELSEWHERE}, "does not hold"),
        ("sinks", {"sink_none": {"sink": 0.1}}, "does not hold"),  # there was none to remove
    ],
)
def test_a_training_that_comes_out_otherwise_changes_the_verdict_of_its_statement_alone(part, other, verdict):
    assert verdicts(**other) == {**verdicts(), part: verdict}


@pytest.mark.parametrize("part", PARTS)
def test_without_trainings_or_with_one_seed_nothing_is_measured_and_what_would_is_said(part):
    assert part(given()).verdict == "not measured"
    single = part(given(**{name: runs([1], **numbers) for name, numbers in AS_CLAIMED.items()}))
    assert single.verdict == "not measured"
    assert [*single.checks] == []
    for found in (part(given()), single):
        assert "scripts.derive --train" in found.missing[0]


@pytest.mark.parametrize("part", PARTS)
def test_a_table_has_a_row_and_a_figure_the_points_of_each_training(part):
    found = part(given(**{name: runs(**numbers) for name, numbers in AS_CLAIMED.items()}))
    (table,), (figure,) = found.tables, found.figures
    assert not any("--train" in line for line in found.missing)
    assert all(len(row) == len(table.columns) for row in table.rows)
    points = [
        sum(len(line.get_xdata()) for line in ax.lines if line.get_marker() == "o") for ax in figure.axes
    ]
    assert points == [3 * len(table.rows)] * 2


ONE, OTHER = [2.31, 2.45, 2.38, 2.60], [2.20, 2.21, 2.25, 2.24]


def check(*trained: list[dict]):
    (found,) = ablations.compare(given(a=trained[0], b=trained[1]), "", sub, "loss", "a", "b", low=0.05)
    return found


def seeded(losses: list[float]) -> list[dict]:
    return [{"seed": seed, "loss": loss} for seed, loss in enumerate(losses, start=1)]


def test_a_difference_and_its_interval_are_those_of_a_paired_t_test():
    interval = stats.ttest_rel(ONE, OTHER).confidence_interval(0.95)
    found = check(seeded(ONE), seeded(OTHER))
    assert found.measured - found.error == pytest.approx(interval.low)
    assert found.measured + found.error == pytest.approx(interval.high)
    assert found.holds is None  # 0.05 is within the interval


def test_runs_are_paired_by_seed_where_some_are_missing_and_in_any_order():
    whole = check(seeded(ONE)[1:], seeded(OTHER)[1:])
    assert check(seeded(ONE)[1:], seeded(OTHER)) == whole
    assert check(seeded(ONE), seeded(OTHER)[:0:-1]) == whole


def test_pairs_of_characters_tell_all_of_a_cycle_but_its_first_and_nothing_where_all_pairs_are_as_frequent():
    cycle, balanced = "abc" * 4000, "aabacbbcc" * 4000
    assert bigram_loss(cycle, cycle[:192]) == pytest.approx(log(3) / 64, abs=0.001)
    assert bigram_loss(balanced, balanced[:191]) == pytest.approx(log(3), abs=0.001)
