"""Windows over the documents of a prepared folder; a whole text is one document.

A window is a range of the token stream, that of its targets. It reads from the token before them on, in
whose place BOS stands, where the data have one. What it reads beyond its range fills it up to T places and
counts for nothing: no target is there, and no place before can see it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configs import UserError
from configs.schema import Data
from configs.seeds import seed_for
from data.sources import IGNORED, Batch
from data.store import PARTS, Part, damaged, mapped, of_documents, read_meta, refuse_short


class Epochs:
    """`count` windows, each once an epoch, in an order and with a shift of the epoch's own."""

    def __init__(self, count: int, free: int, seed: int):
        self.count, self.free, self.seed = count, free, seed
        self._drawn: tuple[int, np.ndarray, int] | None = None  # epoch, order, shift

    def places(self, first: int, count: int) -> np.ndarray:
        """`window_N` and `shift_N`, stacked, of the windows `first` ... `first + count - 1`."""
        places = []
        for window in range(first, first + count):
            epoch, place = divmod(window, self.count)
            if self._drawn is None or self._drawn[0] != epoch:
                generator = torch.Generator().manual_seed(seed_for(self.seed, "epoch", epoch))
                shift = int(torch.randint(self.free + 1, (), generator=generator))
                self._drawn = epoch, torch.randperm(self.count, generator=generator).numpy(), shift
            places.append((self._drawn[1][place], self._drawn[2]))
        return np.array(places).T


