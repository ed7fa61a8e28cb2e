"""Attention by its definition, in float64 and with gradients: shares no code with the model."""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from configs.schema import Model


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


def rms_normed(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def turned(x_BHTD: Tensor, theta: float) -> Tensor:
    """Feature f and feature f + D/2 as one complex number, turned by `t theta^(-2 f / D)`."""
    T, D = x_BHTD.shape[-2:]
    angle_TF = torch.outer(torch.arange(T).double(), theta ** (-2 * torch.arange(D // 2).double() / D))
    z = torch.complex(x_BHTD[..., : D // 2], x_BHTD[..., D // 2 :]) * torch.exp(1j * angle_TF)
    return torch.cat([z.real, z.imag], dim=-1)


class WholeLayer(NamedTuple):
    """What an attention layer adds to the residual stream, and what entered its softmax."""

    out_BTC: Tensor
    q_BHTD: Tensor
    k_BGSD: Tensor
    v_BGSD: Tensor
    options: dict[str, Any]
    gate_BHT: Tensor | None


def attention_layer(
    c: Model, weights: dict[str, Tensor], x_BTC: Tensor, segment: Tensor | None = None
) -> WholeLayer:
    """A layer on what it reads, from its configuration and its float64 weights by their names."""
    D = c.d_head

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def heads(name: str | None) -> Tensor:
        return torch.stack((linear(name, x_BTC) if name else x_BTC).split(D, dim=-1), dim=1)

    q_from = None if c.qk == "identity" else "W_q"
    k_from = "W_k" if c.qk == "separate" else q_from
    v_from = {"project": "W_v", "key": k_from, "identity": None}[c.value]
    q, k, v = heads(q_from), heads(k_from), heads(v_from)
    if c.qk_norm:
        q, k = c.qk_gain * rms_normed(q), c.qk_gain * rms_normed(k)
    if c.position == "rotary":
        q, k = turned(q, c.rope_theta), turned(k, c.rope_theta)
    options: dict[str, Any] = {"scale": {"sqrt": 1 / math.sqrt(D), "none": 1.0, "linear": 1 / D}[c.scale]}
    if c.window is not None:
        options["window"] = c.window
    if c.sink != "none":
        options["sink_H"] = weights["sink_H"] if c.sink == "learned" else torch.zeros(c.n_head).double()
    if segment is not None:
        options["segment"] = segment
    out_BHTD, gate_BHT = attention(q, k, v, **options).out_BHTD, None
    if c.gate:
        gate_BHT = 1 / (1 + torch.exp(-linear("W_gate", x_BTC).mT))
        out_BHTD = gate_BHT[..., None] * out_BHTD
    out_BTC = linear("W_o", torch.cat(list(out_BHTD.unbind(1)), dim=-1))
    return WholeLayer(out_BTC, q, k, v, options, gate_BHT)
