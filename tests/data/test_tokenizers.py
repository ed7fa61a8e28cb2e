"""Text to ids and back."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError
from data.tokenizers import ByteTokenizer, CharTokenizer, load_tokenizer

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


@pytest.mark.parametrize("make", [ByteTokenizer, lambda bos: CharTokenizer("cab", bos)])
def test_bos_is_the_last_id_and_stands_for_no_text(make):
    without, tokenizer = make(False), make(True)
    assert without.bos is None
    assert tokenizer.bos == tokenizer.vocab_size - 1 == without.vocab_size
    bos = tokenizer.bos
    for ids in ([bos, 97 % bos, bos], np.array([bos, 97 % bos, bos]), torch.tensor([bos, 97 % bos, bos])):
        assert tokenizer.decode(ids) == without.decode([97 % bos])


@pytest.mark.parametrize("text", ["<|endoftext|>", "<s>", "a\0\r\n\ufeff", ""])
def test_marks_of_other_tokenizers_are_ordinary_text(text):
    for tokenizer in (ByteTokenizer(True), CharTokenizer("".join(sorted(set(text))) or "a", True)):
        ids = tokenizer.encode(text)
        assert tokenizer.bos not in ids
        assert tokenizer.decode(ids) == text


def test_bytes_that_are_no_text_can_still_be_shown():
    assert ByteTokenizer(True).decode([97, 0xE2, 0x82, 98]) == "a\ufffdb"


@given(ALPHABETS, st.booleans())
def test_a_saved_tokenizer_is_the_same_tokenizer(alphabet, bos):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        for tokenizer in (CharTokenizer(alphabet, bos), ByteTokenizer(bos)):
            path.write_text(json.dumps(tokenizer.to_json()))
            again = load_tokenizer(path)
            assert (again.vocab_size, again.bos) == (tokenizer.vocab_size, tokenizer.bos)
            assert again.encode(alphabet).tolist() == tokenizer.encode(alphabet).tolist()
