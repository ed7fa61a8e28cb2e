"""Text to a folder of tokens: prepared once, on all cores, complete or absent; a kill costs seconds.

While it is written a folder is called `tmp-<key>`; its `progress.json` says how long each file was behind
some document, and where the reader of documents stood there.
"""

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
from filelock import FileLock, Timeout
from tqdm import tqdm

from configs import UserError
from configs.schema import Data
from data.bpe import train_bpe
from data.corpora import files_of, split
from data.hub import Corpus, Piece
from data.store import PARTS, VERSION, Added, Writer, refuse_short, replace_json, sha256
from data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer

BATCH = 2**20  # characters that a thread gets at a time
BPE_TEXT = 100_000_000  # bytes of text that the tokenizer `bpe` is trained on
Batch = tuple[list[Piece], Any]  # and the state of the reader behind them
ASKED = ("name", "subset", "revision", "split", "text_column", "take", "new_document", "val_fraction")


def prepared(config: Data, context_length: int, tokenizer: Tokenizer | None = None) -> Path:
    """The folder with the tokens of source hf, by `tokenizer` if given; prepared now unless it is there.

    Raises `UserError` for documents that cannot be read, a part too short for a window, and a full disk.
    """
    request = _request(config)
    if tokenizer is not None and tokenizer.kind == "bpe":
        saved = tokenizer.to_json()
        path = _folder(config, request) / "tokenizer.json"
        if not path.exists() or json.loads(path.read_text(encoding="utf-8")) != saved:  # trained elsewhere
            request["tokenizer"] = {"kind": "bpe", "sha256": sha256(json.dumps(saved).encode())}

    def fill(folder: Path) -> None:
        made = _tokenizer(config, tokenizer, folder)
        _fill(folder, request, made, partial(Corpus, config), config, context_length)

    return _complete(_folder(config, request), fill)


def prepared_text(config: Data, context_length: int, text: str, tokenizer: Tokenizer) -> Path:
    """The folder with the tokens of a whole text, whose parts are a document each.

    Raises `UserError` for a part too short for a window, what the tokenizer does not know, and a full disk.
    """
    request = {"version": VERSION, "text": sha256(text.encode()), "val_fraction": config.val_fraction}
    request["tokenizer"] = sha256(json.dumps(tokenizer.to_json()).encode())
    pieces = [
        Piece(part, True, draw) for part, draw in zip(split(text, config.val_fraction), (1, 0), strict=True)
    ]

    def fill(folder: Path) -> None:
        tokenizer.encode("".join({*text}))  # what it does not know is told before anything is written
        replace_json(folder / "tokenizer.json", tokenizer.to_json())
        _fill(folder, request, tokenizer, partial(Pieces, pieces), config, context_length)

    return _complete(_folder(config, request), fill)


class Pieces:
    """Reads what is in memory already; `state` is how much of it is done."""

    def __init__(self, pieces: list[Piece], state: int | None):
        self.pieces, self.state, self.skipped = pieces, state or 0, dict[str, int]()

    def __iter__(self) -> Iterator[Piece]:
        for piece in self.pieces[self.state :]:
            self.state += 1
            yield piece


def _complete(folder: Path, fill: Callable[[Path], None]) -> Path:
    """`folder`, which `fill` makes unless it is there, one process at a time."""
    temporary, lock = folder.with_name(f"tmp-{folder.name}"), folder.with_name(f"{folder.name}.lock")
    try:
        with _alone(folder, lock):
            if folder.exists():
                return folder
            temporary.mkdir(exist_ok=True)
            try:
                if not (temporary / "meta.json").exists():
                    fill(temporary)
                (temporary / "progress.json").unlink(missing_ok=True)
            except UserError:
                if not (temporary / "progress.json").exists():  # nothing to go on from: nothing is left
                    shutil.rmtree(temporary)
                raise
            temporary.rename(folder)
    except OSError as error:
        kept = "what is done so far is kept, the next start goes on from there"
        raise UserError(f"cannot write to data.cache_dir {folder.parent}: {error.strerror}; {kept}") from None
    return folder


@contextmanager
def _alone(folder: Path, lock: Path) -> Iterator[None]:
    """Hold the lock, which the kernel lets go of when a process ends, however; a cache is there meanwhile."""
    is_new = not folder.parent.exists()
    folder.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(lock)
    try:
        held.acquire(blocking=False)
    except Timeout:
        print(f"waiting for the process that prepares {folder}", file=sys.stderr)
        held.acquire()
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        held.release()
        if is_new and not any(folder.parent.iterdir()):
            folder.parent.rmdir()


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
    return Path(config.cache_dir) / sha256(json.dumps(request).encode())[:16]


def _fill(
    folder: Path,
    request: dict[str, Any],
    tokenizer: Tokenizer,
    read: Callable[[Any], Any],
    config: Data,
    context_length: int,
) -> None:
    """Write what `read` gives from a state on: read here, tokenize in threads, write in order."""
    writer = Writer(folder, np.min_scalar_type(tokenizer.vocab_size - 1))
    reader, share = read(writer.reader), config.val_fraction or 0
    line = "{n_fmt}B of text, {rate_fmt}{postfix}, {elapsed} gone\n"  # in a log file
    looks: dict[str, Any] = {} if sys.stderr.isatty() else {"bar_format": line, "mininterval": 10}
    looks |= {"initial": sum(part["bytes"] for part in writer.parts.values()), "delay": 2}
    with tqdm(unit="B", unit_scale=True, **looks) as bar:
        work = partial(_tokenize, tokenizer, writer.dtype, share)
        for tokenized, state in _in_order(work, _batches(reader)):
            writer.add(tokenized, state)
            count = sum(part["documents"] for part in writer.parts.values())
            bar.set_postfix_str(f"{count:,} documents", refresh=False)
            bar.update(sum(size for _, _, size in tokenized.values()))
    try:
        refuse_short(writer.parts, config, context_length)
    except UserError:
        (folder / "progress.json").unlink(missing_ok=True)
        raise
    writer.finish(tokenizer, {"request": request, "skipped": dict(reader.skipped)})


def _tokenizer(config: Data, given: Tokenizer | None, folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if given is None and path.exists():
        return load_tokenizer(path)
    if given is None and config.tokenizer == "bpe":
        print(f"training the tokenizer on the first {BPE_TEXT / 1e6:,.0f} MB of text", file=sys.stderr)
        given = train_bpe(_training_texts(config), config.vocab_size or 0, config.bos)
    tokenizer = given or make_tokenizer(config, [])
    replace_json(path, tokenizer.to_json())
    return tokenizer


def _training_texts(config: Data) -> Iterator[str]:
    left = BPE_TEXT
    for piece in Corpus(config):
        if piece.draw >= (config.val_fraction or 0):
            yield piece.text
        left -= len(piece.text.encode())
        if left <= 0:
            return


def _batches(reader: Corpus | Pieces) -> Iterator[Batch]:
    """Pieces of about BATCH characters together, and the state of the reader behind them."""
    batch: list[Piece] = []
    size = 0
    for piece in reader:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch, reader.state
            batch, size = [], 0
    if batch:
        yield batch, reader.state


def _in_order(work: Callable[[list[Piece]], Added], batches: Iterator[Batch]) -> Iterator[tuple[Added, Any]]:
    """What threads make of the batches, of which few are held. Tokenizers let other threads go on."""
    threads, pending = os.cpu_count() or 1, deque[tuple[Future[Added], Any]]()
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
