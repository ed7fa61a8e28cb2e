"""What a run looks like, gathered into plain data (JSON) that `report.py` and `picture.py` draw."""

from collections.abc import Sequence
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
    of = {kind: [r for r in records if r["kind"] == kind] for kind in ("train", "eval", "attention", "end")}
    formed = {kind: _formed(of["attention"], kind) for kind in KINDS if of["attention"]}
    probed, stages = thin(of["attention"], MOST_POINTS // runs), _stages(config)
    table = _table(heads, probed[-1]["scores"] if probed else {})
    chosen = _chosen(table, typed=heads is not None)
    winners = {kind: _digits([best(r["scores"][kind]) for r in probed]) for kind in KINDS if probed}
    shown = {
        "name": name,
        "config": config,
        "parameters": model and model.num_parameters(),
        "step": max(record["step"] for record in records),
        "seconds": of["end"][-1]["seconds"] if of["end"] else None,
        "stages": stages,
        "validated_on": config.data.source,
        "train": _training(of["train"], [stage["after"] for stage in stages]),
        "eval": _columns(thin(of["eval"], MOST_POINTS // runs), "loss", "loss_sem", "bits_per_byte"),
        "probe": _columns(
            [r["model"] | {"step": r["step"]} for r in probed], "repeat_loss_1", "repeat_loss_2"
        ),
        "best": winners,
        "formed": formed,
        "maps": _maps(probed, MOST_CELLS // runs),
        "heads": table[: MOST_HEADS // runs],
        "more_heads": max(0, len(table) - MOST_HEADS // runs),
        "heads_step": (heads or {}).get("model", {}).get("step", probed[-1]["step"] if probed else None),
        "nulls": {
            f"{head['layer']}.{head['head']}": _digits(head["null"]) for head in table[: MOST_HEADS // runs]
        },
        "typed": heads is not None,
        "chosen": chosen,
        "kind": _kinds(table, chosen),
        "attention": [],
    }
    if model is not None and tokenizer is not None:
        example = (heads or {}).get("probe", {}).get("example")
        texts = _texts(text, example, tokenizer, config)
        if text is None and chosen and chosen[0]["kind"] == "induction":
            texts = dict(reversed(texts.items()))  # what an induction head does is clearest on random tokens
        for title, tokens in texts.items():
            weights = _weights(model, tokens, [*chosen, *table], runs)
            shown["attention"].append(
                {"title": title, "tokens": patterns.visible(tokens, tokenizer), "thousandths": weights}
            )
    return shown


def thin(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` (two or more) of the items, evenly spread, the first and the last among them."""
    n = len(items)
    return list(items) if n <= most else [items[i * (n - 1) // (most - 1)] for i in range(most)]


def smooth(values: Sequence[float], steps: Sequence[int], borders: Sequence[int]) -> list[float]:
    """Mean over as many neighbours to the left as to the right, within a stage.

    So straight lines stay as they are, and so does a jump at a border.
    """
    widest = min(50, max(1, len(values) // 50))
    stage = [sum(step > border for border in borders) for step in steps]
    smoothed = []
    for i in range(len(values)):
        reach = min(widest, i, len(values) - 1 - i)
        while stage[i - reach] != stage[i + reach]:
            reach -= 1
        near = values[i - reach : i + reach + 1]
        smoothed.append(sum(near) / len(near))
    return smoothed


def _stages(config: Config) -> list[dict[str, Any]]:
    """The mixture from each border on; none where the data stay the same."""
    stages = config.data.stages
    if len(stages) < 2:
        return []
    borders = [0, *(stage.until for stage in stages[:-1])]
    mixes = [
        [f"{w:g} {name}" if len(s.weights) > 1 else name for name, w in s.weights.items()] for s in stages
    ]
    return [{"after": step, "mix": " : ".join(mix)} for step, mix in zip(borders, mixes, strict=True)]


def _formed(probed: Records, kind: str) -> tuple[int, str] | None:
    """The first step at which some head counts as one of a kind, and which: it need not be the last best."""
    winners = ((record["step"], best(record["scores"][kind])) for record in probed)
    return next(((step, found[1]) for step, found in winners if found and found[0] >= FORMED), None)


def _columns(records: Records, *keys: str) -> dict[str, list]:
    """The records' steps and fields as columns."""
    return {key: _digits([record[key] for record in records]) for key in ("step", *keys)}


def _training(records: Records, borders: Sequence[int]) -> dict[str, list]:
    columns = _columns(records, "loss")
    columns["smooth"] = _digits(smooth(columns["loss"], columns["step"], borders))
    return {key: thin(values, MOST_POINTS) for key, values in columns.items()}


def _maps(probed: Records, most: int) -> dict[str, Any]:
    """Every statistic of every head over the steps: `scores[name]` is steps x L x H."""
    cells = sum(len(row) for rows in probed[-1]["scores"].values() for row in rows) if probed else 1
    kept = thin(probed, max(2, most // cells))
    names = probed[-1]["scores"] if probed else ()
    # A user's own statistic may be missing from records that were written without it.
    scores = {name: [_digits(r["scores"].get(name)) for r in kept] for name in names}
    return {"step": [r["step"] for r in kept], "scores": scores}


def _table(heads: dict[str, Any] | None, scores: dict[str, Any]) -> list[dict[str, Any]]:
    """The heads as in heads.json, or of the last scores alone; labelled ones first, then by best score."""
    bare = [
        {"layer": i, "head": j, "scores": {kind: scores[kind][i][j] for kind in KINDS}}
        for i, row in enumerate(scores.get("induction", []))
        for j in range(len(row))
    ]
    table: list[dict[str, Any]] = [
        {"labels": [], "ci": {}, "null": {}} | head for head in (heads["heads"] if heads else bare)
    ]

    def order(head: dict[str, Any]) -> tuple[bool, float]:
        return not head["labels"], -max(head["scores"].get(kind) or 0.0 for kind in KINDS)

    return sorted(table, key=order)


def _chosen(table: Sequence[dict[str, Any]], typed: bool) -> list[dict[str, Any]]:
    """The best head of each kind that has one, by its labels or, before there are any, by its score."""
    found = []
    for kind, (label, _) in KINDS.items():
        scored = [(head["scores"].get(kind) or 0.0, head) for head in table]
        of_kind = [(s, head) for s, head in scored if (label in head["labels"] if typed else s >= FORMED)]
        for score, head in sorted(of_kind, key=lambda pair: -pair[0])[:1]:
            found.append(
                {"kind": kind, "layer": head["layer"], "head": head["head"], "score": _digits(score)}
            )
    return found


def _kinds(table: Sequence[dict[str, Any]], chosen: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The kind whose colour a head has: its first label, or what it is the best of."""
    labelled = [
        (head, kind) for kind, (label, _) in KINDS.items() for head in table if label in head["labels"]
    ]
    pairs = [*labelled, *((head, head["kind"]) for head in chosen)]
    return {f"{head['layer']}.{head['head']}": kind for head, kind in reversed(pairs)}


def _texts(
    given: str | None, example: list[int] | None, tokenizer: Tokenizer, config: Config
) -> dict[str, list[int]]:
    """What the model reads, by title. Random tokens are those of the example: they occur in training."""
    texts, context_length = {}, config.model.context_length
    if given is not None:
        texts["your text"] = patterns.encode(given, tokenizer, context_length)
    elif example is not None:
        what = "text" if config.data.source in TEXTS else "sequence"
        texts[f"validation {what}, two times"] = patterns.twice(
            patterns.phrase(example, tokenizer), tokenizer, context_length
        )
    symbols = example or tokenizer.symbols.tolist()
    texts["distinct tokens at random, two times"] = patterns.twice(
        patterns.shuffled(symbols), tokenizer, context_length
    )
    return texts


def _weights(
    model: GPT, tokens: list[int], first: list[dict[str, Any]], runs: int
) -> dict[str, list[list[int]]]:
    """Attention in thousandths, a row per query up to itself, of as many heads as the page has room for."""
    A_LHTT = (1000 * patterns.attention(model, tokens)).round().int()
    L, H, T, _ = A_LHTT.shape
    places = [(head["layer"], head["head"]) for head in first]
    places += [(layer, head) for layer in range(L) for head in range(H)]
    most = max(1, min(MOST_PATTERNS, MOST_WEIGHTS // T**2) // runs)
    kept = list(dict.fromkeys(places))[:most]
    return {f"{i}.{j}": [A_LHTT[i, j, t, : t + 1].tolist() for t in range(T)] for i, j in kept}


def _digits(value: Any) -> Any:
    """Four significant digits of each number, which is what a reader can use."""
    if isinstance(value, dict):
        return {key: _digits(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_digits(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
