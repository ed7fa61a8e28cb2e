"""Removing heads: what it does to the losses, in ways that do not hook."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from analysis.ablation import add_ablation, means, removed
from analysis.capture import observe
from analysis.heads import describe_heads
from analysis.probes import Probe, Probes, look, make_probes
from configs.schema import Config
from data.loading import load_source
from model.backends import BACKENDS
from model.transformer import GPT
from tests.analysis.by_hand import T, induction_circuit
from tests.analysis.probing import only
from tests.model.models import KINDS, build_random, tokens

LENGTH, V = 32, 65
Document = dict[str, Any]


def probes_of(sequences: int = 4, length: int = LENGTH) -> Probes:
    config = Config.model_validate({"data": {"source": "repeats"}, "model": {"context_length": length}})
    return make_probes(load_source(config), length, sequences, seed=1)


def padded(sequences: int = 4) -> Probes:
    """Texts of which each is shorter than the one before."""
    probes = probes_of(sequences)
    lengths = torch.arange(LENGTH, 0, -7)[:sequences, None]
    segment_BT = torch.where(torch.arange(LENGTH) < lengths, 0, -1)
    return probes | {"text": replace(probes["text"], segment_BT=segment_BT)}


def model_of(kind: str = "gated", **changes: Any) -> GPT:
    return build_random(kind, vocab_size=V, **changes)


def made_up(labels: dict[tuple[int, int], list[str]], L: int = 2, H: int = 4) -> Document:
    """Of heads.json what ablation reads."""
    heads = [{"layer": i, "head": j, "labels": labels.get((i, j), [])} for i in range(L) for j in range(H)]
    return {"heads": [head | {"ablation": None} for head in heads], "summary": {}}


def ablated(
    model: GPT, probes: Probes, labels: dict[tuple[int, int], list[str]], which: Any = "labelled"
) -> Document:
    document = made_up(labels, model.config.n_layer, model.config.n_head)
    add_ablation(document, model, probes, which, seed=1)
    return document


def losses(model: GPT, probes: Probes) -> dict[str, float]:
    """Both losses as a record has them, from `look`."""
    text, repeat = probes["text"], probes["repeat_long"]
    natural_BT = look(model, "text", text).losses_BT[text.present[:, 1:]]
    repeat_BT = look(model, "repeat_long", repeat).losses_BT[:, repeat.block_length + 1 :]
    return {"natural": natural_BT.mean().item(), "repeat": repeat_BT.mean().item()}


def without_columns(model: GPT, heads: list[tuple[int, int]]) -> GPT:
    """The same model with the columns of `W_o` that read these heads at zero."""
    other = GPT(model.config, V)
    other.load_state_dict(model.state_dict())
    D = model.config.d_head
    with torch.no_grad():
        for layer, head in heads:
            other.attentions()[layer].W_o.weight[:, head * D : (head + 1) * D] = 0.0
    return other


def change(effect: Document, kind: str) -> dict[str, float]:
    return {part: found["change"] for part, found in effect[kind].items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_zero_ablation_is_a_model_whose_output_matrix_does_not_read_the_head(kind: str, backend: str) -> None:
    model, labels = model_of(kind, backend=backend), {(0, 1): ["sink"], (1, 2): ["sink"], (1, 3): ["current"]}
    for probes in (probes_of(), padded()):
        document = ablated(model, probes, labels)
        own = losses(model, probes)
        assert document["summary"]["ablation"]["baseline"] == pytest.approx(own, abs=1e-5)

        def expected(*heads: tuple[int, int], own=own, probes=probes) -> Any:
            found = losses(without_columns(model, list(heads)), probes)
            return pytest.approx({part: found[part] - own[part] for part in own}, abs=2e-5)

        for entry in document["heads"]:
            head = (entry["layer"], entry["head"])
            assert (entry["ablation"] is not None) == (head in labels)
            if head in labels:
                assert change(entry["ablation"], "zero") == expected(head)
        for group in document["summary"]["ablation"]["groups"]:
            assert change(group, "zero") == expected(*map(tuple, group["heads"]))
            draws = [losses(without_columns(model, d), probes) for d in group["control"]["draws"]]
            control = {part: sum(d[part] for d in draws) / len(draws) - own[part] for part in own}
            assert change(group["control"], "zero") == pytest.approx(control, abs=2e-5)


@pytest.mark.parametrize("kind", ["grouped", "gated"])
def test_mean_ablation_is_a_model_that_adds_the_mean_output_as_a_bias(kind: str) -> None:
    model, probes = model_of(kind, bias=True), padded()
    document = ablated(model, probes, {(0, 1): ["sink"], (1, 2): ["sink"]}, "all")
    heads = [[(entry["layer"], entry["head"])] for entry in document["heads"]] + [[(0, 1), (1, 2)]]
    effects = [entry["ablation"] for entry in document["heads"]]
    effects += document["summary"]["ablation"]["groups"]
    own, D = losses(model, probes), model.config.d_head
    for part, name in (("natural", "text"), ("repeat", "repeat_long")):
        outputs: list[Tensor] = []
        with torch.no_grad(), observe(model, lambda seen, to=outputs: to.append(seen.out_BHTD)):
            model(probes[name].tokens_BT, segment_BT=probes[name].segment_BT)
        places = probes[name].present.nonzero().tolist()
        for some, effect in zip(heads, effects, strict=True):
            other = without_columns(model, some)
            for i, j in some:
                mean_D = sum(outputs[i][b, j, t] for b, t in places) / len(places)
                columns_CD = model.attentions()[i].W_o.weight.data[:, j * D : (j + 1) * D]
                other.attentions()[i].W_o.bias.data += columns_CD @ mean_D
            expected = losses(other, probes)[part] - own[part]
            assert effect["mean"][part]["change"] == pytest.approx(expected, abs=2e-5)


def test_a_head_with_a_constant_output_is_missed_if_it_is_zero_but_not_if_it_is_its_mean() -> None:
    model = model_of("gpt2")
    for attention in model.attentions():
        attention.W_v.weight.data[:6] = 0.0  # head 0: only the bias is left
    effect = ablated(model, probes_of(), {(0, 0): ["sink"]})["heads"][0]["ablation"]
    for part in ("natural", "repeat"):
        assert effect["mean"][part]["change"] == pytest.approx(0.0, abs=1e-6)
        assert effect["mean"][part]["ci"] == pytest.approx([0.0, 0.0], abs=1e-6)
        assert abs(effect["zero"][part]["change"]) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_without_all_its_heads_is_one_whose_attention_is_skipped(kind: str) -> None:
    model, ids = model_of(kind, bias=False), tokens(3, 20)
    heads = [(1, head) for head in range(4)]
    with model.reading(), removed(model, heads, torch.zeros(2, 4, model.config.d_head)):
        got_BTV = model(ids)
    model.blocks[1].attention.forward = lambda x_BTC, *others: torch.zeros_like(x_BTC)
    with model.reading():
        torch.testing.assert_close(got_BTV, model(ids), atol=1e-5, rtol=0)


def test_means_leave_out_what_padding_holds() -> None:
    model, text = model_of(), padded()["text"]
    other = replace(text, tokens_BT=text.tokens_BT.where(text.present, 7))
    assert torch.equal(means(model, text), means(model, other))
    alone = Probe(text.tokens_BT[:1])  # the first text has no padding
    torch.testing.assert_close(means(model, only(text, 0)), means(model, alone), atol=1e-6, rtol=0)


def test_hooks_are_gone_also_after_errors_and_while_there_leave_the_model_as_it_is() -> None:
    model, values = model_of(), torch.zeros(2, 4, 6)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    ids = tokens(2, 9)
    before = model(ids)
    with removed(model, [(0, 0), (1, 1)], values):
        assert not torch.equal(model(ids), before)
    with pytest.raises(ZeroDivisionError), removed(model, [(0, 0), (1, 1)], values):
        raise ZeroDivisionError
    for wrong in [(2, 0), (0, 4)]:
        with pytest.raises(IndexError), removed(model, [(0, 0), wrong], values):
            raise AssertionError("there is no such head")
    assert [len(attention.heads._forward_hooks) for attention in model.attentions()] == [0, 0]
    assert torch.equal(model(ids), before)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_ablating_is_repeatable_and_touches_neither_model_nor_global_generator() -> None:
    model = model_of(dropout=0.5).train()
    state = torch.get_rng_state()
    first, second = (ablated(model, probes_of(), {(0, 0): ["sink"]}) for _ in range(2))
    assert first == second
    assert json.loads(json.dumps(first, allow_nan=False)) == first
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert not any(attention.heads._forward_hooks for attention in model.attentions())


def test_a_label_of_one_head_is_that_head_and_every_head_can_be_asked_for() -> None:
    labels = {(0, 1): ["sink", "current-token"], (1, 2): ["sink"]}
    some, all_ = (ablated(model_of(), probes_of(), labels, which) for which in ("labelled", "all"))
    assert some["summary"] == all_["summary"]
    groups = {group["label"]: group for group in some["summary"]["ablation"]["groups"]}
    assert groups["sink"]["heads"] == [[0, 1], [1, 2]]
    assert {kind: groups["current-token"][kind] for kind in ("mean", "zero")} == some["heads"][1]["ablation"]
    for one, every in zip(some["heads"], all_["heads"], strict=True):
        assert one["ablation"] == (every["ablation"] if one["labels"] else None)
        assert every["ablation"] is not None


def test_heads_are_drawn_from_those_without_a_label_and_from_others_where_all_have_one() -> None:
    names = ("a", "b")
    labels = {(i, j): [names[i]] for i in range(2) for j in range(3)} | {(1, 3): ["b", "c"]}
    groups = {
        g["label"]: g for g in ablated(model_of(), probes_of(), labels)["summary"]["ablation"]["groups"]
    }
    assert {name: len(group["heads"]) for name, group in groups.items()} == {"a": 3, "b": 4, "c": 1}
    for group in groups.values():  # one head alone has no label
        assert (group["control"]["pool"], group["control"]["draws"]) == ("untyped", [[[0, 3]]])
    groups = {
        g["label"]: g
        for g in ablated(model_of(), probes_of(), labels | {(0, 3): ["c"]})["summary"]["ablation"]["groups"]
    }
    for label, count in {"a": 3, "b": 4, "c": 2}.items():
        control, heads = groups[label]["control"], groups[label]["heads"]
        assert control["pool"] == "other"
        for draw in control["draws"]:
            assert len(draw) == len({tuple(head) for head in draw}) == count
            assert not any(head in heads for head in draw)
    everything = {(i, j): ["a"] for i in range(2) for j in range(4)}
    (group,) = ablated(model_of(), probes_of(), everything)["summary"]["ablation"]["groups"]
    assert group["control"] is None


def test_draws_of_a_label_do_not_hang_on_other_labels_and_differ() -> None:
    def draws(labels: dict[tuple[int, int], list[str]]) -> Any:
        model = model_of(n_layer=4, n_head=8, n_kv_head=8, d_head=4)
        return ablated(model, probes_of(2), labels)["summary"]["ablation"]["groups"][0]["control"]["draws"]

    three = {(0, j): ["a"] for j in range(3)}
    found = draws(three)
    assert len({str(draw) for draw in found}) == 3
    assert found == draws(three | {(0, 0): ["a", "b"]})


def test_a_model_without_labels_has_its_losses_and_no_more() -> None:
    model, probes = model_of(), probes_of()
    document = ablated(model, probes, {})
    assert document["summary"]["ablation"]["groups"] == []
    assert document["summary"]["ablation"]["baseline"] == pytest.approx(losses(model, probes), abs=1e-5)
    assert all(entry["ablation"] is None for entry in document["heads"])


def test_the_interval_is_as_wide_as_the_spread_of_the_changes_over_sequences() -> None:
    model, probes, labels = model_of(), probes_of(64), {(0, 1): ["sink"]}
    effect = ablated(model, probes, labels)["heads"][1]["ablation"]
    singles = [ablated(model, {k: only(p, n) for k, p in probes.items()}, labels) for n in range(64)]
    for part in ("natural", "repeat"):
        each = torch.tensor([d["heads"][1]["ablation"]["zero"][part]["change"] for d in singles])
        (low, high), mean = effect["zero"][part]["ci"], effect["zero"][part]["change"]
        assert mean == pytest.approx(each.mean().item(), abs=1e-5)
        assert low < mean < high
        error = each.std(correction=0).item() / 8
        # 1,000 resamples know each quantile to about 0.08 standard errors.
        assert (high - low) / error == pytest.approx(2 * 1.96, abs=0.6)


def test_of_two_documents_the_interval_reaches_from_the_one_to_the_other_however_long_they_are() -> None:
    """A quarter of the resamples holds one of them alone."""
    model, probes = model_of(), probes_of(2)
    segment_BT = torch.where(torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]]), 0, -1)
    probes |= {"text": replace(probes["text"], segment_BT=segment_BT)}
    alone = [{name: only(probe, n) for name, probe in probes.items()} for n in range(2)]
    found = [ablated(model, some, {(0, 1): ["sink"]})["heads"][1]["ablation"] for some in (probes, *alone)]
    both, *each = [effect["zero"]["natural"] for effect in found]
    assert both["ci"] == pytest.approx(sorted(effect["change"] for effect in each), abs=1e-5)
    mean = (31 * each[0]["change"] + 8 * each[1]["change"]) / 39
    assert both["change"] == pytest.approx(mean, abs=1e-5)


def test_one_sequence_has_no_interval_and_equal_ones_no_doubt() -> None:
    labels = {(0, 1): ["sink"]}
    alone = {name: only(probe, 0) for name, probe in probes_of().items()}
    copies = {name: replace(probe, tokens_BT=probe.tokens_BT.repeat(5, 1)) for name, probe in alone.items()}
    (single, five) = (
        ablated(model_of(), probes, labels)["heads"][1]["ablation"] for probes in (alone, copies)
    )
    for kind in ("mean", "zero"):
        for part in ("natural", "repeat"):
            assert single[kind][part]["ci"] is None
            change = five[kind][part]["change"]
            assert change == pytest.approx(single[kind][part]["change"], abs=1e-5)
            assert five[kind][part]["ci"] == pytest.approx([change, change], abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_circuit_set_by_hand_falls_with_either_of_its_heads_and_with_no_other(backend: str) -> None:
    model, probes = induction_circuit(backend), probes_of(4, T)
    document = describe_heads(model, probes, True, 1, {})
    add_ablation(document, model, probes, "all", seed=1)
    for entry in document["heads"]:
        for kind in ("mean", "zero"):
            effect = entry["ablation"][kind]["repeat"]["change"]
            assert effect > 2 if entry["labels"] else abs(effect) < 1e-6
    for group in document["summary"]["ablation"]["groups"]:
        assert group["mean"]["repeat"]["ci"][0] > 2
        assert abs(group["control"]["mean"]["repeat"]["change"]) < 1e-6
