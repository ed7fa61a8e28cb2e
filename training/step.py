"""The parts of an optimizer step: losses whose gradients add up, and their scaling in fp16."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from data.sources import IGNORED, Batch


def micro_losses(
    batch: Batch, batch_size: int, dropout_seed: int, ranks: int, rank: int, forward: Callable[..., Tensor]
) -> Iterator[Tensor]:
    """Each micro-step's part of the global batch's mean loss per counted target, in nats.

    Those of all ranks, each of which takes the rows rank, rank + ranks ..., sum to it. A micro-step without
    a target is made all the same: other ranks wait for its gradients.
    """
    torch.manual_seed(dropout_seed + rank)  # dropout alone uses the global generator
    counted = (batch.targets_BT != IGNORED).sum().item()
    parts = [part[rank::ranks].split(batch_size) for part in batch if part is not None]
    for x_BT, y_BT, *segment in zip(*parts, strict=True):
        logits_BTV = forward(x_BT, None, *segment)
        yield F.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten(), reduction="sum") / counted


def unscale(scaler: torch.amp.GradScaler, optimizers: list[torch.optim.Optimizer]) -> bool:
    """Take the scale of the loss out of the gradients, and set the next one.

    True if a gradient overflowed: no optimizer may use them, and the next scale is half of this one.
    """
    scale = scaler.get_scale()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    scaler.update()
    return scaler.get_scale() < scale
