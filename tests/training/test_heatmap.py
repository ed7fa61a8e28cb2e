"""Heat maps: the lighter the larger, comparable between steps, a hole where there is no number."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from training.heatmap import HEIGHT, LEFT, TOP, WIDTH, draw


def colours(picture, L: int, H: int) -> np.ndarray:
    """L x H x 3: near the upper left corner of each cell, where nothing is written."""
    pixels = np.asarray(picture).astype(int)
    return pixels[TOP + 2 : TOP + L * HEIGHT : HEIGHT, LEFT + 2 : LEFT + H * WIDTH : WIDTH]


def lightness(colour: np.ndarray) -> np.ndarray:
    return colour @ [0.2126, 0.7152, 0.0722]


SIZES = st.tuples(st.integers(1, 5), st.integers(1, 5))


@given(SIZES.flatmap(lambda size: arrays(float, size, elements=st.floats(-1e3, 1e3))))
def test_the_larger_score_is_the_lighter_cell(scores_LH):
    found = lightness(colours(draw("", scores_LH.tolist()), *scores_LH.shape)).ravel()
    order = scores_LH.ravel().argsort()
    assert (np.diff(found[order]) >= -1).all()  # a step of 1/255 is lost in rounding


@pytest.mark.parametrize("ends", [(0.0, 1.0), (-5.0, 5.0), (0.0, 30.0)])
def test_the_smallest_and_the_largest_score_are_far_apart_in_lightness(ends):
    dark, light = lightness(colours(draw("", [ends]), 1, 2)[0])
    assert light - dark > 150


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_share_has_its_colour_whatever_the_others_are(score, other):
    alone, beside = colours(draw("", [[score]]), 1, 1), colours(draw("", [[other, score]]), 1, 2)
    assert (alone[0, 0] == beside[0, 1]).all()


def test_a_score_that_is_no_number_is_grey_and_leaves_the_others_as_they_are():
    full, holed = (colours(draw("", [[0.1, score, 0.9]]), 1, 3)[0] for score in (0.5, None))
    assert len({*holed[1].tolist()}) == 1
    assert (full[[0, 2]] == holed[[0, 2]]).all()


@pytest.mark.parametrize(("L", "H"), [(1, 1), (4, 4), (12, 12), (3, 32)])
def test_every_head_has_a_cell_with_its_number_in_it(L, H):
    picture = np.asarray(draw("x", [[0.25] * H] * L))
    cells = picture[TOP : TOP + L * HEIGHT, LEFT : LEFT + H * WIDTH]
    assert cells.shape == (L * HEIGHT, H * WIDTH, 3)
    for cell in cells.reshape(L, HEIGHT, H, WIDTH, 3).swapaxes(1, 2).reshape(-1, HEIGHT, WIDTH, 3):
        written = (cell != cell[0, 0]).any(-1)
        assert 20 < written.sum() < 200
        assert not written[:, [0, -1]].any()


@pytest.mark.parametrize("score", [0.0, -99.994, 99.994, 1234.5, -1234.5])
def test_numbers_of_five_digits_fit_their_cell(score):
    picture = np.asarray(draw("x", [[score] * 3]))
    edges = picture[TOP : TOP + HEIGHT, [LEFT, LEFT + WIDTH - 1, LEFT + WIDTH, LEFT + 3 * WIDTH - 1]]
    assert (edges == edges[0, 0]).all()


def test_a_long_title_is_shown_to_its_end():
    short, long = (np.asarray(draw("W" * n, [[0.5]])) for n in (1, 40))
    assert long.shape[1] > short.shape[1]
    assert (long[:, -4:] == 255).all()
