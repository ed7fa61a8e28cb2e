"""Large corpora as tokens on disk: prepared once, on all cores, complete or absent; a kill costs seconds.

docs/data.md says what a folder holds. While it is written it is called `tmp-<key>`; its `progress.json` says
how long each file was behind some document, and where the reader of documents stood there.
"""

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from configs import UserError
from configs.schema import Data
from data.bpe import train_bpe
from data.corpora import files_of
from data.hub import Documents, Piece
from data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer

VERSION = 1  # of the folder
SHARD = 2**26  # tokens
BATCH = 2**20  # characters that a thread gets at a time
SAVE_EVERY = 2**24  # bytes of text
BPE_TEXT = 100_000_000  # bytes of text that the tokenizer `bpe` is trained on
State = dict[str, Any]  # of the reader of documents
Batch = tuple[list[Piece], State]
# What a batch adds to each part: ids, where in them documents begin, bytes of text.
Added = dict[str, tuple[np.ndarray, list[int], int]]
PARTS = ("train", "val")
ASKED = ("name", "subset", "revision", "split", "text_column", "take", "new_document", "val_fraction")


def prepared(config: Data, tokenizer: Tokenizer | None = None) -> Path:
    """The folder with the tokens of `config`, by `tokenizer` if it is given; prepared now unless it is there.

    Raises `UserError` for documents that cannot be read, for a part that would be empty, and for a full disk.
    """
    request = _request(config)
    if tokenizer is not None and tokenizer.kind == "bpe":
        saved = tokenizer.to_json()
        path = _folder(config, request) / "tokenizer.json"
        if not path.exists() or json.loads(path.read_text(encoding="utf-8")) != saved:  # trained elsewhere
            request["tokenizer"] = {"kind": "bpe", "sha256": _sha256(json.dumps(saved).encode())}
    folder = _folder(config, request)
    try:
        with _alone(folder) as temporary:
            if temporary is not None:
                try:
                    _prepare(config, tokenizer, request, temporary)
                except UserError:
                    if not (temporary / "progress.json").exists():  # nothing to go on from
                        shutil.rmtree(temporary)
                    raise
                temporary.rename(folder)
    except OSError as error:
        kept = "what is done so far is kept, the next start goes on from there"
        raise UserError(
            f"cannot write to data.cache_dir {config.cache_dir}: {error.strerror}; {kept}"
        ) from None
    return folder


def _request(config: Data) -> dict[str, Any]:
    """All that decides about the tokens, as far as it is known without reading."""
    request = {"version": VERSION} | {key: getattr(config, key) for key in ASKED}
    name = Path(config.name or "")
    paths = [Path(path) for path in files_of(config.path)] if config.path else []
    if config.name and name.is_dir():
        found = sorted(path.relative_to(name) for path in name.rglob("*") if path.is_file())
        paths = [name / path for path in found if not any(part.startswith(".") for part in path.parts)]
        request["name"] = None
    request["files"] = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    request["tokenizer"] = {key: getattr(config, key) for key in ("tokenizer", "vocab_size", "bos")}
    return request


def _folder(config: Data, request: dict[str, Any]) -> Path:
    return Path(config.cache_dir) / _sha256(json.dumps(request).encode())[:16]


