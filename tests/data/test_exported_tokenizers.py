"""Our tokenizers in the hands of `transformers`: the same ids, BOS in front, BOS as text left alone."""

import json
import re

import pytest
import tiktoken
import tiktoken_ext.openai_public as public
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from data.bpe import BOS, NAMED, PATTERN, BytePairTokenizer, named, train_bpe
from data.exported import to_published
from data.published import read_tokenizer
from data.tokenizers import ByteTokenizer, CharTokenizer
from tests.data.gpt2_files import gpt2_cache
from tests.data.published_files import export, sentencepiece, write, write_gguf

TEXT = "".join(f"{i} times {i} is {i * i}, said the naïve über-reader.\r\n" for i in range(200))
WORDS = [
    "<|endoftext|>",
    "<s>",
    " is",
    "'s",
    "'S",
    "'\u017f",
    "\r\n",
    "  ",
    "\u3000",
    "\x85",
    "\0",
    "12",
    "naïve",
    "😀",
]
TEXTS = st.lists(st.text() | st.sampled_from(WORDS)).map("".join)
LETTERS = "".join(map(chr, range(256))) + "\u3000😀e\u0301"
KINDS = {
    "char": lambda bos: CharTokenizer("".join(dict.fromkeys(LETTERS)), bos),
    "byte": ByteTokenizer,
    "bpe": lambda bos: train_bpe([TEXT], 400, bos),
    "gpt2": lambda bos: named("gpt2", bos),
}


@pytest.fixture(scope="module", autouse=True)
def _gpt2_at_hand(tmp_path_factory):
    gpt2_cache(folder := tmp_path_factory.mktemp("tiktoken"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiktoken.registry, "ENCODINGS", {})
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        yield


@pytest.fixture(scope="module", params=[*KINDS, "sentencepiece", "gguf"])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=[True, False], ids=["bos", "no bos"])
def both(request, kind, tmp_path_factory):
    """One of ours and what `transformers` makes of its files."""
    folder = tmp_path_factory.mktemp("exported")
    if kind in KINDS:
        ours = KINDS[kind](request.param)
    elif kind == "gguf":
        path = write_gguf(folder / "m.gguf", train_bpe([TEXT], 400, True).encoding, pre="smollm")
        ours = read_tokenizer(path, request.param)
    else:
        about = {"config": {"vocab_size": 300}, "tokenizer_config": {"bos_token": "<s>"}}
        write(folder / "from", tokenizer=sentencepiece(), **about)
        ours = read_tokenizer(folder / "from", request.param)
    theirs = AutoTokenizer.from_pretrained(export(folder / "to", ours))
    return ours, theirs


@given(TEXTS)
@example("".join(WORDS))
@example("<|endoftext|><s>")
def test_ids_are_ours_with_bos_in_front_and_the_text_comes_back(both, text):
    ours, theirs = both
    if ours.kind == "char":
        text = "".join(character for character in text if character in ours.characters)
    ids = ours.encode(text).tolist()
    assert theirs(text, add_special_tokens=False).input_ids == ids
    assert theirs(text).input_ids == [ours.bos] * (ours.bos is not None) + ids
    assert theirs.decode(ids) == ours.decode(ids)
    assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == ours.decode(ids)
    if "▁" not in text:
        assert theirs.decode(ids) == text


def test_bos_is_known_by_its_id_and_ends_a_text(both):
    ours, theirs = both
    assert theirs.bos_token_id == theirs.eos_token_id == ours.bos
    assert len(theirs) <= ours.vocab_size


def test_what_our_characters_lack_is_refused_there_too(tmp_path):
    theirs = AutoTokenizer.from_pretrained(export(tmp_path, CharTokenizer("ab", bos=True)))
    assert theirs("ba").input_ids == [2, 1, 0]
    with pytest.raises(Exception, match="Missing"):
        theirs("abc")


def test_an_exported_tokenizer_is_a_published_one(both, tmp_path):
    ours, _ = both
    again = read_tokenizer(export(tmp_path, ours))
    assert (again.vocab_size, again.bos) == (ours.vocab_size, ours.bos)
    text = "1 times 12 is 144"
    assert again.encode(text).tolist() == ours.encode(text).tolist()
    assert again.decode_bytes(again.encode(text)) == ours.decode_bytes(ours.encode(text))
    assert again.symbols.tolist() == ours.symbols.tolist()


# How text is cut


