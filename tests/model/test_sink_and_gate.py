"""Sinks and gates of an attention layer, against the formulas in float64: outputs and all gradients."""

import math

import pytest
import torch
from torch import Tensor

from analysis.rows import rows_of
from analysis.statistics import REGISTRY
from configs.schema import Model
from model.attention import CausalSelfAttention, Observation
from model.backends import BACKENDS
from tests.analysis.definitions import Layer, scores
from tests.model.definition import attention
from tests.model.models import build, build_random, tokens
from tests.model.test_transformer import observations

C, T = 24, 140  # more than one block of rows
SINKS = pytest.mark.parametrize("sink", ["none", "zero", "learned"])
GATES = pytest.mark.parametrize("gate", [False, True])
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def layer(**changes: object) -> CausalSelfAttention:
    """Four heads on two of keys; every parameter N(0, 0.5), the sink logits too."""
    keys = {"d_model": C, "n_kv_head": 2, "position": "learned", "context_length": T, **changes}
    made = CausalSelfAttention(Model(**keys), layer=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return made


def stream(B: int = 2, length: int = T) -> Tensor:
    return torch.randn(B, length, C, generator=torch.Generator().manual_seed(1))


def by_hand(made: CausalSelfAttention, sink: str, x_BTC: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """`W_o` of each head's output times its gate, from float64 weights."""
    q, k, v = (
        torch.stack((x_BTC @ weights[f"{W}.weight"].T).split(made.d_head, dim=-1), dim=1)
        for W in ("W_q", "W_k", "W_v")
    )
    sink_H = {"none": None, "zero": torch.zeros(q.size(1)), "learned": weights.get("sink_H")}[sink]
    heads = attention(q, k, v, scale=1 / math.sqrt(made.d_head), sink_H=sink_H).out_BHTD.unbind(1)
    if "W_gate.weight" in weights:
        gate_BTH = 1 / (1 + torch.exp(-x_BTC @ weights["W_gate.weight"].T))
        heads = [out_BTD * gate_BTH[..., h : h + 1] for h, out_BTD in enumerate(heads)]
    return torch.cat(list(heads), dim=-1) @ weights["W_o.weight"].T


@every_backend
@SINKS
@GATES
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_output_and_all_gradients_are_those_of_the_formulas(
    sink: str, gate: bool, kv_heads: int, backend: str
) -> None:
    made = layer(sink=sink, gate=gate, n_kv_head=kv_heads, backend=backend)
    x_BTC = stream().requires_grad_()
    out_BTC = made(x_BTC)
    cotangent = torch.randn(out_BTC.shape, generator=torch.Generator().manual_seed(2))
    names = [name for name, _ in made.named_parameters()]
    assert ("sink_H" in names, "W_gate.weight" in names) == (sink == "learned", gate)
    got = torch.autograd.grad((out_BTC * cotangent).sum(), [x_BTC, *made.parameters()])

    weights = {name: p.detach().double().requires_grad_() for name, p in made.named_parameters()}
    x_double = x_BTC.detach().double().requires_grad_()
    expected_BTC = by_hand(made, sink, x_double, weights)
    leaves = [x_double, *weights.values()]
    expected = torch.autograd.grad((expected_BTC * cotangent).sum(), leaves)

    for name, one, other in zip(
        ["output", "x", *names], [out_BTC, *got], [expected_BTC, *expected], strict=True
    ):
        assert other.abs().max() > 0.1, name
        bound = 1e-5 * other.abs().max().item()
        torch.testing.assert_close(one.double(), other, atol=bound, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@every_backend
def test_a_sink_that_is_learned_starts_as_the_one_at_zero_and_moves(backend: str) -> None:
    zero, learned, none = (build(sink=sink, backend=backend) for sink in ("zero", "learned", "none"))
    logits = [model(tokens(2, 20)) for model in (zero, learned, none)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2], atol=1e-6)
    assert zero.num_parameters() == none.num_parameters() == learned.num_parameters() - 2 * 4
    logits[1].logsumexp(-1).sum().backward()
    assert all((made.sink_H.grad != 0).all() for made in learned.attentions())


@every_backend
@SINKS
def test_a_gate_of_zero_weights_halves_the_output(sink: str, backend: str) -> None:
    gated, free = (layer(sink=sink, gate=gate, backend=backend) for gate in (True, False))
    free.load_state_dict({name: x for name, x in gated.state_dict().items() if name != "W_gate.weight"})
    with torch.no_grad():
        gated.W_gate.weight.zero_()
    torch.testing.assert_close(gated(stream()), free(stream()) / 2, atol=1e-6, rtol=1e-5)


@every_backend
def test_a_gate_shut_silences_its_head_and_no_other(backend: str) -> None:
    """A feature that is 1 everywhere makes the gates constant: 0 for head 2 and 1 for the others."""
    gated, free = (layer(gate=gate, backend=backend) for gate in (True, False))
    x_BTC = stream()
    x_BTC[..., 0] = 1.0
    free.load_state_dict({name: x for name, x in gated.state_dict().items() if name != "W_gate.weight"})
    with torch.no_grad():
        gated.W_gate.weight.zero_()
        gated.W_gate.weight[:, 0] = torch.tensor([100.0, 100.0, -100.0, 100.0])
        free.W_o.weight[:, 2 * free.d_head : 3 * free.d_head] = 0
    torch.testing.assert_close(gated(x_BTC), free(x_BTC), atol=1e-5, rtol=0)


@SINKS
@GATES
@every_backend
def test_what_is_observed_is_what_the_output_layer_reads(sink: str, gate: bool, backend: str) -> None:
    made, seen = layer(sink=sink, gate=gate, backend=backend), list[Observation]()
    read: list[Tensor] = []
    made.W_o.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    made.observers.append(seen.append)
    made(stream())
    assert torch.equal(seen[0].out_BHTD.transpose(1, 2).flatten(2), read[0])
    assert seen[0].W_o is made.W_o.weight
    assert seen[0].sink_H is made.sink_H


@every_backend
def test_the_norm_of_a_head_counts_its_gate(backend: str) -> None:
    """Head norms are over their mean: a head whose gate is nearly shut has nearly none, the others share."""
    made, free = (layer(gate=gate, backend=backend) for gate in (True, False))
    free.load_state_dict({name: x for name, x in made.state_dict().items() if name != "W_gate.weight"})
    gates_H = torch.tensor([0.9, 0.5, 0.01, 0.2])
    x_BTC = stream()
    x_BTC[..., 0] = 1.0
    with torch.no_grad():
        made.W_gate.weight.zero_()
        made.W_gate.weight[:, 0] = torch.logit(gates_H)
    norms = []
    for module in (made, free):
        seen = list[Observation]()
        module.observers.append(seen.append)
        module(x_BTC)
        norms.append(REGISTRY["head_norm"][1](rows_of(seen[0])))
    expected = norms[1] * gates_H / (norms[1] * gates_H).mean()
    torch.testing.assert_close(norms[0], expected.double(), atol=1e-5, rtol=0)


@every_backend
@SINKS
def test_statistics_of_a_model_with_sink_and_gate_agree_with_their_definitions(
    sink: str, backend: str
) -> None:
    """The definitions get queries and keys as observed, and values from what entered the layer."""
    model = build_random(sink=sink, gate=True, backend=backend, context_length=64, std=0.5)
    inputs: list[Tensor] = []
    for made in model.attentions():
        made.register_forward_pre_hook(lambda module, x: inputs.append(x[0]))
    watched = observations(model, tokens(3, 64))
    for made, x_BTC, seen in zip(model.attentions(), inputs, watched, strict=True):
        options = {"scale": seen.scale} | ({} if sink == "none" else {"sink_H": made.sink_H.detach()})
        v_BGSD = made.W_v(x_BTC).unflatten(-1, (-1, made.d_head)).transpose(1, 2).detach()
        defined = Layer(seen.q_BHTD, seen.k_BGSD, v_BGSD, made.W_o.weight.detach(), options)
        expected, rows = scores(defined, 21), rows_of(seen, 21)
        for name, (_, function) in REGISTRY.items():
            if name != "head_norm":  # the one that counts the gate: above
                bound = defined.attention().row_bound if name == "max_logit" else 1e-5
                got = function(rows).double()
                torch.testing.assert_close(got, expected[name].double(), atol=bound, rtol=0, msg=name)
