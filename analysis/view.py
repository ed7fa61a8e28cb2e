"""What a run looks like, gathered into plain data (JSON) that `report.py` and `picture.py` draw."""

import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

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
FORMED = 0.3  # a score from which on a head counts as one of its kind
# The page stays below 8 MB, of which 4.8 are plotly.js: numbers per run, evenly thinned where there are more.
MOST_POINTS, MOST_CELLS, MOST_WEIGHTS, MOST_PATTERNS, MOST_HEADS = 2000, 180_000, 500_000, 64, 200
View = dict[str, Any]
Records = Sequence[dict[str, Any]]
Heads = dict[str, dict[str, Any]]  # by `layer.head`


def view(
    name: str,
    config: Config,
    records: Records,
    heads: dict[str, Any] | None = None,
    model: GPT | None = None,
    tokenizer: Tokenizer | None = None,
    text: str | None = None,
    runs: int = 1,
) -> View:
    """One of the `runs` runs of a page: JSON, but for the configuration. What has no source is empty.

    `heads` is the content of heads.json. With a model its attention is shown: on `text`, or on the beginning
    of a text of the probe, two times. Raises `UserError` for a text that the model cannot read.
    """
    train, evals, probed, ends = (
        [r for r in records if r["kind"] == kind] for kind in ("train", "eval", "attention", "end")
    )
    step = max(record["step"] for record in records)
    stages = _stages(config, step)
    means = smooth([r["loss"] for r in train], [r["step"] for r in train], [s["after"] for s in stages])
    train = [record | {"smooth": mean} for record, mean in zip(train, means, strict=True)]
    probe = [r | r["model"] | {kind: best(r["scores"][kind]) for kind in KINDS} for r in probed]
    last = probed[-1] if probed else {"step": None, "scores": {}}
    cells = sum(len(row) for rows in last["scores"].values() for row in rows)
    mapped = thin(probed, max(2, min(MOST_POINTS, MOST_CELLS // max(1, cells)) // runs))
    # A user's own statistic may be missing from records that were written without it.
    scores = {statistic: [r["scores"].get(statistic) for r in mapped] for statistic in last["scores"]}
    document = heads or {}
    table = _table(document.get("heads"), last["scores"])
    leaders = _leaders(table, typed=bool(document))
    kept = [name for n, name in enumerate(table) if n < MOST_HEADS // runs or name in leaders.values()]
    shown = {
        "name": name,
        "parameters": model and model.num_parameters(),
        "step": step,
        "seconds": round(ends[-1]["seconds"]) if ends else None,
        "stages": stages,
        "validated_on": config.data.source,
        "train": _columns(train, MOST_POINTS, "loss", "smooth"),
        "eval": _columns(evals, MOST_POINTS // runs, "loss", "loss_sem", "bits_per_byte"),
        "probe": _columns(probe, MOST_POINTS // runs, "repeat_loss_1", "repeat_loss_2", *KINDS),
        "formed": {
            kind: next(((r["step"], r[kind][1]) for r in probe if r[kind] and r[kind][0] >= FORMED), None)
            for kind in KINDS
        },
        "maps": {"step": [r["step"] for r in mapped], "scores": scores},
        "typed": bool(document),
        "heads_step": document.get("model", last).get("step"),
        "heads": {place: table[place] for place in kept},
        "more_heads": len(table) - len(kept),
        "best": leaders,
    }
    # Four significant digits of each number are what a reader can use.
    shown = json.loads(json.dumps(shown), parse_float=lambda digits: float(f"{float(digits):.4g}"))
    shown |= {"config": config, "attention": []}
    if model is not None and tokenizer is not None:
        texts = _texts(text, document.get("probe", {}).get("example"), tokenizer, config)
        if text is None and "induction" in leaders:
            texts.reverse()  # what an induction head does is clearest on random tokens
        for title, tokens in texts:
            weights = _weights(model, tokens, [*leaders.values(), *table], runs)
            visible = patterns.visible(tokens, tokenizer)
            shown["attention"].append({"title": title, "tokens": visible, "thousandths": weights})
    return shown


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


def _table(described: list[dict[str, Any]] | None, scores: dict[str, Any]) -> Heads:
    """The heads as in heads.json, or of the last scores alone; labelled ones first, then by best score."""
    bare = [
        {"layer": i, "head": j, "scores": {kind: scores[kind][i][j] for kind in KINDS}}
        for i, row in enumerate(scores.get("induction", []))
        for j in range(len(row))
    ]
    heads = [{"labels": [], "ci": {}, "null": {}} | head for head in described or bare]
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
    return head["scores"].get(kind) or 0.0


def _texts(
    given: str | None, example: list[int] | None, tokenizer: Tokenizer, config: Config
) -> list[tuple[str, list[int]]]:
    """What the model reads, by titles. Random tokens are those of the example: they occur in training."""
    T = config.model.context_length
    shuffled = patterns.shuffled(example or tokenizer.symbols.tolist())
    texts = [("distinct tokens at random, two times", patterns.twice(shuffled, tokenizer, T))]
    if given is not None:
        texts.insert(0, ("your text", patterns.encode(given, tokenizer, T)))
    elif example is not None:
        what = "text" if config.data.source in TEXTS else "sequence"
        phrase = patterns.twice(patterns.phrase(example, tokenizer), tokenizer, T)
        texts.insert(0, (f"validation {what}, two times", phrase))
    return texts


def _weights(model: GPT, tokens: list[int], first: list[str], runs: int) -> dict[str, list[list[int]]]:
    """Attention in thousandths, a row per query up to itself, of as many heads as the page has room for."""
    A_LHTT = (1000 * patterns.attention(model, tokens)).round().int()
    L, H, T, _ = A_LHTT.shape
    places = {f"{i}.{j}": A_LHTT[i, j] for i, j in product(range(L), range(H))}
    most = max(1, min(MOST_PATTERNS, MOST_WEIGHTS // T**2) // runs)
    kept = list(dict.fromkeys([*first, *places]))[:most]
    return {name: [row_T[: t + 1].tolist() for t, row_T in enumerate(places[name])] for name in kept}
