"""Files as they are on the disk: held by one process, replaced in one move, compared, read within bounds."""

import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any

SMALL, LARGE = 2**22, 2**26  # bytes of a file that describes something, and of one with a list in it


@contextmanager
def held(path: Path) -> Iterator[FileIO]:
    """An empty file at `path` that is ours alone; it is gone afterwards.

    The kernel lets go of it when a process ends, however, so what a killed one has left can be taken.
    Raises BlockingIOError, with what that one wrote, where somebody holds it; OSError for what is no file, or
    a link: whoever passes a folder on could have it empty any file of ours.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OSError(errno.EINVAL, f"{path.name} is no regular file", str(path))
    # Unbuffered, so that what a full disk has refused is not tried again as the file is closed.
    with path.open("a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise BlockingIOError(file.read().decode(errors="replace")) from None
        if not _is_at(path, file):  # since we opened it, somebody has held it and let go of it
            raise BlockingIOError("")
        file.truncate(0)
        try:
            yield file
        finally:
            if _is_at(path, file):
                path.unlink()


def replace_text(path: Path, text: str) -> None:
    """As `replace_bytes`, in UTF-8."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file so that it is the old one or the new one, whatever happens and whoever else writes it."""
    for number in count():
        temporary = path.with_name(f"{path.name}.{number}.tmp")
        try:
            with held(temporary) as file:
                write_all(file, content)
                os.fsync(file.fileno())
                temporary.replace(path)
                return
        except BlockingIOError:  # another process writes this file just now
            continue
        except OSError as error:
            error.filename = error.filename or str(path)  # a write that finds no room does not tell where
            raise


def write_all(file: FileIO, content: bytes) -> None:
    """To a file without a buffer: a disk that fills up takes a part, and says why with the next."""
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


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
    there = path.stat()
    if not stat.S_ISREG(there.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    if most is not None and there.st_size > most:
        raise OSError(errno.EFBIG, f"it has {there.st_size:,} bytes, and {most:,} are the most", str(path))


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


def _is_at(path: Path, file: FileIO) -> bool:
    # One look: what another process moves away between two is neither there nor missing.
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False
