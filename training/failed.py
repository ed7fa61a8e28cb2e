"""The step that failed, kept for replay: the last one only, complete or not at all.

`failed/step-00000012/` holds `batch.safetensors` (the global batch, or windows of validation),
`model.safetensors` (the weights that met it) and `failed.json` (with the configuration of then).
"""

import json
import math
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from configs import UserError
from configs.cli import validate
from configs.files import read_json, to_disk
from configs.ranks import is_first
from configs.schema import Config
from configs.seeds import seed_for
from data.sources import IGNORED, Batch
from data.tokenizers import load_tokenizer
from model.layers import PRECISIONS
from model.tensors import open_tensors
from model.transformer import GPT
from training import Stopped
from training.checkpoints import load_weights, path_of, refuse_other, steps_in
from training.devices import choose_device, to_device
from training.guards import first_nonfinite, place, watched
from training.step import micro_losses


def stop(folder: Path, step: int, culprit: str, kept: str = "") -> NoReturn:
    """End the run in `folder` before a number that is not finite reaches the weights or a checkpoint."""
    steps = steps_in(folder / "checkpoints")
    good = path_of(folder / "checkpoints", steps[-1]) if steps else "none yet"
    raise Stopped(f"step {step}: the first tensor that is not finite is {culprit}; last good: {good}{kept}")


def stop_evaluating(folder: Path, config: Config, model: GPT, step: int, found: Iterable[Batch]) -> NoReturn:
    """`keep` the first batch of an evaluation whose loss is not finite, and `stop`."""
    losses = partial(micro_losses, batch_size=config.train.batch_size, dropout_seed=0, ranks=1, rank=0)
    with model.reading():
        there = (to_device(batch, model.device) for batch in found)
        lost = (b for b in there if not all(loss.isfinite() for loss in losses(b, forward=model)))
        if (batch := next(lost, None)) is None:
            stop(folder, step, "the loss of the evaluation, though it is finite when it is repeated")
        culprit = first_nonfinite(model, losses(batch, forward=model), math.nan)
    stop(folder, step, culprit, keep(folder, config, model, batch, step, culprit, scale=0))


def keep(run: Path, config: Config, model: GPT, batch: Batch, step: int, culprit: str, scale: float) -> str:
    """Write a failed step into the folder of its run; says how to replay it, or why it could not be written.

    Of several ranks the first writes, and `model` has the whole weights.

    `scale` multiplied the loss ahead of the backward pass; 0: it was an evaluation, and there was none.
    """
    home, command = run / "failed", f"python -m scripts.replay {run}"
    about = {"step": step, "culprit": culprit, "loss_scale": scale, "replay": command}
    text = json.dumps(about | {"config": config.model_dump()}, indent=1)
    tensors = {name: part.contiguous() for name, part in batch._asdict().items() if part is not None}
    temporary = home / "tmp"
    if not is_first():
        return f"; to see it again: {command}"
    try:
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()  # not its parents: a run folder that is gone is not made anew
        temporary.mkdir()
        save_file(tensors, temporary / "batch.safetensors")
        save_file({name: p.detach() for name, p in model.named_parameters()}, temporary / "model.safetensors")
        (temporary / "failed.json").write_text(text, encoding="utf-8")
        for path in temporary.iterdir():
            to_disk(path)
        temporary.rename(path_of(home, step))
    except (OSError, SafetensorError) as error:
        shutil.rmtree(home, ignore_errors=True)  # of a full disk it may be the rest
        return f"; its batch could not be kept: {error}"
    return f"; to see it again: {command}"


def replay(folder: Path, precision: str | None) -> tuple[dict[str, Any], dict[str, tuple[float, int]]]:
    """Repeat the failed step of a run as it was, but uncompiled, or in another `precision`.

    Returns what `failed.json` says with `first`, the first tensor that is not finite (None: all are), and for
    each parameter, output and gradient, in the order in which they come, the largest magnitude of what is
    finite and how many numbers are not, over all micro-steps of all ranks.

    Raises `UserError` where no step failed, or what is kept of it is damaged.
    """
    path, about, c, model, batch = _read(folder)
    scale, seed = about["loss_scale"], seed_for(c.run.seed, "dropout", about["step"])
    found, first = dict[str, tuple[float, int]](), list[str]()

    def note(name: str, tensor: Tensor) -> None:
        (largest, count), finite = found.get(name, (0.0, 0)), tensor.isfinite()
        magnitude = tensor.detach().where(finite, 0).abs().max().item()
        found[name] = max(largest, magnitude), count + int((~finite).sum())
        if not finite.all():
            first.append(name)

    precision = precision or c.train.precision
    model.to(choose_device(c.run.device)).compute_in(PRECISIONS[precision]).train(scale > 0)
    losses = partial(micro_losses, to_device(batch, model.device), c.train.batch_size, seed)
    with torch.set_grad_enabled(scale > 0), watched(model, note):
        for rank in range(ranks := (c.train.ranks or 1) if scale > 0 else 1):  # of an evaluation one has all
            for loss in losses(ranks, rank, model):
                note("the loss", loss)
                if scale > 0:
                    (loss * scale).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            note(f"gradient of {place(name)}", parameter.grad / scale)
    return about | {"path": path, "precision": precision, "first": next(iter(first), None)}, found


def _read(folder: Path) -> tuple[Path, dict[str, Any], Config, GPT, Batch]:
    if not (steps := steps_in(folder / "failed")):
        raise UserError(f"{folder} has no failed step: none of its steps met a number that was not finite")
    path = path_of(folder / "failed", steps[-1])
    try:
        about = read_json(path / "failed.json")
        about |= {"loss_scale": float(about["loss_scale"]), "step": int(about["step"])}
        c = validate(about["config"])
        batch = Batch(**{name: one.read() for name, one in open_tensors(path / "batch.safetensors").items()})
        ids = torch.cat([batch.inputs_BT.flatten(), batch.targets_BT[batch.targets_BT != IGNORED]])
        V, T = load_tokenizer(folder / "tokenizer.json").vocab_size, c.model.context_length
        kinds = {(part.shape, part.dtype) for part in batch if part is not None}
        alike = kinds == {((len(batch.inputs_BT), T), torch.int64)}
        if not (alike and ids.min() >= 0 and ids.max() < V):
            raise ValueError("its batch is none of this model")
        refuse_other(path, c.model, V)
        model = GPT(c.model, V)
        load_weights(path, model, finite=False)
    except (UserError, OSError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    return path, about, c, model, batch
