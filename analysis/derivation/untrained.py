"""A layer of our attention at its initialisation: what enters its kernel, and what reaches `W_q`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis.capture import observe
from analysis.derivation.finding import Given
from configs.schema import Model
from configs.seeds import seed_for
from data.synthetic import Repeats
from model.attention import Observation
from model.backends import naive
from model.transformer import GPT

TOKENS, CONTEXT, REPETITIONS = 256, 64, 8


class Start(NamedTuple):
    """Of each model and `d_head`: R x W."""

    std_RW: Tensor  # of scaled scores
    jacobian_RW: Tensor  # mean Frobenius norm of that of softmax, over queries that see more than 8 tokens
    dead_RW: Tensor  # share of these where it is below 0.01
    gradient_RW: Tensor  # |dL/dW_q|
    over_c_RW: Tensor  # the same over the scale


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


def start(given: Given, widths: Sequence[int], sigma: float = 1.0, **keys: Any) -> Start:
    """One forward and backward pass of each model on blocks that repeat; `W_q` and `W_k` times `sigma`."""
    found = [[_numbers(given, r, sigma, d_head=d, **keys) for d in widths] for r in range(REPETITIONS)]
    return Start(*torch.tensor(found).permute(2, 0, 1))


def visible(s_BHTS: Tensor) -> Tensor:
    """Scores of queries for themselves and what came before, B x H x pairs."""
    row, column = torch.tril_indices(*s_BHTS.shape[-2:])
    return s_BHTS[:, :, row, column]


def _numbers(given: Given, repetition: int, sigma: float, **keys: Any) -> list[float]:
    gpt = model(given, repetition, **keys)
    W_q, W_k = (gpt.get_parameter(f"blocks.0.attention.{name}.weight") for name in ("W_q", "W_k"))
    W_q.data *= sigma
    W_k.data *= sigma
    inputs_BT, targets_BT, _ = Repeats(torch.arange(TOKENS), None, CONTEXT, given.seed).windows(repetition, 8)
    seen, logits_BTV = run(gpt, inputs_BT)
    loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
    gradient = torch.autograd.grad(loss, W_q)[0].norm()
    s_BHTS = naive.scores(seen.q_BHTD, seen.k_BGSD, seen.scale)
    p_BHTS = naive.softmax(s_BHTS)[0][:, :, 8:]
    second_BHT, third_BHT = p_BHTS.square().sum(-1), p_BHTS.pow(3).sum(-1)
    jacobian_BHT = (second_BHT - 2 * third_BHT + second_BHT.square()).clamp(min=0).sqrt()  # diag(p) - p pᵀ
    dead = (jacobian_BHT < 0.01).float().mean()
    numbers = visible(s_BHTS).std(), jacobian_BHT.mean(), dead, gradient, gradient / seen.scale
    return [number.item() for number in numbers]
