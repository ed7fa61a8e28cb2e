"""A sweep trains what is missing, one after another, and goes on where it stopped."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import yaml

import train
from configs import UserError
from configs.cli import parse
from configs.files import held
from tests.runs.tiny import ROOT, SMALL, TEXT, before_update
from training import sweep
from training.folder import LOCK

SEEDS = [1, 2]


def write(configs: Path, name: str, **changes: object) -> None:
    """A tiny config; `optimizer__lr=1` changes optimizer.lr."""
    configs.mkdir(exist_ok=True)
    (configs / "text.txt").write_text(TEXT)
    places = {"data.path": str(configs / "text.txt"), "data.cache_dir": str(configs / "cache")}
    sections: dict[str, dict] = {}
    values = SMALL | places | {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in values.items():
        section, name_of_key = key.split(".")
        sections.setdefault(section, {})[name_of_key] = value
    (configs / f"{name}.yaml").write_text(yaml.safe_dump(sections))


@pytest.fixture
def configs(tmp_path, monkeypatch):
    for name, lr in (("slow", 0.001), ("fast", 0.01)):
        write(tmp_path / "configs", name, optimizer__lr=lr)
    monkeypatch.setattr(sweep, "CONFIGS", tmp_path / "configs")
    return tmp_path / "configs"


@pytest.fixture
def here(configs, monkeypatch):
    """Trainings in this process, in place of one each; the list has what was asked of each."""
    asked = []

    def run(command: list[str], told: Path) -> tuple[int, str]:
        asked.append(command[2:])
        with told.open("w") as file, redirect_stdout(file), redirect_stderr(file):
            code = train.main(parse(command[2:]))
        return code, told.read_text()

    monkeypatch.setattr(sweep, "_run", run)
    return asked


def place(folder: Path, name: str, seed: int) -> Path:
    return folder / "runs" / f"{name}-seed{seed}"


def test_all_are_trained_seed_after_seed_and_none_again(here, tmp_path, capsys):
    found = sweep.sweep(["slow", "fast"], SEEDS, tmp_path)
    told = capsys.readouterr().err
    assert all(f"{n}/4 trainings" in told for n in (0, 4))
    dirs = [Path(words[words.index("--run.dir") + 1]) for words in here]
    assert dirs == [place(tmp_path, name, seed) for seed in SEEDS for name in ("slow", "fast")]
    assert {name: [run["seed"] for run in runs] for name, runs in found.items()} == dict.fromkeys(
        found, SEEDS
    )
    assert found["slow"][0]["learned_early"] < found["fast"][0]["learned_early"]
    here.clear()
    assert sweep.sweep(["slow", "fast"], SEEDS, tmp_path) == found
    assert sweep.finished(["slow", "fast"], [1, 2, 3], tmp_path) == found
    assert (here, capsys.readouterr().err) == ([], "")


def test_the_numbers_are_those_of_the_last_step_and_of_the_best_head_or_all(here, tmp_path):
    (numbers,) = sweep.sweep(["fast"], [1], tmp_path)["fast"]
    run = place(tmp_path, "fast", 1)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert "group: derivation" in (run / "config.yaml").read_text()
    (evaluated,) = [r for r in records if (r["kind"], r["step"]) == ("eval", 20)]
    (probed,) = [r for r in records if (r["kind"], r["step"]) == ("attention", 20)]
    losses = {r["step"]: r["loss"] for r in records if r["kind"] == "train"}
    heads = {name: [*rows[0], *rows[1]] for name, rows in probed["scores"].items()}
    assert numbers == {
        "seed": 1,
        "loss": evaluated["loss"],
        "repeat_loss_2": probed["model"]["repeat_loss_2"],
        **{name: sorted(heads[name])[-1] for name in ("induction", "previous", "sink")},
        "current": pytest.approx(sum(heads["current"]) / 4),
        "entropy": pytest.approx(sum(heads["entropy_normalized"]) / 4),
        "learned_early": pytest.approx(losses[1] - sum(losses[step] for step in range(6, 11)) / 5),
    }


def test_one_that_was_interrupted_goes_on_and_ends_as_if_nothing_had_been(here, tmp_path, monkeypatch):
    whole = sweep.sweep(["fast"], [1], tmp_path / "whole")
    with monkeypatch.context() as patch:
        before_update(patch, 8, lambda run: os.kill(os.getpid(), signal.SIGINT))
        assert sweep.sweep(["fast"], [1], tmp_path / "half") == {}
    here.clear()
    assert sweep.sweep(["fast"], [1], tmp_path / "half") == whole
    assert here == [["--resume", str(place(tmp_path / "half", "fast", 1))]]


def test_what_was_trained_otherwise_is_no_result_and_is_trained_anew(here, configs, tmp_path):
    before = sweep.sweep(["fast"], [1], tmp_path)
    write(configs, "fast", optimizer__lr=0.02)
    assert sweep.finished(["fast"], [1], tmp_path) == {}
    after = sweep.sweep(["fast"], [1], tmp_path)
    assert after["fast"][0]["loss"] != before["fast"][0]["loss"]
    assert len(here) == 2
    # The run of another seed in its place is none of this one.
    shutil.move(place(tmp_path, "fast", 1), place(tmp_path, "fast", 2))
    assert sweep.finished(["fast"], SEEDS, tmp_path) == {}


def test_a_folder_that_was_moved_and_a_config_that_logs_otherwise_are_the_same_training(
    here, configs, tmp_path
):
    found = sweep.sweep(["fast"], [1], tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "b")
    write(configs, "fast", log__project="another")
    assert sweep.sweep(["fast"], [1], tmp_path / "b") == found
    assert len(here) == 1


def test_a_training_that_fails_is_told_of_and_the_others_go_on(here, configs, tmp_path, capsys):
    write(configs, "slow", optimizer__lr=1e38)
    found = sweep.sweep(["slow", "fast"], [1], tmp_path)
    assert [*found] == ["fast"]
    told = capsys.readouterr().err
    assert "warning: slow-seed1 failed: " in told
    assert "stopped: " in told


def test_a_request_that_is_wrong_ends_the_sweep_in_words(here, configs, tmp_path):
    (place(tmp_path, "fast", 1)).mkdir(parents=True)
    (place(tmp_path, "fast", 1) / "letter.txt").write_text("not a run")
    with pytest.raises(UserError, match=r"fast-seed1: .*is not empty and not a run"):
        sweep.sweep(["slow", "fast"], [1], tmp_path)
    assert (place(tmp_path, "fast", 1) / "letter.txt").exists()
    assert [*sweep.finished(["slow", "fast"], [1], tmp_path)] == ["slow"]


def test_a_folder_that_another_training_has_is_waited_for(here, tmp_path, monkeypatch):
    run, refused = sweep._run, []

    def one_that_is_refused(command: list[str], told: Path) -> tuple[int, str]:
        if refused:
            return run(command, told)
        place(tmp_path, "fast", 1).mkdir()
        with held(place(tmp_path, "fast", 1) / LOCK):
            refused.append(run(command, told))
        return refused[0]

    monkeypatch.setattr(sweep, "_run", one_that_is_refused)
    assert [*sweep.sweep(["fast"], [1], tmp_path)] == ["fast"]
    assert [code for code, _ in refused] == [2]


def test_what_another_process_writes_to_the_same_log_is_not_taken_for_what_this_training_said(tmp_path):
    told = tmp_path / "one.log"
    with told.open("w") as orphan:  # of a sweep that was killed: it goes on writing where it was
        print("step 1", file=orphan, flush=True)
        words = [sys.executable, "-c", "print('it is training in run.dir'); raise SystemExit(2)"]
        child = sweep._run(words, told)
        orphan.write("step 2\n" * 9)
    assert child == (2, "it is training in run.dir\n")
    assert told.read_text() == child[1]


SWEEP = """
import sys
from pathlib import Path
from scripts import exits
from training import sweep
sweep.CONFIGS = Path(sys.argv[1])
with exits():
    print(sweep.sweep(sys.argv[3:], [1], Path(sys.argv[2])))
