"""Initial weights: their distribution, where they come from, and what an untrained model predicts."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.model.models import KINDS, VOCAB, build, tokens

WIDE = {"d_model": 96, "d_head": None, "d_mlp": None, "n_layer": 3}


def assert_normal(x: Tensor, std: float, name: str) -> None:
    """Mean and standard deviation within five standard errors."""
    n = x.numel()
    assert abs(x.mean().item()) <= 5 * std / math.sqrt(n), name
    assert abs(x.std().item() - std) <= 5 * std / math.sqrt(2 * n), name


STUDIED = [
    {"qk": "tied", "value": "key", "mlp": "swiglu"},
    {"qk": "identity", "value": "identity", "mlp": "swiglu"},
]


@pytest.mark.parametrize("changes", [{}, *STUDIED])
def test_gpt2_draws_everything_from_one_width_but_the_residual_projections(changes: dict) -> None:
    """Radford et al. 2019: 0.02, and 0.02 / sqrt(2 L) for what is added to the residual stream."""
    model = build("gpt2", **WIDE, **changes, sink="learned", gate=True)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sink_H")):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("W_o.weight", "W_out.weight"))
            assert_normal(parameter, 0.02 / math.sqrt(6) if residual else 0.02, name)


@pytest.mark.parametrize(
    "changes", [{}, {"position": "learned", "norm": "layernorm", "mlp": "gelu"}, *STUDIED]
)
def test_zero_residual_draws_by_fan_in_and_starts_every_branch_at_zero(changes: dict) -> None:
    model = build("modern", **WIDE, **changes, sink="learned", gate=True)
    for name, parameter in model.named_parameters():
        if name.endswith(("W_o.weight", "W_out.weight", "head.weight", "sink_H")):
            assert (parameter == 0).all(), name
        elif "embedding" in name:
            assert_normal(parameter, 1.0, name)
        else:
            assert_normal(parameter, parameter.size(1) ** -0.5, name)


def test_zero_residual_predicts_uniformly() -> None:
    ids = tokens(4, 21)
    logits_BTV = build("modern")(ids[:, :-1])
    assert (logits_BTV == 0).all()
    loss = F.cross_entropy(logits_BTV.flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(VOCAB), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_from_the_given_generator_alone(kind: str) -> None:
    before = torch.get_rng_state()
    one, same, other = build(kind, seed=1), build(kind, seed=1), build(kind, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.token_embedding.weight, other.token_embedding.weight)