class Documents:
    """A source over the prepared `folder`: windows that begin anywhere, or at documents.

    Raises `UserError` for a damaged folder, and where a part is too short for a window of `context_length`.
    """

    def __init__(self, folder: Path, config: Data, context_length: int, seed: int):
        meta = read_meta(folder)
        refuse_short(meta.model_dump(include={"train", "val"}), config, context_length)
        self.train, self.val = (Part(folder, name, meta) for name in PARTS)
        self.T, self.bos, self.masked = context_length, meta.bos, bool(config.mask_documents)
        self.fingerprint, self.vocab_size = meta.fingerprint, meta.vocab_size
        symbols = mapped(folder / "train-symbols.bin", "int64")
        if not 0 < symbols.size <= meta.vocab_size or symbols.min() < 0 or symbols.max() >= meta.vocab_size:
            raise damaged(folder / "train-symbols.bin", f"no ids of {meta.vocab_size} tokens")
        self.symbols = torch.from_numpy(symbols.copy())
        self.description = " and ".join(
            f"{len(part):,} {kind} tokens" + of_documents(len(part.documents))
            for part, kind in ((self.train, "training"), (self.val, "validation"))
        )
        self._windows: np.ndarray | None = None
        if config.windows == "documents":
            self._windows = self._with_targets(self.train, packed(self.train, context_length))
            self._held_back = self._with_targets(self.val, packed(self.val, context_length))
            self.epochs = Epochs(self._windows.shape[1], 0, seed)
        else:
            # The first token of all is no target: it is BOS, or nothing predicts it. Up to a window's
            # worth of tokens stays free for the shift: over the epochs, every other token is a target.
            free = len(self.train) - 1 - context_length
            count = max(1, (free + 1) // context_length)
            self.epochs = Epochs(count, free - (count - 1) * context_length, seed)
            begin_N = np.arange(1, len(self.val), context_length)
            end_N = np.minimum(begin_N + context_length, len(self.val))
            self._held_back = self._with_targets(self.val, np.stack([begin_N, end_N]))
        begin_N, end_N = self._held_back
        targets = (end_N - begin_N).sum() - self._begins(self.val, begin_N).sum()
        if self.masked and self.bos is None:
            targets -= self._firsts(self.val, self._held_back).sum()
        self.bytes_per_token = meta.val.bytes / int(targets)

    def windows(self, first: int, count: int) -> Batch:
        """Windows `first` ... `first + count - 1` of the endless sequence of epochs."""
        window_N, shift_N = self.epochs.places(first, count)
        if self._windows is not None:
            return self._batch(self.train, *self._windows[:, window_N])
        begin_N = 1 + window_N * self.T + shift_N
        return self._batch(self.train, begin_N, begin_N + self.T)

    def validation(self, batch_size: int, tokens: int = 0) -> Iterator[Batch]:
        """Every token of the validation part once, or about `tokens` of them, evenly spread."""
        begin_N, end_N = self._held_back
        all_tokens = int((end_N - begin_N).sum())
        share = tokens / all_tokens if 0 < tokens < all_tokens else 1
        chosen = spread(max(1, round(share * len(begin_N))), len(begin_N))
        for first in range(0, len(chosen), batch_size):
            group = chosen[first : first + batch_size]
            yield self._batch(self.val, begin_N[group], end_N[group])

    def probe_text(self, sequences: int, length: int, bos: bool) -> tuple[Tensor, Tensor | None]:
        """Validation text of `length` tokens a sequence, from the beginnings of documents evenly spread.

        With `mask_documents` a row is of one document; where too few are that long, the longest are taken,
        padded on the right: segment -1, id 0. Otherwise it goes on in the next one; where too few begin early
        enough, rows begin at evenly spread places.
        """
        part, taken = self.val, length - bos
        begin_N = part.documents + (self.bos is not None)  # of their text
        ends_N = np.append(part.documents[1:], len(part)) if self.masked else len(part)
        room_N = ends_N - begin_N
        enough = np.flatnonzero(room_N >= taken)
        if len(enough) >= sequences:
            chosen = enough[spread(sequences, len(enough))]
        elif self.masked:
            chosen = np.resize(np.sort(np.argsort(-room_N, kind="stable")[:sequences]), sequences)
        else:
            begin_N = np.linspace(0, len(part) - taken - 1, sequences).astype(np.int64)
            begin_N += self._begins(part, begin_N)
            chosen = np.arange(sequences)
        rows = torch.from_numpy(part.rows(begin_N[chosen] - bos, length))
        if bos and self.bos is not None:
            rows[:, 0] = self.bos
        if not self.masked:
            return rows, None
        padding = torch.from_numpy(np.arange(length) >= room_N[chosen, None] + bos)
        return rows.masked_fill(padding, 0), -padding.long()

    def _batch(self, part: Part, begin_N: np.ndarray, end_N: np.ndarray) -> Batch:
        """Windows whose targets are the tokens `begin` ... `end - 1` of the stream, less a BOS in front."""
        read_N = begin_N - 1 + self._begins(part, begin_N)
        rows = part.rows(read_N, self.T + 1)
        if self.bos is not None:
            rows[:, 0] = self.bos
        targets_BT, segment_BT = rows[:, 1:].copy(), None
        place = read_N[:, None] + np.arange(self.T + 1)
        beyond_BT = place[:, 1:] >= end_N[:, None]
        targets_BT[beyond_BT] = IGNORED
        if self.masked:
            document = np.searchsorted(part.documents, place, "right")
            if self.bos is None:
                targets_BT[document[:, 1:] != document[:, :-1]] = IGNORED  # nothing of its document before it
            segment_BT = torch.from_numpy(np.where(beyond_BT, -1, document[:, :-1] - document[:, :1]))
        return Batch(torch.from_numpy(rows[:, :-1]), torch.from_numpy(targets_BT), segment_BT)

    def _begins(self, part: Part, place_N: np.ndarray) -> np.ndarray:
        """Where the stream has a BOS."""
        return part.rows(place_N, 1)[:, 0] == (-1 if self.bos is None else self.bos)

    def _firsts(self, part: Part, windows: np.ndarray) -> np.ndarray:
        """How many documents begin among the targets of each of the `windows`, 2 x N."""
        return np.diff(np.searchsorted(part.documents, windows), axis=0)[0]

    def _with_targets(self, part: Part, windows: np.ndarray) -> np.ndarray:
        """The `windows` (2 x N: begin, end) but for those whose targets all are first tokens of documents."""
        begin_N, end_N = windows
        unpredictable = self._firsts(part, windows) if self.masked or self.bos is not None else 0
        kept = windows[:, end_N - begin_N > unpredictable]
        if not kept.size:
            raise UserError("each document is one token: with data.mask_documents nothing is to be predicted")
        return kept


def packed(part: Part, context_length: int) -> np.ndarray:
    """Windows of whole documents, as many as fit side by side; longer ones in pieces. 2 x N: begin, end."""
    n, border = len(part.documents), np.append(part.documents, len(part))
    fit = np.searchsorted(border, part.documents + context_length, "right") - 1
    # Which document begins the next window, for a window that begins with document i; n: none.
    jump = np.append(np.maximum(fit, np.arange(1, n + 1)), n)
    chain = np.zeros(1, np.int64)
    while chain[-1] < n:  # doubling: `jump` goes as many windows ahead as the chain is long
        chain, jump = np.append(chain, jump[chain]), jump[jump]
    chain = np.append(chain[chain < n], n)
    length = np.diff(border[chain])
    pieces = -(-length // context_length)
    piece = np.arange(pieces.sum()) - np.repeat(pieces.cumsum() - pieces, pieces)
    begin = np.repeat(border[chain[:-1]], pieces) + context_length * piece
    end = np.minimum(begin + context_length, np.repeat(border[chain[1:]], pieces))
    return np.stack([begin + 1, np.minimum(end + 1, len(part))])


def spread(chosen: int, of: int) -> np.ndarray:
    """So many of 0 ... of - 1, evenly spread and in order."""
    return np.arange(chosen) * of // chosen
