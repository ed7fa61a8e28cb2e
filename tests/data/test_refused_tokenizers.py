"""Tokenizers of published models that cannot be read, or not every text: refused in a line that says why."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Split, Whitespace

from configs import UserError
from data.published import PublishedTokenizer, read_tokenizer
from tests.data.published_files import (
    TRAINED,
    folder_of,
    load,
    sentencepiece,
    write,
    write_gguf,
)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "neither tokenizer.json nor vocab.json and merges.txt"),
        ({"tokenizer": {}}, "Model missing"),
        ({"tokenizer": []}, "expected struct"),
        ({"tokenizer": sentencepiece(), "config": []}, "list"),
        ({"tokenizer": None}, "expected struct"),
        ({"tokenizer": sentencepiece()}, "it lacks 'vocab_size'"),
        ({"tokenizer": sentencepiece(), "config": {"vocab_size": "9"}}, "the model 9 tokens"),
        ({"tokenizer": sentencepiece(), "config": {"vocab_size": 2**21}}, "the model 2097152 tokens"),
        ({"tokenizer": sentencepiece(), "tokenizer_config": {"bos_token": 7}}, "."),
        ({"tokenizer": sentencepiece(), "config": {"bos_token_id": [1], "vocab_size": 300}}, "unhashable"),
        (
            {"tokenizer": json.loads(Tokenizer(models.Unigram([("a", 0.0)])).to_str())}
            | {"config": {"vocab_size": 1}},
            "its model is Unigram; BPE and WordLevel can be read",
        ),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused_in_a_line(files, said, tmp_path):
    write(tmp_path, **files)
    with pytest.raises(UserError, match=said) as caught:
        read_tokenizer(tmp_path)
    assert str(tmp_path) not in str(caught.value)  # who calls names it
    assert "\n" not in str(caught.value)


def test_a_missing_vocabulary_and_a_file_that_is_no_json_are_refused(tmp_path):
    (tmp_path / "merges.txt").write_text("a b\n")
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        read_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        read_tokenizer(tmp_path)
    with pytest.raises(UserError, match="No such file"):
        read_tokenizer(tmp_path / "nowhere")


PANICS = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
LATER = {"pre_tokenizer": {"type": "FixedLength", "length": 0}}


def test_a_panic_of_the_library_is_a_refusal_too(tmp_path):
    with pytest.raises(UserError, match="Cannot parse precompiled_charsmap"):
        read_tokenizer(folder_of(tmp_path, PANICS))
    tokenizer = read_tokenizer(folder_of(tmp_path, LATER))
    with pytest.raises(UserError, match="cannot encode the text: chunk size must be non-zero"):
        tokenizer.encode("text")


@pytest.mark.parametrize("name", ["tokenizer.json", "merges.txt", "config.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError):
        read_tokenizer(tmp_path)


def strict(model: models.Model, cuts: PreTokenizer | None) -> PublishedTokenizer:
    served = Tokenizer(model)
    if cuts:
        served.decoder = decoders.ByteLevel()
        served.pre_tokenizer = cuts
    return PublishedTokenizer(served, 300, None)


BYTE_LEVEL = ByteLevel(add_prefix_space=False)
SEVERAL = {letter: i for i, letter in enumerate(["a", "b", "Ã", "ab"])}  # of é, which is Ã©, the half
LETTERS = Split(Regex(r"[\s\S]"), "isolated")


@pytest.mark.parametrize(
    ("model", "cuts", "text", "listed"),
    [
        (models.BPE(SEVERAL, [("a", "b")]), BYTE_LEVEL, "abéab\n", r"'\n' 'é'"),
        (models.BPE(SEVERAL, [("a", "b")]), None, "abéabü", "'é' 'ü'"),
        (models.BPE(SEVERAL, [("a", "b")], byte_fallback=True), None, "abéab", "'é'"),
        (models.BPE(SEVERAL, [("a", "b")]), Whitespace(), "ab ab xab", "'x'"),
        (models.WordLevel({"a": 0}, unk_token=""), LETTERS, "aéa\n", r"'\n' 'é'"),
        (models.WordLevel({"a": 0}), LETTERS, "aé", "'é'"),
        (models.WordLevel({"the": 0, "cat": 1}), Whitespace(), "the dog the cat", "'dog'"),
    ],
    ids=range(7),
)
def test_characters_without_a_token_are_listed_where_there_is_none_for_the_unknown(model, cuts, text, listed):
    tokenizer = strict(model, cuts)
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            tokenizer.encode(text)
        assert str(caught.value).endswith(f"characters that the tokenizer does not know: {listed}")


def test_white_space_that_a_tokenizer_leaves_out_is_not_unknown():
    tokenizer = strict(models.BPE(SEVERAL, [("a", "b")]), Whitespace())
    assert tokenizer.encode("ab a\nb").tolist() == [3, 0, 1]


def test_a_tokenizer_with_a_token_for_the_unknown_reads_everything():
    tokenizer = strict(models.WordLevel({"a": 0, "?": 1}, unk_token="?"), LETTERS)
    assert tokenizer.encode("aé").tolist() == [0, 1]


@pytest.mark.parametrize("name", ["a\nb\x1b[31m", "x" * 5000])
def test_names_in_a_file_cannot_reach_the_terminal_raw(name, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", TRAINED.encoding, "gpt2", name)
    for call in (lambda: read_tokenizer(path), lambda: load(SAVED | {"bos_id": name})):
        with pytest.raises(UserError) as caught:
            call()
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 400


SAVED = {"kind": "hf", "bos": True, "bos_id": 1, "vocab_size": 300, "tokenizer": sentencepiece()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bos": "yes"}, "neither true nor false"),
        ({"bos_id": 5}, "its BOS 5 is none of its special tokens"),
        ({"bos_id": "<s>"}, "none of its special tokens"),
        ({"vocab_size": 260}, "ids up to"),
        ({"vocab_size": 2**40}, "the model"),
        ({"vocab_size": 300.5}, "the model"),
        ({"tokenizer": None}, "expected struct"),
        ({"tokenizer": SAVED["tokenizer"] | PANICS}, "precompiled_charsmap"),
    ],
)
def test_what_is_wrong_with_a_saved_one_is_said(changes, said):
    with pytest.raises(UserError, match=said) as caught:
        load(SAVED | changes)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("key", SAVED)
def test_nothing_of_it_may_be_missing(key):
    with pytest.raises(UserError, match=f"it lacks '{key}'"):
        load({name: value for name, value in SAVED.items() if name != key})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(), part, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([*SAVED["tokenizer"], *SAVED["tokenizer"]["model"]]), JSON, st.text())
def test_any_file_is_either_refused_in_a_line_or_encodes(key, value, text):
    content = json.loads(json.dumps(SAVED))
    place = content["tokenizer"] if key in content["tokenizer"] else content["tokenizer"]["model"]
    place[key] = value
    message, ids = "", np.array([])
    try:
        ids = load(content).encode(text)
    except UserError as refusal:
        message = str(refusal)
    assert "\n" not in message
    assert (ids < 300).all()
