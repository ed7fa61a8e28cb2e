"""The statistics, a function each, from the rows of a layer to one number per head (docs/statistics.md).

Register your own with `@statistic("name")`; it then stands beside these in every attention record.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from analysis.rows import Rows

Probe = Literal["text", "text_without_bos", "repeat"]
Function = Callable[[Rows], Tensor]


REGISTRY: dict[str, tuple[Probe, Function]] = {}


def statistic(name: str, probe: Probe = "text") -> Callable[[Function], Function]:
    """Register a statistic. On `repeat` it is taken at both block lengths; the smaller is the headline."""

    def register(function: Function) -> Function:
        if name in REGISTRY:
            raise ValueError(f"a statistic named {name!r} exists already; choose another name")
        REGISTRY[name] = probe, function
        return function

    return register


@statistic("entropy")
def entropy(rows: Rows) -> Tensor:
    """`-sum_j A[i,j] log A[i,j]` in nats, i >= 1."""
    return rows.mean(rows.entropy(), first=1)


@statistic("entropy_normalized")
def entropy_normalized(rows: Rows) -> Tensor:
    """Entropy over that of uniform attention on what the query sees; rows with one outcome have none."""
    log_outcomes = rows.log_outcomes()
    return rows.mean(rows.entropy() / log_outcomes, first=1, only=log_outcomes > 0)


@statistic("sink_no_bos", probe="text_without_bos")
@statistic("sink")
def sink(rows: Rows) -> Tensor:
    """`A[i,0]`, i >= 4: mass on the first token of text, BOS where the data have one, and once without."""
    return rows.mean(rows.weight(0 * rows.i), first=4)


@statistic("sink_rate")
def sink_rate(rows: Rows) -> Tensor:
    """Share of sequences whose mean `A[i,0]` over the first 64 rows exceeds 0.3 (Gu et al. 2024)."""
    mass_BH = rows.per_sequence(rows.weight(0 * rows.i), stop=64)
    return torch.where(mass_BH.isnan(), mass_BH, (mass_BH > 0.3).double()).mean(0)


@statistic("previous")
def previous(rows: Rows) -> Tensor:
    """`A[i,i-1]`, i >= 2: at i = 1 the previous token is the sink."""
    return rows.mean(rows.weight(rows.i - 1), first=2)


@statistic("previous2")
def previous2(rows: Rows) -> Tensor:
    """`A[i,i-2]`, i >= 3."""
    return rows.mean(rows.weight(rows.i - 2), first=3)


@statistic("current")
def current(rows: Rows) -> Tensor:
    """`A[i,i]`, i >= 1."""
    return rows.mean(rows.weight(rows.i), first=1)


@statistic("induction", probe="repeat")
def induction(rows: Rows) -> Tensor:
    """Mass on what followed the current token before: `sum_r A[i, i-rs+1]` (Olsson et al. 2022)."""
    return _stripes(rows, offset=1)


@statistic("duplicate", probe="repeat")
def duplicate(rows: Rows) -> Tensor:
    """Mass on the current token's earlier occurrences themselves: `sum_r A[i, i-rs]`."""
    return _stripes(rows, offset=0)


@statistic("max_logit")
def max_logit(rows: Rows) -> Tensor:
    """Largest scaled score of any visible pair."""
    return rows.max_logit().masked_fill(~rows.sees_BHT, -float("inf")).amax((0, 2))


@statistic("head_norm")
def head_norm(rows: Rows) -> Tensor:
    """Norm of what the head adds to the residual stream, `|W_o^h out|`, over the layer's mean.

    `|W x|^2 = x^T (W^T W) x` keeps this at O(T D) memory. 0 where no head adds anything.
    """
    assert rows.seen.W_o is not None
    out_BHTD = rows.seen.out_BHTD.float()
    W_HCD = rows.seen.W_o.float().unflatten(1, out_BHTD.shape[1::2]).transpose(0, 1)
    norm_BHT = ((out_BHTD @ (W_HCD.mT @ W_HCD)) * out_BHTD).sum(-1).clamp(min=0).sqrt()
    norm_H = rows.mean(norm_BHT)
    return torch.where(norm_H.mean() == 0, 0.0, norm_H / norm_H.mean())


def _stripes(rows: Rows, offset: int) -> Tensor:
    """Mean over queries in block b >= 1 of `sum_{r=1..b} A[i, i - r s + offset]`; b holds `b s + 1 ...`."""
    s, i = rows.block_length, rows.i
    assert s is not None
    block_T = torch.div(i - 1, s, rounding_mode="floor")
    mass_BHT = torch.zeros_like(rows.lse_BHT)
    for r in range(1, int(block_T.max()) + 1):
        # Without the condition the last query of a block would also reach the first token after BOS.
        mass_BHT += torch.where(block_T >= r, rows.weight(i - r * s + offset), 0.0)
    return rows.mean(mass_BHT, first=s + 1)
