"""When heads appear: the labels of each head, and the losses on repeats, over the checkpoints of a run."""

from collections.abc import Iterable
from typing import Any

from analysis.heads import chance_of, labels_of
from analysis.probes import Probes, measure
from model.transformer import GPT


def add_timeline(
    document: dict[str, Any], checkpoints: Iterable[tuple[int, GPT]], probes: Probes, bos_trained: bool
) -> None:
    """Add `summary.timeline` and, to each head, `crossed`: at which step the rule of a label first held.

    `checkpoints` gives step and model, steps ascending. The loss on the second repeat `fell` at the first
    step where it is below half of that on the first; None where it never is.
    """
    steps, records = list[int](), list[dict[str, Any]]()
    for step, model in checkpoints:
        steps.append(step)
        records.append(measure(model, probes, bos_trained))
    chance = chance_of(document["heads"])
    for head in document["heads"]:
        head["crossed"] = {}
        for step, record in zip(steps, records, strict=True):
            scores = {name: rows[head["layer"]][head["head"]] for name, rows in record["scores"].items()}
            for label in labels_of(scores, chance, bos=record["probe"]["bos"]):
                head["crossed"].setdefault(label, step)
    first, second = ([r["model"][f"repeat_loss_{n}"] for r in records] for n in (1, 2))
    scores = {name: [record["scores"][name] for record in records] for name in records[-1]["scores"]}
    # A loss that is not finite is None: of that a half is not known.
    fell = [at for at, a, b in zip(steps, first, second, strict=True) if a and b is not None and b < a / 2]
    document["summary"]["timeline"] = {
        "steps": steps,
        "repeat_loss_1": first,
        "repeat_loss_2": second,
        "scores": scores,
        "fell": min(fell, default=None),
    }
