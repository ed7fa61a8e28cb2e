"""Probes whose texts are whole documents with padding behind: what is measured is the documents."""

import json

import pytest
import torch
from torch import Tensor

from analysis.heads import describe_heads
from analysis.probes import Probes, make_probes, measure, score
from configs.schema import Config
from data.loading import load_source
from data.mixture import Mixture
from model.backends import BACKENDS
from model.transformer import GPT
from tests.model.models import build_random

T, LENGTHS = 32, [32, 20, 5, 11]
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
    text = whole.text[:, :width].where(segment == 0, fill)
    return Probes(text, text[:, 1:], whole.repeats, segment, segment[:, 1:])


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
    together = score(model, probes)[0]
    first = {"entropy": 1, "sink": 4, "previous": 2, "previous2": 3, "current": 1, "sink_no_bos": 4}
    for name, start in first.items():
        bos = name != "sink_no_bos"
        total, count = torch.zeros(2, 4).double(), 0
        for n, length in enumerate(LENGTHS):
            alone = Probes(probes.text[n : n + 1, :length], probes.text[n : n + 1, 1:length], probes.repeats)
            rows = length - start - (not bos)
            if rows > 0:
                total += rows * score(model, alone)[0][name]
                count += rows
        torch.testing.assert_close(together[name], total / count, atol=1e-5, rtol=0, msg=name)
    largest = [
        score(model, Probes(probes.text[n : n + 1, :length], None, probes.repeats))[0]["max_logit"]
        for n, length in enumerate(LENGTHS)
    ]
    torch.testing.assert_close(together["max_logit"], torch.stack(largest).amax(0), atol=1e-5, rtol=0)


def test_losses_late_and_early_in_the_context_are_those_of_tokens_that_are_there() -> None:
    model, probes = model_of(), padded()
    record = measure(model, probes, True)
    logprobs = model(probes.text[:, :-1], segment_BT=probes.segment[:, :-1]).log_softmax(-1)
    losses = -logprobs.gather(-1, probes.text[:, 1:, None]).squeeze(-1)

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
        measure(model_of(), Probes(whole.text, None, whole.repeats, segment), True)
        for segment in (probes.segment, None)
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


def test_a_document_too_short_for_a_score_has_no_say_in_its_interval() -> None:
    """Two tokens: no query for `sink`, and the others' interval is as it is without."""
    document = describe_heads(model_of(), padded(lengths=[T, T, T, 2, T, T, T, T]), True, 1, {})
    for head in document["heads"]:
        low, high = head["ci"]["sink"]
        assert low <= head["scores"]["sink"] <= high


def test_the_example_is_a_document_without_its_padding() -> None:
    document = describe_heads(model_of(), padded(lengths=[12, 30]), True, 1, {})
    assert document["probe"]["example"] == padded().text[0, 1:12].tolist()


def test_one_text_of_several_takes_its_padding_along() -> None:
    one = padded().only(2)
    assert one.text.shape == (1, T)
    assert one.segment.tolist() == [[0] * 5 + [-1] * 27]
    assert one.segment_without_bos.tolist() == [[0] * 4 + [-1] * 27]
    assert all(len(tokens) == 1 for tokens in one.repeats.values())


def test_probes_take_tokens_and_documents_from_their_source(monkeypatch) -> None:
    made, wanted = source(), padded()
    given = {True: (wanted.text, wanted.segment), False: (wanted.text_without_bos, None)}
    monkeypatch.setattr(made, "probe_text", lambda sequences, length, bos: given[bos])
    probes = make_probes(made, T, sequences=4, seed=1)
    assert probes.text is wanted.text
    assert probes.segment is wanted.segment
    assert probes.text_without_bos is wanted.text_without_bos
    assert probes.segment_without_bos is None
