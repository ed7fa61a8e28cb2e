"""An induction circuit set by hand in the weights of a `GPT`: its heads have the scores that say so."""

import math

import pytest
import torch

from analysis.probes import make_probes, measure
from data.loading import load_source
from model.backends import BACKENDS
from tests.analysis.by_hand import CONFIG, T, V, induction_circuit


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_circuit_set_by_hand_is_recognised_and_its_other_heads_are_not(backend: str) -> None:
    probes = make_probes(load_source(CONFIG), T, sequences=4, seed=1)
    record = measure(induction_circuit(backend), probes, bos_trained=True)
    scores = {name: torch.tensor(score_LH) for name, score_LH in record["scores"].items()}

    for name in ("induction", "induction_short", "induction_long"):
        assert scores[name][1, 0] > 0.95, name
    for name in ("duplicate", "duplicate_short", "duplicate_long", "previous", "current", "sink"):
        assert scores[name][1, 0] < 0.05, name
    assert scores["previous"][0, 0] > 0.95
    for name in ("previous2", "current", "induction", "duplicate"):
        assert scores[name][0, 0] < 0.05, name

    # The silent heads are uniform: 1 / (i + 1) on the stripe, and less of it for the longer block of 31.
    null = sum(1 / (i + 1) for i in range(32, 63)) / 31
    for layer in (0, 1):
        assert scores["entropy_normalized"][layer, 1].item() == pytest.approx(1.0, abs=1e-5)
        assert scores["induction"][layer, 1].item() == pytest.approx(null, abs=1e-6)
        assert scores["head_norm"][layer].tolist() == pytest.approx([2.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_circuit_predicts_the_second_block_and_not_the_first(backend: str) -> None:
    probes = make_probes(load_source(CONFIG), T, sequences=4, seed=1)
    losses = measure(induction_circuit(backend), probes, bos_trained=True)["model"]
    assert losses["repeat_loss_2"] < 0.05
    assert losses["repeat_loss_1"] > math.log(V - 1)


@pytest.mark.parametrize(("passes", "fails"), [("long", "short"), ("short", "long")])
def test_a_head_that_only_knows_a_distance_passes_at_one_block_length_and_not_in_the_headline(
    passes: str, fails: str
) -> None:
    lengths = {"short": 15, "long": 31}
    model = induction_circuit("naive", distance=lengths[passes] - 1)
    record = measure(model, make_probes(load_source(CONFIG), T, sequences=4, seed=1), bos_trained=True)
    score = {name: score_LH[0][0] for name, score_LH in record["scores"].items()}
    assert score[f"induction_{passes}"] == pytest.approx(1.0, abs=1e-6)
    assert score[f"induction_{fails}"] < 0.1
    assert score["induction"] == score[f"induction_{fails}"]


def test_without_the_previous_token_head_there_is_no_induction_head() -> None:
    """The circuit needs both layers: the score is of what the heads do together, not of where one looks."""
    model = induction_circuit("naive")
    with torch.no_grad():
        model.attentions()[0].W_o.weight.zero_()
    record = measure(model, make_probes(load_source(CONFIG), T, sequences=4, seed=1), bos_trained=True)
    assert record["scores"]["induction"][1][0] < 0.05
    assert record["model"]["repeat_loss_2"] > math.log(V) / 2
