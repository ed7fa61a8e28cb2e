"""A run read back from its folder is the run as it was at that step."""

import shutil
from pathlib import Path

import pytest
import torch

import train
from configs import UserError
from tests.runs.tiny import TEXT, go_on, interrupted, start
from training import runs
from training.runs import load_config, load_run


@pytest.fixture(scope="module")
def run(reference, tmp_path_factory) -> Path:
    """A finished run of its own for this file; it keeps the steps 10, 15 and 20."""
    return shutil.copytree(reference("adamw"), tmp_path_factory.mktemp("read") / "run")


def copy(run: Path, folder: Path) -> Path:
    return shutil.copytree(run, folder / "copy")


def refused(*arguments) -> str:
    with pytest.raises(UserError) as caught:
        load_run(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", [Path, str])
def test_a_run_is_read_at_its_newest_step_in_evaluation_mode(kind, run):
    found = load_run(kind(run))
    assert (found.folder, found.step) == (run, 20)
    assert found.config == load_config(run)
    assert found.config.train.steps == 20
    assert found.tokenizer.decode(found.tokenizer.encode(TEXT)) == TEXT
    assert not any(module.training for module in found.model.modules())
    assert found.config.model.dropout > 0  # so the mode matters


@pytest.mark.parametrize("changes", [{}, {"sink": "learned", "gate": "true"}, {"tie_embeddings": "true"}])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_logits_are_those_of_the_model_that_was_trained(changes, precision, tmp_path, monkeypatch):
    kept, build = [], train.build
    monkeypatch.setattr(train, "build", lambda *asked: kept.append(build(*asked)) or kept[-1])
    run = start(tmp_path, model=changes, train={"precision": precision, "steps": 3})
    (trained,) = kept
    ids = trained.source.batch(7).inputs_BT
    with trained.model.reading():
        expected = trained.model(ids)
    found = load_run(run)
    assert torch.equal(found.model(ids), expected)
    assert found.tokenizer.vocab_size == trained.source.tokenizer.vocab_size


def test_an_earlier_step_has_the_weights_of_then(tmp_path, monkeypatch):
    """A run stopped at step 8 has the weights of step 8 as its newest."""
    shorter = interrupted(tmp_path, monkeypatch, 8, checkpoint={"keep_last": 9})
    then = load_run(shorter)
    assert then.step == 8
    assert go_on(shorter) == 0
    again, newest = load_run(shorter, 8), load_run(shorter)
    assert (again.step, newest.step) == (8, 20)
    pairs = zip(then.model.parameters(), again.model.parameters(), newest.model.parameters(), strict=True)
    for one, same, other in pairs:
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


def test_step_0_is_a_step_too(tmp_path):
    run = start(tmp_path, train={"steps": 1})
    assert load_run(run, 0).step == 0
    assert load_run(run).step == 1


def test_reading_writes_nothing_and_leaves_the_global_generator_alone(run):
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")}
    state = torch.get_rng_state()
    load_run(run)
    assert torch.equal(torch.get_rng_state(), state)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")} == before


def test_a_run_can_be_read_where_its_text_is_no_more(run, tmp_path):
    elsewhere = copy(run, tmp_path)
    (elsewhere / "config.yaml").write_text((run / "config.yaml").read_text().replace("text.txt", "gone.txt"))
    assert load_run(elsewhere).step == 20


def test_a_step_that_was_not_kept_is_answered_with_those_that_were(run):
    message = refused(run, 7)
    assert "step 7" in message
    assert message.endswith("it has 10, 15, 20")


def test_a_run_without_checkpoints_is_named(run, tmp_path):
    bare = copy(run, tmp_path)
    shutil.rmtree(bare / "checkpoints")
    assert refused(bare, 7).endswith("it has none")
    assert str(bare) in refused(bare)


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_what_is_no_run_is_named(name, tmp_path):
    message = refused(tmp_path / name)
    assert str(tmp_path / name) in message
    assert "config.yaml" in message


def test_a_damaged_newest_checkpoint_leads_to_the_one_before(run, tmp_path):
    damaged = copy(run, tmp_path)
    (damaged / "checkpoints/step-00000020/model.safetensors").write_bytes(b"")
    found = load_run(damaged)
    assert [fault.split("step-")[1][:8] for fault in found.faults] == ["00000020"]
    assert found.step == 15
    whole = load_run(run, 15).model.parameters()
    assert all(map(torch.equal, found.model.parameters(), whole))


def test_a_damaged_checkpoint_that_was_asked_for_is_named_and_those_there_are_listed(run, tmp_path):
    damaged = copy(run, tmp_path)
    (damaged / "checkpoints/step-00000015/optimizer.safetensors").unlink()
    message = refused(damaged, 15)
    assert "of step 15" in message
    assert "10, 15, 20" in message
    assert "optimizer.safetensors is missing" in message
    assert "step-00000020" not in message
    assert load_run(damaged, 20).step == 20


def test_weights_of_another_model_are_refused(run, tmp_path):
    other = copy(run, tmp_path)
    (other / "config.yaml").write_text((run / "config.yaml").read_text().replace("n_layer: 2", "n_layer: 3"))
    assert "another model" in refused(other)


def test_a_run_whose_request_was_never_valid_is_refused_as_a_request(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {n_layers: 3}\n")
    assert "model.n_layers: no such key" in refused(tmp_path)


@pytest.mark.parametrize("content", [None, "", "[]", '{"kind": "char"}'])
def test_a_tokenizer_that_cannot_be_read_is_named(run, tmp_path, content):
    broken = copy(run, tmp_path)
    (broken / "tokenizer.json").unlink()
    if content is not None:
        (broken / "tokenizer.json").write_text(content)
    assert "tokenizer" in refused(broken)


def test_a_checkpoint_that_a_training_rotates_away_while_it_is_read_is_no_fault(run, tmp_path, monkeypatch):
    mine, load = copy(run, tmp_path), runs.load_tokenizer

    def rotating(path):
        shutil.rmtree(mine / "checkpoints" / "step-00000020", ignore_errors=True)
        return load(path)

    monkeypatch.setattr(runs, "load_tokenizer", rotating)
    found = load_run(mine)
    assert (found.step, found.faults) == (15, [])
