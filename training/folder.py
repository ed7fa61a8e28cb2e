"""The run folder: who may have it, how it begins."""

import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from configs import UserError
from configs.cli import to_yaml
from configs.files import held, replace_text
from configs.schema import Config
from configs.screen import foreign
from data.tokenizers import Tokenizer
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
    inside = list(folder.iterdir()) if folder.exists() else []
    if any(path.name != LOCK and path.suffix != ".tmp" for path in inside) and not is_run:
        raise UserError(f"run.dir {folder} is not empty and not a run; choose another --run.dir")
    if is_run and not overwrite:
        ways = f"go on with --resume {folder}, choose another --run.dir, or --run.overwrite true to lose it"
        raise UserError(f"run.dir {folder} holds a run: {ways}")


def create(folder: Path, config: Config, tokenizer: Tokenizer) -> None:
    """Begin in a folder of ours, or empty that of a run to overwrite, which it is until it is the new one."""
    # Overwriting is meant once: who repeats this run from its config.yaml must not lose another.
    once = config.model_copy(update={"run": config.run.model_copy(update={"overwrite": False})})
    try:
        # A kill may leave checkpoints that are damaged or gone, never one without its records.
        for path in sorted(folder.iterdir()) if config.run.overwrite else ():
            if path.name not in ("config.yaml", "tokenizer.json", LOCK):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        replace_text(folder / "config.yaml", to_yaml(once))
        replace_text(folder / "tokenizer.json", json.dumps(tokenizer.to_json()))
    except OSError as error:
        if not config.run.overwrite:
            (folder / "config.yaml").unlink(missing_ok=True)  # half a start is nobody's run
        raise UserError(f"cannot write to run.dir {folder}: {error.strerror}") from None


def has_begun(folder: Path) -> bool:
    """Whether there is something to go on from, or to lose: before the first checkpoint there is not."""
    records = read_records(folder / "metrics.jsonl")
    return bool(steps_in(folder / "checkpoints")) or any(record["step"] for record in records)


def _remove_empty(folders: list[Path]) -> None:
    with suppress(OSError):  # one that is not empty stays, and so do those around it
        for folder in folders:
            folder.rmdir()
