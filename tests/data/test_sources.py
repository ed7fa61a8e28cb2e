"""Batches: pure functions of the step, every window once an epoch, every validation target once.

The corpora here are of distinct characters in ascending order, so the id of a token is its place in the text.
"""

import random
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Config
from data import Source, Text, load_source
from data.sources import IGNORED

T = 17


def places(
    train: int,
    val: int = 40,
    bos: bool = True,
    seed: int = 1,
    rows: int = 4,
    context: int = T,
    text: str = "",
) -> Text:
    """Text whose token ids are 0 ... train - 1 and then, for validation, train ... train + val - 1."""
    with tempfile.TemporaryDirectory() as folder:  # the tokens stay mapped after it is gone
        path = Path(folder) / "places.txt"
        path.write_text(text or "".join(chr(0x10000 + i) for i in range(train + val)), encoding="utf-8")
        data = {"source": "text", "path": str(path), "bos": bos, "cache_dir": f"{folder}/cache"}
        data["val_fraction"] = (val - 0.5) / (train + val)
        return load_source(config(data, seed, rows, context))


def repeats(
    bos: bool = True, seed: int = 1, rows: int = 4, context: int = 32, tokenizer: str = "char"
) -> Source:
    return load_source(config({"source": "repeats", "bos": bos, "tokenizer": tokenizer}, seed, rows, context))


def config(data: dict, seed: int, rows: int, context: int) -> Config:
    values = {
        "run": {"seed": seed},
        "data": data,
        "model": {"context_length": context},
        "train": {"batch_size": rows},
    }
    return Config.model_validate(values)


SOURCES = pytest.mark.parametrize(
    "make",
    [
        lambda **values: places(200, **values),
        lambda **values: places(200, bos=False, **values),
        lambda **values: repeats(**values),
        lambda **values: repeats(bos=False, **values),
    ],
    ids=["text", "text without bos", "repeats", "repeats without bos"],
)


# Training batches


@SOURCES
def test_a_batch_is_a_pure_function_of_seed_and_step(make):
    steps = [3, 1, 30, 2, 30, 17, 4]
    source = make()
    for step in steps:
        for part, again in zip(source.batch(step), make().batch(step), strict=True):
            assert torch.equal(part, again)
    assert not torch.equal(make().batch(1).targets_BT, make(seed=2).batch(1).targets_BT)
    assert not torch.equal(make().batch(1).targets_BT, make().batch(2).targets_BT)


@SOURCES
def test_targets_are_the_inputs_one_place_on_and_bos_is_input_only(make):
    source = make()
    for inputs_BT, targets_BT in (source.batch(1), source.batch(9), next(iter(source.validation(3)))):
        assert inputs_BT.dtype == targets_BT.dtype == torch.int64
        assert torch.equal(
            inputs_BT[:, 1:], targets_BT[:, :-1].where(targets_BT[:, :-1] != IGNORED, inputs_BT[:, 1:])
        )
        if (bos := source.tokenizer.bos) is not None:
            assert (inputs_BT[:, 0] == bos).all()
            assert not (inputs_BT[:, 1:] == bos).any()
            assert not (targets_BT == bos).any()


@SOURCES
def test_every_window_is_full(make):
    source = make(rows=5)
    for step in range(1, 40):
        inputs_BT, targets_BT = source.batch(step)
        assert inputs_BT.shape == targets_BT.shape == (5, source.T)
        assert not (targets_BT == IGNORED).any()


