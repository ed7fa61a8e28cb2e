"""Small files that ask for much: refused in a line, in little memory, without waiting."""

import gzip
import hashlib
import json
import os
import shutil
import struct
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from configs import LONGEST_MESSAGE, UserError
from configs.cli import load_config, validate
from configs.files import LARGE, SMALL, read_json
from data.hub import Corpus
from data.tokenizers import load_tokenizer
from data.treebank import MOST_BYTES, read_treebank
from model.interop import to_published
from model.published import load_published
from tests.data.published_files import folder_of
from tests.model.models import build_random
from tests.untrusted import readers
from tests.untrusted.test_fuzz import is_readable
from training.checkpoints import FILES
from training.loggers import read_records
from training.runs import load_published_run, load_run

LITTLE = 2**28  # bytes of memory beyond what is in use


def refused(read, *words: str) -> str:
    with readers.bounded(LITTLE), pytest.raises(UserError) as caught:
        read()
    message = str(caught.value)
    assert is_readable(message)
    assert [word for word in words if word not in message] == []
    return message


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return readers.resumed(tmp_path_factory.mktemp("good"))


@pytest.fixture
def run(good, tmp_path):
    return shutil.copytree(good.folder, tmp_path / "run")


def checkpoint(run):
    return run / "checkpoints" / "step-00000003"


def vouch(run):
    """Make the checksums those of the files as they are."""
    path = checkpoint(run)
    sums = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in FILES}
    (path / "checksums.json").write_text(json.dumps(sums))


# Configurations


def doubling(form: str) -> str:
    """Each name stands for the one before many times."""
    names = [f"a{i}" for i in range(10)]
    first = f"{names[0]}: &{names[0]} {{k: 1}}\n" if "<<" in form else f"{names[0]}: &{names[0]} [lol]\n"
    return first + "".join(
        f"{name}: &{name} {form % ', '.join([f'*{before}'] * 9)}\n" for before, name in pairwise(names)
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (doubling("[%s]"), "it stands for more than 10,000 values"),
        (doubling("{<<: [%s]}"), "it stands for more than 10,000 values"),
        ("train: &a {steps: *a}\n", "it stands for more than 10,000 values"),
        ("train: &a\n  ? *a\n  : 1\n", "it stands for more than 10,000 values"),
        ("train: " + "[" * 50_000, "nested too deeply"),
        ("train: {steps: " + "9" * 5000 + "}", "4300 digits"),
        ("# " + "x" * 2**17, "131,072 are the most"),
        ("train: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("train: {steps: '" + "x" * 100_000 + "'}", "train.steps"),
        ("train: {" + ", ".join(f"a{i}: 1" for i in range(3000)) + "}", "50 problems"),
        ('train: {"a\\x1b]0;owned\\x07": 1}', r"a\x1b]0;owned\x07: no such key"),
    ],
    ids=range(11),
)
def test_a_configuration_that_explodes_or_is_no_plain_text_is_refused(text, told, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    refused(lambda: load_config(tmp_path), told)


def test_a_message_is_cut_and_has_no_control_characters():
    message = str(UserError("a\x1b[2J\u202e\ud800\n  " + "é" * 10_000))
    assert message.startswith("a\\x1b[2J\\u202e\\ud800\n  éé")
    assert len(message) < LONGEST_MESSAGE + 30
    assert message.endswith("é ...")


# Runs


@pytest.mark.parametrize(
    ("was", "becomes", "told"),
    [
        ("n_layer: 2", "n_layer: 1048576", "1,048,576 layers"),
        ("d_model: 16", "d_model: 1048576", "another model"),
        ("d_mlp: 64", "d_mlp: 1048576", "another model"),
        ("d_head: 8", "d_head: 1048576", "another model"),
    ],
)
def test_a_run_that_promises_a_model_which_no_file_holds_is_refused_without_memory_for_it(
    was, becomes, told, run
):
    text = (run / "config.yaml").read_text()
    assert was in text
    (run / "config.yaml").write_text(text.replace(was, becomes))
    refused(lambda: load_run(run), told)


def test_a_context_whose_rotary_tables_are_too_large_is_refused_and_a_part_of_it_is_not(tmp_path):
    config, tensors = to_published(build_random("grouped", mlp="swiglu", d_head=1024, vocab_size=400))
    folder_of(tmp_path, config=config | {"bos_token_id": None, "max_position_embeddings": 2**19})
    save_file(tensors, tmp_path / "model.safetensors")
    refused(lambda: load_published(tmp_path), "context_length 524,288 needs", "rotary tables")
    assert load_published_run(tmp_path).config.model.context_length == 256


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"step": 7}, "step 7"),
        ({"wandb_id": "../../x"}, "wandb_id"),
        ({"wandb_id": "a" * 8 + "\n"}, "wandb_id"),
        ({"extra": 1}, "extra"),
        ({"environment": None}, "NoneType"),
        ({"scaler": {"scale": 1.0}}, "loss"),
        ({"best": [1.0]}, "best"),
        ({"tokens": "many"}, "tokens"),
        ({"telemetry_seconds": 1e308}, "telemetry_seconds"),
        ({"seconds": -1.0}, "seconds"),
        ({"alarms": [{}]}, "an alarm"),
        ({"alarms": [{"score": [], "layer": 0, "since": 1}]}, "an alarm"),
    ],
    ids=str,
)
def test_a_state_that_no_run_saves_is_refused_though_its_checksum_is_right(changes, told, good):
    path = "checkpoints/step-00000003/state.json"
    message = good.refusal(path, json.dumps(json.loads(good.files[path]) | changes).encode())
    assert told in message
    assert path in message


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        ("final_norm.weight/exp_avg", None, "does not fit final_norm.weight"),
        ("final_norm.weight/exp_avg", torch.zeros(17), "does not fit final_norm.weight"),
        ("final_norm.weight/exp_avg", torch.zeros(()), "does not fit final_norm.weight"),
        ("final_norm.weight/step", torch.zeros(16), "does not fit final_norm.weight"),
        ("final_norm.weight/other", torch.zeros(16), "has final_norm.weight/other, which is of no"),
        ("no slash", torch.zeros(16), "has no slash, which is of no"),
        ("other/exp_avg", torch.zeros(16), "has other/exp_avg, which is of no"),
    ],
    ids=range(7),
)
def test_moments_that_no_optimizer_has_are_refused(name, tensor, told, good):
    path = "checkpoints/step-00000003/optimizer.safetensors"
    tensors = {key: value for key, value in load_file(good.folder / path).items() if key != name}
    changed = save(tensors if tensor is None else tensors | {name: tensor})
    assert told in good.refusal(path, changed)


