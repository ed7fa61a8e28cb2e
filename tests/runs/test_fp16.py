"""Runs in fp16: gradients that overflow cost a step, never a number; the scale goes on with the run."""

import json
import math
import shutil

import pytest
import torch

import train
from configs.cli import parse
from tests.runs.tiny import (
    BOTH,
    assert_same,
    before_update,
    go_on,
    interrupted,
    last,
    records,
    request,
    start,
)

FP16 = {"train": {"precision": "fp16"}}


def overflowing(run) -> None:
    """From now on a gradient overflows where the loss is scaled by more than 2 ** 14."""
    weight = run.model.get_parameter("blocks.1.attention.W_v.weight")

    def overflow(gradient):
        too_much = run.scaler.get_scale() > 2**14
        return torch.full_like(gradient, math.inf) if too_much else gradient

    weight.register_hook(overflow)


@BOTH
def test_a_run_in_pieces_ends_as_the_run_in_one(optimizer, tmp_path, monkeypatch):
    sections = {"optimizer": {"name": optimizer}, **FP16}
    for name in ("whole", "pieces"):
        (tmp_path / name).mkdir()
    with monkeypatch.context() as patch:  # the scale is one that no new run has, and steps were skipped
        before_update(patch, 3, overflowing)
        whole = start(tmp_path / "whole", **sections)
    pieces = start_until_10(tmp_path / "pieces", monkeypatch, sections)
    assert go_on(pieces) == 0
    assert_same(pieces, whole)
    assert records(whole, "train")[-1]["skipped"] == 2


def start_until_10(folder, monkeypatch, sections):
    with monkeypatch.context() as patch:
        before_update(patch, 3, overflowing)
        return interrupted(folder, patch, 10, **sections)


@BOTH
def test_a_step_that_overflows_is_skipped_by_all_optimizers_and_recorded(optimizer, tmp_path, monkeypatch):
    moved = {}
    update = train.update

    def watching(run, step, *rest):
        if step == 3:
            overflowing(run)
        before = [parameter.detach().clone() for parameter in run.model.parameters()]
        found = update(run, step, *rest)
        after = zip(before, run.model.parameters(), strict=True)
        moved[step] = [not torch.equal(one, other) for one, other in after]
        assert all(parameter.grad is None for parameter in run.model.parameters())
        return found

    monkeypatch.setattr(train, "update", watching)
    run = start(tmp_path, optimizer={"name": optimizer}, **FP16)
    found = records(run, "train")
    assert [record["step"] for record in found if record["grad_norm"] is None] == [3, 4]
    assert [step for step, which in moved.items() if not any(which)] == [3, 4]
    assert [record["loss_scale"] for record in found] == [2.0**16] * 2 + [2.0**15] + [2.0**14] * 17
    assert [record["skipped"] for record in found] == [0, 0, 1] + [2] * 17
    assert all(math.isfinite(record["loss"]) for record in found)
    assert found[4]["grad_norm"] > 0


def test_losses_are_those_of_full_precision_but_for_rounding(reference, tmp_path, capsys):
    losses = [record["loss"] for record in records(start(tmp_path, **FP16), "train")]
    full = [record["loss"] for record in records(reference("adamw"), "train")]
    assert losses == pytest.approx(full, rel=0.005)
    assert losses != pytest.approx(full, rel=1e-6)
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert [warning for warning in warnings if "fp16 is slow on a CPU" in warning] == warnings[:1]


def test_a_gradient_that_overflows_at_any_scale_stops_the_run_and_is_named(tmp_path, monkeypatch, capsys):
    kept = []

    def act(run):
        weight = run.model.get_parameter("blocks.1.attention.W_v.weight")
        weight.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
        kept.append((run.model, [parameter.detach().clone() for parameter in run.model.parameters()]))

    before_update(monkeypatch, 2, act)
    assert train.main(parse(request(tmp_path, **FP16))) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stopped:")]
    assert "step 18" in line  # 2 ** 16 can be halved 17 times before it is below 1
    assert "gradient of layer 1, attention.W_v" in line
    (model, before) = kept[0]
    assert all(map(torch.equal, model.parameters(), before))


def test_a_loss_that_is_not_finite_stops_the_run_at_once(tmp_path, monkeypatch, capsys):
    """Beyond 65,504 there is nothing in fp16, and no smaller scale of the loss helps."""

    def act(run):
        run.model.get_parameter("blocks.1.mlp.W_in.weight").data.mul_(1e7)

    before_update(monkeypatch, 2, act)
    assert train.main(parse(request(tmp_path, **FP16))) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stopped:")]
    assert "step 2" in line
    assert "output of layer 1, mlp.W_in" in line


def test_a_run_changes_its_precision_when_it_goes_on(reference, tmp_path):
    run = shutil.copytree(reference("adamw"), tmp_path / "run")
    for steps, precision in ((22, "fp16"), (24, "fp32"), (26, "fp16")):
        assert go_on(run, "--train.steps", str(steps), "--train.precision", precision) == 0
    scales = {record["step"]: record.get("loss_scale") for record in records(run, "train")[20:]}
    assert scales == {21: 2.0**16, 22: 2.0**16, 23: None, 24: None, 25: 2.0**16, 26: 2.0**16}
    state = json.loads((run / "checkpoints" / last(run)["step"] / "state.json").read_text())
    assert state["scaler"]["scale"] == 2.0**16
