"""Dropout on attention weights: unbiased, the same mask forward and backward, absent in evaluation."""

import pytest
import torch

from model.backends import BACKENDS, blocks
from tests.model.definition import attention
from tests.model.models import build_random, tokens

P = 0.3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize(("T", "draws"), [(6, 4000), (140, 300)])
def test_dropout_leaves_the_mean_and_adds_the_variance_of_independent_weights(
    backend: str, watched: bool, T: int, draws: int
) -> None:
    """Each weight is dropped by itself, the rest scaled: mean `A v`, variance `p / (1-p) sum_j A_j^2 v_j^2`.

    The copies of one sequence in a batch are the draws. A mean is off by six standard errors once in 10^9.
    """
    generator = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(1, 2, T, 3, generator=generator) for _ in range(3))
    sink_H = torch.tensor([0.5, -1.0])
    expected = attention(q, k, v, scale=1.0, sink_H=sink_H)
    variance = P / (1 - P) * (expected.A_BHTS**2 @ v.double() ** 2)
    copies = [x.expand(draws, -1, -1, -1) for x in (q, k, v)]
    torch.manual_seed(0)
    out, _ = BACKENDS[backend](*copies, scale=1.0, sink_H=sink_H, dropout_p=P, return_lse=watched)
    off = (out.double().mean(0) - expected.out_BHTD[0]).abs()
    assert (off <= 6 * (variance[0] / draws).sqrt() + 1e-5).all()
    # Over all rows and features the relative error of a variance is below 5 %.
    assert out.double().var(0).sum().item() == pytest.approx(variance.sum().item(), rel=0.05)


@pytest.mark.parametrize("backend", ["naive", "blocks"])
def test_the_mask_of_the_backward_pass_is_that_of_the_forward_pass(backend: str) -> None:
    """With the dropped weights M fixed, `out = M v`: `<out, w> = <v, gradient of it>`, for this M only."""
    T = 2 * blocks.ROWS + 44
    generator = torch.Generator().manual_seed(0)
    q, k, v, w = (torch.randn(2, 2, T, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    v.requires_grad_()
    torch.manual_seed(5)
    out, _ = BACKENDS[backend](q, k, v, scale=0.5, dropout_p=P)
    torch.rand(100)  # whatever draws in between must not matter
    state = torch.get_rng_state()
    product = (out * w).sum()
    product.backward()
    assert product.item() == pytest.approx((v * v.grad).sum().item(), rel=1e-9)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("backend", ["naive", "blocks"])
def test_gradients_with_dropout_are_those_of_the_function_of_that_seed(backend: str) -> None:
    """Finite differences in float64 under one seed, for q, k, v and the sink, over two blocks of rows."""
    generator = torch.Generator().manual_seed(1)
    T = blocks.ROWS + 5
    shapes = [(1, 2, T, 3), (1, 1, T, 3), (1, 1, T, 3), (2,)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def seeded(q, k, v, sink_H):
        torch.manual_seed(3)
        options = {"scale": 0.6, "window": 40, "sink_H": sink_H, "dropout_p": P}
        return BACKENDS[backend](q, k, v, **options)[0]

    assert torch.autograd.gradcheck(seeded, [x.requires_grad_() for x in inputs], fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_does_not_reach_the_log_sum_exp(backend: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 4, generator=torch.Generator().manual_seed(0))
    _, lse = BACKENDS[backend](q, k, v, scale=0.5, dropout_p=P, return_lse=True)
    _, exact = BACKENDS[backend](q, k, v, scale=0.5, return_lse=True)
    torch.testing.assert_close(lse, exact, atol=1e-6, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_drops_in_training_and_never_in_evaluation(backend: str) -> None:
    model = build_random(backend=backend, dropout=P)
    exact = build_random(backend=backend)(tokens(2, 20))
    model.train()
    first, second = model(tokens(2, 20)), model(tokens(2, 20))
    assert not torch.allclose(first, second, atol=1e-3)
    assert not torch.allclose(first, exact, atol=1e-3)
    model.eval()
    assert torch.equal(model(tokens(2, 20)), exact)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_attention_layer_drops_weights_of_its_own(backend: str) -> None:
    """Without the dropout on embedding and residual branches around it."""
    layer = build_random(backend=backend, dropout=P).attentions()[0].train()
    x_BTC = torch.randn(1, 20, 24, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(layer(x_BTC), layer(x_BTC), atol=1e-3)
    layer.eval()
    assert torch.equal(layer(x_BTC), layer(x_BTC))


def test_a_model_drops_from_the_embedding_and_from_each_residual_branch() -> None:
    """A share P of the numbers, within five standard errors; the others grow by 1 / (1 - P)."""
    model = build_random(dropout=P, n_layer=1).train()
    block, stream = model.blocks[0], {}
    handles = [
        model.token_embedding.register_forward_hook(lambda _, inputs, out: stream.update(embedding=out)),
        block.register_forward_hook(lambda _, inputs, out: stream.update(start=inputs[0], end=out)),
        block.mlp_norm.register_forward_pre_hook(lambda _, inputs: stream.update(middle=inputs[0])),
    ]
    torch.manual_seed(0)
    model(tokens(16, 32))
    for handle in handles:
        handle.remove()
    start, middle, end = stream["start"], stream["middle"], stream["end"]
    for added in (start, middle - start, end - middle):
        dropped = (added == 0).float()
        assert abs(dropped.mean().item() - P) <= 5 * (P * (1 - P) / dropped.numel()) ** 0.5
    kept = start != 0
    torch.testing.assert_close(start[kept], stream["embedding"][kept] / (1 - P), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("dropout", "length", "backend"),
    [(0.0, 17, "sdpa"), (0.0, 2048, "sdpa"), (P, 1024, "sdpa"), (P, 1025, "blocks")],
)
def test_auto_takes_the_fused_kernel_unless_dropout_would_make_it_build_a_large_matrix(
    dropout: float, length: int, backend: str
) -> None:
    model = build_random(backend="auto", dropout=dropout, context_length=length)
    assert {layer.backend for layer in model.attentions()} == {backend}
