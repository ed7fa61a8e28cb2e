"""Before there are Q, K and V: what is symmetric, and what one vector for two purposes shares."""

import math
from dataclasses import replace

import pytest
import torch

from analysis.derivation import projections, untrained
from analysis.derivation.finding import Subject
from model.positions import Rotary
from tests.analysis.derivation.planting import GIVEN, failed, plant
from tests.model.models import build, build_random


@pytest.mark.parametrize("seed", [1, 2])
def test_scores_are_symmetric_until_queries_and_keys_are_projected_apart(seed):
    finding = projections.symmetry(replace(GIVEN, seed=seed))
    assert finding.verdict == "holds"
    assert [check.measured > 1 for check in finding.checks] == [False] * 6 + [True] * 3


def test_tied_projections_where_separate_ones_are_claimed_are_found(monkeypatch):
    plant(monkeypatch, W_k=lambda attention: attention.W_q)
    finding = projections.symmetry(GIVEN)
    assert finding.verdict == "holds in part"
    assert [what.split(",")[1] for what in failed(finding)] == [" W_k ≠ W_q"] * 3


def test_separate_projections_where_tied_ones_are_claimed_are_found(monkeypatch):
    def other(attention):
        if attention.W_q is None:
            return None
        W = torch.nn.Linear(*reversed(attention.W_q.weight.shape), bias=False)
        torch.nn.init.normal_(W.weight, generator=torch.Generator().manual_seed(7))
        return W

    plant(monkeypatch, W_k=other)
    assert any("W_k = W_q" in what for what in failed(projections.symmetry(GIVEN)))


def test_a_rotation_that_turns_queries_alone_makes_tied_scores_asymmetric(monkeypatch):
    turn, calls = Rotary.forward, []

    def queries_alone(self, x_BHTD, first=0):
        calls.append(x_BHTD)
        return turn(self, x_BHTD, first) if len(calls) % 2 else x_BHTD

    monkeypatch.setattr(Rotary, "forward", queries_alone)
    assert [what.split(", ")[2] for what in failed(projections.symmetry(GIVEN))][:2] == [
        "rotary positions"
    ] * 2


def test_exchange_changes_tied_scores_as_far_as_the_pairs_are_turned():
    """(cos a, sin a) of the turned pairs: exchange turns the sign of the sine, |change|² = 4 mean sin²."""
    frequencies = [10000 ** (-2 * f / 32) for f in range(16)]
    expected = math.sqrt(sum(4 * math.sin(15 * frequency) ** 2 for frequency in frequencies) / 16)
    exchange_R = projections._asymmetry(GIVEN, "tied", "rotary positions")[:, 1]
    assert exchange_R.mean() == pytest.approx(expected, rel=0.1)


def test_exchange_leaves_scores_without_positions_alone():
    for qk in ("identity", "tied"):
        assert projections._asymmetry(GIVEN, qk, "rotary, not turned")[:, 1].max() < 1e-5


def test_the_two_subspaces_share_what_chance_gives_and_the_rest_is_not_measured():
    finding = projections.scored_and_carried(GIVEN)
    assert finding.verdict == "not measured"
    assert not failed(finding)
    assert "--train" in finding.missing[0]


def test_values_that_are_keys_where_a_projection_is_claimed_are_found(monkeypatch):
    plant(monkeypatch, values_are_keys=True)
    finding = projections.scored_and_carried(GIVEN)
    assert finding.verdict == "does not hold"
    assert failed(finding) == ["overlap at d_head = 32, W_v of their own"]


def test_the_overlap_is_that_of_projections_onto_the_subspaces():
    """|P_k P_v|² / D, with P = W⁺ W from the pseudo-inverse; invariant under any basis of a subspace."""
    gpt = build_random("grouped")
    by_hand = []
    for attention in gpt.attentions():
        for _, W_k, W_v, _ in zip(*attention.matrices(), strict=True):
            P_k, P_v = (torch.linalg.pinv(W) @ W for W in (W_k, W_v))
            by_hand.append((P_k @ P_v).square().sum() / attention.d_head)
    assert projections._overlap(gpt.attentions()) == pytest.approx(
        torch.stack(by_hand).mean().item(), rel=1e-4
    )


def test_trained_models_are_told_beside_chance():
    gpt = build("studied", d_head=6)  # values are keys
    subject = Subject("small", "--run small", gpt, None, torch.zeros(1), None, False, 1)
    [says] = projections.scored_and_carried(replace(GIVEN, subjects=[subject])).says
    assert says == "small: overlap 1.00, by chance 0.25."


def test_equal_repetitions_have_equal_weights_whatever_the_scale():
    one, other = (untrained.model(GIVEN, 3, scale=scale).state_dict() for scale in ("sqrt", "none"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(weight.any() for weight in one.values())
