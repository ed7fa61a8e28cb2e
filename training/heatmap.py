"""A layer-by-head heat map as a picture, drawn with Pillow in a few milliseconds."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

# Viridis at five places: the lighter, the larger, also in grey and to colour-blind eyes.
RAMP = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)])
WIDTH, HEIGHT = 46, 24  # pixels of a cell
LEFT, TOP = 34, 70  # margins of the cells


def draw(title: str, rows: Sequence[Sequence[float | None]]) -> Image.Image:
    """L rows of H scores: each cell its number, dark to light from 0 (or the least) to 1 (or the greatest).

    So pictures of a score between 0 and 1 can be compared with each other. A score that is None is grey.
    """
    values_LH = np.array(rows, dtype=float)  # None becomes NaN
    finite = values_LH[np.isfinite(values_LH)]
    low, high = finite.min(initial=0.0), finite.max(initial=1.0)
    share_LH = (values_LH - low) / (high - low)
    colours_LHC = np.where(np.isnan(values_LH)[..., None], 200, _colours(np.nan_to_num(share_LH)))
    L, H = values_LH.shape
    font = ImageFont.load_default(12)
    width = max(LEFT + H * WIDTH, 8 + int(font.getlength(title))) + 6
    picture = Image.new("RGB", (width, TOP + L * HEIGHT + 6), "white")
    cells, ramp = Image.fromarray(colours_LHC.astype(np.uint8)), _colours(np.linspace(0, 1, 60))[None]
    picture.paste(cells.resize((H * WIDTH, L * HEIGHT), Image.Resampling.NEAREST), (LEFT, TOP))
    picture.paste(Image.fromarray(ramp.astype(np.uint8)).resize((60, 12)), (LEFT + 30, 28))
    pen = ImageDraw.Draw(picture)
    pen.text((6, 6), title, "black", font)
    pen.text((LEFT + 26, 34), f"{low:.3g}", "black", font, "rm")
    pen.text((LEFT + 94, 34), f"{high:.3g}", "black", font, "lm")
    for head in range(H):
        pen.text((LEFT + (head + 0.5) * WIDTH, TOP - 10), f"H{head}", "black", font, "mm")
    for layer in range(L):
        y = TOP + (layer + 0.5) * HEIGHT
        pen.text((LEFT - 6, y), f"L{layer}", "black", font, "rm")
        for head, value in enumerate(values_LH[layer]):
            ink = "white" if share_LH[layer, head] < 0.6 else "black"
            text = "-" if np.isnan(value) else f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
            pen.text((LEFT + (head + 0.5) * WIDTH, y), text, ink, font, "mm")
    return picture


def _colours(share: np.ndarray) -> np.ndarray:
    """Colours (R, G, B) of numbers from 0 to 1, along one more axis."""
    places = np.linspace(0, 1, len(RAMP))
    return np.stack([np.interp(share, places, channel) for channel in RAMP.T], axis=-1)
