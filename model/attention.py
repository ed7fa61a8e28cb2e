"""Multi-head causal attention from scratch: projections, positions, one call of a backend, observers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import Model as ModelConfig
from model.backends import BACKENDS, choose
from model.layers import Linear
from model.positions import Rotary


@dataclass(frozen=True)
class Observation:
    """What entered and left the attention kernel of one layer in one forward pass, and how it was called."""

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
        self.scale = (config.qk_gain or 1.0) ** 2 * config.d_head**-0.5
        C, H_D, G_D = config.d_model, config.n_head * config.d_head, config.n_kv_head * config.d_head
        self.W_q, self.W_k, self.W_v = (Linear(C, width, config.bias) for width in (H_D, G_D, G_D))
        self.W_o = Linear(H_D, C, config.bias)
        theta = config.rope_theta  # None with learned positions
        self.rotary = Rotary(config.d_head, config.context_length, theta) if theta else None
        self.heads = nn.Identity()
        self.observers: list[Callable[[Observation], None]] = []

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Attention output `B x T x C`, before the residual sum."""
        # Kernels run in float32 whatever the linear layers use: PyTorch's CPU kernel is slower in bfloat16,
        # and the statistics are computed from exactly these tensors.
        q_BHTD, k_BGSD, v_BGSD = (self._split(W(x_BTC)).float() for W in (self.W_q, self.W_k, self.W_v))
        if self.qk_norm:
            q_BHTD, k_BGSD = (F.rms_norm(x, (self.d_head,)) for x in (q_BHTD, k_BGSD))
        if self.rotary is not None:
            q_BHTD, k_BGSD = self.rotary(q_BHTD), self.rotary(k_BGSD)
        options = {"scale": self.scale, "dropout_p": self.dropout if self.training else 0.0}
        attend = BACKENDS[self.backend]
        out_BHTD, lse_BHT = attend(q_BHTD, k_BGSD, v_BGSD, **options, return_lse=bool(self.observers))
        for observer in self.observers:
            seen = (self.layer, self.backend, q_BHTD, k_BGSD, out_BHTD, lse_BHT, self.scale, self.W_o.weight)
            observer(Observation(*seen))
        return self.W_o(self.heads(out_BHTD.transpose(1, 2).flatten(2)))

    def _split(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.unflatten(-1, (-1, self.d_head)).transpose(1, 2)
