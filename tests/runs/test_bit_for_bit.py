"""However a run is interrupted or watched, it ends bit for bit as it would have."""

import math
import signal
import subprocess
import sys
import time

import pytest
import torch

import train
from configs.cli import parse
from tests.runs.tiny import (
    BOTH,
    ROOT,
    TEXT,
    Killed,
    assert_same,
    before_update,
    go_on,
    last,
    records,
    request,
    start,
)


@BOTH
def test_the_same_request_gives_the_same_run_whatever_was_drawn_before(optimizer, reference, tmp_path):
    torch.manual_seed(12345)
    assert_same(start(tmp_path, optimizer={"name": optimizer}), reference(optimizer))


def test_another_seed_gives_another_run(reference, tmp_path):
    run = start(tmp_path, run={"seed": 2})
    assert last(run)["model.safetensors"] != last(reference("adamw"))["model.safetensors"]


@BOTH
def test_the_reference_learns_and_wraps_an_epoch(optimizer, reference):
    """Else equality with it would show little."""
    losses = [record["loss"] for record in records(reference(optimizer), "train")]
    assert losses[-1] < losses[0] - 0.5
    assert 1.5 * 0.9 * len(TEXT) < 20 * 8 * 17


@BOTH
@pytest.mark.parametrize("kills", [(11,), (6, 11), (8, 9, 20), (3,)], ids=str)
def test_a_run_in_pieces_ends_as_the_run_in_one(optimizer, kills, reference, tmp_path, monkeypatch):
    def kill(run):
        raise Killed

    argv = request(tmp_path, optimizer={"name": optimizer})
    for step in kills:
        with monkeypatch.context() as patch:
            before_update(patch, step, kill)
            with pytest.raises(Killed):
                train.main(parse(argv))
        assert max(record["step"] for record in records(tmp_path / "run")) == step - 1
        argv = ["--resume", str(tmp_path / "run")]
    assert train.main(parse(argv)) == 0
    assert_same(tmp_path / "run", reference(optimizer))


CHILD = """
import os, signal, sys
import train
from configs.cli import parse
from training import checkpoints
from training.loggers import JsonLines

place, metrics = sys.argv[1:3]
update, save, write = train.update, checkpoints.save, JsonLines.write

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def updating(run, step, *rest):
    return die() if step == 8 else update(run, step, *rest)

def saving(folder, model, optimizers, state):
    if state.step == 10:
        os.fsync = die
    save(folder, model, optimizers, state)

def writing(log, kind, step, **fields):
    write(log, kind, step, **fields)
    if (kind, step) == ("train", 12):
        os.truncate(metrics, os.path.getsize(metrics) - 9)
        die()

if place == "update":
    train.update = updating
if place == "save":
    checkpoints.save = saving
if place == "record":
    JsonLines.write = writing
train.main(parse(sys.argv[3:]))
"""


@pytest.mark.parametrize(
    ("place", "optimizer", "reached"), [("update", "muon", 5), ("save", "adamw", 5), ("record", "muon", 10)]
)
def test_sigkill_in_the_middle_of_anything_costs_nothing(place, optimizer, reached, reference, tmp_path):
    argv = request(tmp_path, optimizer={"name": optimizer})
    run = tmp_path / "run"
    command = [sys.executable, "-c", CHILD, place, str(run / "metrics.jsonl"), *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert max(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")) == reached
    assert go_on(run) == 0
    assert_same(run, reference(optimizer))
    assert all(path.name.startswith("step-") for path in (run / "checkpoints").iterdir())


def test_sigkill_from_outside_whenever_it_comes_costs_nothing(reference, tmp_path):
    command = [sys.executable, "train.py", *request(tmp_path)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run, limit = tmp_path / "run", time.monotonic() + 120
    try:
        while child.poll() is None and not (run / "checkpoints" / "step-00000005").exists():
            assert time.monotonic() < limit
            time.sleep(0.001)
    finally:
        child.kill()
        child.wait()
    command = [sys.executable, "train.py", "--resume", str(run)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert_same(run, reference("adamw"))


@BOTH
def test_watching_more_changes_nothing(optimizer, tmp_path):
    runs = []
    for name, every in (("always", 1), ("never", 0)):
        (tmp_path / name).mkdir()
        runs.append(
            start(
                tmp_path / name,
                optimizer={"name": optimizer},
                **{section: {"every": every} for section in ("eval", "probe", "checkpoint")},
            )
        )
    assert last(runs[0]) == last(runs[1])
    assert records(runs[0], "train") == records(runs[1], "train")
    assert len(records(runs[0], "eval", "attention")) == 42
    assert records(runs[1], "eval", "attention") == []


@pytest.mark.parametrize(("batch", "parts"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_accumulated_gradients_are_those_of_the_whole_batch(batch, parts, tmp_path):
    def gradients(batch: int, parts: int) -> tuple[float, float, list[torch.Tensor]]:
        shape = {"batch_size": batch, "grad_accum": parts, "clip": 0}
        run = train.build(parse(request(tmp_path, train=shape, model={"dropout": 0})))
        run.optimizers = []  # nothing is moved and nothing cleared
        run.model.train()
        loss, norm = train.update(run, 3, 1.0)
        return loss, norm, [parameter.grad for parameter in run.model.parameters()]

    loss, norm, found = gradients(batch, parts)
    expected_loss, expected_norm, expected = gradients(8, 1)
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    assert norm == pytest.approx(expected_norm, abs=1e-6)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    squares = sum(float(gradient.double().square().sum()) for gradient in expected)
    assert expected_norm == pytest.approx(math.sqrt(squares), rel=1e-5)


def test_clipping_bounds_the_gradient_that_is_used_and_the_record_has_the_one_before(tmp_path):
    run = train.build(parse(request(tmp_path, train={"clip": 0.01})))
    run.optimizers = []
    _, norm = train.update(run, 1, 1.0)
    used = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in run.model.parameters()))
    assert norm > 0.1
    assert used == pytest.approx(0.01, rel=1e-3)


def test_dropout_is_a_function_of_the_step_and_differs_between_steps(tmp_path):
    argv = request(tmp_path, probe={"every": 0}, model={"dropout": 0.5})
    (tmp_path / "text.txt").write_text("a" * 1000)  # every batch is the same
    run = train.build(parse(argv))
    run.optimizers = []
    losses = [train.update(run, step, 1.0)[0] for step in (1, 2, 3, 2, 1)]
    assert losses == losses[::-1]
    assert len(set(losses)) == 3
