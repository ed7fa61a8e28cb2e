"""Sources of batches. The batch of a step is a pure function of (seed, step): resuming needs no loader state."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

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


class Source(Protocol):
    """What training, evaluation and probes read."""

    tokenizer: Tokenizer
    symbols: Tensor  # the ids that occur in training, BOS left out
    fingerprint: str  # changes when the data do
    bytes_per_token: float
    description: str

    def batch(self, step: int) -> Batch:
        """The global batch of an optimizer step, counted from 1."""
        ...

    def validation(self, batch_size: int, tokens: int = 0) -> Iterator[Batch]:
        """The validation part, each target once, or about `tokens` of it, evenly spread. The same at every call."""
        ...

    def probe_text(self, sequences: int, length: int, bos: bool) -> Tensor:
        """Validation text of `length` tokens a sequence, the same at every call, with or without BOS in front."""
        ...


class Text:
    """Windows of a tokenized corpus, each seen once per epoch in an order, and with a shift, of the epoch's own."""

    def __init__(self, tokens: Tokens, context_length: int, seed: int, global_batch: int):
        self.tokens, self.T, self.seed, self.global_batch = tokens, context_length, seed, global_batch
        self.tokenizer, self.fingerprint = tokens.tokenizer, tokens.fingerprint
        self.bytes_per_token = tokens.bytes_per_token
        self.symbols = torch.from_numpy(np.unique(tokens.train).astype(np.int64))
        self.description = f"{len(tokens.train):,} training and {len(tokens.val):,} validation tokens"
        self._span = context_length + (
            tokens.tokenizer.bos is None
        )  # tokens that a window takes from the corpus
        free = len(tokens.train) - self._span
        # Leave a window's worth of tokens free for the shift, so that over the epochs every token is a target.
        self.windows = max(1, (free + 1) // context_length)
        self._free = free - (self.windows - 1) * context_length
        self._order: tuple[int, Tensor, int] = (-1, torch.empty(0), 0)

    def batch(self, step: int) -> Batch:
        """Rows `(step - 1) * global_batch ...` of the endless sequence of epochs."""
        rows = range((step - 1) * self.global_batch, step * self.global_batch)
        starts = []
        for row in rows:
            epoch, place = divmod(row, self.windows)
            order, shift = self._epoch(epoch)
            starts.append(int(order[place]) * self.T + shift)
        return self._window(self.tokens.train, starts)

    def validation(self, batch_size: int, tokens: int = 0) -> Iterator[Batch]:
        """Windows side by side; the last one ends with the last token and its overlap is not counted twice."""
        last = len(self.tokens.val) - self._span
        starts = [*range(0, last, self.T), last]
        if 0 < tokens < len(starts) * self.T:
            count = max(1, round(tokens / self.T))
            chosen = [i * len(starts) // count for i in range(count)]
        else:
            chosen = list(range(len(starts)))
        for first in range(0, len(chosen), batch_size):
            group = chosen[first : first + batch_size]
            inputs_BT, targets_BT = self._window(self.tokens.val, [starts[i] for i in group])
            if group[-1] == len(starts) - 1 and len(starts) > 1:
                targets_BT[-1, : self.T - (starts[-1] - starts[-2])] = IGNORED
            yield Batch(inputs_BT, targets_BT)

    def probe_text(self, sequences: int, length: int, bos: bool) -> Tensor:
        """Evenly spread places of the validation part."""
        taken = length - bos
        starts = np.linspace(0, len(self.tokens.val) - taken, sequences).astype(np.int64)
        rows_BT = torch.from_numpy(self.tokens.val[starts[:, None] + np.arange(taken)].astype(np.int64))
        return _with_bos(rows_BT, self.tokenizer.bos) if bos else rows_BT

    def _window(self, part: np.ndarray, starts: list[int]) -> Batch:
        index = np.asarray(starts)[:, None] + np.arange(self._span)
        rows = torch.from_numpy(part[index].astype(np.int64))
        return _shifted(rows if self.tokenizer.bos is None else _with_bos(rows, self.tokenizer.bos))

    def _epoch(self, epoch: int) -> tuple[Tensor, int]:
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(seed_for(self.seed, "epoch", epoch))
            shift = int(torch.randint(self._free + 1, (), generator=generator))
            self._order = (epoch, torch.randperm(self.windows, generator=generator), shift)
        return self._order[1:]


class Repeats:
    """Random blocks that repeat to the end of the window, with a period drawn per sequence.

    The first block cannot be predicted; each later one can, by looking back for the same token and copying what came
    next. The varying period keeps a head that only knows a distance from doing it.
    """

    ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    SHORTEST = 8
    VALIDATION = 256  # sequences

    def __init__(self, tokenizer: Tokenizer, context_length: int, seed: int, global_batch: int):
        self.tokenizer, self.T, self.seed, self.global_batch = tokenizer, context_length, seed, global_batch
        symbols = tokenizer.vocab_size - (tokenizer.bos is not None)
        self.symbols = torch.arange(symbols)
        self.fingerprint = f"repeats-{symbols}-{seed}"
        self.bytes_per_token = 1.0
        self.description = (
            f"random blocks of {self.SHORTEST} to {context_length // 2} of {symbols} symbols, repeated"
        )

    def batch(self, step: int) -> Batch:
        """Drawn afresh for every step."""
        return self._draw(self.global_batch, "repeats", step)

    def validation(self, batch_size: int, tokens: int = 0) -> Iterator[Batch]:
        """A fixed set of sequences from a stream of its own."""
        count = min(self.VALIDATION, max(1, round(tokens / self.T))) if tokens else self.VALIDATION
        everything = self._draw(count, "validation")
        for inputs_BT, targets_BT in zip(
            everything[0].split(batch_size), everything[1].split(batch_size), strict=True
        ):
            yield Batch(inputs_BT, targets_BT)

    def probe_text(self, sequences: int, length: int, bos: bool) -> Tensor:
        """Validation sequences; there is no natural text here."""
        rows_BT = self._draw(sequences, "validation")[0]
        has_bos = self.tokenizer.bos is not None
        return rows_BT[:, int(has_bos and not bos) :][:, :length]

    def _draw(self, count: int, purpose: str, *index: int) -> Batch:
        generator = torch.Generator().manual_seed(seed_for(self.seed, purpose, *index))
        longest = self.T // 2
        block_BP = self.symbols[torch.randint(len(self.symbols), (count, longest), generator=generator)]
        period_B1 = torch.randint(self.SHORTEST, longest + 1, (count, 1), generator=generator)
        bos = self.tokenizer.bos
        rows = block_BP.gather(1, torch.arange(self.T + (bos is None)) % period_B1)
        return _shifted(rows if bos is None else _with_bos(rows, bos))


def _with_bos(rows_BT: Tensor, bos: int | None) -> Tensor:
    assert bos is not None
    return torch.cat([rows_BT.new_full((len(rows_BT), 1), bos), rows_BT], dim=1)


def _shifted(rows: Tensor) -> Batch:
    return Batch(rows[:, :-1], rows[:, 1:].clone())
