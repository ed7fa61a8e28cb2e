"""Tokens of large corpora: complete or absent; a document stays on its side."""

import hashlib
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from configs import UserError
from data import hub, preparation, writer
from data.tokenizers import load_tokenizer, make_tokenizer
from tests.data.corpus import ODD, asked, contents, data_set, jsonl, parquet, prepared, read, texts
from tests.data.gpt2_files import gpt2_cache

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("small")


def is_val(text: str, share: float) -> bool:
    """As docs/data.md says it."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) < share * 16**12


# What is prepared


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("tokenizer", ["byte", "gpt2", "bpe"])
def test_the_documents_come_back_from_the_files_each_on_its_side(tokenizer, bos, tmp_path, monkeypatch):
    gpt2_cache(tmp_path / "tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    rows = [*texts(200), *ODD]
    size = {"vocab_size": 300} if tokenizer == "bpe" else {}
    path = jsonl(tmp_path / "a.jsonl", rows)
    data = asked(tmp_path, path=str(path), tokenizer=tokenizer, bos=bos, val_fraction=0.2, **size)
    folder = prepared(data)
    parts = read(folder)
    assert parts["train"] == [row for row in rows if not is_val(row, 0.2)]
    assert parts["val"] == [row for row in rows if is_val(row, 0.2)]
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["vocab_size"] == load_tokenizer(folder / "tokenizer.json").vocab_size
    for part, documents in parts.items():
        shards = sorted(folder.glob(f"{part}-[0-9]*.bin"))
        sizes = [path.stat().st_size // np.dtype(meta["dtype"]).itemsize for path in shards]
        assert sizes[:-1] == [1000] * (len(sizes) - 1)
        assert 0 < sizes[-1] <= 1000
        assert meta[part]["bytes"] == sum(len(document.encode()) for document in documents)
        assert meta[part]["sha256"] == [hashlib.sha256(path.read_bytes()).hexdigest() for path in shards]
        ids = {int(i) for path in shards for i in np.fromfile(path, meta["dtype"])}
        assert np.fromfile(folder / f"{part}-symbols.bin", np.int64).tolist() == sorted(ids - {meta["bos"]})
    assert len(shards) > 0
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [folder.name]


@pytest.mark.parametrize("holder", ["shuffled", "parquet", "folder", "texts"])
def test_a_document_is_on_the_same_side_in_whatever_order_and_holder_it_comes(holder, tmp_path):
    rows = texts(150)
    path = jsonl(tmp_path / "a.jsonl", rows)
    here = read(prepared(asked(tmp_path, path=str(path), val_fraction=0.3)))
    mixed = random.Random(1).sample(rows, len(rows))
    if holder == "texts":
        (tmp_path / "texts").mkdir()
        for i, row in enumerate(mixed):
            (tmp_path / "texts" / f"{i}.txt").write_bytes(row.encode())
        values = {"path": str(tmp_path / "texts" / "*")}
    elif holder == "folder":
        values = {"name": str(data_set(tmp_path / "set", one=mixed)), "subset": "one"}
    else:
        written = (
            parquet(tmp_path / "b.parquet", mixed)
            if holder == "parquet"
            else jsonl(tmp_path / "b.jsonl", mixed)
        )
        values = {"path": str(written)}
    there = read(prepared(asked(tmp_path, val_fraction=0.3, **values)))
    assert {part: set(documents) for part, documents in here.items()} == {
        part: set(documents) for part, documents in there.items()
    }
    assert here != there


@pytest.mark.parametrize("take", [20, 60, 149])
def test_the_first_documents_are_on_the_side_that_they_are_on_among_all(take, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", texts(150))
    whole = read(prepared(asked(tmp_path, path=str(path), val_fraction=0.3)))
    some = read(prepared(asked(tmp_path, path=str(path), val_fraction=0.3, take=take)))
    assert sum(map(len, some.values())) == take
    for part, documents in some.items():
        assert documents == whole[part][: len(documents)]


def test_equal_documents_are_on_one_side(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", texts(50) * 3)
    parts = read(prepared(asked(tmp_path, path=str(path), val_fraction=0.5)))
    assert not {*parts["train"]} & {*parts["val"]}
    assert min(map(len, parts.values())) > 30


def test_long_documents_are_one_document_on_one_side(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "PIECE", 30)
    rows = [" ".join(texts(20, seed)) for seed in range(12)]
    path = jsonl(tmp_path / "a.jsonl", rows)
    parts = read(prepared(asked(tmp_path, path=str(path), val_fraction=0.5)))
    assert parts["val"] == [row for row in rows if is_val(row[:30], 0.5)]
    assert parts["train"] == [row for row in rows if not is_val(row[:30], 0.5)]


def test_what_was_skipped_is_in_the_record(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [*texts(99), "", None, ""])
    folder = prepared(asked(tmp_path, path=str(path), val_fraction=0.5))
    assert json.loads((folder / "meta.json").read_text())["skipped"] == {"empty": 2, "null": 1}


# Found again, or not


def test_what_is_there_is_not_prepared_again(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", texts(99))
    data = asked(tmp_path, path=str(path), val_fraction=0.2)
    folder = prepared(data)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prepared(data) == folder
    assert prepared(data, make_tokenizer(data, [])) == folder
    assert prepared(data.model_copy(update={"streaming": False})) == folder
    path.rename(tmp_path / "cache" / "a.jsonl")
    assert prepared(data.model_copy(update={"path": str(tmp_path / "cache" / "a.*")})) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_data_set_is_found_again_where_its_folder_was_moved(tmp_path):
    here = data_set(tmp_path / "here", one=texts(99))
    folder = prepared(asked(tmp_path, name=str(here), subset="one", val_fraction=0.2))
    there = here.rename(tmp_path / "there")
    assert prepared(asked(tmp_path, name=str(there), subset="one", val_fraction=0.2)) == folder


def test_a_folder_is_read_where_nothing_can_be_written_and_without_what_it_was_made_of(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", texts(99))
    data = asked(tmp_path, path=str(path), val_fraction=0.2)
    folder = prepared(data)
    monkeypatch.setattr(preparation, "FileLock", None)
    assert prepared(data) == folder
    moved = folder.rename(tmp_path / "moved")
    path.unlink()
    assert prepared(asked(tmp_path, path=str(moved))) == moved


def test_files_of_one_name_size_and_time_with_other_content_are_other_files(tmp_path):
    """As archives unpack them."""
    rows, paths = texts(99), []
    for name in "ab":
        (tmp_path / name).mkdir()
        own = [row[::-1] for row in rows] if name == "b" else rows
        paths.append(jsonl(tmp_path / name / "a.jsonl", own))
    for path in paths:
        os.utime(path, (1e9, 1e9))
    assert paths[0].stat().st_size == paths[1].stat().st_size
    here, there = (prepared(asked(tmp_path, path=str(path), val_fraction=0.3)) for path in paths)
    assert here != there


@pytest.mark.parametrize("content", ["", "[]", "{}", None])
def test_what_a_preparation_left_and_something_else_damaged_is_named(content, tmp_path, monkeypatch):
    data = asked(tmp_path, path=str(jsonl(tmp_path / "a.jsonl", texts(99))), val_fraction=0.2)

    def kill(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer.Writer, "finish", kill)
        with pytest.raises(KeyboardInterrupt):
            prepared(data)
    (temporary,) = (tmp_path / "cache").glob("tmp-*")
    if content is None:
        os.truncate(temporary / "train-00000.bin", 1)
    else:
        (temporary / "progress.json").write_text(content)
    with pytest.raises(UserError, match=rf"progress.json is damaged .*remove {temporary} and prepare again"):
        prepared(data)


def test_a_changed_request_or_file_never_meets_the_old_tokens(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", texts(99))
    changes = [
        {},
        {"bos": False},
        {"val_fraction": 0.3},
        {"take": 98},
        {"tokenizer": "bpe", "vocab_size": 290},
    ]
    folders = [
        prepared(asked(tmp_path, path=str(path), **{"val_fraction": 0.2, **change})) for change in changes
    ]
    path.write_text(path.read_text().replace("7", "8"))
    os.utime(path, ns=(0, 1))
    folders.append(prepared(asked(tmp_path, path=str(path), val_fraction=0.2)))
    fingerprints = [json.loads((folder / "meta.json").read_text())["fingerprint"] for folder in folders]
    assert len({*folders}) == len({*fingerprints}) == 6


def test_the_fingerprint_is_of_the_content_alone(tmp_path):
    rows = texts(99)
    paths = [jsonl(tmp_path / "a.jsonl", rows), parquet(tmp_path / "b.parquet", rows)]
    folders = [prepared(asked(tmp_path, path=str(path), val_fraction=0.2)) for path in paths]
    assert folders[0] != folders[1]
    first, second = (json.loads((folder / "meta.json").read_text()) for folder in folders)
    assert first.pop("request") != second.pop("request")
    assert first == second


def test_a_tokenizer_trained_on_these_documents_finds_their_folder_and_another_makes_its_own(tmp_path):
    path, other = jsonl(tmp_path / "a.jsonl", texts(99)), jsonl(tmp_path / "b.jsonl", texts(99, 5))
    bpe = {"tokenizer": "bpe", "vocab_size": 280, "val_fraction": 0.2}
    mine = prepared(asked(tmp_path, path=str(path), **bpe))
    theirs = prepared(asked(tmp_path, path=str(other), **bpe))
    assert prepared(asked(tmp_path, path=str(path), **bpe), load_tokenizer(mine / "tokenizer.json")) == mine
    given = prepared(asked(tmp_path, path=str(path), **bpe), load_tokenizer(theirs / "tokenizer.json"))
    assert given != mine
    assert (given / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()
    assert read(given) == read(mine)


def test_bpe_is_trained_on_the_training_documents_at_the_beginning(tmp_path, monkeypatch):
    """The one merge is of the commonest pair there, though others are commoner in validation and later on."""
    held_back = [row for row in (f"{i}" + "qx" * 90 for i in range(99)) if is_val(row, 0.3)]
    trained = [row for row in (f"{i}" + "ab" * 30 for i in range(99)) if not is_val(row, 0.3)]
    rows = [row for pair in zip(trained[:9], held_back, strict=False) for row in pair]
    path = jsonl(tmp_path / "a.jsonl", [*rows, *("yz" * 5000 + f"{i}" for i in range(9))])
    monkeypatch.setattr(preparation, "BPE_TEXT", sum(map(len, rows)))
    one_merge = {"tokenizer": "bpe", "vocab_size": 258}
    folder = prepared(asked(tmp_path, path=str(path), val_fraction=0.3, **one_merge))
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    assert [len(tokenizer.encode(pair)) for pair in ("ab", "qx", "yz")] == [1, 2, 2]


# Faults


def test_a_full_disk_is_told_in_a_line_and_loses_nothing(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", texts(99))
    data = asked(tmp_path, path=str(path), val_fraction=0.2)
    append, seen = writer.Writer._append, []

    def full(self, name, numbers):
        if len(seen) == 40:
            with (self.folder / name).open("ab") as file:
                file.write(b"half")
            raise OSError(28, "No space left on device")
        seen.append(name)
        append(self, name, numbers)

    with monkeypatch.context() as patch:
        patch.setattr(writer.Writer, "_append", full)
        with pytest.raises(UserError, match=r"No space left on device; .*goes on") as caught:
            prepared(data)
    assert str(tmp_path / "cache") in str(caught.value)
    assert "\n" not in str(caught.value)
    (temporary,) = (tmp_path / "cache").glob("tmp-*")
    assert json.loads((temporary / "progress.json").read_text())["parts"]["train"]["documents"] > 5
    assert contents(prepared(data)) == contents(
        prepared(asked(tmp_path / "other", path=str(path), val_fraction=0.2))
    )


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", texts(9))
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"data\.cache_dir"):
        prepared(asked(tmp_path, path=str(path)))


@pytest.mark.parametrize(
    ("rows", "share", "said"),
    [
        (5, 0.0001, "val part of {path} has 0 in 0 documents, of 5 in all: .*or change data.val_fraction"),
        (5, 0.9999, "train part of {path} has 0 in 0 documents, of 5 in all: .*give more text"),
        (
            1,
            0.0001,
            "val part of {path} has 0 in 0 documents, of 1 in all: .*source text splits a single one",
        ),
        (0, 0.01, "train part of {path} has 0 in 0 documents, of 0 in all"),
    ],
)
@pytest.mark.parametrize("source", ["hf", "repeats"])
def test_a_part_without_documents_is_told_with_the_numbers_and_leaves_nothing(
    source, rows, share, said, tmp_path
):
    """Also where the documents come in a later stage."""
    path = jsonl(tmp_path / "a.jsonl", [*texts(rows), None])
    later = {"source": source, "stages": [{"until": 9, "weights": {source: 1}}, {"weights": {"hf": 1}}]}
    with pytest.raises(UserError, match=said.format(path=path)) as caught:
        prepared(asked(tmp_path, path=str(path), val_fraction=share, **later))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_documents_too_short_for_a_window_leave_nothing_though_much_was_saved(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", texts(99))
    with pytest.raises(UserError, match=r"context_length 9999 needs at least 10000 tokens; .* has [\d,]+ in"):
        preparation.prepared(asked(tmp_path, path=str(path), val_fraction=0.1), 9999)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("values", [{"text_column": "content"}, {"tokenizer": "bpe", "vocab_size": 5000}])
def test_a_wrong_request_leaves_nothing(values, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", texts(9))
    with pytest.raises(UserError):
        prepared(asked(tmp_path, **{"path": str(path), **values}))
    assert contents(tmp_path / "cache") == {}


def test_a_file_that_breaks_half_way_keeps_what_was_read(tmp_path):
    """Once it is mended it is another file, which is read anew."""
    paths = [jsonl(tmp_path / f"{i}.jsonl", texts(60, i)) for i in range(2)]
    paths[1].write_bytes(paths[1].read_bytes() + b"broken\n")
    with pytest.raises(UserError, match=r"1\.jsonl: line 61"):
        prepared(asked(tmp_path, path=str(tmp_path / "*.jsonl")))
    paths[1].write_bytes(paths[1].read_bytes().removesuffix(b"broken\n"))
    parts = read(prepared(asked(tmp_path, path=str(tmp_path / "*.jsonl"))))
    assert sum(map(len, parts.values())) == 120
