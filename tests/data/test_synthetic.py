"""Synthetic sources: repeats that can only be copied, and the Bigram-Backcopy chain."""

import math

import pytest
import torch
from torch import Tensor

from configs import UserError
from data.synthetic import Backcopy
from tests.data.made import T, drawn, load

BY_ITSELF = pytest.mark.parametrize("name", ["repeats", "backcopy"])


# All of them


@BY_ITSELF
def test_validation_sequences_are_none_of_the_training_sequences(name):
    source = drawn(name, rows=64)
    seen = {tuple(row) for step in range(1, 30) for row in source.batch(step).targets_BT.tolist()}
    validation = {tuple(row) for batch in source.validation(50) for row in batch.targets_BT.tolist()}
    assert len(seen) == 29 * 64
    assert len(validation) == 256
    assert not seen & validation


@BY_ITSELF
def test_one_sequence_a_step_is_another_one_each_step(name):
    source = drawn(name, rows=1)
    assert len({tuple(source.batch(step).targets_BT[0].tolist()) for step in range(1, 30)}) == 29


@BY_ITSELF
def test_a_share_of_validation_is_as_large_as_asked(name):
    assert sum(len(batch.targets_BT) for batch in drawn(name).validation(7, 32 * 30)) == 30
    assert sum(len(batch.targets_BT) for batch in drawn(name).validation(7, 10**9)) == 256


# Repeats


