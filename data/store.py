"""A prepared folder, memory-mapped: the token stream of a part, and where its documents begin.

Sizes are checked when a part is opened, and ids whenever they are read: a damaged folder is named, never
trained on.
"""

from pathlib import Path
from typing import Any

import numpy as np

from configs import UserError


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
