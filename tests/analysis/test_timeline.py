"""When heads appear, on models whose every checkpoint is set by hand."""

import math

import pytest
import torch

from analysis.heads import describe_heads
from analysis.probes import Probes, make_probes
from analysis.timeline import add_timeline
from data.loading import load_source
from model.transformer import GPT
from tests.analysis.test_circuit import CONFIG, T, induction_circuit


@pytest.fixture(scope="module")
def probes() -> Probes:
    return make_probes(load_source(CONFIG), T, sequences=2, seed=1)


def without(*layers: int) -> GPT:
    """The circuit before its heads in these layers have formed: they look everywhere and write nothing."""
    model = induction_circuit("sdpa")
    with torch.no_grad():
        for layer in layers:
            for W in (model.attentions()[layer].W_q, model.attentions()[layer].W_o):
                assert W is not None
                W.weight.zero_()
    return model


def timeline(probes: Probes, *checkpoints: tuple[int, GPT]) -> dict:
    document = describe_heads(checkpoints[-1][1], probes, True, 1, {})
    add_timeline(document, checkpoints, probes, bos_trained=True)
    return document


def test_each_head_has_the_step_at_which_its_label_first_held(probes: Probes) -> None:
    found = timeline(probes, (0, without(0, 1)), (10, without(1)), (20, induction_circuit("sdpa")))
    crossed = {(head["layer"], head["head"]): head["crossed"] for head in found["heads"]}
    assert crossed == {(0, 0): {"previous-token": 10}, (0, 1): {}, (1, 0): {"induction": 20}, (1, 1): {}}


def test_the_loss_fell_when_the_circuit_was_whole(probes: Probes) -> None:
    parts = [(0, without(0, 1)), (10, without(1)), (15, without(0)), (20, induction_circuit("sdpa"))]
    found = timeline(probes, *parts, (30, induction_circuit("sdpa")))["summary"]["timeline"]
    assert found["steps"] == [0, 10, 15, 20, 30]
    assert found["fell"] == 20
    # Before, nothing is known of the next token.
    assert found["repeat_loss_2"][:2] == pytest.approx([math.log(65)] * 2, abs=1e-5)
    assert found["repeat_loss_2"][4] < 0.05 < math.log(64) < found["repeat_loss_1"][4]
    assert [rows[1][0] > 0.9 for rows in found["scores"]["induction"]] == [False, False, False, True, True]


def test_a_label_that_is_lost_keeps_the_step_at_which_it_first_held(probes: Probes) -> None:
    found = timeline(probes, (5, without(1)), (6, without(0, 1)), (7, without(1)))
    assert found["heads"][0]["crossed"] == {"previous-token": 5}


def test_a_loss_that_never_fell_has_no_step_and_one_that_is_no_number_is_none(probes: Probes) -> None:
    broken = induction_circuit("sdpa")
    with torch.no_grad():
        broken.head.weight.fill_(math.nan)
    found = timeline(probes, (1, broken), (2, without(0)))["summary"]["timeline"]
    assert found["fell"] is None
    assert found["repeat_loss_2"][0] is None
