"""Heads beside their nulls and intervals, and the rules that label them."""

import json
import math
from dataclasses import replace

import pytest
import torch

from analysis.heads import chance_of, describe_heads, in_words, labels_of
from analysis.probes import Probes, make_probes
from configs.schema import Config
from data.loading import load_source
from model.backends import BACKENDS
from model.transformer import GPT
from tests.analysis.by_hand import CONFIG, T, induction_circuit
from tests.analysis.probing import only, score


def probes_of(config: Config, sequences: int = 4) -> Probes:
    return make_probes(load_source(config), config.model.context_length, sequences, seed=1)


def described(model: GPT, probes: Probes | None = None) -> dict:
    return describe_heads(model, probes or probes_of(CONFIG), True, 1, {"run": "a", "step": 3})


def small(seed: int = 0, **model: object) -> GPT:
    keys = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "d_model": 32, "context_length": T, **model}
    config = Config.model_validate({"model": keys})
    return GPT(config.model, 65, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_of_a_circuit_set_by_hand_get_their_labels_and_the_silent_ones_none(backend: str) -> None:
    document = described(induction_circuit(backend))
    labels = {(head["layer"], head["head"]): head["labels"] for head in document["heads"]}
    assert labels == {(0, 0): ["previous-token"], (0, 1): [], (1, 0): ["induction"], (1, 1): []}
    found = {"induction": [[1, 0]], "previous-token": [[0, 0]]}
    assert {label: heads for label, heads in document["summary"]["labels"].items() if heads} == found
    assert document["summary"]["untyped"] == 2
    assert in_words(document) == "induction 1.0; previous-token 0.0; untyped 2 of 4"


@pytest.mark.parametrize("passes", [15, 31])
def test_a_head_that_only_knows_a_distance_is_no_induction_head(passes: int) -> None:
    heads = described(induction_circuit("naive", distance=passes - 1))["heads"]
    assert heads[0]["labels"] == []
    assert max(heads[0]["scores"]["induction_short"], heads[0]["scores"]["induction_long"]) > 0.99


NOTHING = dict.fromkeys(
    [f"{name}{end}" for name in ("induction", "duplicate") for end in ("", "_short", "_long")]
    + ["previous", "previous_argmax", "previous2", "previous2_argmax", "current", "sink"],
    0.0,
)


@pytest.mark.parametrize(
    ("scores", "labels"),
    [
        ({}, []),
        ({"induction_short": 0.3, "induction_long": 0.3, "induction": 0.3}, ["induction"]),
        ({"induction_short": 0.29, "induction_long": 0.9}, []),
        ({"induction_short": 0.9, "induction_long": 0.29}, []),
        ({"induction_short": 0.4, "induction_long": 0.4, "duplicate_long": 0.4}, []),
        ({"induction_short": 0.4, "induction_long": 0.4, "duplicate_long": 0.39}, ["induction"]),
        ({"previous": 0.4, "previous_argmax": 0.5}, ["previous-token"]),
        ({"previous": 0.39, "previous_argmax": 1.0}, []),
        ({"previous": 0.9, "previous_argmax": 0.49, "previous2_argmax": 0.6}, []),
        ({"previous2": 0.4, "previous2_argmax": 0.5}, ["previous-token"]),
        ({"duplicate": 0.3, "sink": 0.3, "current": 0.3}, ["sink", "duplicate-token", "current-token"]),
        ({"duplicate": 0.29, "sink": 0.29, "current": 0.29}, []),
        (dict.fromkeys(NOTHING), []),
    ],
)
def test_labels_follow_their_rules_to_the_border(scores: dict, labels: list[str]) -> None:
    assert labels_of(NOTHING | scores, NOTHING, bos=True) == labels


@pytest.mark.parametrize("null", ["uniform", "random_init"])
def test_a_score_that_a_head_without_knowledge_gets_too_is_no_reason_for_a_label(null: str) -> None:
    def chance(of_another_head: float) -> dict[str, float]:
        nulls = {name: {"uniform": 0.02, "random_init": None} for name in NOTHING}
        other = nulls | {"current": {"uniform": 0.02, "random_init": 0.02, null: of_another_head}}
        return chance_of([{"null": nulls}, {"null": other}])

    scores = NOTHING | {"current": 0.5, "sink": 0.5}
    assert labels_of(scores, chance(0.41), bos=True) == ["sink"]
    assert labels_of(scores, chance(0.39), bos=True) == ["sink", "current-token"]


@pytest.mark.parametrize(
    "keys",
    [
        {"window": 1},
        {"window": 2},
        {"window": 3},
        {"qk": "tied", "n_kv_head": 4},
        {"qk": "identity", "n_kv_head": 4},
    ],
)
def test_untrained_heads_that_see_few_keys_or_themselves_get_no_label(keys: dict) -> None:
    """Their scores are above the thresholds, as those of any head there."""
    for seed in (1, 2):
        document = described(small(seed=seed, **keys))
        assert [head["labels"] for head in document["heads"]] == [[]] * 8


def test_a_sink_is_one_on_bos() -> None:
    assert labels_of(NOTHING | {"sink": 0.9}, NOTHING, bos=False) == []


def test_nulls_of_equal_scores_are_the_closed_forms() -> None:
    """Uniform attention, A = 1 / (i + 1), whatever the weights of the model."""
    document = described(small(seed=3))
    mean_of = {
        "sink": range(4, 64),
        "previous": range(2, 64),
        "previous2": range(3, 64),
        "current": range(1, 64),
    }
    expected = {name: sum(1 / (i + 1) for i in rows) / len(rows) for name, rows in mean_of.items()}
    expected |= {
        "sink_no_bos": expected["sink"],
        "sink_rate": 0.0,
        "entropy_normalized": 1.0,
        "max_logit": 0.0,
    }
    for name in ("induction", "duplicate"):
        expected[f"{name}_short"] = sum(1 / (i + 1) for i in range(16, 31)) / 15
        expected[f"{name}_long"] = expected[name] = sum(1 / (i + 1) for i in range(32, 63)) / 31
    for head in document["heads"]:
        uniform = {name: null["uniform"] for name, null in head["null"].items()}
        assert {name: uniform[name] for name in expected} == pytest.approx(expected, abs=1e-5)
        assert uniform["head_norm"] is None  # weights alone do not say what a head adds


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("w", [1, 3, 40])
def test_nulls_with_a_window_are_those_of_the_keys_in_it(w: int, backend: str) -> None:
    """`A = 1 / min(i + 1, w)` within the window, so nothing on key 0 from query w on."""

    def mean(first: int, distance: int) -> float:
        rows = range(first, T)
        return sum((distance < w) / min(i + 1, w) for i in rows) / len(rows)

    null = described(small(window=w, backend=backend))["heads"][0]["null"]
    uniform = {name: scores["uniform"] for name, scores in null.items()}
    expected = {"previous": mean(2, 1), "previous2": mean(3, 2), "current": mean(1, 0), "max_logit": 0.0}
    expected["sink"] = sum(1 / (i + 1) for i in range(4, w)) / (T - 4)
    expected["duplicate_long"] = sum((w > 31) / min(i + 1, w) for i in range(32, 63)) / 31
    expected["induction_short"] = sum((w > 14) / min(i + 1, w) for i in range(16, 31)) / 15
    expected["entropy"] = sum(math.log(min(i + 1, w)) for i in range(1, T)) / (T - 1)
    assert {name: uniform[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert uniform["entropy_normalized"] == (None if w == 1 else pytest.approx(1.0, abs=1e-5))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("qk", ["tied", "identity"])
def test_nulls_do_not_hang_on_where_queries_and_keys_come_from(qk: str, backend: str) -> None:
    keys = {"n_kv_head": 4, "backend": backend, "seed": 3}
    one, other = (described(small(**keys, **c))["heads"] for c in ({}, {"qk": qk, "value": "key"}))
    for a, b in zip(one, other, strict=True):
        for name, null in a["null"].items():
            assert b["null"][name]["uniform"] == pytest.approx(null["uniform"], abs=1e-5), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_nulls_count_a_sink_as_one_more_place(backend: str) -> None:
    model = small(sink="learned", backend=backend)
    with torch.no_grad():
        for attention in model.attentions():
            attention.sink_H.fill_(3.0)  # what it has learned is not what knows nothing
    null = described(model)["heads"][0]["null"]
    assert null["previous"]["uniform"] == pytest.approx(sum(1 / (i + 2) for i in range(2, 64)) / 62, abs=1e-6)
    assert null["entropy_normalized"]["uniform"] == pytest.approx(1.0, abs=1e-5)


def test_the_untrained_model_is_of_the_same_shape_and_knows_nothing_of_the_trained_one() -> None:
    one, other = described(small(seed=1)), described(small(seed=2))
    for a, b in zip(one["heads"], other["heads"], strict=True):
        assert [n["random_init"] for n in a["null"].values()] == [
            n["random_init"] for n in b["null"].values()
        ]
        assert a["null"]["entropy"]["random_init"] not in (a["scores"]["entropy"], b["scores"]["entropy"])


def test_an_interval_is_as_wide_as_the_spread_over_sequences_says() -> None:
    """For a mean of N the bootstrap's standard error is sd / sqrt(N), with sd over N, not N - 1."""
    model, probes = small(init="zero_residual"), probes_of(Config(), 64)
    for attention in model.attentions():
        attention.W_q.weight.data *= 4  # scores that differ between sequences
    heads = described(model, probes)["heads"]
    singles = [score(model, {key: only(probe, n) for key, probe in probes.items()}) for n in range(64)]
    for name in ("entropy", "sink", "previous", "current", "induction_long", "duplicate_short"):
        each_NLH = torch.stack([single[name] for single in singles])
        for head in heads:
            of_head_N = each_NLH[:, head["layer"], head["head"]]
            low, high = head["ci"][name]
            assert low < head["scores"][name] < high
            error = of_head_N.std(correction=0).item() / 8
            # 1,000 resamples know each quantile to about 0.08 standard errors.
            assert (high - low) / error == pytest.approx(2 * 1.96, abs=0.6), name


def test_the_interval_of_a_headline_lies_no_higher_than_those_of_both_lengths() -> None:
    for head in described(small(seed=5))["heads"]:
        short, long = head["ci"]["induction_short"], head["ci"]["induction_long"]
        low, high = head["ci"]["induction"]
        assert low <= min(short[0], long[0]) + 1e-12
        assert high <= min(short[1], long[1]) + 1e-12


def test_sequences_that_are_alike_leave_no_doubt_and_a_maximum_has_no_interval() -> None:
    copies = {
        key: replace(probe, tokens_BT=probe.tokens_BT.repeat(5, 1))
        for key, probe in probes_of(CONFIG, 1).items()
    }
    for head in described(small(), copies)["heads"]:
        low, high = head["ci"]["induction"]
        assert high - low < 1e-6
    for head in described(small())["heads"]:
        assert head["ci"]["max_logit"] is None


def test_describing_is_repeatable_and_touches_neither_model_nor_global_generator() -> None:
    model = small(dropout=0.5).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    first, second = described(model), described(model)
    assert first == second
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_document_is_plain_json_with_every_head_once() -> None:
    document = described(small())
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert [(h["layer"], h["head"]) for h in document["heads"]] == [
        (i, j) for i in range(2) for j in range(4)
    ]
    for head in document["heads"]:
        assert set(head) == {"layer", "head", "scores", "null", "ci", "labels", "ablation"}
        assert set(head["scores"]) == set(head["null"]) == set(head["ci"])
    assert document["model"] | {"run": "a", "step": 3, "n_layer": 2, "n_head": 4} == document["model"]
    assert len(document["probe"]["example"]) == T
    assert not math.isnan(document["summary"]["repeat_loss_2"])


def test_one_sequence_has_no_interval():
    for head in described(small(), probes_of(CONFIG, 1))["heads"]:
        assert set(head["ci"].values()) == {None}
