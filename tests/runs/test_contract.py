"""What a run leaves: records, files, checkpoints."""

import math
import os
import re
import signal

import pytest
import torch
from safetensors.torch import load_file

import train
from configs.cli import parse, read_yaml, to_yaml, validate
from data.tokenizers import load_tokenizer
from tests.runs.tiny import (
    PRESETS,
    ROOT,
    SMALL,
    TEXT,
    assert_plain_json,
    assert_same,
    before_update,
    go_on,
    interrupted,
    records,
    start,
    steps,
    words,
)
from training.loggers import read_records

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
        assert set(record) == {"kind", "step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu"}
        assert record["tokens"] == record["step"] * 4 * 2 * 17
        assert 0 < record["lr"] <= 0.01
        assert record["tokens_per_s"] > 0
        assert 0 < record["mfu"] <= 1
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
    files = ["checkpoints", "config.yaml", "heads.json", "metrics.jsonl", "report.html", "tokenizer.json"]
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
        train, "evaluate", lambda *_, **__: {"loss": next(losses), "loss_sem": 0.1, "bits_per_byte": 1}
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


@pytest.mark.parametrize(
    "path",
    [path for path in PRESETS if not re.search("source: hf|init_from:", path.read_text())],
    ids=lambda path: path.stem,
)
def test_every_preset_with_embedded_data_trains_and_starts_as_good_as_guessing(path, tmp_path):
    small = {
        **{
            "model.n_layer": 2,
            "model.n_head": 2,
            "model.d_model": 16,
            "train.steps": 2,
            "train.batch_size": 8,
        },
        **{"eval.tokens": 500, "probe.sequences": 2, "log.every": 1, "log.wandb": "disabled"},
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
    argv = [
        "--config",
        str(path),
        *words({"run.dir": tmp_path / "run", "eval.every": 0, "log.wandb": "disabled"}),
    ]
    assert train.main(parse(argv)) == 0
    first, *_, end = records(tmp_path / "run", "attention")
    assert end["model"]["repeat_loss_2"] < 0.5 < first["model"]["repeat_loss_2"]
    assert max(max(row) for row in first["scores"]["induction"]) < 0.1
    assert max(end["scores"]["induction"][1]) > 0.5


@pytest.mark.slow
def test_a_preset_in_half_precision_on_several_threads_goes_on_bit_for_bit(tmp_path, monkeypatch):
    threads, folders = torch.get_num_threads(), [tmp_path / name for name in ("whole", "pieces")]
    more = {"train.steps": 12, "data.cache_dir": tmp_path / "cache", "eval.every": 0, "model.dropout": 0.1}
    more["log.wandb"] = "disabled"
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
