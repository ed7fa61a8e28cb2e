"""A layer-by-head heat map as a picture, drawn with Pillow in a few milliseconds."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

# Both ends and the middle of viridis: the lighter, the larger, also in grey and to colour-blind eyes.
DARK, MIDDLE, LIGHT = (68, 1, 84), (33, 145, 140), (253, 231, 37)
WIDTH, HEIGHT = 46, 24  # pixels of a cell
LEFT, TOP = 34, 70  # margins of the cells


def draw(title: str, rows: Sequence[Sequence[float | None]]) -> Image.Image:
    """L rows of H scores: each cell its number, dark to light from 0 (or the least) to 1 (or the greatest).

    So pictures of a score between 0 and 1 can be compared with each other. A score that is None is grey.
    """
    values_LH = np.array(rows, dtype=float)  # None becomes NaN
    L, H = values_LH.shape
    finite = values_LH[np.isfinite(values_LH)]
    low, high = finite.min(initial=0.0), finite.max(initial=1.0)
    share_LH = (values_LH - low) / (high - low)
    greys = Image.fromarray((255 * np.nan_to_num(share_LH)).round().astype(np.uint8))
    colours_LHC = np.array(ImageOps.colorize(greys, DARK, LIGHT, MIDDLE))
    colours_LHC[np.isnan(share_LH)] = 200
    cells = Image.fromarray(colours_LHC).resize((H * WIDTH, L * HEIGHT), Image.Resampling.NEAREST)
    font, lines = ImageFont.load_default(12), [title, f"dark {low:.3g}, light {high:.3g}"]
    width = 6 + max(LEFT + H * WIDTH, *(8 + int(font.getlength(line)) for line in lines))
    picture = Image.new("RGB", (width, TOP + L * HEIGHT + 6), "white")
    picture.paste(cells, (LEFT, TOP))
    pen = ImageDraw.Draw(picture)
    pen.text((6, 6), "\n".join(lines), "black", font)

    def write(layer: int, head: int, text: str, ink: str = "black") -> None:
        pen.text((LEFT + (head + 0.5) * WIDTH, TOP + (layer + 0.5) * HEIGHT), text, ink, font, "mm")

    for head in range(H):
        write(-1, head, f"H{head}")
    for layer, values_H in enumerate(values_LH):
        write(layer, -1, f"L{layer}")
        for head, value in enumerate(values_H):
            text = "-" if np.isnan(value) else f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
            write(layer, head, text, "white" if share_LH[layer, head] < 0.6 else "black")
    return picture
