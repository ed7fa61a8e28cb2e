"""metrics.jsonl: one object a line, each (kind, step) once, readable after a kill."""

import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError
from training import Stopped, loggers
from training.loggers import JsonLines, read_records


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, *steps: int, resume_from: int | None = None) -> None:
    log = JsonLines(path, resume_from)
    for step in steps:
        log.write("train", step, loss=1 / (step + 3), text="ä\u2028\n")
    log.close()


def test_each_record_is_a_line_of_json_that_is_on_disk_before_the_next(path):
    log = JsonLines(path)
    for step in range(3):
        fields = {"loss": 1 / (step + 3), "scores": [[0.1, None]], "text": "ä\u2028\n"}
        log.write("train", step, **fields)
        lines = path.read_bytes().split(b"\n")
        assert lines.pop() == b""
        assert json.loads(lines[-1]) == {"kind": "train", "step": step, **fields}
        assert len(lines) == len(read_records(path)) == step + 1
    log.close()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_no_json_are_never_written(path, bad):
    log = JsonLines(path)
    with pytest.raises(ValueError, match="JSON"):
        log.write("train", 1, scores=[[bad]])
    log.close()
    assert path.read_bytes() == b""


def test_a_last_line_torn_anywhere_is_left_out(path):
    write(path, 1, 2, 3)
    whole, records = path.read_bytes(), read_records(path)
    assert [record["step"] for record in records] == [1, 2, 3]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        assert read_records(path) == records[: whole[:length].count(b"\n")]


def test_a_line_longer_than_any_record_is_no_torn_one(path, monkeypatch):
    monkeypatch.setattr(loggers, "LARGE", 100)
    path.write_bytes(b"a" * 99)
    assert read_records(path) == []
    path.write_bytes(b"a" * 150)
    with pytest.raises(UserError, match="a line that is no record"):
        read_records(path)


def test_a_disk_that_takes_a_few_bytes_at_a_time_gets_whole_lines(path, monkeypatch):
    class Slow:
        def write(self, content):
            return file.write(content[:7])

    log = JsonLines(path)
    file = log._file
    monkeypatch.setattr(log, "_file", Slow())
    log.write("note", 1, text="a" * 100)
    log.write("note", 2, text="b")
    file.close()
    assert [record["text"] for record in read_records(path)] == ["a" * 100, "b"]
    file.close()


def test_a_disk_that_is_full_is_told_with_the_name_of_the_file(path):
    log = JsonLines(path)
    with open("/dev/full", "ab", buffering=0) as full:
        os.dup2(full.fileno(), log._file.fileno())
    with pytest.raises(Stopped, match=r"cannot write to .*metrics\.jsonl: No space left on device"):
        log.write("train", 1)
    log.close()  # nothing is left that would not fit once more


def removed(path):
    path.unlink()


def moved(path):
    path.rename(path.with_name("other"))


def replaced(path):
    path.rename(path.with_name("other"))
    path.write_text("")


@pytest.mark.parametrize("act", [removed, moved, replaced])
def test_a_file_that_has_gone_is_noticed(path, act):
    log = JsonLines(path)
    log.flush()
    act(path)
    with pytest.raises(Stopped, match="was moved or removed"):
        log.flush()
    log.close()


def test_a_file_that_was_only_touched_or_linked_has_not_gone(path):
    log = JsonLines(path)
    path.touch()
    path.with_name("link").symlink_to(path)
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))  # as where a folder goes to another disk and a link stays
    log.flush()
    log.close()


def test_without_a_file_there_are_no_records(path):
    assert read_records(path) == []


@given(written=st.integers(0, 12), reached=st.integers(0, 12), torn=st.booleans())
def test_a_resumed_run_goes_on_from_its_step_and_each_record_stands_once(
    tmp_path_factory, written, reached, torn
):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    write(path, *range(written + 1))
    expected = read_records(path)[: reached + 1]
    if torn:
        path.write_bytes(path.read_bytes() + b'{"kind": "train", "st')
    write(path, *range(min(written, reached) + 1, 15), resume_from=reached)
    records = read_records(path)
    assert [record["step"] for record in records] == list(range(15))
    assert records[: len(expected)] == expected


def test_the_end_of_a_run_that_goes_on_is_dropped(path):
    write(path, 1, 2)
    log = JsonLines(path, 2)
    log.write("end", 2, seconds=1.0)
    log.close()
    write(path, resume_from=2)
    assert [record["kind"] for record in read_records(path)] == ["train", "train"]


def test_the_folder_holds_nothing_but_the_records(path):
    write(path, 1, 2)
    write(path, 3, resume_from=2)
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("line", ['{"kind": ', "[1, 2]", '{"kind": "train"}', '{"step": 1}', "null", "3"])
def test_a_line_that_is_no_record_is_told_in_one_line(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        f'{{"kind": "train", "step": 1, "loss": 1}}\n{line}\n{{"kind": "end", "step": 2, "seconds": 1}}\n'
    )
    with pytest.raises(UserError, match="no record") as caught:
        read_records(path)
    assert "\n" not in str(caught.value)
