"""The loss on the validation part: closed forms, and NumPy as the second way."""

import math

import numpy as np
import pytest
import torch

from configs.ranks import Ranks
from configs.schema import Config, Model
from data.loading import load_source
from data.sources import IGNORED, Batch
from model.transformer import GPT
from training import evaluation
from training.evaluation import evaluate

V = 11


def model(**values) -> GPT:
    return GPT(Model(n_layer=2, n_head=2, d_model=8, context_length=17, **values), V)


def batches(sizes=(3, 2), masked: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for size in sizes:
        rows = torch.randint(V, (size, 18), generator=generator)
        found.append(Batch(rows[:, :-1], rows[:, 1:].clone()))
    found[-1].targets_BT[-1, :masked] = IGNORED
    return found


@pytest.mark.parametrize("bytes_per_token", [1.0, 2.5])
def test_a_model_that_says_nothing_loses_the_log_of_the_vocabulary(bytes_per_token):
    found = evaluate(model(init="zero_residual"), batches(), bytes_per_token)
    assert found["loss"] == pytest.approx(math.log(V), rel=1e-6)
    assert found["loss_sem"] == pytest.approx(0, abs=1e-6)
    assert found["bits_per_byte"] == pytest.approx(math.log2(V) / bytes_per_token, rel=1e-6)


@pytest.mark.parametrize("masked", [0, 1, 16])
def test_loss_is_the_mean_over_counted_targets_and_sem_that_over_windows(masked):
    gpt = model()
    losses, means = [], []
    with torch.no_grad():
        for inputs_BT, targets_BT, _ in batches(masked=masked):
            logits_BTV = gpt.eval()(inputs_BT).double().numpy()
            log_p_BTV = logits_BTV - np.log(np.exp(logits_BTV).sum(-1, keepdims=True))
            for log_p_TV, targets_T in zip(log_p_BTV, targets_BT.tolist(), strict=True):
                row = [-log_p_TV[t, target] for t, target in enumerate(targets_T) if target != IGNORED]
                losses += row
                means.append(np.mean(row))
    found = evaluate(gpt, batches(masked=masked), 1.0)
    assert len(losses) == 5 * 17 - masked
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert found["loss_sem"] == pytest.approx(np.std(means, ddof=1) / math.sqrt(5), rel=1e-4)


def test_one_window_has_no_standard_error():
    assert evaluate(model(), batches(sizes=(1,)), 1.0)["loss_sem"] is None


def test_the_loss_is_that_of_the_text_however_it_is_cut_into_batches(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghijk" * 100)
    data = {
        "source": "text",
        "path": str(tmp_path / "a.txt"),
        "bos": False,
        "cache_dir": str(tmp_path / "cache"),
    }
    source = load_source(Config.model_validate({"data": data, "model": {"context_length": 17}}))
    results = [evaluate(model(), source.validation(size), source.bytes_per_token) for size in (1, 3, 100)]
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-5)


def test_evaluation_is_without_dropout_and_leaves_no_trace():
    gpt = model(dropout=0.5)
    gpt.train()
    gpt.blocks[1].eval()
    modes = [module.training for module in gpt.modules()]
    random_state = torch.get_rng_state()
    first, second = evaluate(gpt, batches(), 1.0), evaluate(gpt, batches(), 1.0)
    assert first == second
    assert first == pytest.approx(evaluate(model(dropout=0.0), batches(), 1.0), rel=1e-6)
    assert [module.training for module in gpt.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in gpt.parameters())


class Says(GPT):
    """A model that remembers what it was asked."""

    def forward(self, tokens_BT, *rest):
        self.asked = [*getattr(self, "asked", []), (tokens_BT, *rest)]
        return super().forward(tokens_BT)


def test_the_model_is_told_of_documents_where_there_are_some_and_batches_go_to_its_device(monkeypatch):
    gpt, went, (first, second) = Says(Model(n_layer=1, n_head=2, d_model=8), V), [], batches()
    segment_BT = torch.zeros_like(first.inputs_BT)

    def to_device(batch, device):
        went.append(device)
        return batch._replace(inputs_BT=(batch.inputs_BT + 1) % V)

    monkeypatch.setattr(evaluation, "to_device", to_device)
    evaluate(gpt, [first._replace(segment_BT=segment_BT), second], 1.0)
    assert went == [gpt.device] * 2
    (with_one, *told), (without, *silent) = gpt.asked  # tokens, cache, documents
    assert torch.equal(with_one, (first.inputs_BT + 1) % V)
    assert torch.equal(without, (second.inputs_BT + 1) % V)
    assert told[0] is None
    assert told[1] is segment_BT
    assert silent == [None, None]


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_each_batch_is_read_by_one_rank_and_all_together_say_what_one_process_says(number):
    """Sums of the ranks, taken one after the other, are given to all in a second round."""
    gpt, told = model(), []
    read = [
        evaluate(gpt, batches((3, 2, 1)), 1.0, Ranks(r, number, lambda x: told.append(x) or x))
        for r in range(number)
    ]
    assert torch.count_nonzero(torch.stack(told)) == 6  # windows
    whole = evaluate(gpt, batches((3, 2, 1)), 1.0, Ranks(0, number, lambda x: sum(told)))
    assert whole == evaluate(gpt, batches((3, 2, 1)), 1.0)
    assert number == 1 or read[0]["loss"] < whole["loss"]
