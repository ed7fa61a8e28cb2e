"""The forward pass written out once more from the weights, in float64, with none of the model's own parts."""

import math

import pytest
import torch
from torch import Tensor

from model.transformer import GPT
from tests.model.definition import attention_layer, rms_normed
from tests.model.models import KINDS, build_random, tokens


class ByHand:
    """Logits of `model` for some tokens."""

    def __init__(self, model: GPT):
        self.c = model.config
        self.weights = {name: x.double() for name, x in model.state_dict().items()}

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def norm(self, x: Tensor, name: str) -> Tensor:
        if self.c.norm == "rmsnorm":
            x = rms_normed(x)
        else:
            x = x - x.mean(-1, keepdim=True)
            x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x * self.weights.get(f"{name}.weight", 1.0) + self.weights.get(f"{name}.bias", 0.0)

    def attend(self, x_BTC: Tensor, name: str) -> Tensor:
        own = {key.removeprefix(f"{name}."): x for key, x in self.weights.items() if key.startswith(name)}
        return attention_layer(self.c, own, x_BTC).out_BTC

    def mlp(self, x_BTC: Tensor, name: str) -> Tensor:
        hidden = self.linear(x_BTC, f"{name}.W_in")
        if self.c.mlp == "swiglu":
            gate = self.linear(x_BTC, f"{name}.W_gate")
            return self.linear(hidden * gate / (1 + torch.exp(-gate)), f"{name}.W_out")
        gelu = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        return self.linear(gelu if self.c.mlp == "gelu" else hidden.clamp(min=0) ** 2, f"{name}.W_out")

    def logits(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.weights["token_embedding.weight"][tokens_BT]
        if self.c.position == "learned":
            x_BTC = x_BTC + self.weights["position_embedding.weight"][: tokens_BT.size(1)]
        if self.c.embed_norm:
            x_BTC = rms_normed(x_BTC)
        for block in (f"blocks.{layer}" for layer in range(self.c.n_layer)):
            x_BTC = x_BTC + self.attend(self.norm(x_BTC, f"{block}.attention_norm"), f"{block}.attention")
            if self.c.mlp != "none":
                x_BTC = x_BTC + self.mlp(self.norm(x_BTC, f"{block}.mlp_norm"), f"{block}.mlp")
        logits_BTV = self.linear(self.norm(x_BTC, "final_norm"), "head")
        cap = self.c.logit_softcap
        return cap * torch.tanh(logits_BTV / cap) if cap else logits_BTV


@pytest.mark.parametrize("changes", [{}, {"bias": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_formulas(kind: str, changes: dict) -> None:
    model = build_random(kind, **changes)
    expected = ByHand(model).logits(tokens(3, 32))
    bound = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(model(tokens(3, 32)).double(), expected, atol=bound, rtol=0)
