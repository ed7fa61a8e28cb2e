"""Loss on the validation part."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from configs.ranks import ALONE, Ranks
from data.sources import IGNORED, Batch
from model.transformer import GPT
from training.devices import to_device


def evaluate(
    model: GPT, batches: Iterable[Batch], bytes_per_token: float, ranks: Ranks = ALONE
) -> dict[str, Any]:
    """Mean loss in nats per token, its standard error over windows (None for one window), bits per byte.

    Of several ranks each has some of the batches, and gets the numbers of all.
    """
    sums, counts = [], []
    with model.reading():
        for number, batch in enumerate(batches):
            counts.append((batch.targets_BT != IGNORED).sum(1))
            sums.append(torch.zeros(len(batch.inputs_BT), dtype=torch.float64))
            if not ranks.has(number):
                continue
            inputs_BT, targets_BT, segment_BT = to_device(batch, model.device)
            logits_BTV = model(inputs_BT, None, segment_BT)
            losses_BT = F.cross_entropy(logits_BTV.mT, targets_BT, reduction="none")  # IGNORED: 0
            sums[-1] += losses_BT.cpu().double().sum(1)  # not every device has float64
    sum_N, count_N = ranks.add(torch.cat(sums)), torch.cat(counts)
    loss = (sum_N.sum() / count_N.sum()).item()
    sem = (sum_N / count_N).std().item() / math.sqrt(len(sum_N)) if len(sum_N) > 1 else None
    return {"loss": loss, "loss_sem": sem, "bits_per_byte": loss / math.log(2) / bytes_per_token}
