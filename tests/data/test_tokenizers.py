"""Text to ids and back."""

import base64
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError
from configs.schema import Data
from data.bpe import PATTERN, named, train_bpe
from data.tokenizers import ByteTokenizer, CharTokenizer, load_tokenizer, make_tokenizer, vocab_size_of
from tests.data.gpt2_files import gpt2_cache

TEXT = "".join(f"{i} times {i} is {i * i}. " for i in range(100))
ALPHABETS = st.text(min_size=1).map(lambda text: "".join(dict.fromkeys(text)))  # distinct, in any order


@given(st.text(), st.booleans())
def test_bytes_encode_any_text_and_give_it_back(text, bos):
    tokenizer = ByteTokenizer(bos)
    ids = tokenizer.encode(text)
    assert bytes(ids.tolist()) == text.encode()
    assert tokenizer.decode(ids) == text


@given(st.data(), ALPHABETS, st.booleans())
def test_characters_encode_text_over_their_alphabet_and_give_it_back(data, alphabet, bos):
    tokenizer = CharTokenizer(alphabet, bos)
    text = data.draw(st.text(st.sampled_from(alphabet)))
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert [alphabet[i] for i in ids] == list(text)
    assert tokenizer.decode(ids) == text


@given(ALPHABETS, st.text())
def test_characters_that_have_no_id_are_listed(alphabet, text):
    tokenizer = CharTokenizer(alphabet, True)
    unknown = sorted(set(text) - set(alphabet))
    if unknown:
        with pytest.raises(UserError) as caught:
            tokenizer.encode(text)
        assert all(repr(character) in str(caught.value) for character in unknown[:20])
    else:
        tokenizer.encode(text)


def trained(bos: bool):
    return train_bpe([TEXT], 300 + bos, bos)


@pytest.mark.parametrize("make", [ByteTokenizer, lambda bos: CharTokenizer("cab", bos), trained])
def test_bos_is_the_last_id_and_stands_for_no_text(make):
    without, tokenizer = make(False), make(True)
    assert without.bos is None
    assert tokenizer.bos == tokenizer.vocab_size - 1 == without.vocab_size
    assert tokenizer.symbols.tolist() == without.symbols.tolist() == list(range(without.vocab_size))
    bos = tokenizer.bos
    for ids in ([bos, 97 % bos, bos], np.array([bos, 97 % bos, bos]), torch.tensor([bos, 97 % bos, bos])):
        assert tokenizer.decode(ids) == without.decode([97 % bos])


@pytest.mark.parametrize("text", ["<|endoftext|>", "<s>", "a\0\r\n\ufeff", ""])
def test_marks_of_other_tokenizers_are_ordinary_text(text):
    characters = CharTokenizer("".join(sorted(set(text))) or "a", True)
    for tokenizer in (ByteTokenizer(True), characters, trained(True)):
        ids = tokenizer.encode(text)
        assert tokenizer.bos not in ids
        assert tokenizer.decode(ids) == text


def test_bytes_that_are_no_text_can_still_be_shown():
    assert ByteTokenizer(True).decode([97, 0xE2, 0x82, 98]) == "a\ufffdb"


# Saved and read again


def saved(content, folder: str) -> Path:
    path = Path(folder) / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@given(ALPHABETS, st.booleans(), st.text())
def test_a_saved_tokenizer_is_the_same_tokenizer(alphabet, bos, text):
    with tempfile.TemporaryDirectory() as folder:
        for tokenizer in (CharTokenizer(alphabet, bos), ByteTokenizer(bos), trained(bos)):
            again = load_tokenizer(saved(tokenizer.to_json(), folder))
            assert again.to_json() == tokenizer.to_json()
            assert (again.kind, again.vocab_size, again.bos) == (
                tokenizer.kind,
                tokenizer.vocab_size,
                tokenizer.bos,
            )
            known = alphabet if tokenizer.kind == "char" else text
            ids = again.encode(known)
            assert ids.tolist() == tokenizer.encode(known).tolist()
            assert again.decode(ids) == known


