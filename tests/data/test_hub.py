"""Documents come as they are, whatever holds them; what cannot be read is told in a line."""

import gzip
import json
import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from configs import UserError
from data import hub
from data.hub import Corpus
from tests.data.corpus import ODD, asked, data_set, jsonl, parquet, texts

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("home")


def documents(reader) -> list[str]:
    joined = []
    for piece, _ in reader:
        if piece.begins:
            joined.append("")
        joined[-1] += piece.text
    return joined


def read(folder: Path, **values) -> list[str]:
    return documents(Corpus(asked(folder, **values)))


# What is read


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder", "jsonl.gz"])
def test_every_character_of_a_row_is_read_whatever_holds_it(kind, streaming, tmp_path):
    rows = [*texts(30), *ODD]
    if kind == "folder":
        data = {"name": str(data_set(tmp_path / "set", one=["no"], two=rows)), "subset": "two"}
    elif kind == "parquet":
        data = {"path": str(parquet(tmp_path / "a.parquet", rows))}
    else:
        path = jsonl(tmp_path / "a.jsonl", rows)
        if kind == "jsonl.gz":
            path = path.with_suffix(".jsonl.gz")
            path.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
        data = {"path": str(path)}
    assert read(tmp_path, streaming=streaming, **data) == rows


@pytest.mark.parametrize("suffix", [".txt", ".md", "", ".txt.gz"])
def test_a_plain_text_file_is_a_document_as_it_is(suffix, tmp_path):
    for i, text in enumerate(ODD):
        data = text.encode()
        (tmp_path / f"{i}{suffix}").write_bytes(gzip.compress(data) if suffix == ".txt.gz" else data)
    assert read(tmp_path, path=str(tmp_path / f"[0-9]{suffix}")) == ODD


@pytest.mark.parametrize("name", ["a [1].jsonl", "what?.jsonl", "*.jsonl", "[a].txt", ".hidden.jsonl"])
def test_a_file_whose_name_looks_like_a_pattern_can_be_read(name, tmp_path):
    jsonl(tmp_path / "other.jsonl", ["other"])
    path = tmp_path / name
    path.write_text("here") if path.suffix == ".txt" else jsonl(path, ["here"])
    assert read(tmp_path, path=str(path)) == ["here"]


def test_another_column_may_hold_the_text(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["a", "b"], column="content")
    assert read(tmp_path, path=str(path), text_column="content") == ["a", "b"]


def test_empty_and_null_rows_are_skipped_and_counted_and_take_counts_documents(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["", None, "a", "", "b", None, None, "c"])
    reader = Corpus(asked(tmp_path, path=str(path)))
    assert documents(reader) == ["a", "b", "c"]
    assert reader.skipped == {"empty": 2, "null": 3}
    assert read(tmp_path, path=str(path), take=2) == ["a", "b"]


ARTICLES = [" = One = \n\n text \n = = Part = = \n\n more \n", " = Two = \n\n text \n"]


@pytest.mark.parametrize("kind", ["txt", "parquet", "jsonl"])
def test_lines_become_articles_where_one_matches(kind, tmp_path):
    """As in WikiText, where the line of an empty row is empty, without its end."""
    lines = [line.removesuffix("\n") if line == "\n" else line for line in "".join(ARTICLES).splitlines(True)]
    path = tmp_path / f"a.{kind}"
    if kind == "txt":
        path.write_text("".join(ARTICLES))
    else:
        {"parquet": parquet, "jsonl": jsonl}[kind](path, lines)
    title = r"^ = [^=].*[^=] = \n?$"
    assert read(tmp_path, path=str(path), new_document=title) == ARTICLES
    assert read(tmp_path, path=str(path), new_document=title, take=1) == ARTICLES[:1]


# What cannot be read