def test_weights_that_are_not_finite_are_refused(good):
    path = "checkpoints/step-00000003/model.safetensors"
    tensors = load_file(good.folder / path)
    tensors["final_norm.weight"][3] = torch.nan
    assert "final_norm.weight has what are no finite floats" in good.refusal(path, save(tensors))
    tensors["final_norm.weight"] = torch.ones(16, dtype=torch.int32)
    assert "final_norm.weight has what are no finite floats" in good.refusal(path, save(tensors))


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "train", "step": 1, "loss": NaN}',
        '{"kind": "train", "step": 1, "loss": 1e999}',
        '{"kind": "train", "step": 1, "loss": "1"}',
        '{"kind": "train", "step": 1.5, "loss": 1}',
        '{"kind": "train", "step": -1, "loss": 1}',
        '{"kind": ["train"], "step": 1, "loss": 1}',
        '{"kind": "eval", "step": 1, "loss": 1}',
        '{"kind": "attention", "step": 1, "scores": {"sink": [[{}]]}, "model": {}}',
        "[" * 100_000,
    ],
    ids=range(9),
)
def test_records_that_no_page_can_draw_are_refused(line, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    refused(lambda: read_records(tmp_path / "metrics.jsonl"), "no record")


# Files


def test_a_header_beyond_all_bounds_is_not_read(run):
    path = checkpoint(run) / "model.safetensors"
    path.write_bytes(struct.pack("<Q", SMALL + 1) + b" " * (SMALL + 1))
    vouch(run)
    refused(lambda: load_run(run), "its header has 4,194,305 bytes, and 4,194,304 are the most")


@pytest.mark.parametrize("name", ["config.yaml", "tokenizer.json", *FILES, "checksums.json"])
def test_a_pipe_in_the_place_of_a_file_of_a_run_is_not_waited_for(name, run):
    path = run / name if (run / name).exists() else checkpoint(run) / name
    path.unlink()
    os.mkfifo(path)
    refused(lambda: load_run(run))


def test_files_that_are_too_large_are_refused_unread(run, tmp_path):
    for path, size, read in (
        (run / "tokenizer.json", LARGE, lambda: load_tokenizer(run / "tokenizer.json")),
        (checkpoint(run) / "checksums.json", SMALL, lambda: load_run(run)),
        (tmp_path / "a.conllu", MOST_BYTES, lambda: read_treebank(tmp_path / "a.conllu")),
    ):
        path.touch()
        os.truncate(path, size + 1)
        refused(read, f"it has {size + 1:,} bytes, and {size:,} are the most")


def test_json_may_be_as_large_as_is_said_and_has_no_key_twice(tmp_path):
    path = tmp_path / "some.json"
    path.write_text('{"a": 1, "b": 2}')
    assert read_json(path, most=16) == {"a": 1, "b": 2}
    with pytest.raises(OSError, match="it has 16 bytes, and 15 are the most"):
        read_json(path, most=15)
    path.write_text('[{"a": 1, "a": 2}]')
    with pytest.raises(ValueError, match="a key stands twice"):
        read_json(path)


def test_a_row_without_end_in_a_small_archive_is_refused(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", 1) as file:
        for _ in range(LARGE // 2**20 + 1):
            file.write(b"1" * 2**20)
    assert path.stat().st_size < 2**19
    import datasets  # noqa: F401 (which takes memory of its own)

    data = {"source": "hf", "path": str(path), "tokenizer": "byte"}
    config = validate({"data": data}).data
    refused(lambda: list(Corpus(config)), "line 1: 67,108,864 bytes and no end")


def test_a_relation_that_commands_a_terminal_is_refused(tmp_path):
    good = readers.treebank(tmp_path)
    (name,) = good.files
    message = good.refusal(name, good.files[name].replace(b"\tnsubj\t", b"\t\x1b]0;owned\x07\t", 1))
    assert is_readable(message)
    assert r"relation '\x1b]0;owned\x07' has what cannot be printed" in message


@pytest.mark.parametrize("changes", [{"vocab_size": 300}, {"bos": None}, {"bos": 3}], ids=str)
def test_tokens_of_another_vocabulary_than_their_tokenizer_has_are_refused(changes, tmp_path):
    good = readers.prepared(tmp_path)
    meta = json.loads(good.files["meta.json"]) | changes
    assert "is not that of tokenizer.json" in good.refusal("meta.json", json.dumps(meta).encode())
