"""Files as they are on the disk: replaced in one move, flushed, compared, read within bounds."""

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

SMALL, LARGE = 2**22, 2**26  # bytes of a file that describes something, and of one with a list in it


def replace_text(path: Path, text: str) -> None:
    """Write a file so that it holds the old text or the new one, whatever happens."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    to_disk(temporary)
    temporary.replace(path)


def to_disk(path: Path) -> None:
    """Wait until a file, or which files a folder has, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Of what the file holds, in hexadecimal."""
    refuse_large(path, None)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_large(path: Path, most: int | None) -> None:
    """Raises `OSError` for what is no regular file, so may have no end, or has more than `most` bytes."""
    size = path.stat().st_size
    if not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    if most is not None and size > most:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, and {most:,} are the most", str(path))


def read_json(path: Path, most: int = SMALL) -> Any:
    """What a file holds that nobody vouches for, in some 25 times its size of memory.

    Raises `OSError` as `refuse_large` does, and ValueError for what is no JSON or has a key twice.
    """
    refuse_large(path, most)
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    return found
