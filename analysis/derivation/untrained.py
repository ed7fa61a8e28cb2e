"""A layer of our attention at its initialisation, and what entered its kernel."""

from typing import Any

import torch
from torch import Tensor, nn

from analysis.capture import observe
from analysis.derivation.finding import Given
from configs.schema import Model
from configs.seeds import seed_for
from model.attention import Observation
from model.transformer import GPT

TOKENS, CONTEXT, REPETITIONS = 256, 64, 8


def model(given: Given, repetition: int, **keys: Any) -> GPT:
    """One head without an MLP whose queries and keys have entries of variance 1, unless `keys` change that.

    `init: zero_residual` draws matrices from N(0, 1 / fan_in); those that it leaves at 0, so that no gradient
    would reach `W_q`, are drawn too. Equal repetitions of equal shapes have equal weights.
    """
    defaults: dict[str, Any] = {"n_layer": 1, "n_head": 1, "d_model": 256, "context_length": CONTEXT}
    generator = torch.Generator().manual_seed(seed_for(given.seed, "model", repetition))
    gpt = GPT(
        Model(**{**defaults, "mlp": "none", "norm": "rmsnorm", "init": "zero_residual", **keys}),
        TOKENS,
        generator,
    )
    for parameter in gpt.parameters():
        if parameter.dim() == 2 and not parameter.any():
            nn.init.normal_(parameter, 0.0, parameter.size(1) ** -0.5, generator)
    return gpt


def run(gpt: GPT, tokens_BT: Tensor) -> tuple[Observation, Tensor]:
    """What its first layer's kernel was given and gave, and the logits `B x T x V`."""
    seen: list[Observation] = []
    with observe(gpt, seen.append):
        logits_BTV = gpt(tokens_BT)
    return seen[0], logits_BTV