def of_pairs(pattern: str) -> BytePairTokenizer:
    """Its tokens are all single bytes and pairs of them, so that ids show how a text was cut."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [left + right for left in tokens for right in tokens]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    marks = {BOS: len(ranks)}
    encoding = tiktoken.Encoding("cl100k_base", pat_str=pattern, mergeable_ranks=ranks, special_tokens=marks)
    return BytePairTokenizer(encoding, bos=True)


@pytest.fixture(scope="module", params=[*NAMED, "bpe"])
def cut_by_pattern(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(public, "load_tiktoken_bpe", lambda *rest, **hashes: {})
        patch.setattr(public, "data_gym_to_mergeable_bpe_ranks", lambda **files: {})
        name = request.param
        ours = of_pairs(PATTERN if name == "bpe" else public.ENCODING_CONSTRUCTORS[name]()["pat_str"])
    return ours, served(ours)


def served(ours) -> Tokenizer:
    theirs = Tokenizer.from_str(json.dumps(to_published(ours)["tokenizer.json"]))
    theirs.encode_special_tokens = True  # as split_special_tokens of tokenizer_config.json has it
    return theirs


CLASSES = st.text(
    "aAsSlLtTvVeE'\u017f\u212a \t\n\r\x0b\x85\xa0\u2028\u30001\uff12²Ⅷéß.,/\0😀-_İǅʰ中\u0301", max_size=20
)


@pytest.mark.slow
@given(CLASSES | TEXTS)
@example("a  \n\n \n b   ")
@example("12345 1234\n\n")
def test_every_pattern_cuts_as_tiktoken_does(cut_by_pattern, text):
    ours, theirs = cut_by_pattern
    assert theirs.encode(text, add_special_tokens=False).ids == ours.encode(text).tolist()


# What merges


@st.composite
def ranks_and_texts(draw) -> tuple[dict[bytes, int], str]:
    """Ranks that no training made: tokens of any two before them, and some that no merges lead to."""
    few = [b"a", b"b"]
    for _ in range(draw(st.integers(0, 10))):
        if draw(st.integers(0, 4)):
            few.append(draw(st.sampled_from(few)) + draw(st.sampled_from(few)))
        else:
            few.append(draw(st.text("ab", min_size=2, max_size=6)).encode())
    tokens = dict.fromkeys([bytes([byte]) for byte in range(256)] + few)
    words = st.sampled_from(few).map(bytes.decode) | st.text("ab", max_size=12)
    return {token: rank for rank, token in enumerate(tokens)}, draw(st.lists(words).map(" ".join))


def encoding_of(ranks: dict[bytes, int], pattern: str = r"\S+|\s+", **marks: int) -> tiktoken.Encoding:
    return tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=marks)


@given(ranks_and_texts())
@example(({bytes([i]): i for i in range(256)} | {b"ab": 257, b"aab": 256, b"aaab": 258}, "aab aaab baaab"))
def test_one_pair_a_token_is_enough_whatever_the_ranks(case):
    ranks, text = case
    ours = BytePairTokenizer(encoding_of(ranks), bos=False)
    assert served(ours).encode(text).ids == ours.encode(text).tolist()


def test_equal_pairs_merge_from_the_left():
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"aa": 256, b"aaa": 257}
    ours = BytePairTokenizer(encoding_of(ranks), bos=False)
    assert to_published(ours)["tokenizer.json"]["model"]["merges"] == [["a", "a"], ["aa", "a"]]
    assert served(ours).encode("baaa").ids == ours.encode("baaa").tolist() == [98, 257]


@pytest.mark.parametrize("bos", [True, False])
def test_marks_keep_their_ids_also_behind_a_gap(bos):
    ranks = {bytes([byte]): byte for byte in range(256)}
    ours = BytePairTokenizer(encoding_of(ranks, PATTERN, **{BOS: 300, "<|x|>": 310}), bos)
    theirs = served(ours)
    assert (theirs.token_to_id(BOS), theirs.token_to_id("<|x|>")) == (300, 310)
    assert theirs.decode([97, 300, 310]) == ours.decode([97, 300, 310]) == "a"
    assert theirs.encode("<|x|>", add_special_tokens=False).ids == [*b"<|x|>"]


def test_the_words_of_a_trained_encoding_have_a_merge_each():
    merges = to_published(train_bpe([TEXT], 400, bos=True))["tokenizer.json"]["model"]["merges"]
    assert len(merges) == 399 - 256
    assert all(re.fullmatch(r"\S+", part) for pair in merges for part in pair)
