"""Pictures: their size, their texts, and that any shape and any gap can be drawn."""

from xml.etree import ElementTree

import pytest

from analysis import picture
from analysis.view import KINDS, view
from tests.analysis.made_up import attention, config, evaluated, heads, published, records

LABELS = {(1, 0): ["induction", "sink"], (0, 1): ["syntactic:obj", "previous-token", "sink", "current-token"]}


def size(path):
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int.from_bytes(head[16:20], "big")


def texts(path):
    """All that an SVG says, as text."""
    return [node.text for node in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def of_run(**more):
    return view("run", config(), records(), heads(labels=LABELS), **more)


def of_published(L=2, H=2):
    return view("made-up", config(), (), published(evaluated(heads(L, H, LABELS))))


@pytest.mark.parametrize("shown", [of_run(), of_published()])
def test_a_png_is_1600_pixels_wide_whatever_its_name(tmp_path, shown):
    for name in ("a.png", "picture.of.it"):
        picture.draw(tmp_path / name, shown)
        assert size(tmp_path / name) == 1600


@pytest.mark.parametrize("shape", [(1, 1), (2, 4), (12, 12)])
def test_the_picture_can_be_drawn_of_any_shape_and_of_gaps(tmp_path, shape):
    empty = [[None] * shape[1]] * shape[0]
    found = [
        attention(0, *shape),
        attention(100, *shape, induction=empty)
        | {"model": dict.fromkeys(("repeat_loss_1", "repeat_loss_2"))},
    ]
    picture.draw(tmp_path / "run.png", view("run", config(), found))
    assert (tmp_path / "run.png").exists()


def test_an_svg_of_a_run_says_what_its_lines_are_as_text(tmp_path):
    picture.draw(tmp_path / "run.svg", of_run())
    said = texts(tmp_path / "run.svg")
    assert {"best induction head", "second time", "step", "score", "loss"} <= {*said}
    assert not [text for text in said if text and text.startswith("fell")]


def test_a_timeline_marks_each_crossing_and_the_fall(tmp_path):
    document = evaluated(heads(labels=LABELS))
    picture.draw(tmp_path / "run.svg", view("run", config(), records(), document))
    said = texts(tmp_path / "run.svg")
    assert "fell at step 200" in said
    assert "best current-token head" in said  # no usual line, but there is a head of the kind
    assert "best duplicate-token head" not in said


@pytest.mark.parametrize("shape", [(2, 2), (30, 9), (12, 12)])
def test_a_published_model_is_drawn_by_label_beside_its_maps(tmp_path, shape):
    picture.draw(tmp_path / "model.svg", of_published(*shape))
    said = texts(tmp_path / "model.svg")
    assert {"made-up", "induction", "sink", "syntactic", "current-token"} <= {*said}
    assert "step" not in said
    colours = (tmp_path / "model.svg").read_text()
    assert all(colour in colours for kind, (_, colour) in KINDS.items() if kind != "duplicate")


def test_a_name_is_no_formula(tmp_path):
    view = of_published(2, 2) | {"name": r"a$\frac$b"}
    picture.draw(tmp_path / "model.svg", view)
    assert view["name"] in texts(tmp_path / "model.svg")
