"""Whole runs of a tiny model: the same numbers however watched, cut, moved or killed; how a run says no."""

import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from configs import UserError
from configs.cli import parse, read_yaml, to_yaml, validate
from data.tokenizers import load_tokenizer
from training.loggers import read_records

ROOT = Path(train.__file__).parent
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))
TEXT = "".join(f"{i} is {i % 3} and {i % 3} is {i}.\n" for i in range(60))
SMALL = {
    "data.source": "text",
    "model.n_layer": 2,
    "model.n_head": 2,
    "model.d_model": 16,
    "model.context_length": 17,
    "model.dropout": 0.1,
    "optimizer.lr": 0.01,
    "optimizer.warmup_steps": 4,
    "train.steps": 20,
    "train.batch_size": 4,
    "train.grad_accum": 2,
    "eval.every": 5,
    "probe.every": 5,
    "probe.sequences": 2,
    "checkpoint.every": 5,
    "log.every": 1,
}
TIMES = {"seconds", "tokens_per_s", "telemetry_share"}  # what may differ between equal runs


def words(values: dict) -> list[str]:
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def request(folder: Path, **sections: dict) -> list[str]:
    """The command line of a small run in `folder`; `model={"n_layer": 3}` changes model.n_layer."""
    (folder / "text.txt").write_text(TEXT)
    places = {"run.dir": folder / "run", "data.path": folder / "text.txt", "data.cache_dir": folder / "cache"}
    changes = {f"{name}.{key}": value for name, keys in sections.items() for key, value in keys.items()}
    return words({**SMALL, **places, **changes})


def start(folder: Path, **sections: dict) -> Path:
    assert train.main(parse(request(folder, **sections))) == 0
    return folder / "run"


def go_on(run: Path, *more: str) -> int:
    return train.main(parse(["--resume", str(run), *more]))


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def records(run: Path, *kinds: str) -> list[dict]:
    found = [record for record in read_records(run / "metrics.jsonl") if not kinds or record["kind"] in kinds]
    return [{key: value for key, value in record.items() if key not in TIMES} for record in found]


def last(run: Path) -> dict[str, str]:
    """Fingerprints of weights and moments in the last checkpoint, and its step."""
    step = run / "checkpoints" / f"step-{steps(run)[-1]:08d}"
    names = ("model.safetensors", "optimizer.safetensors")
    return {
        "step": step.name,
        **{name: hashlib.sha256((step / name).read_bytes()).hexdigest() for name in names},
    }


