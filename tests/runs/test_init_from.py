"""Starting from another run's weights: what is taken over, what may differ, what is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from configs import UserError
from configs.cli import parse
from tests.runs.test_refusals import refused
from tests.runs.tiny import (
    TEXT,
    Killed,
    assert_same,
    before_update,
    contents,
    go_on,
    last,
    records,
    request,
    start,
)
from training.plan import foresee


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


@pytest.fixture
def old(reference, tmp_path) -> Path:
    return shutil.copytree(reference("adamw"), tmp_path / "old")


def begun(folder: Path, old: Path, **sections: dict) -> Path:
    model = {"init_from": old, **sections.pop("model", {})}
    return start(folder, model=model, **{"train": {"steps": 3}, **sections})


def test_a_new_run_begins_where_the_old_one_ended(old, tmp_path):
    before = contents(old)
    run = begun(tmp_path, old)
    (end,) = [record for record in records(old, "eval") if record["step"] == 20]
    first = records(run, "eval")[0]
    assert first == end | {"step": 0}
    assert (run / "tokenizer.json").read_text() == (old / "tokenizer.json").read_text()
    theirs, ours = weights(old, 20), weights(run, 0)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert records(run, "train")[0]["tokens"] == 4 * 2 * 17  # steps and moments begin anew
    assert contents(old) == before


def test_a_checkpoint_of_a_run_may_be_named(old, tmp_path):
    run = begun(tmp_path, old / "checkpoints" / "step-00000015")
    (then,) = [record for record in records(old, "eval") if record["step"] == 15]
    assert records(run, "eval")[0] == then | {"step": 0}


def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_is_taken(old, tmp_path, capsys):
    (old / "checkpoints" / "step-00000020" / "model.safetensors").write_bytes(b"")
    run = begun(tmp_path, old)
    assert f"warning: {old / 'checkpoints' / 'step-00000020'} is damaged" in capsys.readouterr().err
    assert torch.equal(weights(run, 0)["head.weight"], weights(old, 15)["head.weight"])


def test_the_run_goes_on_when_what_it_began_from_is_gone(old, tmp_path, monkeypatch):
    for name in ("whole", "pieces"):
        (tmp_path / name).mkdir()
    whole = begun(tmp_path / "whole", old, train={"steps": 20})

    def kill(run):
        raise Killed

    argv = request(tmp_path / "pieces", model={"init_from": old})
    with monkeypatch.context() as patch:
        before_update(patch, 8, kill)
        with pytest.raises(Killed):
            train.main(parse(argv))
    shutil.rmtree(old)
    assert go_on(tmp_path / "pieces" / "run") == 0
    assert_same(tmp_path / "pieces" / "run", whole)


def test_a_run_killed_before_its_first_checkpoint_takes_the_weights_once_more(old, tmp_path, monkeypatch):
    for name in ("whole", "pieces"):
        (tmp_path / name).mkdir()
    whole = begun(tmp_path / "whole", old)

    def kill(*_, **__):
        raise Killed

    argv = request(tmp_path / "pieces", model={"init_from": old}, train={"steps": 3})
    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate", kill)
        with pytest.raises(Killed):
            train.main(parse(argv))
    assert go_on(tmp_path / "pieces" / "run") == 0
    assert_same(tmp_path / "pieces" / "run", whole)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dropout": 0.3}, "model.dropout was 0.1, is 0.3"),
        ({"backend": "naive"}, "model.backend was auto, is naive"),
        ({"window": 5}, "model.window was null, is 5"),
        ({"rope_theta": 500}, "model.rope_theta was 10000.0, is 500.0"),
        (
            {"logit_softcap": 9, "sink": "zero"},
            "model.sink was none, is zero, model.logit_softcap was 0.0, is 9.0",
        ),
    ],
)
def test_interventions_are_allowed_and_told_in_one_line(changes, told, old, tmp_path, capsys):
    run = begun(tmp_path, old, model=changes)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert lines == [f"warning: unlike {old}: {told}"]
    assert torch.equal(weights(run, 0)["head.weight"], weights(old, 20)["head.weight"])


def test_another_context_is_an_intervention_too_where_positions_are_rotary(old, tmp_path, capsys):
    run = begun(tmp_path, old, model={"context_length": 30})
    assert "model.context_length was 17, is 30" in capsys.readouterr().err
    assert torch.equal(weights(run, 0)["head.weight"], weights(old, 20)["head.weight"])


@pytest.mark.parametrize("first", ["learned", "zero"])
def test_a_learned_sink_starts_as_it_does_or_is_left_behind(first, old, tmp_path):
    (tmp_path / "first").mkdir()
    one = begun(tmp_path / "first", old, model={"sink": first})
    sinks = {name for name in weights(one, 3) if name.endswith("sink_H")}
    assert len(sinks) == (2 if first == "learned" else 0)
    other = begun(tmp_path, one, model={"sink": "zero" if first == "learned" else "learned"})
    theirs, ours = weights(one, 3), weights(other, 0)
    assert theirs.keys() ^ ours.keys() == {"blocks.0.attention.sink_H", "blocks.1.attention.sink_H"}
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs.keys() & ours.keys())
    assert not any(value.any() for name, value in ours.items() if name.endswith("sink_H"))


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        (
            {"model": {"n_layer": 3, "d_mlp": 40}},
            [("model.n_layer", "2", "3"), ("model.d_mlp", "64", "40")],
        ),
        ({"model": {"n_head": 4}}, [("model.n_head", "2", "4"), ("model.d_head", "8", "4")]),
        ({"model": {"mlp": "relu2"}}, [("model.mlp", "gelu", "relu2")]),
        ({"model": {"norm": "rmsnorm"}}, [("model.norm", "layernorm", "rmsnorm")]),
        ({"model": {"qk_norm": "true"}}, [("model.qk_norm", "false", "true")]),
        ({"model": {"position": "learned"}}, [("model.position", "rotary", "learned")]),
        ({"model": {"gate": "true"}}, [("model.gate", "false", "true")]),
        ({"data": {"tokenizer": "byte"}}, [("data.tokenizer", "char", "byte")]),
        ({"data": {"bos": "false"}}, [("data.bos", "true", "false")]),
    ],
    ids=str,
)
def test_another_model_or_tokenizer_is_refused_in_one_line_with_what_differs(
    sections, named, old, tmp_path, capsys
):
    argv = request(tmp_path, **{**sections, "model": {"init_from": old, **sections.get("model", {})}})
    message = refused(argv, tmp_path, capsys)
    assert message.startswith(f"error: model.init_from {old} ")
    ask, asked = re.fullmatch(r".* ask for (.*) \(asked: (.*)\).*", message.strip()).groups()
    assert all(f"--{key} {was}" in ask and f"--{key} {now}" in asked for key, was, now in named)


def test_what_may_differ_is_told_too_when_something_else_must_not(old, tmp_path, capsys):
    model = {"init_from": old, "n_layer": 3, "rope_theta": 500, "window": 5}
    message = refused(request(tmp_path, model=model), tmp_path, capsys)
    assert "--model.n_layer 2 " in message
    assert "--model.rope_theta 10000.0" in message
    assert "--model.window null" in message
    assert message.strip().endswith("may differ: model.rope_theta, model.window")


def test_how_the_old_weights_were_drawn_does_not_matter(old, tmp_path, capsys):
    begun(tmp_path, old, model={"init": "zero_residual"})
    assert "warning" not in capsys.readouterr().err


def test_with_learned_positions_the_context_is_a_shape(tmp_path, capsys):
    (tmp_path / "first").mkdir()
    old = start(tmp_path / "first", model={"position": "learned"}, train={"steps": 1})
    model = {"position": "learned", "init_from": old, "context_length": 30}
    message = refused(request(tmp_path, model=model), tmp_path, capsys)
    assert "ask for --model.context_length 17 (asked: --model.context_length 30)" in message


@pytest.mark.parametrize("place", ["nowhere", "text.txt", "old/checkpoints/step-00000007", "empty"])
def test_what_is_no_run_and_no_checkpoint_of_one_is_refused(place, old, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    argv = request(tmp_path, model={"init_from": tmp_path / place})
    message = refused(argv, tmp_path, capsys)
    assert message.startswith(f"error: model.init_from {tmp_path / place}: ")
    assert message.count(str(tmp_path / place)) == 1 or "checkpoints" in message
    if place in ("nowhere", "empty"):
        assert "run folder, checkpoint of one, Hugging Face folder or GGUF file" in message


def test_a_text_with_characters_that_the_old_run_never_saw_is_refused(old, tmp_path, capsys):
    argv = request(tmp_path, model={"init_from": old})
    (tmp_path / "text.txt").write_text(TEXT + "Ω")
    assert "'Ω'" in refused(argv, tmp_path, capsys)


def test_a_text_with_fewer_characters_keeps_the_old_vocabulary_also_when_the_run_goes_on(old, tmp_path):
    argv = request(tmp_path, model={"init_from": old}, train={"steps": 1})
    (tmp_path / "text.txt").write_text(TEXT.replace("9", "1"))
    assert train.main(parse(argv)) == 0
    new, then = (json.loads((run / "tokenizer.json").read_text()) for run in (tmp_path / "run", old))
    assert new == then
    shutil.rmtree(old)
    assert go_on(tmp_path / "run", "--train.steps", "2") == 0
    assert last(tmp_path / "run")["step"] == "step-00000002"


@pytest.mark.parametrize("place", ["run", "run/checkpoints/step-00000015", "link", "shares"])
def test_the_run_that_would_be_emptied_cannot_be_started_from(place, old, tmp_path, capsys):
    """Named by itself, by a checkpoint, behind a link, or by another run whose checkpoints are its own."""
    run = old.rename(tmp_path / "run")
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "shares").mkdir()
    for name in ("config.yaml", "tokenizer.json"):
        shutil.copy(run / name, tmp_path / "shares")
    (tmp_path / "shares" / "checkpoints").symlink_to(run / "checkpoints")
    argv = request(tmp_path, run={"overwrite": "true"}, model={"init_from": tmp_path / place})
    message = refused(argv, tmp_path, capsys)
    assert f"model.init_from {tmp_path / place} lies in run.dir {run}" in message
    with pytest.raises(UserError, match="lies in"):
        foresee(parse(argv).config)


def test_a_checkpoint_can_be_named_from_inside_its_folder(old, tmp_path, monkeypatch):
    argv = request(tmp_path, model={"init_from": "."}, train={"steps": 1})
    monkeypatch.chdir(old / "checkpoints" / "step-00000015")
    assert train.main(parse(argv)) == 0
    assert torch.equal(weights(tmp_path / "run", 0)["head.weight"], weights(old, 15)["head.weight"])
    monkeypatch.chdir(old / "checkpoints" / "step-00000015")
    argv = request(tmp_path, run={"dir": old, "overwrite": "true"}, model={"init_from": "."})
    assert train.main(parse(argv)) == 2
