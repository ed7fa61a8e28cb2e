"""Batches, and text as a source of them.

A source is an endless sequence of windows: `windows(first, count)` is a function of these and the seed alone.
It has `symbols` (the ids that occur in training, BOS left out), `fingerprint` (changes when the data do),
`bytes_per_token`, `description`, and for what is held back from training `validation` and `probe_text`.
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


class Text:
    """Windows of a corpus, each seen once per epoch, in an order and with a shift of the epoch's own."""

    def __init__(self, tokens: Tokens, context_length: int, seed: int):
        self.tokens, self.T, self.seed = tokens, context_length, seed
        self.tokenizer, self.fingerprint = tokens.tokenizer, tokens.fingerprint
        self.bytes_per_token = tokens.bytes_per_token
        self.symbols = torch.from_numpy(np.unique(tokens.train).astype(np.int64))
        self.description = f"{len(tokens.train):,} training and {len(tokens.val):,} validation tokens"
        self._span = context_length + (tokens.tokenizer.bos is None)  # tokens that a window takes
        free = len(tokens.train) - self._span
        # A window's worth of tokens stays free for the shift: over the epochs, every token is a target.
        self.per_epoch = max(1, (free + 1) // context_length)
        self._free = free - (self.per_epoch - 1) * context_length
        self._epoch: tuple[int, Tensor, int] | None = None  # number, order, shift

    def windows(self, first: int, count: int) -> Batch:
        """Windows `first` ... `first + count - 1` of the endless sequence of epochs."""
        starts = []
        for window in range(first, first + count):
            epoch, place = divmod(window, self.per_epoch)
            if self._epoch is None or self._epoch[0] != epoch:
                generator = torch.Generator().manual_seed(seed_for(self.seed, "epoch", epoch))
                shift = int(torch.randint(self._free + 1, (), generator=generator))
                self._epoch = epoch, torch.randperm(self.per_epoch, generator=generator), shift
            starts.append(int(self._epoch[1][place]) * self.T + self._epoch[2])
        return self._window(self.tokens.train, starts)

    def validation(self, batch_size: int, tokens: int = 0) -> Iterator[Batch]:
        """Every token of the validation part once, or about `tokens` of them, evenly spread.

        Windows stand side by side; the last ends with the last token, its overlap is not counted twice.
        """
        last = len(self.tokens.val) - self._span
        starts = [*range(0, last, self.T), last]
        count = max(1, round(tokens / self.T)) if 0 < tokens < len(starts) * self.T else len(starts)
        chosen = [i * len(starts) // count for i in range(count)]
        for first in range(0, count, batch_size):
            group = chosen[first : first + batch_size]
            inputs_BT, targets_BT, _ = self._window(self.tokens.val, [starts[i] for i in group])
            if group[-1] == len(starts) - 1 and len(starts) > 1:
                targets_BT[-1, : self.T - (starts[-1] - starts[-2])] = IGNORED
            yield Batch(inputs_BT, targets_BT)

    def probe_text(self, sequences: int, length: int, bos: bool) -> Tensor:
        """Validation text of `length` tokens a sequence from evenly spread places, BOS in front if asked."""
        taken = length - bos
        starts = np.linspace(0, len(self.tokens.val) - taken, sequences).astype(np.int64)
        rows = self.tokens.val[starts[:, None] + np.arange(taken)]
        return with_bos(torch.from_numpy(rows.astype(np.int64)), self.tokenizer.bos if bos else None)

    def _window(self, part: np.ndarray, starts: list[int]) -> Batch:
        rows = part[np.asarray(starts)[:, None] + np.arange(self._span)]
        return shifted(with_bos(torch.from_numpy(rows.astype(np.int64)), self.tokenizer.bos))


def with_bos(rows: Tensor, bos: int | None) -> Tensor:
    """Token ids with BOS in front of each row, where there is one."""
    return rows if bos is None else torch.cat([rows.new_full((len(rows), 1), bos), rows], dim=1)


def shifted(rows: Tensor) -> Batch:
    """Rows of T + 1 token ids as inputs and targets."""
    return Batch(rows[:, :-1], rows[:, 1:].clone())
