"""The decoder: embedding, blocks of attention and MLP on a residual stream, head, initialisation."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import Model as ModelConfig
from model.attention import CausalSelfAttention
from model.cache import KVCache, LayerCache
from model.layers import Linear, make_norm


class MLP(nn.Module):
    """`W_out act(W_in x)`; relu2 is the squared ReLU of So et al. 2021 (2109.08668), gelu_tanh that of GPT-2.

    swiglu: `W_out (silu(W_gate x) * W_in x)`, three matrices (Shazeer 2020, 2002.05202).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.d_mlp
        self.W_in = Linear(config.d_model, config.d_mlp, config.bias)
        self.W_out = Linear(config.d_mlp, config.d_model, config.bias)
        gated = config.mlp == "swiglu"
        self.W_gate = Linear(config.d_model, config.d_mlp, config.bias) if gated else None
        self.squared_relu = config.mlp == "relu2"
        self.gelu = nn.GELU("tanh" if config.mlp == "gelu_tanh" else "none")

    def forward(self, x_BTC: Tensor) -> Tensor:
        """`B x T x C` to `B x T x C`."""
        hidden = self.W_in(x_BTC)
        if self.W_gate is not None:
            return self.W_out(F.silu(self.W_gate(x_BTC)) * hidden)
        return self.W_out(F.relu(hidden).square() if self.squared_relu else self.gelu(hidden))


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))` unless the model is attention only."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.attention_norm, self.attention = make_norm(config), CausalSelfAttention(config, layer)
        self.has_mlp = config.mlp != "none"
        if self.has_mlp:
            self.mlp_norm, self.mlp = make_norm(config), MLP(config)

    def forward(
        self, x_BTC: Tensor, cache: LayerCache | None = None, segment_BT: Tensor | None = None
    ) -> Tensor:
        """The residual stream after this block."""
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC), cache, segment_BT))
        return x_BTC + self.dropout(self.mlp(self.mlp_norm(x_BTC))) if self.has_mlp else x_BTC


class GPT(nn.Module):
    """A decoder-only transformer; `generator` draws the initial weights, one of seed 0 by default.

    They are drawn on the CPU, the same for every device that the model is moved to.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, generator: torch.Generator | None = None):
        super().__init__()
        self.config = config
        self.token_embedding = _embedding(vocab_size, config.d_model)
        learned = config.position == "learned"
        self.position_embedding = _embedding(config.context_length, config.d_model) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.final_norm = make_norm(config)
        self.head = Linear(config.d_model, vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.token_embedding.weight
        self._initialise(generator or torch.Generator().manual_seed(0))

    def forward(
        self, tokens_BT: Tensor, cache: KVCache | None = None, segment_BT: Tensor | None = None
    ) -> Tensor:
        """Next-token logits `B x T x V`, float32; the tokens go on from those in `cache` and join them.

        `segment_BT` as for `hidden`.
        """
        return self.logits(self.hidden(tokens_BT, cache, segment_BT))

    def hidden(
        self, tokens_BT: Tensor, cache: KVCache | None = None, segment_BT: Tensor | None = None
    ) -> Tensor:
        """The residual stream after the last block, `B x T x C`.

        `segment_BT`, for whole texts without a cache: the document of each token, -1 for padding. Attention
        stays inside a document; learned positions count from the start of the row all the same.
        """
        x_BTC = self.embed(tokens_BT, cache.place(tokens_BT.size(1)) if cache else 0)
        layers = cache.layers if cache else [None] * len(self.blocks)
        for block, layer in zip(self.blocks, layers, strict=True):
            x_BTC = block(x_BTC, layer, segment_BT)
        return x_BTC

    def embed(self, tokens_BT: Tensor, first: int = 0) -> Tensor:
        """The residual stream before the first block, `B x T x C`; tokens stand at places from `first` on."""
        x_BTC = self.token_embedding(tokens_BT)
        if self.position_embedding is not None:
            x_BTC = x_BTC + self.position_embedding.weight.narrow(0, first, tokens_BT.size(1))
        if self.config.embed_norm:
            x_BTC = F.rms_norm(x_BTC, (self.config.d_model,))
        return self.dropout(x_BTC)

    def logits(self, x_BTC: Tensor) -> Tensor:
        """Of any places of the last residual stream: those of many places at once are large."""
        logits_BTV, cap = self.head(self.final_norm(x_BTC)).float(), self.config.logit_softcap
        return cap * torch.tanh(logits_BTV / cap) if cap else logits_BTV

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.token_embedding.weight.device

    def attentions(self) -> list[CausalSelfAttention]:
        """The attention of each layer, in order."""
        return [module for module in self.modules() if isinstance(module, CausalSelfAttention)]

    def compute_in(self, dtype: torch.dtype) -> "GPT":
        """Let the linear layers multiply in `dtype`; weights, residual stream and attention stay float32."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.compute_dtype = dtype
        return self

    def num_parameters(self) -> int:
        """All trained numbers, a tied head counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self) -> float:
        """Of training: `6 N + 12 L H D keys`, forward and backward, a multiplication and a sum being two.

        N parameters without input and position embeddings, the head included; `keys` is how many a query sees
        on average, its own counted half: T / 2 in a full context, w - w^2 / (2 T) with a window w.
        """
        c, N = self.config, self.num_parameters()
        assert c.d_head is not None
        N -= 0 if self.position_embedding is None else self.position_embedding.weight.numel()
        N -= 0 if c.tie_embeddings else self.token_embedding.weight.numel()
        w, T = c.window or c.context_length, c.context_length
        return 6 * N + 12 * c.n_layer * c.n_head * c.d_head * (w - w**2 / (2 * T))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Evaluation mode without gradients; every module gets its mode back, also after an error."""
        modes = {module: module.training for module in self.modules()}
        try:
            with torch.no_grad():
                self.eval()
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode

    def _initialise(self, generator: torch.Generator) -> None:
        """gpt2: N(0, 0.02), residual projections divided by sqrt(2 n_layer) (Radford et al. 2019).

        zero_residual: embeddings N(0, 1), residual projections and head 0, so that every block starts as the
        identity and every prediction as uniform; other matrices N(0, 1 / fan_in).
        """
        gpt2 = self.config.init == "gpt2"
        for name, parameter in self.named_parameters():
            residual = name.endswith(("W_o.weight", "W_out.weight"))
            if parameter.dim() == 1:
                nn.init.constant_(parameter, float("norm.weight" in name))  # gains 1, biases 0
                continue
            if gpt2:
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02
            elif residual or name == "head.weight":
                std = 0.0
            else:
                std = 1.0 if "embedding" in name else parameter.size(1) ** -0.5
            nn.init.normal_(parameter, 0.0, std, generator)


def _embedding(rows: int, width: int) -> nn.Embedding:
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))
