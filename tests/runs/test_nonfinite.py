"""Numbers that are not finite stop a run before they reach weights or checkpoints."""

import math

import pytest
import torch
from safetensors.torch import load_file

import train
from configs.cli import parse
from tests.runs.tiny import assert_plain_json, assert_same, before_update, go_on, records, request, steps


def nan_parameter(run) -> None:
    run.model.get_parameter("blocks.1.attention.W_q.weight").data[0, 0] = math.nan


def nan_activation(run) -> None:
    run.model.get_submodule("blocks.1.mlp").register_forward_hook(
        lambda module, inputs, output: output * math.nan
    )


def nan_gradient(run) -> None:
    run.model.get_parameter("blocks.1.attention.W_v.weight").register_hook(
        lambda gradient: gradient * math.nan
    )


def inf_gradient(run) -> None:
    weight = run.model.get_parameter("blocks.1.attention.W_v.weight")
    weight.register_hook(lambda gradient: torch.full_like(gradient, math.inf))


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (nan_parameter, "parameter layer 1, attention.W_q"),
        (nan_activation, "output of layer 1, mlp"),
        (nan_gradient, "gradient of layer 1, attention.W_v"),
        (inf_gradient, "gradient of layer 1, attention.W_v"),
    ],
)
def test_the_run_stops_before_a_bad_update_and_names_the_place(
    plant, name, reference, tmp_path, monkeypatch, capsys
):
    kept = []

    def act(run):
        plant(run)
        kept.append((run.model, [parameter.detach().clone() for parameter in run.model.parameters()]))

    with monkeypatch.context() as patch:
        before_update(patch, 8, act)
        assert train.main(parse(request(tmp_path))) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stopped:")]
    assert "step 8" in line
    assert name in line
    assert str(tmp_path / "run" / "checkpoints" / "step-00000005") in line
    (model, before), run = kept[0], tmp_path / "run"
    for one, other in zip(model.parameters(), before, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    assert steps(run)[-1] == 5
    assert records(run, "train")[-1]["step"] == 7
    assert go_on(run) == 0
    assert_same(run, reference("adamw"))


@pytest.mark.parametrize("looks", ["eval", "probe", "checkpoint", "log"])
def test_weights_that_an_update_has_broken_are_named_and_never_saved(looks, tmp_path, monkeypatch, capsys):
    update = train.update

    def breaking(run, step, *rest):
        result = update(run, step, *rest)
        if step == 8:
            nan_parameter(run)
        return result

    monkeypatch.setattr(train, "update", breaking)
    every = {name: {"every": 8 if name == looks else 0} for name in ("eval", "probe", "checkpoint")}
    assert train.main(parse(request(tmp_path, **every))) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stopped:")]
    assert "parameter layer 1, attention.W_q" in line
    assert steps(tmp_path / "run") == [0]
    assert_plain_json(tmp_path / "run" / "metrics.jsonl")


def test_a_run_that_diverges_stops_with_a_message_and_every_checkpoint_is_finite(tmp_path, capsys):
    """Weights of 1e30 are finite, yet what the model makes of them when it is evaluated is not."""
    often = {name: {"every": 1} for name in ("eval", "probe", "checkpoint")}
    argv = request(tmp_path, optimizer={"lr": 1e30, "warmup_steps": 0}, model={"norm": "rmsnorm"}, **often)
    assert train.main(parse(argv)) == 1
    assert "stopped: step" in capsys.readouterr().err
    for path in (tmp_path / "run" / "checkpoints").glob("step-*/model.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values())
    assert_plain_json(tmp_path / "run" / "metrics.jsonl")


@pytest.mark.parametrize(
    ("place", "name"),
    [("blocks.1.mlp", "layer 1, mlp"), ("blocks.0.attention.W_o", "layer 0, attention.W_o")],
)
def test_what_breaks_only_in_an_evaluation_is_named_too(place, name, tmp_path, monkeypatch, capsys):
    def act(run):
        run.model.get_submodule(place).register_forward_hook(
            lambda module, inputs, output: output if module.training else output * math.nan
        )

    before_update(monkeypatch, 4, act)
    assert train.main(parse(request(tmp_path, probe={"every": 0}))) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stopped:")]
    assert f"step 5: the first tensor that is not finite is output of {name};" in line
