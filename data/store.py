"""A folder of tokens: how it is written, so that a kill costs little, and read, memory-mapped.

docs/data.md says what it holds. Sizes are checked when a part is opened, and ids whenever they are read: a
damaged folder is named, never trained on.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs import UserError
from configs.schema import Data
from data.tokenizers import Tokenizer

VERSION = 1
PARTS = ("train", "val")
SHARD = 2**26  # tokens of a file
SAVE_EVERY = 2**24  # bytes of text


class Added(NamedTuple):
    """What comes to a part at a time: token ids, where in them documents begin, bytes of their text."""

    ids: np.ndarray
    documents: np.ndarray
    bytes: int


class Part:
    """`train` or `val` of a prepared folder: one stream of token ids, whatever its shards.

    `documents` are the places in the stream where documents begin, int64, ascending. Raises `UserError` for
    files that are not as `meta` says.
    """

    def __init__(self, folder: Path, name: str, meta: dict[str, Any]):
        about, self._vocab_size = meta[name], meta["vocab_size"]
        self._paths = [folder / f"{name}-{i:05}.bin" for i in range(len(about["sha256"]))]
        self._shards = [mapped(path, meta["dtype"]) for path in self._paths]
        self._length, self._size = about["tokens"], max(map(len, self._shards))
        self.documents = mapped(folder / f"{name}-documents.bin", "int64", about["documents"])
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


def opened(folder: Path) -> tuple[dict[str, Any], Part, Part]:
    """What meta.json says, and both parts. Raises `UserError` for a damaged folder."""
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        return meta, Part(folder, "train", meta), Part(folder, "val", meta)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from None


def refuse_short(parts: dict[str, Any], config: Data, context_length: int) -> None:
    """Raises `UserError` where a part is too short for a window."""
    place = config.source if config.source == "shakespeare" else config.path or config.name
    for name in PARTS:
        if (have := parts[name]["tokens"]) <= context_length:
            whole = f"the {name} part of {place} has {have:,}" + of_documents(parts[name]["documents"])
            ways = "shorten the context, give more text or change data.val_fraction"
            if "hf" in config.sources and sum(parts[each]["documents"] for each in PARTS) == 1:
                ways = "source text splits a single document, data.new_document makes several of lines"
            needs = f"model.context_length {context_length} needs at least {context_length + 1} tokens"
            raise UserError(f"{needs}; {whole}: {ways}")


def of_documents(count: int) -> str:
    """How many there are, in words; nothing for a whole text."""
    return "" if count == 1 else f" in {count:,} documents"


def mapped(path: Path, dtype: str, length: int | None = None) -> np.ndarray:
    """The numbers of a file, of which there must be `length`, where it is given."""
    try:
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


class Writer:
    """The files of a folder that is not complete. What was added since it was last saved, a kill undoes."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        self.folder, self.tokenizer = folder, tokenizer
        self.dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        parts = {name: {"tokens": 0, "documents": 0, "bytes": 0} for name in PARTS}
        saved: dict[str, Any] = {"files": {}, "parts": parts, "reader": None}
        if (folder / "progress.json").exists():
            saved = json.loads((folder / "progress.json").read_text())
        self.parts: dict[str, dict[str, Any]] = saved["parts"]
        self.reader: Any = saved["reader"]
        self._unsaved, self._touched = 0, set[Path]()
        for path in folder.iterdir():
            if path.name in saved["files"]:
                os.truncate(path, saved["files"][path.name])
            elif path.name not in ("tokenizer.json", "progress.json"):
                path.unlink()

    def add(self, added: dict[str, Added], reader: Any) -> None:
        """Append to the parts; `reader` is the state from which reading goes on behind that."""
        for name, (ids, documents, size) in added.items():
            part = self.parts[name]
            self._append(f"{name}-documents.bin", documents + part["tokens"])
            while len(ids):
                shard, filled = divmod(part["tokens"], SHARD)
                self._append(f"{name}-{shard:05}.bin", ids[: SHARD - filled])
                part["tokens"] += len(ids[: SHARD - filled])
                ids = ids[SHARD - filled :]
            part["documents"] += len(documents)
            part["bytes"] += size
            self._unsaved += size
        self.reader = reader
        if self._unsaved >= SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """What was added so far stays."""
        for path in self._touched:
            _sync(path)
        files = {path.name: path.stat().st_size for path in self.folder.glob("*.bin")}
        progress = {"files": files, "parts": self.parts, "reader": self.reader}
        replace_json(self.folder / "progress.json", progress)
        self._unsaved, self._touched = 0, set()

    def finish(self, meta: dict[str, Any]) -> None:
        """Checksums, the ids that occur, and at last `meta.json`, which says that all is there."""
        self.save()
        tokenizer, checksums = self.tokenizer, []
        for name, part in self.parts.items():
            occur = np.zeros(tokenizer.vocab_size, bool)
            part["sha256"] = []
            for path in sorted(self.folder.glob(f"{name}-[0-9]*.bin")):
                checksum = hashlib.sha256()
                with open(path, "rb") as file:
                    while block := file.read(2**22):
                        checksum.update(block)
                        occur[np.frombuffer(block, self.dtype)] = True
                part["sha256"].append(checksum.hexdigest())
            if tokenizer.bos is not None:
                occur[tokenizer.bos] = False
            self._append(f"{name}-symbols.bin", np.flatnonzero(occur))
            checksums += [*part["sha256"], sha256((self.folder / f"{name}-documents.bin").read_bytes())]
        for path in self._touched:
            _sync(path)
        about = {"version": VERSION, "dtype": self.dtype.name, "vocab_size": tokenizer.vocab_size}
        content = json.dumps([tokenizer.to_json(), checksums]).encode()
        meta = {**about, "bos": tokenizer.bos, "fingerprint": sha256(content)[:16], **meta, **self.parts}
        replace_json(self.folder / "meta.json", meta)

    def _append(self, name: str, numbers: np.ndarray) -> None:
        with open(self.folder / name, "ab") as file:
            file.write(numbers.tobytes())
        self._touched.add(self.folder / name)


def replace_json(path: Path, content: Any) -> None:
    """Write JSON so that the file holds the old or the new, whatever happens."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    _sync(temporary)
    temporary.replace(path)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sha256(content: Any) -> str:
    """In hexadecimal."""
    return hashlib.sha256(content).hexdigest()
