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
from data.corpora import split
from data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Tokens:
    """Both parts of a corpus, memory-mapped."""

    train: np.ndarray
    val: np.ndarray
    tokenizer: Tokenizer
    fingerprint: str
    bytes_per_token: float  # of the validation part


def prepare(config: DataConfig, source: str, text: str, tokenizer: Tokenizer, context_length: int) -> Tokens:
    """Tokenize `text`, and write it unless an earlier run has left exactly these tokens; map them.

    Raises `UserError` where a part is too short for one window of `context_length`; nothing is written then.
    """
    parts = dict(zip(("train", "val"), split(text, config.val_fraction), strict=True))
    ids = {name: tokenizer.encode(part) for name, part in parts.items()}
    counts = {name: len(part) for name, part in ids.items()}
    need = context_length + (not config.bos)  # without BOS the last target is one token more
    place = config.path if source == "text" else source
    for name, have in counts.items():
        if have < need:
            raise UserError(
                f"model.context_length {context_length} needs at least {need} tokens; the {name} part of "
                f"{place} has {have}: shorten the context or give more text"
            )
    identity = json.dumps([tokenizer.to_json(), config.val_fraction]).encode()
    fingerprint = hashlib.sha256(identity + text.encode()).hexdigest()[:16]
    folder = Path(config.cache_dir) / fingerprint
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    meta = {"tokens": counts, "dtype": dtype.name, "tokenizer": tokenizer.to_json()}
    files = {f"{name}.bin": part.astype(dtype).tobytes() for name, part in ids.items()}
    files["meta.json"] = json.dumps(meta).encode()
    if not _holds(folder, files):
        _write(folder, files)
    train, val = (np.memmap(folder / f"{name}.bin", dtype, "r") for name in counts)
    return Tokens(train, val, tokenizer, fingerprint, len(parts["val"].encode()) / len(val))


def _holds(folder: Path, files: dict[str, bytes]) -> bool:
    paths = {folder / name: content for name, content in files.items()}
    return all(path.is_file() and path.read_bytes() == content for path, content in paths.items())


def _write(folder: Path, files: dict[str, bytes]) -> None:
    temporary = folder.with_name(f"tmp-{folder.name}-{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, content in files.items():
            (temporary / name).write_bytes(content)
        try:
            temporary.rename(folder)
        except OSError:  # something is there: another process was faster, or it is damaged
            if not _holds(folder, files):
                shutil.rmtree(folder, ignore_errors=True)
                temporary.rename(folder)
    except OSError as error:
        raise UserError(f"cannot write tokens to data.cache_dir {folder.parent}: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
