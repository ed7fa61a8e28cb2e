"""Ranks that share a run do what one process does; nothing of it hangs on how many there are."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from configs.cli import load_config, parse
from tests.runs.ranked import torchrun
from tests.runs.tiny import TEXT, assert_same, go_on, records, request, steps

PLAIN = {
    "model": {"dropout": 0},
    "optimizer": {"schedule": "constant"},
    "train": {"grad_accum": 4},
    "eval": {"every": 10},
    "probe": {"every": 0},
    "checkpoint": {"every": 0, "log_spaced": True},
}
DOCUMENTS = {"source": "hf", "windows": "documents", "mask_documents": True, "tokenizer": "byte"}
DOCUMENTS |= {"val_fraction": 0.2}
ODD = {"n_head": 3, "n_kv_head": 1, "d_model": 18, "sink": "learned", "gate": True, "tie_embeddings": True}
ODD |= {"bias": True, "position": "learned"}
CASES = {  # what differs from PLAIN
    "plain": {"probe": {"every": 10}},
    "documents": {"data": DOCUMENTS, "train": {"steps": 5}},
    "odd": {"model": ODD},
    "muon": {"optimizer": {"name": "muon"}},
    "bf16": {"train": {"precision": "bf16"}},
    "fp16": {"train": {"precision": "fp16", "steps": 5}},
    "compiled": {"train": {"compile": True, "steps": 5}},
}
SOON = [("plain", "ddp"), ("plain", "fsdp"), ("documents", "ddp"), ("odd", "fsdp")]
LATER = [(name, kind) for name in CASES for kind in ("ddp", "fsdp") if (name, kind) not in SOON]
SHORT = ("muon", "bf16", "fp16")  # of digits, so that the smallest gradients may change their sign


def asked(folder: Path, name: str, **changes: dict) -> list[str]:
    """A run in `folder/name`."""
    both = {key: {**PLAIN.get(key, {}), **changes.get(key, {})} for key in {**PLAIN, **changes}}
    both["run"] = {"dir": folder / name}
    if both.get("data"):
        # Documents of very different lengths: how many targets a micro-step counts differs much.
        texts = [TEXT[i : i + 1 + i * i % 61] for i in range(60)]
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "rows.jsonl").write_text(rows)
        both["data"]["path"] = folder / "rows.jsonl"
    return request(folder, **both)


def shared(parallel: str, **changes: dict) -> dict:
    """The same for two ranks."""
    return {**changes, "train": {"grad_accum": 2, "parallel": parallel, **changes.get("train", {})}}


def resume(run: Path, steps: int, *more: str) -> list[str]:
    return ["--resume", str(run), "--train.steps", str(steps), *more]


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """Runs `NAME` by one process and `NAME-ddp` or `NAME-fsdp` by two ranks, and others by both."""
    folder = tmp_path_factory.mktemp("ranks")
    start_alone(folder, "moving", train={"steps": 5})
    move = resume(folder / "moving", 10, "--train.grad_accum", "2")
    jobs = compared(folder, SOON) + interrupted(folder, "fsdp")
    jobs += [move, resume(folder / "moving", 15, "--train.parallel", "fsdp")]
    return together(folder, jobs)


@pytest.fixture(scope="session")
def more_runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("more")
    return together(folder, compared(folder, LATER) + interrupted(folder, "ddp"))


def compared(folder: Path, cases: list[tuple[str, str]]) -> list:
    for name in dict.fromkeys(name for name, _ in cases):
        alone = {**CASES[name]}
        if name == "compiled":
            alone["train"] = {"steps": 5}  # by one process without: compiling changes rounding only
        start_alone(folder, name, **alone)
    return [asked(folder, f"{name}-{kind}", **shared(kind, **CASES[name])) for name, kind in cases]


def interrupted(folder: Path, kind: str) -> list:
    """A run, with dropout, and the same in two pieces, for one rank gets a signal."""
    every = {"log_spaced": False, "every": 5, "keep_last": 20}
    drops = shared(kind, model={"dropout": 0.1}, probe={"every": 5}, checkpoint=every)
    signalled = {"argv": asked(folder, f"pieces-{kind}", **drops), "rank": 1, "step": 8, "act": "end"}
    return [asked(folder, f"whole-{kind}", **drops), signalled, ["--resume", str(folder / f"pieces-{kind}")]]


def together(folder: Path, jobs: list) -> Path:
    done = torchrun(2, folder, *jobs, timeout=300)
    assert done.returncode == 0, done.stderr
    (folder / "told.txt").write_text(done.stdout)
    return folder


def start_alone(folder: Path, name: str, **changes: dict) -> None:
    assert train.main(parse(asked(folder, name, **changes))) == 0


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def furthest(run: Path, other: Path, step: int) -> float:
    ours, theirs = weights(run, step), weights(other, step)
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


@pytest.mark.parametrize(("name", "parallel"), SOON)
def test_two_ranks_do_what_one_does(name, parallel, runs):
    assert_alike(runs / name, runs / f"{name}-{parallel}", 1e-6, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parallel"), LATER)
def test_two_ranks_do_what_one_does_in_all_that_a_run_can_ask_for(name, parallel, more_runs):
    bounds = (1e-2, 2e-2) if name in SHORT else (1e-6, 1e-4)
    assert_alike(more_runs / name, more_runs / f"{name}-{parallel}", *bounds)


def assert_alike(one: Path, two: Path, first: float, later: float) -> None:
    """Weights, losses and norms after the first step and after all."""
    ends = steps(one)[-1]
    assert furthest(one, two, 0) == 0
    assert furthest(one, two, 1) <= first
    assert furthest(one, two, ends) <= later
    ours, theirs = records(one, "train"), records(two, "train")
    assert len(ours) == len(theirs) == ends
    for step, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        assert left.keys() == right.keys()
        for key in ("loss", "grad_norm"):
            assert right[key] == pytest.approx(left[key], abs=later if step else first), (step, key)
        assert right["tokens"] == left["tokens"]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_is_read_of_the_same_weights_is_the_same_to_the_bit(parallel, runs):
    """At the start, where weights are the same: evaluation, every score of every head, all counts."""
    one, two = runs / "plain", runs / f"plain-{parallel}"
    for kind in ("eval", "attention"):
        (ours, *_), (theirs, *_) = records(one, kind), records(two, kind)
        assert ours["step"] == 0
        assert ours == theirs


def test_a_checkpoint_goes_on_with_other_numbers_of_ranks_and_ways_to_share(runs, capsys):
    """5 steps by one process, 5 by two with DDP, 5 by two with FSDP2, 5 by one."""
    run = runs / "moving"
    assert go_on(run, "--train.steps", "20", "--train.grad_accum", "4") == 0
    assert "ranks was 2, is 1" in capsys.readouterr().err
    assert furthest(runs / "plain", run, 20) <= 1e-4
    assert load_config(run).train.ranks == 1


def test_a_signal_that_reaches_one_rank_ends_all_after_the_same_step_and_costs_nothing(runs):
    assert_whole(runs, "fsdp")


@pytest.mark.slow
def test_with_ddp_too(more_runs):
    assert_whole(more_runs, "ddp")


def assert_whole(folder: Path, kind: str) -> None:
    pieces = folder / f"pieces-{kind}"
    assert steps(pieces) == [0, 5, 8, 10, 15, 20]
    assert f"interrupted; go on with --resume {pieces}" in (folder / "told.txt").read_text()
    assert_same(pieces, folder / f"whole-{kind}")


def test_one_rank_speaks_for_all(runs):
    told = (runs / "told.txt").read_text()
    for name, kind in SOON:
        assert told.count(f"{runs / name}-{kind} is complete") == 1
    assert told.count("step      0  validation loss") == len(SOON) + 2  # whole, pieces


def test_the_config_of_a_run_says_by_how_many_ranks_it_was_made(runs):
    config = load_config(runs / "plain-ddp")
    assert (config.train.ranks, config.global_batch) == (2, 16)
    assert load_config(runs / "plain").train.ranks == 1


@pytest.mark.parametrize("act", ["die", pytest.param("fail", marks=pytest.mark.slow)])
def test_a_rank_that_dies_ends_the_run_with_its_error_shown_and_the_last_checkpoint_stays(act, tmp_path):
    """Within the 120 seconds of `torchrun`; others would wait half an hour for it."""
    argv = asked(tmp_path, "run", **shared("ddp", train={"steps": 10**6}))
    done = torchrun(2, tmp_path, {"argv": argv, "rank": 1, "step": 8, "act": act})
    assert done.returncode == 1
    assert done.stderr.count("stopped: another process of this run is gone") == 1
    assert ("SIGKILL" if act == "die" else "ValueError: invalid literal") in done.stderr
    assert steps(tmp_path / "run") == [0, 1, 2, 4]


@pytest.mark.slow
def test_what_ends_all_ranks_is_said_once(tmp_path):
    argv = asked(tmp_path, "run", **shared("ddp"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    done = torchrun(2, tmp_path, argv)
    assert done.stderr.count("error: run.dir") == 1
    assert "another process" not in done.stderr
    assert "exitcode  : 2" in done.stderr


@pytest.mark.slow
def test_a_number_that_is_not_finite_on_one_rank_is_named_once_and_stops_all(tmp_path):
    argv = asked(tmp_path, "run", **shared("fsdp"))
    done = torchrun(2, tmp_path, {"argv": argv, "rank": 1, "step": 3, "act": "break"})
    assert done.stderr.count("is not finite is parameter layer 1, attention.W_q") == 1
    assert "exitcode  : 1" in done.stderr


@pytest.mark.slow
def test_a_checkpoint_that_the_first_rank_cannot_save_ends_all(tmp_path):
    argv = asked(tmp_path, "run", **shared("ddp"))
    done = torchrun(2, tmp_path, {"argv": argv, "rank": 0, "step": 8, "act": "fill"})
    assert done.stderr.count("stopped: cannot save the checkpoint of step 8") == 1
    assert "another process" not in done.stderr
    assert steps(tmp_path / "run") == [0, 1, 2, 4]
