"""PyTorch's fused kernels: O(T D) memory, and the log-sum-exp of every row where an observer asks for it.

Windows, segments and partial caches would need a T x S mask here, which is what fused kernels avoid: those go through
`blocks`.
"""

import functools

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
    window: int | None = None,
    sink_H: Tensor | None = None,
    segment: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention as in `model.backends`; with dropout PyTorch's CPU operator builds the T x S matrix."""
    T, S = q_BHTD.size(2), k_BGSD.size(2)
    needs_mask = window is not None or segment is not None or T not in (1, S)
    if needs_mask or (return_lse and (dropout_p > 0 or not _lse_is_exact(q_BHTD.device.type))):
        options = {"scale": scale, "window": window, "sink_H": sink_H, "segment": segment}
        return blocks.attend(q_BHTD, k_BGSD, v_BGSD, **options, dropout_p=dropout_p, return_lse=return_lse)  # type: ignore[arg-type]
    group = q_BHTD.size(1) // k_BGSD.size(1)
    k_BHSD, v_BHSD = k_BGSD.repeat_interleave(group, dim=1), v_BGSD.repeat_interleave(group, dim=1)
    D, rows = v_BHSD.size(-1), T
    if sink_H is not None:
        q_BHTD, k_BHSD, v_BHSD = _sink_as_key(q_BHTD, k_BHSD, v_BHSD, sink_H, scale)
    causal = T == S and T > 1
    if return_lse:
        out, lse = _with_lse(q_BHTD, k_BHSD, v_BHSD, causal, scale)
        return out[..., -rows:, :D], lse[..., -rows:]
    out = F.scaled_dot_product_attention(q_BHTD, k_BHSD, v_BHSD, None, dropout_p, causal, scale=scale)
    return out[..., -rows:, :D], None


def _sink_as_key(
    q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, sink_H: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A first key that scores `sink` with every query and carries no value.

    One more feature holds it: 1 in the queries, 0 in the keys, sink / scale in the new key. A zero query in front
    keeps `is_causal` valid; the width is padded to a multiple of 8 for the kernel. Gradients are then exact, which a
    factor `sigmoid(lse - sink)` on the output would not give: the operator's lse has no gradient.
    """
    B, H, T, D = q_BHTD.shape
    pad = 8 - D % 8
    q = F.pad(torch.cat([q_BHTD, q_BHTD.new_ones(B, H, T, 1)], -1), (0, pad - 1, int(T > 1), 0))
    sink_BH11 = (sink_H.to(k_BHSD.dtype) / scale)[None, :, None, None].expand(B, H, 1, 1)
    sink_key = F.pad(sink_BH11, (D, pad - 1))
    k = torch.cat([sink_key, F.pad(k_BHSD, (0, pad))], dim=2)
    return q, k, F.pad(v_BHSD, (0, pad, 1, 0))


def _with_lse(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


@functools.cache
def _lse_is_exact(device: str) -> bool:
    """The operator is private: trust its log-sum-exp only after comparing it with the definition on a small case."""
    if device != "cpu":
        return False
    q, k = (torch.arange(2 * 33 * 8.0).mul(step).sin().view(1, 2, 33, 8) for step in (0.7, 1.3))
    expected, expected_lse = naive.attend(q, k, q, scale=2.0, return_lse=True)
    try:
        out, lse = _with_lse(q, k, q, True, 2.0)
    except (AttributeError, RuntimeError):
        return False
    assert expected_lse is not None
    return torch.allclose(out, expected, atol=1e-5) and torch.allclose(lse, expected_lse, atol=1e-5)
