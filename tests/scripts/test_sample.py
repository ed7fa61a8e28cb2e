"""`python -m scripts.sample`: what it prints, what it refuses, and how it ends."""

import io
import json
import os
import subprocess
import sys
from codecs import iterdecode
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError
from data.tokenizers import ByteTokenizer, CharTokenizer
from model.layers import Linear
from scripts.sample import main
from tests.configs.test_cli import PROBE
from tests.runs.tiny import ROOT, start

EURO = "€".encode()


def make_run(folder: Path, tokenizer: str, bos: bool) -> str:
    data, off = {"tokenizer": tokenizer, "bos": bos}, {"every": 0}
    if tokenizer == "bpe":
        data["vocab_size"] = 280
    return str(start(folder, data=data, train={"steps": 5}, eval=off, probe=off))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, str]:
    """Context 17."""
    kinds = {"bpe": ("bpe", True), "char": ("char", True), "byte": ("byte", True), "no bos": ("byte", False)}
    return {name: make_run(tmp_path_factory.mktemp("run"), *kind) for name, kind in kinds.items()}


@pytest.fixture
def say(capfd):
    """What the command prints on stdout; nothing else may appear."""

    def run(*argv: str) -> str:
        main([*map(str, argv)])
        printed = capfd.readouterr()
        assert printed.err == ""
        return printed.out

    return run


def refused(capfd, *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*argv])
    assert caught.value.code == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err


# What it prints


def test_the_prompt_then_as_many_characters_as_asked_then_the_end_of_the_line(runs, say):
    printed = say(runs["char"], "--prompt", "and 2 is", "--tokens", "30")
    assert printed.startswith("and 2 is")
    assert printed.endswith("\n")
    assert len(printed) == len("and 2 is") + 30 + 1


@pytest.mark.parametrize("more", [["--cache", "none"], ["--top_p", "1"], ["--top_k", "300"], ["--seed", "3"]])
def test_a_seed_decides_the_text_and_what_excludes_nothing_changes_nothing(more, runs, say):
    argv = [runs["char"], "--prompt", "1", "--tokens", "60", "--seed", "3"]
    assert say(*argv, *more) == say(*argv)
    assert say(*argv, "--seed", "4") != say(*argv)


def test_every_option_reaches_the_text(runs, say):
    argv = [runs["char"], "--prompt", "1", "--tokens", "40"]
    plain, greedy = say(*argv), say(*argv, "--temperature", "0")
    assert greedy != plain
    assert greedy == say(*argv, "--top_k", "1") == say(*argv, "--top_p", "1e-9")
    assert greedy != say(*argv, "--temperature", "0", "--checkpoint", "0")
    assert say(*argv, "--temperature", "0", "--checkpoint", "5") == greedy


def test_the_cache_is_used_unless_it_is_switched_off(runs, say, monkeypatch):
    monkeypatch.delattr("model.cache.KVCache")
    say(runs["char"], "--tokens", "2", "--cache", "none")
    with pytest.raises(NameError):
        say(runs["char"], "--tokens", "2")


def test_with_a_cache_that_rolls_a_prompt_of_any_length_is_read_and_text_goes_on(runs, say):
    prompt = "7 and 2 is 8 and 1 is 9"
    printed = say(runs["char"], "--prompt", prompt, "--tokens", "60", "--cache", "window:12+2")
    assert printed.startswith(prompt)
    assert len(printed) == len(prompt) + 60 + 1


def test_a_run_in_bf16_is_read_in_float32(tmp_path, say, capfd, monkeypatch):
    used = set()
    run = start(tmp_path, train={"steps": 1, "precision": "bf16"}, eval={"every": 0}, probe={"every": 0})
    capfd.readouterr()
    forward = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: used.add(self.compute_dtype) or forward(self, x))
    say(run, "--tokens", "2")
    assert used == {torch.float32}


@pytest.mark.parametrize(
    "prompt",
    [
        "1+1=",
        "-x",
        "--tokens",
        "-",
        "--",
        "--prompt=x",
        "a=b -c",
        "<|endoftext|>",
        "<s>",
        "a\nb\n",
        "¿ñ€?",
        "a " * 4,
    ],
)
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("run", "longest"), [("byte", 1), ("bpe", 10)])
def test_a_prompt_is_kept_whole(prompt, joined, run, longest, runs, say):
    words = [f"--prompt={prompt}"] if joined else ["--prompt", prompt]
    printed = say(runs[run], *words, "--tokens", "5")
    assert printed.startswith(prompt)
    assert 1 <= len(printed.removeprefix(prompt)) - 1 <= 5 * longest
    assert printed == say(runs[run], "--tokens", "5", *words)


def test_without_a_prompt_the_text_starts_from_bos(runs, say):
    printed = say(runs["char"], "--tokens", "30")
    assert len(printed) == 31
    assert printed == say(runs["char"], "--tokens", "30", "--prompt", "")


def test_of_a_long_prompt_the_last_half_window_is_read_and_a_line_says_so(runs, say, capfd):
    argv = ["--tokens", "40", "--prompt"]
    prompt = "7 and 2 is 8 and 1 is 9"
    main([runs["char"], *argv, prompt])
    printed = capfd.readouterr()
    assert printed.err == "warning: the prompt has 23 tokens: the context is 17, the last 8 are read\n"
    assert printed.out.removeprefix(prompt) == say(runs["char"], *argv, prompt[-8:]).removeprefix(prompt[-8:])
    say(runs["char"], *argv, prompt[:16])  # with BOS it just fits: nothing to say
    say(runs["no bos"], *argv, prompt[:17])
    main([runs["char"], *argv, prompt[:17]])
    assert "17 tokens" in capfd.readouterr().err


