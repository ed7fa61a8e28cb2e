"""A folder of tokens as it is read, memory-mapped; docs/data.md says what it holds.

Sizes are checked when a part is opened, and ids whenever they are read: a folder of which something is
missing is named, never trained on. Changed tokens go unnoticed: meta.json has the checksums, but to compare
them at each start would take longer than the start.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from configs import UserError
from configs.files import read_json, refuse_large
from configs.schema import Data
from data.bpe import MOST_TOKENS

PARTS = ("train", "val")


class PartMeta(BaseModel):
    """What meta.json says of a part."""

    tokens: int = Field(ge=0, le=2**48)
    documents: int = Field(ge=0, le=2**48)
    bytes: int = Field(ge=0, le=2**48)
    sha256: list[str]


class Meta(BaseModel):
    """What meta.json says, as far as it is read."""

    dtype: Literal["uint8", "uint16", "uint32"]
    vocab_size: int = Field(ge=1, le=MOST_TOKENS)
    bos: int | None
    fingerprint: str
    train: PartMeta
    val: PartMeta
    skipped: dict[str, int]


def read_meta(folder: Path) -> Meta:
    """meta.json. Raises `UserError` for a damaged one."""
    path = folder / "meta.json"
    try:
        meta = Meta.model_validate(read_json(path), strict=True)
        if not 0 <= (meta.bos or 0) < meta.vocab_size:
            raise ValueError(f"bos {meta.bos} in a vocabulary of {meta.vocab_size}")
    except (OSError, ValueError) as error:
        raise damaged(path, " ".join(str(error).split())[:200]) from None
    return meta


class Part:
    """`train` or `val` of a prepared folder: one stream of token ids, whatever its shards.

    `documents` are the places in the stream where documents begin, int64, ascending. Raises `UserError` for
    files that are not as `meta` says.
    """

    def __init__(self, folder: Path, name: str, meta: Meta):
        about, self._vocab_size = getattr(meta, name), meta.vocab_size
        self._paths = [folder / f"{name}-{i:05}.bin" for i in range(len(about.sha256))]
        self._shards = [mapped(path, meta.dtype) for path in self._paths]
        self._length, self._size = about.tokens, max(map(len, self._shards), default=0)
        self.documents = mapped(folder / f"{name}-documents.bin", "int64", about.documents)
        rises = (np.diff(self.documents, prepend=-1, append=self._length) > 0).all()
        if not rises or self.documents[:1].any():
            raise damaged(folder / f"{name}-documents.bin", "places that do not rise from 0 to the end")
        left = self._length
        for path, shard in zip(self._paths, self._shards, strict=True):
            expected = left if path == self._paths[-1] else self._size
            if len(shard) != expected:
                raise damaged(path, f"{len(shard):,} tokens instead of {expected:,}")
            left -= len(shard)

    def __len__(self) -> int:
        return self._length

    def rows(self, starts_N: np.ndarray, span: int) -> np.ndarray:
        """`span` tokens from each start on, N x span, int64; beyond the end the last token stands again."""
        rows = np.zeros((len(starts_N), span), np.int64)
        for i, shard in enumerate(self._shards):
            begin_N = starts_N - i * self._size
            touching = np.flatnonzero((begin_N < self._size) & (begin_N > -span))
            if touching.size:
                place = begin_N[touching, None] + np.arange(span)
                read = shard.take(place, mode="clip")
                if read.max() >= self._vocab_size:
                    raise damaged(self._paths[i], f"id {read.max()} in a vocabulary of {self._vocab_size}")
                # What lies before this shard is there already; what lies behind it, the next one overwrites.
                rows[touching] = np.where(place < 0, rows[touching], read)
        return rows


def refuse_short(parts: dict[str, dict[str, Any]], config: Data, context_length: int) -> None:
    """Raises `UserError` where a part is too short for a window."""
    place = config.source if config.source == "shakespeare" else config.path or config.name
    for name in PARTS:
        if (have := parts[name]["tokens"]) <= context_length:
            whole = f"the {name} part of {place} has {have:,}" + of_documents(parts[name]["documents"])
            ways = "shorten the context, give more text or change data.val_fraction"
            documents = sum(parts[each]["documents"] for each in PARTS)
            if "hf" in config.sources and documents < 100:
                whole += f", of {documents} in all"
                ways += "; data.new_document makes documents of lines, source text splits a single one"
            needs = f"model.context_length {context_length} needs at least {context_length + 1} tokens"
            raise UserError(f"{needs}; {whole}: {ways}")


def of_documents(count: int) -> str:
    """How many there are, in words; nothing for a whole text."""
    return "" if count == 1 else f" in {count:,} documents"


def mapped(path: Path, dtype: str, length: int | None = None) -> np.ndarray:
    """The numbers of a file, of which there must be `length`, where it is given."""
    try:
        refuse_large(path, None)
        numbers = np.asarray(np.memmap(path, dtype, "r"))
    except OSError as error:
        raise damaged(path, str(error.strerror)) from None
    except ValueError:
        raise damaged(path, f"{path.stat().st_size} bytes") from None
    if length not in (None, len(numbers)):
        raise damaged(path, f"{len(numbers):,} numbers instead of {length:,}")
    return numbers


def damaged(path: Path, fault: str) -> UserError:
    """What is wrong with a file of a prepared folder, and what to do."""
    return UserError(f"{path} is damaged ({fault}): remove {path.parent} and prepare again")
