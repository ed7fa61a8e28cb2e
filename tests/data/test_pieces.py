"""Long documents come in pieces that tokenize as the whole, and a reader goes on behind any of them."""

import json
from itertools import islice
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from data import bpe, hub
from data.hub import CUT, Corpus
from tests.data.corpus import ODD, asked, data_set, jsonl, parquet, texts
from tests.data.gpt2_files import gpt2_cache

pytestmark = pytest.mark.usefixtures("home")

GPT4 = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
    r"\s+(?!\S)|\s"
)
GPT4O = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


@pytest.fixture(scope="module")
def encodings(tmp_path_factory):
    """GPT-2's tokens under the patterns of GPT-2, GPT-4, GPT-4o and of what is trained here."""
    folder = tmp_path_factory.mktemp("tiktoken")
    gpt2_cache(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        gpt2 = tiktoken.get_encoding("gpt2")
    ranks = gpt2._mergeable_ranks
    patterns = [gpt2._pat_str, GPT4, GPT4O, bpe.PATTERN]
    return [
        tiktoken.Encoding(f"{i}", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        for i, pattern in enumerate(patterns)
    ]


@given(st.text(st.sampled_from("ab1_.'/ \n\r\t\x1c\xa0éA中"), max_size=30), st.text(max_size=9))
def test_the_parts_of_a_cut_text_tokenize_as_the_whole(encodings, text, more):
    for found in CUT.finditer(text + more):
        first, second = (text + more)[: found.start()], (text + more)[found.start() :]
        for encoding in encodings:
            whole = encoding.encode_ordinary(text + more)
            assert encoding.encode_ordinary(first) + encoding.encode_ordinary(second) == whole


@pytest.mark.parametrize("text", ["x" * 99, "a b " * 99, "a\n" * 99, "a\r\n" * 99, "é中 " * 50, " " * 99])
def test_long_documents_come_in_pieces_of_bounded_length(text, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "PIECE", 10)
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_bytes(b"short")
    pieces = [piece for piece, _ in Corpus(asked(tmp_path, path=str(tmp_path / "*.txt"), val_fraction=0.5))]
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 2) + [True]
    assert "".join(piece.text for piece in pieces) == text + "short"
    assert all(10 <= len(piece.text) < 20 for piece in pieces[:-2])
    assert len({piece.part for piece in pieces[:-1]}) == 1


def test_pieces_end_where_tokens_do_if_they_can(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "PIECE", 10)
    text = "".join(texts(9))
    (tmp_path / "a.txt").write_text(text)
    pieces = [piece.text for piece, _ in Corpus(asked(tmp_path, path=str(tmp_path / "a.txt")))]
    ends = {len("".join(pieces[:i])) for i in range(1, len(pieces))}
    assert ends <= {found.start() for found in CUT.finditer(text)}


def test_a_long_row_is_cut_in_time_that_grows_with_its_length(tmp_path, monkeypatch):
    """Each piece looks for its end in itself: 4,000 of them in one row would take minutes otherwise."""
    monkeypatch.setattr(hub, "PIECE", 500)
    row = "x" * 2_000_000
    pieces = [
        piece.text for piece, _ in Corpus(asked(tmp_path, path=str(jsonl(tmp_path / "a.jsonl", [row]))))
    ]
    assert "".join(pieces) == row
    assert len(pieces) > 3000


# Going on

WAYS = ["jsonl", "jsonl take", "parquet", "folder", "text", "lines", "parquet lines", "one long text"]


def corpus(way: str, folder: Path) -> dict:
    rows = [*texts(12), "", *ODD, *texts(12, 1)]
    if way in ("text", "one long text"):
        for i, row in enumerate(rows if way == "text" else ["".join(rows) * 3]):
            (folder / f"{i:02}.txt").write_bytes(row.encode())
        return {"path": str(folder / "*.txt")}
    if way == "lines":
        (folder / "a.txt").write_text("".join(texts(20)))
        return {"path": str(folder / "a.txt"), "new_document": "^1"}
    if way == "folder":
        return {"name": str(data_set(folder / "set", one=["no"], two=rows)), "subset": "two"}
    for i, part in enumerate((rows[:9], rows[9:10], rows[10:])):
        parquet(folder / f"{i}.parquet", part, 4) if "parquet" in way else jsonl(folder / f"{i}.jsonl", part)
    values = {"path": str(folder / ("*.parquet" if "parquet" in way else "*.jsonl"))}
    values |= {"new_document": "^1"} if "lines" in way else {}
    return values | ({"take": 20} if "take" in way else {})


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_reader_goes_on_behind_any_piece_as_if_it_had_never_stopped(way, streaming, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "PIECE", 64)
    data = asked(tmp_path, streaming=streaming, **corpus(way, tmp_path))
    reader = Corpus(data)
    whole = [(piece, json.dumps(state)) for piece, state in reader]
    assert len(whole) > 5
    for i, (_, state) in enumerate(whole):
        again = Corpus(data, json.loads(state))
        assert [piece for piece, _ in again] == [piece for piece, _ in whole[i + 1 :]]
        assert again.skipped == reader.skipped


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_reader_that_stops_after_every_third_piece_misses_none(way, streaming, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "PIECE", 64)
    data = asked(tmp_path, streaming=streaming, **corpus(way, tmp_path))
    read, state = [], None
    while True:
        some = list(islice(Corpus(data, state), 3))
        if not some:
            break
        read, state = read + [piece for piece, _ in some], json.loads(json.dumps(some[-1][1]))
    assert read == [piece for piece, _ in Corpus(data)]


def test_a_reader_goes_on_in_a_file_of_many_chunks(tmp_path):
    data = asked(tmp_path, path=str(jsonl(tmp_path / "a.jsonl", [f"{i} " * 20_000 for i in range(300)])))
    whole = list(Corpus(data))
    for i in range(0, 300, 37):
        assert [piece for piece, _ in Corpus(data, whole[i][1])] == [piece for piece, _ in whole[i + 1 :]]
