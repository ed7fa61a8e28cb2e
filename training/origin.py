"""Starting from the weights of another run: `model.init_from`."""

import re
from dataclasses import dataclass
from pathlib import Path

from configs import UserError
from configs.cli import flat, load_config, shown
from configs.schema import Config
from data.tokenizers import Tokenizer, load_tokenizer
from model.transformer import GPT
from training.checkpoints import find_intact, load_weights

# What may differ between the run and what it starts from: interventions worth a study, and what computes.
FREE = {"scale", "sink", "window", "logit_softcap", "qk_gain", "rope_theta", "context_length"}
FREE |= {"dropout", "backend"}
TOKENS = {"data.tokenizer", "data.bos", "data.vocab_size"}


@dataclass(frozen=True)
class Origin:
    """An intact checkpoint of another run, its tokenizer, and what is to be told about them."""

    checkpoint: Path
    tokenizer: Tokenizer
    news: list[str]

    def fill(self, model: GPT) -> list[str]:
        """Copy the weights; what is to be told. A learned sink that one of both lacks stays as it starts."""
        load_weights(self.checkpoint, model, may_lack=("sink_H",))
        return self.news


def find_origin(config: Config) -> Origin:
    """What `model.init_from` names: a run, for its newest intact checkpoint, or a checkpoint in a run.

    Raises `UserError` where it is none, has another model or tokenizer than `config` asks for, or lies in
    `run.dir`, which is emptied before the weights are saved anew.
    """
    path = Path(config.model.init_from or "")
    whole = path.absolute()  # `.` may be the folder of a checkpoint
    one = re.fullmatch(r"step-(\d{8})", whole.name)
    folder, step = (whole.parent.parent, int(one[1])) if one else (path, None)
    try:
        was, asked = flat(load_config(folder)), flat(config)
        checkpoint, faults = find_intact(folder / "checkpoints", step)
        tokenizer = load_tokenizer(folder / "tokenizer.json")
    except UserError as error:
        raise UserError(f"model.init_from {path}: {error}") from None
    if any(place.resolve().is_relative_to(Path(config.run.dir).resolve()) for place in (folder, checkpoint)):
        raise UserError(f"model.init_from {path} lies in run.dir {config.run.dir}: choose another --run.dir")
    keys = {key for key in asked if key.startswith("model.")} | TOKENS
    keys -= {"model.init", "model.init_from"}  # how the weights came about
    changed = [key for key in asked if key in keys and was[key] != asked[key]]
    free = {f"model.{key}" for key in FREE}
    if config.model.position == "learned":
        free.remove("model.context_length")  # it is a size of the table of positions
    if refused := [f"{k} (is {shown(was[k])}, asked {shown(asked[k])})" for k in changed if k not in free]:
        raise UserError(
            f"model.init_from {path} has another model or tokenizer: {', '.join(refused)}; ask for the same"
        )
    news = ", ".join(f"{key} was {shown(was[key])}, is {shown(asked[key])}" for key in changed)
    return Origin(checkpoint, tokenizer, faults + ([f"unlike {folder}: {news}"] if news else []))
