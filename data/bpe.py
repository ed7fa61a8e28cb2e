"""Byte-pair encodings: trained on the corpus at hand (by `rustbpe`), or one of tiktoken's by name."""

import base64
import itertools
import os
import queue
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import rustbpe
import tiktoken

from configs import UserError
from configs.screen import foreign

# How text is cut before merging: no token crosses these pieces. GPT-4's, as rustbpe has it by default.
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
NAMED = {"gpt2": 50257, "r50k_base": 50257, "p50k_base": 50281, "cl100k_base": 100277, "o200k_base": 200019}
MOST_TOKENS = 2**20
PATIENCE = 15.0  # seconds that the network has: tiktoken itself would wait for minutes
BOS = "<|endoftext|>"


class BytePairTokenizer:
    """Serves an encoding of `tiktoken`; BOS is its `<|endoftext|>`, which need not be the last id.

    `symbols` are the ids that stand for text, ascending. The others are BOS, further marks and unused ids.
    """

    def __init__(self, encoding: tiktoken.Encoding, bos: bool):
        self.kind, self.encoding = encoding.name, encoding
        self.bos = encoding.eot_token if bos else None
        self.vocab_size = encoding.n_vocab
        self._bytes = {rank: token for token, rank in encoding._mergeable_ranks.items()}
        self.symbols = np.array(sorted(self._bytes))

    def encode(self, text: str) -> np.ndarray:
        """Ids, uint32. Marks in the text are text; half a surrogate pair, which is no text, becomes U+FFFD.

        Other threads go on meanwhile.
        """
        try:
            ids = [self.encoding.encode_to_numpy(part, disallowed_special=()) for part in _digestible(text)]
            return ids[0] if len(ids) == 1 else np.concatenate(ids)
        except UnicodeEncodeError:
            return self.encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))

    def decode(self, ids: Any) -> str:
        """Text, without BOS; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Any) -> bytes:
        """The bytes of the tokens, which may end within a character; ids that are no text have none."""
        return b"".join(self._bytes.get(int(i), b"") for i in ids)

    def to_json(self) -> dict[str, Any]:
        """What `load_tokenizer` needs: the name, or of a trained encoding all tokens by rank."""
        saved: dict[str, Any] = {"kind": self.kind, "bos": self.bos is not None}
        if self.kind == "bpe":
            ranks = [base64.b64encode(self._bytes[rank]).decode() for rank in self.symbols.tolist()]
            saved |= {"pattern": PATTERN, "ranks": ranks}
        return saved


def train_bpe(texts: Iterable[str], vocab_size: int, bos: bool) -> BytePairTokenizer:
    """An encoding of `vocab_size` tokens, BOS included: the same for the same texts in the same order.

    Raises `UserError` where the texts run out of pairs to merge before.
    """
    trainer = rustbpe.Tokenizer()
    parts = (part for text in texts for part in _digestible(text))
    trainer.train_from_iterator(parts, vocab_size - bos, pattern=PATTERN)
    tokens = [token for token, _ in trainer.get_mergeable_ranks()]
    if len(tokens) + bos < vocab_size:
        most = f"gives {len(tokens) + bos} at most: lower it, give more text, or use data.tokenizer byte"
        raise UserError(f"data.vocab_size {vocab_size}: the training text {most}")
    return _of_ranks(tokens, bos)


def from_json(saved: dict[str, Any]) -> BytePairTokenizer:
    """A trained encoding from a file that nobody vouches for: raises ValueError, TypeError or LookupError."""
    if saved["pattern"] != PATTERN:
        raise ValueError("its pattern is not the one that this version cuts text by")
    if not isinstance(saved["ranks"], list) or len(saved["ranks"]) > MOST_TOKENS:
        raise ValueError(f"its ranks are not a list of up to {MOST_TOKENS} tokens")
    tokens = [base64.b64decode(token, validate=True) for token in saved["ranks"]]
    # Without a single byte the Rust code behind tiktoken would panic on a text that holds it.
    if tokens[:256] != [bytes([byte]) for byte in range(256)]:
        raise ValueError("its ranks do not begin with the 256 bytes")
    if len({*tokens, b""}) < len(tokens) + 1:
        raise ValueError("its ranks hold a token twice, or an empty one")
    return _of_ranks(tokens, saved["bos"])


def named(name: str, bos: bool) -> BytePairTokenizer:
    """One of `NAMED`, from tiktoken's cache or the network.

    Raises `UserError` where neither has the files, after `PATIENCE` seconds at the latest.
    """
    answer: queue.Queue[tiktoken.Encoding | Exception] = queue.Queue()

    def ask() -> None:
        try:
            answer.put(tiktoken.get_encoding(name))
        except Exception as error:  # whatever it is, it is told below
            answer.put(error)

    threading.Thread(target=ask, name=f"tiktoken {name}", daemon=True).start()
    try:
        found = answer.get(timeout=PATIENCE)
    except queue.Empty:
        found = TimeoutError(f"no answer in {PATIENCE:g} s")
    if isinstance(found, tiktoken.Encoding):
        return BytePairTokenizer(found, bos)
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or "the cache of tiktoken"
    reason = foreign(f"{type(found).__name__}: {found}", 120)
    raise UserError(
        f"tokenizer {name}: no intact copy of {' and '.join(urls(name))} in {cache} or from the network "
        f"({reason}); on a machine with network run TIKTOKEN_CACHE_DIR=DIR python -c 'import tiktoken; "
        f'tiktoken.get_encoding("{name}")\', copy DIR here and set TIKTOKEN_CACHE_DIR to it'
    )


def urls(name: str) -> list[str]:
    """The files of a named encoding. In a cache folder each is named by the SHA-1 of its address."""
    host = "https://openaipublic.blob.core.windows.net"
    if name == "gpt2":
        return [f"{host}/gpt-2/encodings/main/{file}" for file in ("vocab.bpe", "encoder.json")]
    return [f"{host}/encodings/{name}.tiktoken"]


def _digestible(text: str) -> list[str]:
    """The text, cut behind each 2^18 characters of white space: on more in a row the patterns fail."""
    if len(text) <= 2**18:
        return [text]
    cuts = [0, *(run.end() for run in re.finditer(r"\s{262144}", text)), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(cuts)]


def _of_ranks(tokens: Sequence[bytes], bos: bool) -> BytePairTokenizer:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    marks = {BOS: len(ranks)} if bos else {}
    encoding = tiktoken.Encoding("bpe", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=marks)
    return BytePairTokenizer(encoding, bos)
