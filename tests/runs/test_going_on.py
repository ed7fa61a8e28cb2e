"""Signals, moved folders, damaged checkpoints, full disks: a run goes on."""

import contextlib
import json
import os
import platform
import resource
import shutil
import signal

import pytest
import torch

import train
from configs.cli import parse, read_yaml
from data import preparation, tokenizers
from tests.runs.tiny import (
    TEXT,
    assert_same,
    before_update,
    contents,
    files_up_to,
    go_on,
    interrupted,
    last,
    records,
    request,
    start,
    steps,
)


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


@pytest.mark.parametrize("source", ["text", "hf"])
def test_a_run_that_lost_its_cache_goes_on_with_its_own_tokenizer(source, tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": TEXT[i:]}) + "\n" for i in range(40)))
    data = {"source": source, "tokenizer": "bpe", "vocab_size": 260}
    data |= {"path": tmp_path / "rows.jsonl", "val_fraction": 0.2} if source == "hf" else {}
    run = start(tmp_path, data=data, train={"steps": 2})
    shutil.rmtree(tmp_path / "cache")

    def train_bpe(*_):
        raise AssertionError("trained once more")

    for module in (tokenizers, preparation):
        monkeypatch.setattr(module, "train_bpe", train_bpe)
    assert go_on(run, "--train.steps", "3") == 0
    assert last(run)["step"] == "step-00000003"


def test_a_finished_run_is_left_as_it_is(reference, tmp_path):
    run = shutil.copytree(reference("adamw"), tmp_path / "run")
    assert go_on(run) == 0  # the copy knows its place from now on
    before = contents(run)
    assert go_on(run) == 0
    after = contents(run)
    assert before.pop("metrics.jsonl").count(b"\n") == after.pop("metrics.jsonl").count(b"\n")
    assert after == before
    assert_same(run, reference("adamw"))


def test_a_finished_run_says_that_it_is_complete_and_shows_no_progress(reference, tmp_path, capsys):
    run = shutil.copytree(reference("adamw"), tmp_path / "run")
    capsys.readouterr()
    assert go_on(run) == 0
    told = capsys.readouterr()
    assert told.out.startswith(f"{run}, already complete\n")
    assert "going on" not in told.out
    assert "steps," not in told.err
    assert (run / "report.html").exists()


def test_the_silence_at_the_end_is_announced(tmp_path, capsys):
    run = start(tmp_path, train={"steps": 1})
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("labelling the heads and writing the page")
    assert "step      1  " in lines[at - 1]
    assert lines[-1].startswith(f"{run} is complete")
    start(tmp_path, train={"steps": 1}, probe={"every": 0}, run={"overwrite": "true"})
    assert "labelling" not in capsys.readouterr().out


def test_a_run_without_memory_stops_in_one_line_and_goes_on_later(reference, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        before_update(patch, 8, lambda run: torch.empty(2**50))
        assert train.main(parse(request(tmp_path))) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stopped:")]
    assert "step 7: out of memory: " in line
    assert "train.batch_size" in line
    assert go_on(tmp_path / "run") == 0
    assert_same(tmp_path / "run", reference("adamw"))


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
