"""An induction circuit set by hand in the weights of a `GPT`: its heads have the scores that say so."""

import math

import pytest
import torch

from analysis.probes import make_probes, measure
from configs.schema import Config
from data.loading import load_source
from model.backends import BACKENDS
from model.transformer import GPT

T, V = 64, 65  # 64 symbols and BOS
CONFIG = Config.model_validate(
    {
        "data": {"source": "repeats"},
        "model": {
            "n_layer": 2,
            "n_head": 2,
            "d_model": 3 * V + T,
            "d_head": V,
            "context_length": T,
            "position": "learned",
            "mlp": "none",
            "norm": "rmsnorm",
            "norm_gain": False,
        },
    }
)
# Parts of the residual stream: the token, its place, the token before it, the prediction; one-hot each.
TOKEN, PLACE, BEFORE, NEXT = (
    slice(start, start + n) for start, n in ((0, V), (V, T), (V + T, V), (2 * V + T, V))
)
SCORE = 40.0  # of a match, against 0: all the weight


def induction_circuit(backend: str, distance: int = 1) -> GPT:
    """Head 0 of layer 0 writes the token `distance` before into BEFORE; that of layer 1 looks for its own.

    Head 1 of both layers is silent and uniform. One-hot parts give every activation the same norm, sqrt(2)
    and then sqrt(3), so that the norm in front of each layer is a known factor.
    """
    config = CONFIG.model.model_copy(update={"backend": backend})
    model = GPT(config, V, torch.Generator())
    C, D = config.d_model, config.d_head
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.token_embedding.weight[:, TOKEN] = torch.eye(V)
        model.position_embedding.weight[:, PLACE] = torch.eye(T)
        first, second = model.attentions()
        for layer, query, key, target, back, parts in (
            (first, PLACE, PLACE, BEFORE, distance, 2),
            (second, TOKEN, BEFORE, NEXT, 0, 3),
        ):
            n, dot = (
                query.stop - query.start,
                C / parts * D**-0.5,
            )  # scaled product of two equal one-hot parts
            # Place i asks for place i - distance, a token for itself; keys are as they are.
            layer.W_q.weight[:n, query] = SCORE / dot * torch.eye(n).roll(back, dims=1).triu()
            layer.W_k.weight[:n, key] = torch.eye(n)
            layer.W_v.weight[:V, TOKEN] = torch.eye(V)
            layer.W_o.weight[target, :V] = math.sqrt(parts / C) * torch.eye(V)
        model.head.weight[:, NEXT] = 3 * torch.eye(V)
    return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_circuit_set_by_hand_is_recognised_and_its_other_heads_are_not(backend: str) -> None:
    probes = make_probes(load_source(CONFIG), T, sequences=4, seed=1)
    record = measure(induction_circuit(backend), probes, bos_trained=True)
    scores = {name: torch.tensor(score_LH) for name, score_LH in record["scores"].items()}

    for name in ("induction", "induction_short", "induction_long"):
        assert scores[name][1, 0] > 0.95, name
    for name in ("duplicate", "duplicate_short", "duplicate_long", "previous", "current", "sink"):
        assert scores[name][1, 0] < 0.05, name
    assert scores["previous"][0, 0] > 0.95
    for name in ("previous2", "current", "induction", "duplicate"):
        assert scores[name][0, 0] < 0.05, name

    # The silent heads are uniform: 1 / (i + 1) on the stripe, and less of it for the longer block of 31.
    null = sum(1 / (i + 1) for i in range(32, 63)) / 31
    for layer in (0, 1):
        assert scores["entropy_normalized"][layer, 1].item() == pytest.approx(1.0, abs=1e-5)
        assert scores["induction"][layer, 1].item() == pytest.approx(null, abs=1e-6)
        assert scores["head_norm"][layer].tolist() == pytest.approx([2.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_circuit_predicts_the_second_block_and_not_the_first(backend: str) -> None:
    probes = make_probes(load_source(CONFIG), T, sequences=4, seed=1)
    losses = measure(induction_circuit(backend), probes, bos_trained=True)["model"]
    assert losses["repeat_loss_2"] < 0.05
    assert losses["repeat_loss_1"] > math.log(V - 1)


@pytest.mark.parametrize(("passes", "fails"), [("long", "short"), ("short", "long")])
def test_a_head_that_only_knows_a_distance_passes_at_one_block_length_and_not_in_the_headline(
    passes: str, fails: str
) -> None:
    lengths = {"short": 15, "long": 31}
    model = induction_circuit("naive", distance=lengths[passes] - 1)
    record = measure(model, make_probes(load_source(CONFIG), T, sequences=4, seed=1), bos_trained=True)
    score = {name: score_LH[0][0] for name, score_LH in record["scores"].items()}
    assert score[f"induction_{passes}"] == pytest.approx(1.0, abs=1e-6)
    assert score[f"induction_{fails}"] < 0.1
    assert score["induction"] == score[f"induction_{fails}"]


def test_without_the_previous_token_head_there_is_no_induction_head() -> None:
    """The circuit needs both layers: the score is of what the heads do together, not of where one looks."""
    model = induction_circuit("naive")
    with torch.no_grad():
        model.attentions()[0].W_o.weight.zero_()
    record = measure(model, make_probes(load_source(CONFIG), T, sequences=4, seed=1), bos_trained=True)
    assert record["scores"]["induction"][1][0] < 0.05
    assert record["model"]["repeat_loss_2"] > math.log(V) / 2
