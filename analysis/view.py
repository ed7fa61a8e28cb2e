"""What a run or a published model looks like, as plain data (JSON) that `report.py` and `picture.py` draw."""

import json
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch

from analysis import patterns
from analysis.heads import LABELS
from analysis.probes import best
from configs.schema import TEXTS, Config
from data.tokenizers import Tokenizer
from model.transformer import GPT

# Colours that all eyes tell apart (Okabe and Ito 2008).
COLOURS = ["#d55e00", "#0072b2", "#009e73", "#cc79a7", "#a6761d"]
# By the score that ranks its heads: each label and its colour.
KINDS = {rule.score: (label, colour) for (label, rule), colour in zip(LABELS.items(), COLOURS, strict=True)}
SYNTACTIC = "#56b4e9"
FORMED = 0.3  # a score from which on a head counts as one of its kind
# The page stays below 8 MB, of which 4.8 are plotly.js: numbers per run, evenly thinned where there are more.
# The attention gets what the numbers leave of the room (bytes).
MOST_POINTS, MOST_CELLS, MOST_HEADS, ROOM = 2000, 180_000, 1200, 2_900_000
LONGEST_TITLE = 30
View = dict[str, Any]
Records = Sequence[dict[str, Any]]
Heads = dict[str, dict[str, Any]]  # by `layer.head`


