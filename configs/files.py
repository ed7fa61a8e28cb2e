"""Files as they are on the disk: replaced in one move, flushed, compared."""

import hashlib
import os
from pathlib import Path


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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
