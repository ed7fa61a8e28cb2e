"""A prepared folder: the same tokens whatever its shards, and damage is named before it is trained on."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError
from data.documents import Documents
from data.store import Part, read_meta
from tests.data.corpus import contents
from tests.data.stored import config, write


def part(folder: Path, stream: list[int], shard: int = 10**6, vocab_size: int = 2**17) -> Part:
    """`stream` as the training part, its first token and its tenth ones the first of documents."""
    documents = [stream[i : i + 10] for i in range(0, len(stream), 10)]
    write(folder, {"train": documents, "val": documents}, vocab_size, None, shard)
    return Part(folder, "train", read_meta(folder))


def meta(folder: Path) -> dict:
    return json.loads((folder / "meta.json").read_text())


@given(data=st.data(), length=st.integers(1, 60), shard=st.integers(1, 70), span=st.integers(1, 30))
def test_rows_are_slices_of_the_stream_whatever_the_shards(data, length, shard, span):
    stream = [1000 + 7 * i for i in range(length)]
    starts = np.array(data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=9)))
    with tempfile.TemporaryDirectory() as folder:
        made = part(Path(folder), stream, shard)
        rows = made.rows(starts, span)
    assert len(made) == length
    assert rows.dtype == np.int64
    padded = stream + [stream[-1]] * span  # beyond the end the last token stands again
    assert rows.tolist() == [padded[start : start + span] for start in starts]


def test_documents_are_where_they_were_said_to_begin(tmp_path):
    assert part(tmp_path, list(range(35)), 8).documents.tolist() == [0, 10, 20, 30]


@pytest.mark.parametrize("last", [255, 256, 65_535, 65_536, 100_000])
def test_ids_come_back_as_they_were_also_above_65535(tmp_path, last):
    stream = [0, last, 1, last - 1]
    assert part(tmp_path, stream, 3, last + 1).rows(np.array([0]), 4).tolist() == [stream]


FILES = ["train-00000.bin", "train-00001.bin", "train-00002.bin", "train-documents.bin", "val-00001.bin"]
FILES += ["val-documents.bin"]
WHOLE_NUMBER = {"train-documents.bin": 8, "val-documents.bin": 8}


def cut_by_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_by_a_number(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: -WHOLE_NUMBER.get(path.name, 2)])


def lengthened(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(WHOLE_NUMBER.get(path.name, 2)))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def a_list(path: Path) -> None:
    path.write_text("[]")


def without_a_part(path: Path) -> None:
    path.write_text(json.dumps({key: value for key, value in meta(path.parent).items() if key != "val"}))


def wrong_fields(path: Path) -> None:
    path.write_text(json.dumps(meta(path.parent) | {"dtype": "float99", "train": 3}))


def no_dtype(path: Path) -> None:
    path.write_text(json.dumps(meta(path.parent) | {"dtype": "float99"}))


def bos_beyond(path: Path) -> None:
    path.write_text(json.dumps(meta(path.parent) | {"bos": 300}))


def without_fingerprint(path: Path) -> None:
    path.write_text(json.dumps({k: v for k, v in meta(path.parent).items() if k != "fingerprint"}))


def not_rising(path: Path) -> None:
    places = np.fromfile(path, np.int64)
    places[1] = places[2] + 3
    places.tofile(path)


def backwards(path: Path) -> None:
    np.fromfile(path, np.int64)[::-1].tofile(path)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(
            (name, damage)
            for name in FILES
            for damage in (Path.unlink, empty, cut_by_a_byte, cut_by_a_number)
        ),
        *((name, lengthened) for name in ("train-00002.bin", "train-documents.bin", "val-documents.bin")),
        # How many symbols there are stands nowhere else.
        *(("train-symbols.bin", damage) for damage in (Path.unlink, empty, cut_by_a_byte)),
        *(
            ("meta.json", damage)
            for damage in (Path.unlink, empty, cut_by_a_byte, a_list, without_a_part, wrong_fields, no_dtype)
        ),
        *(("meta.json", damage) for damage in (bos_beyond, without_fingerprint)),
        *(
            (f"{name}-documents.bin", damage)
            for name in ("train", "val")
            for damage in (not_rising, backwards)
        ),
    ],
)
def test_a_damaged_folder_is_refused_in_a_line_that_names_the_file_and_what_to_do(name, damage, tmp_path):
    part(tmp_path, list(range(100)), 40, 300)
    damage(tmp_path / name)
    before = contents(tmp_path)
    with pytest.raises(UserError) as caught:
        Documents(tmp_path, config(False), 17, 1)
    assert str(tmp_path / name) in str(caught.value)
    assert f"remove {tmp_path} and prepare again" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("shard", [40, 100])
def test_a_part_that_has_more_tokens_than_was_said_is_refused(shard, tmp_path):
    part(tmp_path, list(range(100)), shard, 300)
    lengthened(tmp_path / "val-00000.bin")
    with pytest.raises(UserError, match=rf"val-0000\d.bin is damaged .*remove {tmp_path} and prepare again"):
        Documents(tmp_path, config(False), 17, 1)


def test_an_id_beyond_the_vocabulary_never_leaves_the_store(tmp_path):
    made = part(tmp_path, [5, 6, 7, 300, 8, 9], 4, 300)
    assert made.rows(np.array([0, 4]), 2).tolist() == [[5, 6], [8, 9]]
    with pytest.raises(UserError, match=r"train-00000.bin is damaged \(id 300 in a vocabulary of 300\)") as e:
        made.rows(np.array([4, 2]), 2)
    assert f"remove {tmp_path} and prepare again" in str(e.value)


def test_a_symbol_beyond_the_vocabulary_is_refused(tmp_path):
    part(tmp_path, list(range(100)), 40, 300)
    np.array([3, 300]).tofile(tmp_path / "train-symbols.bin")
    with pytest.raises(UserError, match=r"train-symbols.bin is damaged"):
        Documents(tmp_path, config(False), 17, 1)
