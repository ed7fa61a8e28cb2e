"""Multi-head causal attention from scratch: projections, positions, one call of a backend, observers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import Model as ModelConfig
from model.backends import BACKENDS, choose
from model.cache import LayerCache
from model.layers import Linear
from model.positions import Rotary


@dataclass(frozen=True)
class Observation:
    """What entered the attention kernel of one layer, how it was called, and what the heads gave `W_o`."""

    layer: int
    backend: str
    q_BHTD: Tensor
    k_BGSD: Tensor
    out_BHTD: Tensor
    lse_BHT: Tensor
    scale: float
    W_o: Tensor | None = None  # C x (H D): head h adds W_o[:, h D : (h+1) D] @ out_h to the residual stream
    window: int | None = None
    sink_H: Tensor | None = None
    segment: Tensor | None = None  # B x S


class CausalSelfAttention(nn.Module):
    """`W_o softmax(scale q k^T) v` per head; each key and value head serves a group of query heads.

    `sink`: a logit per head in the denominator of the softmax, 0 (Miller 2023) or learned (gpt-oss 2025),
    gives weight a place to go. `gate`: a head's output times `sigmoid(W_gate x)` of the query's token, one
    number a head (Qiu et al. 2025, 2505.06708). `qk` tied: keys are the queries (Kitaev et al. 2020,
    2001.04451, there with keys of norm 1). `value` key: values are the keys before `qk_norm` and rotation.
    Identity: `x` itself, split into heads, as in the simplified blocks of He and Hofmann 2023 (2311.01906).
    A matrix that is not used is None.

    `observers` get an `Observation` of every forward pass; `analysis.capture.observe` adds and removes them.
    `heads` sees the heads' outputs side by side, `B x T x (H D)`, before `W_o` mixes them: hook there to
    change what a head contributes.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        assert config.d_head is not None
        assert config.n_kv_head is not None
        self.layer, self.d_head, self.qk_norm = layer, config.d_head, config.qk_norm
        self.dropout = config.dropout
        self.backend = choose(config.backend, config.dropout, config.context_length)
        power = {"sqrt": -0.5, "none": 0.0, "linear": -1.0}[config.scale]
        self.scale = (config.qk_gain or 1.0) ** 2 * config.d_head**power
        self.window, self.values_are_keys = config.window, config.value == "key"
        C, H_D, G_D = config.d_model, config.n_head * config.d_head, config.n_kv_head * config.d_head
        self.W_q = Linear(C, H_D, config.bias) if config.qk != "identity" else None
        self.W_k = Linear(C, G_D, config.bias) if config.qk == "separate" else None
        self.W_v = Linear(C, G_D, config.bias) if config.value == "project" else None
        self.W_o = Linear(H_D, C, config.bias)
        theta = config.rope_theta  # None with learned positions
        self.rotary = Rotary(config.d_head, config.context_length, theta) if theta else None
        if config.sink == "learned":
            self.sink_H: Tensor | None = nn.Parameter(torch.zeros(config.n_head))
        else:
            zero_H = torch.zeros(config.n_head) if config.sink == "zero" else None
            self.register_buffer("sink_H", zero_H, persistent=False)
        self.W_gate = Linear(C, config.n_head, bias=False) if config.gate else None
        self.heads = nn.Identity()
        self.observers: list[Callable[[Observation], None]] = []

    def forward(
        self, x_BTC: Tensor, cache: LayerCache | None = None, segment_BT: Tensor | None = None
    ) -> Tensor:
        """Attention output `B x T x C`, before the residual sum; `cache` has the places before these."""
        # Kernels run in float32 whatever the linear layers use: PyTorch's CPU kernel is slower in bfloat16,
        # and the statistics are computed from exactly these tensors. A GPU pays for that: its flash kernels
        # take 16 bits only, and PyTorch falls back on its memory-efficient one.
        q_BHTD = self._heads(self.W_q, x_BTC)
        k_BGSD = q_BHTD if self.W_k is None else self._heads(self.W_k, x_BTC)
        v_BGSD = k_BGSD if self.values_are_keys else self._heads(self.W_v, x_BTC)
        if self.qk_norm:
            q_BHTD, k_BGSD = (F.rms_norm(x, (self.d_head,)) for x in (q_BHTD, k_BGSD))
        moves = cache is not None and cache.rolls  # then a kept key has another place with each token
        if self.rotary is not None and not moves:
            first = cache.length if cache else 0
            q_BHTD, k_BGSD = self.rotary(q_BHTD, first), self.rotary(k_BGSD, first)
        if cache is not None:
            k_BGSD, v_BGSD = cache.extend(k_BGSD, v_BGSD)
        if self.rotary is not None and moves:
            first = k_BGSD.size(2) - q_BHTD.size(2)
            q_BHTD, k_BGSD = self.rotary(q_BHTD, first), self.rotary(k_BGSD)
        options: dict[str, Any] = {"scale": self.scale, "window": self.window}
        options |= {"sink_H": self.sink_H, "segment": segment_BT}
        dropout_p = self.dropout if self.training else 0.0
        attend, wants_lse = BACKENDS[self.backend], bool(self.observers)
        out_BHTD, lse_BHT = attend(
            q_BHTD, k_BGSD, v_BGSD, dropout_p=dropout_p, return_lse=wants_lse, **options
        )
        if self.W_gate is not None:
            out_BHTD = out_BHTD * self.W_gate(x_BTC).float().sigmoid().mT.unsqueeze(-1)
        if self.observers and cache is not None:
            k_BGSD = k_BGSD.clone()  # an observer may keep them, and the cache's own memory is used again
        for observer in self.observers:
            seen = (self.layer, self.backend, q_BHTD, k_BGSD, out_BHTD, lse_BHT)
            observer(Observation(*seen, W_o=self.W_o.weight, **options))
        return self.W_o(self.heads(out_BHTD.transpose(1, 2).flatten(2)))

    def matrices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`W_q`, `W_k`, `W_v` (H x D x C) and `W_o` (H x C x D) of each query head, as they act.

        Without biases. Key and value heads stand again for each query head of their group; a matrix that is
        not there is the identity's rows, or the one that stands in for it.
        """
        H_D, D = self.W_o.weight.size(1), self.d_head
        identity = torch.eye(H_D, device=self.W_o.weight.device)
        q = identity if self.W_q is None else self.W_q.weight
        k = q if self.W_k is None else self.W_k.weight
        v = k if self.values_are_keys else identity if self.W_v is None else self.W_v.weight
        heads = [W.detach().unflatten(0, (-1, D)) for W in (q, k, v)]
        W_q, W_k, W_v = (W.repeat_interleave(H_D // D // len(W), dim=0) for W in heads)
        return W_q, W_k, W_v, self.W_o.weight.detach().unflatten(1, (-1, D)).transpose(0, 1)

    def _heads(self, W: Linear | None, x_BTC: Tensor) -> Tensor:
        projected = x_BTC if W is None else W(x_BTC)
        return projected.unflatten(-1, (-1, self.d_head)).transpose(1, 2).float()
