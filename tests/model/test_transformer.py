"""The whole model: causal, equal on every backend, sized and bounded as its configuration says."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.capture import observe
from model.attention import Observation
from model.backends import BACKENDS
from model.transformer import GPT
from tests.model.models import KINDS, VOCAB, build, build_random, tokens


def observations(model: GPT, tokens_BT: Tensor) -> list[Observation]:
    """What each layer computes in one forward pass."""
    seen: list[Observation] = []
    with observe(model, seen.append), torch.no_grad():
        model(tokens_BT)
    return seen


def embedding_gradients(model: GPT, tokens_BT: Tensor, places: list[int]) -> Tensor:
    """Norm of the gradient of the logits at each of `places` with respect to the embedding at every place."""
    leaf: list[Tensor] = []

    def cut(module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
        leaf.append(output.detach().requires_grad_())
        return leaf[0]

    handle = model.token_embedding.register_forward_hook(cut)
    logits_BTV = model(tokens_BT)
    handle.remove()
    weight_V = torch.arange(1.0, VOCAB + 1)
    rows = [
        torch.autograd.grad((logits_BTV[:, t] * weight_V).sum(), leaf[0], retain_graph=True)[0]
        for t in places
    ]
    return torch.stack(rows).norm(dim=-1).squeeze(1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_depend_on_every_token_up_to_theirs_and_on_no_later_one(kind: str, backend: str) -> None:
    gradient_TT = embedding_gradients(build_random(kind, backend=backend), tokens(1, 12), list(range(12)))
    earlier = torch.ones(12, 12, dtype=torch.bool).tril()
    assert (gradient_TT[~earlier] == 0).all()
    assert (gradient_TT[earlier] > 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_causality_holds_across_blocks_of_rows(backend: str) -> None:
    model = build_random(backend=backend, context_length=150, std=0.1)
    places = [126, 127, 128, 149]
    for t, gradient_T in zip(places, embedding_gradients(model, tokens(1, 150), places), strict=True):
        assert (gradient_T[t + 1 :] == 0).all()
        assert (gradient_T[: t + 1] > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_backends_agree_on_logits_and_on_the_gradient_of_every_parameter(kind: str) -> None:
    """Relative to the largest entry; 140 places are more than one block of rows."""
    ids = tokens(2, 141)
    results = {}
    for backend in BACKENDS:
        model = build_random(kind, backend=backend, context_length=140)
        logits_BTV = model(ids[:, :-1])
        F.cross_entropy(logits_BTV.flatten(0, 1), ids[:, 1:].flatten()).backward()
        results[backend] = {"logits": logits_BTV.detach()} | {n: p.grad for n, p in model.named_parameters()}
    for backend in ("sdpa", "blocks"):
        for name, expected in results["naive"].items():
            bound = 1e-5 * expected.abs().max().item() + 1e-8
            torch.testing.assert_close(results[backend][name], expected, atol=bound, rtol=0, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_number_of_parameters(kind: str, bias: bool) -> None:
    model = build(kind, bias=bias)
    c = model.config
    L, C, D, H, G, V = c.n_layer, c.d_model, c.d_head, c.n_head, c.n_kv_head, VOCAB
    norm = C * c.norm_gain * (1 + (bias and c.norm == "layernorm"))
    made = [H * D] * (c.qk != "identity") + [G * D] * (c.qk == "separate") + [G * D] * (c.value == "project")
    attention = sum((C + bias) * width for width in made) + H * D * C + bias * C
    attention += H * (c.sink == "learned") + C * H * c.gate
    hidden = 1 + (c.mlp == "swiglu")
    mlp = 0 if c.mlp == "none" else (hidden + 1) * C * c.d_mlp + bias * (hidden * c.d_mlp + C) + norm
    places = c.context_length * C * (c.position == "learned")
    expected = V * C * (1 if c.tie_embeddings else 2) + places + L * (attention + norm + mlp) + norm
    assert sum(p.numel() for p in model.parameters()) == model.num_parameters() == expected


def test_tied_embeddings_are_one_parameter() -> None:
    model = build("gpt2")
    assert model.head.weight is model.token_embedding.weight
    untied = build("gpt2", tie_embeddings=False)
    assert untied.head.weight is not untied.token_embedding.weight


@pytest.mark.parametrize("std", [0.3, 10.0])
def test_softcap_bounds_the_logits_by_its_tanh(std: float) -> None:
    capped, free = (build_random(logit_softcap=cap, std=std)(tokens(2, 20)) for cap in (15.0, 0.0))
    assert capped.abs().max() <= 15.0
    torch.testing.assert_close(capped, 15 * torch.tanh(free / 15), atol=1e-5, rtol=0)


@pytest.mark.parametrize("gain", [1.0, 1.2, 3.0])
def test_qk_norm_bounds_every_score(gain: float) -> None:
    """Root mean square 1 makes the norm sqrt(D): |s| <= gain^2 D / sqrt(D), whatever the weights."""
    bound = gain**2 * 6**0.5
    for seen in observations(build_random("modern", qk_gain=gain, std=10.0), tokens(4, 32)):
        score_BHTS = seen.scale * seen.q_BHTD @ seen.k_BGSD.mT
        assert score_BHTS.abs().max() <= bound * (1 + 1e-6)
        assert score_BHTS.abs().max() > 0.8 * bound
    [first, _] = observations(build_random("modern", qk_norm=False, qk_gain=None, std=10.0), tokens(4, 32))
    assert (first.scale * first.q_BHTD @ first.k_BGSD.mT).abs().max() > 10 * bound


def test_shape_of_what_a_layer_shows() -> None:
    for layer, seen in enumerate(observations(build("grouped", n_head=6, d_head=8), tokens(3, 20))):
        assert seen.layer == layer
        assert seen.q_BHTD.shape == seen.out_BHTD.shape == (3, 6, 20, 8)
        assert seen.k_BGSD.shape == (3, 2, 20, 8)
        assert seen.lse_BHT.shape == (3, 6, 20)
        assert seen.W_o.shape == (24, 48)
        assert seen.scale == pytest.approx(8**-0.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_watching_does_not_change_the_logits(backend: str) -> None:
    model = build_random(backend=backend)
    with observe(model, lambda seen: None):
        watched = model(tokens(2, 20))
    torch.testing.assert_close(watched, model(tokens(2, 20)), atol=1e-6, rtol=0)


def test_heads_see_each_head_side_by_side_before_they_are_mixed() -> None:
    """Silencing features h D ... (h + 1) D there is the same as silencing those columns of W_o."""
    model = build_random()
    attention = model.attentions()[1]
    D, head = attention.d_head, 2
    kept = torch.ones(model.config.n_head * D)
    kept[head * D : (head + 1) * D] = 0
    handle = attention.heads.register_forward_hook(lambda module, inputs, out: out * kept)
    silenced = model(tokens(2, 20))
    handle.remove()
    assert not torch.allclose(silenced, model(tokens(2, 20)), atol=1e-3)
    with torch.no_grad():
        attention.W_o.weight *= kept
    torch.testing.assert_close(silenced, model(tokens(2, 20)), atol=1e-5, rtol=0)
