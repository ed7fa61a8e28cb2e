"""Which characters of a text each token stands for: what is said about words becomes one about tokens."""

import itertools

import numpy as np

from data.published import PublishedTokenizer
from data.tokenizers import Tokenizer


def encode_with_spans(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """The ids of `tokenizer.encode`, and for each the places (begin, end) of its characters in `text`.

    White space that a token begins with is left out, unless it is all there is. A token that holds part of a
    character spans that character; one that has none in the text spans nothing. Raises `UserError` as
    `encode` does.
    """
    if isinstance(tokenizer, PublishedTokenizer):
        ids, spans = tokenizer.spans(text)
    else:
        ids, spans = _by_bytes(tokenizer, text)
    return ids, [_from_first_letter(text, begin, end) for begin, end in spans]


def _by_bytes(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, list[tuple[int, int]]]:
    ids = tokenizer.encode(text)
    sizes = [len(tokenizer.decode_bytes([i])) for i in ids]
    bytes_ = np.frombuffer(tokenizer.decode_bytes(ids), np.uint8)
    character = np.cumsum((bytes_ & 0xC0) != 0x80) - 1  # in UTF-8, all bytes but the first are 10xxxxxx
    ends = itertools.accumulate(sizes)
    return ids, [
        (int(character[end - size]), int(character[end - 1]) + 1)
        for size, end in zip(sizes, ends, strict=True)
    ]


def _from_first_letter(text: str, begin: int, end: int) -> tuple[int, int]:
    spaces = end - begin - len(text[begin:end].lstrip())
    return (begin, end) if begin + spaces == end else (begin + spaces, end)
