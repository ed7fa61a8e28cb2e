"""Published models from a folder of Hugging Face's or a GGUF file: a tensor at a time, never unpickled."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from configs import UserError
from configs.cli import validate
from configs.files import read_json
from configs.gguf_file import read_gguf
from configs.schema import Model as ModelConfig
from configs.screen import foreign, looks
from model.interop import FAMILIES, fill, full, read_config, refuse_long, refuse_other
from model.tensors import Stored, open_tensors
from model.transformer import GPT

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

GGUF_KEYS = {"attention.layer_norm_epsilon": "layer_norm_epsilon"}  # besides those that both families have
GGUF_KEYS |= {"attention.sliding_window": "sliding_window", "expert_count": "num_local_experts"}


@dataclass(frozen=True)
class Published:
    """A published model of which only the description has been read; `stored` goes by their names."""

    config: ModelConfig
    vocab_size: int
    stored: dict[str, Stored]

    def fill(self, model: GPT) -> None:
        """Copy the weights into a model of this shape or, in its positions, of a part of it."""
        options = looks("reading weights: {n_fmt} of {total_fmt} tensors")
        bar = tqdm(self.stored.items(), "reading weights", unit=" tensors", delay=2, leave=False, **options)
        fill(model, ((name, stored.read()) for name, stored in bar))

    def load(self, context_length: int | None = None) -> GPT:
        """The model, in evaluation mode; `UserError` for more context than it has."""
        own = self.config.context_length
        if (asked := context_length or own) > own:
            raise UserError(f"context_length {asked:,} asked; the model has {own:,}")
        config = validate({"model": self.config.model_dump() | {"context_length": asked}}).model
        refuse_long(config)
        model = GPT(config, self.vocab_size)
        self.fill(model)
        return model.eval()


def is_published(path: Path) -> bool:
    """Whether it is a file or a folder with a `config.json`; a run has a `config.yaml`."""
    return path.is_file() or (path / "config.json").is_file()


def load_published(path: str | Path, context_length: int | None = None) -> GPT:
    """The model of a folder with `config.json` and safetensors, or of a GGUF file, float32, for evaluation.

    `context_length` narrows what it can read. Raises `UserError` for what cannot be read, has parts that our
    model lacks, or has less context.
    """
    try:
        return open_published(Path(path)).load(context_length)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def open_published(path: Path) -> Published:
    """Read what a model is, and check that its files hold all of it, without memory for the weights.

    Raises `UserError`, which does not name `path`.
    """
    if not is_published(path):
        raise UserError("it is neither a Hugging Face folder, with a config.json, nor a GGUF file")
    config, stored = _folder(path) if path.is_dir() else _gguf(path)
    model, vocab_size = read_config(config)
    refuse_other(model, vocab_size, config, {name: one.shape for name, one in stored.items()})
    return Published(model, vocab_size, stored)


def _folder(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    config, stored = _json(path / "config.json"), dict[str, Stored]()
    for name in _files(path):
        stored |= open_tensors(path / name)
    return config, stored


def _files(path: Path) -> list[str]:
    """Names of the safetensors in a folder: one, or those of its index, which may name no other place."""
    if (path / "model.safetensors").is_file():
        return ["model.safetensors"]
    if not (path / "model.safetensors.index.json").is_file():
        has_pickle = any(path.glob("*.bin"))
        told = "; *.bin is pickle, which runs what is in it: convert it to safetensors" if has_pickle else ""
        raise UserError(f"there is no model.safetensors{told}")
    names = _json(path / "model.safetensors.index.json").get("weight_map")
    names = sorted({str(name) for name in names.values()}) if isinstance(names, dict) else []
    there = {file.name for file in path.iterdir() if file.is_file()}
    odd = [name for name in names if name not in there]
    if odd or not names:
        raise UserError(f"model.safetensors.index.json must name files of its folder, not {foreign(odd)}")
    return names


def _json(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot read {path.name}: {reason}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path.name} must hold keys with values")
    return values


def _gguf(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """The same of a GGUF file."""
    reader = read_gguf(path)
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    config = _gguf_config(reader)
    kind, d_head = config["model_type"], read_config(config)[0].d_head
    family, stored = FAMILIES[kind], dict[str, Stored]()
    names = get_tensor_name_map(next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == kind), 1)
    modules = {names.get_name(full(family, name.replace("N", "0"))): name for name in family.modules.values()}
    for tensor in reader.tensors:
        module, _, part = tensor.name.rpartition(".")
        layer = "".join(re.findall(r"\d+", module))
        theirs = modules.get(re.sub(r"\d+", "0", module), module).replace("N", layer)
        # llama.cpp turns neighbours, transformers and we the halves of a head; nothing is transposed there.
        pairs = (d_head or 0) // 2 if theirs.endswith(("q_proj", "k_proj")) else None
        transposed = ".c_" in theirs and part == "weight"
        shape = [int(size) for size in (tensor.shape if transposed else reversed(tensor.shape))]
        stored[f"{theirs}.{part}"] = Stored(shape, partial(_dequantized, tensor, pairs, transposed))
    return config, stored


def _gguf_config(reader: "GGUFReader") -> dict[str, Any]:
    """What would stand in its `config.json`."""

    def value(key: str) -> Any:
        try:
            found = reader.fields[key].contents() if key in reader.fields else None
        except ValueError:
            raise UserError(f"{foreign(key)} is no text in UTF-8") from None
        return float(str(np.float32(found))) if isinstance(found, float) else found  # 1e-05, as it was meant

    if (kind := str(value("general.architecture"))) not in FAMILIES:
        raise UserError(f"architecture {foreign(kind)} is not known; {' and '.join(FAMILIES)} are")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = {theirs: value(f"{kind}.{key}") for key, theirs in (FAMILIES[kind].gguf | GGUF_KEYS).items()}
    config |= {"model_type": kind, "tie_word_embeddings": "output.weight" not in tensors}
    config |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    if "token_embd.weight" in tensors:
        config["vocab_size"] = int(tensors["token_embd.weight"].shape[-1])
    how, given = value(f"{kind}.rope.scaling.type"), (key for key in reader.fields if ".rope.scal" in key)
    scaled = [key for key in given if not (key.endswith("context_length") or value(key) in ("none", 0, 1))]
    if scaled and how != "none":
        config["rope_type"] = how or "linear"  # as llama.cpp takes it
    if (turned := value(f"{kind}.rope.dimension_count")) is not None:
        config["head_dim"] = config.get("head_dim") or turned
        config["partial_rotary_factor"] = 1.0 if turned == config["head_dim"] else f"{turned} of a head"
    return config


def _dequantized(tensor: "ReaderTensor", pairs: int | None, transposed: bool) -> Tensor:
    from gguf.quants import dequantize

    values = torch.empty(*map(int, reversed(tensor.shape)))
    try:
        for first in range(0, len(values), 1024):  # it holds several times what it gives
            rows = dequantize(tensor.data[first : first + 1024], tensor.tensor_type)
            values[first : first + 1024].copy_(torch.tensor(rows))
    except NotImplementedError:
        raise UserError(f"{foreign(tensor.name)} is of type {tensor.tensor_type.name}: not known") from None
    if pairs:
        values = values.unflatten(0, (-1, pairs, 2)).transpose(1, 2).flatten(0, 2)
    return values.t() if transposed else values
