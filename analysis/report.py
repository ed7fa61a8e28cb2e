"""`report.html`: one run or several on one page, in one file that needs no network.

Whatever a run brings along (names, corpus, labels) is text to the page, never markup.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from analysis.heads import LABELS
from analysis.view import FORMED, KINDS, View
from configs.cli import flat
from configs.schema import TEXTS

MEANINGS = {
    "induction": "weight on the token that followed the current one last time",
    "previous": "weight on the token before",
    "sink": "weight on the first token of a text",
    "duplicate": "weight on earlier occurrences of the current token",
    "current": "weight on the token itself",
    "previous2": "weight on the token two before",
    "previous_argmax": "share of queries whose largest weight is on the token before",
    "previous2_argmax": "the same for the token two before",
    "sink_no_bos": "weight on the first token of a text without BOS",
    "sink_rate": "share of texts whose first token gets over 0.3",
    "entropy_normalized": "spread over the keys: 1 uniform, 0 a single key",
    "entropy": "spread over the keys in nats",
    "max_logit": "largest scaled score before the softmax",
    "head_norm": "size of what the head adds, over the layer's mean",
}
RUN_COLOURS = ["#332288", "#ddaa33", "#882255", "#88ccee", "#999933", "#000000"]  # none is that of a label
SHARES = sorted({*MEANINGS} - {"entropy", "max_logit", "head_norm"})  # from 0 to 1 by definition
DRAWN = ["name", "stages", "validated_on", "train", "eval", "probe", "best", "maps"]
DRAWN += ["nulls", "chosen", "kind", "attention"]


def page(views: Sequence[View]) -> str:
    """The HTML of one run or several, each as `analysis.view.view` has gathered it."""
    here = Path(__file__).parent
    pages = jinja2.Environment(loader=jinja2.FileSystemLoader(here), autoescape=True, trim_blocks=True)
    pages.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    pages.filters["score"] = lambda value: "none" if value is None else f"{value:.2f}"
    runs = [{key: shown[key] for key in DRAWN} for shown in views]
    return pages.get_template("report.html.j2").render(
        views=views,
        kinds=KINDS,
        formed_at=FORMED,
        texts=TEXTS,
        rules=LABELS,
        differing=differing(views),
        meanings=MEANINGS,
        colours=RUN_COLOURS,
        label_colours=dict(KINDS.values()),
        data={"runs": runs, "kinds": KINDS, "meanings": MEANINGS, "shares": SHARES, "colours": RUN_COLOURS},
        plotly=get_plotlyjs(),
        script=(here / "report.js").read_text(encoding="utf-8"),
        style=(here / "report.css").read_text(encoding="utf-8"),
    )


def differing(views: Sequence[View]) -> dict[str, list[Any]]:
    """The settings that are not the same in all runs, by key, but for where a run lies and is logged."""
    settings = [flat(view["config"]) for view in views]
    found = {key: [setting[key] for setting in settings] for key in settings[0]}
    return {
        key: values
        for key, values in found.items()
        if any(value != values[0] for value in values) and key != "run.dir" and not key.startswith("log.")
    }
