"""`report.html`: one run or several on one page, in one file that needs no network.

Whatever a run brings along (names, corpus, labels) is text to the page, never markup.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from analysis.heads import LABELS
from analysis.view import FORMED, KINDS, View, colour_of
from configs.cli import flat
from configs.schema import TEXTS, Config, Model

RUN_COLOURS = ["#332288", "#ddaa33", "#882255", "#88ccee", "#999933", "#000000"]  # none is that of a label
OF_ATTENTION = ["window", "qk", "value", "scale", "sink", "gate", "n_kv_head", "init_from"]


def page(views: Sequence[View]) -> str:
    """The HTML of one run or several, each as `analysis.view.view` has gathered it."""
    here = Path(__file__).parent
    pages = jinja2.Environment(loader=jinja2.FileSystemLoader(here), autoescape=True, trim_blocks=True)
    pages.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    pages.filters["score"] = lambda value: "none" if value is None else f"{value:.2f}"
    drawn = [{key: part for key, part in shown.items() if key != "config"} for shown in views]
    found = [label for view in views for head in view["heads"].values() for label in head["labels"]]
    rules = {label: rule.says for label, rule in LABELS.items()}
    for view in views:
        rules |= view["summary"]["rules"] or {}
    labels = {label: colour_of(label) for label in [*LABELS, "syntactic:", *found]}
    return pages.get_template("report.html.j2").render(
        views=views,
        data={"runs": drawn, "kinds": KINDS, "labels": labels, "colours": RUN_COLOURS},
        rules=rules,
        formed_at=FORMED,
        texts=TEXTS,
        differing=differing(views),
        unusual=unusual,
        plotly=get_plotlyjs(),
        script=(here / "report.js").read_text(encoding="utf-8"),
        style=(here / "report.css").read_text(encoding="utf-8"),
    )


def differing(views: Sequence[View]) -> dict[str, list[Any]]:
    """The settings that are not the same in all runs, by key, but for where a run lies and is logged."""
    settings = [flat(view["config"]) for view in views]
    found = {key: [setting[key] for setting in settings] for key in settings[0]}
    for key, values in list(found.items()):
        if key == "run.dir" or key.startswith("log.") or all(value == values[0] for value in values):
            del found[key]
    return found


def unusual(config: Config) -> list[str]:
    """What sets the attention apart from that of an ordinary GPT: `key value`, the key alone if it is on."""
    usual = {key: field.default for key, field in Model.model_fields.items()}
    usual["n_kv_head"] = config.model.n_head
    asked = {key: getattr(config.model, key) for key in OF_ATTENTION}
    found = {key: value for key, value in asked.items() if value != usual[key]}
    if config.data.mask_documents:
        found["mask_documents"] = True
    return [key if value is True else f"{key} {value}" for key, value in found.items()]
