"""Starting from the weights of another run or of a published model: `model.init_from`."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from configs import UserError
from configs.cli import flat, load_config
from configs.schema import Config
from configs.screen import shown
from data.tokenizers import Tokenizer, load_tokenizer
from model.published import is_published, open_published
from model.transformer import GPT
from training.checkpoints import find_intact, load_weights

# What may differ between the run and what it starts from: interventions worth a study, and what computes.
FREE = {"scale", "sink", "window", "logit_softcap", "qk_gain", "rope_theta", "context_length"}
FREE |= {"dropout", "backend"}
TOKENS = {"data.tokenizer", "data.bos", "data.vocab_size"}


class Origin(NamedTuple):
    """Whose weights a run takes over."""

    was: dict[str, Any]  # its settings, by key
    tokenizer: Tokenizer
    copy: Callable[[GPT], None]
    places: list[Path]  # what must not be lost
    news: list[str]

    def fill(self, model: GPT) -> list[str]:
        """Copy the weights; what is to be told. A learned sink that one of both lacks stays as it starts."""
        self.copy(model)
        return self.news


def find_origin(config: Config) -> Origin:
    """What `model.init_from` names: a run, for its newest intact checkpoint, a checkpoint, a published model.

    Raises `UserError` where it is none, has another model or tokenizer than `config` asks for, or lies in
    `run.dir`, which is emptied before the weights are saved anew.
    """
    path, asked = Path(config.model.init_from or ""), flat(config)
    published = is_published(path)
    try:
        found = _published(path, config) if published else _run(path)
    except UserError as error:
        raise UserError(f"model.init_from {path}: {error}") from None
    if any(place.resolve().is_relative_to(Path(config.run.dir).resolve()) for place in found.places):
        raise UserError(f"model.init_from {path} lies in run.dir {config.run.dir}: choose another --run.dir")
    was, length = found.was, "model.context_length"
    keys = {key for key in asked if key.startswith("model.")} | TOKENS
    keys -= {"model.init", "model.init_from"}  # how the weights came about
    changed = [key for key in asked if key in keys and was[key] != asked[key]]
    free = {f"model.{key}" for key in FREE}
    if config.model.position == "learned" and not (published and asked[length] < was[length]):
        free.remove(length)  # a table, of which `fill` takes the first rows
    if published:
        free.remove("model.rope_theta")  # ours is a default, and no model's own by chance
    if not free.issuperset(changed):
        own, here = (" ".join(f"--{key} {shown(of[key])}" for key in changed) for of in (was, asked))
        may = f"; may differ: {', '.join(both)}" if (both := sorted(free.intersection(changed))) else ""
        raise UserError(f"model.init_from {path} is another model: ask for {own} (asked: {here}){may}")
    told = ", ".join(f"{key} was {shown(was[key])}, is {shown(asked[key])}" for key in changed)
    return found._replace(news=found.news + ([f"unlike {found.places[0]}: {told}"] if told else []))


def _run(path: Path) -> Origin:
    whole = path.absolute()  # `.` may be the folder of a checkpoint
    one = re.fullmatch(r"step-(\d{8})", whole.name)
    folder, step = (whole.parent.parent, int(one[1])) if one else (path, None)
    if not (folder / "config.yaml").exists():
        raise UserError("it is no run folder, checkpoint of one, Hugging Face folder or GGUF file")
    was = flat(load_config(folder))
    checkpoint, faults = find_intact(folder / "checkpoints", step)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    copy = partial(load_weights, checkpoint, may_lack=("sink_H",))
    return Origin(was, tokenizer, copy, [folder, checkpoint], faults)


def _published(path: Path, config: Config) -> Origin:
    from data.published import read_tokenizer  # slow

    published, tokenizer = open_published(path), read_tokenizer(path, bos=config.data.bos)
    if tokenizer.vocab_size != published.vocab_size:
        sizes = f"its model has {published.vocab_size:,} tokens, its tokenizer {tokenizer.vocab_size:,}"
        raise UserError(f"{sizes}: it can be looked at, but not trained on")
    was = {f"model.{key}": value for key, value in published.config.model_dump().items()}
    was |= {"data.tokenizer": "hf", "data.bos": tokenizer.bos is not None, "data.vocab_size": None}
    return Origin(was, tokenizer, published.fill, [path], [])