"""


def begin(configs: Path, folder: Path, *names: str) -> subprocess.Popen:
    words = [sys.executable, "-c", SWEEP, str(configs), str(folder), *names]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    limit = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.slow
def test_a_sweep_that_was_killed_goes_on_without_repeating_what_is_finished(configs, tmp_path):
    killed = begin(configs, tmp_path, "slow", "fast")
    with killed:
        wait_for(place(tmp_path, "fast", 1) / "config.yaml", killed)
        killed.kill()
    records = place(tmp_path, "slow", 1) / "metrics.jsonl"
    before = (records.stat().st_mtime_ns, records.read_bytes())
    again = begin(configs, tmp_path, "slow", "fast")
    said, told = again.communicate(timeout=120)
    assert again.returncode == 0, told
    assert (records.stat().st_mtime_ns, records.read_bytes()) == before
    found = sweep.finished(["slow", "fast"], [1], tmp_path)
    assert [*found] == ["slow", "fast"]
    assert said == f"{found}\n"


@pytest.mark.slow
def test_ctrl_c_ends_the_training_too_after_it_has_saved_itself(configs, tmp_path):
    write(configs, "long", train__steps=10**6)
    process, run = begin(configs, tmp_path, "long"), place(tmp_path, "long", 1)
    with process:
        wait_for(run / "checkpoints" / "step-00000005", process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert "Traceback" not in process.stderr.read()
    with held(run / LOCK):  # nobody trains there any more
        told = run.with_suffix(".log").read_text()
    assert "interrupted; go on with --resume" in told
