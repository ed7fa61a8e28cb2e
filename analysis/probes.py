"""Fixed probe sequences, and from them one attention record: all statistics of all heads.

A probe is a forward pass of its own, in evaluation mode, on tokens drawn once from a generator of its own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.capture import observe
from analysis.rows import rows_of
from analysis.statistics import REGISTRY
from configs import UserError
from configs.ranks import ALONE, Ranks
from configs.seeds import seed_for
from data.mixture import Mixture
from model.attention import Observation
from model.backends import naive
from model.transformer import GPT

LONGEST_BLOCK = 50
PREDICTED = ("text", "repeat_long")  # probes whose losses a record speaks of
LOGITS = 2**24  # numbers held at once: of a large vocabulary those of few sequences
Scores = dict[str, Tensor]  # L x H each
Substitute = Callable[[Observation], Observation]


@dataclass(frozen=True)
class Probe:
    """Token ids, B x T: text, or `[BOS] + block x 2` with a `block_length`.

    Where texts are whole documents, one a row, `segment_BT` is 0 or more there and -1 in the padding behind.
    """

    tokens_BT: Tensor
    segment_BT: Tensor | None = None
    block_length: int | None = None

    @property
    def present(self) -> Tensor:
        """Whether a token is one, and no padding: B x T."""
        everywhere = torch.ones_like(self.tokens_BT, dtype=torch.bool)
        return everywhere if self.segment_BT is None else self.segment_BT >= 0

    def to(self, device: torch.device) -> "Probe":
        """The same where a model is."""
        segment_BT = None if self.segment_BT is None else self.segment_BT.to(device)
        return replace(self, tokens_BT=self.tokens_BT.to(device), segment_BT=segment_BT)


Probes = dict[str, Probe]  # text, text_without_bos (where `text` has one), repeat_short, repeat_long


class Pass(NamedTuple):
    """What one probe says: on the CPU, wherever the model is."""

    scores: Scores
    substituted: list[Scores]
    losses_BT: Tensor  # B x (T - 1): at place t that of predicting token t + 1
    skipped: Tensor  # how many rows saw nothing, over layers and heads


def make_probes(source: Mixture, context_length: int, sequences: int, seed: int) -> Probes:
    """The probes of a run. Blocks hold distinct tokens that occur in training: a match is never ambiguous.

    `sequences` rows each: texts of at most the context's length, a repeat of block length s of 2 s + 1.
    Raises `UserError` where the data have too few distinct tokens for two block lengths.
    """
    generator, bos = torch.Generator().manual_seed(seed_for(seed, "probe")), source.tokenizer.bos
    symbols, extra = len(source.symbols), int(bos is None)
    long = min(LONGEST_BLOCK, symbols - extra, (context_length - 1) // 2)
    if long < 4:
        needed = f"probes need {4 + extra} distinct tokens; the data have {symbols}"
        raise UserError(f"{needed}: set probe.every 0 or add text")
    probes = {"text": Probe(*source.probe_text(sequences, context_length, bos is not None))}
    if bos is not None:
        probes["text_without_bos"] = Probe(*source.probe_text(sequences, context_length, False))
    for name, s in (("repeat_short", long // 2), ("repeat_long", long)):
        order = torch.rand(sequences, symbols, generator=generator).argsort(-1)
        block = source.symbols[order[:, :s]]
        # Without BOS a token from outside the block holds place 0: the definitions count places from there.
        first = source.symbols[order[:, -1:]] if bos is None else torch.full((sequences, 1), bos)
        probes[name] = Probe(torch.cat([first, block, block], dim=1), block_length=s)
    return probes


def look(model: GPT, name: str, probe: Probe, *substitutes: Substitute, losses: bool = True) -> Pass:
    """The statistics of the probe called `name`, in one forward pass.

    They are taken again for each of the `substitutes`, which replaces what they see of a layer. Losses are
    those of `PREDICTED`; without them a large vocabulary costs nothing.
    """
    wanted = _statistics(name)
    # In place from the start: small tensors that outlive a layer would keep the memory around them in pieces.
    L, H = model.config.n_layer, model.config.n_head
    scores = [{s: torch.empty(L, H, dtype=torch.float64) for s in wanted} for _ in (None, *substitutes)]
    skipped = torch.tensor(0)

    def collect(seen: Observation) -> None:
        skipped.add_((seen.lse_BHT == -naive.INF).sum().cpu())
        for found, substitute in zip(scores, (lambda seen: seen, *substitutes), strict=True):
            rows = rows_of(substitute(seen), probe.block_length)
            for statistic, function in wanted.items():
                value_H = function(rows)
                if value_H.shape != (H,):
                    got = f"must return {H} numbers, one per head; got shape {tuple(value_H.shape)}"
                    raise ValueError(f"statistic {statistic!r} {got}")
                found[statistic][seen.layer] = value_H.cpu()  # not every device has float64

    probe = probe.to(model.device)
    with model.reading(), observe(model, collect):
        x_BTC = model.hidden(probe.tokens_BT, segment_BT=probe.segment_BT)
        predicts = losses and name in PREDICTED
        losses_BT = token_losses(model, x_BTC, probe.tokens_BT) if predicts else x_BTC.new_empty(0)
    return Pass(scores[0], scores[1:], losses_BT.cpu(), skipped)


def _statistics(name: str) -> dict[str, Callable[..., Tensor]]:
    """By the name of their scores, those of a probe."""
    return {
        statistic + end: function
        for end in ("", "_short", "_long")
        for statistic, (kind, function) in REGISTRY.items()
        if kind + end == name
    }


def token_losses(model: GPT, x_BTC: Tensor, tokens_BT: Tensor) -> Tensor:
    """Loss of each next token, B x (T - 1), from the last residual stream; few sequences at a time."""
    B, T = tokens_BT.shape
    together = max(1, LOGITS // (T * len(model.token_embedding.weight)))
    parts = zip(x_BTC[:, :-1].split(together), tokens_BT[:, 1:].split(together), strict=True)
    # One row a token: along the other axis the loss would copy the logits.
    losses = [
        F.cross_entropy(model.logits(x).flatten(0, 1), targets.flatten(), reduction="none")
        for x, targets in parts
    ]
    return torch.cat(losses).view(B, T - 1)


def headlines(*parts: Scores) -> Scores:
    """The scores of all probes, L x H each, and of repeats the smaller of both block lengths.

    A head that only knows a distance passes at one length only.
    """
    scores = {name: score_LH for part in parts for name, score_LH in part.items()}
    names = [name for name, (kind, _) in REGISTRY.items() if kind == "repeat"]
    return scores | {n: torch.minimum(scores[f"{n}_short"], scores[f"{n}_long"]) for n in names}


def measure(model: GPT, probes: Probes, bos_trained: bool, ranks: Ranks = ALONE) -> dict[str, Any]:
    """The body of an `attention` record: `scores` (L rows of H numbers each), `model`, `probe`.

    A number that is not finite becomes None and is counted, so that the record stays valid JSON. Of several
    ranks each makes some of the passes, and gets the record of all.
    """
    passes = {
        name: look(model, name, probe) if ranks.has(number) else _blank(model, name, probe)
        for number, (name, probe) in enumerate(probes.items())
    }
    _add_up(passes, ranks)
    return record_of(passes, probes, bos_trained)


def _blank(model: GPT, name: str, probe: Probe) -> Pass:
    """What `look` gives, all zeros."""
    shape = model.config.n_layer, model.config.n_head
    scores = {statistic: torch.zeros(shape, dtype=torch.float64) for statistic in _statistics(name)}
    losses_BT = torch.zeros(probe.tokens_BT[:, 1:].shape if name in PREDICTED else 0)
    return Pass(scores, [], losses_BT, torch.tensor(0))


def _add_up(passes: dict[str, Pass], ranks: Ranks) -> None:
    """Each number becomes its sum over ranks, by one reduction of all."""
    numbers = [n for one in passes.values() for n in (*one.scores.values(), one.losses_BT, one.skipped)]
    flat = ranks.add(torch.cat([number.double().flatten() for number in numbers]))
    for number, sums in zip(numbers, flat.split([number.numel() for number in numbers]), strict=True):
        number.copy_(sums.view_as(number))


def record_of(passes: dict[str, Pass], probes: Probes, bos_trained: bool) -> dict[str, Any]:
    """What `measure` gives, of passes that are there already, with the losses of `PREDICTED`."""
    scores = headlines(*(one.scores for one in passes.values()))
    text, repeat = passes["text"], passes["repeat_long"]
    block_lengths = [probe.block_length for probe in probes.values() if probe.block_length is not None]
    s, T = max(block_lengths), text.losses_BT.size(1)
    early, late = slice(T // 8, T // 4), slice(T - T // 8, T)
    counted_BT = probes["text"].present[:, 1:]  # padding is behind a document: where the target is none
    early_loss, late_loss = (text.losses_BT[:, part][counted_BT[:, part]].mean() for part in (early, late))
    # Nothing says where the repeat begins: the first token of a block is left out, of both alike.
    behaviour = {
        "repeat_loss_1": repeat.losses_BT[:, 1:s].mean(),
        "repeat_loss_2": repeat.losses_BT[:, s + 1 :].mean(),
        "icl_score": late_loss - early_loss,
    }
    sequences, length = probes["text"].tokens_BT.shape
    about = {
        "bos": "text_without_bos" in probes,
        "bos_trained": bos_trained,
        "block_lengths": block_lengths,
        "sequences": sequences,
        "length": length,
        "icl_places": [[part.start, part.stop] for part in (early, late)],
        "skipped_rows": int(text.skipped),
        "nonfinite": sum(int((~value.isfinite()).sum()) for value in (*scores.values(), *behaviour.values())),
    }
    return {
        "scores": {name: plain(score_LH.tolist()) for name, score_LH in scores.items()},
        "model": {name: plain(value.tolist()) for name, value in behaviour.items()},
        "probe": about,
    }


def summary(record: dict[str, Any]) -> str:
    """One line of a record: the strongest head of the best-known kinds, as `name score (layer.head)`."""
    found = {name: best(record["scores"][name]) for name in ("previous", "induction", "sink")}
    parts = ["{} {:.2f} ({})".format(name, *(pair or (math.nan, "none"))) for name, pair in found.items()]
    loss = record["model"]["repeat_loss_2"]
    return f"{', '.join(parts)}; second-repeat loss {math.nan if loss is None else loss:.2f}"


def best(rows: Sequence[Sequence[float | None]]) -> tuple[float, str] | None:
    """The highest of L rows of H scores and which head has it, as `layer.head`; None where there is none."""
    scores = {f"{i}.{j}": score for i, row in enumerate(rows) for j, score in enumerate(row)}
    found = [(score, head) for head, score in scores.items() if score is not None]
    return max(found, key=lambda pair: pair[0], default=None)


def plain(value: Any) -> Any:
    """Nested lists of numbers with None for what JSON cannot hold."""
    if isinstance(value, list):
        return [plain(part) for part in value]
    return value if math.isfinite(value) else None
