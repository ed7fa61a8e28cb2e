"""Prepared folders written by hand.

The tokens of the text are 0, 1, 2 ... in training and go on in validation, so that an id says which token it
is.
"""

import json
from itertools import accumulate
from pathlib import Path

import numpy as np

from configs.schema import Data
from data.documents import Documents


def streams(lengths: dict[str, list[int]], bos: int | None) -> dict[str, list[list[int]]]:
    """The documents of each part, BOS included."""
    ids = iter(range(10**9))
    return {
        part: [[bos] * (bos is not None) + [next(ids) for _ in range(n)] for n in counts]
        for part, counts in lengths.items()
    }


def write(
    folder: Path, parts: dict[str, list[list[int]]], vocab_size: int, bos: int | None, shard: int = 10**6
) -> Path:
    """`parts` (documents as they stand in the stream), in shards of so many tokens."""
    dtype = np.min_scalar_type(vocab_size - 1)
    meta = {"version": 1, "request": {}, "dtype": dtype.name, "vocab_size": vocab_size, "bos": bos}
    meta |= {"fingerprint": "made by hand", "skipped": {}}
    folder.mkdir(parents=True, exist_ok=True)
    for part, documents in parts.items():
        stream = np.array([token for document in documents for token in document])
        shards = [stream[i : i + shard].astype(dtype) for i in range(0, len(stream), shard)]
        for i, tokens in enumerate(shards):
            tokens.tofile(folder / f"{part}-{i:05}.bin")
        starts = np.array([0, *accumulate(map(len, documents))][:-1], np.int64)
        starts.tofile(folder / f"{part}-documents.bin")
        np.array(sorted({*stream.tolist()} - {bos}), np.int64).tofile(folder / f"{part}-symbols.bin")
        meta[part] = {"tokens": len(stream), "documents": len(documents), "bytes": 3 * len(stream)}
        meta[part]["sha256"] = [""] * len(shards)
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def config(bos: bool, windows: str = "anywhere", masked: bool = False, **values) -> Data:
    choice = {"windows": windows, "mask_documents": masked, "bos": bos, "tokenizer": "byte"}
    return Data(source="hf", path="books/*.txt", **choice, **values)


def source(
    folder: Path,
    train: list[int],
    val: list[int],
    T: int,
    *,
    bos: bool = True,
    shard: int = 10**6,
    seed: int = 1,
    **values,
) -> Documents:
    """Documents with so many tokens of text each, in windows of T."""
    vocab_size = sum(train) + sum(val) + bos
    number = vocab_size - 1 if bos else None
    parts = streams({"train": train, "val": val}, number)
    write(folder, parts, vocab_size, number, shard)
    return Documents(folder, config(bos, **values), T, seed)
