"""Tokenizers of published models: the ids that their makers give, and the manners of ours."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from configs import UserError
from configs.schema import Data
from data.bpe import named, train_bpe
from data.corpora import load_text
from data.exported import to_published
from data.preparation import prepared
from data.published import LLAMA_3, PublishedTokenizer, read_tokenizer
from data.spans import encode_with_spans
from data.tokenizers import load_tokenizer, make_tokenizer, vocab_size_of
from tests.data.gpt2_files import gpt2_cache
from tests.data.published_files import (
    TEXT,
    TRAINED,
    export,
    folder_of,
    load,
    old_gpt2,
    sentencepiece,
    write,
    write_gguf,
)
from tests.data.threads import turns_during

MARKS = ["<|endoftext|>", "<s>", "</s>", "<unk>", "<0x41>", "▁"]
TEXTS = st.lists(st.text() | st.sampled_from([*MARKS, "the one", "times", " is", "\r\n", "12", "😀", "  "]))
TEXTS = TEXTS.map("".join)
REAL = os.environ.get("SMOLLM2_GGUF")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> PublishedTokenizer:
    return read_tokenizer(old_gpt2(tmp_path_factory.mktemp("gpt2")))


@pytest.fixture(scope="module")
def tiktokens(tmp_path_factory):
    """GPT-2's encoding by another library."""
    gpt2_cache(folder := tmp_path_factory.mktemp("tiktoken"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiktoken.registry, "ENCODINGS", {})
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        yield named("gpt2", bos=True)


@pytest.fixture
def llama(tmp_path) -> PublishedTokenizer:
    config = {"vocab_size": 300}
    settings = {"bos_token": {"content": "<s>", "lstrip": False}}
    return read_tokenizer(
        write(tmp_path, tokenizer=sentencepiece(), config=config, tokenizer_config=settings)
    )


# Ids


@given(TEXTS)
def test_an_old_folder_of_gpt2_gives_the_ids_of_tiktoken(gpt2, tiktokens, text):
    ids = gpt2.encode(text)
    assert ids.dtype == np.uint32
    assert ids.tolist() == tiktokens.encode(text).tolist()
    assert gpt2.decode(ids) == tiktokens.decode(ids) == text
    assert gpt2.decode_bytes(ids) == text.encode()


def test_what_is_known_of_a_published_tokenizer_is_as_of_ours(gpt2, tiktokens):
    assert (gpt2.kind, gpt2.vocab_size, gpt2.bos) == ("hf", 50257, 50256)
    assert gpt2.symbols.tolist() == tiktokens.symbols.tolist()
    assert all(gpt2.decode_bytes([i]) == tiktokens.decode_bytes([i]) for i in range(50258))
    for ids in (np.array([15496, 50256, 995]), torch.tensor([15496, 50256, 995])):
        assert gpt2.decode(ids) == "Hello world"


def test_half_a_surrogate_pair_becomes_a_replacement_character_and_a_whole_one_its_character(gpt2):
    assert gpt2.decode(gpt2.encode("a\ud800b\udc00")) == "a\ufffdb\ufffd"
    assert gpt2.decode(gpt2.encode("\ud83d\ude00")) == "\N{GRINNING FACE}"


def test_a_whole_book_is_one_text(gpt2, tiktokens):
    text = load_text("shakespeare", None)
    ids = gpt2.encode(text)
    assert (ids == tiktokens.encode(text)).all()
    assert gpt2.decode_bytes(ids) == text.encode()


@pytest.mark.parametrize("space", [" ", "\n ", "a", "1"])
def test_a_text_without_end_is_encoded(space, gpt2):
    text = "x" + space * 200_000 + "y"
    assert gpt2.decode(gpt2.encode(text)) == text


def test_other_threads_go_on_while_a_long_text_is_encoded(gpt2):
    assert turns_during(lambda: gpt2.encode(TEXT * 100)) > 1000  # a few, had it waited for the interpreter


@given(TEXTS)
@example("<s>")
def test_what_sentencepiece_makes_of_a_text_is_the_text_again(text):
    content = Tokenizer.from_str(json.dumps(sentencepiece()))
    tokenizer = PublishedTokenizer(content, 300, 1)
    ids = tokenizer.encode(text)
    assert not {0, 1, 2} & {*ids.tolist()}
    if "▁" not in text:  # which is its letter for a space
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(ids).decode() == (" " + text if text else "")


def test_bytes_come_one_by_one_where_a_character_is_no_token(llama):
    ids = llama.encode("the é")
    assert [llama.decode_bytes([i]) for i in ids] == [b" the", b" ", b"\xc3", b"\xa9"]
    assert llama.decode(ids[:-1]) == "the \ufffd"
    assert encode_with_spans(llama, "on the é")[1] == [(0, 1), (0, 2), (3, 6), (6, 7), (7, 8), (7, 8)]


def test_added_tokens_that_are_no_marks_are_read_in_a_text_and_are_no_symbols(tmp_path):
    folder = folder_of(tmp_path, vocab_size=450)
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_tokens(["      ", AddedToken("<think>", special=True)])
    made.save(str(folder / "tokenizer.json"))
    tokenizer = read_tokenizer(folder)
    assert tokenizer.encode("a      b").tolist() == [97, 400, 98]
    assert tokenizer.decode_bytes([400, 401]) == b" " * 6
    assert 401 not in tokenizer.encode("<think>")
    assert tokenizer.symbols.tolist() == list(range(399))


@given(TEXTS)
@example(" naïve  über 😀\n")
def test_spans_are_in_order_and_leave_out_white_space_alone(gpt2, text):
    ids, spans = encode_with_spans(gpt2, text)
    assert ids.tolist() == gpt2.encode(text).tolist()
    reached = 0
    for i, (begin, end) in zip(ids, spans, strict=True):
        assert text[reached:begin].strip() == ""
        assert begin < end
        assert not text[begin].isspace() or text[begin:end].isspace()
        assert gpt2.decode_bytes([i]) in text[min(reached, begin) : end].encode()
        reached = end
    assert reached == len(text)


def test_what_would_change_a_text_is_switched_off(tmp_path):
    model = json.loads(folder_of(tmp_path).joinpath("tokenizer.json").read_text())["model"]
    ours = {
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 900}, "direction": "Right", "pad_to_multiple_of": None}
        | {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"},
        "model": model | {"dropout": 0.5},
    }
    tokenizer = read_tokenizer(folder_of(tmp_path, ours))
    for text in (TEXT, "a"):
        assert tokenizer.encode(text).tolist() == TRAINED.encode(text).tolist()


