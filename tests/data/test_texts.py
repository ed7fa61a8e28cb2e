"""Tokens of whole texts: all of the text, never another one's, and only where each part holds a window."""

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
from data.documents import Documents
from data.preparation import prepared_text
from data.tokenizers import CharTokenizer, make_tokenizer
from tests.data.corpus import asked, contents, read

ROOT = Path(__file__).parents[2]
TEXT = "".join(f"{i} times {i} is {i * i}. " for i in range(100))


def config(folder: Path, **values) -> Data:
    return asked(folder, **{"source": "text", "path": "the.txt", "tokenizer": "char", **values})


def prepare(config: Data, text: str, T: int = 17) -> Path:
    """With the tokenizer that `text` alone would have."""
    return prepared_text(config, T, text, make_tokenizer(config, [text]))


def meta(folder: Path) -> dict:
    return json.loads((folder / "meta.json").read_text())


def text_of(folder: Path) -> str:
    parts = read(folder)
    assert {part: len(documents) for part, documents in parts.items()} == {"train": 1, "val": 1}
    return parts["train"][0] + parts["val"][0]


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_both_parts_together_are_the_text_and_validation_is_its_end(tokenizer, bos, share, tmp_path):
    text = TEXT + "ünï" * 200 + TEXT[::-1]
    size = {"vocab_size": 270} if tokenizer == "bpe" else {}
    data = config(tmp_path, tokenizer=tokenizer, bos=bos, val_fraction=share, **size)
    folder = prepare(data, text)
    assert text_of(folder) == text
    (held_back,) = read(folder)["val"]
    assert len(held_back) == pytest.approx(share * len(text), abs=1)
    made = Documents(folder, data, 17, 1)
    targets = sum(int((batch.targets_BT >= 0).sum()) for batch in made.validation(9))
    assert targets * made.bytes_per_token == pytest.approx(len(held_back.encode()))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(255, "uint8"), (256, "uint16"), (65_535, "uint16"), (65_536, "uint32"), (70_000, "uint32")],
)
def test_ids_are_held_in_the_smallest_type_that_holds_the_vocabulary(size, dtype, tmp_path):
    """BOS counts: 255 characters and BOS fit in a byte, 256 and BOS do not."""
    text = "".join(chr(0x10000 + i) for i in range(size))
    folder = prepare(config(tmp_path, val_fraction=0.5), text)
    assert meta(folder)["dtype"] == dtype
    assert np.fromfile(folder / "val-00000.bin", dtype)[-1] == size - 1
    assert text_of(folder) == text


def test_a_second_run_takes_what_the_first_has_written(tmp_path):
    folder = prepare(config(tmp_path), TEXT)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prepare(config(tmp_path), TEXT) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    "change",
    [{"val_fraction": 0.2}, {"tokenizer": "byte"}, {"bos": False}, {"text": TEXT.replace("9", "8", 1)}],
)
def test_a_changed_text_or_setting_never_meets_the_old_tokens(change, tmp_path):
    old = prepare(config(tmp_path), TEXT)
    before = contents(old)
    settings = {key: value for key, value in change.items() if key != "text"}
    new = prepare(config(tmp_path, **settings), change.get("text", TEXT))
    assert new != old
    assert meta(new)["fingerprint"] != meta(old)["fingerprint"]
    assert text_of(new) == change.get("text", TEXT)
    assert contents(old) == before


def test_another_tokenizer_for_the_same_text_never_meets_the_old_tokens(tmp_path):
    """One tokenizer serves all texts of a run: what else it knows moves the ids."""
    old = prepare(config(tmp_path), TEXT)
    wider = CharTokenizer("".join(sorted({*TEXT, "!"})), True)
    new = prepared_text(config(tmp_path), 17, TEXT, wider)
    assert new != old
    assert meta(new)["fingerprint"] != meta(old)["fingerprint"]
    assert text_of(new) == TEXT
    assert json.loads((new / "tokenizer.json").read_text()) == wider.to_json()


def test_an_encoding_trained_anew_for_the_same_text_never_meets_the_old_tokens(tmp_path):
    data = config(tmp_path, tokenizer="bpe", vocab_size=280)
    there = [
        prepared_text(data, 17, TEXT, tokenizer)
        for tokenizer in (
            train_bpe([TEXT], 280, bos=True),
            train_bpe([TEXT], 281, bos=True),
            train_bpe([TEXT], 280, bos=False),
            train_bpe([TEXT.upper()], 280, bos=True),
        )
    ]
    assert len({*there}) == len({meta(folder)["fingerprint"] for folder in there}) == 4


@pytest.mark.parametrize("path", ["other.txt", "the.txt"])
def test_the_same_text_has_the_same_tokens_and_fingerprint_wherever_it_lies(path, tmp_path):
    here = prepare(config(tmp_path), TEXT)
    there = prepare(config(tmp_path / "elsewhere", path=path), TEXT)
    assert here.name == there.name
    assert contents(here) == contents(there)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(17, 30), st.booleans())
def test_each_part_must_hold_a_window_or_both_sizes_are_told(train, val, T, bos):
    """A window is T inputs and T targets: T + 1 tokens, of which BOS is the first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        share = (val - 0.5) / (train + val) if val else 1e-18
        data, text = config(folder, bos=bos, val_fraction=share), "a" * (train + val)
        sizes = {"train": train + bos, "val": val + bos}
        if min(sizes.values()) > T:
            made = Documents(prepare(data, text, T), data, T, 1)
            assert {"train": len(made.train), "val": len(made.val)} == sizes
            return
        with pytest.raises(UserError) as caught:
            prepare(data, text, T)
        message = str(caught.value)
        assert f"context_length {T} needs at least {T + 1} tokens" in message
        assert any(
            f"the {part} part of the.txt has {have}: " in message for part, have in sizes.items() if have <= T
        )
        assert "\n" not in message
        assert not (folder / "cache").exists()


def test_a_longer_context_is_refused_whether_or_not_the_tokens_are_there_already(tmp_path):
    data = config(tmp_path)
    folder = prepare(data, TEXT)
    with pytest.raises(UserError, match="needs at least 5001 tokens"):
        Documents(prepare(data, TEXT, 5000), data, 5000, 1)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="needs at least 5001 tokens"):
        prepare(data, TEXT, 5000)
    assert os.listdir(tmp_path / "cache") == []


PREPARE = """
import sys
from pathlib import Path
from tests.data.test_texts import TEXT, config, prepare
for number in range(25):
    prepare(config(Path(sys.argv[1]) / str(number)), TEXT)
"""


def test_processes_that_prepare_the_same_text_at_once_all_succeed(tmp_path):
    """Short texts, so that one ends while another begins."""
    command = [sys.executable, "-c", PREPARE, str(tmp_path)]
    together = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [line for process in together for line in process.communicate()[1].splitlines()]
    assert [line for line in said if not line.startswith("waiting for the process")] == []
    assert [process.returncode for process in together] == [0] * 3
    for number in range(25):
        (folder,) = (tmp_path / str(number) / "cache").iterdir()
        assert text_of(folder) == TEXT
