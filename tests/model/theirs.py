"""Small random models of the package transformers, and GGUF files as llama.cpp writes them."""

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

VOCAB = 64
BASES: dict[str, tuple[type, dict[str, Any]]] = {
    "gpt2": (GPT2Config, {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 40}),
    "llama": (
        LlamaConfig,
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "hidden_size": 64,
            "intermediate_size": 96,
            "max_position_embeddings": 40,
        },
    ),
}


def empty(family: str, **keys: Any) -> PreTrainedModel:
    """With weights that are yet to come."""
    config = BASES[family][0](**{"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, **keys})
    with torch.random.fork_rng():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def theirs(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Every parameter drawn from N(0, 0.2), gains around 1, so that no part is at zero."""
    model = empty(family, **BASES[family][1] | changes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name or "ln_" in name), 0.2, generator=generator)
    return model


def logits(model: torch.nn.Module, tokens_BT: Tensor) -> Tensor:
    """Of either kind of model, without gradients."""
    with torch.no_grad():
        out = model(tokens_BT)
    return out if isinstance(out, Tensor) else out.logits


def write_gguf(path: Path, model: PreTrainedModel, **types: GGMLQuantizationType) -> Path:
    """As llama.cpp converts it; matrices whose names there have a key of `types` in them are of that type."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_embedding_length(config.hidden_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "llama":
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    arch = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[config.model_type]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        values = tensor.float().numpy()
        if ".q_proj." in name:
            values = permuted(values, config.num_attention_heads)
        if ".k_proj." in name:
            values = permuted(values, config.num_key_value_heads)
        if ".c_" in name and name.endswith("weight"):
            values = values.T.copy()
        module, part = name.rsplit(".", 1)
        there = f"{names.get_name(module)}.{part}"
        kind = next((kind for key, kind in types.items() if key in there and values.ndim == 2), None)
        if kind is None:
            writer.add_tensor(there, values)
        else:
            writer.add_tensor(there, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row i of the first half of a head and row i of the second become neighbours."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
