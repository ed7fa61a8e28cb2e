"""Probes whose texts are whole documents with padding behind: what is measured is the documents."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from analysis.heads import describe_heads
from analysis.probes import Probe, Probes, look, make_probes, measure
from configs.schema import Config
from data.loading import load_source
from data.mixture import Mixture
from model.backends import BACKENDS
from model.transformer import GPT
from tests.analysis.probing import only, score
from tests.data.stored import config, write
from tests.model.models import build_random

T, LENGTHS = 32, [32, 20, 5, 11]
CUT = {"text": 0, "text_without_bos": 1}  # tokens of a document that are not in it
every_backend = pytest.mark.parametrize("backend", BACKENDS)
CHANGES = {
    "plain": {},
    "window": {"window": 6, "sink": "learned"},
    "identities": {"value": "identity", "n_kv_head": 4},
}


def model_of(backend: str = "sdpa", **changes: object) -> GPT:
    return build_random("grouped", vocab_size=65, backend=backend, **changes)


def source() -> Mixture:
    return load_source(Config.model_validate({"data": {"source": "repeats"}, "model": {"context_length": T}}))


def padded(fill: int = 0, lengths: list[int] = LENGTHS, width: int = T) -> Probes:
    """Texts of the source cut to `lengths`, and what a text without BOS is: all but its first token."""
    whole = make_probes(source(), T, sequences=len(lengths), seed=1)
    place_T = torch.arange(width)
    segment = torch.where(place_T < torch.tensor(lengths)[:, None], 0, -1)
    text = whole["text"].tokens_BT[:, :width].where(segment == 0, fill)
    return whole | {"text": Probe(text, segment), "text_without_bos": Probe(text[:, 1:], segment[:, 1:])}


def alone(probes: Probes) -> list[Probes]:
    """Each document of the texts by itself, without padding."""
    texts = [
        {name: Probe(probes[name].tokens_BT[n : n + 1, : length - cut]) for name, cut in CUT.items()}
        for n, length in enumerate(LENGTHS)
    ]
    return [probes | text for text in texts]


@every_backend
def test_what_padding_holds_changes_nothing_but_a_record_counts_it(backend: str) -> None:
    model = model_of(backend)
    one, other = (measure(model, padded(fill), True) for fill in (0, 9))
    assert one == other
    blind = sum(T - n for n in LENGTHS)
    assert one["probe"]["skipped_rows"] == blind * 2 * 4  # layers and heads
    assert json.loads(json.dumps(one, allow_nan=False)) == one


@every_backend
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_scores_are_the_means_over_the_queries_of_each_document_by_itself(changes, backend) -> None:
    model, probes = model_of(backend, **changes), padded()
    together, single = score(model, probes), [score(model, one) for one in alone(probes)]
    first = {"entropy": 1, "sink": 4, "previous": 2, "previous2": 3, "current": 1, "sink_no_bos": 4}
    for name, start in first.items():
        bos = name != "sink_no_bos"
        total, count = torch.zeros(2, 4).double(), 0
        for one, length in zip(single, LENGTHS, strict=True):
            rows = length - start - (not bos)
            if rows > 0:
                total += rows * one[name]
                count += rows
        torch.testing.assert_close(together[name], total / count, atol=1e-5, rtol=0, msg=name)
    largest = torch.stack([one["max_logit"] for one in single]).amax(0)
    torch.testing.assert_close(together["max_logit"], largest, atol=1e-5, rtol=0)


def test_losses_late_and_early_in_the_context_are_those_of_tokens_that_are_there() -> None:
    model, probes = model_of(), padded()
    record = measure(model, probes, True)
    tokens_BT, segment_BT = probes["text"].tokens_BT, probes["text"].segment_BT
    logprobs = model(tokens_BT[:, :-1], segment_BT=segment_BT[:, :-1]).log_softmax(-1)
    losses = -logprobs.gather(-1, tokens_BT[:, 1:, None]).squeeze(-1)

    def mean(part: list[int]) -> Tensor:
        of = [losses[n, t] for n, length in enumerate(LENGTHS) for t in range(*part) if t + 1 < length]
        return torch.stack(of).mean()

    early, late = map(mean, record["probe"]["icl_places"])
    assert record["model"]["icl_score"] == pytest.approx((late - early).item(), abs=1e-5)


def test_where_no_document_is_long_enough_the_difference_is_none_and_the_rest_is_there() -> None:
    record = measure(model_of(), padded(lengths=[20, 9, 20, 12]), True)
    assert record["model"]["icl_score"] is None
    assert record["probe"]["nonfinite"] == 1
    assert record["model"]["repeat_loss_1"] is not None


def test_texts_without_padding_score_as_if_they_had_no_segment() -> None:
    whole, probes = make_probes(source(), T, sequences=4, seed=1), padded(lengths=[T] * 4)
    with_segment, without = (
        measure(model_of(), whole | {"text": replace(whole["text"], segment_BT=segment_BT)}, True)
        for segment_BT in (probes["text"].segment_BT, None)
    )
    for name, score_LH in without["scores"].items():
        torch.testing.assert_close(
            torch.tensor(with_segment["scores"][name]), torch.tensor(score_LH), atol=1e-5, rtol=0, msg=name
        )
    assert with_segment["model"] == pytest.approx(without["model"], abs=1e-5)


def test_intervals_lie_around_the_scores_however_the_documents_differ_in_length() -> None:
    """Entropy grows with the text: a mean over texts that forgot their lengths would lie below the score."""
    lengths = [T, 6] * 8
    document = describe_heads(model_of(), padded(lengths=lengths), True, 1, {})
    for head in document["heads"]:
        for name in ("entropy", "current", "previous", "sink", "sink_rate", "induction"):
            low, high = head["ci"][name]
            assert low - 1e-6 <= head["scores"][name] <= high + 1e-6, name
    example = document["probe"]["example"]
    assert len(example) == T - 1


def test_an_interval_is_about_that_of_scores_of_documents_drawn_again() -> None:
    """As they are defined: each resample a batch of its own, measured from the beginning."""
    model, probes = (
        model_of(),
        padded(lengths=[T, T, 8] * 6),
    )  # short ones only have a mean of A[i,0] above 0.3
    text, generator = probes["text"], torch.Generator().manual_seed(0)
    drawn = [torch.randint(18, (18,), generator=generator) for _ in range(300)]
    redrawn = [Probe(text.tokens_BT[rows], text.segment_BT[rows]) for rows in drawn]
    again = [look(model, "text", probe, losses=False).scores for probe in redrawn]
    heads = describe_heads(model, probes, True, 1, {})["heads"]
    for name in ("entropy", "current", "previous", "sink_rate"):
        each_RLH = torch.stack([scores[name] for scores in again])
        for head in heads:
            each_R = each_RLH[:, head["layer"], head["head"]]
            low, high = each_R.quantile(torch.tensor([0.025, 0.975]).double()).tolist()
            # What makes it wider than percentiles, as 18 documents are few: Student's t with 17 degrees.
            mean, wider = head["scores"][name], math.sqrt(18 / 17) * 2.1098 / 1.96
            ends = [mean + (end - mean) / wider for end in head["ci"][name]]
            assert ends == pytest.approx([low, high], abs=0.15 * (high - low)), name


def test_a_document_too_short_for_a_score_has_no_say_in_its_interval() -> None:
    """Two tokens: no query for `sink`. The others are all the same text, and leave no doubt."""
    probes = padded(lengths=[T, T, T, 2, T, T, 2, T])
    text = probes["text"]
    probes["text"] = replace(text, tokens_BT=text.tokens_BT[:1].where(text.present, 0))
    for head in describe_heads(model_of(), probes, True, 1, {})["heads"]:
        assert head["ci"]["sink"] == pytest.approx([head["scores"]["sink"]] * 2, abs=1e-6)
        low, high = head["ci"]["sink_no_bos"]
        assert low < head["scores"]["sink_no_bos"] < high


def test_the_example_is_a_document_without_its_padding() -> None:
    document = describe_heads(model_of(), padded(lengths=[12, 30]), True, 1, {})
    assert document["probe"]["example"] == padded()["text"].tokens_BT[0, 1:12].tolist()


def test_one_text_of_several_takes_its_padding_along() -> None:
    for name, probe in padded().items():
        one = only(probe, 2)
        assert torch.equal(one.tokens_BT, probe.tokens_BT[2:3])
        assert one.block_length == probe.block_length
        assert one.present.sum() == (5 - CUT[name] if name in CUT else one.tokens_BT.numel())


def test_texts_of_masked_documents_are_whole_ones_with_bos_in_front_and_without(
    tmp_path, monkeypatch
) -> None:
    documents = [
        [65 + n % 26 for n in range(begin, begin + length)] for begin, length in enumerate((20, 9, 5, 31))
    ]
    parts = {part: [[256, *document] for document in documents] for part in ("train", "val")}
    folder = write(tmp_path / "made", parts, 257, 256)
    (folder / "tokenizer.json").write_text('{"kind": "byte", "bos": true}')
    monkeypatch.setattr("data.loading.prepared", lambda data, context_length, tokenizer=None: folder)
    asked = {"data": config(True, masked=True).model_dump(), "model": {"context_length": T}}
    probes = make_probes(load_source(Config.model_validate(asked)), T, sequences=4, seed=1)
    for name, front in (("text", [256]), ("text_without_bos", [])):
        text = probes[name]
        assert text.tokens_BT.shape == text.segment_BT.shape == (4, T)
        shown = [row[there].tolist() for row, there in zip(text.tokens_BT, text.present, strict=True)]
        assert shown == [front + document for document in documents]


def test_a_score_with_a_fault_has_no_interval_however_well_the_other_texts_are() -> None:
    model, probes = model_of(), padded()
    token = probes["text"].tokens_BT[0, T - 1]
    with torch.no_grad():
        model.token_embedding.weight[token] = torch.nan
    for head in describe_heads(model, probes, True, 1, {})["heads"]:
        assert head["scores"]["entropy"] is head["ci"]["entropy"] is None
