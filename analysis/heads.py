"""Which head does what: every score beside its nulls and its interval, and labels by rules fixed beforehand.

This is `heads.json`. A head may have several labels or, as most do, none.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from analysis.probes import Pass, Probes, Scores, headlines, look, plain, record_of
from analysis.resampling import bounds, redrawn
from analysis.rows import rows_of
from configs.screen import looks
from configs.seeds import seed_for
from model.attention import Observation
from model.transformer import GPT

MENTIONED = 6  # heads of a label, in a line
MARGIN = 0.1  # that a score must be above all nulls to be a reason for a label
NOT_MEANS = ("max_logit", "head_norm")  # no means over sequences, so resampling these says nothing
SHARES = ("sink_rate",)  # of sequences: each counts the same, however long
Head = dict[str, float]  # score by name


@dataclass(frozen=True)
class Rule:
    """When a head gets a label; by its `score` it is ranked."""

    score: str
    says: str
    holds: Callable[[Head], bool]


def _induction(head: Head) -> bool:
    return all(
        head[f"induction_{n}"] >= 0.3 and head[f"induction_{n}"] > head[f"duplicate_{n}"] for n in LENGTHS
    )


def _previous(head: Head) -> bool:
    return any(head[name] >= 0.4 and head[f"{name}_argmax"] >= 0.5 for name in ("previous", "previous2"))


LENGTHS = ("short", "long")
LABELS = {  # thresholds: Olsson et al. 2022, ARENA, Clark et al. 2019, Voita et al. 2019, Gu et al. 2024
    "induction": Rule("induction", "induction >= 0.3 and above duplicate, at both block lengths", _induction),
    "previous-token": Rule(
        "previous",
        "previous or previous2 >= 0.4, and the largest weight there for at least half of the queries",
        _previous,
    ),
    "sink": Rule("sink", "sink >= 0.3 on text with BOS", lambda head: head["sink"] >= 0.3),
    "duplicate-token": Rule("duplicate", "duplicate >= 0.3", lambda head: head["duplicate"] >= 0.3),
    "current-token": Rule("current", "current >= 0.3", lambda head: head["current"] >= 0.3),
}


def describe_heads(
    model: GPT, probes: Probes, bos_trained: bool, seed: int, about: dict[str, Any]
) -> dict[str, Any]:
    """The content of `heads.json`; `about` says which model it is, `seed` draws the untrained one.

    `null`: what attention with equal scores gets (`uniform`; None where weights alone do not say), and this
    head in an untrained model of the same shape (`random_init`). `ci`: 95 % bootstrap interval over the
    probe's sequences.
    """
    fresh, passes, untaught = untrained(model, seed), dict[str, Pass](), dict[str, Scores]()
    with tqdm(total=2 * len(probes), unit="pass", delay=2, **looks("{n_fmt}/{total_fmt} probes read")) as bar:
        for name, probe in probes.items():
            each = (partial(_only, n=n) for n in range(len(probe.tokens_BT)))
            passes[name] = look(model, name, probe, _uniform, *each)
            bar.update()
            untaught[name] = look(fresh, name, probe, losses=False).scores
            bar.update()
    record = record_of(passes, probes, bos_trained)
    uniform = headlines(*(one.substituted[0] for one in passes.values()))
    random_init = headlines(*untaught.values())
    low, high = _interval(passes, probes, record["scores"], _generator(seed, "bootstrap"))
    tables = [record["scores"], *(_table(scores) for scores in (uniform, random_init, low, high))]
    heads: list[dict[str, Any]] = []
    for layer, head in itertools.product(range(model.config.n_layer), range(model.config.n_head)):
        own, equal, random, least, most = (
            {name: rows[layer][head] for name, rows in t.items()} for t in tables
        )
        null = {name: {"uniform": equal[name], "random_init": random[name]} for name in own}
        ci = {name: None if least[name] is None else [least[name], most[name]] for name in own}
        heads.append({"layer": layer, "head": head, "scores": own, "null": null, "ci": ci})
    chance, bos = chance_of(heads), record["probe"]["bos"]
    heads = [head | {"labels": labels_of(head["scores"], chance, bos), "ablation": None} for head in heads]
    plainest = probes.get("text_without_bos", probes["text"])
    probe = record["probe"] | {"example": plainest.tokens_BT[0][plainest.present[0]].tolist()}
    shape = model.config.model_dump(include={"n_layer", "n_head", "n_kv_head", "d_model", "d_head"})
    about = about | shape | {"parameters": model.num_parameters()}
    return {"model": about, "probe": probe, "heads": heads, "summary": _summary(heads) | record["model"]}


def untrained(model: GPT, seed: int) -> GPT:
    """A model of the same shape with the weights that training would begin with."""
    fresh = GPT(model.config, len(model.token_embedding.weight), _generator(seed, "untrained"))
    return fresh.to(model.device).compute_in(model.head.compute_dtype)


def chance_of(heads: list[dict[str, Any]]) -> dict[str, float]:
    """By score, the most that a head without knowledge gets: equal scores, or the best untrained head."""
    nulls: dict[str, list[float]] = {name: [] for name in heads[0]["null"]}
    for head in heads:
        for name, null in head["null"].items():
            nulls[name] += [value for value in null.values() if value is not None]
    return {name: max(values, default=-math.inf) for name, values in nulls.items()}


def labels_of(scores: dict[str, float | None], chance: dict[str, float], bos: bool) -> list[str]:
    """The labels whose rule holds; a score that is None holds none. A sink is one on BOS.

    Nor does a score that is not `MARGIN` above `chance_of`: with a narrow window, or with keys that are the
    queries, heads without knowledge reach thresholds.
    """
    head = {name: math.nan if value is None else value for name, value in scores.items()}
    for name in (
        "induction_short",
        "induction_long",
        "duplicate",
        "current",
        "previous",
        "previous2",
        "sink",
    ):
        if not head[name] >= chance[name] + MARGIN:
            head[name] = math.nan
    return [label for label, rule in LABELS.items() if rule.holds(head) and (bos or label != "sink")]


def in_words(document: dict[str, Any]) -> str:
    """The strongest heads of each label of `heads.json` in one line, as `layer.head`."""
    labels, found = document["summary"]["labels"].items(), []
    for label, heads in labels:
        rest = f" and {len(heads) - MENTIONED} more" if len(heads) > MENTIONED else ""
        found += [f"{label} {' '.join(f'{i}.{j}' for i, j in heads[:MENTIONED])}{rest}"] if heads else []
    return "; ".join([*found, f"untyped {document['summary']['untyped']} of {len(document['heads'])}"])


def _summary(heads: list[dict[str, Any]]) -> dict[str, Any]:
    """Heads of each label as [layer, head], the strongest first."""
    found = {
        label: sorted((h for h in heads if label in h["labels"]), key=lambda h: -h["scores"][rule.score])
        for label, rule in LABELS.items()
    }
    return {
        "labels": {label: [[h["layer"], h["head"]] for h in some] for label, some in found.items()},
        "untyped": sum(not h["labels"] for h in heads),
        "rules": {label: f"{rule.says}; {MARGIN} above all nulls" for label, rule in LABELS.items()},
    }


def _uniform(seen: Observation) -> Observation:
    """The same layer with all scores equal, a sink's too; what the heads then give is not computed."""
    sink_H = None if seen.sink_H is None else torch.zeros_like(seen.sink_H)
    equal = replace(seen, q_BHTD=torch.zeros_like(seen.q_BHTD), sink_H=sink_H)
    lse_BHT = rows_of(equal).log_outcomes()
    return replace(equal, lse_BHT=lse_BHT, out_BHTD=torch.full_like(seen.out_BHTD, math.nan))


