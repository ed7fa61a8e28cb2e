"""Observers see every layer once per forward pass, and are gone afterwards, whatever happens."""

import pytest
import torch

from analysis.capture import observe
from model.attention import Observation
from tests.model.models import build_random, tokens


def test_an_observer_sees_each_layer_once_per_forward_pass_and_none_afterwards() -> None:
    model, layers = build_random(n_layer=3), []
    with observe(model, lambda seen: layers.append(seen.layer)):
        model(tokens(1, 8))
        assert layers == [0, 1, 2]
        model(tokens(1, 8))
    model(tokens(1, 8))
    assert layers == [0, 1, 2, 0, 1, 2]


def test_observers_nest_and_the_inner_one_ends_first() -> None:
    model, outer, inner = build_random(), [], []
    with observe(model, outer.append):
        with observe(model, inner.append):
            model(tokens(1, 8))
        model(tokens(1, 8))
    assert (len(outer), len(inner)) == (4, 2)
    assert [len(layer.observers) for layer in model.attentions()] == [0, 0]


def test_one_function_may_observe_twice() -> None:
    model, seen = build_random(), []
    with observe(model, seen.append), observe(model, seen.append):
        model(tokens(1, 8))
    assert len(seen) == 4
    assert [len(layer.observers) for layer in model.attentions()] == [0, 0]


def test_an_exception_in_an_observer_removes_it_and_passes_on() -> None:
    model, kept = build_random(), []

    def fail(seen: Observation) -> None:
        raise ZeroDivisionError

    with observe(model, kept.append):
        with pytest.raises(ZeroDivisionError), observe(model, fail):
            model(tokens(1, 8))
        kept.clear()
        model(tokens(1, 8))
    assert [seen.layer for seen in kept] == [0, 1]
    assert [len(layer.observers) for layer in model.attentions()] == [0, 0]


def test_an_exception_in_the_forward_pass_removes_the_observer_too() -> None:
    model = build_random()
    with pytest.raises(IndexError), observe(model, lambda seen: None):
        model(tokens(1, 8) + 1000)
    assert [len(layer.observers) for layer in model.attentions()] == [0, 0]


def test_observing_gives_the_log_sum_exp_in_training_too() -> None:
    """With dropout the weights that are shown are those before it: rows sum to one."""
    model = build_random(dropout=0.5).train()
    seen: list[Observation] = []
    with observe(model, seen.append):
        model(tokens(2, 8))
    for layer in seen:
        score_BHTS = layer.scale * layer.q_BHTD @ layer.k_BGSD.repeat_interleave(2, dim=1).mT
        A_BHTS = (score_BHTS - layer.lse_BHT[..., None]).exp().tril()
        torch.testing.assert_close(A_BHTS.sum(-1), torch.ones(2, 4, 8), atol=1e-5, rtol=0)
