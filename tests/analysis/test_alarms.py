"""Alarms: a function of what a probe has measured, about layers that are beyond a limit and no others."""

import json

import pytest
import torch

from analysis.alarms import alarms
from analysis.probes import make_probes, measure
from configs.cli import validate
from data.loading import load_source
from model.transformer import GPT

SHAPE = {"n_layer": 3, "n_head": 2, "d_model": 16, "context_length": 32}


def config_of(entropy: float = 0.05, max_logit: float = 1000.0, **model: object):
    sections = {"data": {"source": "repeats"}, "model": SHAPE | model}
    return validate(sections | {"alarm": {"entropy": entropy, "max_logit": max_logit}})


def record_of(entropies: list[list], logits: list[list]) -> dict:
    return {"scores": {"entropy_normalized": entropies, "max_logit": logits}}


CALM = record_of([[0.5, 0.4], [0.3, 0.2]], [[10.0, 20.0], [30.0, -4.0]])


def found(record: dict, **limits: float) -> list[tuple]:
    return [(a["score"], a["layer"], a["value"]) for a in alarms(record, config_of(**limits))]


def measured(factor: float, layer: int = 1) -> dict:
    """What a probe says of a random model of which one layer has queries `factor` times as large."""
    config = config_of()
    source = load_source(config)
    model = GPT(config.model, source.tokenizer.vocab_size, torch.Generator().manual_seed(1))
    model.blocks[layer].attention.W_q.weight.data *= factor
    return measure(model, make_probes(source, 32, sequences=3, seed=1), bos_trained=True)


def test_a_hot_layer_and_its_head_are_named_with_a_logit_that_grows_with_its_queries():
    before, hot = measured(1.0)["scores"]["max_logit"], measured(1e6)
    calm = [max(row) for row in before]
    assert found(hot, entropy=0, max_logit=2 * max(calm)) == [
        ("max_logit", 1, pytest.approx(1e6 * calm[1], rel=1e-3))
    ]
    (alarm,) = alarms(hot, config_of(entropy=0, max_logit=2 * max(calm)))
    assert alarm["text"].startswith(f"layer 1, head {before[1].index(calm[1])}: ")


def test_a_layer_that_has_collapsed_is_named_and_uniform_ones_are_not():
    assert found(measured(1.0)) == found(measured(0.0)) == []
    ((score, layer, value), *rest) = found(measured(1e7))
    assert (score, layer) == ("entropy_normalized", 1)
    assert value < 0.01
    assert [(score, layer) for score, layer, _ in rest] == [("max_logit", 1)]


def test_the_entropy_is_that_of_the_layer_so_that_a_sharp_head_beside_a_broad_one_is_none():
    sharp = record_of([[0.0, 0.5], [0.01, 0.03]], [[1.0, 1.0], [1.0, 1.0]])
    assert found(sharp) == [("entropy_normalized", 1, pytest.approx(0.02))]


def test_limits_are_strict_and_zero_switches_one_off():
    assert found(CALM, entropy=0.25, max_logit=30.0) == []
    assert found(CALM, entropy=0.2501, max_logit=29.99) == [
        ("entropy_normalized", 1, 0.25),
        ("max_logit", 1, 30.0),
    ]
    nothing = record_of([[0.0, 0.0]], [[1e30, None]])
    assert found(nothing, entropy=0, max_logit=0) == []
    assert [score for score, *_ in found(nothing, entropy=0.05, max_logit=0)] == ["entropy_normalized"]
    assert [score for score, *_ in found(nothing, entropy=0)] == ["max_logit"]


def test_a_score_that_is_not_finite_is_a_logit_too_large_and_no_entropy():
    broken = record_of([[None, None], [None, 0.01]], [[3.0, None], [1.0, 2.0]])
    assert found(broken) == [("entropy_normalized", 1, 0.01), ("max_logit", 0, None)]
    text = alarms(broken, config_of())[1]["text"]
    assert text.startswith("layer 0, head 1: the largest attention logit is inf, above 1,000; ")


def test_an_alarm_says_layer_value_limit_and_remedies_that_are_left():
    collapsed = record_of([[0.01, 0.02]], [[1.0, 2.0]])
    (plain,), (normed,) = (alarms(collapsed, config_of(qk_norm=on)) for on in (False, True))
    for alarm in (plain, normed):
        assert alarm["text"].startswith(
            "layer 0: the mean attention entropy is 0.015 of the largest possible"
        )
        assert "below 0.05; lower optimizer.lr, raise optimizer.warmup_steps" in alarm["text"]
    assert plain["text"].endswith("or start anew with model.qk_norm true")
    assert "qk_norm" not in normed["text"]


def test_since_is_the_first_probe_in_a_row_layer_by_layer():
    hot, cold = [2000.0, 1.0], [1.0, 1.0]
    story = [[cold, hot], [hot, hot], [hot, cold], [cold, hot], [hot, hot]]
    told, before = [], []
    for step, rows in enumerate(story):
        before = alarms(record_of([[1.0, 1.0]] * 2, rows), config_of(), 10 * step, before)
        told.append({alarm["layer"]: alarm["since"] for alarm in before})
    assert told == [{1: 0}, {0: 10, 1: 0}, {0: 10}, {1: 30}, {0: 40, 1: 30}]


def test_both_alarms_of_a_layer_have_a_past_of_their_own():
    hot = alarms(record_of([[1.0]], [[2000.0]]), config_of(), 10)
    both = alarms(record_of([[0.0]], [[2000.0]]), config_of(), 20, hot)
    assert [(a["score"], a["since"]) for a in both] == [("entropy_normalized", 20), ("max_logit", 10)]


def test_alarms_are_valid_json_and_leave_the_record_as_it_was():
    record = record_of([[0.0, None]], [[None, 2000.0]])
    before = json.dumps(record)
    found = alarms(record, config_of())
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert json.dumps(record) == before
