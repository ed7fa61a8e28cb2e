"""The statistics: each a function from the rows of a layer to one number per head (docs/statistics.md).

Register your own with `@statistic("name")`; it then stands beside these in every attention record.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from analysis.rows import Rows

Kind = Literal["text", "text_without_bos", "repeat"]
Function = Callable[[Rows], Tensor]


def entropy_normalized(rows: Rows) -> Tensor:
    """Entropy over that of uniform attention on what the query sees; rows with one outcome have none."""
    log_outcomes = rows.log_outcomes()
    return rows.mean(rows.entropy() / log_outcomes, first=1, only=log_outcomes > 0)


def sink(rows: Rows) -> Tensor:
    """`A[i,0]`, i >= 4: mass on the first token of text, BOS where the data have one."""
    return rows.mean(rows.weight(0 * rows.i), first=4)


def sink_rate(rows: Rows) -> Tensor:
    """Share of sequences whose mean `A[i,0]` over the first 64 rows exceeds 0.3 (Gu et al. 2024)."""
    mass_BH = rows.mean(rows.weight(0 * rows.i), only=rows.i < 64, axes=2)
    sees_B = rows.sees_BHT[:, 0, :64].any(-1).cpu()  # NaN elsewhere is a fault, and must show as one
    return torch.where(mass_BH.isnan(), mass_BH, (mass_BH > 0.3).double())[sees_B].mean(0)


def largest_at(rows: Rows, offset: int) -> Tensor:
    """Share of queries whose largest weight lies `offset` tokens back."""
    return rows.mean(rows.is_largest(rows.i - offset), first=offset + 1)


def stripes(rows: Rows, offset: int) -> Tensor:
    """`sum_{r=1..b} A[i, i - r s + offset]` over queries in blocks b >= 1, i = b s + 1 ... (b+1) s.

    Offset 0: the current token's earlier occurrences; 1: what followed them (Olsson et al. 2022).
    """
    s, i = rows.block_length, rows.i
    assert s is not None
    block_T = (i - 1) // s
    # Without the condition the last query of a block would also reach the first token after BOS.
    masses = [(block_T >= r) * rows.weight(i - r * s + offset) for r in range(1, int(block_T.max()) + 1)]
    return rows.mean(torch.stack(masses).sum(0), first=s + 1)


def max_logit(rows: Rows) -> Tensor:
    """Largest scaled score of any visible pair."""
    return rows.max_logit().masked_fill(~rows.sees_BHT, -float("inf")).amax((0, 2))


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


REGISTRY: dict[str, tuple[Kind, Function]] = {
    "entropy": ("text", lambda rows: rows.mean(rows.entropy(), first=1)),
    "entropy_normalized": ("text", entropy_normalized),
    "sink": ("text", sink),
    "sink_no_bos": ("text_without_bos", sink),
    "sink_rate": ("text", sink_rate),
    "previous": ("text", lambda rows: rows.mean(rows.weight(rows.i - 1), first=2)),  # at 1 it is the sink
    "previous2": ("text", lambda rows: rows.mean(rows.weight(rows.i - 2), first=3)),
    "previous_argmax": ("text", partial(largest_at, offset=1)),
    "previous2_argmax": ("text", partial(largest_at, offset=2)),
    "current": ("text", lambda rows: rows.mean(rows.weight(rows.i), first=1)),
    "induction": ("repeat", partial(stripes, offset=1)),
    "duplicate": ("repeat", partial(stripes, offset=0)),
    "max_logit": ("text", max_logit),
    "head_norm": ("text", head_norm),
}


def statistic(name: str, probe: Kind = "text") -> Callable[[Function], Function]:
    """Register a statistic. On `repeat` it is taken at both block lengths; the smaller is the headline."""

    def register(function: Function) -> Function:
        if name in REGISTRY:
            raise ValueError(f"a statistic named {name!r} exists already; choose another name")
        REGISTRY[name] = probe, function
        return function

    return register
