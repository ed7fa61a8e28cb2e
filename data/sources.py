"""Sources of batches; that of a step is a pure function of (seed, step): resuming needs no loader state.

A source has `tokenizer`, `symbols` (the ids that occur in training, BOS left out), `fingerprint` (changes
when the data do), `bytes_per_token`, `description`, and the methods `batch`, `validation`, `probe_text`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.seeds import seed_for
from data.tokenizers import Tokenizer
from data.tokens import Tokens

IGNORED = -100  # a target that no loss counts: PyTorch's default `ignore_index`


class Batch(NamedTuple):
    """Token ids and the ids that follow them, int64."""

    inputs_BT: Tensor
    targets_BT: Tensor


class Text:
    """Windows of a corpus, each seen once per epoch, in an order and with a shift of the epoch's own."""

    def __init__(self, tokens: Tokens, context_length: int, seed: int, global_batch: int):
        self.tokens, self.T, self.seed, self.global_batch = tokens, context_length, seed, global_batch
        self.tokenizer, self.fingerprint = tokens.tokenizer, tokens.fingerprint
        self.bytes_per_token = tokens.bytes_per_token
        self.symbols = torch.from_numpy(np.unique(tokens.train).astype(np.int64))
        self.description = f"{len(tokens.train):,} training and {len(tokens.val):,} validation tokens"
        self._span = context_length + (tokens.tokenizer.bos is None)  # tokens that a window takes
        free = len(tokens.train) - self._span
        # A window's worth of tokens stays free for the shift: over the epochs, every token is a target.
        self.windows = max(1, (free + 1) // context_length)
        self._free = free - (self.windows - 1) * context_length
        self._epoch: tuple[int, Tensor, int] | None = None  # number, order, shift

    def batch(self, step: int) -> Batch:
        """The global batch of a step, counted from 1: the next rows of the endless sequence of epochs."""
        starts = []
        for row in range((step - 1) * self.global_batch, step * self.global_batch):
            epoch, place = divmod(row, self.windows)
            if self._epoch is None or self._epoch[0] != epoch:
                generator = torch.Generator().manual_seed(seed_for(self.seed, "epoch", epoch))
                shift = int(torch.randint(self._free + 1, (), generator=generator))
                self._epoch = epoch, torch.randperm(self.windows, generator=generator), shift
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
            inputs_BT, targets_BT = self._window(self.tokens.val, [starts[i] for i in group])
            if group[-1] == len(starts) - 1 and len(starts) > 1:
                targets_BT[-1, : self.T - (starts[-1] - starts[-2])] = IGNORED
            yield Batch(inputs_BT, targets_BT)

    def probe_text(self, sequences: int, length: int, bos: bool) -> Tensor:
        """Validation text of `length` tokens a sequence from evenly spread places, BOS in front if asked."""
        taken = length - bos
        starts = np.linspace(0, len(self.tokens.val) - taken, sequences).astype(np.int64)
        rows = self.tokens.val[starts[:, None] + np.arange(taken)]
        return _with_bos(torch.from_numpy(rows.astype(np.int64)), self.tokenizer.bos if bos else None)

    def _window(self, part: np.ndarray, starts: list[int]) -> Batch:
        rows = part[np.asarray(starts)[:, None] + np.arange(self._span)]
        return _shifted(_with_bos(torch.from_numpy(rows.astype(np.int64)), self.tokenizer.bos))


class Repeats:
    """Random blocks that repeat to the end of the window, with a period drawn per sequence.

    The first block cannot be predicted; each later one can, by looking back for the same token and copying
    what came next. The varying period keeps a head that only knows a distance from doing it.
    """

    ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    SHORTEST = 8
    VALIDATION = 256  # sequences

    def __init__(self, tokenizer: Tokenizer, context_length: int, seed: int, global_batch: int):
        self.tokenizer, self.T, self.seed, self.global_batch = tokenizer, context_length, seed, global_batch
        count = tokenizer.vocab_size - (tokenizer.bos is not None)
        self.symbols, self.bytes_per_token = torch.arange(count), 1.0
        self.fingerprint = f"repeats-{count}-{seed}"
        self.description = f"blocks of {self.SHORTEST} to {self.T // 2} of {count} symbols, repeated"

    def batch(self, step: int) -> Batch:
        """The global batch of a step, drawn afresh."""
        return _shifted(self._draw(self.global_batch, "repeats", step))

    def validation(self, batch_size: int, tokens: int = 0) -> Iterator[Batch]:
        """A fixed set of sequences from a stream of its own, or about `tokens` of them."""
        count = min(self.VALIDATION, max(1, round(tokens / self.T))) if tokens else self.VALIDATION
        inputs_BT, targets_BT = _shifted(self._draw(count, "validation"))
        yield from map(Batch, inputs_BT.split(batch_size), targets_BT.split(batch_size))

    def probe_text(self, sequences: int, length: int, bos: bool) -> Tensor:
        """Validation sequences, for there is no natural text here; BOS in front if asked."""
        rows = self._draw(sequences, "validation")
        has_bos = self.tokenizer.bos is not None
        return rows[:, int(has_bos and not bos) :][:, :length]

    def _draw(self, count: int, purpose: str, *index: int) -> Tensor:
        """Sequences of one token more than the context, BOS included."""
        generator = torch.Generator().manual_seed(seed_for(self.seed, purpose, *index))
        longest, bos = self.T // 2, self.tokenizer.bos
        block_BP = self.symbols[torch.randint(len(self.symbols), (count, longest), generator=generator)]
        period_B1 = torch.randint(self.SHORTEST, longest + 1, (count, 1), generator=generator)
        rows = block_BP.gather(1, torch.arange(self.T + (bos is None)) % period_B1)
        return _with_bos(rows, bos)


Source = Text | Repeats


def _with_bos(rows: Tensor, bos: int | None) -> Tensor:
    return rows if bos is None else torch.cat([rows.new_full((len(rows), 1), bos), rows], dim=1)


def _shifted(rows: Tensor) -> Batch:
    return Batch(rows[:, :-1], rows[:, 1:].clone())
