"""A run in one picture: scores and losses over the steps, and where in the model the heads are at the end."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from analysis.view import KINDS, View

SHOWN = ("induction", "previous", "sink")
GREY = "#555555"


def draw(path: Path, view: View) -> None:
    """Write a PNG, 1600 pixels wide, of a run that was probed."""
    last = view["probe"]["step"][-1]
    view = view | {"stages": [stage for stage in view["stages"] if stage["after"] < max(last, 1)]}
    figure = Figure(figsize=(10, 5), dpi=160, layout="constrained")
    grid = figure.add_gridspec(6, 2, width_ratios=[4, 1])
    scores = figure.add_subplot(grid[:4, 0])
    losses = figure.add_subplot(grid[4:, 0], sharex=scores)
    for kind in SHOWN:
        label, colour = KINDS[kind]
        points = [found[0] if found else None for found in view["best"][kind]]
        _line(scores, view, points, colour, f"best {label} head")
    _line(losses, view, view["probe"]["repeat_loss_1"], GREY, "random tokens, first time", linestyle=":")
    _line(losses, view, view["probe"]["repeat_loss_2"], "black", "second time")
    scores.set(ylim=(0, 1), ylabel="score")
    scores.tick_params(labelbottom=False)
    losses.set(ylim=(0, None), ylabel="loss", xlabel="step", xlim=(0, None))
    for axes in (scores, losses):
        axes.legend(frameon=False, loc="best")
    for stage in view["stages"]:
        scores.annotate(stage["mix"], (stage["after"], 1), (3, 4), textcoords="offset points", color=GREY)
    for n, kind in enumerate(SHOWN):
        _map(figure.add_subplot(grid[2 * n : 2 * n + 2, 1]), view, kind)
    figure.savefig(path, format="png")


def _line(
    axes: Axes, view: View, values: list[float | None], colour: str, label: str, linestyle: str = "-"
) -> None:
    numbers = [float("nan") if value is None else value for value in values]
    style: Any = {"color": colour, "linewidth": 2.2, "marker": "o", "markersize": 3, "label": label}
    axes.plot(view["probe"]["step"], numbers, linestyle, **style)
    axes.spines[["top", "right"]].set_visible(False)
    for stage in view["stages"][1:]:
        axes.axvline(stage["after"], color=GREY, linewidth=0.8, linestyle=":")


def _map(axes: Axes, view: View, kind: str) -> None:
    label, colour = KINDS[kind]
    rows = view["maps"]["scores"][kind][-1]
    scale = LinearSegmentedColormap.from_list(kind, ["#f4f4f4", colour])
    scores_LH = [[float("nan") if value is None else value for value in row] for row in rows]
    axes.imshow(scores_LH, scale, vmin=0, vmax=1)
    axes.set_title(label, fontsize=10, color=colour)
    axes.set(xlabel="head" if kind == SHOWN[-1] else None, ylabel="layer")
    for axis, count in ((axes.xaxis, len(rows[0])), (axes.yaxis, len(rows))):
        axis.set_ticks(range(0, count, -(-count // 6)))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
