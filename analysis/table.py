"""`heads.csv`: what `heads.json` says of each head, a row a head."""

import csv
import io
from typing import Any

from analysis.heads import LABELS


def csv_of(document: dict[str, Any]) -> str:
    """The heads of `heads.json`; what was not measured is empty.

    Of each score NAME there are NAME, its bounds NAME_low and NAME_high, and the nulls NAME_uniform and
    NAME_random_init. Relations come last: there are as many as the treebank has.
    """
    rows = [_row(head) for head in document["heads"]]
    text = io.StringIO()
    writer = csv.DictWriter(
        text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(head: dict[str, Any]) -> dict[str, Any]:
    row = {"layer": head["layer"], "head": head["head"], "labels": ";".join(head["labels"])}
    for name, score in head["scores"].items():
        row |= _bounded(name, score, head["ci"][name])
        row |= {f"{name}_{kind}": head["null"][name][kind] for kind in ("uniform", "random_init")}
    ablation, copying = head.get("ablation") or {}, head.get("copying") or {}
    for kind in ("mean", "zero"):
        for probe in ("natural", "repeat"):
            effect = ablation.get(kind, {}).get(probe, {})
            row |= _bounded(f"ablation_{kind}_{probe}", effect.get("change"), effect.get("ci"))
    row |= {"copying": copying.get("score"), "copying_random_init": copying.get("random_init")}
    row |= {f"crossed_{label}": head.get("crossed", {}).get(label) for label in LABELS}
    return row | {f"syntax_{name}": accuracy for name, accuracy in head.get("syntax", {}).items()}


def _bounded(name: str, value: float | None, ci: list[float] | None) -> dict[str, float | None]:
    low, high = ci or (None, None)
    return {name: value, f"{name}_low": low, f"{name}_high": high}