@pytest.fixture
def gpt2_at_hand(tmp_path, monkeypatch):
    gpt2_cache(tmp_path / "tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.usefixtures("gpt2_at_hand")
def test_of_a_named_encoding_only_the_name_is_saved(bos, tmp_path):
    tokenizer = named("gpt2", bos)
    assert tokenizer.to_json() == {"kind": "gpt2", "bos": bos}
    again = load_tokenizer(saved(tokenizer.to_json(), str(tmp_path)))
    assert (again.kind, again.vocab_size, again.bos) == ("gpt2", 50257, tokenizer.bos)


def refused(content) -> str:
    with tempfile.TemporaryDirectory() as folder, pytest.raises(UserError) as caught:
        load_tokenizer(saved(content, folder))
    message = str(caught.value)
    assert message.startswith(f"cannot read the tokenizer of {folder}: ")
    assert "\n" not in message
    assert len(message) < 400
    return message


SINGLE = [base64.b64encode(bytes([byte])).decode() for byte in range(256)]
TH = base64.b64encode(b"th").decode()


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (None, "list"),
        ("QQ==", "list"),
        ({TH: 0}, "list"),
        ([*SINGLE] * 5000, "list of up to 1048576"),
        ([], "256 bytes"),
        ([TH], "256 bytes"),
        (SINGLE[1:], "256 bytes"),
        (SINGLE[::-1], "256 bytes"),
        ([*SINGLE[:255], TH, SINGLE[255]], "256 bytes"),
        ([*SINGLE, TH, TH], "twice"),
        ([*SINGLE, SINGLE[7]], "twice"),
        ([*SINGLE, ""], "empty"),
        ([*SINGLE, "th!"], "base64"),
        ([*SINGLE, "dGg"], "padding"),
        ([*SINGLE, "\u0442"], "ASCII"),
        ([*SINGLE, 7], "int"),
        ([*SINGLE, None], "None"),
    ],
)
def test_ranks_that_are_none_are_refused(ranks, said):
    assert said in refused({"kind": "bpe", "bos": True, "pattern": PATTERN, "ranks": ranks})


@pytest.mark.parametrize("pattern", ["(a+)+$", "", None, PATTERN + "|."])
def test_a_foreign_pattern_is_never_run(pattern):
    content = {"kind": "bpe", "bos": True, "pattern": pattern, "ranks": SINGLE}
    assert "its pattern is not" in refused(content)
    with tempfile.TemporaryDirectory() as folder:
        assert load_tokenizer(saved({**content, "pattern": PATTERN}, folder)).vocab_size == 257


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"kind": "char", "characters": "ab"}, "it lacks 'bos'"),
        ({"kind": "char", "bos": True}, "it lacks 'characters'"),
        ({"kind": "bpe", "bos": True, "ranks": SINGLE}, "it lacks 'pattern'"),
        ({"kind": "char", "bos": True, "characters": "aba"}, "twice"),
        ({"kind": "char", "bos": 1, "characters": "ab"}, "neither true nor false"),
        ({"kind": "char", "bos": True, "characters": "a\ud800"}, "surrogates"),
        ({"kind": "char", "bos": True, "characters": ["ab", "c"]}, "kind"),
        ({"kind": "p50k_edit", "bos": True, "characters": "ab"}, "none of char, byte, bpe, hf, gpt2"),
        ({"kind": ["gpt2"], "bos": True}, "unhashable"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(content, said):
    assert said in refused(content)


def test_a_file_that_nests_without_end_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(), part, max_size=3),
    max_leaves=5,
)
RANKS = st.lists(st.binary(max_size=3).map(lambda token: base64.b64encode(token).decode()) | JSON, max_size=4)
NEARLY = st.fixed_dictionaries(
    {"kind": st.sampled_from(["char", "byte", "bpe"]) | JSON, "bos": st.booleans() | JSON},
    optional={
        "characters": st.text() | JSON,
        "pattern": st.just(PATTERN) | JSON,
        "ranks": RANKS.map(lambda more: [*SINGLE, *more]) | JSON,
    },
)


@given(NEARLY | JSON, st.text())
def test_any_file_is_either_refused_in_a_line_or_gives_text_back(content, text):
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer = load_tokenizer(saved(content, folder))
        except UserError as refusal:
            message = str(refusal)
        else:
            message = ""
    assert "\n" not in message
    if message:
        return
    text = tokenizer.characters if tokenizer.kind == "char" else text
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert {*ids.tolist()} <= {*range(tokenizer.vocab_size)} - {tokenizer.bos}


# What a configuration asks for


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("tokenizer", ["byte", "bpe", "gpt2"])
@pytest.mark.usefixtures("gpt2_at_hand")
def test_the_vocabulary_is_known_before_anything_is_read(tokenizer, bos):
    size = {"vocab_size": 300} if tokenizer == "bpe" else {}
    config = Data(tokenizer=tokenizer, bos=bos, **size)
    made = make_tokenizer(config, [TEXT])
    assert (made.kind, made.bos is not None) == (tokenizer, bos)
    assert vocab_size_of(config) == made.vocab_size


def test_characters_decide_themselves_how_many_they_are():
    assert vocab_size_of(Data(tokenizer="char")) is None
    assert make_tokenizer(Data(), [TEXT, "é"]).characters == "".join(sorted({*TEXT, "é"}))
    assert make_tokenizer(Data(source="repeats"), []).vocab_size == 65


def test_bpe_needs_text():
    config = Data(source="repeats", tokenizer="bpe")
    with pytest.raises(UserError, match="bpe is trained on text, and repeats has none"):
        make_tokenizer(config, [])
