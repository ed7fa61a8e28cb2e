"""A folder of tokens as it is written, so that a kill costs little."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.files import replace_text, sha256_of, to_disk
from data.store import PARTS, damaged
from data.tokenizers import Tokenizer

VERSION = 1
SHARD = 2**26  # tokens of a file
SAVE_EVERY = 2**24  # bytes of text


class Added(NamedTuple):
    """What comes to a part at a time: token ids, where in them documents begin, bytes of their text."""

    ids: np.ndarray
    documents: np.ndarray
    bytes: int


class Writer:
    """The files of a folder that is not complete. What was added since it was last saved, a kill undoes."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        self.folder, self.tokenizer = folder, tokenizer
        self.dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        parts = {name: {"tokens": 0, "documents": 0, "bytes": 0} for name in PARTS}
        saved: dict[str, Any] = {"files": {}, "parts": parts, "reader": None}
        progress = folder / "progress.json"
        try:
            if progress.exists():
                saved = json.loads(progress.read_text())
            self.parts: dict[str, dict[str, Any]] = saved["parts"]
            self.reader: Any = saved["reader"]
            too_short = [n for n, size in saved["files"].items() if (folder / n).stat().st_size < size]
            if too_short:
                raise ValueError(f"{too_short[0]} is shorter than it says")
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise damaged(progress, str(error)) from None
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
            to_disk(path)
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
            checksums += [*part["sha256"], sha256_of(self.folder / f"{name}-documents.bin")]
        for path in self._touched:
            to_disk(path)
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
    replace_text(path, json.dumps(content))


def sha256(content: Any) -> str:
    """Of bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()
