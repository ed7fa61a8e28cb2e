"""Ctrl-C and SIGTERM: the first saves and closes, the second ends at once, whenever they come."""

import array
import fcntl
import itertools
import os
import signal
import subprocess
import sys
import termios
import time

import pytest

import train
from analysis import conclusion
from configs.cli import parse
from tests.runs.killing import done
from tests.runs.tiny import ROOT, assert_same, go_on, request
from training import checkpoints
from training.mirror import MirroredLog

INT, TERM = signal.SIGINT, signal.SIGTERM


def struck(folder, strikes, **sections):
    """Exit code and words of a run that signals reach as it calls something: (owner, name, at which call,
    signals). It began as train.py begins, in a process of its own.
    """

    def act():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for strike in strikes:
            strike_at(*strike)
        return train.main(parse(request(folder, **sections)))

    told = folder / "told.txt"
    return done(act, told), told.read_text()


def strike_at(owner, name, call, *numbers):
    original, calls = getattr(owner, name), itertools.count(1)

    def striking(*arguments, **keywords):
        if next(calls) == call:
            for number in numbers:
                os.kill(os.getpid(), number)
        return original(*arguments, **keywords)

    setattr(owner, name, striking)


PLACES = [(train, "update"), (train, "evaluate"), (train, "measure"), (checkpoints, "save_file")]
PAIRS = [(INT, INT), (TERM, INT), (INT, TERM)]


@pytest.mark.parametrize(
    ("owner", "name", "numbers"),
    [  # each place with a pair, and each pair in a step; the slow suite has all
        pytest.param(*place, pair, id=f"{place[1]}-{pair}", marks=() if soon else pytest.mark.slow)
        for n, place in enumerate(PLACES)
        for m, pair in enumerate(PAIRS)
        for soon in [n == 0 or m == n % 3]
    ],
)
def test_a_second_signal_of_either_kind_ends_the_run_at_once(owner, name, numbers, reference, tmp_path):
    code, words = struck(tmp_path, [(owner, name, 3, *numbers)])
    assert code == -numbers[-1]
    assert words.count("a second signal ends at once") == 1
    assert "Traceback" not in words
    assert go_on(tmp_path / "run") == 0
    assert_same(tmp_path / "run", reference("adamw"))


def test_the_second_may_come_while_the_first_is_served_with_a_save(reference, tmp_path):
    # Each save has six such calls, and there was one at the steps 0 and 5.
    code, _ = struck(tmp_path, [(train, "update", 8, TERM), (checkpoints, "to_disk", 14, TERM)])
    assert code == -TERM
    assert go_on(tmp_path / "run") == 0
    assert_same(tmp_path / "run", reference("adamw"))


@pytest.mark.parametrize("number", [INT, TERM])
def test_a_signal_while_the_heads_are_labelled_ends_that_and_a_resume_makes_up_for_it(
    number, reference, tmp_path
):
    code, words = struck(tmp_path, [(conclusion, "describe_heads", 1, number)])
    run = tmp_path / "run"
    assert code == 130
    assert words.endswith(
        f"ending now; all is saved; a second signal ends at once\ninterrupted; go on with --resume {run}\n"
    )
    assert not (run / "heads.json").exists()
    assert go_on(run) == 0
    assert_same(run, reference("adamw"))
    assert (run / "heads.json").read_bytes() == (reference("adamw") / "heads.json").read_bytes()


def test_a_signal_in_the_last_step_ends_the_run_ahead_of_the_labels(reference, tmp_path):
    code, words = struck(tmp_path, [(train, "update", 20, TERM)])
    assert code == 130
    assert "labelling" not in words
    assert go_on(tmp_path / "run") == 0
    assert_same(tmp_path / "run", reference("adamw"))


def test_a_second_signal_ends_the_closing_of_the_logs_too(tmp_path):
    code, _ = struck(tmp_path, [(conclusion, "describe_heads", 1, INT), (MirroredLog, "close", 1, INT)])
    assert code == -INT


@pytest.mark.parametrize("number", [INT, TERM])
def test_before_there_is_anything_to_save_a_signal_ends_at_once_and_no_run_is_left(number, tmp_path):
    code, words = struck(tmp_path, [(train, "GPT", 1, number)])
    assert (code, words) == (-number, "")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]  # of nobody: a start takes it


TALKING = """
import sys
from training.guards import interruptible
with interruptible() as interrupted:
    sys.stderr.write("." * 200_000 + "\\n")
    assert interrupted()
"""


def test_a_signal_while_something_is_printed_does_not_break_the_print():
    """Nobody reads at first, so the child waits in the middle of its line when the signal comes."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", TALKING]
    child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, env=buffered)
    there, full = array.array("i", [0]), fcntl.fcntl(child.stderr, fcntl.F_GETPIPE_SZ)
    limit = time.monotonic() + 60
    while there[0] < full:
        time.sleep(0.01)
        fcntl.ioctl(child.stderr, termios.FIONREAD, there)
        assert time.monotonic() < limit
    child.send_signal(signal.SIGTERM)
    words = child.communicate(timeout=60)[1].decode()
    assert child.returncode == 0, words.replace(".", "")
    assert words.count(".") == 200_000
    assert words.count("a second signal ends at once") == 1
