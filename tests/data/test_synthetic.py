"""Synthetic sources: repeats that can only be copied, and the Bigram-Backcopy chain."""

import pytest
import torch

from tests.data.made import drawn

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
