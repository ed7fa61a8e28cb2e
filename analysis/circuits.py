"""What heads are wired to, by their weights alone (Elhage et al. 2021, A Mathematical Framework).

A norm's gain and LayerNorm's centring are multiplied into the matrices behind it. Its division, biases,
positions, rotation and QK-norm are left out. All products are D x D.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis.probes import plain
from model.transformer import GPT


def add_circuits(document: dict[str, Any], model: GPT, fresh: GPT) -> None:
    """Give `heads.json` the `copying` score of each head and, in `summary["circuits"]`, K-composition.

    That of each previous-token head with each induction head of a later layer, strongest first; `others`: the
    mean over all other heads of earlier layers with the same induction head. `fresh` has the weights that
    training would begin with, for chance: None where they write nothing (`init: zero_residual`).
    """
    heads, (own, random) = document["heads"], [plain(copying_scores(one).tolist()) for one in (model, fresh)]
    for entry in heads:
        layer, head = entry["layer"], entry["head"]
        entry["copying"] = {"score": own[layer][head], "random_init": random[layer][head]}
    previous, induction = (
        [(entry["layer"], entry["head"]) for entry in heads if label in entry["labels"]]
        for label in ("previous-token", "induction")
    )
    later = [head for head in induction if any(layer < head[0] for layer, _ in previous)]
    circuits: list[dict[str, Any]] = []
    for head, own_LH, random_LH in zip(
        later, *(k_composition(one, later) for one in (model, fresh)), strict=True
    ):
        for earlier in [one for one in previous if one[0] < head[0]]:
            others_LH = own_LH.clone()
            others_LH[earlier] = torch.nan
            found = plain([x.item() for x in (own_LH[earlier], others_LH.nanmean(), random_LH[earlier])])
            scores = dict(zip(("k_composition", "others", "random_init"), found, strict=True))
            circuits.append({"previous": list(earlier), "induction": list(head), **scores})
    circuits.sort(key=lambda circuit: circuit["k_composition"] or 0.0, reverse=True)
    document["summary"]["circuits"] = circuits


def copying_scores(model: GPT) -> Tensor:
    """Whether a head raises the logit of the token that it looks at (1) or lowers it (-1): L x H.

    The sum of the eigenvalues of `W_U W_o W_v W_E`, over that of their absolute values. They are those of the
    D x D product `W_v (W_E W_U) W_o`, but for zeros. NaN where all are zero.
    """
    E_VC, scores = model.token_embedding.weight.detach(), []
    if model.config.embed_norm:
        E_VC = F.rms_norm(E_VC, (E_VC.size(1),))
    gram_CC = _behind(model.final_norm, (E_VC.T @ model.head.weight.detach()).cpu().double())
    for layer in range(model.config.n_layer):
        _, _, v_HDC, o_HCD = _matrices(model, layer)
        eigenvalues_HD = torch.linalg.eigvals(v_HDC @ gram_CC @ o_HCD)
        scores.append(eigenvalues_HD.sum(-1).real / eigenvalues_HD.abs().sum(-1))
    return torch.stack(scores)


def k_composition(model: GPT, later: list[tuple[int, int]]) -> list[Tensor]:
    """How much the keys of each `later` head, (layer, head), read of what heads of earlier layers write.

    `|W_QK W_OV| / (|W_QK| |W_OV|)`, Frobenius norms, `W_QK = W_q^T W_k` of the one, `W_OV = W_o W_v` of the
    others: earlier layers x H for each, all of which are after layer 0. NaN where a factor is zero.
    """
    scores: list[list[Tensor]] = [[] for _ in later]
    reading = [[W_HDC[head] for W_HDC in _matrices(model, layer)[:2]] for layer, head in later]
    for layer in range(max((layer for layer, _ in later), default=0)):
        _, _, v_HDC, o_HCD = _matrices(model, layer)
        vv_HDD, oo_HDD = v_HDC @ v_HDC.mT, o_HCD.mT @ o_HCD
        for n, (q_DC, k_DC) in enumerate(reading):
            if layer < later[n][0]:
                # |X^T M Y|^2 = tr(M^T (X X^T) M (Y Y^T))
                qq_DD, kk_DD, ko_HDD = q_DC @ q_DC.T, k_DC @ k_DC.T, k_DC @ o_HCD
                square_H = ((qq_DD @ ko_HDD) * (ko_HDD @ vv_HDD)).sum((1, 2))
                squares_H = (qq_DD * kk_DD).sum() * (oo_HDD * vv_HDD).sum((1, 2))
                scores[n].append((square_H / squares_H).clamp(min=0.0).sqrt())
    return [torch.stack(of_layers) for of_layers in scores]


def _matrices(model: GPT, layer: int) -> tuple[Tensor, ...]:
    """`W_q`, `W_k`, `W_v` (H x D x C) behind the norm, and `W_o` (H x C x D), in float64."""
    *reading, o_HCD = (W.cpu().double() for W in model.attentions()[layer].matrices())
    return *(_behind(model.blocks[layer].attention_norm, W) for W in reading), o_HCD


def _behind(norm: Any, W: Tensor) -> Tensor:
    """The matrix that multiplies x where W, ... x C, multiplies `norm(x)`, but for the norm's division."""
    W = W if norm.weight is None else W * norm.weight.detach().cpu().double()
    return W - W.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else W
