"""`--dry_run` from the command line: exit code 0, nothing written, nothing of a run begun."""

import subprocess
import sys

import pytest

import train
from configs.cli import parse
from tests.runs.tiny import ROOT, TEXT, contents, request, start, words


def dry(argv: list[str], capsys) -> str:
    capsys.readouterr()
    assert train.main(parse([*argv, "--dry_run"])) == 0
    return capsys.readouterr().out


def test_nothing_is_written_and_the_parameters_are_those_of_the_run(tmp_path, capsys):
    argv = request(tmp_path)
    before = contents(tmp_path)
    foreseen = dry(argv, capsys)
    assert contents(tmp_path) == before
    assert train.main(parse(argv)) == 0
    told = capsys.readouterr().out
    (model,) = [line for line in told.splitlines() if "parameters" in line]
    assert model in foreseen.splitlines()
    (vocabulary,) = [line.split("; ")[-1] for line in told.splitlines() if "vocabulary" in line]
    assert vocabulary in foreseen


def test_a_run_in_the_folder_is_no_hindrance_and_stays_as_it_is(tmp_path, capsys):
    run = start(tmp_path)
    before = contents(tmp_path)
    dry(request(tmp_path), capsys)
    assert "20 steps" in dry(["--resume", str(run)], capsys)
    assert contents(tmp_path) == before


def test_a_run_that_begins_from_another_has_its_vocabulary(tmp_path, capsys):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    old = start(tmp_path / "old", train={"steps": 1})
    argv = request(tmp_path / "new", model={"init_from": old})
    (tmp_path / "new" / "text.txt").write_text("ab" * 999)
    assert f"vocabulary {len({*TEXT}) + 1}" in dry(argv, capsys)
    assert train.main(parse([*argv, "--model.n_layer", "3", "--dry_run"])) == 2


def test_a_data_set_of_the_hub_is_not_asked_for(tmp_path, capsys):
    keys = {
        "data.source": "hf",
        "data.name": "nobody/nothing",
        "data.tokenizer": "byte",
        "run.device": "cuda",
    }
    assert "vocabulary 257" in dry(words({**keys, "run.dir": tmp_path / "run"}), capsys)


HUGE = ["--model.backend=naive", f"--model.context_length={2**20}", "--train.batch_size", str(2**20)]


@pytest.mark.parametrize("more", [[], ["--data.path", "none.txt"], HUGE], ids=["right", "wrong", "huge"])
def test_from_the_shell_it_ends_with_code_0_or_one_line_about_what_is_wrong(more, tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), *request(tmp_path), *more, "--dry_run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == (2 if more else 0)
    assert done.stderr.count("\n") == bool(more), done.stderr
    assert ("memory" in done.stdout) == (not more)
