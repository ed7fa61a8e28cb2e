"""One training at a time has a run folder; evaluations, reports and whoever writes a file share it."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

import train
from configs import UserError, files
from configs.cli import parse
from configs.files import held, replace_text
from tests.runs.tiny import ROOT, assert_same, before_update, contents, files_up_to, request, start
from training import folder
from training.folder import owned

LONG = {"steps": 100_000}  # nobody waits for its end


def training(where: Path, **sections: dict) -> subprocess.Popen:
    """A process that trains in `where`/run and has saved its first checkpoint."""
    command = [sys.executable, "-u", str(ROOT / "train.py"), *request(where, **sections)]
    process = subprocess.Popen(
        command, cwd=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in process.stdout:
        if re.match(r"step +[1-9]\d* +validation", line):
            return process
    raise AssertionError("it ended before its second evaluation")


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def refused(argv: list[str], capsys) -> str:
    capsys.readouterr()
    assert train.main(parse(argv)) == 2
    out, message = capsys.readouterr()
    assert (out, message.count("\n")) == ("", 1)
    return message


ROOTS = ("config.yaml", "tokenizer.json", "lock")


def fixed(run: Path) -> dict[str, bytes]:
    """What a training that does its work leaves as it is."""
    first = (run / "checkpoints" / "step-00000000").iterdir()  # others come and go
    return {path.name: path.read_bytes() for path in (*(run / name for name in ROOTS), *first)}


def test_a_second_training_is_refused_by_name_and_touches_nothing_and_after_a_kill_the_next_one_is_not(
    tmp_path, capsys
):
    first = training(
        tmp_path, train=LONG, checkpoint={"every": 0, "keep_best": "false", "log_spaced": "true"}
    )
    try:
        before = fixed(tmp_path / "run")
        assert len(before) > 5
        again = request(tmp_path, train=LONG, run={"overwrite": "true"})
        for argv in (["--resume", str(tmp_path / "run")], again):
            message = refused(argv, capsys)
            assert message.startswith(f"error: process {first.pid} on {socket.gethostname()} since 20")
            assert f"run.dir {tmp_path / 'run'}" in message
        assert "holds a run" in refused(request(tmp_path), capsys)
        assert fixed(tmp_path / "run") == before
        assert first.poll() is None
    finally:
        kill(first)
    assert (tmp_path / "run" / "lock").exists()
    capsys.readouterr()
    start(tmp_path, train={"steps": 1}, run={"overwrite": "true"})
    assert "process" not in "".join(capsys.readouterr())
    assert not (tmp_path / "run" / "lock").exists()


def test_in_one_process_too_the_second_is_refused_and_the_first_ends_as_if_alone(
    reference, tmp_path, monkeypatch, capsys
):
    messages = []

    def again(run) -> None:
        codes = []
        argv = ["--resume", str(run.folder)]
        other = threading.Thread(target=lambda: codes.append(train.main(parse(argv))))
        other.start()
        other.join()
        assert codes == [2]
        messages.append(capsys.readouterr().err.splitlines()[-1])

    before_update(monkeypatch, 8, again)
    assert_same(start(tmp_path), reference("adamw"))
    assert messages[0].startswith(f"error: process {os.getpid()} on ")


def test_whoever_had_to_build_longer_does_not_empty_the_run_that_came_first(tmp_path, monkeypatch):
    """It saw an empty folder, and gets the lock when the other one has ended."""
    look, looks = folder.refuse_used, []

    def slowly(*asked) -> None:
        look(*asked)
        looks.append(asked)
        if len(looks) == 1:
            start(tmp_path, train={"steps": 1})

    monkeypatch.setattr(folder, "refuse_used", slowly)
    with pytest.raises(UserError, match="holds a run"), owned(tmp_path / "run", overwrite=False):
        raise AssertionError("it has emptied the run")
    assert (tmp_path / "run" / "heads.json").exists()


@pytest.mark.parametrize("place", ["a/b/run", "run"])
def test_a_request_that_turns_out_wrong_leaves_no_folder(place, tmp_path):
    argv = request(tmp_path, run={"dir": tmp_path / place}, model={"context_length": 500})
    before = contents(tmp_path)
    assert train.main(parse(argv)) == 2
    assert contents(tmp_path) == before


def test_an_empty_folder_that_was_there_stays(tmp_path):
    (tmp_path / "run").mkdir()
    assert train.main(parse(request(tmp_path, model={"context_length": 500}))) == 2
    assert [*(tmp_path / "run").iterdir()] == []


def test_what_a_start_killed_ahead_of_its_run_has_left_is_an_empty_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").write_text("process 1 on earth since 1970-01-01 00:00\n")
    start(tmp_path, train={"steps": 1})
    assert not (tmp_path / "run" / "lock").exists()


def test_a_run_that_was_removed_while_it_trained_does_not_take_away_the_lock_of_its_successor(tmp_path):
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(owned(tmp_path / "run", overwrite=False))
        shutil.rmtree(tmp_path / "run")
        second.enter_context(owned(tmp_path / "run", overwrite=False))
        first.close()
        with pytest.raises(UserError, match="is training"), owned(tmp_path / "run", overwrite=None):
            pass


def test_a_lock_that_holds_anything_is_told_within_a_line(tmp_path):
    (tmp_path / "run").mkdir()
    with held(tmp_path / "run" / "lock") as lock:
        lock.write(b"\x1b[2J\xffevil\n" * 1000)
        lock.flush()
        with pytest.raises(UserError) as caught, owned(tmp_path / "run", overwrite=None):
            pass
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "folder"])
def test_a_lock_that_is_no_file_of_its_own_is_refused_and_what_it_leads_to_stays(kind, tmp_path):
    """Runs are passed around: whoever goes on with one must not lose a file of theirs by it."""
    run, mine = tmp_path / "run", tmp_path / "mine.txt"
    run.mkdir()
    if kind == "link":
        mine.write_text("precious")
    if kind.startswith("link"):
        (run / "lock").symlink_to(mine)
    else:
        (os.mkfifo if kind == "pipe" else os.mkdir)(run / "lock")
    with pytest.raises(UserError, match="lock is no regular file"), owned(run, overwrite=None):
        pass
    assert (mine.read_text() if mine.exists() else None) == ("precious" if kind == "link" else None)


def test_a_folder_that_cannot_be_locked_is_refused(tmp_path, monkeypatch):
    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", none)
    with pytest.raises(UserError, match="No locks available"), owned(tmp_path / "run", overwrite=False):
        pass


def test_a_link_in_the_place_of_the_lock_is_refused_and_what_it_leads_to_is_not_emptied(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(UserError, match=r"cannot write to run\.dir"), owned(tmp_path / "run", overwrite=None):
        pass
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_lock_that_finds_no_room_is_told_with_the_folder(tmp_path):
    told = pytest.raises(UserError, match=r"cannot write to run\.dir .*: File too large")
    with files_up_to(0), told, owned(tmp_path / "run", overwrite=False):
        pass
    assert os.listdir(tmp_path) == []


# Files that several write


WRITE = """
import sys
from pathlib import Path
from configs.files import replace_text
for i in range(int(sys.argv[2])):
    replace_text(Path(sys.argv[1]), sys.argv[3] * 100_000)