@SOURCES
def test_data_leave_the_global_generators_alone(make):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    source = make()
    source.batch(5)
    list(source.validation(4))
    source.probe_text(2, T, False)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@given(
    train=st.integers(T + 1, 8 * T), bos=st.booleans(), seed=st.integers(0, 2**40), epoch=st.integers(0, 50)
)
def test_an_epoch_covers_every_window_once(train, bos, seed, epoch):
    source = places(train, bos=bos, seed=seed, rows=1)
    W = source.windows
    rows = [source.batch(epoch * W + i + 1).targets_BT[0].tolist() for i in range(W)]
    starts = sorted(row[0] for row in rows)
    assert all(row == list(range(row[0], row[0] + T)) for row in rows)
    assert all(after - before == T for before, after in pairwise(starts))
    assert starts[0] >= (0 if bos else 1)
    assert starts[-1] + T <= train
    assert train - W * T < 2 * T + (not bos)  # what the epoch leaves out, free for its shift


def test_epochs_come_in_different_orders_and_places():
    source = places(20 * T, rows=1)
    W = source.windows
    epochs = [[source.batch(e * W + i + 1).targets_BT[0, 0].item() for i in range(W)] for e in range(20)]
    assert len({tuple(starts) for starts in epochs}) == 20
    assert len({starts[0] % T for starts in epochs}) > 5
    assert all(starts != sorted(starts) for starts in epochs)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("train", [T + 1, 2 * T - 1, 2 * T, 2 * T + 1, 3 * T, 5 * T + 3])
def test_over_the_epochs_every_token_becomes_a_target(train, bos):
    source = places(train, bos=bos, rows=50)
    seen = set()
    for step in range(1, 50):
        seen |= set(source.batch(step).targets_BT.flatten().tolist())
    assert seen == set(range(0 if bos else 1, train))


