"""Rows in blocks: the definition applied to a slice of queries at a time, in O(block * S) memory.

Plain PyTorch, any device, every option. When gradients are needed each block is recomputed in the backward pass, so
that training holds one block of weights at a time too.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.backends import naive

ROWS = 128


def row_blocks(T: int, S: int, window: int | None, rows: int = ROWS) -> Iterator[tuple[slice, slice]]:
    """Slices of queries and of the keys they can see. Bottom-right alignment holds in each pair of slices."""
    for start in range(0, T, rows):
        stop = min(start + rows, T)
        first_key = 0 if window is None else max(0, S - T + start - window + 1)
        yield slice(start, stop), slice(first_key, S - T + stop)


def attend(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sink_H: Tensor | None = None,
    segment: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention as in `model.backends`; O(ROWS * S) memory, forward and backward."""

    def block(
        q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, segment: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        options = {
            "scale": scale,
            "window": window,
            "sink_H": sink,
            "segment": segment,
            "dropout_p": dropout_p,
        }
        out, lse = naive.attend(q, k, v, **options, return_lse=True)  # type: ignore[arg-type]
        assert lse is not None
        return out, lse

    outs, lses = [], []
    for queries, keys in row_blocks(q_BHTD.size(2), k_BGSD.size(2), window):
        # The last key of the slice is the last query's own position, which is what `own` ends with.
        own = None if segment is None else segment[:, keys]
        inputs = q_BHTD[:, :, queries], k_BGSD[:, :, keys], v_BGSD[:, :, keys], sink_H, own
        out, lse = (
            checkpoint(block, *inputs, use_reentrant=False) if torch.is_grad_enabled() else block(*inputs)
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2) if return_lse else None
