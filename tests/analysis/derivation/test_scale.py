"""Where sqrt(d) comes from: verdicts follow from our attention, and change when the attention is broken."""

import math
from dataclasses import replace

import pytest
import torch

from analysis.derivation import scale, untrained
from data.synthetic import Repeats
from model.backends import naive
from tests.analysis.derivation.planting import GIVEN, failed, plant


@pytest.fixture(autouse=True)
def three_widths(monkeypatch):
    monkeypatch.setattr(scale, "WIDTHS", [16, 128, 512])
    monkeypatch.setattr(scale, "AT_128", 1)


@pytest.mark.parametrize("seed", [1, 2])
def test_dot_products_spread_as_the_root_of_d_and_our_scores_not_at_all(seed):
    finding = scale.standard_deviation(replace(GIVEN, seed=seed))
    assert finding.verdict == "holds"
    slope, at_128, at_512, *ours = finding.checks
    assert slope.measured == pytest.approx(0.5, abs=0.01)
    assert at_128.measured == pytest.approx(11.31, rel=0.02)
    assert at_512.measured == pytest.approx(22.63, rel=0.02)
    assert [check.premise for check in ours] == [True] * 3


def test_an_attention_without_its_scale_fails_the_premise(monkeypatch):
    plant(monkeypatch, scale=1.0)
    finding = scale.standard_deviation(GIVEN)
    assert finding.verdict == "does not hold"
    assert len(failed(finding)) == 3


def test_scores_of_a_part_of_the_vectors_do_not_grow_with_d(monkeypatch):
    exact = naive.scores
    monkeypatch.setattr(naive, "scores", lambda q, k, *rest: exact(q[..., :64], k[..., :64], *rest))
    assert {"exponent of std(q·k) in d", "std(q·k) at d = 128"} <= {*failed(scale.standard_deviation(GIVEN))}


def test_of_the_printed_weights_the_flat_ones_are_wrong():
    finding = scale.saturation(GIVEN)
    assert finding.verdict == "holds in part"
    assert failed(finding) == ["softmax at m = 1, largest difference from [0.55, 0.2, 0.12, 0.07]"]
    assert "[0.58, 0.21, 0.13, 0.08]" in finding.says[0]
    assert "0.94" in finding.says[0]


def test_with_the_true_weights_printed_the_statement_would_hold(monkeypatch):
    z = [math.exp(logit) for logit in scale.LOGITS]
    monkeypatch.setitem(scale.PRINTED, 1, [round(x / sum(z), 2) for x in z])
    assert scale.saturation(GIVEN).verdict == "holds"


def test_a_softmax_at_twice_the_temperature_is_late_to_saturate(monkeypatch):
    exact = naive.softmax
    monkeypatch.setattr(naive, "softmax", lambda s_BHTS: exact(s_BHTS / 2))
    finding = scale.saturation(GIVEN)
    assert finding.verdict == "does not hold"
    assert "slope of ln of the Jacobian's norm, m = 10 to 20" in failed(finding)


def test_a_softmax_that_passes_no_gradient_on_fails_the_premise(monkeypatch):
    exact = naive.softmax
    monkeypatch.setattr(naive, "softmax", lambda s_BHTS: exact(s_BHTS.detach() + 0 * s_BHTS))
    finding = scale.saturation(GIVEN)
    assert finding.verdict == "does not hold"
    assert failed(finding)[0].startswith("Jacobian by automatic")


def test_without_the_scale_the_jacobian_falls_but_the_gradient_of_the_queries_rises():
    finding = scale.early_gradients(GIVEN)
    assert finding.verdict == "holds in part"
    assert failed(finding) == [
        "|∂L/∂W_q| without the scale over with it, d_head = 128",
        "|∂L/∂W_q| without the scale over with it, d_head = 128, QK-norm",
    ]


def test_the_scale_left_out_of_every_attention_shows_in_early_gradients(monkeypatch):
    plant(monkeypatch, scale=1.0)
    finding = scale.early_gradients(GIVEN)
    assert finding.verdict == "does not hold"
    assert "exponent of the Jacobian norm in d_head, scaled" in failed(finding)


def test_a_scale_moved_into_both_matrices_changes_the_gradient_by_its_root_alone():
    """Scores c q·k with W_q and W_k, or q·k with both times √c: the same scores, dL/dW_q over √c."""
    scaled, moved = untrained.start(GIVEN, [16]), untrained.start(GIVEN, [16], sigma=0.5, scale="none")
    for before_RW, after_RW in zip(scaled[:3], moved[:3], strict=True):
        torch.testing.assert_close(after_RW, before_RW)
    torch.testing.assert_close(moved.gradient_RW, 2 * scaled.gradient_RW, rtol=1e-4, atol=0)
    torch.testing.assert_close(scaled.over_c_RW, 4 * scaled.gradient_RW)


def test_the_numbers_of_early_training_are_those_of_the_whole_matrices():
    found = torch.stack(untrained.start(GIVEN, [16], scale="none"), dim=-1)
    for repetition in range(2):
        gpt = untrained.model(GIVEN, repetition, d_head=16, scale="none", backend="naive")
        inputs_BT, targets_BT, _ = Repeats(torch.arange(256), None, 64, 1).windows(repetition, 8)
        seen, logits_BTV = untrained.run(gpt, inputs_BT)
        loss = -logits_BTV.log_softmax(-1).gather(2, targets_BT.unsqueeze(2)).mean()
        loss.backward()
        s_BTT, pairs, norms = (seen.q_BHTD @ seen.k_BGSD.mT)[:, 0].detach(), [], []
        for b in range(8):
            for t in range(64):
                pairs.append(s_BTT[b, t, : t + 1])
                p = pairs[-1].softmax(0)
                norms += [(p.diag() - torch.outer(p, p)).norm()] if t >= 8 else []
        norm = torch.stack(norms)
        by_hand = torch.cat(pairs).std(), norm.mean(), (norm < 0.01).float().mean()
        gradient = gpt.get_parameter("blocks.0.attention.W_q.weight").grad.norm()
        torch.testing.assert_close(
            found[repetition, 0], torch.stack([*by_hand, gradient, gradient]), rtol=1e-4, atol=0
        )


def test_the_variance_of_queries_and_keys_goes_into_the_factor():
    finding = scale.initial_variance(GIVEN)
    assert finding.verdict == "holds"
    assert [check.measured for check in finding.checks[:6:2]] == pytest.approx([0.25, 1, 4], rel=0.02)
    assert finding.checks[-1].measured == pytest.approx(256 * 0.0004, rel=0.05)


def test_an_attention_that_norms_queries_and_keys_knows_no_initial_variance(monkeypatch):
    plant(monkeypatch, qk_norm=True)
    finding = scale.initial_variance(GIVEN)
    assert finding.verdict == "does not hold"
    assert len(failed(finding)) == 3  # all but sigma = 1


@pytest.mark.parametrize("experiment", [scale.standard_deviation, scale.initial_variance])
def test_the_same_seed_finds_the_same(experiment):
    assert experiment(GIVEN).checks == experiment(GIVEN).checks
