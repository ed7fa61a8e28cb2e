"""The attention weights of one layer, asked for row by row: exact on fused kernels, without the T x T matrix.

Two ways to the same numbers. `FusedRows` uses only the kernel's own log-sum-exp, in O(T D) memory; `ExplicitRows`
builds the weights, a block of rows at a time. Notation: `A[i,j]` weight of query i on key j, `s[i,j]` scaled score,
c the scale, `lse[i]` the log-sum-exp of row i, a sink logit included.
"""

import torch
from torch import Tensor

from model.attention import Observation
from model.backends import BACKENDS, blocks, naive

SHARPEN = 2.0**20  # lse(beta s) / beta is the row maximum, at most log(T) / beta too high


class Rows:
    """What a statistic sees of one layer on one probe. `i` are the query positions, `block_length` the repeat's."""

    def __init__(self, seen: Observation, block_length: int | None = None):
        self.seen, self.block_length = seen, block_length
        self.q, self.lse_BHT, self.scale = seen.q_BHTD.float(), seen.lse_BHT.float(), seen.scale
        self.k = seen.k_BGSD.float()
        self.i = torch.arange(self.q.size(2), device=self.q.device)
        self.sees_BHT = self.lse_BHT > float("-inf")  # rows that see nothing are skipped by all means
        self._options = {"window": seen.window, "segment": seen.segment}

    def weight(self, key_T: Tensor) -> Tensor:
        """`A[i, key_T[i]]` as B x H x T; 0 where the query does not see that key or there is none."""
        raise NotImplementedError

    def entropy(self) -> Tensor:
        """`-sum_j A[i,j] log A[i,j]` in nats as B x H x T; a sink logit counts as one more outcome."""
        raise NotImplementedError

    def max_logit(self) -> Tensor:
        """`max_j s[i,j]` over the visible keys as B x H x T."""
        raise NotImplementedError

    def log_outcomes(self) -> Tensor:
        """Log of the number of keys each query sees, one more with a sink; B x 1 x T or 1 x 1 x T."""
        if self.seen.segment is None:
            count_T = (self.i + 1).clamp(max=self.seen.window or len(self.i)).float()
        else:  # equal scores have the log of their number as log-sum-exp
            zero = torch.zeros_like(self.q[:, :1])
            _, log_count = BACKENDS[self.seen.backend](
                zero, zero, zero, scale=1.0, return_lse=True, **self._options
            )
            count_T = log_count.exp()
        return (count_T + (self.seen.sink_H is not None)).log().expand(self.q.size(0), 1, -1)

    def per_sequence(self, values_BHT: Tensor, first: int = 0, stop: int | None = None) -> Tensor:
        """Mean over the queries `first <= i < stop` that see something, as B x H; NaN where there is none."""
        counted = self.sees_BHT & (self.i >= first) & (self.i < (stop or len(self.i)))
        return values_BHT.double().masked_fill(~counted, float("nan")).nanmean(-1)

    def mean(self, values_BHT: Tensor, first: int = 0) -> Tensor:
        """Mean over sequences and queries `i >= first`, one number per head."""
        return self.per_sequence(values_BHT, first).nanmean(0)

    def _visible(self, key_T: Tensor) -> Tensor:
        """Whether query i sees key `key_T[i]`, broadcastable to B x H x T."""
        visible = (key_T >= 0) & (key_T <= self.i)
        if self.seen.window is not None:
            visible = visible & (key_T > self.i - self.seen.window)
        if self.seen.segment is None:
            return visible
        other_BT = self.seen.segment[:, key_T.clamp(min=0)]
        return (visible & (other_BT == self.seen.segment) & (other_BT >= 0)).unsqueeze(1)


