"""A run in one picture: scores and losses over the steps, and where in the model the heads are at the end."""

from pathlib import Path

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from analysis.view import KINDS, View

SHOWN = ("induction", "previous", "sink")
GREY = "#555555"


def draw(path: Path, view: View) -> None:
    """Write a PNG, 1600 pixels wide, of a run that was probed."""
    probe, stages = view["probe"], view["stages"]
    figure = Figure(figsize=(10, 5), dpi=160, layout="constrained")
    panels = figure.subplot_mosaic("si;si;sp;sp;lk;lk", width_ratios=[4, 1])
    scores, losses, *maps = (panels[letter] for letter in "slipk")
    lines = [
        (losses, probe["repeat_loss_1"], GREY, "random tokens, first time", ":"),
        (losses, probe["repeat_loss_2"], "black", "second time", "-"),
    ]
    for kind, axes in zip(SHOWN, maps, strict=True):
        label, colour = KINDS[kind]
        points = [found and found[0] for found in probe[kind]]
        lines.append((scores, points, colour, f"best {label} head", "-"))
        scores_LH = np.array(view["maps"]["scores"][kind][-1], dtype=float)  # None becomes NaN
        axes.imshow(scores_LH, LinearSegmentedColormap.from_list(kind, ["#f4f4f4", colour]), vmin=0, vmax=1)
        axes.set_title(label, fontsize=10, color=colour)
        axes.set(xlabel="head" if kind == SHOWN[-1] else None, ylabel="layer")
        axes.locator_params(nbins=6, integer=True)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    for axes, values, colour, label, line in lines:
        (drawn,) = axes.plot(probe["step"], np.array(values, dtype=float), line, color=colour, label=label)
        drawn.set(linewidth=2.2, marker="o", markersize=3)
    for axes in (scores, losses):
        axes.legend(frameon=False, loc="best")
        axes.spines[["top", "right"]].set_visible(False)
        for stage in stages[1:]:
            axes.axvline(stage["after"], color=GREY, linewidth=0.8, linestyle=":")
    for stage in stages:
        scores.annotate(stage["mix"], (stage["after"], 1), (3, 4), textcoords="offset points", color=GREY)
    scores.set(ylim=(0, 1), ylabel="score")
    scores.tick_params(labelbottom=False)
    scores.sharex(losses)
    losses.set(ylim=(0, None), ylabel="loss", xlabel="step", xlim=(0, None))
    figure.savefig(path, format="png")
