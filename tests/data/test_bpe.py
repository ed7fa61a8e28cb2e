"""Byte-pair encodings: the same ids as tiktoken's and rustbpe's own, and quick to say what is missing."""

import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import rustbpe
import tiktoken
import tiktoken.load
import tiktoken_ext.openai_public as public
import torch
from hypothesis import given
from hypothesis import strategies as st

from analysis.probes import make_probes
from configs import UserError
from configs.schema import Config, Data, Tokens
from data import bpe
from data.bpe import NAMED, PATTERN, BytePairTokenizer, named, train_bpe, urls
from data.loading import load_source
from data.tokenizers import vocab_size_of
from tests.data.gpt2_files import gpt2_cache
from tests.data.threads import turns_during

ROOT = Path(__file__).parents[2]
TEXT = "".join(f"{i} times {i} is {i * i}, said the naïve über-reader.\r\n" for i in range(200))
TEXTS = st.lists(
    st.text()
    | st.sampled_from(["<|endoftext|>", "<|fim_prefix|>", "times", " is", "\r\n", "\ufeff", "\0", "naïve"])
).map("".join)
TRAINED = train_bpe([TEXT], 400, bos=True)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiktoken")
    gpt2_cache(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiktoken.registry, "ENCODINGS", {})
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        yield named("gpt2", bos=True)


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """No encoding has been read, the cache is empty, and a closed port is the way to the network."""
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: refuses, and nobody else gets it
        proxy(monkeypatch, closed.getsockname()[1])
        yield tmp_path / "cache"


def proxy(monkeypatch, port: int) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


def refused(name: str) -> str:
    with pytest.raises(UserError) as caught:
        named(name, bos=True)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in (name, *urls(name), "TIKTOKEN_CACHE_DIR=DIR"))
    return message


# GPT-2


def test_known_texts_have_the_ids_that_gpt2_was_trained_on(gpt2):
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.encode("Hello, world!\n").tolist() == [15496, 11, 995, 0, 198]
    assert (gpt2.bos, gpt2.vocab_size) == (50256, 50257)


@given(text=TEXTS)
def test_ids_are_those_of_tiktoken_and_marks_are_text(gpt2, text):
    ids = gpt2.encode(text)
    assert ids.dtype == np.uint32
    assert ids.tolist() == gpt2.encoding.encode_ordinary(text)
    assert gpt2.bos not in ids
    assert gpt2.decode(ids) == text


def test_half_a_surrogate_pair_becomes_a_replacement_character_and_a_whole_one_its_character(gpt2):
    for tokenizer in (gpt2, TRAINED):
        assert tokenizer.decode(tokenizer.encode("a\ud800b\udc00")) == "a\ufffdb\ufffd"
        assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "\N{GRINNING FACE}"


def test_other_threads_go_on_while_a_long_text_is_encoded(gpt2):
    assert turns_during(lambda: gpt2.encode(TEXT * 500)) > 1000  # a few, had it waited for the interpreter


def test_without_bos_the_vocabulary_is_the_same_and_the_mark_no_text(gpt2):
    without = BytePairTokenizer(gpt2.encoding, bos=False)
    assert (without.bos, without.vocab_size) == (None, 50257)
    assert without.symbols.tolist() == gpt2.symbols.tolist() == list(range(50256))
    assert without.decode([15496, 50256, 995]) == "Hello world"


@pytest.mark.parametrize("name", NAMED)
def test_the_vocabulary_without_files_is_that_of_tiktoken_and_so_are_the_addresses(name, monkeypatch):
    asked = []
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda url, expected_hash: asked.append(url))
    monkeypatch.setattr(
        public,
        "data_gym_to_mergeable_bpe_ranks",
        lambda vocab_bpe_file, encoder_json_file, **hashes: asked.extend([vocab_bpe_file, encoder_json_file]),
    )
    found = public.ENCODING_CONSTRUCTORS[name]()
    size = found.get("explicit_n_vocab") or max(found["special_tokens"].values()) + 1
    assert vocab_size_of(Data(tokenizer=name)) == size
    assert asked == urls(name)
    assert bpe.BOS in found["special_tokens"]


def test_every_encoding_of_the_configuration_has_a_size():
    assert {*NAMED} == {*get_args(Tokens)} - {"char", "byte", "bpe", "hf"}


# Trained on a corpus


@given(TEXTS)
def test_ids_are_those_of_the_trainer_itself(text):
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator([TEXT], 399, pattern=PATTERN)
    assert TRAINED.encode(text).tolist() == trainer.encode(text)
    assert TRAINED.decode(TRAINED.encode(text)) == text


def test_the_pattern_is_the_one_that_rustbpe_documents_as_its_default():
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator([TEXT], 399)
    assert trainer.get_pattern() == PATTERN


def test_no_token_crosses_a_word():
    for token in TRAINED.symbols[256:]:
        assert " " not in TRAINED.decode([token])[1:]


@pytest.mark.parametrize("bos", [True, False])
def test_bos_is_one_of_the_tokens_asked_for(bos):
    tokenizer = train_bpe([TEXT], 300, bos)
    assert tokenizer.vocab_size == 300
    assert tokenizer.symbols.tolist() == list(range(300 - bos))
    assert tokenizer.bos == (299 if bos else None)