class FusedRows(Rows):
    """From q, k and lse alone. Keys are taken relative to key 0, which leaves softmax as it is and keeps s small."""

    def __init__(self, seen: Observation, block_length: int | None = None):
        super().__init__(seen, block_length)
        self.k_relative = self.k - self.k[:, :, :1]
        self.shift_BHT = self._dot(self.k[:, :, :1])
        self.lse_relative = self.lse_BHT - self.shift_BHT

    def _dot(self, k_BGSD: Tensor) -> Tensor:
        """`c q_i . k_i`, keys repeated over their group of query heads."""
        group = self.q.size(1) // k_BGSD.size(1)
        return self.scale * (self.q * k_BGSD.repeat_interleave(group, dim=1)).sum(-1)

    def _attend(
        self, keys: Tensor, values: Tensor, scale: float, sink_H: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        attend = BACKENDS[self.seen.backend]
        return attend(self.q, keys, values, scale=scale, sink_H=sink_H, return_lse=True, **self._options)

    def weight(self, key_T: Tensor) -> Tensor:
        """`exp(c q_i . k'_j - lse'_i)`."""
        key_T = key_T.expand_as(self.i)
        score_BHT = self._dot(self.k_relative[:, :, key_T.clamp(0, len(self.i) - 1)])
        return torch.where(self._visible(key_T), (score_BHT - self.lse_relative).exp(), 0.0)

    def entropy(self) -> Tensor:
        """`lse - c q_i . mean key`: the same kernel once more with the keys in place of the values."""
        sink_H = self.seen.sink_H
        if sink_H is None:
            mean_key, _ = self._attend(self.k_relative, self.k_relative, self.scale, None)
            entropy_BHT = self.lse_relative - self.scale * (self.q * mean_key).sum(-1)
        else:  # the sink stays at its logit b while keys would move: original keys, k' as values, and its own term
            mean_key, _ = self._attend(self.k, self.k_relative, self.scale, sink_H)
            sink_HT = sink_H.float()[None, :, None]
            in_sink = (sink_HT - self.lse_BHT).exp() * (sink_HT - self.shift_BHT)
            entropy_BHT = self.lse_relative - self.scale * (self.q * mean_key).sum(-1) - in_sink
        # Cancellation leaves tiny negatives; anything beyond rounding stays visible.
        rounding = 1e-6 * self.lse_relative.abs().clamp(min=10.0)
        return torch.where(entropy_BHT.abs() <= rounding, entropy_BHT.clamp(min=0.0), entropy_BHT)

    def max_logit(self) -> Tensor:
        """`lse(beta s) / beta` with a large beta."""
        _, lse = self._attend(self.k_relative, self.k_relative, SHARPEN * self.scale, None)
        return lse / SHARPEN + self.shift_BHT


class ExplicitRows(Rows):
    """From the weights themselves, `rows` queries at a time: the definitions as they are written."""

    def __init__(self, seen: Observation, block_length: int | None = None, rows: int = blocks.ROWS):
        super().__init__(seen, block_length)
        self._rows = rows

    def _blocks(self):
        """Yields (queries, first key, scores, weights, lse) of each block of rows."""
        segment, window = self.seen.segment, self.seen.window
        for queries, keys in blocks.row_blocks(len(self.i), len(self.i), window, self._rows):
            s_BHTS = naive.scores(
                self.q[:, :, queries],
                self.k[:, :, keys],
                scale=self.scale,
                window=window,
                segment=None if segment is None else segment[:, keys],
            )
            yield queries, keys.start, s_BHTS, *naive.softmax(s_BHTS, self.seen.sink_H)

    def weight(self, key_T: Tensor) -> Tensor:
        """Read off the matrix."""
        key_T = key_T.expand_as(self.i)
        taken = []
        for queries, first, _, A_BHTS, _ in self._blocks():
            index = (key_T[queries] - first).clamp(0, A_BHTS.size(-1) - 1)
            taken.append(A_BHTS.gather(-1, index[:, None].expand(*A_BHTS.shape[:-1], 1)).squeeze(-1))
        return torch.where(self._visible(key_T), torch.cat(taken, dim=-1), 0.0)

    def entropy(self) -> Tensor:
        """`sum_j entr(A[i,j])`."""
        parts = []
        for _, _, _, A_BHTS, lse_BHT in self._blocks():
            entropy_BHT = torch.special.entr(A_BHTS).sum(-1)
            if self.seen.sink_H is not None:
                entropy_BHT += torch.special.entr((self.seen.sink_H.float()[None, :, None] - lse_BHT).exp())
            parts.append(entropy_BHT)
        return torch.cat(parts, dim=-1)

    def max_logit(self) -> Tensor:
        """The largest score of each row."""
        return torch.cat([s_BHTS.amax(-1) for _, _, s_BHTS, _, _ in self._blocks()], dim=-1)


def rows_of(seen: Observation, block_length: int | None = None) -> Rows:
    """The way that fits the backend: through lse on sdpa, the whole matrix on naive, blocks of rows on blocks."""
    if seen.backend == "sdpa":
        return FusedRows(seen, block_length)
    return ExplicitRows(seen, block_length, seen.q_BHTD.size(2) if seen.backend == "naive" else blocks.ROWS)