def refused(folder: Path, **values) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, **values)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    return str(caught.value)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\n\n{"text": "b\n{"text": "c"}\n',
            "a.jsonl: line 3: Invalid control char",
        ),
        ("a.jsonl", b'{"text": "a"}\nnonsense\n', "a.jsonl: line 2: Expecting value"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b', "a.jsonl: line 2: Unterminated string"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}\n', "a.jsonl: line 2: .*surrogates not allowed"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "a.jsonl: line 2: .*can't decode byte 0xff"),
        ("a.json", b'[\n{"text": "a"},\n{"text": }]', "a.json: "),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz: Not a gzipped file"),
        ("a.txt.gz", b"no gzip", "a.txt.gz: Not a gzipped file"),
        ("a.parquet", b"no parquet", "a.parquet: Parquet magic bytes not found"),
        ("a.parquet", b"", "a.parquet: Parquet file size is 0 bytes"),
        ("a.txt", b"a" * 9 + b"\xff", "a.txt is not UTF-8 text: invalid start byte at byte 9"),
        ("a.txt", b"\xe2\x82", "a.txt is not UTF-8 text: unexpected end of data at byte 0"),
        ("a.txt", "é".encode() * 2**20 + b"\xc3", f"unexpected end of data at byte {2**21}"),
        (
            "a.jsonl",
            b'{"content": "a", "id": 1}\n',
            "a.jsonl: line 1: no data.text_column text; it has content, id",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": 5}\n',
            "row 2: data.text_column text holds 5, which is not text",
        ),
        ("a.jsonl", b'{"text": 5}\n{"text": 7}\n', "row 1: data.text_column text holds 5, which is not text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ["b"]}\n', r"row 2: .* holds \['b'\], which is not text"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_place(streaming, name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    if streaming or "txt" not in name:
        assert re.search(said, refused(tmp_path, path=str(tmp_path / name), streaming=streaming))


def test_the_file_among_many_is_named(tmp_path):
    for i in range(3):
        parquet(tmp_path / f"{i}.parquet", ["a", "b"])
    whole = (tmp_path / "1.parquet").read_bytes()
    (tmp_path / "1.parquet").write_bytes(whole[: len(whole) // 2])
    assert "1.parquet: Parquet magic bytes" in refused(tmp_path, path=str(tmp_path / "*.parquet"))


def test_a_parquet_column_that_is_no_text_is_told(tmp_path):
    pq.write_table(pa.table({"text": [1.5, 2.5]}), tmp_path / "a.parquet")
    assert "row 1: data.text_column text holds 1.5" in refused(tmp_path, path=str(tmp_path / "a.parquet"))


def test_files_of_several_kinds_are_refused_by_name(tmp_path):
    jsonl(tmp_path / "a.jsonl", ["a"])
    parquet(tmp_path / "b.parquet", ["b"])
    (tmp_path / "c.txt").write_text("c")
    message = refused(tmp_path, path=str(tmp_path / "*"))
    assert ".jsonl (json), .parquet (parquet), .txt (text)" in message
    assert read(tmp_path, path=str(tmp_path / "*.jsonl")) == ["a"]


@pytest.mark.parametrize("values", [{"subset": "a"}, {"revision": "b"}, {"split": "test"}])
def test_files_have_no_subset_revision_or_split(values, tmp_path):
    with pytest.raises(ValidationError, match=r"the files of data\.path have none"):
        asked(tmp_path, path=str(tmp_path / "a.jsonl"), **values)


@pytest.mark.parametrize("number", [5, None, {"a": "b"}, "2020-01-02"])
def test_a_text_is_what_its_line_says_whatever_stands_in_others(number, tmp_path):
    """Readers that guess types would quote the texts beside a number, and turn dates into times."""
    rows = [{"text": text, "url": None} for text in texts(9000)] + [{"text": "2020-01-02", "more": [1]}]
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(row) for row in [*rows, {"text": number, "url": "x"}, rows[0]]]
    path.write_text("\n".join(lines) + "\n")
    if isinstance(number, str | None):
        expected = [*(row["text"] for row in rows), *([number] if number else []), rows[0]["text"]]
        assert read(tmp_path, path=str(path)) == expected
    else:
        assert "row 9,002" in (said := refused(tmp_path, path=str(path)))
        assert "which is not text" in said


def test_an_array_of_objects_is_no_line_of_one(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a"}]))
    assert "line 1: no object" in refused(tmp_path, path=str(tmp_path / "a.json"))


def test_a_match_in_the_middle_of_a_long_line_begins_no_document(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "PIECE", 64)
    lines = ["A" + "x" * 63 + "A" + "y" * 100 + "\n", "b\n", "A\n"]
    (tmp_path / "a.txt").write_text("".join(lines))
    assert read(tmp_path, path=str(tmp_path / "a.txt"), new_document="^A") == [lines[0] + lines[1], lines[2]]


def test_a_pattern_without_files_is_told(tmp_path):
    assert "matches no file" in refused(tmp_path, path=str(tmp_path / "*.jsonl"))


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "['one', 'two']"),
        ({"subset": "three"}, "['one', 'two']"),
        ({"subset": "one", "split": "test"}, "['train']"),
        ({"subset": "one", "text_column": "content"}, "has id, text"),
    ],
)
def test_what_a_data_set_has_is_told_with_what_it_has_not(streaming, values, said, tmp_path):
    folder = data_set(tmp_path / "set", one=["a", "b"], two=["c", "d"])
    message = refused(tmp_path, name=str(folder), streaming=streaming, **values)
    assert said in message
    assert "data." in message
    assert str(folder) in message