def _sha256(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def _alone(folder: Path) -> Iterator[Path | None]:
    """The temporary folder, for this process alone; None where `folder` is complete."""
    temporary = folder.with_name(f"tmp-{folder.name}")
    while not folder.exists():
        temporary.mkdir(parents=True, exist_ok=True)
        handle = os.open(temporary, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for the process that prepares {folder}", file=sys.stderr)
                fcntl.flock(handle, fcntl.LOCK_EX)  # the kernel lets go of it when a process ends, however
            if folder.exists():  # since we looked
                temporary.rmdir() if temporary.exists() and not any(temporary.iterdir()) else None
            elif temporary.exists() and os.path.samestat(os.fstat(handle), temporary.stat()):
                yield temporary
                return
        finally:
            os.close(handle)
    yield None


def _prepare(config: Data, tokenizer: Tokenizer | None, request: dict[str, Any], folder: Path) -> None:
    """Fill `folder`, or what is left to fill of it."""
    if not (folder / "meta.json").exists():
        tokenizer = _tokenizer(config, tokenizer, folder)
        writer = Writer(folder, np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32))
        skipped = _write_tokens(config, tokenizer, writer)
        counts = {name: part["documents"] for name, part in writer.parts.items()}
        if not all(counts.values()):
            (folder / "progress.json").unlink(missing_ok=True)
            told = ", ".join(f"{count:,} {name} documents" for name, count in counts.items())
            ways = "give more documents or another data.val_fraction"
            if sum(counts.values()) == 1:
                ways = "source text splits a single document, data.new_document makes several of lines"
            raise UserError(
                f"data.val_fraction {config.val_fraction} of {config.path or config.name}: {told}; {ways}"
            )
        writer.finish(tokenizer, {"request": request, "skipped": skipped})
    (folder / "progress.json").unlink(missing_ok=True)


def _tokenizer(config: Data, given: Tokenizer | None, folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if given is None and path.exists():
        return load_tokenizer(path)
    if given is None and config.tokenizer == "bpe":
        print(f"training the tokenizer on the first {BPE_TEXT / 1e6:,.0f} MB of text", file=sys.stderr)
        given = train_bpe(_training_texts(config), config.vocab_size or 0, config.bos)
    tokenizer = given or make_tokenizer(config, [])
    _replace(path, tokenizer.to_json())
    return tokenizer


def _training_texts(config: Data) -> Iterator[str]:
    left = BPE_TEXT
    for piece in Documents(config):
        if piece.draw >= (config.val_fraction or 0):
            yield piece.text
        left -= len(piece.text.encode())
        if left <= 0:
            return


def _write_tokens(config: Data, tokenizer: Tokenizer, writer: "Writer") -> dict[str, int]:
    """Read here, tokenize in threads, write in order; returns how many documents were skipped, and why."""
    documents = Documents(config, writer.reader)
    line = "{n_fmt}B of text, {rate_fmt}{postfix}, {elapsed} gone\n"  # in a log file
    looks: dict[str, Any] = {} if sys.stderr.isatty() else {"bar_format": line, "mininterval": 10}
    done, share = sum(part["bytes"] for part in writer.parts.values()), config.val_fraction or 0
    with tqdm(initial=done, unit="B", unit_scale=True, **looks) as bar:
        work = partial(_tokenize, tokenizer, writer.dtype, share)
        for tokenized, state in _in_order(work, _batches(documents)):
            writer.add(tokenized, state)
            count = sum(part["documents"] for part in writer.parts.values())
            bar.set_postfix_str(f"{count:,} documents", refresh=False)
            bar.update(sum(size for _, _, size in tokenized.values()))
    return dict(documents.skipped)


def _batches(documents: Documents) -> Iterator[Batch]:
    """Pieces of about BATCH characters together, and the state of the reader behind them."""
    batch: list[Piece] = []
    size = 0
    for piece in documents:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch, documents.state
            batch, size = [], 0
    if batch:
        yield batch, documents.state


def _in_order(
    work: Callable[[list[Piece]], Added], batches: Iterator[Batch]
) -> Iterator[tuple[Added, State]]:
    """What threads make of the batches, of which few are held. Tokenizers let other threads go on."""
    threads, pending = os.cpu_count() or 1, deque[tuple[Future[Added], State]]()
    with ThreadPoolExecutor(threads) as pool:
        for batch, state in batches:
            pending.append((pool.submit(work, batch), state))
            if len(pending) > 2 * threads:
                yield pending[0][0].result(), pending.popleft()[1]
        yield from ((future.result(), state) for future, state in pending)


def _tokenize(tokenizer: Tokenizer, dtype: np.dtype, val_fraction: float, batch: list[Piece]) -> Added:
    parts: Added = {}
    bos = np.array([] if tokenizer.bos is None else [tokenizer.bos], dtype)
    for name in PARTS:
        ids, documents, length, size = [bos[:0]], [], 0, 0
        for piece in batch:
            if (piece.draw < val_fraction) == (name == "val"):
                documents += [length] if piece.begins else []
                ids += [bos if piece.begins else bos[:0], tokenizer.encode(piece.text).astype(dtype)]
                length += len(ids[-2]) + len(ids[-1])
                size += len(piece.text.encode())
        parts[name] = np.concatenate(ids), documents, size
    return parts


class Writer:
    """The files of a folder that is not complete. What was added since it was last saved, a kill undoes."""

    def __init__(self, folder: Path, dtype: np.dtype):
        self.folder, self.dtype = folder, dtype
        parts = {name: {"tokens": 0, "documents": 0, "bytes": 0} for name in PARTS}
        saved: dict[str, Any] = {"files": {}, "parts": parts, "reader": None}
        if (folder / "progress.json").exists():
            saved = json.loads((folder / "progress.json").read_text())
        self.parts: dict[str, dict[str, Any]] = saved["parts"]
        self.reader: State | None = saved["reader"]
        self._unsaved, self._touched = 0, set[Path]()
        for path in folder.iterdir():
            if path.name in saved["files"]:
                os.truncate(path, saved["files"][path.name])
            elif path.name not in ("tokenizer.json", "progress.json"):
                path.unlink()

    def add(self, tokenized: Added, reader: State) -> None:
        """Append to both parts; `reader` is where it goes on behind that."""
        for name, (ids, documents, size) in tokenized.items():
            part = self.parts[name]
            self._append(f"{name}-documents.bin", np.array(documents, np.int64) + part["tokens"])
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
        _replace(self.folder / "progress.json", progress)
        self._unsaved, self._touched = 0, set()

    def finish(self, tokenizer: Tokenizer, meta: dict[str, Any]) -> None:
        """Checksums, the ids that occur, and at last `meta.json`, which says that all is there."""
        self.save()
        checksums = []
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
            checksums += [*part["sha256"], _sha256((self.folder / f"{name}-documents.bin").read_bytes())]
        for path in self._touched:
            _sync(path)
        about = {"version": VERSION, "dtype": self.dtype.name, "vocab_size": tokenizer.vocab_size}
        content = json.dumps([tokenizer.to_json(), checksums]).encode()
        meta = {**about, "bos": tokenizer.bos, "fingerprint": _sha256(content)[:16], **meta, **self.parts}
        _replace(self.folder / "meta.json", meta)

    def _append(self, name: str, numbers: np.ndarray) -> None:
        with open(self.folder / name, "ab") as file:
            file.write(numbers.tobytes())
        self._touched.add(self.folder / name)


def _replace(path: Path, content: Any) -> None:
    """Write JSON so that the file holds the old or the new, whatever happens."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    _sync(temporary)
    temporary.replace(path)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
