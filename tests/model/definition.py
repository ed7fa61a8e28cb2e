"""Attention by its definition, in float64 and with gradients: shares no code with any backend."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Attention(NamedTuple):
    """`A` weights, `s` scores (-inf where the key is not seen), `a` the sink's weight, `seen` the mask."""

    out_BHTD: Tensor
    lse_BHT: Tensor
    A_BHTS: Tensor
    s_BHTS: Tensor
    a_BHT: Tensor
    seen_BTS: Tensor

    @property
    def max_score(self) -> float:
        """Largest |s| of a visible pair."""
        return self.s_BHTS.where(self.s_BHTS > -torch.inf, 0).abs().max().item()

    @property
    def row_bound(self) -> float:
        """How far float32 may be from this in a single row: the rounding of a score, relative to its size."""
        return 1e-6 * max(10.0, self.max_score)


@cache
def visible(T: int, S: int, window: int | None = None, segment: tuple[int, ...] | None = None) -> Tensor:
    """`T x S`: does query t, which stands at position S - T + t, see key j?"""

    def sees(i: int, j: int) -> bool:
        if j > i or (window is not None and j <= i - window):
            return False
        return segment is None or segment[i] == segment[j] != -1

    return torch.tensor([[sees(S - T + t, j) for j in range(S)] for t in range(T)])


def attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sink_H: Tensor | None = None,
    segment: Tensor | None = None,
) -> Attention:
    """Query heads `g r ... g r + r - 1` read key head g."""
    (B, H, T, _), (_, G, S, _) = q_BHTD.shape, k_BGSD.shape
    documents = [None] * B if segment is None else [tuple(row) for row in segment.tolist()]
    seen_BTS = torch.stack([visible(T, S, window, document) for document in documents])
    seen_B1TS = seen_BTS.unsqueeze(1)
    grouped_q = q_BHTD.double().unflatten(1, (G, H // G))
    s = scale * torch.einsum("bgrtd,bgsd->bgrts", grouped_q, k_BGSD.double()).flatten(1, 2)
    s = s.masked_fill(~seen_B1TS, -torch.inf)
    alive_B1T1 = seen_B1TS.any(-1, keepdim=True)
    sink_H111 = torch.full((H, 1, 1), -torch.inf) if sink_H is None else sink_H.double()[:, None, None]
    largest = s.amax(-1, keepdim=True).maximum(sink_H111).where(alive_B1T1, 0).detach()
    terms, sink_term = (s - largest).exp(), (sink_H111 - largest).exp()
    total = (terms.sum(-1, keepdim=True) + sink_term).where(alive_B1T1, 1)
    lse = (largest + total.log()).where(alive_B1T1, -torch.inf).squeeze(-1)
    A, a = terms / total, (sink_term / total).where(alive_B1T1, 0).squeeze(-1)
    out = torch.einsum("bgrts,bgsd->bgrtd", A.unflatten(1, (G, H // G)), v_BGSD.double()).flatten(1, 2)
    return Attention(out, lse, A, s, a, seen_BTS)