def test_a_folder_that_takes_spaces_out_of_spans_leaves_those_of_white_space(tmp_path):
    takes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = read_tokenizer(folder_of(tmp_path, {"post_processor": takes}))
    assert encode_with_spans(tokenizer, "is  \n")[1] == encode_with_spans(TRAINED, "is  \n")[1]


# BOS


@pytest.mark.parametrize(
    ("files", "bos"),
    [
        ({"tokenizer_config": {"bos_token": "<|endoftext|>"}}, 399),
        (
            {"tokenizer_config": {"bos_token": {"content": "<|endoftext|>"}}, "config": {"bos_token_id": 3}},
            399,
        ),
        ({"special_tokens_map": {"bos_token": "<|endoftext|>"}, "tokenizer_config": {"a": 1}}, 399),
        ({"special_tokens_map": {"bos_token": {"content": "<|endoftext|>"}}}, 399),
        ({"config": {"bos_token_id": 399}}, 399),
        ({"config": {"bos_token_id": 399}, "tokenizer_config": {"bos_token": None}}, None),
        ({"config": {"bos_token_id": 1}}, None),  # a default: the id is an ordinary token
        ({"config": {"bos_token_id": None}}, None),
        ({}, None),
    ],
)
def test_bos_is_what_the_files_say(files, bos, tmp_path):
    tokenizer = read_tokenizer(folder_of(tmp_path, **files))
    assert tokenizer.bos == bos
    assert 399 not in tokenizer.encode("<|endoftext|>")
    without = read_tokenizer(tmp_path, bos=False)
    assert (without.bos, without.symbols.tolist()) == (None, tokenizer.symbols.tolist())
    assert without.decode([97, 399, 98]) == "ab"


def test_a_bos_that_is_an_ordinary_token_becomes_a_mark(tmp_path):
    folder = folder_of(tmp_path, tokenizer_config={"bos_token": "!"})
    tokenizer = read_tokenizer(folder)
    assert tokenizer.bos == 33
    assert 33 not in tokenizer.symbols
    assert tokenizer.decode_bytes([97, 33]) == b"a"


