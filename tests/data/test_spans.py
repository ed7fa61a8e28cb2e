"""Spans of tokens: they cover the text, in order, and each begins where its word does."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data.bpe import train_bpe
from data.spans import encode_with_spans
from data.tokenizers import ByteTokenizer, CharTokenizer

TEXT = "".join(f"{i} times {i} is {i * i}, said the naïve über-reader.\r\n" for i in range(200))
TRAINED = train_bpe([TEXT], 400, bos=True)
TEXTS = st.lists(st.text() | st.sampled_from(["times", " is", "\r\n", "naïve", " über", "   "])).map("".join)


def spelled(tokenizer, text: str) -> list[str]:
    ids, spans = encode_with_spans(tokenizer, text)
    assert ids.tolist() == tokenizer.encode(text).tolist()
    return [text[begin:end] for begin, end in spans]


@given(TEXTS)
def test_every_character_has_a_token_of_its_own(text):
    tokenizer = CharTokenizer("".join({*text}), bos=True)
    assert spelled(tokenizer, text) == [*text]


@given(TEXTS)
def test_every_byte_spans_the_character_that_it_is_part_of(text):
    each = [character for character in text for _ in character.encode()]
    assert spelled(ByteTokenizer(bos=True), text) == each


@given(TEXTS)
@example("\U0001f600")
def test_what_no_token_spans_is_white_space_in_front_of_one(text):
    ids, spans = encode_with_spans(TRAINED, text)
    reached = 0
    for i, (begin, end) in zip(ids, spans, strict=True):
        assert text[reached:begin].strip() == ""
        assert begin < end
        assert not text[begin].isspace() or text[begin:end].isspace()
        assert TRAINED.decode_bytes([i]) in text[min(reached, begin) : end].encode()
        reached = end
    assert reached == len(text)


def test_words_begin_at_their_first_letter_and_spaces_alone_are_spans():
    assert spelled(TRAINED, " times is times") == ["times", "is", "times"]
    assert spelled(TRAINED, " said the über-reader") == ["said", "the", "über", "-reader"]
    assert "".join(spelled(TRAINED, "   ")) == "   "


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(True), TRAINED, CharTokenizer("ab", False)])
def test_no_text_has_no_spans(tokenizer):
    assert spelled(tokenizer, "") == []
