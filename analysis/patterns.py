"""The attention of all heads on one text, as it is: an explicit L x H x T x T array, for looking at."""

from collections.abc import Sequence

import torch
from torch import Tensor

from analysis.capture import observe
from configs import UserError
from data.tokenizers import Tokenizer
from model.attention import Observation
from model.backends import naive
from model.transformer import GPT

LONGEST_BLOCK, LONGEST_TEXT = 30, 128  # tokens: more cannot be read off a page
SYMBOLS = {" ": "␣", "\n": "⏎", "\t": "⇥"}


def attention(model: GPT, tokens: Sequence[int]) -> Tensor:
    """`A_LHTT`: weight of each query (row) on each key. With a sink logit rows sum to less than 1."""
    layers: list[Tensor] = []

    def collect(seen: Observation) -> None:
        s_BHTS = naive.scores(seen.q_BHTD, seen.k_BGSD, seen.scale, seen.window, seen.segment)
        layers.append(naive.softmax(s_BHTS, seen.sink_H)[0][0].cpu())

    with model.reading(), observe(model, collect):
        model(torch.tensor([tokens], device=model.device))
    return torch.stack(layers)


def phrase(text: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """The beginning of a text: whole words, as far as spaces show where they begin and end."""
    shown = [tokenizer.decode([token]) for token in text]
    # A word begins behind a space, or with one that is part of its first token.
    begins = [text[:1].isspace() and not text.isspace() for text in [*shown[1:], ""]]
    ends = [i for i, part in enumerate(shown, 1) if part.isspace() or begins[i - 1]]
    first = next((end for end in ends if end <= LONGEST_BLOCK // 2), 0)
    last = max((end for end in ends if LONGEST_BLOCK // 2 < end - first <= LONGEST_BLOCK), default=None)
    return list(text[first:last]) or list(text)


def shuffled(symbols: Sequence[int]) -> list[int]:
    """The distinct ones of `symbols` in an order that means nothing, the same each time."""
    distinct = sorted({*symbols})
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(0))
    return [distinct[i] for i in order]


def twice(block: Sequence[int], tokenizer: Tokenizer, context_length: int) -> list[int]:
    """BOS, where there is one, and a block two times, cut to what fits: what an induction head answers to."""
    bos = _bos(tokenizer)
    block = block[: min(LONGEST_BLOCK, (context_length - len(bos)) // 2)]
    return [*bos, *block, *block]


def encode(text: str, tokenizer: Tokenizer, context_length: int) -> tuple[list[int], int]:
    """`text` behind BOS where there is one, cut to what can be shown; and how many tokens it has whole."""
    if not text:
        raise UserError("the text is empty: there is no attention to show")
    tokens = [*_bos(tokenizer), *tokenizer.encode(text).tolist()]
    return tokens[: min(LONGEST_TEXT, context_length)], len(tokens)


def visible(tokens: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Each token as something to see: `␣` for a space, `\\xe9` for a byte that is no character by itself."""
    shown = []
    for token in tokens:
        text = tokenizer.decode_bytes([token]).decode(errors="backslashreplace")
        text = "".join(SYMBOLS.get(c, c if c.isprintable() else repr(c)[1:-1]) for c in text)
        shown.append("BOS" if token == tokenizer.bos else text)
    return shown


def _bos(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.bos is None else [tokenizer.bos]
