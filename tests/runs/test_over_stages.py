"""Runs over stages of data, with sinks and gates: bit for bit, whatever interrupts them."""

import json

import pytest
from safetensors.torch import load_file

import train
from configs import UserError
from configs.cli import parse
from tests.runs.tiny import (
    BOTH,
    Killed,
    assert_same,
    before_update,
    go_on,
    interrupted,
    records,
    request,
    start,
)

STAGES = [
    {"until": 6, "weights": {"repeats": 1}},
    {"until": 13, "weights": {"text": 6, "repeats": 2}},
    {"weights": {"text": 1, "backcopy": 1}},
]
DATA = {"stages": json.dumps(STAGES)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """20 steps in one go, for each optimizer."""
    runs = {name: tmp_path_factory.mktemp(name) for name in ("adamw", "muon")}
    return {name: start(folder, **sections(name)) for name, folder in runs.items()}


def sections(optimizer: str) -> dict:
    model = {"sink": "learned", "gate": "true"}
    return {"data": DATA, "optimizer": {"name": optimizer}, "model": model}


@BOTH
@pytest.mark.parametrize("step", [3, 6, 10, 13, 14])
def test_a_run_interrupted_in_any_stage_or_at_its_border_ends_as_the_run_in_one(
    optimizer, step, whole, tmp_path, monkeypatch
):
    run = interrupted(tmp_path, monkeypatch, step, **sections(optimizer))
    assert max(record["step"] for record in records(run)) == step
    assert go_on(run) == 0
    assert_same(run, whole[optimizer])


def test_a_run_killed_between_checkpoints_goes_back_over_a_border_and_ends_the_same(
    whole, tmp_path, monkeypatch
):
    def kill(run):
        raise Killed

    with monkeypatch.context() as patch:
        before_update(patch, 15, kill)  # the last checkpoint is of step 10, a stage ago
        with pytest.raises(Killed):
            train.main(parse(request(tmp_path, **sections("adamw"))))
    assert go_on(tmp_path / "run") == 0
    assert_same(tmp_path / "run", whole["adamw"])


def test_stages_make_a_difference_and_validation_stays_on_text(whole, tmp_path):
    """Else equality would show little. Before the first step both models are the same."""
    plain = start(tmp_path, **(sections("adamw") | {"data": {}}))
    evals, others = (records(run, "eval") for run in (whole["adamw"], plain))
    assert evals[0] == others[0]
    assert evals[-1] != others[-1]
    assert evals[-1]["loss"] < evals[0]["loss"]


def test_sink_logits_and_gates_are_learned_and_saved(whole):
    weights = [
        load_file(whole["adamw"] / f"checkpoints/step-000000{s}/model.safetensors") for s in ("10", "20")
    ]
    for name in ("sink_H", "W_gate.weight"):
        first, last = (kept[f"blocks.1.attention.{name}"] for kept in weights)
        assert (first != last).all()
    assert (weights[0]["blocks.0.attention.sink_H"] != 0).all()


def test_a_share_too_small_for_the_batch_is_refused_before_anything_is_written(tmp_path, capsys):
    stages = json.dumps([{"until": 5, "weights": {"text": 1}}, {"weights": {"text": 100, "repeats": 1}}])
    assert train.main(parse(request(tmp_path, data={"stages": stages}))) == 2
    assert "weight 1 of 101 gives repeats no sequence in a batch of 8" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_cannot_take_other_stages(whole):
    with pytest.raises(UserError, match=r"keeps data\.stages"):
        parse(["--resume", str(whole["adamw"]), "--data.stages", "[]"])
