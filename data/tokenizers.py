"""Characters or bytes to ids and back. BOS, where there is one, is the last id and stands for no text."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from configs import UserError
from configs.schema import Data as DataConfig

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"  # where no text gives another


class CharTokenizer:
    """One id for each of `characters`, in their order; encoding anything else is a `UserError`."""

    def __init__(self, characters: str, bos: bool):
        self.characters = characters
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
        return {"kind": "char", "bos": self.bos is not None, "characters": self.characters}


class ByteTokenizer:
    """The 256 bytes of UTF-8: encodes any text."""

    def __init__(self, bos: bool):
        self.bos = 256 if bos else None
        self.vocab_size = 256 + bos

    def encode(self, text: str) -> np.ndarray:
        """Ids, int64."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Any) -> str:
        """Text, without BOS; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Any) -> bytes:
        """The bytes themselves, which may end within a character."""
        return bytes(int(i) for i in ids if i != self.bos)

    def to_json(self) -> dict[str, Any]:
        """What `load_tokenizer` needs."""
        return {"kind": "byte", "bos": self.bos is not None}


Tokenizer = CharTokenizer | ByteTokenizer


def make_tokenizer(kind: str, bos: bool, characters: str = "") -> Tokenizer:
    """`char` over `characters`, in their order, or `byte`."""
    return CharTokenizer(characters, bos) if kind == "char" else ByteTokenizer(bos)


def vocab_size_of(config: DataConfig) -> int | None:
    """Ids in all where the configuration says it; None for `char`, where the text does."""
    sizes = {"byte": 256 + config.bos, "bpe": config.vocab_size, "gpt2": 50257}
    return sizes.get(config.tokenizer)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer that a run saved as `tokenizer.json`; `UserError` for a file that no run wrote."""
    try:
        return make_tokenizer(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"cannot read the tokenizer of {path.parent}: {error}") from None
