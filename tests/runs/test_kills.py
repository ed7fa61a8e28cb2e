"""SIGKILL at random moments, and at each change a run makes to a file: it goes on as if nothing had been."""

import itertools
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from configs.cli import parse
from tests.runs.killing import SAVES, assert_ends_as, attempt, done, dying, kill
from tests.runs.test_wandb import OFFLINE, assert_told
from tests.runs.tiny import ROOT, Killed, assert_same, go_on, request, start
from training import checkpoints

SHORT = {
    "train": {"steps": 3, "grad_accum": 1},
    "optimizer": {"warmup_steps": 0},
    "checkpoint": {"every": 1, "keep_last": 1},
    "eval": {"every": 1, "tokens": 17},
    "probe": {"every": 0},
}


def test_five_kills_cost_nothing(tmp_path):
    assert len([*kill(tmp_path, 5, seed=1, **SAVES)]) == 5


@pytest.mark.slow
@pytest.mark.parametrize(("more", "halves"), [([], 0), (["--saves"], 25)], ids=["anywhere", "in saves"])
def test_a_hundred_kills_cost_nothing(more, halves):
    command = [sys.executable, "-m", "tests.runs.killing", "--kills", "100", *more]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert told.returncode == 0, told.stderr[-3000:]
    found = re.match(r"(\d+) kills, (\d+) inside a save or removal, (\d+) before the first", told.stdout)
    kills, inside, early = map(int, found.groups())
    assert kills == 100
    assert inside >= halves
    assert 0 < early < 50


def places(act, folder: Path, step: int):
    """Every so many of the changes that `act` makes to files, until there is none left to die at."""
    for place in itertools.count(0, step):
        code = done(dying(act(), folder, place), folder.parent / "told.txt")
        if code == 50:
            assert place > 30  # else it has not seen what a run does
            return
        assert code == -signal.SIGKILL, (folder.parent / "told.txt").read_text()
        yield place


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_may_die_at_each_change_that_it_makes_to_a_file(stride, tmp_path):
    (tmp_path / "reference").mkdir()
    reference, run = start(tmp_path / "reference", **SHORT), tmp_path / "run"
    argv = request(tmp_path, **SHORT)
    for _ in places(lambda: attempt(argv, run), run, stride):
        if not (run / "config.yaml").exists():
            assert not [path for path in run.glob("*") if path.suffix != ".tmp" and path.name != "lock"]
        assert_ends_as(reference, argv, run)
        assert set(steps_now(run)) <= {2, 3}
        shutil.rmtree(run)


@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_overwriting_may_die_at_each_change_and_leaves_the_old_run_or_the_new_or_says_what_is_lost(
    stride, tmp_path
):
    (tmp_path / "old").mkdir()
    (tmp_path / "reference").mkdir()
    old = start(tmp_path / "old", **{**SHORT, "run": {"seed": 7}})
    reference, run = start(tmp_path / "reference", **SHORT), tmp_path / "run"
    argv = request(tmp_path, **SHORT, run={"overwrite": "true"})
    shutil.copytree(old, run)
    for _ in places(lambda: lambda: train.main(parse(argv)), run, stride):
        assert (run / "config.yaml").exists()
        told = tmp_path / "told.txt"
        code = done(attempt(argv, shutil.copytree(run, tmp_path / "resumed")), told)
        if code == 2:
            assert "start afresh with --config" in told.read_text()
            assert told.read_text().count("\n") == 1
        else:
            assert code == 0, told.read_text()
            new = "seed: 1\n" in (run / "config.yaml").read_text()
            assert_same(tmp_path / "resumed", reference if new else old)
        shutil.rmtree(tmp_path / "resumed")
        assert done(lambda: train.main(parse(argv)), told) == 0
        assert_same(run, reference)
        shutil.rmtree(run)
        shutil.copytree(old, run)


def test_overwriting_takes_checkpoints_ahead_of_their_records_so_that_nothing_begins_anew_in_silence(
    reference, tmp_path, monkeypatch, capsys
):
    run, remove = shutil.copytree(reference("adamw"), tmp_path / "run"), shutil.rmtree

    def die(path: Path) -> None:
        remove(path)
        raise Killed

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(Killed):
        train.main(parse(request(tmp_path, run={"overwrite": "true"})))
    assert (run / "metrics.jsonl").exists()
    assert not (run / "checkpoints").exists()
    assert go_on(run) == 2
    assert "start afresh with --config" in capsys.readouterr().err


def test_a_start_that_died_with_its_first_files_is_begun_again_or_gone_on_with(reference, tmp_path):
    argv, run = request(tmp_path), tmp_path / "run"
    run.mkdir()
    (run / "config.yaml.tmp").write_text("run:")
    assert train.main(parse(argv)) == 0
    assert_same(run, reference("adamw"))
    for path in run.iterdir():
        if path.name != "config.yaml":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert go_on(run) == 0
    assert_same(run, reference("adamw"))


@pytest.mark.slow
@pytest.mark.usefixtures("wandb_alone")
def test_whole_processes_with_wandb_may_be_killed_whenever(tmp_path):
    (tmp_path / "reference").mkdir()
    many = {"train": {"steps": 200}, "checkpoint": {"every": 1, "keep_last": 2}, "log": OFFLINE}
    reference, moments = start(tmp_path / "reference", **many), random.Random(1)
    argv, run, kills = request(tmp_path, **many), tmp_path / "run", 0
    while True:
        words = ["--resume", str(run)] if (run / "config.yaml").exists() else argv
        child = subprocess.Popen([sys.executable, "train.py", *words], cwd=ROOT, stderr=subprocess.PIPE)
        try:
            if kills < 3:
                before = steps_now(run)
                limit = time.monotonic() + 120
                while child.poll() is None and steps_now(run) in ([], before):
                    assert time.monotonic() < limit
                time.sleep(moments.uniform(0, 0.5))
                kills += 1
            else:
                assert (child.wait(120), child.stderr.read().count(b"warning")) == (0, 0)
                break
        finally:
            child.kill()
            child.communicate()
    assert_same(run, reference)
    assert_told(run)


def steps_now(run: Path) -> list[int]:
    """Of a run that may be in the middle of anything."""
    return checkpoints.steps_in(run / "checkpoints")
