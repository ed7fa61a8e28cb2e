"""Rotary positions: scores see only distances, and the turn is a product of complex numbers."""

import pytest
import torch

from configs.schema import Model
from model.attention import CausalSelfAttention, Observation
from model.backends import naive

T, D = 257, 12


def observed_layer(
    theta: float | None, x_BTC: torch.Tensor, **keys: object
) -> tuple[CausalSelfAttention, Observation]:
    """A layer of two heads with random projections, and what enters its kernel."""
    config = Model(n_head=2, d_model=16, d_head=D, context_length=T, rope_theta=theta, **keys)
    layer = CausalSelfAttention(config, layer=0)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3, generator)
    seen: list[Observation] = []
    layer.observers.append(seen.append)
    with torch.no_grad():
        layer(x_BTC)
    return layer, seen[0]


@pytest.mark.parametrize("theta", [100.0, 10000.0])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_scores_of_equal_tokens_depend_on_their_distance_alone(theta: float, qk_norm: bool) -> None:
    """One token everywhere: each diagonal of the score matrix is constant, and the diagonals differ."""
    x_BTC = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(1)).expand(1, T, 16)
    _, seen = observed_layer(theta, x_BTC, qk_norm=qk_norm)
    s_HTT = naive.scores(seen.q_BHTD, seen.k_BGSD, scale=seen.scale)[0]
    for distance in (0, 1, 5, 200):
        diagonal = s_HTT.diagonal(-distance, dim1=1, dim2=2)
        torch.testing.assert_close(diagonal, diagonal[:, :1].expand_as(diagonal), atol=1e-5, rtol=0)
    assert s_HTT[:, -1, :].std(-1).min() > 0.05


@pytest.mark.parametrize("theta", [100.0, 10000.0])
def test_turn_is_a_complex_product(theta: float) -> None:
    """Feature f and feature f + D/2 are one complex number, turned by `t theta^(-2 f / D)`."""
    x_BTC = torch.randn(2, T, 16, generator=torch.Generator().manual_seed(1))
    layer, seen = observed_layer(theta, x_BTC)
    place_T1 = torch.arange(T, dtype=torch.float64)[:, None]
    feature_F = torch.arange(D // 2, dtype=torch.float64)
    angle_TF = place_T1 * theta ** (-2 * feature_F / D)
    turn_TF = torch.polar(torch.ones_like(angle_TF), angle_TF)
    for W, turned_BHTD in ((layer.W_q, seen.q_BHTD), (layer.W_k, seen.k_BGSD)):
        x_BHTD = (x_BTC.double() @ W.weight.double().mT).unflatten(-1, (2, D)).transpose(1, 2)
        product = torch.complex(x_BHTD[..., : D // 2], x_BHTD[..., D // 2 :]) * turn_TF
        expected = torch.cat([product.real, product.imag], dim=-1)
        torch.testing.assert_close(turned_BHTD.double(), expected, atol=1e-5, rtol=0)


def test_without_positions_the_order_of_earlier_tokens_does_not_matter() -> None:
    """Learned positions are added to the embedding: a layer by itself sees a set; rotary sees an order."""
    x_BTC = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(1))
    shuffled = x_BTC[:, [3, 1, 0, 2, 7, 6, 5, 4, 8]]
    last = {}
    for position in ("learned", "rotary"):
        theta = 10000.0 if position == "rotary" else None
        outs = [observed_layer(theta, x, position=position)[1].out_BHTD[:, :, -1] for x in (x_BTC, shuffled)]
        last[position] = (outs[0] - outs[1]).abs().max()
    assert last["learned"] < 1e-6
    assert last["rotary"] > 1e-2