def test_training_gives_the_same_tokens_each_time_and_others_for_another_text():
    assert train_bpe([TEXT], 400, bos=True).to_json() == TRAINED.to_json()
    assert train_bpe([TEXT.upper()], 400, bos=True).to_json() != TRAINED.to_json()


@given(st.lists(st.text("ab ", max_size=30)), st.booleans())
def test_too_little_text_is_refused_with_both_numbers(texts, bos):
    with pytest.raises(UserError, match=r"vocab_size 1000: .* gives (2[0-9]{2}|[3-9][0-9]{2}) ") as caught:
        train_bpe(texts, 1000, bos)
    most = int(str(caught.value).split("gives ")[1].split()[0])
    assert train_bpe(texts, most, bos).vocab_size == most


# Files that are not at hand


def test_without_files_and_network_it_is_told_at_once_what_to_do(nowhere):
    began = time.perf_counter()
    assert str(nowhere) in refused("cl100k_base")
    assert time.perf_counter() - began < 5
    refused("gpt2")


def test_a_network_that_accepts_and_stays_silent_is_not_waited_for(nowhere, monkeypatch):
    monkeypatch.setattr(bpe, "PATIENCE", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        proxy(monkeypatch, silent.getsockname()[1])
        assert "no answer in 0.3 s" in refused("o200k_base")
    for thread in threading.enumerate():  # the closed socket ends it
        if thread.name == "tiktoken o200k_base":
            thread.join(10)
            assert not thread.is_alive()


def test_a_thread_that_still_waits_does_not_keep_the_process(tmp_path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = os.environ | {"HTTPS_PROXY": address, "TIKTOKEN_CACHE_DIR": str(tmp_path)}
        environment = {name: environment[name] for name in environment if "no_proxy" not in name.lower()}
        code = "from data import bpe; bpe.PATIENCE = 0.3; bpe.named('gpt2', True)"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert "no answer in 0.3 s" in done.stderr


def test_a_damaged_file_is_told_like_a_missing_one(nowhere):
    gpt2_cache(nowhere)
    damaged = nowhere / hashlib.sha1(urls("gpt2")[0].encode()).hexdigest()
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert "no intact copy" in refused("gpt2")


def test_something_else_in_place_of_the_file_is_refused(nowhere, monkeypatch):
    monkeypatch.setattr(tiktoken.load, "read_file", lambda url: b"<html>\nplease log in")
    assert "Hash mismatch" in refused("cl100k_base")


@pytest.mark.parametrize("space", [" ", "\t", "\u3000", "\n "])
def test_white_space_without_end_is_encoded_and_trained_on(space):
    text = "a" + space * 1_000_000 + "b"
    tokenizer = train_bpe([text, text], 258, bos=True)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())


# Encodings in which BOS is not the last id


@pytest.fixture
def gaps(monkeypatch):
    """Ids as wide as in cl100k_base: the bytes from 70,000 on, BOS behind a gap, another mark at the end."""
    marks = {bpe.BOS: 100257, "<|endofprompt|>": 100276}
    ranks = {bytes([byte]): 70_000 + byte for byte in range(256)}
    encoding = tiktoken.Encoding("cl100k_base", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=marks)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {"cl100k_base": encoding})
    return BytePairTokenizer(encoding, bos=True)


def source_of(folder: Path, **data):
    (folder / "text.txt").write_bytes(TEXT.encode())
    data = {"tokenizer": "cl100k_base", "cache_dir": str(folder / "cache")} | data
    if data["source"] != "repeats":
        data["path"] = str(folder / "text.txt")
    return load_source(Config.model_validate({"data": data, "train": {"batch_size": 64}}))


def test_ids_without_text_are_no_symbols_and_decode_to_nothing(gaps):
    assert (gaps.bos, gaps.vocab_size) == (100257, 100277)
    assert gaps.symbols.tolist() == list(range(70_000, 70_256))
    assert gaps.decode([0, 70_097, gaps.bos, 100_256, 100_276, 70_098]) == "ab"


def test_ids_above_65535_are_kept_on_disk(gaps, tmp_path):
    source_of(tmp_path, source="text")
    (folder,) = (tmp_path / "cache").iterdir()
    ids = np.concatenate([np.fromfile(folder / f"{part}-00000.bin", np.uint32) for part in ("train", "val")])
    assert (ids[ids != gaps.bos] - 70_000).astype(np.uint8).tobytes() == TEXT.encode()


@pytest.mark.parametrize("source", ["repeats", "text"])
def test_windows_and_probes_hold_text_behind_bos(source, gaps, tmp_path):
    made = source_of(tmp_path, source=source)
    probes = make_probes(made, 64, sequences=8, seed=1)
    behind_bos = [probe.tokens_BT for name, probe in probes.items() if name != "text_without_bos"]
    for rows in (made.batch(1).inputs_BT, *behind_bos):
        assert (rows[:, 0] == gaps.bos).all()
        assert torch.isin(rows[:, 1:], torch.from_numpy(gaps.symbols)).all()
    if source == "repeats":
        assert made.symbols.tolist() == gaps.symbols.tolist()
