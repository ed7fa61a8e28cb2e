"""Fixed probe sequences, and from them one attention record: all statistics of all heads.

A probe is a forward pass of its own, in evaluation mode, on tokens drawn once from a generator of its own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.capture import observe
from analysis.rows import rows_of
from analysis.statistics import REGISTRY
from configs import UserError
from configs.seeds import seed_for
from data.mixture import Mixture
from model.attention import Observation
from model.transformer import GPT

LONGEST_BLOCK = 50
Scores = dict[str, Tensor]  # L x H each
Substitute = Callable[[Observation], Observation]


@dataclass(frozen=True)
class Probes:
    """Token ids of text, and of `[BOS] + block x 2` by block length, short and long.

    Where texts are whole documents, one a row, `segment` is 0 or more there and -1 in the padding behind.
    """

    text: Tensor
    text_without_bos: Tensor | None  # None where the data have no BOS: `text` is without it then
    repeats: dict[int, Tensor]
    segment: Tensor | None = None
    segment_without_bos: Tensor | None = None

    def only(self, n: int) -> "Probes":
        """The n-th sequence of each."""
        repeats = {length: tokens[n : n + 1] for length, tokens in self.repeats.items()}
        parts = {name: part[n : n + 1] for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, repeats=repeats, **parts)


class Scored(NamedTuple):
    """All statistics of all heads, and the losses: on the CPU, wherever the model is."""

    scores: Scores
    queries: Scores  # how many a score is the mean over, 1 where it is no such mean; none of headlines
    losses_BT: Tensor  # of the text
    repeat_losses_BT: Tensor  # of the longer repeat probe
    skipped: int  # rows of the text that saw nothing, over layers and heads


class Pass(NamedTuple):
    """The same of one probe."""

    scores: Scores
    queries: Scores
    losses_BT: Tensor
    skipped: int


def make_probes(source: Mixture, context_length: int, sequences: int, seed: int) -> Probes:
    """The probes of a run. Blocks hold distinct tokens that occur in training: a match is never ambiguous.

    Raises `UserError` where the data have too few distinct tokens for two block lengths.
    """
    generator, bos = torch.Generator().manual_seed(seed_for(seed, "probe")), source.tokenizer.bos
    symbols, extra = len(source.symbols), int(bos is None)
    long = min(LONGEST_BLOCK, symbols - extra, (context_length - 1) // 2)
    if long < 4:
        needed = f"probes need {4 + extra} distinct tokens; the data have {symbols}"
        raise UserError(f"{needed}: set probe.every 0 or add text")
    repeats = {}
    for length in (long // 2, long):
        order = torch.rand(sequences, len(source.symbols), generator=generator).argsort(-1)
        block = source.symbols[order[:, :length]]
        # Without BOS a token from outside the block holds place 0: the definitions count places from there.
        first = source.symbols[order[:, -1:]] if bos is None else torch.full((sequences, 1), bos)
        repeats[length] = torch.cat([first, block, block], dim=1)
    text, segment = source.probe_text(sequences, context_length, bos is not None)
    plain, plain_segment = (
        (None, None) if bos is None else source.probe_text(sequences, context_length, False)
    )
    return Probes(text, plain, repeats, segment, plain_segment)


def score(model: GPT, probes: Probes, substitute: Substitute = lambda seen: seen) -> Scored:
    """All that the probes say; `substitute` replaces what the statistics see of a layer."""
    look = partial(_pass, model, substitute)
    with model.reading():
        text = look("text", probes.text, probes.segment)
        passes = [text]
        if probes.text_without_bos is not None:
            passes.append(look("text_without_bos", probes.text_without_bos, probes.segment_without_bos))
        for end, (s, tokens_BT) in zip(("_short", "_long"), probes.repeats.items(), strict=True):
            passes.append(look("repeat", tokens_BT, None, s, end))
    scores = {name: score_LH for one in passes for name, score_LH in one.scores.items()}
    queries = {name: queries_LH for one in passes for name, queries_LH in one.queries.items()}
    return Scored(headlines(scores), queries, text.losses_BT, passes[-1].losses_BT, text.skipped)


def headlines(scores: Scores) -> Scores:
    """Adds the smaller of both block lengths: a head that only knows a distance passes at one length only."""
    names = [name for name, (probe, _) in REGISTRY.items() if probe == "repeat"]
    return scores | {n: torch.minimum(scores[f"{n}_short"], scores[f"{n}_long"]) for n in names}


def measure(model: GPT, probes: Probes, bos_trained: bool) -> dict[str, Any]:
    """The body of an `attention` record: `scores` (L rows of H numbers each), `model`, `probe`.

    A number that is not finite becomes None and is counted, so that the record stays valid JSON.
    """
    scores, _, losses_BT, repeat_losses_BT, skipped = score(model, probes)
    s, T = max(probes.repeats), losses_BT.size(1)
    early, late = slice(T // 8, T // 4), slice(T - T // 8, T)
    segment = torch.zeros_like(probes.text) if probes.segment is None else probes.segment
    counted_BT = segment[:, 1:] >= 0  # padding is behind a document: where the target is none
    early_loss, late_loss = (losses_BT[:, part][counted_BT[:, part]].mean() for part in (early, late))
    # Nothing says where the repeat begins: the first token of a block is left out, of both alike.
    behaviour = {
        "repeat_loss_1": repeat_losses_BT[:, 1:s].mean(),
        "repeat_loss_2": repeat_losses_BT[:, s + 1 :].mean(),
        "icl_score": late_loss - early_loss,
    }
    about = {
        "bos": probes.text_without_bos is not None,
        "bos_trained": bos_trained,
        "block_lengths": list(probes.repeats),
        "sequences": len(probes.text),
        "length": probes.text.size(1),
        "icl_places": [[part.start, part.stop] for part in (early, late)],
        "skipped_rows": skipped,
        "nonfinite": sum(int((~value.isfinite()).sum()) for value in (*scores.values(), *behaviour.values())),
    }
    return {
        "scores": {name: plain(score_LH.tolist()) for name, score_LH in scores.items()},
        "model": {name: plain(value.tolist()) for name, value in behaviour.items()},
        "probe": about,
    }


def summary(record: dict[str, Any]) -> str:
    """One line of a record: the strongest head of the best-known kinds, as `name score (layer.head)`."""
    found = {
        name: best(record["scores"][name]) or (math.nan, "none") for name in ("previous", "induction", "sink")
    }
    parts = ["{} {:.2f} ({})".format(name, *pair) for name, pair in found.items()]
    loss = record["model"]["repeat_loss_2"]
    return f"{', '.join(parts)}; second-repeat loss {math.nan if loss is None else loss:.2f}"


def best(rows: Sequence[Sequence[float | None]]) -> tuple[float, str] | None:
    """The highest of L rows of H scores and which head has it, as `layer.head`; None where there is none."""
    scores = {f"{i}.{j}": score for i, row in enumerate(rows) for j, score in enumerate(row)}
    found = [(score, head) for head, score in scores.items() if score is not None]
    return max(found, key=lambda pair: pair[0], default=None)


def _pass(
    model: GPT,
    substitute: Substitute,
    probe: str,
    tokens_BT: Tensor,
    segment_BT: Tensor | None,
    block_length: int | None = None,
    end: str = "",
) -> Pass:
    """The statistics of one probe by their names and `end`."""
    wanted = {name: function for name, (where, function) in REGISTRY.items() if where == probe}
    scores: dict[str, list[Tensor]] = {name: [] for name in wanted}
    queries: dict[str, list[Tensor]] = {name: [] for name in wanted}
    skipped = 0

    def collect(seen: Observation) -> None:
        nonlocal skipped
        seen = substitute(seen)
        rows, H = rows_of(seen, block_length), seen.q_BHTD.size(1)
        skipped += int((~rows.sees_BHT).sum())
        for name, function in wanted.items():
            rows.queries_H = torch.ones(H)
            value_H = function(rows)
            if value_H.shape != (H,):
                got = tuple(value_H.shape)
                raise ValueError(f"statistic {name!r} must return {H} numbers, one per head; got shape {got}")
            scores[name].append(value_H.cpu().double())  # not every device has float64
            queries[name].append(rows.queries_H)

    tokens_BT = tokens_BT.to(model.device)
    with observe(model, collect):
        logits_BTV = model(tokens_BT, segment_BT=None if segment_BT is None else segment_BT.to(model.device))
    losses_BT = F.cross_entropy(logits_BTV[:, :-1].mT, tokens_BT[:, 1:], reduction="none")
    scored, over = ({name + end: torch.stack(x) for name, x in kept.items()} for kept in (scores, queries))
    return Pass(scored, over, losses_BT.cpu(), skipped)


def plain(value: Any) -> Any:
    """Nested lists of numbers with None for what JSON cannot hold."""
    if isinstance(value, list):
        return [plain(part) for part in value]
    return value if math.isfinite(value) else None