# Rows


def test_the_model_may_have_more_rows_than_there_are_tokens_and_not_fewer(tmp_path):
    tokenizer = read_tokenizer(folder_of(tmp_path, vocab_size=448))
    assert (tokenizer.vocab_size, len(tokenizer.symbols)) == (448, 399)
    assert tokenizer.decode([97, 447]) == "a"
    assert tokenizer.decode_bytes([97, 447]) == b"a"
    folder_of(tmp_path, vocab_size=399)  # BOS, a mark, has no row, nor does it need one
    assert read_tokenizer(tmp_path, bos=False).vocab_size == 399
    folder_of(tmp_path, vocab_size=398)
    with pytest.raises(UserError, match="ids up to 398, the model 398 tokens"):
        read_tokenizer(tmp_path)


# GGUF


def encoding(pattern: str) -> tiktoken.Encoding:
    ranks = TRAINED.encoding._mergeable_ranks
    return tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
OF = {"gpt-2": GPT2, "smollm": GPT2, "llama-bpe": LLAMA_3}


@pytest.fixture(scope="module", params=OF)
def of_gguf(request, tmp_path_factory):
    """One from a GGUF file; the same by tiktoken, whose ids are lower by one; whether digits stand alone."""
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", TRAINED.encoding, pre=request.param)
    return read_tokenizer(path), encoding(OF[request.param]), request.param == "smollm"


@given(TEXTS)
@example("naïve 1234 ١٢ ² Ⅷ")
def test_a_gguf_file_gives_the_ids_of_tiktoken(of_gguf, text):
    tokenizer, other, digits_alone = of_gguf
    parts = regex.split(r"(\p{N})", text) if digits_alone else [text]
    ids = [i for part in parts for i in other.encode_ordinary(part)]
    assert (tokenizer.encode(text).astype(int) - 1).tolist() == ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_gguf_file_says_which_tokens_are_text(of_gguf):
    tokenizer = of_gguf[0]
    assert (tokenizer.vocab_size, tokenizer.bos) == (402, 0)
    assert tokenizer.symbols.tolist() == list(range(1, 400))
    assert tokenizer.encode("<tool>").tolist() == [400]
    assert tokenizer.decode_bytes([0, 400, 401]) == b"<tool>"


