"""Rows in blocks: the definition on a slice of queries at a time, in O(ROWS * S) memory.

Plain PyTorch, any device, every option. When gradients are needed each block is recomputed in the backward
pass, so that training holds one block of weights at a time too.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.backends import naive

ROWS = 128


def row_blocks(T: int, S: int, window: int | None, rows: int = ROWS) -> Iterator[tuple[slice, slice]]:
    """Slices of queries and of the keys they can see: bottom-right alignment holds within each pair."""
    for start in range(0, T, rows):
        stop = min(start + rows, T)
        first_key = 0 if window is None else max(0, S - T + start - window + 1)
        yield slice(start, stop), slice(first_key, S - T + stop)


def attend(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    segment: Tensor | None = None,
    return_lse: bool = False,
    rows: int = ROWS,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention as in `model.backends`; O(rows * S) memory, forward and backward."""
    compute: Callable = partial(naive.attend, return_lse=True, **options)
    if torch.is_grad_enabled():
        compute = partial(checkpoint, compute, use_reentrant=False)
    parts = []
    for queries, keys in row_blocks(q_BHTD.size(2), k_BGSD.size(2), options.get("window"), rows):
        own = None if segment is None else segment[:, keys]
        parts.append(compute(q_BHTD[:, :, queries], k_BGSD[:, :, keys], v_BGSD[:, :, keys], segment=own))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2) if return_lse else None
