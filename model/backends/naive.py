"""The definition: scores, softmax, weighted sum, with the whole T x S matrix in memory.

All other backends and all fused statistics are tested against this file.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

INF = float("inf")


def scores(
    q_BHTD: Tensor, k_BGSD: Tensor, scale: float, window: int | None = None, segment: Tensor | None = None
) -> Tensor:
    """Scaled dot products `s_BHTS`, -inf where the query does not see the key."""
    k_BHSD = k_BGSD.repeat_interleave(q_BHTD.size(1) // k_BGSD.size(1), dim=1)
    s_BHTS = scale * (q_BHTD @ k_BHSD.mT)
    T, S = s_BHTS.shape[-2:]
    query_T1 = torch.arange(S - T, S, device=s_BHTS.device).unsqueeze(1)
    key_S = torch.arange(S, device=s_BHTS.device)
    visible = key_S <= query_T1
    if window is not None:
        visible = visible & (key_S > query_T1 - window)
    if segment is not None:
        own_B1T1 = segment[:, None, S - T :, None]
        visible = visible & (own_B1T1 == segment[:, None, None, :]) & (own_B1T1 >= 0)
    return s_BHTS.masked_fill(~visible, -INF)


def softmax(s_BHTS: Tensor, sink_H: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights `A_BHTS` and `lse_BHT` of masked scores; rows without a visible key give 0 and -inf."""
    empty_BHT1 = (s_BHTS == -INF).all(-1, keepdim=True)
    s_BHTS = s_BHTS.masked_fill(empty_BHT1, 0.0)  # softmax of a row of -inf is NaN, and so is its gradient
    keys = s_BHTS.size(-1)
    if sink_H is not None:
        sink_BHT1 = sink_H.to(s_BHTS.dtype)[None, :, None, None].expand(*s_BHTS.shape[:-1], 1)
        s_BHTS = torch.cat([s_BHTS, sink_BHT1], dim=-1)
    A_BHTS = s_BHTS.softmax(-1)[..., :keys].masked_fill(empty_BHT1, 0.0)
    return A_BHTS, s_BHTS.logsumexp(-1).masked_fill(empty_BHT1.squeeze(-1), -INF)


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
    """Causal attention as in `model.backends`; O(T S) memory."""
    A_BHTS, lse_BHT = softmax(scores(q_BHTD, k_BGSD, scale, window, segment), sink_H)
    v_BHSD = v_BGSD.repeat_interleave(q_BHTD.size(1) // v_BGSD.size(1), dim=1)
    return F.dropout(A_BHTS, dropout_p) @ v_BHSD, lse_BHT if return_lse else None
