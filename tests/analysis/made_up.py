"""Runs that never were, with numbers that are easy to find again on a page."""

from typing import Any

from configs.cli import validate
from configs.schema import Config

SCORES = [
    "induction",
    "previous",
    "sink",
    "duplicate",
    "current",
    "entropy",
    "induction_short",
    "induction_long",
]


def config(**sections: dict[str, Any]) -> Config:
    return validate({"train": {"steps": 300}, "model": {"context_length": 32}, **sections})


def score(name: str, step: int, layer: int, head: int) -> float:
    """Another number for each statistic, step, layer and head, below 1."""
    return round((1 + SCORES.index(name)) / 10 + step / 1e4 + layer / 1e5 + head / 1e6, 6)


def attention(step: int, L: int = 2, H: int = 2, **scores: Any) -> dict[str, Any]:
    """A record; `scores` replaces or adds statistics."""
    made_up = {name: [[score(name, step, i, j) for j in range(H)] for i in range(L)] for name in SCORES}
    model = {"repeat_loss_1": 4.5, "repeat_loss_2": 4.0 - step / 100, "icl_score": None}
    return {
        "kind": "attention",
        "step": step,
        "scores": made_up | scores,
        "model": model,
        "probe": {},
        "seconds": 0.1,
    }


def records(L: int = 2, H: int = 2, steps: tuple[int, ...] = (0, 100, 200, 300)) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [attention(step, L, H) for step in steps]
    found += [{"kind": "train", "step": step, "loss": 4.0 - step / 100} for step in range(1, 301)]
    found += [
        {"kind": "eval", "step": step, "loss": 4.25 - step / 100, "loss_sem": 0.01, "bits_per_byte": 2.5}
        for step in (0, 300)
    ]
    return [*found, {"kind": "end", "step": 300, "seconds": 12.0, "telemetry_share": 0.01}]


def heads(L: int = 2, H: int = 2, labels: dict[tuple[int, int], list[str]] | None = None) -> dict[str, Any]:
    """heads.json of the last record."""
    last = attention(300, L, H)["scores"]

    def entry(i: int, j: int) -> dict[str, Any]:
        scores = {name: rows[i][j] for name, rows in last.items()}
        return {
            "layer": i,
            "head": j,
            "scores": scores,
            "null": {name: {"uniform": 0.0125, "random_init": 0.0375} for name in scores},
            "ci": {name: [value - 0.01, value + 0.01] for name, value in scores.items()},
            "labels": (labels or {}).get((i, j), []),
            "ablation": None,
        }

    entries = [entry(i, j) for i in range(L) for j in range(H)]
    return {"model": {"step": 300}, "probe": {"example": list(range(10))}, "heads": entries, "summary": {}}


def effect(change: float) -> dict[str, Any]:
    """What a removal changes on both probes; the bounds are 0.005 away."""
    return {
        "natural": {"change": change, "ci": [change - 0.005, change + 0.005]},
        "repeat": {"change": 10 * change, "ci": [10 * change - 0.005, 10 * change + 0.005]},
    }


def evaluated(document: dict[str, Any], steps: tuple[int, ...] = (0, 100, 200, 300)) -> dict[str, Any]:
    """The same with all that an evaluation can add: labelled heads are removed, the first step has none."""
    labels: dict[str, list[list[int]]] = {}
    for head in document["heads"]:
        place, n = [head["layer"], head["head"]], len(labels)
        for label in head["labels"]:
            labels.setdefault(label, []).append(place)
        head["copying"] = {"score": 0.5 - n / 10, "random_init": 0.01}
        head["syntax"] = {"nsubj": 0.25 + head["head"] / 8, "obj": 0.5}
        head["crossed"] = dict.fromkeys(head["labels"], steps[-2])
        if head["labels"]:
            head["ablation"] = {"mean": effect(0.03), "zero": effect(0.04)}
    groups = [
        {
            "label": label,
            "heads": places,
            "mean": effect(0.2),
            "zero": effect(0.3),
            "control": {
                "pool": "untyped",
                "draws": [[[0, 0]]] * 3,
                "mean": effect(0.001),
                "zero": effect(0.002),
            },
        }
        for label, places in labels.items()
    ]
    relation = {
        "n": 240,
        "head": [0, 1],
        "ci": [0.6, 0.8],
        "offset": -1,
        "offset_accuracy": 0.5,
        "random_init": 0.2,
    }
    shape = 1 + document["heads"][-1]["layer"], 1 + document["heads"][-1]["head"]
    scores = [attention(step, *shape)["scores"] for step in steps]
    document["summary"] = {
        "rules": {"syntactic:<relation>": "as made up"},
        "ablation": {"baseline": {"natural": 1.75, "repeat": 0.125}, "groups": groups},
        "circuits": [
            {
                "previous": [0, 1],
                "induction": [1, 0],
                "k_composition": 0.625,
                "others": 0.25,
                "random_init": 0.125,
            }
        ],
        "syntax": {
            "treebank": "made-up",
            "sentences": 100,
            "words": 900,
            "cut": 3,
            "skipped": {},
            "relations": {
                "nsubj": relation | {"accuracy": 0.7, "margin": 0.2},
                "obj": relation | {"accuracy": 0.625, "margin": 0.125, "head": [1, 1]},
            },
        },
        "timeline": {
            "steps": list(steps),
            "repeat_loss_1": [4.5 for _ in steps],
            "repeat_loss_2": [4.0 - step / 100 for step in steps],
            "scores": {name: [one[name] for one in scores] for name in SCORES},
            "fell": steps[-2],
        },
    }
    return document


def published(document: dict[str, Any]) -> dict[str, Any]:
    """The same of a model that has no steps."""
    for head in document["heads"]:
        head.pop("crossed", None)
    document["summary"].pop("timeline", None)
    document["summary"] |= {"repeat_loss_1": 4.5, "repeat_loss_2": 0.125}
    return document | {"model": {"published": "made-up-135m", "parameters": 134_515_008}}
