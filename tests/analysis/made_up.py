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
