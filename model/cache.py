"""Keys and values of the tokens a model has read, so that each further token costs one position."""

import torch
from torch import Tensor

from configs.schema import Model as ModelConfig


class LayerCache:
    """Keys and values of one layer, `B x G x S x D` each, in memory taken once for a whole context.

    Keys are kept as they are before rotary positions turn them: a place is a place within the cache.
    """

    def __init__(self, config: ModelConfig, batch: int, device: torch.device | None = None):
        assert config.n_kv_head is not None
        assert config.d_head is not None
        shape = (batch, config.n_kv_head, config.context_length, config.d_head)
        self.k_BGSD, self.v_BGSD = (torch.empty(shape, device=device) for _ in range(2))
        self.length = 0

    def extend(self, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Add T places; returns all keys and values so far, as views. `RuntimeError` beyond the context."""
        first, self.length = self.length, self.length + k_BGTD.size(2)
        for kept, new in ((self.k_BGSD, k_BGTD), (self.v_BGSD, v_BGTD)):
            kept.narrow(2, first, new.size(2)).copy_(new)
        return self.k_BGSD[:, :, : self.length], self.v_BGSD[:, :, : self.length]


class KVCache:
    """An empty cache for `batch` sequences, for `model(tokens_BT, cache)` without gradients.

    On `device`, the model's. In float32 the logits equal those of the whole text at once to 1e-5; with other
    linear layers to the rounding of those: one row and many may be summed in another order.
    """

    def __init__(self, config: ModelConfig, batch: int = 1, device: torch.device | None = None):
        self.layers = [LayerCache(config, batch, device) for _ in range(config.n_layer)]

    @property
    def length(self) -> int:
        """Places in use, the same in every layer."""
        return self.layers[0].length

    def clear(self) -> None:
        """Forget all places and keep the memory."""
        for layer in self.layers:
            layer.length = 0
