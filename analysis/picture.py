"""A run in one picture: scores and losses over the steps, and where in the model the heads are at the end.

A published model has no steps: the grid of its heads by label, and where each kind is.
"""

from io import BytesIO
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure

from analysis.view import KINDS, View, colour_of
from configs.files import replace_bytes

SHOWN = ("induction", "previous", "sink")
GREY, PALE = "#555555", "#f4f4f4"


def draw(path: Path, view: View) -> None:
    """Write a picture, 1600 pixels wide, of a model whose heads are known: SVG by its suffix, else PNG."""
    figure = Figure(figsize=(10, 5), dpi=160, layout="constrained")
    if view["published"]:
        L, H = np.shape(view["maps"]["scores"][SHOWN[0]][-1])
        figure.set_figheight(np.clip(1.5 + 2.6 * L / H, 2.6, 5))  # what grids of this shape fill
        labels, *maps = figure.subplots(1, 1 + len(SHOWN), width_ratios=[2, 1, 1, 1])
        _draw_labels(labels, view)
    else:
        panels = figure.subplot_mosaic("si;si;sp;sp;lk;lk", width_ratios=[4, 1])
        scores, losses, *maps = (panels[letter] for letter in "slipk")
        _draw_steps(scores, losses, view)
    for kind, axes in zip(SHOWN, maps, strict=True):
        label, colour = KINDS[kind]
        scores_LH = np.array(view["maps"]["scores"][kind][-1], dtype=float)  # None becomes NaN
        axes.imshow(scores_LH, LinearSegmentedColormap.from_list(kind, [PALE, colour]), vmin=0, vmax=1)
        _name(axes, label, colour)
    maps[0].set(ylabel="layer")
    drawn, form = BytesIO(), "svg" if path.suffix.lower() == ".svg" else "png"
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text that can be read and searched
        figure.savefig(drawn, format=form)
    replace_bytes(path, drawn.getvalue())


def _draw_labels(axes: Axes, view: View) -> None:
    """The heads by label, all syntactic ones alike; one of several labels is striped."""
    L, H = np.shape(view["maps"]["scores"][SHOWN[0]][-1])
    fine = np.full((L, H * 12, 3), to_rgb(PALE))  # 12 columns a head: halves, thirds and quarters
    for head in view["heads"].values():
        colours = list(dict.fromkeys(map(colour_of, head["labels"])))
        for n, colour in enumerate(colours):
            width = 12 // len(colours)
            start = head["head"] * 12 + n * width
            fine[head["layer"], start : start + width] = to_rgb(colour)
    axes.imshow(fine, extent=(-0.5, H - 0.5, L - 0.5, -0.5), interpolation="nearest")
    axes.hlines(np.arange(L + 1) - 0.5, -0.5, H - 0.5, "white", linewidth=1)
    axes.vlines(np.arange(H + 1) - 0.5, -0.5, L - 0.5, "white", linewidth=1)
    _name(axes, view["name"], "black")
    shown = {label.split(":")[0] for head in view["heads"].values() for label in head["labels"]}
    for label in sorted(shown):
        axes.plot([], [], "s", color=colour_of(label), label=label)
    if shown:
        axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(-0.15, 1))


def _draw_steps(scores: Axes, losses: Axes, view: View) -> None:
    """The best score of each kind and the losses on one axis, with marks where heads came about."""
    probe, crossed = view["probe"], view["crossed"]
    lines = [
        (losses, probe["repeat_loss_1"], GREY, "random tokens, first time", ":"),
        (losses, probe["repeat_loss_2"], "black", "second time", "-"),
    ]
    for kind, (label, colour) in KINDS.items():
        x, y = ([mark[key] for mark in crossed if mark["kind"] == kind] for key in ("step", "score"))
        if kind in SHOWN or x:
            points = [found and found[0] for found in probe[kind]]
            lines.append((scores, points, colour, f"best {label} head", "-"))
            scores.plot(x, y, "v", color=colour, markersize=8, markeredgecolor="white", zorder=3)
    for axes, values, colour, label, line in lines:
        (drawn,) = axes.plot(probe["step"], np.array(values, dtype=float), line, color=colour, label=label)
        drawn.set(linewidth=2.2, marker="o", markersize=3)
    if crossed:
        scores.plot([], [], "v", color=GREY, label="a head gets its label")
    if view["fell"] is not None:
        losses.axvline(view["fell"], color="black", linestyle="--", label=f"fell at step {view['fell']}")
    for axes in (scores, losses):
        axes.legend(frameon=False, loc="best")
        axes.spines[["top", "right"]].set_visible(False)
        for stage in view["stages"][1:]:
            axes.axvline(stage["after"], color=GREY, linewidth=0.8, linestyle=":")
    for stage in view["stages"]:
        scores.annotate(stage["mix"], (stage["after"], 1), (3, 4), textcoords="offset points", color=GREY)
    scores.set(ylim=(0, 1), ylabel="score")
    scores.tick_params(labelbottom=False)
    scores.sharex(losses)
    losses.set(ylim=(0, None), ylabel="loss", xlabel="step", xlim=(0, None))


def _name(axes: Axes, title: str, colour: str) -> None:
    """A grid of heads has a title, and its axes are numbers of layers and heads."""
    axes.set_title(title, fontsize=10, color=colour, parse_math=False)  # a name may have $ in it
    axes.set(xlabel="head", ylabel="layer")
    axes.locator_params(nbins=6, integer=True)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
