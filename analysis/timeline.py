"""When heads appear: the labels of each head, and the losses on repeats, over the checkpoints of a run."""

from collections.abc import Iterable
from typing import Any

from analysis.heads import labels_of
from analysis.probes import Probes, measure
from model.transformer import GPT


def add_timeline(
    document: dict[str, Any], checkpoints: Iterable[tuple[int, GPT]], probes: Probes, bos_trained: bool
) -> None:
    """Add `summary.timeline` and, to each head, `crossed`: at which step the rule of a label first held.

    `checkpoints` gives step and model, steps ascending. The loss on the second repeat `fell` at the first
    step where it is below the middle of its first value and its lowest; None where it never was higher.
    """
    steps, records = list[int](), list[dict[str, Any]]()
    for step, model in checkpoints:
        steps.append(step)
        records.append(measure(model, probes, bos_trained))
    for head in document["heads"]:
        head["crossed"] = {}
        for step, record in zip(steps, records, strict=True):
            scores = {name: rows[head["layer"]][head["head"]] for name, rows in record["scores"].items()}
            for label in labels_of(scores, bos=record["probe"]["bos"]):
                head["crossed"].setdefault(label, step)
    losses = {
        name: [record["model"][name] for record in records] for name in ("repeat_loss_1", "repeat_loss_2")
    }
    scores = {name: [record["scores"][name] for record in records] for name in records[-1]["scores"]}
    timeline = {"steps": steps, **losses, "scores": scores, "fell": _fell(steps, losses["repeat_loss_2"])}
    document["summary"]["timeline"] = timeline


def _fell(steps: list[int], losses: list[float | None]) -> int | None:
    known = [loss for loss in losses if loss is not None]
    if not known or losses[0] is None:
        return None
    middle = (losses[0] + min(known)) / 2
    return next(
        (s for s, loss in zip(steps, losses, strict=True) if loss is not None and loss < middle), None
    )
