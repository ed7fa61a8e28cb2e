"""Batches, and what the sources of them share.

A source is an endless sequence of windows: `windows(first, count)` is a function of these and the seed alone.
It has `symbols` (the ids that occur in training, BOS left out), `fingerprint` (changes when the data do),
`bytes_per_token`, `description`, and for what is held back from training `validation` and `probe_text` (token
ids and the document of each, or None, as in `Batch`).
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.seeds import seed_for

IGNORED = -100  # a target that no loss counts: PyTorch's default `ignore_index`


class Batch(NamedTuple):
    """Token ids and the ids that follow them, int64."""

    inputs_BT: Tensor
    targets_BT: Tensor
    segment_BT: Tensor | None = None  # the document of each input, -1 for padding; None: all is one


class Epochs:
    """`count` windows, each once an epoch, in an order and with a shift of the epoch's own."""

    def __init__(self, count: int, free: int, seed: int):
        self.count, self.free, self.seed = count, free, seed
        self._drawn: tuple[int, np.ndarray, int] | None = None  # epoch, order, shift

    def places(self, first: int, count: int) -> np.ndarray:
        """Which window `first` ... `first + count - 1` are in their epochs, and their shifts: 2 x count."""
        places = []
        for window in range(first, first + count):
            epoch, place = divmod(window, self.count)
            if self._drawn is None or self._drawn[0] != epoch:
                generator = torch.Generator().manual_seed(seed_for(self.seed, "epoch", epoch))
                shift = int(torch.randint(self.free + 1, (), generator=generator))
                self._drawn = epoch, torch.randperm(self.count, generator=generator).numpy(), shift
            places.append((self._drawn[1][place], self._drawn[2]))
        return np.array(places).T


def side_by_side(targets: int, context_length: int, seed: int) -> Epochs:
    """Full windows of so many targets, as many as fit."""
    free = targets - context_length
    # A window's worth of tokens stays free for the shift: over the epochs, every token is a target.
    count = max(1, (free + 1) // context_length)
    return Epochs(count, free - (count - 1) * context_length, seed)


def spread(chosen: int, of: int) -> np.ndarray:
    """So many of 0 ... of - 1, evenly spread and in order."""
    return np.arange(chosen) * of // chosen


def with_bos(rows: Tensor, bos: int | None) -> Tensor:
    """Token ids with BOS in front of each row, where there is one."""
    return rows if bos is None else torch.cat([rows.new_full((len(rows), 1), bos), rows], dim=1)


def shifted(rows: Tensor) -> Batch:
    """Rows of T + 1 token ids as inputs and targets."""
    return Batch(rows[:, :-1], rows[:, 1:].clone())