def view(
    name: str,
    config: Config,
    records: Records = (),
    heads: dict[str, Any] | None = None,
    model: GPT | None = None,
    tokenizer: Tokenizer | None = None,
    texts: Sequence[str] = (),
    runs: int = 1,
) -> View:
    """One of the `runs` runs of a page, or a published model: JSON, but for the configuration.

    What has no source is empty. `heads` is the content of heads.json. With a model its attention is shown: on
    each of the `texts`, or on the beginning of a text of the probe, two times. Raises `UserError` for a text
    that the model cannot read.
    """
    train, evals, probed, ends = (
        [r for r in records if r["kind"] == kind] for kind in ("train", "eval", "attention", "end")
    )
    document = heads or {}
    about, summary = document.get("model", {}), document.get("summary", {})
    checked = summary.get("timeline") or {"steps": []}  # at the checkpoints; the finer of both is drawn
    drawn = checked if len(checked["steps"]) > len(probed) else _recorded(probed)
    timeline = drawn if drawn["steps"] or not document else _moment(document)
    steps, scores = timeline["steps"], timeline["scores"]
    found = {kind: [best(rows) for rows in scores.get(kind, [])] for kind in KINDS}
    probe = {"step": steps} | {key: timeline[key] for key in ("repeat_loss_1", "repeat_loss_2")} | found
    formed = {
        kind: [(at, one[1]) for at, one in zip(steps, bests, strict=True) if one and one[0] >= FORMED]
        for kind, bests in found.items()
    }
    last = {name: rows[-1] for name, rows in scores.items()}
    cells = sum(len(row) for rows in last.values() for row in rows)
    most = max(2, min(MOST_POINTS, MOST_CELLS // max(1, cells)) // runs)
    step = max((record["step"] for record in records), default=about.get("step", 0))
    stages = _stages(config, step)
    means = smooth([r["loss"] for r in train], [r["step"] for r in train], [s["after"] for s in stages])
    train = [record | {"smooth": mean} for record, mean in zip(train, means, strict=True)]
    table = _table(document.get("heads"), last)
    leaders = _leaders(table, typed=bool(document))
    kept = [name for n, name in enumerate(table) if n < MOST_HEADS // runs or name in leaders.values()]
    shown = {
        "name": name,
        "published": about.get("published"),
        "parameters": model.num_parameters() if model else about.get("parameters"),
        "step": step,
        "seconds": round(ends[-1]["seconds"]) if ends else None,
        "stages": stages,
        "validated_on": config.data.source,
        "train": _columns(train, MOST_POINTS, "loss", "smooth"),
        "eval": _columns(evals, MOST_POINTS // runs, "loss", "loss_sem", "bits_per_byte"),
        "probe": {key: thin(column, MOST_POINTS // runs) for key, column in probe.items()},
        "formed": {kind: places[0] if places else None for kind, places in formed.items()},
        "crossed": _crossings(document.get("heads", []), checked),
        "maps": {"step": thin(steps, most), "scores": {n: thin(rows, most) for n, rows in scores.items()}},
        "typed": bool(document),
        "heads_step": about.get("step", steps[-1] if steps else None),
        "heads": {place: table[place] for place in kept},
        "more_heads": len(table) - len(kept),
        "best": leaders,
        "summary": {part: summary.get(part) for part in ("ablation", "circuits", "syntax", "rules")},
        "fell": checked.get("fell"),
    }
    # Four significant digits of each number are what a reader can use.
    shown = json.loads(json.dumps(shown), parse_float=lambda digits: float(f"{float(digits):.4g}"))
    room = ROOM // runs - len(json.dumps(shown, separators=(",", ":")))
    shown |= {"config": config, "attention": []}
    if model is not None and tokenizer is not None:
        read = _texts(texts, document, tokenizer, config)
        if not texts and "induction" in leaders:
            read.reverse()  # what an induction head does is clearest on random tokens
        each = 4 / 3 * sum(len(tokens) * (len(tokens) + 1) / 2 for _, tokens, _ in read)  # bytes of one head
        for title, tokens, whole in read:
            weights = _weights(model, tokens, [*leaders.values(), *table], max(1, int(room / each)))
            visible = patterns.visible(tokens, tokenizer)
            shown["attention"].append({"title": title, "tokens": visible, "of": whole, "weights": weights})
    return shown


def colour_of(label: str) -> str:
    """The colour of a label; of all syntactic ones the same."""
    return dict(KINDS.values()).get(label, SYNTACTIC if label.startswith("syntactic") else "#555555")


def thin(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` (two or more) of the items, evenly spread, the first and the last among them."""
    n = len(items)
    return list(items) if n <= most else [items[i * (n - 1) // (most - 1)] for i in range(most)]


def smooth(values: Sequence[float], steps: Sequence[int], borders: Sequence[int]) -> list[float]:
    """Mean over as many neighbours to the left as to the right, within a stage.

    So straight lines stay as they are, and so does a jump at a border.
    """
    widest, smoothed = min(50, max(1, len(values) // 50)), []
    for first, end in pairwise([0, *(bisect_right(steps, border) for border in borders), len(values)]):
        for i in range(first, end):
            reach = min(widest, i - first, end - 1 - i)
            near = values[i - reach : i + reach + 1]
            smoothed.append(sum(near) / len(near))
    return smoothed


def _stages(config: Config, step: int) -> list[dict[str, Any]]:
    """The mixture from each border on that is not ahead; none where the data stay the same."""
    found: list[dict[str, Any]] = []
    after = 0
    for stage in config.data.stages:
        mix = [f"{w:g} {name}" if len(stage.weights) > 1 else name for name, w in stage.weights.items()]
        found.append({"after": after, "mix": " : ".join(mix)})
        after = stage.until or 0
    return [stage for stage in found if stage["after"] < max(1, step)] if len(found) > 1 else []


def _columns(records: Records, most: int, *keys: str) -> dict[str, list[Any]]:
    """At most so many of the records' steps and fields, as columns."""
    kept = thin(records, most)
    return {key: [record[key] for record in kept] for key in ("step", *keys)}


def _recorded(probed: Records) -> dict[str, Any]:
    """A timeline of what a training recorded."""
    # A user's own statistic may be missing from records that were written without it.
    names = probed[-1]["scores"] if probed else []
    losses = {key: [r["model"][key] for r in probed] for key in ("repeat_loss_1", "repeat_loss_2")}
    scores = {name: [r["scores"].get(name) for r in probed] for name in names}
    return {"steps": [r["step"] for r in probed], "scores": scores} | losses


def _moment(document: dict[str, Any]) -> dict[str, Any]:
    """The timeline of a model that was evaluated once."""
    heads, summary = document["heads"], document["summary"]
    rows = [[h for h in heads if h["layer"] == i] for i in range(1 + heads[-1]["layer"])]
    scores = {name: [[[h["scores"][name] for h in row] for row in rows]] for name in heads[0]["scores"]}
    losses = {key: [summary.get(key)] for key in ("repeat_loss_1", "repeat_loss_2")}
    return {"steps": [document["model"].get("step")], "scores": scores} | losses


def _crossings(heads: list[dict[str, Any]], timeline: dict[str, Any]) -> list[dict[str, Any]]:
    """Which head got which label at which checkpoint for the first time, and its score there."""
    found = []
    for head, (kind, (label, _)) in product(heads, KINDS.items()):
        i, j, step = head["layer"], head["head"], head.get("crossed", {}).get(label)
        if step is not None:
            n, scores = timeline["steps"].index(step), timeline["scores"]
            # A previous-token head may look two back.
            score = max(scores[name][n][i][j] or 0.0 for name in (kind, f"{kind}2") if name in scores)
            found.append({"kind": kind, "head": f"{i}.{j}", "step": step, "score": score})
    return found


def _table(described: list[dict[str, Any]] | None, scores: dict[str, Any]) -> Heads:
    """The heads as in heads.json, or of the last scores alone; labelled ones first, then by best score.

    A score stands with its interval and nulls: score, low, high, uniform, random_init.
    """
    L, H = np.shape(next(iter(scores.values()), [[]]))
    bare: list[dict[str, Any]] = [
        {"layer": i, "head": j, "scores": {name: rows[i][j] for name, rows in scores.items()}}
        for i, j in product(range(L), range(H))
    ]
    heads = []
    for head in described or bare:
        numbers = {}
        for name, score in head["scores"].items():
            null = head.get("null", {}).get(name, {})
            interval = head.get("ci", {}).get(name) or (None, None)
            numbers[name] = [score, *interval, null.get("uniform"), null.get("random_init")]
        extra = {part: head.get(part) for part in ("ablation", "copying", "syntax", "crossed")}
        place = {"layer": head["layer"], "head": head["head"], "labels": head.get("labels", [])}
        heads.append(place | extra | {"scores": numbers})
    heads.sort(key=lambda head: (not head["labels"], -max(_score(head, kind) for kind in KINDS)))
    return {f"{head['layer']}.{head['head']}": head for head in heads}


def _leaders(heads: Heads, typed: bool) -> dict[str, str]:
    """The best head of each kind that has one, by its labels or, before there are any, by its score."""
    found: dict[str, str] = {}
    for kind, (label, _) in KINDS.items():
        scores = {n: _score(head, kind) for n, head in heads.items() if label in head["labels"] or not typed}
        name = max(scores, key=scores.__getitem__, default=None)
        if name and (typed or scores[name] >= FORMED):
            found[kind] = name
    return found


def _score(head: dict[str, Any], kind: str) -> float:
    return head["scores"].get(kind, [0.0])[0] or 0.0


def _texts(
    given: Sequence[str], document: dict[str, Any], tokenizer: Tokenizer, config: Config
) -> list[tuple[str, list[int], int]]:
    """What the model reads: titles, tokens, and how many there would be, had they room.

    Random tokens are those of the probe's example: they occur in training.
    """
    T, example = config.model.context_length, document.get("probe", {}).get("example")
    texts = []
    for text in given:
        line = " ".join(text.split())
        title = f"“{line[:LONGEST_TITLE]}{'…' if line[LONGEST_TITLE:] else ''}”"
        texts.append((title, *patterns.encode(text, tokenizer, T)))
    if example is not None and not given:
        what = "validation text" if config.data.source in TEXTS else "validation sequence"
        what = "text of the probe" if document["model"].get("published") else what
        phrase = patterns.twice(patterns.phrase(example, tokenizer), tokenizer, T)
        texts.append((f"{what}, two times", phrase, len(phrase)))
    shuffled = patterns.shuffled(example or tokenizer.symbols.tolist())
    block = patterns.twice(shuffled, tokenizer, T)
    return [*texts, ("distinct tokens at random, two times", block, len(block))]


def _weights(model: GPT, tokens: list[int], first: list[str], most: int) -> dict[str, str]:
    """Attention of so many heads: base64 of a byte a weight, 255 times its square root.

    A row per query, up to itself. So the smallest weights are the finest, as in the colours; the error is at
    most 0.004, at weight 1.
    """
    byte_LHTT = (255 * patterns.attention(model, tokens).clamp(0, 1).sqrt()).round().byte()
    L, H, T, _ = byte_LHTT.shape
    past_TT = torch.ones(T, T, dtype=torch.bool).tril()
    places = {f"{i}.{j}": byte_LHTT[i, j] for i, j in product(range(L), range(H))}
    kept = list(dict.fromkeys([*first, *places]))[:most]
    return {name: b64encode(bytes(places[name][past_TT].tolist())).decode() for name in kept}
