"""The statistics by their definitions (metrics.md), in float64, from the whole matrix of weights.

One plain sum per query: slow, and without anything that `analysis` computes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model.attention import Observation
from model.backends import BACKENDS
from tests.model.definition import Attention, attention


@dataclass(frozen=True)
class Layer:
    """What enters the attention kernel of one layer; `options` are scale, window, sink_H and segment.

    `gate_BHT`: a factor on what a head gives.
    """

    q_BHTD: Tensor
    k_BGSD: Tensor
    v_BGSD: Tensor
    W_o: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    gate_BHT: Tensor | None = None

    def seen(self, backend: str) -> Observation:
        """What an observer gets to see of it."""
        inputs = self.q_BHTD, self.k_BGSD, self.v_BGSD
        out, lse = BACKENDS[backend](*inputs, **self.options, return_lse=True)
        return Observation(0, backend, *inputs[:2], out, lse, W_o=self.W_o, **self.options)

    def attention(self) -> Attention:
        """Scores and weights in float64."""
        return attention(self.q_BHTD, self.k_BGSD, self.v_BGSD, **self.options)


def entropy(a: Attention) -> Tensor:
    """Sum of -p log p over all outcomes, the sink logit one of them: B x H x T."""
    return -(torch.xlogy(a.A_BHTS, a.A_BHTS).sum(-1) + torch.xlogy(a.a_BHT, a.a_BHT))


def scores(layer: Layer, block_length: int) -> dict[str, Tensor]:
    """Every statistic of every head; each query that sees something counts once."""
    a = layer.attention()
    A, (B, H, T) = a.A_BHTS, a.lse_BHT.shape
    alive_BT = a.seen_BTS.any(-1)
    outcomes_BT = a.seen_BTS.sum(-1) + ("sink_H" in layer.options)

    def mean(value: Callable[[int, int], Any], first: int, counted_BT: Tensor = alive_BT) -> Tensor:
        """Mean of `value(sequence, query)`, H numbers each, over the queries from `first` on that count.

        NaN where none does.
        """
        counted = [value(b, i) for b in range(B) for i in range(first, T) if counted_BT[b, i]]
        return torch.stack(counted).mean(0) if counted else torch.full((H,), torch.nan)

    def stripes(shift: int) -> Tensor:
        """A query of block n, `n s + 1 ... (n + 1) s`, on its place in earlier blocks, moved by `shift`."""
        s = block_length
        block = {i: n for n in range(T) for i in range(n * s + 1, (n + 1) * s + 1)}
        return mean(lambda b, i: sum(A[b, :, i, i - r * s + shift] for r in range(1, block[i] + 1)), s + 1)

    def largest_at(distance: int) -> Tensor:
        """Whether no visible key scores higher than the one `distance` back; equal ones, to 1e-5, count."""

        def holds(b: int, i: int) -> Tensor:
            most_H = a.s_BHTS[b, :, i].amax(-1)
            own_H = a.s_BHTS[b, :, i, i - distance]
            return (own_H >= most_H - 1e-5 * most_H.abs().clamp(min=1)).double()

        return mean(holds, distance + 1)

    entropy_BHT, first_BHT = entropy(a), A[..., 0]
    alive = [b for b in range(B) if alive_BT[b, :64].any()]
    of_sample = [first_BHT[b, :, :64][:, alive_BT[b, :64]].mean(-1) for b in alive]
    W_HCD = torch.stack(layer.W_o.double().chunk(H, dim=1))
    out_BHTD = a.out_BHTD if layer.gate_BHT is None else layer.gate_BHT[..., None] * a.out_BHTD
    added_BHTC = torch.einsum("hcd,bhtd->bhtc", W_HCD, out_BHTD)
    norm_H = mean(lambda b, i: added_BHTC[b, :, i].norm(dim=-1), 0)
    several_BT = alive_BT & (outcomes_BT > 1)
    return {
        "entropy": mean(lambda b, i: entropy_BHT[b, :, i], 1),
        "entropy_normalized": mean(
            lambda b, i: entropy_BHT[b, :, i] / outcomes_BT[b, i].log(), 1, several_BT
        ),
        "sink": mean(lambda b, i: first_BHT[b, :, i], 4),
        "sink_no_bos": mean(lambda b, i: first_BHT[b, :, i], 4),
        "sink_rate": (torch.stack(of_sample) > 0.3).double().mean(0),
        "previous": mean(lambda b, i: A[b, :, i, i - 1], 2),
        "previous2": mean(lambda b, i: A[b, :, i, i - 2], 3),
        "previous_argmax": largest_at(1),
        "previous2_argmax": largest_at(2),
        "current": mean(lambda b, i: A[b, :, i, i], 1),
        "induction": stripes(1),
        "duplicate": stripes(0),
        "max_logit": a.s_BHTS.amax((0, 2, 3)),
        "head_norm": norm_H / norm_H.mean(),
    }
