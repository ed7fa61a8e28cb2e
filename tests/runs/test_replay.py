"""The step that failed is kept, whole or not at all, and comes out the same when it is repeated."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from configs import UserError
from configs.cli import load_config, parse
from data.loading import load_source
from data.sources import IGNORED, Batch
from data.tokenizers import ByteTokenizer, load_tokenizer
from model.transformer import GPT
from scripts import replay as command
from tests.runs.tiny import Killed, before_update, go_on, request
from training import failed
from training.failed import keep, replay
from training.guards import place
from training.step import micro_losses

W_V = "blocks.1.attention.W_v.weight"


def break_a_gradient(run) -> None:
    run.model.get_parameter(W_V).register_hook(lambda gradient: gradient * math.nan)


def break_a_parameter(run) -> None:
    run.model.get_parameter(W_V).data[0, 0] = math.inf


def grow_beyond_fp16(run) -> None:
    run.model.get_parameter("blocks.1.mlp.W_in.weight").data.mul_(1e7)


def stopped(folder, monkeypatch, act, step: int = 8, **sections: dict):
    """A run that met a bad number at `step`, and its model as it was then."""
    models = []

    def planting(run):
        act(run)
        models.append(run.model)

    with monkeypatch.context() as patch:
        before_update(patch, step, planting)
        assert train.main(parse(request(folder, **sections))) == 1
    return folder / "run", models[0]


def shown(run, *words: str, capsys) -> list[str]:
    capsys.readouterr()
    command.main(command.PARSER.parse_args([str(run), *words]))
    return capsys.readouterr().out.splitlines()


def test_the_step_is_repeated_bit_for_bit_with_its_dropout_and_micro_steps(tmp_path, monkeypatch):
    """The hook that broke one gradient is gone; all others are as they were when the run stopped."""
    run, model = stopped(tmp_path, monkeypatch, break_a_gradient)
    about, found = replay(run, None)
    assert (about["step"], about["precision"], about["loss_scale"]) == (8, "fp32", 1.0)
    assert about["culprit"] == "gradient of layer 1, attention.W_v.weight in the backward pass"
    for name, parameter in model.named_parameters():
        assert found[f"parameter {place(name)}"] == (parameter.abs().max().item(), 0)
        largest = parameter.grad.abs().max().item()
        assert found[f"gradient of {place(name)}"] == (largest, 0) or (name == W_V and math.isnan(largest))


def test_what_is_kept_is_the_batch_of_the_step_and_the_weights_that_met_it(tmp_path, monkeypatch):
    run, model = stopped(tmp_path, monkeypatch, break_a_gradient)
    (path,) = (run / "failed").iterdir()
    assert path.name == "step-00000008"
    assert {file.name for file in path.iterdir()} == {"batch.safetensors", "model.safetensors", "failed.json"}
    batch = load_source(load_config(run), load_tokenizer(run / "tokenizer.json")).batch(8)
    kept = load_file(path / "batch.safetensors")
    assert kept.keys() == {"inputs_BT", "targets_BT"}
    assert all(torch.equal(kept[name], getattr(batch, name)) for name in kept)
    weights = load_file(path / "model.safetensors")
    assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())
    assert json.loads((path / "failed.json").read_text())["replay"] == f"python -m scripts.replay {run}"


def test_the_message_has_the_command_and_the_table_marks_the_culprit(tmp_path, monkeypatch, capsys):
    run, _ = stopped(tmp_path, monkeypatch, break_a_parameter)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stopped:")]
    assert line.endswith(f"; to see it again: python -m scripts.replay {run}")
    lines = shown(run, capsys=capsys)
    (marked,) = [line for line in lines if line.startswith(">")]
    name, row = "parameter layer 1, attention.W_v.weight", marked.split()
    assert lines[0] == f"{run}/failed/step-00000008: it stopped at {name}, value head 0"
    assert (marked[2 : 2 + len(name)], row[-1]) == (name, "1")
    assert lines[-1] == f"first that is not finite: {name}"
    names = [line[2:].split("  ")[0] for line in lines[3:-2]]
    order = ["output of layer 0", name, "output of layer 1", "the loss", f"gradient of {place(W_V)}"]
    assert sorted(order, key=names.index) == order


def test_what_overflows_in_fp16_only_is_finite_in_fp32(tmp_path, monkeypatch, capsys):
    run, _ = stopped(tmp_path, monkeypatch, grow_beyond_fp16, 2, train={"precision": "fp16"})
    assert shown(run, capsys=capsys)[-1] == "first that is not finite: output of layer 1, mlp.W_in"
    lines = shown(run, "--precision", "fp32", capsys=capsys)
    assert lines[-1] == "first that is not finite: none, this time"
    assert not any(line.startswith(">") for line in lines)
    (row,) = [line for line in lines if line.startswith("  output of layer 1, mlp.W_in ")]
    assert float(row.split()[-2]) > 65504


def test_gradients_of_a_scaled_loss_are_shown_without_the_scale(tmp_path, monkeypatch):
    """NaN in one gradient of fp16 halves the scale until it is below 1: the last was 1."""
    run, _ = stopped(tmp_path, monkeypatch, break_a_gradient, 2, train={"precision": "fp16", "steps": 30})
    about, scaled = replay(run, None)
    assert (about["step"], about["loss_scale"]) == (18, 1.0)
    path = run / "failed" / "step-00000018" / "failed.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"loss_scale": 64.0}))
    for name, (largest, bad) in replay(run, "fp32")[1].items():
        assert (largest, bad) == (pytest.approx(scaled[name][0], rel=0.02, abs=1e-4), 0)


def test_a_learning_rate_that_blows_up_is_seen_in_the_weights(tmp_path, capsys):
    huge = {"lr": 1e30, "warmup_steps": 0}
    quiet = {name: {"every": 0} for name in ("eval", "probe")}
    argv = request(tmp_path, optimizer=huge, model={"norm": "rmsnorm", "dropout": 0.0}, **quiet)
    assert train.main(parse(argv)) == 1
    err = capsys.readouterr().err
    about, found = replay(tmp_path / "run", None)
    first = next(name for name, (_, bad) in found.items() if bad)
    assert f"is {first}" in err
    assert about["culprit"].startswith(first)
    assert max(found[name][0] for name in found if name.startswith("parameter")) > 1e29


def test_of_an_evaluation_the_windows_are_kept_and_there_is_no_backward_pass(tmp_path, monkeypatch):
    def only_in_evaluation(run):
        run.model.get_submodule("blocks.1.mlp").register_forward_hook(
            lambda module, inputs, output: output if module.training else output * math.nan
        )

    run, _ = stopped(tmp_path, monkeypatch, only_in_evaluation, 4)
    about, found = replay(run, None)
    assert (about["step"], about["culprit"]) == (5, "output of layer 1, mlp")
    kept = load_file(run / "failed" / "step-00000005" / "batch.safetensors")
    source = load_source(load_config(run), load_tokenizer(run / "tokenizer.json"))
    assert torch.equal(kept["inputs_BT"], next(iter(source.validation(4, 0))).inputs_BT)
    assert found["output of dropout"] == found["output of token_embedding"]
    assert not any(name.startswith("gradient") for name in found)


def test_an_evaluation_of_fewer_windows_than_ranks_is_replayed_by_one(tmp_path, monkeypatch):
    def only_in_evaluation(run):
        run.model.get_submodule("blocks.1.mlp").register_forward_hook(
            lambda module, inputs, output: output if module.training else output * math.nan
        )

    batch = {"train": {"batch_size": 1, "grad_accum": 4}}
    run, _ = stopped(tmp_path, monkeypatch, only_in_evaluation, 4, **batch)
    (path,) = run.glob("failed/*/failed.json")
    about = json.loads(path.read_text())
    about["config"]["train"]["ranks"] = 2
    path.write_text(json.dumps(about))
    assert replay(run, None)[0]["first"] is None


def test_of_an_evaluation_the_windows_that_went_wrong_are_kept_not_the_first(tmp_path, monkeypatch):
    found = []

    def in_the_second_batch(run):
        _, second, *_ = run.source.validation(4, 0)
        found.append(second.inputs_BT)
        run.model.token_embedding.register_forward_hook(
            lambda module, inputs, out: out * math.nan if torch.equal(inputs[0], second.inputs_BT) else out
        )

    run, _ = stopped(tmp_path, monkeypatch, in_the_second_batch, 4)
    kept = load_file(run / "failed" / "step-00000005" / "batch.safetensors")
    assert torch.equal(kept["inputs_BT"], found[0])


def kept_by_hand(folder, batch: Batch):
    """A run folder with a failed step of that batch, of 3 windows in micro-steps of 2."""
    sections = {"train": {"batch_size": 2}, "model": {"dropout": 0.0, "mlp": "swiglu"}}
    config = parse(request(folder, **sections)).config
    model = GPT(config.model, 257, torch.Generator().manual_seed(2))
    run = folder / "run"
    run.mkdir()
    (run / "tokenizer.json").write_text(json.dumps(ByteTokenizer(bos=True).to_json()))
    assert keep(run, config, model, batch, 3, "the loss", 1.0).startswith("; to see it again: ")
    return run, model


def windows(segments: bool) -> Batch:
    ids_BT = torch.randint(0, 256, (3, 18), generator=torch.Generator().manual_seed(1))
    targets_BT = ids_BT[:, 1:].masked_fill(ids_BT[:, 1:] > 200, IGNORED)
    segment_BT = (torch.arange(17) // 5).repeat(3, 1)
    return Batch(ids_BT[:, :-1], targets_BT, segment_BT if segments else None)


@pytest.mark.parametrize("segments", [True, False])
def test_documents_and_targets_that_do_not_count_come_back(segments, tmp_path):
    batch = windows(segments)
    run, model = kept_by_hand(tmp_path, batch)
    largest = max(loss.item() for loss in micro_losses(batch, 2, 0, 1, 0, model))
    assert replay(run, None)[1]["the loss"] == (largest, 0)
    other = max(loss.item() for loss in micro_losses(windows(not segments), 2, 0, 1, 0, model))
    assert largest != other


def test_a_second_failure_takes_the_place_of_the_first_and_overwriting_removes_it(tmp_path, monkeypatch):
    run, _ = stopped(tmp_path, monkeypatch, break_a_gradient)
    with monkeypatch.context() as patch:
        before_update(patch, 12, break_a_parameter)
        assert go_on(run) == 1
    assert [path.name for path in (run / "failed").iterdir()] == ["step-00000012"]
    assert replay(run, None)[0]["step"] == 12
    assert go_on(run) == 0
    assert train.main(parse(request(tmp_path, run={"overwrite": True}))) == 0
    assert not (run / "failed").exists()


class Dying:
    """Lets so many calls of what it stands for pass, then raises."""

    def __init__(self, function, calls: int, error: BaseException):
        self.function, self.left, self.error = function, calls, error

    def __call__(self, *arguments):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.function(*arguments)


@pytest.mark.parametrize(
    ("name", "calls"), [("save_file", 0), ("save_file", 1), ("to_disk", 0), ("to_disk", 2)]
)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Killed()], ids=["full", "killed"])
def test_a_failed_step_is_complete_or_invisible(name, calls, error, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(failed, name, Dying(getattr(failed, name), calls, error))
        if isinstance(error, Killed):
            with pytest.raises(Killed):
                stopped(tmp_path, patch, break_a_parameter)
        else:
            run, _ = stopped(tmp_path, patch, break_a_parameter)
            (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stopped:")]
            assert "the first tensor that is not finite is parameter layer 1, attention.W_v.weight" in line
            assert line.endswith(f"; its batch could not be kept: {error}")
            assert not (run / "failed").exists()
    run = tmp_path / "run"
    with pytest.raises(UserError, match="has no failed step"):
        replay(run, None)
    assert go_on(run) == 0


def test_a_run_that_did_not_fail_has_nothing_to_show(reference, tmp_path):
    with pytest.raises(UserError, match="has no failed step: none of its steps met a number"):
        replay(reference("adamw"), None)
    with pytest.raises(UserError, match="is no run folder"):
        command.main(command.PARSER.parse_args([str(tmp_path / "nowhere")]))


@pytest.mark.parametrize("name", ["batch.safetensors", "model.safetensors", "failed.json"])
@pytest.mark.parametrize("length", [None, 0, 7, -1])
def test_a_damaged_file_is_one_line(name, length, tmp_path):
    run, _ = kept_by_hand(tmp_path, windows(False))
    path = run / "failed" / "step-00000003" / name
    if length is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UserError, match="is damaged: ") as caught:
        replay(run, None)
    assert str(caught.value).startswith(str(path.parent))
    assert "\n" not in str(caught.value)


def of(value: int, *shape: int) -> torch.Tensor:
    return torch.full(shape or (3, 17), value)


@pytest.mark.parametrize(
    "batch",
    [
        {"inputs_BT": of(257), "targets_BT": of(0)},
        {"inputs_BT": of(-1), "targets_BT": of(0)},
        {"inputs_BT": of(0), "targets_BT": of(300)},
        {"inputs_BT": of(0), "targets_BT": of(0), "segment_BT": of(0, 3, 16)},
        {"inputs_BT": of(0, 3, 18), "targets_BT": of(0, 3, 18)},
        {"inputs_BT": of(0, 51), "targets_BT": of(0, 51)},
        {"inputs_BT": of(0).float(), "targets_BT": of(0)},
        {"inputs_BT": of(0), "targets_BT": of(0, 2, 17)},
        {"inputs_BT": of(0, 0, 17), "targets_BT": of(0, 0, 17)},
        {"inputs_BT": of(0)},
        {"words": of(0)},
    ],
)
def test_a_batch_that_is_none_of_the_model_is_refused(batch, tmp_path):
    run, _ = kept_by_hand(tmp_path, windows(False))
    save_file(batch, run / "failed" / "step-00000003" / "batch.safetensors")
    with pytest.raises(UserError, match="is damaged: "):
        replay(run, None)


STRANGE = [{"loss_scale": "x"}, {"step": None}, {"config": {"model": {"depth": 3}}}, {"config": 3}]


@pytest.mark.parametrize("change", STRANGE, ids=str)
def test_a_failed_json_that_no_run_wrote_is_refused(change, tmp_path):
    run, _ = kept_by_hand(tmp_path, windows(False))
    path = run / "failed" / "step-00000003" / "failed.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError):
        replay(run, None)


def test_a_config_that_promises_another_model_than_its_weights_is_refused_before_one_is_made(
    tmp_path, monkeypatch
):
    run, _ = kept_by_hand(tmp_path, windows(False))
    path = run / "failed" / "step-00000003" / "failed.json"
    about = json.loads(path.read_text())
    about["config"]["model"]["d_mlp"] = 2**20
    path.write_text(json.dumps(about))
    monkeypatch.setattr(failed, "GPT", None)
    with pytest.raises(UserError, match=r"is damaged: .* holds another model"):
        replay(run, None)
