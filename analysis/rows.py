"""The attention weights of one layer, row by row: exact on fused kernels, without the T x T matrix.

Two ways to the same numbers. `FusedRows` uses the kernel's own log-sum-exp and O(T D) memory; `ExplicitRows`
builds the weights, a block of rows at a time. Notation: `A[i,j]` weight of query i on key j, `s[i,j]` scaled
score, c the scale, `lse[i]` the log-sum-exp of row i, a sink logit included.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model.attention import Observation
from model.backends import BACKENDS, blocks, naive

SHARPEN = 2.0**20  # lse(beta s) / beta is the row maximum, at most log(T) / beta too high


class Rows:
    """What a statistic sees of one layer on one probe: query positions `i`, the repeat's `block_length`.

    All results are B x H x T, a number per query. Subclasses give `weight(key_T)`: `A[i, key_T[i]]`, 0 where
    the query does not see that key; `entropy()` in nats, where a sink logit counts as one more outcome; and
    `max_logit()`: the largest `s[i,j]`.
    """

    def __init__(self, seen: Observation, block_length: int | None = None):
        self.seen, self.block_length, self.scale = seen, block_length, seen.scale
        self.q, self.k, self.lse_BHT = seen.q_BHTD.float(), seen.k_BGSD.float(), seen.lse_BHT.float()
        self.i = torch.arange(self.q.size(2), device=self.q.device)
        self.masks: dict[str, Any] = {"window": seen.window, "segment": seen.segment}
        self.sees_BHT = self.lse_BHT != -naive.INF  # rows that see nothing are skipped by all means

    weight: Callable[[Tensor], Tensor]
    entropy: Callable[[], Tensor]
    max_logit: Callable[[], Tensor]

    def log_outcomes(self) -> Tensor:
        """Log of the number of keys each query sees, one more with a sink."""
        if self.seen.segment is None:
            count_T = (self.i + 1).clamp(max=self.seen.window or len(self.i)).float()
        else:  # the log-sum-exp of equal scores is the log of their number
            zero = torch.zeros_like(self.q[:, :1])
            attend = BACKENDS[self.seen.backend]
            count_T = attend(zero, zero, zero, scale=1.0, return_lse=True, **self.masks)[1].exp()
        return (count_T + (self.seen.sink_H is not None)).log().expand_as(self.lse_BHT)

    def mean(self, values_BHT: Tensor, first: int = 0, only: Tensor | bool = True) -> Tensor:
        """Mean over all queries `i >= first` that see something, and are in `only`: one number per head."""
        counted = self.sees_BHT & (self.i >= first) & only
        return torch.where(counted, values_BHT.double(), 0.0).sum((0, 2)) / counted.sum((0, 2))

    def per_sequence(self, values_BHT: Tensor, first: int = 0, stop: int | None = None) -> Tensor:
        """Mean over the queries `first <= i < stop` that see something, B x H; NaN where there is none."""
        counted = self.sees_BHT & (self.i >= first) & (self.i < (stop or len(self.i)))
        return torch.where(counted, values_BHT.double(), 0.0).sum(-1) / counted.sum(-1)

    def _visible(self, key_T: Tensor) -> Tensor:
        """Whether query i sees key `key_T[i]`, broadcastable to B x H x T."""
        visible = (key_T >= 0) & (key_T <= self.i)
        if self.seen.window is not None:
            visible = visible & (key_T > self.i - self.seen.window)
        if self.seen.segment is None:
            return visible
        other_BT = self.seen.segment[:, key_T.clamp(0, len(self.i) - 1)]
        return (visible & (other_BT == self.seen.segment) & (other_BT >= 0)).unsqueeze(1)


class FusedRows(Rows):
    """From q, k and lse alone. Keys are relative to key 0, which leaves softmax as it is and s small."""

    def __init__(self, seen: Observation, block_length: int | None = None):
        super().__init__(seen, block_length)
        self.k_relative = self.k - self.k[:, :, :1]
        self.shift_BHT = self._dot(self.k[:, :, :1])
        self.lse_relative = self.lse_BHT - self.shift_BHT

    def weight(self, key_T: Tensor) -> Tensor:
        """`exp(c q_i . k'_j - lse'_i)`."""
        key_T = key_T.expand_as(self.i)
        score_BHT = self._dot(self.k_relative[:, :, key_T.clamp(0, len(self.i) - 1)])
        return torch.where(self._visible(key_T), (score_BHT - self.lse_relative).exp(), 0.0)

    def entropy(self) -> Tensor:
        """`lse - c q_i . mean key`: the same kernel once more, with the keys in place of the values."""
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
        """`lse(beta s) / beta` with a large beta."""
        return self._attend(self.k_relative, SHARPEN * self.scale, None)[1] / SHARPEN + self.shift_BHT

    def _dot(self, k_BGSD: Tensor) -> Tensor:
        """`c q_i . k_i`, keys repeated over their group of query heads."""
        group = self.q.size(1) // k_BGSD.size(1)
        return self.scale * (self.q * k_BGSD.repeat_interleave(group, dim=1)).sum(-1)

    def _attend(self, keys: Tensor, scale: float, sink_H: Tensor | None) -> tuple[Tensor, Tensor]:
        attend = BACKENDS[self.seen.backend]
        return attend(
            self.q, keys, self.k_relative, scale=scale, sink_H=sink_H, return_lse=True, **self.masks
        )


class ExplicitRows(Rows):
    """From the weights themselves, `rows` queries at a time: the definitions as they are written."""

    def __init__(self, seen: Observation, block_length: int | None = None, rows: int = blocks.ROWS):
        super().__init__(seen, block_length)
        self._rows = rows

    def weight(self, key_T: Tensor) -> Tensor:
        """Read off the matrix."""
        key_T = key_T.expand_as(self.i)

        def take(A_BHTS: Tensor, queries: slice, keys: slice) -> Tensor:
            column_T1 = (key_T[queries] - keys.start).clamp(0, A_BHTS.size(-1) - 1).unsqueeze(1)
            return A_BHTS.gather(-1, column_T1.expand(*A_BHTS.shape[:-1], 1)).squeeze(-1)

        taken = self._each(lambda s, A, lse, queries, keys: take(A, queries, keys))
        return torch.where(self._visible(key_T), taken, 0.0)

    def entropy(self) -> Tensor:
        """`sum_j entr(A[i,j])`, and the sink's own term."""
        entropy_BHT = self._each(lambda s, A, lse, *_: torch.special.entr(A).sum(-1))
        if self.seen.sink_H is None:
            return entropy_BHT
        return entropy_BHT + torch.special.entr(
            (self.seen.sink_H.float()[None, :, None] - self.lse_BHT).exp()
        )

    def max_logit(self) -> Tensor:
        """The largest score of each row."""
        return self._each(lambda s, *_: s.amax(-1))

    def _each(self, read: Callable[..., Tensor]) -> Tensor:
        """`read(scores, weights, lse, queries, keys)` of each block of rows, side by side."""
        segment, window, T = self.seen.segment, self.seen.window, len(self.i)
        parts = []
        for queries, keys in blocks.row_blocks(T, T, window, self._rows):
            own = None if segment is None else segment[:, keys]
            s_BHTS = naive.scores(self.q[:, :, queries], self.k[:, :, keys], self.scale, window, own)
            parts.append(read(s_BHTS, *naive.softmax(s_BHTS, self.seen.sink_H), queries, keys))
        return torch.cat(parts, dim=-1)


def rows_of(seen: Observation, block_length: int | None = None) -> Rows:
    """The way that fits the backend: lse on sdpa, the whole matrix on naive, blocks of rows on blocks."""
    if seen.backend == "sdpa":
        return FusedRows(seen, block_length)
    return ExplicitRows(seen, block_length, seen.q_BHTD.size(2) if seen.backend == "naive" else blocks.ROWS)
