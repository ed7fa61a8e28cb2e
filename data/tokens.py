"""Tokens on disk: written once, complete or absent, then memory-mapped.

A folder `cache/<fingerprint>/` holds `train.bin`, `val.bin` (ids in the smallest unsigned type of the vocabulary) and
`meta.json`. The fingerprint covers text, tokenizer and split, so a changed corpus can never meet a stale cache.
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
    if config.tokenizer == "char":
        tokenizer: Tokenizer = CharTokenizer("".join(sorted(set(text))), config.bos)
    else:
        tokenizer = ByteTokenizer(config.bos)
    identity = json.dumps([tokenizer.to_json(), config.val_fraction]).encode()
    fingerprint = hashlib.sha256(identity + text.encode()).hexdigest()[:16]
    folder = Path(config.cache_dir) / fingerprint
    if not _complete(folder):
        ids = tokenizer.encode(text)
        split = int(len(ids) * (1 - (config.val_fraction or 0)))
        parts = {"train": ids[:split], "val": ids[split:]}
        _check_lengths({name: len(part) for name, part in parts.items()}, context_length, config)
        _write(folder, parts, tokenizer, len(text.encode()) / len(ids))
    meta = json.loads((folder / "meta.json").read_text())
    _check_lengths(meta["tokens"], context_length, config)
    train, val = (np.memmap(folder / f"{name}.bin", meta["dtype"], "r") for name in ("train", "val"))
    return Tokens(train, val, tokenizer, fingerprint, meta["bytes_per_token"])


def _check_lengths(tokens: dict[str, int], context_length: int, config: DataConfig) -> None:
    need = context_length + (
        not config.bos
    )  # BOS takes the first place of a window; else the last target is one more
    for name, have in tokens.items():
        if have < need:
            what = config.path or config.source
            raise UserError(
                f"model.context_length {context_length} needs at least {need} tokens; the {name} part of {what} has "
                f"{have}: shorten the context or give more text (data.val_fraction {config.val_fraction})"
            )


def _write(folder: Path, parts: dict[str, np.ndarray], tokenizer: Tokenizer, bytes_per_token: float) -> None:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    temporary = folder.with_name(f"tmp-{folder.name}-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        for name, ids in parts.items():
            ids.astype(dtype).tofile(temporary / f"{name}.bin")
        meta = {
            "tokenizer": tokenizer.to_json(),
            "vocab_size": tokenizer.vocab_size,
            "dtype": dtype.name,
            "tokens": {name: len(ids) for name, ids in parts.items()},
            "bytes_per_token": bytes_per_token,
        }
        (temporary / "meta.json").write_text(json.dumps(meta))
        shutil.rmtree(folder, ignore_errors=True)  # incomplete, or it would have been used
        temporary.rename(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"cannot write tokens to data.cache_dir {folder.parent}: {error.strerror}") from None


def _complete(folder: Path) -> bool:
    """Whether the folder holds what its metadata says: sizes, and no id beyond the vocabulary."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        parts = {name: np.memmap(folder / f"{name}.bin", meta["dtype"], "r") for name in meta["tokens"]}
        return all(
            len(ids) == meta["tokens"][name] and int(ids.max()) < meta["vocab_size"]
            for name, ids in parts.items()
        )
    except (OSError, ValueError, KeyError):
        return False
