"""Linear layers in bfloat16 around float32 weights, residual stream and attention."""

import pytest
import torch

from model.layers import PRECISIONS, Linear
from tests.model.definition import attention
from tests.model.models import KINDS, build_random, tokens
from tests.model.test_transformer import observations

ROUNDING = 2.0**-8  # largest relative error of rounding to bfloat16, which keeps 8 significant bits


@pytest.mark.parametrize("bias", [False, True])
def test_a_bf16_layer_is_off_by_the_rounding_of_inputs_weights_and_output(bias: bool) -> None:
    """Input and weight each move a product by ROUNDING; the output moves by it once more."""
    generator = torch.Generator().manual_seed(0)
    layer = Linear(300, 50, bias)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.0, 1.0, generator)
    x = torch.randn(40, 300, generator=generator)
    exact = layer(x)
    layer.compute_dtype = torch.bfloat16
    rounded = layer(x)
    assert rounded.dtype == torch.bfloat16
    assert layer.weight.dtype == torch.float32
    products = x.abs() @ layer.weight.abs().T + (layer.bias.abs() if bias else 0)
    assert ((rounded.float() - exact).abs() <= ROUNDING * (2.1 * products + exact.abs())).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("precision", "rounding"), [("bf16", ROUNDING), ("fp16", 2.0**-11)])
def test_a_model_in_half_precision_stays_near_the_float32_one(
    kind: str, precision: str, rounding: float
) -> None:
    """Three independent roundings in each of the 4 L + 1 linear layers that a token passes."""
    model = build_random(kind)
    exact = model(tokens(4, 32))
    rounded = model.compute_in(PRECISIONS[precision])(tokens(4, 32))
    assert rounded.dtype == torch.float32
    error = ((rounded - exact).norm() / exact.norm()).item()
    assert 0 < error < rounding * (3 * (4 * model.config.n_layer + 1)) ** 0.5
    assert torch.equal(model.compute_in(torch.float32)(tokens(4, 32)), exact)


def test_bf16_layers_leave_weights_gradients_and_attention_in_float32() -> None:
    model = build_random().compute_in(torch.bfloat16)
    model(tokens(2, 32)).sum().backward()
    assert {x.dtype for p in model.parameters() for x in (p, p.grad)} == {torch.float32}
    for seen in observations(model, tokens(2, 32)):
        assert {x.dtype for x in (seen.q_BHTD, seen.k_BGSD, seen.out_BHTD, seen.lse_BHT)} == {torch.float32}
        expected = attention(seen.q_BHTD, seen.k_BGSD, seen.k_BGSD, scale=seen.scale)
        error = (seen.lse_BHT - expected.lse_BHT).abs().max().item()
        assert error <= expected.row_bound  # a bfloat16 score would be off by some 1e-2
