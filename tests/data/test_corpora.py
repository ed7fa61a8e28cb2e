"""Text arrives as it is on disk, and the plays as speeches."""

import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError
from data.corpora import load_text, shakespeare


def read(path: Path | str) -> str:
    return load_text("text", str(path))


def refused(path: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@given(st.text(min_size=1))
def test_any_utf8_file_is_read_character_for_character(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.txt"
        path.write_bytes(text.encode())
        assert read(path) == text


@pytest.mark.parametrize("text", ["a\r\nb\rc\n", "\ufeffa", "a\0b", "<|endoftext|>", "a\u2028b\x0cc\x85"])
def test_line_ends_marks_and_nul_stay(text, tmp_path):
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read(tmp_path / "a.txt") == text


@pytest.mark.parametrize(
    ("content", "place"),
    [(b"\xff", 0), (b"ab\xffcd", 2), (b"a" * 100_000 + b"\x80" + b"a" * 9, 100_000), (b"ab\xe2\x82", 2)],
)
def test_bytes_that_are_no_utf8_are_reported_with_their_place(content, place, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    message = refused(tmp_path / "a.txt")
    assert str(tmp_path / "a.txt") in message
    assert message.endswith(f"byte {place}")


def test_missing_and_empty_files_and_folders_are_named(tmp_path):
    (tmp_path / "empty.txt").touch()
    for path in (tmp_path / "none.txt", tmp_path / "empty.txt", tmp_path):
        assert str(path) in refused(path)


def test_a_pattern_joins_its_files_in_the_order_of_their_names(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "c.md", "deep/d.txt"):
        (tmp_path / name).write_text(name[:-3])
    assert read(tmp_path / "*.txt") == "a.b."
    assert read(tmp_path / "**" / "*.txt") == "a.b.deep/d."


@pytest.mark.parametrize("name", ["a [1].txt", "what?.txt", "*.txt"])
def test_a_file_whose_name_looks_like_a_pattern_can_be_read(name, tmp_path):
    (tmp_path / name).write_text("here")
    assert read(tmp_path / name) == "here"


# The plays


@pytest.fixture(scope="module")
def plays() -> str:
    return shakespeare()


def test_the_plays_have_the_size_of_nine_plays_and_few_characters(plays):
    assert len(plays) == 1_189_406
    assert len(plays.encode()) == len(plays)
    assert len(set(plays)) == 64


def test_no_markup_headings_or_stage_directions_are_left(plays):
    assert not set(plays) & set("#*_[]()\\<>`|\t\r")
    lines = plays.split("\n")
    for mark in (
        r"ACT [IV]+",
        r"SCENE [IV]+",
        r"(Enter|Exit|Exeunt|Re-enter)\b",
        "Coriolanus$",
        "The Tempest$",
    ):
        assert not [line for line in lines if re.match(mark, line)]


def test_speeches_follow_the_name_of_who_speaks_with_a_blank_line_between(plays):
    assert plays.startswith(
        "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n"
    )
    assert plays.endswith("Let your indulgence set me free.\n")
    assert "\n\n\n" not in plays
    assert not [line for line in plays.split("\n") if line != line.strip()]
    first_lines = [speech.split("\n")[0] for speech in plays.split("\n\n")]
    named = [line for line in first_lines if re.fullmatch(r"[A-Z][\w '&-]*:", line)]
    assert len(named) > 0.95 * len(first_lines)  # the others go on after a stage direction
    assert {"CORIOLANUS:", "ROMEO:", "KING RICHARD II:", "PETRUCHIO:", "PROSPERO:"} < set(named)


def test_the_plays_stand_one_after_the_other(plays):
    """So the last part, which is kept for validation, is a play that training does not see."""
    heroes = (
        "CORIOLANUS",
        "RICHMOND",
        "HENRY BOLINGBROKE",
        "ROMEO",
        "WARWICK",
        "LEONTES",
        "ISABELLA",
        "PETRUCHIO",
    )
    places = [plays.index(f"{hero}:\n") for hero in (*heroes, "PROSPERO")]
    assert places == sorted(places)
    assert "PROSPERO:" not in plays[: int(0.9 * len(plays))]