def _only(seen: Observation, n: int) -> Observation:
    """The n-th sequence alone."""
    parts: dict[str, Any] = {}
    for name in ("q_BHTD", "k_BGSD", "out_BHTD", "lse_BHT", "segment"):
        whole = getattr(seen, name)
        parts[name] = None if whole is None else whole[n : n + 1]
    return replace(seen, **parts)


def _interval(
    passes: dict[str, Pass], probes: Probes, found: dict[str, Any], generator: torch.Generator
) -> tuple[Scores, Scores]:
    """Ends of the 95 % intervals over resampled sequences, L x H each; NaN where they would say nothing.

    A sequence weighs as many tokens as it has, and nothing where it is too short for a score. The few first
    queries that a score leaves out weigh too: between documents of different lengths that moves the mean,
    which is undone, and widens the interval a little.
    """
    N = len(probes["text"].tokens_BT)
    drawn_RN = redrawn(N, generator)
    resampled: Scores = {}
    for key, probe in probes.items():
        single = passes[key].substituted[1:]
        length_N11 = probe.present.sum(1)[:, None, None]
        for name in single[0]:
            score_LH = torch.from_numpy(np.array(found[name], dtype=float))  # None becomes NaN
            score_NLH = torch.stack([scores[name] for scores in single])
            weight_NLH = ~score_NLH.isnan() * (1 if name in SHARES else length_N11)
            sum_NLH = weight_NLH * score_NLH
            mean_LH = sum_NLH.nansum(0) / weight_NLH.sum(0)
            mean_RLH = sum_NLH[drawn_RN].nansum(1) / weight_NLH[drawn_RN].sum(1)
            resampled[name] = score_LH + mean_RLH - mean_LH
    resampled |= {name: torch.full_like(resampled[name], math.nan) for name in NOT_MEANS}
    ends = {name: bounds(mean_RLH, N) for name, mean_RLH in headlines(resampled).items()}
    return {name: low for name, (low, _) in ends.items()}, {name: high for name, (_, high) in ends.items()}


def _table(scores: Scores) -> dict[str, Any]:
    return {name: plain(score_LH.tolist()) for name, score_LH in scores.items()}


def _generator(seed: int, purpose: str) -> torch.Generator:
    return torch.Generator().manual_seed(seed_for(seed, purpose))
