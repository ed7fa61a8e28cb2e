"""Batches, and text as a source of them.

A source is an endless sequence of windows: `windows(first, count)` is a function of these and the seed alone.
It has `symbols` (the ids that occur in training, BOS left out), `fingerprint` (changes when the data do),
`bytes_per_token`, `description`, and for what is held back from training `validation` and `probe_text` (token
ids and the document of each, or None, as in `Batch`).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.seeds import seed_for
from data.tokens import Tokens

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


class Text:
    """Windows of a corpus, each seen once per epoch."""

    def __init__(self, tokens: Tokens, context_length: int, seed: int):
        self.tokens, self.T = tokens, context_length
        self.tokenizer, self.fingerprint = tokens.tokenizer, tokens.fingerprint
        self.bytes_per_token = tokens.bytes_per_token
        self.symbols = torch.from_numpy(np.unique(tokens.train).astype(np.int64))
        self.description = f"{len(tokens.train):,} training and {len(tokens.val):,} validation tokens"
        without = tokens.tokenizer.bos is None
        self._span = context_length + without  # tokens that a window takes
        self.epochs = side_by_side(len(tokens.train) - without, context_length, seed)

    def windows(self, first: int, count: int) -> Batch:
        """Windows `first` ... `first + count - 1` of the endless sequence of epochs."""
        window_N, shift_N = self.epochs.places(first, count)
        return self._window(self.tokens.train, window_N * self.T + shift_N)

    def validation(self, batch_size: int, tokens: int = 0) -> Iterator[Batch]:
        """Every token of the validation part once, or about `tokens` of them, evenly spread.

        Windows stand side by side; the last ends with the last token, its overlap is not counted twice.
        """
        last = len(self.tokens.val) - self._span
        starts = np.array([*range(0, last, self.T), last])
        count = max(1, round(tokens / self.T)) if 0 < tokens < len(starts) * self.T else len(starts)
        chosen = spread(count, len(starts))
        for first in range(0, count, batch_size):
            group = chosen[first : first + batch_size]
            batch = self._window(self.tokens.val, starts[group])
            if group[-1] == len(starts) - 1 and len(starts) > 1:
                batch.targets_BT[-1, : self.T - (starts[-1] - starts[-2])] = IGNORED
            yield batch

    def probe_text(self, sequences: int, length: int, bos: bool) -> tuple[Tensor, None]:
        """Validation text of `length` tokens a sequence from evenly spread places, BOS in front if asked."""
        taken = length - bos
        starts = np.linspace(0, len(self.tokens.val) - taken, sequences).astype(np.int64)
        rows = self.tokens.val[starts[:, None] + np.arange(taken)]
        return with_bos(torch.from_numpy(rows.astype(np.int64)), self.tokenizer.bos if bos else None), None

    def _window(self, part: np.ndarray, starts: np.ndarray) -> Batch:
        rows = part[starts[:, None] + np.arange(self._span)]
        return shifted(with_bos(torch.from_numpy(rows.astype(np.int64)), self.tokenizer.bos))


def with_bos(rows: Tensor, bos: int | None) -> Tensor:
    """Token ids with BOS in front of each row, where there is one."""
    return rows if bos is None else torch.cat([rows.new_full((len(rows), 1), bos), rows], dim=1)


def shifted(rows: Tensor) -> Batch:
    """Rows of T + 1 token ids as inputs and targets."""
    return Batch(rows[:, :-1], rows[:, 1:].clone())