@pytest.mark.parametrize(
    ("model", "pre", "said"),
    [
        ("gpt2", "default", "model gpt2 with pre default"),
        ("gpt2", None, "model gpt2 with pre default"),
        ("gpt2", "qwen2", "model gpt2 with pre qwen2"),
        ("llama", "default", "model llama with pre default"),
        ("llama", "gpt-2", "model llama"),
    ],
)
def test_a_gguf_file_with_another_tokenizer_is_refused_by_its_name(model, pre, said, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", TRAINED.encoding, model, pre)
    with pytest.raises(UserError, match=f"{said}.* give the Hugging Face folder"):
        read_tokenizer(path)


@pytest.mark.parametrize("pre", ["default", None])
def test_the_default_of_a_gpt2_is_gpt2s(pre, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", TRAINED.encoding, "gpt2", pre, architecture="gpt2", bos=None)
    tokenizer = read_tokenizer(path)
    assert tokenizer.bos is None
    assert tokenizer.decode(tokenizer.encode("1234 is")) == "1234 is"


def test_only_llama_3_takes_a_piece_that_is_a_token_whole(tmp_path):
    ranks = TRAINED.encoding._mergeable_ranks | {b"zqzq": 399}
    made = tiktoken.Encoding("test", pat_str=GPT2, mergeable_ranks=ranks, special_tokens={})
    for pre, count in (("llama-bpe", 1), ("gpt-2", 4)):
        tokenizer = read_tokenizer(write_gguf(tmp_path / f"{pre}.gguf", made, pre=pre))
        assert len(tokenizer.encode("zqzq")) == count


def test_bos_of_a_gguf_file_is_a_mark_whatever_its_type(tmp_path):
    tokenizer = read_tokenizer(write_gguf(tmp_path / "m.gguf", TRAINED.encoding, bos=34))
    assert tokenizer.bos == 34
    assert 34 not in tokenizer.symbols


@pytest.mark.skipif(not REAL, reason="SMOLLM2_GGUF names no file")
def test_smollm2_is_read_from_its_file():
    tokenizer = read_tokenizer(Path(REAL))
    assert (tokenizer.vocab_size, tokenizer.bos) == (49152, 1)
    assert tokenizer.encode("Hello world").tolist() == [19556, 905]
    assert [tokenizer.decode([i]) for i in tokenizer.encode("in 1984")] == ["in", " ", "1", "9", "8", "4"]
    assert not {*range(17)} & {*tokenizer.encode("<|im_start|>user<|im_end|><|endoftext|>").tolist()}
    text = load_text("shakespeare", None)
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()


def test_ctrl_c_is_no_refusal(gpt2, monkeypatch):
    class Interrupted:
        pre_tokenizer = None

        def encode(self, *rest, **options):
            raise KeyboardInterrupt

    monkeypatch.setattr(gpt2, "served", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        gpt2.encode("text")


# EOS


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({"tokenizer_config": {"eos_token": "<|end|>", "bos_token": "<|endoftext|>"}}, 400),
        ({"tokenizer_config": {"eos_token": {"content": "<|end|>"}}}, 400),
        ({"special_tokens_map": {"eos_token": "<|end|>"}, "config": {"eos_token_id": 399}}, 400),
        ({"config": {"eos_token_id": 400}}, 400),
        ({"config": {"eos_token_id": [400, 399]}}, None),
        ({"config": {"eos_token_id": 1}}, None),  # an ordinary token
        ({"config": {"eos_token_id": 401}}, None),  # an added one that is no mark
        ({"config": {"eos_token_id": 400}, "tokenizer_config": {"eos_token": None}}, None),
        ({"tokenizer_config": {"eos_token": "<none>"}}, None),
        ({}, None),
    ],
    ids=str,
)
def test_eos_is_what_the_files_say_and_goes_with_the_run(files, eos, tmp_path):
    folder = folder_of(tmp_path, vocab_size=450)
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(["<|end|>"])
    made.add_tokens(["<plain>"])
    files["config"] = {"vocab_size": 450, **files.get("config", {})}
    write(folder, tokenizer=json.loads(made.to_str()), **files)
    tokenizer = read_tokenizer(folder)
    assert tokenizer.eos == load(tokenizer.to_json()).eos == eos
    assert tokenizer.symbols.tolist() == list(range(399))
    own = load(tokenizer.to_json() | {"eos_id": "<|end|>"})
    assert own.eos is None
    files = to_published(tokenizer)
    assert files["tokenizer_config.json"].get("eos_token") == (
        "<|end|>" if eos else "<|endoftext|>" if tokenizer.bos else None
    )


# Saved with a run


@pytest.mark.parametrize("bos", [True, False])
def test_a_saved_tokenizer_is_the_same_tokenizer(bos, tmp_path):
    folder = folder_of(tmp_path, vocab_size=448, tokenizer_config={"bos_token": "<|endoftext|>"})
    tokenizer = read_tokenizer(folder, bos)
    again = load(tokenizer.to_json())
    assert again.to_json() == tokenizer.to_json()
    assert (again.kind, again.vocab_size, again.bos) == ("hf", 448, 399 if bos else None)
    assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
    assert again.symbols.tolist() == tokenizer.symbols.tolist()


# In a run


def test_it_comes_with_a_model_and_is_not_made():
    config = Data(tokenizer="hf")
    assert vocab_size_of(config) is None
    with pytest.raises(UserError, match=r"comes with model\.init_from"):
        make_tokenizer(config, [TEXT])


@pytest.mark.usefixtures("home")
def test_each_tokenizer_has_prepared_tokens_of_its_own(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join([TEXT] * 20))
    about = {"source": "hf", "path": str(tmp_path / "text.txt"), "cache_dir": str(tmp_path / "cache")}
    config = Data(**about, tokenizer="hf", val_fraction=0.5, new_document=".*times")
    folder_of(tmp_path / "a", tokenizer_config={"bos_token": "<|endoftext|>"})
    one = read_tokenizer(tmp_path / "a")
    export(tmp_path / "b", train_bpe([TEXT.upper()], 400, bos=True))
    other = read_tokenizer(tmp_path / "b")
    folders = {str(prepared(config, 16, tokenizer)) for tokenizer in (one, other, one)}
    assert len(folders) == 2
    for folder in folders:
        assert load_tokenizer(Path(folder) / "tokenizer.json").to_json() in (one.to_json(), other.to_json())
