"""Pictures of the derivation, all in one hand: few lines, named where they stand, no frame."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, RED, GREEN, VIOLET, YELLOW = COLOURS = ["#4477aa", "#cc3311", "#228833", "#aa3377", "#ccbb44"]
GREY = "#777777"


def panels(number: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of `number` panels side by side, 1,600 pixels wide at most."""
    figure = Figure(figsize=(min(5 * number, 10), 3.6), dpi=160, layout="constrained")
    drawn = np.atleast_1d(figure.subplots(1, number, **options))
    for axes in drawn:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, [*drawn]