@given(step=st.integers(1, 40), rows=st.sampled_from([1, 2, 3, 6]))
def test_how_a_batch_is_cut_does_not_change_the_order_of_windows(step, rows):
    whole = places(300, rows=6).batch(step)
    cut = places(300, rows=rows)
    parts = [cut.batch((step - 1) * (6 // rows) + i + 1) for i in range(6 // rows)]
    assert torch.equal(whole.targets_BT, torch.cat([part.targets_BT for part in parts]))


def test_training_never_sees_validation():
    source = places(100, 60, rows=40)
    assert max(source.batch(step).targets_BT.max().item() for step in range(1, 40)) < 100
    assert min(batch.targets_BT.abs().min().item() for batch in source.validation(4)) >= 100


# Validation batches


@given(val=st.integers(T + 1, 7 * T), bos=st.booleans(), size=st.integers(1, 9))
def test_validation_counts_every_target_once(val, bos, size):
    source = places(60, val, bos)
    counted = Counter()
    for inputs_BT, targets_BT in source.validation(size):
        assert inputs_BT.shape == targets_BT.shape
        assert inputs_BT.shape[1] == T
        assert len(inputs_BT) <= size
        counted += Counter(targets_BT[targets_BT != IGNORED].tolist())
        before_BT = (
            torch.where(inputs_BT == source.tokenizer.bos, targets_BT - 1, inputs_BT) if bos else inputs_BT
        )
        assert torch.equal(before_BT[targets_BT != IGNORED], targets_BT[targets_BT != IGNORED] - 1)
    assert counted == Counter(range(60 + (not bos), 60 + val))


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("val", [k * T + more for k in (1, 2, 3) for more in (0, 1, 2, T - 1)])
def test_validation_counts_every_target_once_at_multiples_of_the_context(val, bos):
    if val >= T + (not bos):
        targets = torch.cat([batch.targets_BT for batch in places(60, val, bos).validation(2)]).flatten()
        assert sorted(targets[targets != IGNORED].tolist()) == list(range(60 + (not bos), 60 + val))


@given(tokens=st.integers(1, 400), bos=st.booleans())
def test_a_share_of_validation_is_as_large_as_asked_and_evenly_spread(tokens, bos):
    source = places(60, 20 * T + 5, bos)
    targets_BT = torch.cat([batch.targets_BT for batch in source.validation(4, tokens)])
    windows = len(targets_BT)
    assert abs(windows * T - tokens) <= max(T / 2, T - tokens) or windows == 21
    starts = targets_BT[:, -1]
    if windows > 2:
        gaps = starts.diff()
        assert gaps.max() - gaps.min() <= T
        assert starts[0] < 60 + 2 * T
        assert starts[-1] + gaps.max() + T > 60 + 20 * T


@SOURCES
@pytest.mark.parametrize("tokens", [0, 100])
def test_validation_is_the_same_at_every_call_whatever_was_drawn_before(make, tokens):
    source = make()
    first = [batch.targets_BT for batch in source.validation(3, tokens)]
    source.batch(7)
    assert all(map(torch.equal, first, [batch.targets_BT for batch in source.validation(3, tokens)]))
    assert all(map(torch.equal, first, [batch.targets_BT for batch in make(rows=9).validation(3, tokens)]))


def test_bits_per_byte_count_the_bytes_of_the_validation_part():
    """Training text of one byte a character says nothing about validation text of three."""
    source = places(200, 100, text="a" * 200 + "あ" * 100)
    assert source.bytes_per_token == pytest.approx(3)


# What probes read


@SOURCES
@pytest.mark.parametrize("sequences", [1, 5])
def test_probe_text_is_validation_text_of_the_length_asked_the_same_every_time(make, sequences):
    source = make()
    bos = source.tokenizer.bos
    for with_bos in {False, bos is not None}:
        text_BT = source.probe_text(sequences, T, with_bos)
        assert text_BT.shape == (sequences, T)
        assert torch.equal(text_BT, make().probe_text(sequences, T, with_bos))
        assert (
            (text_BT[:, 0] == bos).all() if with_bos else not (text_BT == (-1 if bos is None else bos)).any()
        )
        full = source.probe_text(sequences, source.T, with_bos)
        assert full.shape == (sequences, source.T)


def test_probe_text_is_spread_over_the_validation_part():
    text_BT = places(60, 300).probe_text(4, T, False)
    assert text_BT[0, 0] == 60
    assert text_BT[-1, -1] == 359
    assert (text_BT.diff() == 1).all()


def test_symbols_are_the_tokens_of_the_training_part():
    assert places(70, 40).symbols.tolist() == list(range(70))
    assert repeats().symbols.tolist() == list(range(64))
    assert repeats(bos=False, tokenizer="byte").symbols.tolist() == list(range(256))


# Repeats


def period(row: list[int]) -> int:
    """The shortest distance at which a sequence equals itself."""
    return next(p for p in range(1, len(row) + 1) if row[p:] == row[:-p])


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("context", [17, 32, 64])
def test_repeats_have_a_period_from_8_to_half_the_context_all_of_them_in_use(context, bos):
    source = repeats(bos, rows=400, context=context)
    inputs_BT, targets_BT = source.batch(1)
    whole = targets_BT if bos else torch.cat([inputs_BT[:, :1], targets_BT], dim=1)
    assert {period(row) for row in whole.tolist()} == set(range(8, context // 2 + 1))


def test_blocks_are_drawn_evenly_from_the_whole_alphabet():
    first_N = torch.cat([repeats(rows=400).batch(step).targets_BT[:, :8].flatten() for step in range(1, 5)])
    counts = first_N.bincount(minlength=64)
    assert len(counts) == 64
    assert counts.min() > 0.6 * len(first_N) / 64
    assert counts.max() < 1.4 * len(first_N) / 64


def test_validation_repeats_are_none_of_the_training_repeats():
    source = repeats(rows=64)
    seen = {tuple(row) for step in range(1, 30) for row in source.batch(step).targets_BT.tolist()}
    validation = {tuple(row) for batch in source.validation(50) for row in batch.targets_BT.tolist()}
    assert len(seen) == 29 * 64
    assert len(validation) == 256
    assert not seen & validation


def test_a_share_of_validation_repeats_is_as_large_as_asked():
    assert sum(len(batch.targets_BT) for batch in repeats().validation(7, 32 * 30)) == 30
    assert sum(len(batch.targets_BT) for batch in repeats().validation(7, 10**9)) == 256