def test_a_folder_without_data_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "doesn't contain any data files" in refused(tmp_path, name=str(tmp_path / "empty"))


# The hub, in processes of their own: where it is, is read at import

READ = """
import sys, time
from configs import UserError
from configs.schema import Data
from data.hub import Corpus
import datasets, huggingface_hub
began = time.perf_counter()
for name in sys.argv[1:]:
    try:
        list(Corpus(Data(source="hf", tokenizer="byte", name=name)))
    except UserError as error:
        print(error)
print(time.perf_counter() - began)
"""


def ask(folder: Path, names: list[str], **environment) -> tuple[list[str], float]:
    command = [sys.executable, "-c", READ, *names]
    known = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    where = known | {"HF_HOME": str(folder), **environment}
    done = subprocess.run(command, cwd=ROOT, env=where, capture_output=True, text=True, timeout=100)
    assert done.stderr == ""
    *lines, seconds = done.stdout.splitlines()
    return lines, float(seconds)


def test_without_network_it_is_told_within_seconds_what_helps(tmp_path):
    (line,), seconds = ask(tmp_path, ["tinystories"], HF_ENDPOINT="http://127.0.0.1:1")
    assert "roneneldan/TinyStories" in line
    assert "cannot be reached" in line
    assert "HF_HUB_OFFLINE=1" in line
    assert "data.path" in line
    assert seconds < 6


def test_offline_what_was_never_downloaded_is_told_at_once(tmp_path):
    (line,), seconds = ask(tmp_path, ["tinystories"], HF_HUB_OFFLINE="1")
    assert "roneneldan/TinyStories" in line
    assert "data.path" in line
    assert seconds < 3


class Hub(BaseHTTPRequestHandler):
    """What the hub says of data sets that are not there, that need leave, and on a bad day."""

    def do_GET(self):
        code = {"none": 404, "gated": 403, "broken": 500}[self.path.split("/")[4]]
        self.send_response(code)
        error = {404: "RepoNotFound", 403: "GatedRepo"}.get(code)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()

    def log_message(self, *arguments):
        pass


def test_what_the_hub_answers_is_told_in_a_line(tmp_path):
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        names = ["someone/none", "someone/gated", "someone/broken", "no/such/folder"]
        lines, _ = ask(tmp_path, names, HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    for name, line, said in zip(
        names, lines, ["no such data set", "needs leave", "500", "no such folder"], strict=True
    ):
        assert name in line
        assert said in line