class Screen(io.StringIO):
    """Shows what has been flushed."""

    shown = ""

    def flush(self) -> None:
        self.shown = self.getvalue()


def show(run: str, ids: list[int]) -> tuple[list[str], str]:
    """What the screen shows when each byte of `ids` has just been drawn, and at the end."""
    screen, shown = Screen(), []

    def fake(*arguments, **options):
        for i in ids:
            yield i
            shown.append(screen.shown)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model.generate.generate", fake)
        patch.setattr(sys, "stdout", screen)
        main([run, "--prompt", "é"])
    return shown, screen.getvalue()


def test_text_is_shown_as_it_is_drawn_and_characters_come_out_whole(runs):
    shown, end = show(runs["byte"], [97, *EURO, 98])
    assert shown == ["éa", "éa", "éa", "éa€", "éa€b"]
    assert end == "éa€b\n"


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([0xFF, 97], "\ufffda"),
        ([0xE2, 0x82, 97], "\ufffda"),
        ([0xE2, 0x82], "\ufffd"),
        ([0x80, 0x80, *EURO], "\ufffd\ufffd€"),
        ([0xE2, 0x82, *EURO], "\ufffd€"),
    ],
)
def test_broken_characters_are_shown_as_such(ids, expected, runs):
    shown, end = show(runs["byte"], ids)
    assert end == f"é{expected}\n"
    assert shown[-1] == end[:-1] or ids == [0xE2, 0x82]


@given(st.lists(st.integers(0, 255) | st.sampled_from(EURO), max_size=30))
def test_the_stream_adds_up_to_the_decoded_text(ids):
    """Straight through the decoder of the command; a model is not needed for that."""
    tokenizer = ByteTokenizer(bos=True)
    pieces = iterdecode((tokenizer.decode_bytes([i]) for i in ids), "utf-8", "replace")
    assert "".join(pieces) == tokenizer.decode(ids)


# What it refuses


@pytest.mark.parametrize(
    "argv",
    [
        ["--tokens", "0"],
        ["--tokens", "-3"],
        ["--tokens", "2.5"],
        ["--temperature", "-0.1"],
        ["--temperature", "nan"],
        ["--temperature", "inf"],
        ["--top_p", "0"],
        ["--top_p", "1.01"],
        ["--top_p", "nan"],
        ["--top_k", "0"],
        ["--checkpoint", "3"],
        ["--cache", "some"],
        ["--cache", "window"],
        ["--cache", "window:0"],
        ["--cache", "window:8+"],
        ["--cache", "window:-1+2"],
        ["--cache", f"window:{'9' * 5000}"],
        ["--cache", "window:14+4", "--prompt", "is"],
        ["--prompt"],
        ["--prompt", "a\udcff"],
        ["--top", "3"],
        ["more words"],
    ],
)
def test_a_wrong_request_is_one_line_that_names_it(argv, runs, capfd):
    message = refused(capfd, runs["byte"], *argv)
    assert argv[0].removeprefix("--") in message


def test_characters_that_the_model_has_never_seen_are_listed_beside_those_it_knows(runs, capfd):
    message = refused(capfd, runs["char"], "--prompt", "is é or\tÿ?")
    assert all(f"{character!r}" in message for character in "éÿ\t?")
    characters = json.loads((Path(runs["char"]) / "tokenizer.json").read_text())["characters"]
    assert repr(characters) in message


def test_a_long_alphabet_is_shown_in_part():
    letters = "".join(map(chr, range(0x4E00, 0x5E00)))
    with pytest.raises(UserError, match="'é'") as caught:
        CharTokenizer(letters, bos=True).encode("é")
    assert letters[:100] in str(caught.value)
    assert len(str(caught.value)) < 400


def test_without_bos_an_empty_prompt_is_refused(runs, capfd):
    assert "data.bos" in refused(capfd, runs["no bos"], "--tokens", "5")


# The process


def shell(*argv: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PROBE, str(ROOT / "scripts" / "sample.py"), *argv]
    environment = {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_help_comes_without_the_slow_imports():
    done = shell("--help")
    assert done.stdout.endswith("exit 0 []\n")
    options = ("--prompt", "--tokens", "--seed", "--temperature", "--top_k", "--top_p", "--checkpoint")
    assert all(option in done.stdout for option in (*options, "--cache", "run folder"))


@pytest.mark.parametrize("argv", [["{tmp}"], ["{run}", "--top_p", "2"], []])
def test_so_does_a_refusal(argv, runs, tmp_path):
    done = shell(*(word.format(tmp=tmp_path, run=runs["char"]) for word in argv))
    assert done.stdout == "\nexit 2 []\n"
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_text_arrives_while_it_is_drawn_and_a_reader_who_has_enough_ends_it_quietly(runs):
    """A text of a billion tokens ends only because the pipe does."""
    command = [sys.executable, "-m", "scripts.sample", runs["byte"], "--prompt", "-€", "--tokens", str(10**9)]
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=buffered, stdout=pipe, stderr=pipe) as process:
        assert process.stdout.read(100).startswith("-€".encode())
        process.stdout.close()
        process.wait(timeout=60)
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize(("into", "code"), [("/dev/null", 0), ("/dev/full", 1)])
def test_a_terminal_without_the_characters_and_a_full_disk_are_no_tracebacks(runs, into, code):
    if not Path(into).exists():
        pytest.skip(f"no {into} here")
    command = [sys.executable, "-m", "scripts.sample", runs["byte"], "--prompt", "1€", "--tokens", "30"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    with open(into, "w") as out:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == code
    assert "Traceback" not in done.stderr