def assert_same(run: Path, other: Path) -> None:
    assert last(run) == last(other)
    assert records(run) == records(other)
    assert set(Counter((record["kind"], record["step"]) for record in records(run)).values()) == {1}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Runs that nothing disturbs, by name of the optimizer."""

    @functools.cache
    def run(optimizer: str) -> Path:
        return start(tmp_path_factory.mktemp(optimizer), optimizer={"name": optimizer})

    return run


BOTH = pytest.mark.parametrize("optimizer", ["adamw", "muon"])


class Killed(BaseException):
    """Nothing in the code catches it, as nothing does SIGKILL."""


def before_update(monkeypatch, step: int, act) -> None:
    """Call `act(run)` when the loop is about to make the update of `step`."""
    update = train.update

    def acting(run, number, *rest):
        if number == step:
            act(run)
        return update(run, number, *rest)

    monkeypatch.setattr(train, "update", acting)


# Bit for bit


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


# Going on


def interrupted(
    folder: Path, monkeypatch, step: int = 8, number: int = signal.SIGINT, **sections: dict
) -> Path:
    """A run that got a signal when `step` began, so that it ended after it."""
    with monkeypatch.context() as patch:
        before_update(patch, step, lambda run: os.kill(os.getpid(), number))
        assert train.main(parse(request(folder, **sections))) == 130
    return folder / "run"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(
    number, reference, tmp_path, monkeypatch, capsys
):
    before = signal.getsignal(number)
    run = interrupted(tmp_path, monkeypatch, number=number)
    assert steps(run)[-1] == 8
    assert f"--resume {run}" in capsys.readouterr().out
    assert signal.getsignal(number) == before
    assert records(run, "end") == []
    assert go_on(run) == 0
    assert_same(run, reference("adamw"))


@pytest.mark.parametrize("what", ["evaluate", "measure"])
def test_a_signal_while_the_run_looks_at_itself_ends_with_a_checkpoint_too(
    what, reference, tmp_path, monkeypatch
):
    look, calls = getattr(train, what), []

    def interrupting(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 3:  # steps 0, 4, 8
            os.kill(os.getpid(), signal.SIGINT)
        return look(*arguments, **keywords)

    never = {"checkpoint": {"every": 0, "keep_best": False}, "eval": {"every": 4}, "probe": {"every": 4}}
    with monkeypatch.context() as patch:
        patch.setattr(train, what, interrupting)
        assert train.main(parse(request(tmp_path, **never))) == 130
    assert steps(tmp_path / "run")[-1] == 8
    assert go_on(tmp_path / "run") == 0
    assert last(tmp_path / "run") == last(reference("adamw"))


@pytest.mark.parametrize("move", [shutil.move, shutil.copytree])
def test_a_moved_or_copied_run_goes_on(move, reference, tmp_path, monkeypatch):
    run = interrupted(tmp_path, monkeypatch)
    move(run, tmp_path / "elsewhere")
    before = contents(run) if run.exists() else None
    assert go_on(tmp_path / "elsewhere") == 0
    assert_same(tmp_path / "elsewhere", reference("adamw"))
    assert (contents(run) if run.exists() else None) == before
    assert read_yaml(tmp_path / "elsewhere" / "config.yaml", "")["run"]["dir"] == str(tmp_path / "elsewhere")


def test_a_finished_run_is_left_as_it_is(reference, tmp_path):
    run = shutil.copytree(reference("adamw"), tmp_path / "run")
    assert go_on(run) == 0  # the copy knows its place from now on
    before = contents(run)
    assert go_on(run) == 0
    after = contents(run)
    assert before.pop("metrics.jsonl").count(b"\n") == after.pop("metrics.jsonl").count(b"\n")
    assert after == before
    assert_same(run, reference("adamw"))


def test_a_finished_run_goes_on_to_more_steps(reference, tmp_path):
    run = shutil.copytree(reference("adamw"), tmp_path / "run")
    assert go_on(run, "--train.steps", "25") == 0
    assert steps(run)[-1] == 25
    found = records(run)
    assert [record["step"] for record in records(run, "train")] == list(range(1, 26))
    assert [record["step"] for record in records(run, "eval")] == list(range(0, 26, 5))
    assert [(record["kind"], record["step"]) for record in found if record["kind"] == "end"] == [("end", 25)]
    assert found[: len(records(reference("adamw"))) - 1] == records(reference("adamw"))[:-1]
    assert read_yaml(run / "config.yaml", "")["train"]["steps"] == 25


def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(
    reference, tmp_path, monkeypatch, capsys
):
    run = interrupted(tmp_path, monkeypatch, 13)
    newest = run / "checkpoints" / "step-00000013" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    capsys.readouterr()
    assert go_on(run) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1
    assert str(newest.parent) in warnings[0]
    assert_same(run, reference("adamw"))


def test_a_damaged_checkpoint_does_not_push_out_the_good_ones_that_follow(tmp_path, monkeypatch):
    """It has the highest step for a while, but counts neither as newest nor as best."""
    keep = {"checkpoint": {"every": 0, "keep_last": 1, "log_spaced": True}}
    run = interrupted(tmp_path, monkeypatch, 13, **keep)
    newest = run / "checkpoints" / "step-00000013" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    with monkeypatch.context() as patch:
        before_update(patch, 11, lambda run: os.kill(os.getpid(), signal.SIGINT))
        assert go_on(run) == 130
    assert 11 in steps(run)
    assert go_on(run) == 0


@pytest.mark.parametrize(
    ("owner", "name", "key"), [(torch, "get_num_threads", "threads"), (platform, "python_version", "python")]
)
def test_what_would_make_a_resume_inexact_is_reported_once(owner, name, key, tmp_path, monkeypatch, capsys):
    was = getattr(owner, name)()
    run = start(tmp_path, train={"steps": 1})
    monkeypatch.setattr(owner, name, lambda: 99)
    assert go_on(run, "--train.steps", "2") == 0
    warning = f"warning: the run will not continue bit for bit: {key} was {was}, is 99"
    assert warning in capsys.readouterr().err.splitlines()
    assert go_on(run, "--train.steps", "3") == 0
    assert "warning" not in capsys.readouterr().err


# A full disk, acted by a limit on the size of files


@contextlib.contextmanager
def files_up_to(size: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_run_whose_checkpoint_finds_no_room_stops_and_goes_on_later(
    reference, tmp_path, monkeypatch, capsys
):
    with files_up_to(resource.RLIM_INFINITY), monkeypatch.context() as patch:
        limit = (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])  # records fit, weights do not
        before_update(patch, 8, lambda run: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
        assert train.main(parse(request(tmp_path))) == 1
    assert "stopped: cannot save the checkpoint of step 10" in capsys.readouterr().err
    assert go_on(tmp_path / "run") == 0
    assert_same(tmp_path / "run", reference("adamw"))


def test_a_resume_that_finds_no_room_leaves_a_run_that_can_be_resumed(reference, tmp_path, monkeypatch):
    run = interrupted(tmp_path, monkeypatch)
    with files_up_to(100), contextlib.suppress(OSError):
        assert go_on(run) == 1
    assert go_on(run) == 0
    assert_same(run, reference("adamw"))


# Numbers that are not finite


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


# What a run leaves


def assert_plain_json(path: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)


SCORES = {"entropy", "entropy_normalized", "sink", "previous", "induction", "duplicate", "max_logit"}


def test_records_are_what_the_contract_says(reference):
    run = reference("adamw")
    assert_plain_json(run / "metrics.jsonl")
    by_kind = {}
    for record in read_records(run / "metrics.jsonl"):
        by_kind.setdefault(record["kind"], []).append(record)
    assert {kind: [record["step"] for record in found] for kind, found in by_kind.items()} == {
        "train": list(range(1, 21)),
        "eval": [0, 5, 10, 15, 20],
        "attention": [0, 5, 10, 15, 20],
        "end": [20],
    }
    for record in by_kind["train"]:
        assert set(record) == {"kind", "step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s"}
        assert record["tokens"] == record["step"] * 4 * 2 * 17
        assert 0 < record["lr"] <= 0.01
        assert record["tokens_per_s"] > 0
    for record in by_kind["eval"]:
        assert set(record) == {"kind", "step", "loss", "loss_sem", "bits_per_byte"}
        assert record["bits_per_byte"] == pytest.approx(record["loss"] / math.log(2))  # one byte a character
    for record in by_kind["attention"]:
        assert set(record) == {"kind", "step", "scores", "model", "probe", "seconds"}
        assert set(record["scores"]) >= SCORES
        for rows in record["scores"].values():
            assert [len(row) for row in rows] == [2, 2]
            assert all(isinstance(value, float) for row in rows for value in row)
        assert set(record["model"]) >= {"repeat_loss_1", "repeat_loss_2", "icl_score"}
        assert set(record["probe"]) >= {"bos", "bos_trained", "block_lengths"}
        assert record["probe"]["bos_trained"] is True
    (end,) = by_kind["end"]
    assert set(end) == {"kind", "step", "seconds", "telemetry_share"}
    assert 0 < end["telemetry_share"] < 1


def test_rates_in_the_records_follow_warm_up_and_schedule(reference):
    lrs = [record["lr"] for record in records(reference("adamw"), "train")]
    assert lrs[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert lrs[-1] == pytest.approx(0.001)


def test_files_are_those_of_the_contract_and_nothing_lies_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    argv = words({**SMALL, "data.path": "text.txt", "run.dir": "runs/a", "checkpoint.keep_last": 1})
    assert train.main(parse(argv)) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "runs", "text.txt"]
    run = tmp_path / "runs" / "a"
    files = ["checksums.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert sorted(path.name for path in (run / "checkpoints" / "step-00000020").iterdir()) == files
    files = ["checkpoints", "config.yaml", "metrics.jsonl", "tokenizer.json"]
    assert sorted(path.name for path in run.iterdir()) == files
    assert validate(read_yaml(run / "config.yaml", "")) == parse(argv).config
    assert (run / "config.yaml").read_text() == to_yaml(parse(argv).config)
    tokenizer = load_tokenizer(run / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    weights = load_file(run / "checkpoints" / "step-00000020" / "model.safetensors")
    assert weights["token_embedding.weight"].shape == (tokenizer.vocab_size, 16)
    assert not [name for name in weights if name.startswith("_")]


def test_the_best_checkpoint_stays_while_worse_ones_come_and_go_also_after_a_resume(tmp_path, monkeypatch):
    losses = iter([3, 2.5, 1, 2, 1.5, 4, 4, 4])  # at steps 0, 3, 6 ... 18, 20
    monkeypatch.setattr(
        train, "evaluate", lambda *_: {"loss": next(losses), "loss_sem": 0.1, "bits_per_byte": 1}
    )
    run = interrupted(tmp_path, monkeypatch, 11, checkpoint={"every": 4, "keep_last": 2}, eval={"every": 3})
    assert steps(run) == [6, 8, 11]
    assert go_on(run) == 0
    assert steps(run) == [6, 16, 20]


def test_half_precision_is_honoured(reference, tmp_path):
    losses = [record["loss"] for record in records(start(tmp_path, train={"precision": "bf16"}), "train")]
    full = [record["loss"] for record in records(reference("adamw"), "train")]
    assert losses == pytest.approx(full, rel=0.02)
    assert losses != pytest.approx(full, rel=1e-5)


@pytest.mark.parametrize("last_step", [1, 7])
def test_first_and_last_step_are_always_looked_at(last_step, tmp_path):
    rare = {name: {"every": 1000} for name in ("eval", "probe", "checkpoint", "log")}
    run = start(tmp_path, train={"steps": last_step}, optimizer={"warmup_steps": 0}, **rare)
    found = [(record["kind"], record["step"]) for record in records(run)]
    looks = [(kind, step) for step in (0, last_step) for kind in ("eval", "attention")]
    assert sorted(found) == sorted([*looks, ("train", last_step), ("end", last_step)])
    assert steps(run) == [0, last_step]


def test_telemetry_is_a_share_of_the_time_even_where_it_takes_nearly_all(tmp_path):
    run = start(tmp_path, train={"steps": 1}, probe={"sequences": 200}, eval={"every": 0})
    *_, probed, end = read_records(run / "metrics.jsonl")
    assert end["seconds"] > probed["seconds"]
    assert 0 < end["telemetry_share"] < 1


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_trains_and_starts_as_good_as_guessing(path, tmp_path):
    small = {
        **{
            "model.n_layer": 2,
            "model.n_head": 2,
            "model.d_model": 16,
            "train.steps": 2,
            "train.batch_size": 2,
        },
        **{"eval.tokens": 500, "probe.sequences": 2, "log.every": 1},
        **{"run.dir": tmp_path / "run", "data.cache_dir": tmp_path / "cache"},
    }
    assert train.main(parse(["--config", str(path), *words(small)])) == 0
    size = load_tokenizer(tmp_path / "run" / "tokenizer.json").vocab_size
    first = records(tmp_path / "run", "eval", "train")
    for record in first[:2]:
        assert record["step"] <= 1
        assert record["loss"] == pytest.approx(math.log(size), abs=0.05)


@pytest.mark.slow
def test_induction_appears_on_repeats_with_two_layers(tmp_path):
    path = ROOT / "configs" / "induction.yaml"
    argv = ["--config", str(path), *words({"run.dir": tmp_path / "run", "eval.every": 0})]
    assert train.main(parse(argv)) == 0
    first, *_, end = records(tmp_path / "run", "attention")
    assert end["model"]["repeat_loss_2"] < 0.5 < first["model"]["repeat_loss_2"]
    assert max(max(row) for row in first["scores"]["induction"]) < 0.1
    assert max(end["scores"]["induction"][1]) > 0.5


@pytest.mark.slow
def test_a_preset_in_half_precision_on_several_threads_goes_on_bit_for_bit(tmp_path, monkeypatch):
    threads, folders = torch.get_num_threads(), [tmp_path / name for name in ("whole", "pieces")]
    more = {"train.steps": 12, "data.cache_dir": tmp_path / "cache", "eval.every": 0, "model.dropout": 0.1}
    argv = [
        ["--config", str(ROOT / "configs/shakespeare.yaml"), *words({**more, "run.dir": f})] for f in folders
    ]
    torch.set_num_threads(2)
    try:
        assert train.main(parse(argv[0])) == 0
        with monkeypatch.context() as patch:
            before_update(patch, 6, lambda run: os.kill(os.getpid(), signal.SIGINT))
            assert train.main(parse(argv[1])) == 130
        assert go_on(folders[1]) == 0
    finally:
        torch.set_num_threads(threads)
    assert_same(*folders)


# Requests that are wrong: exit code 2, one line, nothing written


def refused(argv: list[str], folder: Path, capsys) -> str:
    before = contents(folder)
    capsys.readouterr()
    try:
        code = train.main(parse(argv))
        message = capsys.readouterr().err
    except UserError as error:  # the entry point prints it; tests/configs shows that
        code, message = 2, f"error: {error}\n"
    assert code == 2
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert contents(folder) == before
    return message


def test_a_folder_with_a_run_is_refused_with_the_three_ways_out(reference, tmp_path, capsys):
    shutil.copytree(reference("adamw"), tmp_path / "run")
    argv = request(tmp_path)
    message = refused(argv, tmp_path, capsys)
    assert all(
        way in message for way in (f"--resume {tmp_path / 'run'}", "--run.dir", "--run.overwrite true")
    )


def test_overwriting_starts_afresh(reference, tmp_path):
    run = shutil.copytree(reference("muon"), tmp_path / "run")
    (run / "report.html").touch()
    start(tmp_path, run={"overwrite": "true"})
    assert_same(run, reference("adamw"))
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("name", ["thesis.tex", "config.yaml", "metrics.jsonl", "checkpoints/notes"])
def test_a_folder_that_is_no_run_is_never_emptied(name, tmp_path, capsys):
    """Other projects have a config.yaml too."""
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).write_text("years: of work\n")
    (tmp_path / "run" / "photos").mkdir()
    argv = request(tmp_path, run={"overwrite": "true"})
    assert str(tmp_path / "run") in refused(argv, tmp_path, capsys)


@pytest.mark.parametrize("link", [False, True])
def test_an_empty_folder_will_do_also_behind_a_link(link, tmp_path):
    (tmp_path / "other disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "other disk") if link else (tmp_path / "run").mkdir()
    start(tmp_path, train={"steps": 1})


@pytest.mark.parametrize("place", ["text.txt", "text.txt/run"])
def test_a_file_in_the_place_of_the_folder_is_refused(place, tmp_path, capsys):
    argv = request(tmp_path, run={"dir": tmp_path / place, "overwrite": "true"})
    assert "text.txt" in refused(argv, tmp_path, capsys)


@pytest.mark.parametrize(
    ("text", "sections", "message"),
    [
        (TEXT, {"model": {"context_length": 500}}, "context_length 500 needs at least 500 tokens"),
        (TEXT, {"data": {"val_fraction": 0.01}}, "needs at least 17 tokens; the val part"),
        ("", {}, "text.txt"),
    ],
)
def test_data_that_do_not_fit_are_refused_before_anything_is_written(
    text, sections, message, tmp_path, capsys
):
    argv = request(tmp_path, **sections)
    (tmp_path / "text.txt").write_text(text)
    assert message in refused(argv, tmp_path, capsys)


def test_data_that_probes_cannot_use_are_refused(tmp_path, capsys):
    argv = request(tmp_path, run={"dir": tmp_path / "runs" / "a"})
    (tmp_path / "runs").mkdir()
    (tmp_path / "text.txt").write_text("aab" * 500)
    assert "4 distinct tokens; the data have 2" in refused(argv, tmp_path / "runs", capsys)


def test_other_data_cannot_be_slipped_under_a_run(reference, tmp_path, capsys):
    run = shutil.copytree(reference("adamw"), tmp_path / "run")
    (tmp_path / "other.txt").write_text(TEXT.replace("and", "und"))
    argv = ["--resume", str(run), "--data.path", str(tmp_path / "other.txt")]
    assert "data differ" in refused([*argv, "--data.cache_dir", str(tmp_path / "cache")], run, capsys)


def test_a_run_cannot_be_sent_back(reference, tmp_path, capsys):
    run = shutil.copytree(reference("adamw"), tmp_path / "run")
    message = refused(["--resume", str(run), "--train.steps", "10"], tmp_path, capsys)
    assert "10" in message
    assert "20" in message


@pytest.mark.parametrize("what", ["evaluate", "measure"])
def test_a_run_killed_before_its_first_checkpoint_is_resumed_from_the_start(
    what, reference, tmp_path, monkeypatch
):
    def kill(*arguments, **keywords):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(train, what, kill)
        with pytest.raises(Killed):
            train.main(parse(request(tmp_path)))
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert go_on(tmp_path / "run") == 0
    assert_same(tmp_path / "run", reference("adamw"))


@pytest.mark.parametrize("left", ["nothing", "weights"])
def test_a_run_without_a_whole_checkpoint_is_refused_and_what_is_missing_is_named(
    left, reference, tmp_path, capsys
):
    run = shutil.copytree(reference("adamw"), tmp_path / "run")
    for path in (run / "checkpoints").iterdir():
        if left == "nothing":
            shutil.rmtree(path)
        else:
            for file in path.iterdir():
                if file.name != "model.safetensors":
                    file.unlink()
    message = refused(["--resume", str(run)], tmp_path, capsys)
    assert str(run / "checkpoints") in message
    assert left == "nothing" or "missing" in message


def test_a_wrong_request_from_the_shell_ends_with_code_2_and_one_line(tmp_path):
    argv = request(tmp_path, model={"context_length": 500})
    before = contents(tmp_path)
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: model.context_length 500")
    assert done.stderr.count("\n") == 1
    assert contents(tmp_path) == before


def test_a_run_that_overwrote_does_not_pass_it_on(tmp_path):
    start(tmp_path)
    run = start(tmp_path, run={"overwrite": "true"})
    with pytest.raises(SystemExit) as caught:
        sys.exit(train.main(parse(["--config", str(run / "config.yaml")])))
    assert caught.value.code == 2


@pytest.mark.parametrize("more", [["--train.batch_size", "2"], ["--train.grad_accum", "4"]])
def test_a_resume_cannot_change_the_size_of_the_global_batch_but_how_it_is_split(more, tmp_path, monkeypatch):
    run = interrupted(tmp_path, monkeypatch)
    with pytest.raises(UserError, match=more[0].removeprefix("--")):
        parse(["--resume", str(run), *more])
    before = parse(["--resume", str(run)]).config.train
    split = ["--train.batch_size", str(before.batch_size * before.grad_accum), "--train.grad_accum", "1"]
    assert parse(["--resume", str(run), *split]).config.global_batch == before.batch_size * before.grad_accum