def period(row: list[int]) -> int:
    """The shortest distance at which a sequence equals itself."""
    return next(p for p in range(1, len(row) + 1) if row[p:] == row[:-p])


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("context", [17, 32, 64])
def test_repeats_have_a_period_from_8_to_half_the_context_all_of_them_in_use(context, bos):
    source = drawn("repeats", bos=bos, rows=400, context=context)
    inputs_BT, targets_BT = source.batch(1)
    whole = targets_BT if bos else torch.cat([inputs_BT[:, :1], targets_BT], dim=1)
    assert {period(row) for row in whole.tolist()} == set(range(8, context // 2 + 1))


def test_blocks_are_drawn_evenly_from_the_whole_alphabet():
    first_N = torch.cat(
        [drawn("repeats", rows=400).batch(step).targets_BT[:, :8].flatten() for step in range(1, 5)]
    )
    counts = first_N.bincount(minlength=64)
    assert len(counts) == 64
    assert counts.min() > 0.6 * len(first_N) / 64
    assert counts.max() < 1.4 * len(first_N) / 64


# Bigram-Backcopy


def chain(V: int = 8, seed: int = 1, bos: int | None = None, context: int = 99) -> Backcopy:
    """Tokens 0 ... V - 1, of which 0, 1 and 2 are triggers."""
    return Backcopy(torch.arange(V), bos, context, seed)


def sequences(source: Backcopy, count: int = 600) -> Tensor:
    """Whole sequences, without BOS."""
    inputs_BT, targets_BT = source.windows(0, count)
    return targets_BT if source.bos is not None else torch.cat([inputs_BT[:, :1], targets_BT], dim=1)


def steps_of_the_chain(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each token that is no trigger, and what came next."""
    here, after = rows[:, :-1].flatten(), rows[:, 1:].flatten()
    return here[here >= 3], after[here >= 3]


@pytest.mark.parametrize("bos", [None, 64])
def test_after_a_trigger_comes_the_token_before_it_and_never_another_trigger(bos):
    rows = sequences(chain(V=64, bos=bos))
    assert rows.shape == (600, 99 if bos else 100)
    before, here, after = rows[:, :-2], rows[:, 1:-1], rows[:, 2:]
    trigger = here < 3
    assert 0.1 < trigger.double().mean() < 0.5
    assert (rows[:, 0] >= 3).all()  # it would have nothing to copy
    assert (before[trigger] >= 3).all()
    assert torch.equal(after[trigger], before[trigger])
    assert (after[~trigger] != before[~trigger]).any()


def test_triggers_are_the_first_symbols_of_the_text(tmp_path):
    (tmp_path / "text.txt").write_text("zyxcba" * 100)
    stages = [{"weights": {"backcopy": 1, "text": 1}}]
    data = {"path": str(tmp_path / "text.txt"), "cache_dir": str(tmp_path / "cache"), "stages": stages}
    source = load(source="backcopy", rows=200, **data)
    text = [source.tokenizer.decode(row) for row in source.batch(1).targets_BT[:100].tolist()]
    triggers = [(row[i - 1], row[i + 1]) for row in text for i in range(1, T - 1) if row[i] in "abc"]
    assert len(triggers) > 100
    assert all(before == after for before, after in triggers)


def test_frequencies_after_other_tokens_are_those_of_the_chain():
    """Pearson's statistic of each row: mean V - 1, variance 2 (V - 1) + (sum 1/p - V^2 - 2 V + 2) / n."""
    source, V = chain(), 8
    counts_VV = torch.zeros(V, V, dtype=torch.float64)
    here, after = steps_of_the_chain(sequences(source))
    counts_VV.index_put_((here, after), torch.ones(len(here), dtype=torch.float64), accumulate=True)

    def deviation(chain_VV: Tensor) -> float:
        p, n = chain_VV[3:], counts_VV[3:].sum(-1)
        statistic = ((counts_VV[3:] - n[:, None] * p) ** 2 / (n[:, None] * p)).sum()
        variance = (2 * (V - 1) + ((1 / p).sum(-1) - V**2 - 2 * V + 2) / n).sum()
        return ((statistic - (V - 1) * len(p)) / variance.sqrt()).item()

    assert abs(deviation(source.chain_VV)) < 4
    assert deviation(0.98 * source.chain_VV + 0.02 / V) > 10  # so one draw in fifty from elsewhere would show


@pytest.mark.parametrize("V", [4, 8, 64])
def test_the_chain_itself_is_the_ideal_model_and_its_loss_is_the_entropy_of_the_rows(V):
    """`-log p - H(row)` has mean 0 at each step, whatever came before: variances add up."""
    source = chain(V)
    here, after = steps_of_the_chain(sequences(source))
    surprise_VV = -source.chain_VV.log()
    entropy_V = torch.special.entr(source.chain_VV).sum(-1)
    variance_V = (source.chain_VV * surprise_VV**2).sum(-1) - entropy_V**2
    excess = surprise_VV[here, after].mean() - entropy_V[here].mean()
    assert abs(excess) < 4 * variance_V[here].sum().sqrt() / len(here)
    wrong = -chain(V, seed=2).chain_VV.log()[here, after].mean() - entropy_V[here].mean()
    assert wrong > 40 * variance_V[here].sum().sqrt() / len(here)


def test_the_chain_is_a_function_of_the_seed_and_the_symbols_alone():
    assert torch.equal(chain().chain_VV, chain(bos=64, context=17).chain_VV)
    assert not torch.allclose(chain().chain_VV, chain(seed=2).chain_VV, atol=0.1)
    torch.testing.assert_close(chain(64).chain_VV.sum(-1), torch.ones(64, dtype=torch.float64))
    assert chain(64).chain_VV[3:, :3].sum(-1).mean() > 2 * 3 / 64  # triggers come often


def test_the_first_token_is_any_but_a_trigger_evenly():
    counts = sequences(chain(), 4000)[:, 0].bincount(minlength=8)
    assert counts[:3].tolist() == [0, 0, 0]
    assert (counts[3:] - 800).abs().max() < 4.5 * math.sqrt(800 * 0.8)  # binomial


@pytest.mark.parametrize("letters", ["a", "abc"])
def test_a_text_of_too_few_letters_for_triggers_is_refused_with_both_numbers(letters, tmp_path):
    (tmp_path / "text.txt").write_text(letters * 300)
    data = {"path": str(tmp_path / "text.txt"), "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(UserError, match=rf"needs 4 distinct tokens.*has {len(letters)}") as caught:
        load(source="text", stages=[{"weights": {"backcopy": 1}}], **data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["repeats", "backcopy"])
def test_a_part_of_validation_and_the_probes_are_some_of_all_its_sequences(name):
    source = drawn(name)
    whole = torch.cat([batch.inputs_BT for batch in source.validation(64)])
    part = torch.cat([batch.inputs_BT for batch in source.validation(64, 32 * 8)])
    assert torch.equal(part, whole[:8])
    assert torch.equal(source.probe_text(5, whole.size(1), True)[0], whole[:5])
