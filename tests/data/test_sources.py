"""Sources: pure functions of seed and window, every window once an epoch, every validation target once."""

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.sources import IGNORED
from tests.data.made import T, drawn, places

MAKERS = {
    "text": lambda **values: places(200, **values),
    "text without bos": lambda **values: places(200, bos=False, **values),
    "repeats": lambda **values: drawn("repeats", **values),
    "repeats without bos": lambda **values: drawn("repeats", bos=False, **values),
    "backcopy": lambda **values: drawn("backcopy", **values),
    "backcopy without bos": lambda **values: drawn("backcopy", bos=False, **values),
}
SOURCES = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


# Training batches


@SOURCES
def test_a_batch_is_a_pure_function_of_seed_and_step(make):
    steps = [3, 1, 30, 2, 30, 17, 4]
    source = make()
    for step in steps:
        batch, again = source.batch(step), make().batch(step)
        assert torch.equal(batch.inputs_BT, again.inputs_BT)
        assert torch.equal(batch.targets_BT, again.targets_BT)
    assert not torch.equal(make().batch(1).targets_BT, make(seed=2).batch(1).targets_BT)
    assert not torch.equal(make().batch(1).targets_BT, make().batch(2).targets_BT)


@SOURCES
def test_targets_are_the_inputs_one_place_on_and_bos_is_input_only(make):
    source = make()
    for inputs_BT, targets_BT, _ in (source.batch(1), source.batch(9), next(iter(source.validation(3)))):
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
    source = make(rows=5, context=29)
    for step in range(1, 40):
        inputs_BT, targets_BT, _ = source.batch(step)
        assert inputs_BT.shape == targets_BT.shape == (5, 29)
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
    source = places(train, bos=bos, seed=seed).sources["text"]
    W = source.epochs.count
    rows = source.windows(epoch * W, W).targets_BT.tolist()
    starts = sorted(row[0] for row in rows)
    assert all(row == list(range(row[0], row[0] + T)) for row in rows)
    assert all(after - before == T for before, after in pairwise(starts))
    assert starts[0] >= (0 if bos else 1)
    assert starts[-1] + T <= train
    assert train - W * T < 2 * T + (not bos)  # what the epoch leaves out, free for its shift


def test_epochs_come_in_different_orders_and_places():
    source = places(20 * T).sources["text"]
    W = source.epochs.count
    epochs = [source.windows(e * W, W).targets_BT[:, 0].tolist() for e in range(20)]
    assert len({tuple(starts) for starts in epochs}) == 20
    assert len({starts[0] % T for starts in epochs}) > 5
    assert all(starts != sorted(starts) for starts in epochs)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("train", [T + 1, 2 * T - 1, 2 * T, 2 * T + 1, 3 * T, 5 * T + 3])
def test_over_the_epochs_every_token_becomes_a_target(train, bos):
    windows = places(train, bos=bos).sources["text"].windows(0, 2450)
    assert set(windows.targets_BT.flatten().tolist()) == set(range(0 if bos else 1, train))


@pytest.mark.slow
@given(first=st.integers(0, 200), parts=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_how_windows_of_text_are_cut_into_batches_does_not_change_their_order(first, parts):
    source, cut = places(300).sources["text"], places(300).sources["text"]
    firsts = [first + sum(parts[:i]) for i in range(len(parts))]
    pieces = [cut.windows(*place).targets_BT for place in zip(firsts, parts, strict=True)]
    assert torch.equal(source.windows(first, sum(parts)).targets_BT, torch.cat(pieces))


def test_training_never_sees_validation():
    source = places(100, 60, rows=40)
    assert max(source.batch(step).targets_BT.max().item() for step in range(1, 40)) < 100
    assert min(batch.targets_BT.abs().min().item() for batch in source.validation(4)) >= 100


# Validation batches


@given(val=st.integers(T + 1, 7 * T), bos=st.booleans(), size=st.integers(1, 9))
def test_validation_counts_every_target_once(val, bos, size):
    source = places(60, val, bos)
    counted = Counter()
    for inputs_BT, targets_BT, _ in source.validation(size):
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


@pytest.mark.slow
@given(tokens=st.integers(1, 400), bos=st.booleans())
def test_a_share_of_validation_is_about_as_large_as_asked_and_evenly_spread(tokens, bos):
    """Within half a window, and what the last window of all, which is short, lacks."""
    text = 20 * T + 5
    source = places(60, text, bos)
    targets_BT = torch.cat([batch.targets_BT for batch in source.validation(4, tokens)])
    counted, all_targets = int((targets_BT != IGNORED).sum()), text - (not bos)
    lacks = 21 * T - all_targets
    assert abs(counted - min(tokens, all_targets)) <= T / 2 + lacks
    starts = targets_BT[:, 0]
    assert starts[0] == 60 + (not bos)
    if len(starts) > 1:
        gaps = starts.diff()
        assert gaps.max() - gaps.min() <= T
        assert starts[-1] + gaps.max() >= 60 + 20 * T


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
        text_BT, segment_BT = source.probe_text(sequences, T, with_bos)
        assert segment_BT is None
        assert text_BT.shape == (sequences, T)
        assert torch.equal(text_BT, make().probe_text(sequences, T, with_bos)[0])
        assert (
            (text_BT[:, 0] == bos).all() if with_bos else not (text_BT == (-1 if bos is None else bos)).any()
        )
        full, _ = make(context=36).probe_text(sequences, 36, with_bos)
        assert full.shape == (sequences, 36)


def test_probe_text_is_spread_over_the_validation_part():
    text_BT, _ = places(60, 300).probe_text(4, T, False)
    assert text_BT[0, 0] == 60
    assert text_BT[-1, -1] >= 358
    assert (text_BT.diff() == 1).all()


def test_symbols_are_the_tokens_of_the_training_part():
    assert places(70, 40).symbols.tolist() == list(range(70))


@pytest.mark.parametrize("name", ["repeats", "backcopy"])
def test_symbols_of_what_is_drawn_are_all_that_the_tokenizer_has(name):
    assert drawn(name).symbols.tolist() == list(range(64))
    assert drawn(name, bos=False, tokenizer="byte").symbols.tolist() == list(range(256))
