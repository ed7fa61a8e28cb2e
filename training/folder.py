"""The run folder: who may have it, how it begins."""

import json
import shutil
from pathlib import Path

from configs import UserError
from configs.cli import to_yaml
from configs.files import replace_text
from configs.schema import Config
from data.tokenizers import Tokenizer
from training.checkpoints import steps_in
from training.loggers import read_records


def refuse_used(folder: Path, overwrite: bool) -> None:
    """Raises `UserError` for a folder that holds something; a run may be overwritten, anything else never."""
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        raise UserError(f"run.dir cannot be made: {error.strerror}; choose another --run.dir") from None
    if not nearest.is_dir():
        raise UserError(f"run.dir {folder} cannot be made: {nearest} is a file; choose another --run.dir")
    is_run = all((folder / name).exists() for name in ("config.yaml", "tokenizer.json"))
    if folder.exists() and any(path.suffix != ".tmp" for path in folder.iterdir()) and not is_run:
        raise UserError(f"run.dir {folder} is not empty and not a run; choose another --run.dir")
    if is_run and not overwrite:
        ways = f"go on with --resume {folder}, choose another --run.dir, or --run.overwrite true to lose it"
        raise UserError(f"run.dir {folder} holds a run: {ways}")


def create(folder: Path, config: Config, tokenizer: Tokenizer) -> None:
    """Make the folder, or empty that of a run to be overwritten, which it is until it is the new one."""
    # Overwriting is meant once: who repeats this run from its config.yaml must not lose another.
    once = config.model_copy(update={"run": config.run.model_copy(update={"overwrite": False})})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A kill may leave checkpoints that are damaged or gone, never one without its records.
        for path in sorted(folder.iterdir()) if config.run.overwrite else ():
            if path.name not in ("config.yaml", "tokenizer.json"):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        replace_text(folder / "config.yaml", to_yaml(once))
        replace_text(folder / "tokenizer.json", json.dumps(tokenizer.to_json()))
    except OSError as error:
        raise UserError(f"cannot write to run.dir {folder}: {error.strerror}") from None


def has_begun(folder: Path) -> bool:
    """Whether there is something to go on from, or to lose: before the first checkpoint there is not."""
    records = read_records(folder / "metrics.jsonl")
    return bool(steps_in(folder / "checkpoints")) or any(record["step"] for record in records)
