"""A run read back from its folder: for sampling, reports, and your own scripts (docs/python.md)."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from configs import UserError
from configs.cli import load_config, validate
from configs.schema import Config
from configs.screen import looks
from data.tokenizers import Tokenizer, load_tokenizer
from model.layers import PRECISIONS
from model.published import open_published
from model.transformer import GPT
from training.checkpoints import find_intact, load_state, load_weights, refuse_other, steps_in

ATTEMPTS = 20  # to read a checkpoint of a run that trains


@dataclass(frozen=True)
class SavedRun:
    """What a run folder holds; `model` is in evaluation mode, with the weights of `step`.

    `faults` says which newer checkpoints are damaged. A published model looks like a run without a step.
    """

    folder: Path
    config: Config
    tokenizer: Tokenizer
    model: GPT
    step: int | None
    faults: list[str]
    fingerprint: str = ""  # of the data that it was trained on


def load_run(folder: str | Path, step: int | None = None) -> SavedRun:
    """A run with the weights of `step`, or of the newest intact checkpoint.

    Raises `UserError` for a folder that is no run, a step that was not kept, a damaged checkpoint.
    """
    folder = Path(folder)
    for left in reversed(range(ATTEMPTS)):
        there = steps_in(folder / "checkpoints")
        try:
            return _load(folder, step)
        except UserError:
            # One that is read may be rotated away by a training that goes on: there is a newer one then.
            if not left or steps_in(folder / "checkpoints") == there:
                raise
    raise AssertionError


def _load(folder: Path, step: int | None) -> SavedRun:
    config = load_config(folder)
    path, faults = find_intact(folder / "checkpoints", step)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    refuse_other(path, config.model, tokenizer.vocab_size)
    model = GPT(config.model, tokenizer.vocab_size)
    model.compute_in(PRECISIONS[config.train.precision])
    load_weights(path, model)
    step = int(path.name.removeprefix("step-"))
    fingerprint = load_state(path)[0].fingerprint
    return SavedRun(folder, config, tokenizer, model.eval(), step, faults, fingerprint)


def every_checkpoint(run: SavedRun) -> Iterator[tuple[int, GPT]]:
    """Step and model for each intact checkpoint of a run, ascending: the same model, filled anew.

    What is wrong with others is added to `run.faults`, which knows those behind `run.step` already.
    """
    assert run.step is not None
    folder, line = run.folder / "checkpoints", looks("{n_fmt}/{total_fmt} checkpoints")
    steps = [step for step in steps_in(folder) if step <= run.step]
    for step in tqdm(steps, unit="checkpoint", delay=2, **line):
        try:
            path, _ = find_intact(folder, step)
            load_weights(path, run.model)
        except UserError as error:
            run.faults.append(str(error))
            continue
        yield step, run.model


def load_published_run(
    path: str | Path, text: str | Path | None = None, context_length: int | None = None
) -> SavedRun:
    """A published model, with the configuration of a run that reads `text` (None: the plays) by it.

    `context_length` is at most the model's own (None: 256, or its own). Raises `UserError` for what
    `model.published` cannot read, and for a tokenizer with tokens that the model lacks.
    """
    from data.published import read_tokenizer  # slow

    path = Path(path)
    try:
        published, tokenizer = open_published(path), read_tokenizer(path)
        model = published.load(context_length or min(256, published.config.context_length))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if tokenizer.vocab_size > published.vocab_size:
        sizes = f"{tokenizer.vocab_size:,} tokens, its model {published.vocab_size:,}"
        raise UserError(f"{path}: its tokenizer has {sizes}")
    source = {"source": "shakespeare"} if text is None else {"source": "text", "path": str(text)}
    data = {"tokenizer": "hf", "bos": tokenizer.bos is not None, **source}
    shape = model.config.model_dump() | {"init_from": str(path)}
    return SavedRun(path, validate({"data": data, "model": shape}), tokenizer, model, None, [])
