"""The attention weights of one layer, row by row: exact on fused kernels, without the T x T matrix.

Two ways to the same numbers. `Rows` uses the kernel's own log-sum-exp and O(T D) memory; `ExplicitRows`
builds the weights, a block of rows at a time. Notation: `A[i,j]` weight of query i on key j, `s[i,j]` scaled
score, c the scale, `lse[i]` the log-sum-exp of row i, a sink logit included.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from model.attention import Observation
from model.backends import BACKENDS, blocks, naive

SHARPEN = 2.0**20  # lse(beta s) / beta is the row maximum, at most log(T) / beta too high


class Rows:
    """What a statistic sees of one layer on one probe: query positions `i`, the repeat's `block_length`.

    Values are B x H x T, a number per query, from q, k and lse alone. Keys are taken relative to key 0, which
    leaves softmax as it is and keeps s small.
    """

    def __init__(self, seen: Observation, block_length: int | None = None):
        self.seen, self.block_length, self.scale = seen, block_length, seen.scale
        self.q, self.k, self.lse_BHT = seen.q_BHTD.float(), seen.k_BGSD.float(), seen.lse_BHT.float()
        self.i = torch.arange(self.q.size(2), device=self.q.device)
        self.masks: dict[str, Any] = {"window": seen.window, "segment": seen.segment}
        self.sees_BHT = self.lse_BHT != -naive.INF  # rows that see nothing are skipped by all means
        self.k_relative = self.k - self.k[:, :, :1]
        self.shift_BHT = self._dot(self.k[:, :, :1])
        self.lse_relative = self.lse_BHT - self.shift_BHT

    def weight(self, key_T: Tensor) -> Tensor:
        """`A[i, key_T[i]] = exp(c q_i . k'_j - lse'_i)`, 0 where the query does not see that key."""
        score_BHT = self._relative_score(key_T)
        return torch.where(score_BHT == -naive.INF, 0.0, (score_BHT - self.lse_relative).exp())

    def is_largest(self, key_T: Tensor) -> Tensor:
        """Whether the query sees no key with a larger weight than `key_T[i]`; equal ones count."""
        score_BHT, largest_BHT = self._relative_score(key_T) + self.shift_BHT, self.max_logit()
        return score_BHT >= largest_BHT - _tolerance(largest_BHT)

    def entropy(self) -> Tensor:
        """In nats, a sink logit being one more outcome: `lse - c q_i . mean key`.

        The mean key is the same kernel once more, with the keys in place of the values.
        """
        sink_H = self.seen.sink_H
        # A sink stays at its logit b while keys move, so with one the kernel must see the original keys.
        keys = self.k_relative if sink_H is None else self.k
        mean_key, _ = self._attend(keys, self.scale, sink_H)
        entropy_BHT = self.lse_relative - self.scale * (self.q * mean_key).sum(-1)
        if sink_H is not None:  # its weight exp(b - lse) times (b - c q_i . k_0)
            sink_HT = sink_H.float()[None, :, None]
            entropy_BHT -= (sink_HT - self.lse_BHT).exp() * (sink_HT - self.shift_BHT)
        # Cancellation leaves tiny negatives; anything beyond rounding stays visible.
        rounding = 1e-6 * self.lse_relative.abs().clamp(min=10.0)
        return torch.where(entropy_BHT.abs() <= rounding, entropy_BHT.clamp(min=0.0), entropy_BHT)

    def max_logit(self) -> Tensor:
        """The largest `s[i,j]`, `lse(beta s) / beta` with a large beta."""
        return self._max_logit

    @cached_property
    def _max_logit(self) -> Tensor:
        return self._attend(self.k_relative, SHARPEN * self.scale, None)[1] / SHARPEN + self.shift_BHT

    def log_outcomes(self) -> Tensor:
        """Log of the number of keys a query sees, one more with a sink: the log-sum-exp of equal scores."""
        zero, sink_H = torch.zeros_like(self.q), self.seen.sink_H
        no_sink = None if sink_H is None else torch.zeros_like(sink_H)
        attend = BACKENDS[self.seen.backend]
        return attend(zero, zero, zero, scale=1.0, sink_H=no_sink, return_lse=True, **self.masks)[1]

    def mean(
        self, values_BHT: Tensor, first: int = 0, only: Tensor | bool = True, axes: Any = (0, 2)
    ) -> Tensor:
        """Mean over all queries `i >= first` that see something, and are in `only`: one number per head.

        NaN where there is none. `axes=2` keeps the sequences apart: B x H. Always on the CPU, in float64.
        """
        counted_BHT = (self.sees_BHT & (self.i >= first) & only).cpu()
        return torch.where(counted_BHT, values_BHT.cpu().double(), 0.0).sum(axes) / counted_BHT.sum(axes)

    def _relative_score(self, key_T: Tensor) -> Tensor:
        """`c q_i . k'_j` of key `key_T[i]`, -inf where the query does not see it."""
        key_T, window, segment = key_T.expand_as(self.i), self.seen.window, self.seen.segment
        visible = (key_T >= 0) & (key_T <= self.i) & (key_T > self.i - (window or len(self.i)))
        key_T = key_T.clamp(0, len(self.i) - 1)
        if segment is not None:
            visible = (visible & (segment[:, key_T] == segment) & (segment >= 0)).unsqueeze(1)
        return torch.where(visible, self._dot(self.k_relative[:, :, key_T]), -naive.INF)

    def _dot(self, k_BGSD: Tensor) -> Tensor:
        """`c q_i . k_i`, keys repeated over their group of query heads."""
        group = self.q.size(1) // k_BGSD.size(1)
        return self.scale * (self.q * k_BGSD.repeat_interleave(group, dim=1)).sum(-1)

    def _attend(self, keys: Tensor, scale: float, sink_H: Tensor | None) -> tuple[Tensor, Tensor]:
        options = {"scale": scale, "sink_H": sink_H, "return_lse": True, **self.masks}
        return BACKENDS[self.seen.backend](self.q, keys, self.k_relative, **options)


class ExplicitRows(Rows):
    """From the weights themselves, a block of queries at a time: the definitions as they are written."""

    def weight(self, key_T: Tensor) -> Tensor:
        """Read off the matrix."""
        wanted_T1 = key_T.expand_as(self.i).unsqueeze(1)
        return self._each(
            lambda s, A, queries, keys: torch.where(wanted_T1[queries] == self.i[keys], A, 0.0).sum(-1)
        )

    def is_largest(self, key_T: Tensor) -> Tensor:
        """Read off the scores, with the same tolerance: rounding must not break ties."""
        wanted_T1 = key_T.expand_as(self.i).unsqueeze(1)

        def read(s: Tensor, A: Tensor, queries: slice, keys: slice) -> Tensor:
            largest = s.amax(-1, keepdim=True)
            return ((wanted_T1[queries] == self.i[keys]) & (s >= largest - _tolerance(largest))).any(-1)

        return self._each(read)

    def entropy(self) -> Tensor:
        """`sum_j entr(A[i,j])`, and the sink's own term."""
        entropy_BHT, sink_H = self._each(lambda s, A, *_: torch.special.entr(A).sum(-1)), self.seen.sink_H
        if sink_H is None:
            return entropy_BHT
        return entropy_BHT + torch.special.entr((sink_H.float()[None, :, None] - self.lse_BHT).exp())

    def max_logit(self) -> Tensor:
        """The largest score of each row."""
        return self._each(lambda s, *_: s.amax(-1))

    def _each(self, read: Callable[..., Tensor]) -> Tensor:
        """`read(scores, weights, queries, keys)` of each block of rows, side by side."""
        segment, window, T, parts = self.seen.segment, self.seen.window, len(self.i), []
        for queries, keys in blocks.row_blocks(T, T, window):
            own = None if segment is None else segment[:, keys]
            s_BHTS = naive.scores(self.q[:, :, queries], self.k[:, :, keys], self.scale, window, own)
            parts.append(read(s_BHTS, naive.softmax(s_BHTS, self.seen.sink_H)[0], queries, keys))
        return torch.cat(parts, dim=-1)


def _tolerance(largest: Tensor) -> Tensor:
    """What float32 and `SHARPEN` may add to the largest score."""
    return 1e-5 * largest.abs().clamp(min=1.0)


def rows_of(seen: Observation, block_length: int | None = None) -> Rows:
    """The way that fits the backend: lse on sdpa, the weights themselves on naive and blocks."""
    return (Rows if seen.backend == "sdpa" else ExplicitRows)(seen, block_length)
