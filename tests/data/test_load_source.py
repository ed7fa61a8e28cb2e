"""One tokenizer for all sources of a run: made of the training text, or taken over from another run."""

import pytest
import tiktoken
import torch

from configs import UserError
from configs.schema import Config
from data.bpe import train_bpe
from data.loading import load_source
from data.tokenizers import ByteTokenizer, CharTokenizer
from tests.data.gpt2_files import gpt2_cache
from tests.data.made import ids_of

TEXT = "".join(f"{i} times {i} is {i * i}, said the naïve über-reader.\n" for i in range(200))
BPE = {"tokenizer": "bpe", "vocab_size": 300}
MIXED = [{"until": 2, "weights": {"repeats": 1}}, {"weights": {"text": 1, "repeats": 1}}]


@pytest.fixture
def load(tmp_path):
    def load_text(text=TEXT, taken_over=None, context=32, **data):
        path = tmp_path / "text.txt"
        path.write_text(text, encoding="utf-8")
        places = {"cache_dir": str(tmp_path / "cache")}
        if data.get("source") != "shakespeare":
            places |= {"source": "text", "path": str(path)}
        values = {"data": places | data, "model": {"context_length": context}, "train": {"batch_size": 8}}
        return load_source(Config.model_validate(values), taken_over)

    return load_text


@pytest.fixture
def gpt2_at_hand(tmp_path, monkeypatch):
    gpt2_cache(tmp_path / "tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})


def test_validation_text_has_no_say_in_the_encoding(load):
    cut = len(TEXT) * 3 // 4
    share = 1 - cut / len(TEXT)
    kept, changed, other = (
        load(text, val_fraction=share, **BPE).tokenizer.to_json()
        for text in (TEXT, TEXT[:cut] + TEXT[cut:].upper(), TEXT.upper())
    )
    assert kept == changed
    assert kept != other


@pytest.mark.usefixtures("gpt2_at_hand")
@pytest.mark.parametrize("source", ["text", "shakespeare"])
@pytest.mark.parametrize("data", [BPE, {"tokenizer": "gpt2"}], ids=["bpe", "gpt2"])
def test_windows_and_bits_per_byte_are_those_of_the_text(source, data, load):
    made = load(source=source, **data)
    own, tokenizer = made.sources[source], made.tokenizer
    train, val = (tokenizer.decode_bytes(ids_of(part)) for part in (own.train, own.val))
    if source == "text":
        assert (train + val).decode() == TEXT
    assert made.bytes_per_token == pytest.approx(len(val) / (len(own.val) - 1))  # BOS is no target
    for row in made.batch(1).inputs_BT:
        assert row[0] == tokenizer.bos
        assert tokenizer.decode_bytes(row) in train


@pytest.mark.usefixtures("gpt2_at_hand")
@pytest.mark.parametrize("data", [BPE, {"tokenizer": "gpt2"}], ids=["bpe", "gpt2"])
def test_what_is_drawn_beside_a_text_has_only_tokens_of_its_training_part(data, load):
    made = load(stages=MIXED, **data)
    read = {*ids_of(made.sources["text"].train).tolist()}
    assert made.symbols.tolist() == sorted(read - {made.tokenizer.bos})
    for row in made.batch(1).inputs_BT:
        assert {*row.tolist()} <= read


@pytest.mark.usefixtures("gpt2_at_hand")
def test_where_there_is_no_text_a_named_encoding_gives_all_its_tokens():
    made = load_source(Config.model_validate({"data": {"source": "repeats", "tokenizer": "gpt2"}}))
    assert torch.equal(made.symbols, torch.arange(50256))
    assert (made.batch(1).inputs_BT[:, 0] == 50256).all()


@pytest.mark.usefixtures("gpt2_at_hand")
def test_a_table_of_all_pairs_of_gpt2s_tokens_is_refused():
    with pytest.raises(UserError, match="up to 4096 distinct tokens; here are 50256"):
        load_source(Config.model_validate({"data": {"source": "backcopy", "tokenizer": "gpt2"}}))


@pytest.mark.parametrize(
    ("tokenizer", "data"),
    [
        (CharTokenizer("".join(sorted({*TEXT, "!", "Z"})), True), {}),
        (ByteTokenizer(True), {"tokenizer": "byte"}),
        (train_bpe([TEXT.upper()], 300, True), BPE),
    ],
    ids=["char", "byte", "bpe"],
)
def test_a_tokenizer_that_is_taken_over_is_the_one_that_encodes(tokenizer, data, load):
    made = load(taken_over=tokenizer, stages=MIXED, **data)
    own = made.sources["text"]
    assert made.tokenizer is tokenizer
    assert tokenizer.decode([*ids_of(own.train), *ids_of(own.val)]) == TEXT


@pytest.mark.parametrize(
    ("tokenizer", "data", "said"),
    [
        (CharTokenizer("ab", False), {}, "data.tokenizer char, data.bos false, 2 tokens"),
        (ByteTokenizer(True), {}, "data.tokenizer byte, data.bos true, 257 tokens"),
        (ByteTokenizer(False), {"tokenizer": "byte"}, "data.tokenizer byte, data.bos false, 256 tokens"),
        (train_bpe([TEXT], 310, True), BPE, "data.tokenizer bpe, data.bos true, 310 tokens"),
    ],
)
def test_one_that_the_configuration_does_not_tell_of_is_refused(tokenizer, data, said, load):
    with pytest.raises(UserError, match=said):
        load(taken_over=tokenizer, **data)


@pytest.mark.parametrize("size", [1, 2**24])
def test_characters_that_the_one_taken_over_does_not_know_are_named_and_leave_nothing(
    size, load, tmp_path, monkeypatch
):
    """Also where they stand behind a training part that is large enough to be saved by itself."""
    monkeypatch.setattr("data.preparation.BATCH", size)
    monkeypatch.setattr("data.writer.SAVE_EVERY", size)
    known = CharTokenizer("".join(sorted({*TEXT})), True)
    with pytest.raises(UserError, match="does not know: 'é' 'þ'"):
        load(TEXT + "þé", known)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("context", "named"), [(100, "text.txt"), (200_000, "shakespeare")])
def test_of_two_texts_the_one_that_is_too_short_is_named(context, named, load):
    """Neither is so by the other's name: the plays have about 1,100,000 characters."""
    stages = [{"weights": {"shakespeare": 1, "text": 1}}]
    text = "abc" * (200 if named == "text.txt" else 2_000_000)
    with pytest.raises(UserError, match=rf"the val part of \S*{named} has"):
        load(text, stages=stages, context=context, tokenizer="byte")
