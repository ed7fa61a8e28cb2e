"""`run.device`: what was asked, told, recorded; nothing of CUDA where the CPU was asked for."""

import json

import pytest
import torch

import train
from configs.cli import parse
from tests.runs.test_refusals import refused
from tests.runs.tiny import assert_same, go_on, last, request, start
from training import checkpoints


def test_a_run_on_the_cpu_does_not_look_for_other_devices(reference, tmp_path, monkeypatch, capsys):
    def touched(*_, **__):
        raise AssertionError("CUDA was touched")

    for name in ("is_available", "init", "_lazy_init", "device_count", "current_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, touched)
    monkeypatch.setattr(torch.backends.mps, "is_available", touched)
    run = start(tmp_path, run={"device": "cpu"})
    assert_same(run, reference("adamw"))
    assert "on cpu, which multiplies matrices at " in capsys.readouterr().out
    state = json.loads((run / "checkpoints" / last(run)["step"] / "state.json").read_text())
    assert state["environment"]["device"] == "cpu"


def test_a_device_that_is_not_there_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = refused(request(tmp_path, run={"device": "cuda"}), tmp_path, capsys)
    assert message.startswith("error: run.device cuda: ")


def test_going_on_elsewhere_is_told_not_to_be_bit_for_bit(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "name_of", lambda device: "cuda H200")
        run = start(tmp_path, train={"steps": 1})
    assert go_on(run, "--train.steps", "2") == 0
    warning = "warning: the run will not continue bit for bit: device was cuda H200, is cpu"
    assert warning in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_model_batches_and_moments_are_moved(optimizer, tmp_path, monkeypatch):
    """On `meta`, a device without numbers that every machine has."""
    run = start(tmp_path, optimizer={"name": optimizer}, train={"steps": 2})
    meta = torch.device("meta")
    monkeypatch.setattr(train, "choose_device", lambda asked: meta)
    monkeypatch.setattr(train.torch.amp, "GradScaler", lambda *_, **__: None)
    monkeypatch.setattr(train, "ceiling", lambda *_: None)
    built = train.build(parse(["--resume", str(run)]))
    train.checkpoints.load_newest(run / "checkpoints", built.model, built.optimizers)
    assert built.model.device == meta
    assert {tensor.device for tensor in (*built.model.parameters(), *built.model.buffers())} == {meta}
    moments = [
        value for one in built.optimizers for values in one.state.values() for value in values.values()
    ]
    assert moments
    assert {moment.device for moment in moments} == {meta}
