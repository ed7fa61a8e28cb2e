"""The run folder: who may have it, how it begins."""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from configs import UserError
from configs.files import held, replace_text
from configs.screen import foreign
from training.checkpoints import steps_in
from training.loggers import read_records

LOCK = "lock"  # held by the process that trains here


@contextmanager
def owned(folder: Path, overwrite: bool | None) -> Iterator[None]:
    """The run folder for this training alone; made if need be, and gone again if nothing was written to it.

    `overwrite` as `refuse_used` has it, or None to go on with the run. Raises `UserError` where the folder
    cannot be had, for instance because another training has it.
    """
    if overwrite is not None:
        refuse_used(folder, overwrite)
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    with ExitStack() as stack:
        stack.callback(_remove_empty, new)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(held(folder / LOCK))
            since = datetime.now().isoformat(" ", "minutes")
            lock.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
            lock.flush()
        except BlockingIOError as other:
            owner = foreign(str(other).strip() or "another process", most=120)
            ways = "wait for its end, end it, or choose another --run.dir"
            raise UserError(f"{owner} is training in run.dir {folder}: {ways}") from None
        except OSError as error:
            raise UserError(f"cannot write to run.dir {folder}: {error.strerror}") from None
        if overwrite is not None:  # another training may have begun there, and ended, since we looked
            refuse_used(folder, overwrite)
        yield


def refuse_used(folder: Path, overwrite: bool) -> None:
    """Raises `UserError` for a folder that holds something; a run may be overwritten, anything else never."""
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        raise UserError(f"run.dir cannot be made: {error.strerror}; choose another --run.dir") from None
    if not nearest.is_dir():
        raise UserError(f"run.dir {folder} cannot be made: {nearest} is a file; choose another --run.dir")
    is_run = all((folder / name).exists() for name in ("config.yaml", "tokenizer.json"))
    if folder.exists() and {*folder.iterdir()} - {folder / LOCK} and not is_run:
        raise UserError(f"run.dir {folder} is not empty and not a run; choose another --run.dir")
    if is_run and not overwrite:
        ways = f"go on with --resume {folder}, choose another --run.dir, or --run.overwrite true to lose it"
        raise UserError(f"run.dir {folder} holds a run: {ways}")


def create(folder: Path, config: str, tokenizer: str) -> None:
    """Make or empty the folder; config and tokenizer come first, so that it is a run from then on."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in {*folder.iterdir()} - {folder / LOCK}:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        replace_text(folder / "config.yaml", config)
        replace_text(folder / "tokenizer.json", tokenizer)
    except OSError as error:
        raise UserError(f"cannot write to run.dir {folder}: {error.strerror}") from None


def has_begun(folder: Path) -> bool:
    """Whether there is something to go on from, or to lose: before the first checkpoint there is not."""
    records = read_records(folder / "metrics.jsonl")
    return bool(steps_in(folder / "checkpoints")) or any(record["step"] for record in records)


def _remove_empty(folders: list[Path]) -> None:
    with suppress(OSError):  # one that is not empty stays, and so do those around it
        for folder in folders:
            folder.rmdir()
