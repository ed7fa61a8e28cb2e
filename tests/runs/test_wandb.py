"""Whole runs under the eyes of Weights & Biases, offline: killed, moved, extended, interrupted."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import train
from configs.cli import parse
from tests.runs.tiny import ROOT, assert_same, go_on, records, request, start
from tests.wandb_tools import Told
from training import mirror
from training.heatmap import HEIGHT, LEFT, TOP, WIDTH, draw
from training.loggers import read_records
from training.mirror import numbers

pytestmark = pytest.mark.usefixtures("wandb_alone")
OFFLINE = {"wandb": "offline", "image_every": 10}


def assert_told(run: Path, until: int | None = None) -> Told:
    """All the numbers of the records (up to a step) stand in one folder, each step once."""
    told, expected = Told(run), {}
    for record in read_records(run / "metrics.jsonl"):
        if record["kind"] != "end" and (until is None or record["step"] <= until):
            expected.setdefault(record["step"], {}).update(numbers(record))
    assert told.steps == sorted(expected)
    assert told.numbers() == expected
    return told


def test_a_run_is_mirrored_whole_and_is_the_same_run_as_without(reference, tmp_path, capfd):
    run = start(tmp_path, log=OFFLINE)
    assert_same(run, reference("adamw"))
    told = assert_told(run)
    assert {"train/loss", "eval/loss", "attention/induction/layer01_max"} <= {*told.numbers()[5]}
    assert told.run["config"]["update"]["model"]["d_head"] == 8
    assert "wandb" not in capfd.readouterr().err
    names = {path.name for path in run.iterdir()} - {"wandb"}
    assert names == {path.name for path in reference("adamw").iterdir()}
    assert [path.name for path in (run / "wandb").iterdir()] == [told.folder.name]


def test_pictures_of_every_statistic_show_the_scores_of_their_step(tmp_path):
    run = start(tmp_path, log=OFFLINE)
    scores = {record["step"]: record["scores"] for record in records(run, "attention")}
    found = Told(run).pictures()
    assert list(found) == [0, 10, 20]
    for step, files in found.items():
        lengths = {f"{name}_{end}" for name in ("induction", "duplicate") for end in ("short", "long")}
        assert {*files} == {*scores[step]} - lengths
        for name, path in files.items():
            pixels = np.asarray(Image.open(path).convert("L")).astype(int)
            cells = pixels[TOP + 2 : TOP + 2 * HEIGHT : HEIGHT, LEFT + 2 : LEFT + 2 * WIDTH : WIDTH]
            order = np.array(scores[step][name]).ravel().argsort()
            assert (np.diff(cells.ravel()[order]) >= -1).all()


CHILD = """
import os, signal, sys, time
import train
from configs.cli import parse
from training.loggers import read_records

update = train.update

def updating(run, step, *rest):
    if step == 8:
        loss = repr(read_records(run.folder / "metrics.jsonl")[-1]["loss"]).encode()
        (told,) = run.folder.glob("wandb/*/*.wandb")
        limit = time.monotonic() + 5
        while loss not in told.read_bytes():
            assert time.monotonic() < limit
        os.killpg(0, signal.Signals[sys.argv[1]])
    return update(run, step, *rest)

train.update = updating
sys.exit(train.main(parse(sys.argv[2:])))
"""


def signalled(number: signal.Signals, folder: Path) -> subprocess.CompletedProcess:
    """A run whose process group gets a signal at the update of step 8, soon after it has told of step 7."""
    command = [sys.executable, "-c", CHILD, number.name, *request(folder, log=OFFLINE)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, start_new_session=True
    )


def test_a_killed_run_has_told_all_it_did_and_goes_on_anywhere_as_one_run(reference, tmp_path):
    assert signalled(signal.SIGKILL, tmp_path).returncode == -signal.SIGKILL
    told = assert_told(tmp_path / "run", until=7)
    run = tmp_path / "elsewhere"
    shutil.move(tmp_path / "run", run)
    assert go_on(run) == 0
    assert_same(run, reference("adamw"))
    again = assert_told(run)
    assert again.run["run_id"] == told.run["run_id"]
    assert list(again.pictures()) == [0, 10, 20]


def test_a_run_that_is_extended_after_its_end_stays_one_run(reference, tmp_path):
    run = start(tmp_path, log=OFFLINE)
    told = Told(run)
    assert go_on(run, "--train.steps", "23") == 0
    again = assert_told(run)
    assert again.run["run_id"] == told.run["run_id"]
    assert again.steps == list(range(24))
    (end,) = [record for record in read_records(run / "metrics.jsonl") if record["kind"] == "end"]
    assert again.summary["end/telemetry_share"] == end["telemetry_share"]


def test_ctrl_c_ends_the_mirror_as_well_and_nobody_complains(tmp_path):
    done = signalled(signal.SIGINT, tmp_path)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert "wandb" not in done.stderr
    assert assert_told(tmp_path / "run").steps[-1] == 8


def test_a_start_that_never_came_to_a_checkpoint_leaves_no_second_run(tmp_path, monkeypatch):
    def stop(*arguments, **keywords):
        raise OSError("first probe")

    with monkeypatch.context() as patch:
        patch.setattr(train, "measure", stop)
        assert train.main(parse(request(tmp_path, log=OFFLINE))) == 1
    assert go_on(tmp_path / "run") == 0
    assert_told(tmp_path / "run")


def test_a_run_may_be_mirrored_from_some_step_on_and_then_is_from_its_first(reference, tmp_path):
    run = shutil.copytree(reference("adamw"), tmp_path / "run")
    assert go_on(run, "--log.wandb", "offline", "--train.steps", "21") == 0
    assert assert_told(run).steps == list(range(22))


def test_what_the_mirror_does_with_a_probe_counts_as_telemetry(tmp_path, monkeypatch):
    slept = []

    def slow(title, rows):
        time.sleep(0.02)
        slept.append(0.02)
        return draw(title, rows)

    monkeypatch.setattr(mirror, "draw", slow)
    run = start(tmp_path, log=OFFLINE, train={"steps": 1}, optimizer={"warmup_steps": 0})
    end = read_records(run / "metrics.jsonl")[-1]
    assert slept
    assert end["telemetry_share"] * end["seconds"] > sum(slept)


def test_what_the_environment_says_is_overruled_where_the_configuration_or_the_run_knows(
    tmp_path, monkeypatch
):
    said = {"WANDB_MODE": "garbage", "WANDB_SWEEP_ID": "sweep", "WANDB_RUN_ID": "zzz"}
    with monkeypatch.context() as patch:
        for name, value in said.items():
            patch.setenv(name, value)
        run = start(tmp_path, log=OFFLINE)
        assert {name: os.environ[name] for name in said} == said
    told = assert_told(run)
    assert told.run["run_id"] != "zzz"
    assert go_on(run, "--train.steps", "21") == 0
    assert assert_told(run).run["run_id"] == told.run["run_id"]
