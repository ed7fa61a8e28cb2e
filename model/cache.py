"""Keys and values of the tokens a model has read, so that each further token costs one position."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from configs import UserError
from configs.schema import Model as ModelConfig
from configs.screen import foreign


class LayerCache:
    """Keys and values of one layer, `B x G x S x D` each, in memory taken once for S places.

    With `n_sink` it rolls: when it is full it makes room for a token by letting go of the first entry behind
    so many. Its keys are those that rotary positions have not turned yet: a place is one within the cache.
    """

    def __init__(
        self, config: ModelConfig, batch: int, places: int, n_sink: int | None, device: torch.device | None
    ):
        assert config.n_kv_head is not None
        assert config.d_head is not None
        shape = (batch, config.n_kv_head, places, config.d_head)
        self.k_BGSD, self.v_BGSD = (torch.empty(shape, device=device) for _ in range(2))
        self.places, self.n_sink, self.rolls, self.length = places, n_sink, n_sink is not None, 0

    def extend(self, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Add T places; returns all keys and values that are kept, as views, oldest first.

        `RuntimeError` where there is no room. Of several tokens each would see another cache: room is made
        for one at a time (`KVCache.place` refuses them before).
        """
        if self.n_sink is not None and self.length == self.places and k_BGTD.size(2) == 1:
            for kept in (self.k_BGSD, self.v_BGSD):
                kept[:, :, self.n_sink : -1] = kept[:, :, self.n_sink + 1 :].clone()
            self.length -= 1
        first, self.length = self.length, self.length + k_BGTD.size(2)
        for kept, new in ((self.k_BGSD, k_BGTD), (self.v_BGSD, v_BGTD)):
            kept.narrow(2, first, new.size(2)).copy_(new)
        return self.k_BGSD[:, :, : self.length], self.v_BGSD[:, :, : self.length]


class KVCache:
    """An empty cache for `batch` sequences, for `model(tokens_BT, cache)` without gradients.

    On `device`, the model's. In float32 the logits equal those of the whole text at once to 1e-5; with other
    linear layers to the rounding of those: one row and many may be summed in another order.

    With `window` it rolls, for texts without end: a token sees the first `n_sink` tokens and the last
    `window`, itself included, at their places within the cache, so that no distance is new to the model
    (StreamingLLM, Xiao et al. 2023, 2309.17453). Raises `UserError` where that cannot be.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int = 1,
        device: torch.device | None = None,
        window: int | None = None,
        n_sink: int = 0,
    ):
        self.rolls = window is not None
        places = config.context_length if window is None else n_sink + window
        if window is not None:
            asked = f"a cache of the last {window} and the first {n_sink} tokens"
            if window < 1 or n_sink < 0:
                raise UserError(f"{asked}: the last must be 1 or more, the first 0 or more")
            if config.position == "learned":
                raise UserError(f"{asked} needs model.position rotary: learned places cannot move up")
            if config.window is not None:
                raise UserError(f"{asked}: the model has model.window {config.window}, and drops the first")
            if places > config.context_length:
                raise UserError(f"{asked} is larger than model.context_length {config.context_length}")
        sink = n_sink if self.rolls else None
        self.layers = [LayerCache(config, batch, places, sink, device) for _ in range(config.n_layer)]

    @property
    def length(self) -> int:
        """Places in use, the same in every layer."""
        return self.layers[0].length

    def place(self, T: int) -> int:
        """Of the first of T further tokens. `RuntimeError` where they have no room, ahead of any change."""
        places, length = self.layers[0].places, self.length
        room = places - length
        if room < T and not (self.rolls and T == 1):
            ways = "give it what `pieces` makes of them" if self.rolls else "`clear` it"
            raise RuntimeError(f"{T} tokens for a cache with room for {room} of {places}: {ways}")
        return length

    def pieces(self, tokens_BT: Tensor) -> Sequence[Tensor]:
        """The tokens as the cache can take them: as many at once as there is room for, then one by one."""
        T = tokens_BT.size(1)
        at_once = min(T, self.layers[0].places - self.length)
        return tokens_BT.split([at_once] * (at_once > 0) + [1] * (T - at_once), dim=1)

    def clear(self) -> None:
        """Forget all places and keep the memory."""
        for layer in self.layers:
            layer.length = 0


def open_cache(kind: str, config: ModelConfig, device: torch.device | None = None) -> KVCache | None:
    """An empty cache for one sequence: `full`, `none`, or one that rolls, `window:256` or `window:256+4`.

    Raises `UserError` for other words and for one that this model cannot have.
    """
    if kind in ("full", "none"):
        return KVCache(config, device=device) if kind == "full" else None
    if not (match := re.fullmatch(r"window:(\d{1,18})(?:\+(\d{1,18}))?", kind, re.ASCII)):
        raise UserError(f"cache {foreign(kind)}: must be full, none, window:W or window:W+N, as window:256+4")
    return KVCache(config, device=device, window=int(match[1]), n_sink=int(match[2] or 0))
