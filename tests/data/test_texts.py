"""Tokens on disk: complete or absent, never another text's, and only where a window fits."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError
from configs.schema import Data
from data.bpe import train_bpe
from data.tokenizers import CharTokenizer, make_tokenizer
from data.tokens import Tokens
from data.tokens import prepare as prepare_with

ROOT = Path(__file__).parents[2]

TEXT = "".join(f"{i} times {i} is {i * i}. " for i in range(100))


def config(folder: Path, **values) -> Data:
    return Data(**{"source": "text", "path": "the.txt", "cache_dir": str(folder / "cache"), **values})


def prepare(config: Data, text: str, T: int) -> Tokens:
    """With the tokenizer that `text` alone would have."""
    tokenizer = make_tokenizer(config, [text])
    return prepare_with(config, config.source, text, tokenizer, T)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def text_of(tokens: Tokens) -> str:
    return tokens.tokenizer.decode(np.concatenate([tokens.train, tokens.val]))


@pytest.fixture
def cached(tmp_path) -> Path:
    """The folder of prepared tokens."""
    prepare(config(tmp_path), TEXT, 17)
    (folder,) = (tmp_path / "cache").iterdir()
    return folder


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_both_parts_together_are_the_text_and_validation_is_its_end(tokenizer, bos, share, tmp_path):
    text = TEXT + "ünï" * 200 + TEXT[::-1]
    size = {"vocab_size": 270} if tokenizer == "bpe" else {}
    tokens = prepare(config(tmp_path, tokenizer=tokenizer, bos=bos, val_fraction=share, **size), text, 17)
    assert text_of(tokens) == text
    assert len(tokens.val) * tokens.bytes_per_token == pytest.approx(
        len(tokens.tokenizer.decode_bytes(tokens.val))
    )
    assert len(tokens.tokenizer.decode(tokens.val)) == pytest.approx(share * len(text), abs=1)


def test_ids_are_held_in_the_smallest_type_that_holds_the_vocabulary(tmp_path):
    """BOS counts: 255 characters and BOS fit in a byte, 256 and BOS do not."""
    for size, dtype in (
        (255, np.uint8),
        (256, np.uint16),
        (65_535, np.uint16),
        (65_536, np.uint32),
        (70_000, np.uint32),
    ):
        text = "".join(chr(0x10000 + i) for i in range(size))
        tokens = prepare(config(tmp_path, val_fraction=0.5), text, 17)
        assert tokens.train.dtype == tokens.val.dtype == dtype
        assert text_of(tokens) == text
        assert int(tokens.val.max()) == size - 1


def test_a_second_run_maps_what_the_first_has_written(tmp_path, cached):
    before = {path.name: path.stat().st_mtime_ns for path in cached.iterdir()}
    tokens = prepare(config(tmp_path), TEXT, 17)
    assert {path.name: path.stat().st_mtime_ns for path in cached.iterdir()} == before
    assert isinstance(tokens.train, np.memmap)
    assert text_of(tokens) == TEXT


@pytest.mark.parametrize(
    "change",
    [{"val_fraction": 0.2}, {"tokenizer": "byte"}, {"bos": False}, {"text": TEXT.replace("9", "8", 1)}],
)
def test_a_changed_text_or_setting_never_meets_the_old_tokens(change, tmp_path, cached):
    before = contents(cached)
    text = change.pop("text", TEXT)
    old, new = prepare(config(tmp_path), TEXT, 17), prepare(config(tmp_path, **change), text, 17)
    assert new.fingerprint != old.fingerprint
    assert text_of(new) == text
    assert contents(cached) == before


def test_another_tokenizer_for_the_same_text_never_meets_the_old_tokens(tmp_path, cached):
    """One tokenizer serves all texts of a run: what else it knows moves the ids."""
    wider = CharTokenizer("".join(sorted({*TEXT, "!"})), True)
    tokens = prepare_with(config(tmp_path), "text", TEXT, wider, 17)
    assert tokens.fingerprint != cached.name
    assert text_of(tokens) == TEXT
    assert tokens.tokenizer is wider


def test_an_encoding_trained_anew_for_the_same_text_never_meets_the_old_tokens(tmp_path):
    data = config(tmp_path, tokenizer="bpe", vocab_size=280)
    there = {
        prepare_with(data, "text", TEXT, tokenizer, 17).fingerprint
        for tokenizer in (
            train_bpe([TEXT], 280, bos=True),
            train_bpe([TEXT], 281, bos=True),
            train_bpe([TEXT], 280, bos=False),
            train_bpe([TEXT.upper()], 280, bos=True),
        )
    }
    assert len(there) == 4


@pytest.mark.parametrize("path", ["other.txt", "the.txt"])
def test_the_same_text_has_the_same_fingerprint_wherever_it_lies(path, tmp_path, cached):
    here = prepare(config(tmp_path), TEXT, 17)
    there = prepare(config(tmp_path / "elsewhere", path=path), TEXT, 17)
    assert here.fingerprint == there.fingerprint


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def beyond_the_vocabulary(path: Path) -> None:
    path.write_bytes(b"\xff" + path.read_bytes()[1:])


def another_token(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(bytes([(content[0] + 1) % 5]) + content[1:])


def a_list(path: Path) -> None:
    path.write_text("[]")


def wrong_fields(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "float99", "tokens": 3}))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(
            (name, damage)
            for name in ("train.bin", "val.bin", "meta.json")
            for damage in (Path.unlink, cut, empty)
        ),
        *(
            (name, damage)
            for name in ("train.bin", "val.bin")
            for damage in (lengthen, beyond_the_vocabulary)
        ),
        *((name, another_token) for name in ("train.bin", "val.bin")),
        *(("meta.json", damage) for damage in (a_list, wrong_fields)),
    ],
)
def test_damaged_tokens_are_written_anew(name, damage, tmp_path, cached):
    before = contents(cached)
    damage(cached / name)
    assert text_of(prepare(config(tmp_path), TEXT, 17)) == TEXT
    assert contents(cached) == before
    assert os.listdir(cached.parent) == [cached.name]


def test_a_disk_that_is_full_leaves_nothing_half_written(tmp_path, monkeypatch):
    def full(*arguments, **keywords):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(UserError, match="No space left on device") as caught:
            prepare(config(tmp_path), TEXT, 17)
    assert str(tmp_path / "cache") in str(caught.value)
    assert contents(tmp_path) == {}
    assert text_of(prepare(config(tmp_path), TEXT, 17)) == TEXT


def test_what_a_kill_has_left_is_neither_used_nor_in_the_way(tmp_path, monkeypatch):
    """Also where the next process has the number of the killed one, as in containers."""

    def kill(*arguments, **keywords):
        raise KeyboardInterrupt  # nothing tidies up after it, as after SIGKILL

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", kill)
        patch.setattr("data.tokens.shutil.rmtree", lambda *arguments, **keywords: None)
        with pytest.raises(KeyboardInterrupt):
            prepare(config(tmp_path), TEXT, 17)
    assert contents(tmp_path)
    tokens = prepare(config(tmp_path), TEXT, 17)
    assert text_of(tokens) == TEXT


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"data\.cache_dir") as caught:
        prepare(config(tmp_path), TEXT, 17)
    assert "\n" not in str(caught.value)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(17, 30), st.booleans())
def test_each_part_must_hold_a_window_or_both_sizes_are_told(train, val, T, bos):
    """A window is T inputs and T targets; BOS is the first input, so one token less comes from the text."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = config(folder, bos=bos, val_fraction=(val - 0.5) / (train + val))
        need = T if bos else T + 1
        if min(train, val) >= need:
            tokens = prepare(data, "a" * (train + val), T)
            assert (len(tokens.train), len(tokens.val)) == (train, val)
            return
        with pytest.raises(UserError) as caught:
            prepare(data, "a" * (train + val), T)
        message = str(caught.value)
        short = {"train": train, "val": val}
        assert any(
            f"{part} part" in message and f"has {have}" in message
            for part, have in short.items()
            if have < need
        )
        assert f"context_length {T} needs at least {need} tokens" in message
        assert "the.txt" in message
        assert "\n" not in message
        assert list(folder.iterdir()) == []


def test_a_longer_context_is_checked_against_tokens_that_are_there_already(tmp_path, cached):
    with pytest.raises(UserError, match="needs at least 5000 tokens"):
        prepare(config(tmp_path), TEXT, 5000)
    shutil.rmtree(cached)
    with pytest.raises(UserError, match="needs at least 5000 tokens"):
        prepare(config(tmp_path), TEXT, 5000)
    assert list((tmp_path / "cache").iterdir()) == []


PREPARE = """
import sys
from configs.schema import Data
from tests.data.test_tokens import prepare
text = open(sys.argv[1]).read()
for round in range(25):
    config = Data(source="text", path=sys.argv[1], cache_dir=f"{sys.argv[2]}/{round}")
    assert prepare(config, text, 17).train.size > 17
"""


def test_processes_that_prepare_the_same_text_at_once_all_succeed(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    command = [sys.executable, "-c", PREPARE, str(tmp_path / "text.txt"), str(tmp_path / "cache")]
    together = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[1] for process in together] == [""] * 3
    assert list(tmp_path.glob("cache/*/tmp-*")) == []