"""


def writing(path: Path, times: int, letter: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", WRITE, str(path), str(times), letter], cwd=ROOT)


def test_a_file_that_several_replace_at_once_is_always_one_of_theirs_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "heads.json"
    replace_text(path, "a" * 100_000)
    writers = [writing(path, 30, letter) for letter in "abc"]
    while any(writer.poll() is None for writer in writers):
        text = path.read_text()
        assert text == text[0] * 100_000
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert os.listdir(tmp_path) == ["heads.json"]


def test_what_a_killed_writer_leaves_is_used_by_the_next_and_gone(tmp_path):
    path = tmp_path / "heads.json"
    for _ in range(5):
        writer = writing(path, 10**9, "a")
        while not path.exists():
            pass
        kill(writer)
    assert len(os.listdir(tmp_path)) <= 2
    replace_text(path, "whole")
    assert (os.listdir(tmp_path), path.read_text()) == (["heads.json"], "whole")


def test_of_what_a_killed_writer_left_nothing_stays_in_a_shorter_text(tmp_path):
    (tmp_path / "heads.json.0.tmp").write_text("much more than the next one writes")
    replace_text(tmp_path / "heads.json", "short")
    assert (os.listdir(tmp_path), (tmp_path / "heads.json").read_text()) == (["heads.json"], "short")


def test_a_writer_that_comes_to_hold_what_another_has_just_finished_takes_a_file_of_its_own(
    tmp_path, monkeypatch
):
    path, lock, come = tmp_path / "heads.json", files.fcntl.flock, []

    def late(file, how) -> None:
        if not come:
            Path(file.name).replace(path)
        come.append(file.name)
        lock(file, how)

    monkeypatch.setattr(files.fcntl, "flock", late)
    replace_text(path, "ours")
    assert (os.listdir(tmp_path), path.read_text(), len(come)) == (["heads.json"], "ours", 2)


def test_a_file_that_another_moves_away_between_two_looks_is_taken_as_gone(tmp_path, monkeypatch):
    path = tmp_path / "heads.json"
    monkeypatch.setattr(Path, "exists", lambda self: True)  # as it was when one looked
    replace_text(path, "ours")
    with files.held(tmp_path / "lock"):
        (tmp_path / "lock").rename(tmp_path / "moved")
    assert (sorted(os.listdir(tmp_path)), path.read_text()) == (["heads.json", "moved"], "ours")


def test_a_write_that_fails_leaves_the_old_text_alone(tmp_path, monkeypatch):
    path = tmp_path / "heads.json"
    replace_text(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_text(path, "new")
    assert (os.listdir(tmp_path), path.read_text()) == (["heads.json"], "old")


def test_a_write_that_finds_no_room_tells_which_file_and_a_link_beside_it_is_not_followed(tmp_path):
    path, mine = tmp_path / "heads.json", tmp_path / "mine.txt"
    with files_up_to(1000), pytest.raises(OSError, match=r"File too large: .*heads\.json"):
        replace_text(path, "a" * 5000)
    assert os.listdir(tmp_path) == []
    mine.write_text("mine")
    (tmp_path / "heads.json.0.tmp").symlink_to(mine)
    with pytest.raises(OSError, match=r"heads\.json"):
        replace_text(path, "new")
    assert mine.read_text() == "mine"


@pytest.mark.slow
def test_evaluations_and_reports_of_a_run_that_trains_go_on_beside_it_and_beside_one_another(tmp_path):
    first = training(tmp_path, train=LONG)
    try:
        run = tmp_path / "run"
        commands = [
            ["eval_heads", "--ablate", "none"],
            ["eval_heads", "--ablate", "none"],
            ["report"],
            ["report"],
        ]
        beside = [
            subprocess.Popen([sys.executable, "-m", f"scripts.{name}", str(run), *more], cwd=ROOT)
            for name, *more in commands
        ]
        assert [process.wait(timeout=200) for process in beside] == [0] * 4
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=100)
    assert first.returncode == 130
    assert not [path for path in run.rglob("*") if path.name.endswith((".tmp", "lock"))]
    for name in ("heads.png", "heads.svg", "heads.json", "report.html"):
        assert (run / name).stat().st_size > 1000
