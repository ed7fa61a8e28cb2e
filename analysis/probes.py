"""Fixed probe sequences, and one attention record from them: every statistic of every head, and what the model can do.

A probe is a forward pass of its own, in evaluation mode, with tokens drawn once from a generator of its own.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.capture import observe
from analysis.rows import rows_of
from analysis.statistics import REGISTRY
from configs import UserError
from configs.seeds import seed_for
from data import Source
from model.attention import Observation
from model.transformer import GPT

LONGEST_BLOCK = 50


@dataclass(frozen=True)
class Probes:
    """Token ids: natural text with and without BOS, and `[first] + block x 2` for two block lengths, short and long."""

    text_BT: Tensor
    text_without_bos_BT: Tensor | None  # None where the data have no BOS: then text_BT is already without
    repeats: dict[int, Tensor]

    @property
    def block_lengths(self) -> list[int]:
        """Short, long."""
        return sorted(self.repeats)


def make_probes(source: Source, context_length: int, sequences: int, seed: int) -> Probes:
    """Draw the probes of a run. Blocks hold distinct tokens that occur in training, so a match is never ambiguous.

    Raises `UserError` where the corpus has too few distinct tokens for two block lengths.
    """
    long = min(LONGEST_BLOCK, len(source.symbols), (context_length - 1) // 2)
    short = long // 2
    if short < 2:
        raise UserError(
            f"probes need at least 4 distinct tokens; the data have {len(source.symbols)}: set probe.every 0 or use "
            "other data"
        )
    generator = torch.Generator().manual_seed(seed_for(seed, "probe"))
    bos = source.tokenizer.bos
    repeats = {}
    for length in (short, long):
        order = torch.rand(sequences, len(source.symbols), generator=generator).argsort(-1)
        block_BS = source.symbols[order[:, :length]]
        # Without BOS, any token holds place 0: the definitions count places from there.
        first = source.symbols[order[:, -1:]] if bos is None else torch.full((sequences, 1), bos)
        repeats[length] = torch.cat([first, block_BS, block_BS], dim=1)
    text = source.probe_text(sequences, context_length, bos is not None)
    plain = None if bos is None else source.probe_text(sequences, context_length, False)
    return Probes(text, plain, repeats)


def measure(model: GPT, probes: Probes, bos_trained: bool) -> dict[str, Any]:
    """The body of an `attention` record: `scores` (L rows of H numbers each), `model`, `probe`. Leaves no trace.

    A number that is not finite becomes None and is counted in `probe.nonfinite`, so that the record stays valid JSON.
    """
    skipped = 0
    with model.reading():
        scores, losses_BT, skipped = _pass(model, probes.text_BT, "text")
        if probes.text_without_bos_BT is not None:
            scores |= _pass(model, probes.text_without_bos_BT, "text_without_bos")[0]
        by_length = [_pass(model, probes.repeats[s], "repeat", s) for s in probes.block_lengths]
    (short, _, _), (long, repeat_losses_BT, _) = by_length
    for name in long:
        scores[f"{name}_short"], scores[f"{name}_long"] = short[name], long[name]
        # A head that only knows a distance can pass at one length, never at both.
        scores[name] = torch.minimum(short[name], long[name])
    s, T = probes.block_lengths[1], losses_BT.size(1)
    early, late = [T // 8, T // 4], [T - T // 8, T]
    values, nonfinite = _to_lists(scores)
    return {
        "scores": values,
        "model": {
            # The first token of a block is left out of both: nothing says where the repeat begins.
            "repeat_loss_1": repeat_losses_BT[:, 1:s].mean().item(),
            "repeat_loss_2": repeat_losses_BT[:, s + 1 : 2 * s].mean().item(),
            "icl_score": (
                losses_BT[:, late[0] : late[1]].mean() - losses_BT[:, early[0] : early[1]].mean()
            ).item(),
        },
        "probe": {
            "bos": probes.text_without_bos_BT is not None,
            "bos_trained": bos_trained,
            "block_lengths": probes.block_lengths,
            "length": probes.text_BT.size(1),
            "sequences": len(probes.text_BT),
            "icl_places": [early, late],
            "skipped_rows": skipped,
            "nonfinite": nonfinite,
        },
    }


def summary(record: dict[str, Any]) -> str:
    """One line of an attention record: the strongest head of the best-known kinds, as `name score (layer.head)`."""
    parts = []
    for name in ("previous", "induction", "sink"):
        score_LH = torch.tensor([[value or 0.0 for value in row] for row in record["scores"][name]])
        layer, head = divmod(int(score_LH.argmax()), score_LH.size(1))
        parts.append(f"{name} {score_LH.max():.2f} ({layer}.{head})")
    return f"{', '.join(parts)}; second-repeat loss {record['model']['repeat_loss_2']:.2f}"


def _pass(
    model: GPT, tokens_BT: Tensor, probe: str, block_length: int | None = None
) -> tuple[dict[str, Tensor], Tensor, int]:
    """Scores (L x H each) of the statistics of one probe, the losses of its tokens, and how many rows saw nothing."""
    wanted = [statistic for statistic in REGISTRY.values() if statistic.probe == probe]
    found: dict[str, list[Tensor]] = {statistic.name: [] for statistic in wanted}
    skipped = 0

    def collect(seen: Observation) -> None:
        nonlocal skipped
        rows = rows_of(seen, block_length)
        skipped += int((~rows.sees_BHT).sum())
        for statistic in wanted:
            value_H = statistic.function(rows)
            if value_H.shape != rows.lse_BHT.shape[1:2]:
                raise ValueError(
                    f"statistic {statistic.name!r} must return one number per head, "
                    f"{tuple(rows.lse_BHT.shape[1:2])}; got {tuple(value_H.shape)}"
                )
            found[statistic.name].append(value_H.double())

    with observe(model, collect):
        logits_BTV = model(tokens_BT)
    losses_BT = F.cross_entropy(logits_BTV[:, :-1].transpose(1, 2), tokens_BT[:, 1:], reduction="none")
    return {name: torch.stack(layers) for name, layers in found.items()}, losses_BT, skipped


def _to_lists(scores: dict[str, Tensor]) -> tuple[dict[str, list[list[float | None]]], int]:
    lists = {
        name: [[value if math.isfinite(value) else None for value in row] for row in score_LH.tolist()]
        for name, score_LH in scores.items()
    }
    return lists, sum(value is None for rows in lists.values() for row in rows for value in row)
