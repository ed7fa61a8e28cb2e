"""Copying scores and K-composition against whole matrices, at a size where these can be built."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from analysis.circuits import add_circuits, copying_scores, k_composition
from analysis.heads import describe_heads, untrained
from analysis.probes import make_probes
from data.loading import load_source
from model.transformer import GPT
from tests.analysis.by_hand import CONFIG, NEXT, T, V, induction_circuit
from tests.model.models import KINDS, build, build_random

every_kind = pytest.mark.parametrize("kind", KINDS)


def centred_gain(norm: nn.Module, C: int) -> Tensor:
    """C x C: what the norm does to x, but for the division."""
    gain_CC = torch.eye(C).double() if norm.weight is None else norm.weight.detach().double().diag()
    mean_CC = torch.full((C, C), 1 / C).double()
    return gain_CC @ (torch.eye(C) - mean_CC) if isinstance(norm, nn.LayerNorm) else gain_CC


def whole_matrices(model: GPT, layer: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """C x C of a head: of its scores, of what it moves; and V x V from a token to the logits."""
    C, block = model.config.d_model, model.blocks[layer]
    q, k, v, o = (W[head].double() for W in block.attention.matrices())
    N_CC = centred_gain(block.attention_norm, C)
    E_VC = model.token_embedding.weight.detach().double()
    if model.config.embed_norm:
        E_VC = E_VC / E_VC.square().mean(-1, keepdim=True).sqrt()
    OV_CC = o @ v @ N_CC
    U_VC = model.head.weight.detach().double() @ centred_gain(model.final_norm, C)
    return N_CC.T @ q.T @ k @ N_CC, OV_CC, U_VC @ OV_CC @ E_VC.T


@every_kind
def test_copying_is_of_the_eigenvalues_of_the_whole_matrix_over_the_vocabulary(kind: str) -> None:
    model = build_random(kind)
    got_LH = copying_scores(model)
    for layer in range(2):
        for head in range(4):
            eigenvalues = torch.linalg.eigvals(whole_matrices(model, layer, head)[2])
            expected = (eigenvalues.sum() / eigenvalues.abs().sum()).real.item()
            assert got_LH[layer, head].item() == pytest.approx(expected, abs=1e-4)


@every_kind
def test_k_composition_is_of_the_norms_of_whole_matrices(kind: str) -> None:
    model = build_random(kind, n_layer=3)
    later = [(2, 3), (1, 0), (2, 1)]
    for (layer, head), score_LH in zip(later, k_composition(model, later), strict=True):
        assert score_LH.shape == (layer, 4)
        QK_CC = whole_matrices(model, layer, head)[0]
        for i in range(layer):
            for j in range(4):
                OV_CC = whole_matrices(model, i, j)[1]
                expected = (QK_CC @ OV_CC).norm() / (QK_CC.norm() * OV_CC.norm())
                assert score_LH[i, j].item() == pytest.approx(expected.item(), abs=1e-6)


def test_a_head_that_copies_scores_1_one_that_forbids_minus_1_and_a_random_one_near_0() -> None:
    model = induction_circuit("naive")
    assert copying_scores(model)[1, 0].item() == pytest.approx(1.0)
    attention = model.attentions()[1]
    attention.W_o.weight.data.neg_()
    assert copying_scores(model)[1, 0].item() == pytest.approx(-1.0)
    # A shifted vocabulary: eigenvalues are roots of unity, which sum to 0.
    attention.W_o.weight.data[NEXT] = attention.W_o.weight.data[NEXT].roll(1, dims=0)
    assert copying_scores(model)[1, 0].item() == pytest.approx(0.0, abs=1e-6)
    random_LH = copying_scores(build("gpt2", d_model=128, d_head=32, tie_embeddings=False, vocab_size=300))
    assert random_LH.abs().max() < 0.3
    assert random_LH.mean().abs() < 0.1


def test_heads_that_share_no_direction_do_not_compose_and_those_of_a_circuit_do() -> None:
    model = induction_circuit("naive")
    (score_LH,) = k_composition(model, [(1, 0)])
    # Both matrices have V singular values of one size, and they meet in all of them: 1 / sqrt(V).
    assert score_LH[0, 0].item() == pytest.approx(V**-0.5)
    assert score_LH[0, 1].isnan()  # it writes nothing
    first, _ = model.attentions()
    first.W_v.weight.data[V:] = first.W_v.weight.data[:V]
    first.W_o.weight.data[NEXT, V:] = first.W_o.weight.data[:, :V].max() * torch.eye(V)
    (score_LH,) = k_composition(model, [(1, 0)])
    assert score_LH[0].tolist() == pytest.approx([V**-0.5, 0.0])


def described(model: GPT) -> dict[str, Any]:
    probes = make_probes(load_source(CONFIG), T, sequences=4, seed=1)
    document = describe_heads(model, probes, True, 1, {})
    add_circuits(document, model, untrained(model, 1))
    return document


def test_heads_json_pairs_the_heads_of_the_circuit_beside_the_others_and_chance() -> None:
    model = induction_circuit("naive")
    first, _ = model.attentions()
    first.W_v.weight.data[V:] = first.W_v.weight.data[:V]
    first.W_o.weight.data[NEXT, V:] = torch.eye(V)
    document = described(model)
    (circuit,) = document["summary"]["circuits"]
    assert (circuit["previous"], circuit["induction"]) == ([0, 0], [1, 0])
    assert circuit["k_composition"] == pytest.approx(V**-0.5)
    assert circuit["others"] == pytest.approx(0.0)
    assert 0 < circuit["random_init"] < circuit["k_composition"]
    copying = {(entry["layer"], entry["head"]): entry["copying"] for entry in document["heads"]}
    assert copying[1, 0]["score"] == pytest.approx(1.0)
    assert copying[1, 1]["score"] is None  # silent
    assert all(-1 < one["random_init"] < 1 for one in copying.values())
    assert json.loads(json.dumps(document, allow_nan=False)) == document


@pytest.mark.parametrize("labels", [{}, {(0, 0): "induction", (1, 1): "previous-token"}])
def test_without_a_previous_token_head_before_an_induction_head_there_is_no_pair(labels: dict) -> None:
    model = build_random()
    heads = [{"layer": i, "head": j} for i in range(2) for j in range(4)]
    heads = [head | {"labels": [labels.get((head["layer"], head["head"]), "sink")]} for head in heads]
    document: dict[str, Any] = {"heads": heads, "summary": {}}
    add_circuits(document, model, build())
    assert document["summary"]["circuits"] == []
    assert all(abs(head["copying"]["score"]) <= 1 for head in heads)


def test_pairs_come_strongest_first_and_others_leave_out_the_pair_alone() -> None:
    model, fresh = build_random(n_layer=3), build(n_layer=3)
    labels = {(0, 0): "previous-token", (1, 3): "previous-token", (1, 1): "induction", (2, 0): "induction"}
    heads = [{"layer": i, "head": j} for i in range(3) for j in range(4)]
    heads = [head | {"labels": [labels.get((head["layer"], head["head"]), "sink")]} for head in heads]
    document: dict[str, Any] = {"heads": heads, "summary": {}}
    add_circuits(document, model, fresh)
    circuits = document["summary"]["circuits"]
    pairs = {((0, 0), (1, 1)), ((0, 0), (2, 0)), ((1, 3), (2, 0))}
    assert {(tuple(one["previous"]), tuple(one["induction"])) for one in circuits} == pairs
    strengths = [one["k_composition"] for one in circuits]
    assert strengths == sorted(strengths, reverse=True)
    for one in circuits:
        later, earlier = tuple(one["induction"]), tuple(one["previous"])
        (own_LH,), (random_LH,) = k_composition(model, [later]), k_composition(fresh, [later])
        assert one["k_composition"] == own_LH[earlier].item()
        assert one["random_init"] == random_LH[earlier].item()
        total, count = own_LH.sum() - own_LH[earlier], own_LH.numel() - 1
        assert one["others"] == pytest.approx((total / count).item())


def test_one_head_in_front_leaves_no_others_and_one_that_starts_silent_no_chance() -> None:
    model, fresh = (make("modern", n_head=1) for make in (build_random, build))
    heads: list[dict] = [
        {"layer": i, "head": 0, "labels": [("previous-token", "induction")[i]]} for i in (0, 1)
    ]
    document: dict[str, Any] = {"heads": heads, "summary": {}}
    add_circuits(document, model, fresh)
    (circuit,) = document["summary"]["circuits"]
    assert circuit["others"] is circuit["random_init"] is None
    assert heads[0]["copying"]["random_init"] is None
    assert 0 < circuit["k_composition"] <= 1
