"""Text to ids and back. BOS, where there is one, stands for no text; `symbols` are the ids that do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs import UserError
from configs.files import LARGE, read_json
from configs.schema import Data as DataConfig
from configs.screen import foreign
from data.bpe import NAMED, BytePairTokenizer, from_json, named, train_bpe
from data.corpora import split
from data.published import PublishedTokenizer
from data.published import from_json as published

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"  # where no text gives another


class CharTokenizer:
    """One id for each of `characters`, in their order; encoding anything else is a `UserError`."""

    kind = "char"

    def __init__(self, characters: str, bos: bool):
        self.characters, self.symbols = characters, np.arange(len(characters))
        self.bos = len(characters) if bos else None
        self.vocab_size = len(characters) + bos
        self._ids = {character: i for i, character in enumerate(characters)}

    def encode(self, text: str) -> np.ndarray:
        """Ids, int64."""
        if unknown := sorted(set(text) - set(self.characters)):
            listed = " ".join(map(repr, unknown[:20]))
            known = self.characters if self.vocab_size < 200 else self.characters[:200] + " ..."
            raise UserError(f"characters that the tokenizer does not know: {listed}; it knows {known!r}")
        return np.fromiter(map(self._ids.__getitem__, text), np.int64, len(text))

    def decode(self, ids: Any) -> str:
        """Text, without BOS."""
        return "".join(self.characters[i] for i in ids if i != self.bos)

    def decode_bytes(self, ids: Any) -> bytes:
        """The text in UTF-8."""
        return self.decode(ids).encode()

    def to_json(self) -> dict[str, Any]:
        """What `load_tokenizer` needs."""
        return {"kind": self.kind, "bos": self.bos is not None, "characters": self.characters}


class ByteTokenizer:
    """The 256 bytes of UTF-8: encodes any text."""

    kind, symbols = "byte", np.arange(256)

    def __init__(self, bos: bool):
        self.bos = 256 if bos else None
        self.vocab_size = 256 + bos

    def encode(self, text: str) -> np.ndarray:
        """Ids, int64. Raises `UserError` for half a surrogate pair."""
        try:
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
        except UnicodeEncodeError as error:
            raise UserError(f"half a surrogate pair at character {error.start}, which is no text") from None

    def decode(self, ids: Any) -> str:
        """Text, without BOS; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Any) -> bytes:
        """The bytes themselves, which may end within a character."""
        return bytes(int(i) for i in ids if i != self.bos)

    def to_json(self) -> dict[str, Any]:
        """What `load_tokenizer` needs."""
        return {"kind": self.kind, "bos": self.bos is not None}


Tokenizer = CharTokenizer | ByteTokenizer | BytePairTokenizer | PublishedTokenizer


def make_tokenizer(config: DataConfig, texts: Sequence[str]) -> Tokenizer:
    """What `data.tokenizer` asks for: `char` over the characters of the texts, `bpe` of their training parts.

    Raises `UserError` for `bpe` without enough text, a named encoding whose files are not at hand, and `hf`,
    which is not made but given.
    """
    if config.tokenizer == "hf":
        raise UserError("data.tokenizer hf comes with model.init_from: name a published model there")
    if config.tokenizer == "char":
        return CharTokenizer("".join(sorted({*"".join(texts)})) or ALPHABET, config.bos)
    if config.tokenizer == "byte":
        return ByteTokenizer(config.bos)
    if config.tokenizer != "bpe":
        return named(config.tokenizer, config.bos)
    if not texts:
        sources = ", ".join(config.sources)
        raise UserError(f"data.tokenizer bpe is trained on text, and {sources} has none: use byte or char")
    training = (split(text, config.val_fraction)[0] for text in texts)
    return train_bpe(training, config.vocab_size or 0, config.bos)


def vocab_size_of(config: DataConfig) -> int | None:
    """How many tokens there will be, without text or network; None for `char` and `hf`.

    There the text decides, or the published model.
    """
    if config.tokenizer == "byte":
        return 256 + config.bos
    return config.vocab_size if config.tokenizer == "bpe" else NAMED.get(config.tokenizer)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer that a run saved as `tokenizer.json`.

    Raises `UserError` for a file that no run wrote, and for a named encoding whose files are not at hand.
    """
    try:
        return _from_json(read_json(path, LARGE))
    except (OSError, ValueError, TypeError, LookupError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise UserError(f"cannot read the tokenizer of {path.parent}: {foreign(str(reason), 200)}") from None


def _from_json(saved: dict[str, Any]) -> Tokenizer:
    kind, bos = saved["kind"], saved["bos"]
    if not isinstance(bos, bool):
        raise ValueError("its bos is neither true nor false")
    if kind == "byte":
        return ByteTokenizer(bos)
    if kind == "bpe":
        return from_json(saved)
    if kind == "hf":
        return published(saved)
    if kind in NAMED:
        return named(kind, bos)
    characters = saved["characters"]
    if kind != "char" or not isinstance(characters, str):
        raise ValueError(f"its kind is none of char, byte, bpe, hf, {', '.join(NAMED)}")
    if not 0 < len({*characters.encode().decode()}) == len(characters):  # encode: no lone surrogates
        raise ValueError("it has a character twice, or none")
    return CharTokenizer(characters, bos)
