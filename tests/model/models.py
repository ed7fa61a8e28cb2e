"""Small models for tests: the kinds of model worth telling apart, and weights that leave no part at zero."""

from typing import Any

import torch

from configs.schema import Model
from model.transformer import GPT

VOCAB = 11

KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "position": "learned",
        "norm": "layernorm",
        "mlp": "gelu",
        "bias": True,
        "tie_embeddings": True,
    },
    "modern": {
        "norm": "rmsnorm",
        "norm_gain": False,
        "mlp": "relu2",
        "embed_norm": True,
        "qk_norm": True,
        "qk_gain": 1.2,
        "logit_softcap": 15.0,
        "init": "zero_residual",
    },
    "grouped": {"norm": "rmsnorm", "n_kv_head": 2, "d_mlp": 20, "rope_theta": 100.0},
    "gated": {"n_kv_head": 2, "sink": "learned", "gate": True},
    "studied": {
        "qk": "tied",
        "value": "key",
        "scale": "linear",
        "mlp": "swiglu",
        "window": 9,
        "sink": "zero",
    },
    "bare": {"qk": "identity", "value": "identity", "scale": "none", "mlp": "swiglu", "norm": "rmsnorm"},
    "attention only": {"position": "learned", "mlp": "none", "n_kv_head": 1, "d_head": 5, "qk_norm": True},
}


def build(kind: str = "grouped", seed: int = 0, vocab_size: int = VOCAB, **changes: Any) -> GPT:
    """Two layers of four heads as they are initialised."""
    keys = {"n_layer": 2, "n_head": 4, "d_model": 24, "context_length": 32, **KINDS[kind], **changes}
    return GPT(Model(**keys), vocab_size, torch.Generator().manual_seed(seed))


def build_random(kind: str = "grouped", seed: int = 0, std: float = 0.3, **changes: Any) -> GPT:
    """The same with every parameter drawn from N(0, std)."""
    model = build(kind, seed, **changes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, std, generator=generator)
    return model


def tokens(B: int, T: int, seed: int = 0) -> torch.Tensor:
    """Random token ids."""
    return torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(seed))
