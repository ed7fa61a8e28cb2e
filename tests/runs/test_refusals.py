"""Requests that are wrong: exit code 2, one line, nothing written."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train
from configs import UserError
from configs.cli import parse
from tests.runs.tiny import ROOT, TEXT, Killed, assert_same, contents, go_on, interrupted, request, start


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
    (run / "left_over.html").touch()
    start(tmp_path, run={"overwrite": "true"})
    assert_same(run, reference("adamw"))
    assert not (run / "left_over.html").exists()


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
        (TEXT, {"model": {"context_length": 500}}, "context_length 500 needs at least 501 tokens"),
        (TEXT, {"data": {"val_fraction": 0.01}}, "needs at least 18 tokens; the val part"),
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


@pytest.mark.parametrize(
    ("word", "told"), [("dna", "the data differ"), ("in", "the data differ"), ("und", "does not know: 'u'")]
)
def test_other_data_cannot_be_slipped_under_a_run(word, told, reference, tmp_path, capsys):
    """The run's own tokenizer reads them, whether they have all of its characters, fewer or others."""
    run = shutil.copytree(reference("adamw"), tmp_path / "run")
    (tmp_path / "other.txt").write_text(TEXT.replace("and", word))
    argv = ["--resume", str(run), "--data.path", str(tmp_path / "other.txt")]
    assert told in refused([*argv, "--data.cache_dir", str(tmp_path / "cache")], run, capsys)


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
