"""`python -m scripts.prepare`: the options of train.py, a folder with tokens, and nothing of torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import exits, prepare
from tests.data.corpus import contents, jsonl, read, texts

ROOT = Path(__file__).parents[2]


def words(folder: Path, **values) -> list[str]:
    given = {
        "source": "hf",
        "tokenizer": "byte",
        "cache_dir": folder / "cache",
        "val_fraction": 0.2,
        **values,
    }
    return [word for key, value in given.items() for word in (f"--data.{key}", str(value))]


def refused(argv: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as caught, exits():
        prepare.main(argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_it_prints_the_folder_and_what_is_in_it_and_imports_no_torch(tmp_path):
    rows = texts(100)
    (tmp_path / "corpus").mkdir()
    path = jsonl(tmp_path / "corpus" / "a.jsonl", [*rows, ""])
    code = (
        "import sys; from scripts.prepare import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    known = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *words(tmp_path, path=path)]
    done = subprocess.run(
        command, cwd=ROOT, env=known, capture_output=True, text=True, timeout=100, check=True
    )
    folder, train, val, rest = done.stdout.splitlines()
    parts = read(Path(folder))
    assert sorted([*parts["train"], *parts["val"]]) == sorted(rows)
    for line, part in ((train, "train"), (val, "val")):
        size = sum(len(text) for text in parts[part])
        tokens = size + len(parts[part])
        assert line.split() == [
            part,
            f"{len(parts[part])}",
            "documents",
            f"{tokens:,}",
            "tokens,",
            *line.split()[5:],
        ]
        assert f"{size / tokens:.2f} bytes a token" in line
    assert rest.strip() == "vocabulary 257; skipped 1 empty"
    assert {path.name for path in tmp_path.iterdir()} == {"corpus", "cache", "home"}
    assert list(contents(tmp_path / "corpus")) == ["a.jsonl"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--data.source", "shakespeare"], "data.source shakespeare needs no preparation; hf does"),
        (["--data.source", "hf", "--data.tokenizer", "byte"], "needs data.name"),
        (["--data.source", "hf", "--data.path", "x.txt"], "no tokenizer char"),
        (["--data.sauce", "hf"], "nearest: data.source"),
    ],
)
def test_wrong_requests_are_one_line(argv, said, capsys):
    assert said in refused(argv, capsys)


def test_a_run_is_not_resumed_here(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("data:\n  source: hf\n  path: x.jsonl\n  tokenizer: byte\n")
    assert "--resume, --dry_run" in refused(["--resume", str(tmp_path)], capsys)


@pytest.mark.parametrize("more", [["--dry_run"], ["--model.init_from", "runs/x"]])
def test_what_is_of_runs_alone_is_refused_rather_than_ignored(more, tmp_path, capsys):
    path = jsonl(tmp_path / "a.jsonl", texts(9))
    assert "are of train.py" in refused([*words(tmp_path, path=path), *more], capsys)
    assert not (tmp_path / "cache").exists()


def test_documents_that_cannot_be_read_are_one_line(tmp_path, capsys):
    assert "matches no file" in refused(words(tmp_path, path=tmp_path / "none.jsonl"), capsys)
