"""Sources that are drawn rather than read: each shows one behaviour of attention heads in its purest form."""

from collections.abc import Iterator

import torch
from torch import Tensor

from configs import UserError
from configs.seeds import seed_for
from data.sources import Batch

VALIDATION = 256  # sequences
MOST_SYMBOLS = 4096  # of a Markov chain: its table has the square of that


class Synthetic:
    """Base: `_draw` makes rows of T tokens after BOS, or T + 1 without, from a generator of their own."""

    bytes_per_token, name, description = 1.0, "", ""

    def __init__(self, symbols: Tensor, bos: int | None, context_length: int, seed: int):
        self.symbols, self.bos, self.T, self.seed = symbols, bos, context_length, seed
        self.fingerprint = f"{self.name}-{len(symbols)}-{seed}"

    def windows(self, first: int, count: int) -> Batch:
        """`count` windows, drawn together: another cut of the sequence gives other ones."""
        return _shifted(self._rows(count, self.name, first))

    def validation(self, batch_size: int, tokens: int = 0) -> Iterator[Batch]:
        """A fixed set of sequences from a stream of its own, or the first of them, about `tokens`."""
        count = max(1, round(tokens / self.T)) if tokens else VALIDATION
        yield from map(_shifted, self._rows(VALIDATION, "validation")[:count].split(batch_size))

    def probe_text(self, sequences: int, length: int, bos: bool) -> tuple[Tensor, None]:
        """Validation sequences, for there is no natural text here; BOS in front if asked."""
        rows = self._rows(max(VALIDATION, sequences), "validation")[:sequences]
        return rows[:, int(self.bos is not None and not bos) :][:, :length], None

    def _rows(self, count: int, purpose: str, *index: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed_for(self.seed, purpose, *index))
        return _with_bos(self.symbols[self._draw(count, self.T + (self.bos is None), generator)], self.bos)

    def _draw(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Indices into `symbols`, count x length."""
        raise NotImplementedError


class Repeats(Synthetic):
    """Random blocks that repeat to the end of the window, with a period drawn per sequence.

    The first block cannot be predicted; each later one can, by looking back for the same token and copying
    what came next. The varying period keeps a head that only knows a distance from doing it.
    """

    name, shortest = "repeats", 8

    def __init__(self, symbols: Tensor, bos: int | None, context_length: int, seed: int):
        super().__init__(symbols, bos, context_length, seed)
        self.description = f"blocks of {self.shortest} to {self.T // 2} of {len(symbols)} symbols, repeated"

    def _draw(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        longest = self.T // 2
        block_BP = torch.randint(len(self.symbols), (count, longest), generator=generator)
        period_B1 = torch.randint(self.shortest, longest + 1, (count, 1), generator=generator)
        return block_BP.gather(1, torch.arange(length) % period_B1)


class Backcopy(Synthetic):
    """Bigram-Backcopy (Guo et al. 2024, 2410.13835): a Markov chain, in which triggers copy what they follow.

    After a trigger comes the token before it; after any other token, one of a fixed chain. A head that copies
    has work to do at triggers alone: everywhere else it rests, and an attention sink is where it rests.
    """

    name, triggers = "backcopy", 3

    def __init__(self, symbols: Tensor, bos: int | None, context_length: int, seed: int):
        super().__init__(symbols, bos, context_length, seed)
        if len(symbols) <= self.triggers:
            needed = f"source backcopy needs {self.triggers + 1} distinct tokens, {self.triggers} as triggers"
            raise UserError(f"{needed}; the text has {len(symbols)}: give more text")
        if len(symbols) > MOST_SYMBOLS:
            most = f"source backcopy draws from up to {MOST_SYMBOLS} distinct tokens"
            raise UserError(f"{most}; here are {len(symbols)}: use data.tokenizer char or byte")
        generator = torch.Generator().manual_seed(seed_for(seed, "chain"))
        logits_VV = 2.0 * torch.randn(len(symbols), len(symbols), generator=generator, dtype=torch.float64)
        logits_VV[:, : self.triggers] += 1.5
        self.chain_VV = logits_VV.softmax(-1)
        self._cumulative_VV = self.chain_VV.cumsum(-1)
        self.description = f"a Markov chain of {len(symbols)} symbols, {self.triggers} of them triggers"

    def _draw(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        chance_TB1 = torch.rand(length, count, 1, generator=generator, dtype=torch.float64)
        last = len(self.symbols) - 1
        symbol_TB = torch.randint(self.triggers, last + 1, (1, count), generator=generator).repeat(length, 1)
        for t in range(1, length):
            before_B = symbol_TB[t - 1]
            drawn_B = torch.searchsorted(self._cumulative_VV[before_B], chance_TB1[t]).squeeze(1)
            symbol_TB[t] = torch.where(before_B < self.triggers, symbol_TB[t - 2], drawn_B.clamp(max=last))
        return symbol_TB.T.contiguous()


def _with_bos(rows: Tensor, bos: int | None) -> Tensor:
    """Token ids with BOS in front of each row, where there is one."""
    return rows if bos is None else torch.cat([rows.new_full((len(rows), 1), bos), rows], dim=1)


def _shifted(rows: Tensor) -> Batch:
    """Rows of T + 1 token ids as inputs and targets."""
    return Batch(rows[:, :-1], rows[:, 1:].clone())
