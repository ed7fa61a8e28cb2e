"""PyTorch's fused kernels: O(T D) memory, and the log-sum-exp of each row where an observer asks for it.

Windows, segments and partial caches would need a T x S mask here, the very thing that fused kernels avoid:
those go through `blocks`.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.backends import blocks, naive


def attend(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    scale: float,
    sink_H: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    **masks: Any,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention as in `model.backends`; with dropout PyTorch builds the T x S matrix on CPUs."""
    T, S, D = q_BHTD.size(2), k_BGSD.size(2), v_BGSD.size(3)
    lse_fails = return_lse and (dropout_p > 0 or q_BHTD.device.type != "cpu" or not _lse_is_exact())
    if lse_fails or T not in (1, S) or any(mask is not None for mask in masks.values()):
        masks |= {"scale": scale, "sink_H": sink_H, "dropout_p": dropout_p, "return_lse": return_lse}
        return blocks.attend(q_BHTD, k_BGSD, v_BGSD, **masks)
    H, G = q_BHTD.size(1), k_BGSD.size(1)
    q, k, v, causal = q_BHTD, k_BGSD, v_BGSD, T > 1
    if causal:
        k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
    else:  # a lone query sees all keys, and so do the others of its group: rows of one head, no key copied
        q = q.reshape(-1, G, H // G, D)
    rows = q.size(2)
    if sink_H is not None:
        q, k, v = _sink_as_key(q, k, v, sink_H, scale)
    if return_lse:
        out, lse = _with_lse(q, k, v, causal, scale)
        return out[..., -rows:, :D].reshape_as(q_BHTD), lse[..., -rows:].reshape(-1, H, T)
    out = F.scaled_dot_product_attention(q, k, v, None, dropout_p, causal, scale=scale)
    return out[..., -rows:, :D].reshape_as(q_BHTD), None


def _sink_as_key(q: Tensor, k: Tensor, v: Tensor, sink_H: Tensor, scale: float) -> tuple[Tensor, ...]:
    """A first key that scores `sink` with every query and carries no value.

    One more feature holds it: sink / scale in the queries, 0 in the keys, 1 in the new key. A zero query in
    front keeps `is_causal` valid; the width is padded to a multiple of 8 for the kernel. Gradients are then
    exact, which a factor `sigmoid(lse - sink)` on the output is not: the operator's lse has no gradient.
    """
    B, G, rows, D = q.shape
    pad = 8 - D % 8
    sink_BGR1 = (sink_H.to(q.dtype) / scale).view(1, G, -1, 1).expand(B, G, rows, 1)
    q = F.pad(torch.cat([q, sink_BGR1], dim=-1), (0, pad - 1, 1, 0))
    key_BG1D = F.pad(k.new_ones(B, G, 1, 1), (D, pad - 1))
    k = torch.cat([key_BG1D, F.pad(k, (0, pad))], dim=2)
    return q, k, F.pad(v, (0, pad, 1, 0))


def _with_lse(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    # The operator reads beyond its inputs where numbers of one vector do not lie side by side (torch 2.13).
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


@functools.cache
def _lse_is_exact() -> bool:
    """The operator is private: trust its log-sum-exp only after a comparison with the definition."""
    q, k = (torch.arange(2 * 33 * 8.0).mul(step).sin().view(1, 2, 33, 8) for step in (0.7, 1.3))
    try:
        found = _with_lse(q, k, q, True, 2.0)
    except (AttributeError, RuntimeError):
        return False
    expected: Any = naive.attend(q, k, q, scale=2.0, return_lse=True)
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
