"""Text to a folder of tokens: prepared once, on all cores, complete or absent; a kill costs seconds.

While it is written a folder is called `tmp-<key>`; its `progress.json` says how long each file was behind
some document, and where the reader of documents stood there.
"""

import json
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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
from configs.screen import looks
from data.bpe import train_bpe
from data.corpora import files_of, split
from data.hub import Corpus, Piece
from data.store import PARTS, refuse_short
from data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer
from data.writer import VERSION, Added, Writer, replace_json, sha256

BATCH = 2**20  # characters that a thread gets at a time
BPE_TEXT = 100_000_000  # bytes of text that the tokenizer `bpe` is trained on
ASKED = ("name", "subset", "revision", "split", "text_column", "take", "new_document", "val_fraction")
Read = Iterable[tuple[Piece, Any]]  # pieces, each with the state from which reading goes on behind it


def prepared(config: Data, context_length: int, tokenizer: Tokenizer | None = None) -> Path:
    """The folder with the tokens of source hf, by `tokenizer` if given; prepared now unless it is there.

    A `data.path` that is such a folder is taken as it is. Raises `UserError` for documents that cannot be
    read, a part too short for a window, and a full disk.
    """
    if (at_hand := Path(config.path or "")).joinpath("meta.json").exists():
        return at_hand
    request = _request(config)
    if tokenizer is not None and tokenizer.kind in ("bpe", "hf"):
        saved = tokenizer.to_json()
        path = _folder(config, request) / "tokenizer.json"
        if not path.exists() or load_tokenizer(path).to_json() != saved:  # trained elsewhere
            request["tokenizer"] = {"kind": tokenizer.kind, "sha256": sha256(json.dumps(saved).encode())}

    def fill(folder: Path) -> None:
        writer = Writer(folder, _tokenizer(config, tokenizer, folder))
        corpus = Corpus(config, writer.reader)
        _write(writer, corpus)
        _finish(writer, config, context_length, {"request": request, "skipped": dict(corpus.skipped)})

    return _complete(_folder(config, request), fill)


def prepared_text(config: Data, context_length: int, text: str, tokenizer: Tokenizer) -> Path:
    """The folder with the tokens of a whole text, whose parts are a document each.

    Raises `UserError` for a part too short for a window, what the tokenizer does not know, and a full disk.
    """
    request = {"version": VERSION, "text": sha256(text.encode()), "val_fraction": config.val_fraction}
    request["tokenizer"] = sha256(json.dumps(tokenizer.to_json()).encode())
    parts = enumerate(zip(split(text, config.val_fraction), PARTS, strict=True), 1)
    pieces = [(Piece(own, True, part), number) for number, (own, part) in parts]

    def fill(folder: Path) -> None:
        tokenizer.encode("".join({*text}))  # what it does not know is told before anything is written
        replace_json(folder / "tokenizer.json", tokenizer.to_json())
        writer = Writer(folder, tokenizer)
        _write(writer, pieces[writer.reader or 0 :])
        _finish(writer, config, context_length, {"request": request, "skipped": {}})

    return _complete(_folder(config, request), fill)


def _complete(folder: Path, fill: Callable[[Path], None]) -> Path:
    """`folder`, which `fill` makes unless it is there, one process at a time."""
    if folder.exists():  # also where nothing can be written
        return folder
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
        told = f"cannot write to data.cache_dir {folder.parent}: {error.strerror}"
        if temporary.exists():
            told += "; what is done so far is kept, the next start goes on from there"
        raise UserError(told) from None
    return folder


@contextmanager
def _alone(folder: Path, lock: Path) -> Iterator[None]:
    """Hold the lock, which the kernel lets go of when a process ends, however; a cache is there meanwhile."""
    is_new, held = not folder.parent.exists(), FileLock(lock)
    folder.parent.mkdir(parents=True, exist_ok=True)
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
    request["files"] = [[one.name, one.stat().st_size, one.stat().st_mtime_ns, _ends(one)] for one in paths]
    request["tokenizer"] = {key: getattr(config, key) for key in ("tokenizer", "vocab_size", "bos")}
    return request


def _ends(path: Path) -> str:
    """A hash of how a file begins and ends: archives are unpacked with equal times."""
    with path.open("rb") as file:
        begin = file.read(2**16)
        file.seek(max(0, path.stat().st_size - 2**16))
        return sha256(begin + file.read())


def _folder(config: Data, request: dict[str, Any]) -> Path:
    return Path(config.cache_dir) / sha256(json.dumps(request).encode())[:16]


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
    for piece, _ in Corpus(config):
        if piece.part == "train":
            yield piece.text
        left -= len(piece.text.encode())
        if left <= 0:
            return


def _write(writer: Writer, read: Read) -> None:
    """Read here, tokenize in threads, write in order."""
    options = looks("{n_fmt}B of text, {rate_fmt}{postfix}, {elapsed} gone") | {"delay": 2}
    done = sum(part["bytes"] for part in writer.parts.values())
    with tqdm(initial=done, unit="B", unit_scale=True, **options) as bar:
        for added, state in _in_order(partial(_tokenize, writer.tokenizer, writer.dtype), _batches(read)):
            writer.add(added, state)
            count = sum(part["documents"] for part in writer.parts.values())
            bar.set_postfix_str(f"{count:,} documents", refresh=False)
            bar.update(sum(part.bytes for part in added.values()))


def _finish(writer: Writer, config: Data, context_length: int, meta: dict[str, Any]) -> None:
    try:
        refuse_short(writer.parts, config, context_length)
    except UserError:
        (writer.folder / "progress.json").unlink(missing_ok=True)  # nothing to go on from
        raise
    writer.finish(meta)


def _batches(read: Read) -> Iterator[tuple[list[Piece], Any]]:
    """Pieces of about BATCH characters together, and the state behind them."""
    batch: list[Piece] = []
    size, state = 0, None
    for piece, state in read:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch, state
            batch, size = [], 0
    if batch:
        yield batch, state


def _in_order(
    work: Callable[[list[Piece]], dict[str, Added]], batches: Iterator[tuple[list[Piece], Any]]
) -> Iterator[tuple[dict[str, Added], Any]]:
    """What threads make of the batches, of which few are held. Tokenizers let other threads go on."""
    threads, pending = os.cpu_count() or 1, deque[tuple[Future[dict[str, Added]], Any]]()
    with ThreadPoolExecutor(threads) as pool:
        for batch, state in batches:
            pending.append((pool.submit(work, batch), state))
            if len(pending) > 2 * threads:
                first, state = pending.popleft()
                yield first.result(), state
        yield from ((future.result(), state) for future, state in pending)


def _tokenize(tokenizer: Tokenizer, dtype: np.dtype, pieces: list[Piece]) -> dict[str, Added]:
    """What the pieces add to each part."""
    bos, added = np.array([] if tokenizer.bos is None else [tokenizer.bos], dtype), {}
    for part in PARTS:
        own = [piece for piece in pieces if piece.part == part]
        ids = [bos[:0]]
        for piece in own:
            ids += [bos if piece.begins else bos[:0], tokenizer.encode(piece.text).astype(dtype)]
        place = np.cumsum([len(some) for some in ids])[:-1:2]  # of each piece
        begins = place[[piece.begins for piece in own]]
        size = sum(len(piece.text.encode()) for piece in own)
        added[part] = Added(np.concatenate(ids), begins, size)
    return added
