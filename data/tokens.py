"""Tokens on disk: written once, complete or absent, then memory-mapped.

A folder `cache/<fingerprint>/` holds `train.bin`, `val.bin` (ids in the smallest unsigned type of the
vocabulary) and `meta.json`. The fingerprint covers text, tokenizer and split: a changed corpus never meets a
stale cache.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs import UserError
from configs.schema import Data as DataConfig
from data.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer


@dataclass(frozen=True)
class Tokens:
    """Both parts of a corpus, memory-mapped."""

    train: np.ndarray
    val: np.ndarray
    tokenizer: Tokenizer
    fingerprint: str
    bytes_per_token: float


def prepare(config: DataConfig, text: str, context_length: int) -> Tokens:
    """Tokenize `text`, or map what an earlier run with the same text and settings has written.

    Raises `UserError` where a part is too short for one window of `context_length`; nothing is written then.
    """
    char = config.tokenizer == "char"
    tokenizer = CharTokenizer("".join(sorted(set(text))), config.bos) if char else ByteTokenizer(config.bos)
    identity = json.dumps([tokenizer.to_json(), config.val_fraction]).encode()
    fingerprint = hashlib.sha256(identity + text.encode()).hexdigest()[:16]
    folder = Path(config.cache_dir) / fingerprint
    ids = tokenizer.encode(text)
    split = int(len(ids) * (1 - (config.val_fraction or 0)))
    need = context_length + (not config.bos)  # without BOS the last target is one token more
    for name, have in (("train", split), ("val", len(ids) - split)):
        if have < need:
            raise UserError(
                f"context_length {context_length} needs at least {need} tokens; the {name} part of "
                f"{config.path or config.source} has {have}: shorten the context or give more text"
            )
    if not _complete(folder):
        _write(folder, {"train": ids[:split], "val": ids[split:]}, tokenizer)
    dtype = json.loads((folder / "meta.json").read_text())["dtype"]
    train, val = (np.memmap(folder / f"{name}.bin", dtype, "r") for name in ("train", "val"))
    return Tokens(train, val, tokenizer, fingerprint, len(text.encode()) / len(ids))


def _write(folder: Path, parts: dict[str, np.ndarray], tokenizer: Tokenizer) -> None:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    counts = {name: len(ids) for name, ids in parts.items()}
    meta = {"vocab_size": tokenizer.vocab_size, "dtype": dtype.name, "tokens": counts}
    temporary = folder.with_name(f"tmp-{folder.name}-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        for name, ids in parts.items():
            ids.astype(dtype).tofile(temporary / f"{name}.bin")
        (temporary / "meta.json").write_text(json.dumps(meta | {"tokenizer": tokenizer.to_json()}))
        shutil.rmtree(folder, ignore_errors=True)  # there is one only if it was incomplete
        temporary.rename(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"cannot write tokens to data.cache_dir {folder.parent}: {error.strerror}") from None


def _complete(folder: Path) -> bool:
    """Whether the folder holds what its metadata says: sizes, and no id beyond the vocabulary."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        parts = {name: np.memmap(folder / f"{name}.bin", meta["dtype"], "r") for name in meta["tokens"]}
        sizes = {name: len(ids) for name, ids in parts.items()}
        return sizes == meta["tokens"] and all(ids.max() < meta["vocab_size"] for ids in parts.values())
    except (OSError, ValueError, KeyError, TypeError):
        return False
