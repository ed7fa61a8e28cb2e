"""Files of published models that nobody vouches for: one readable line, little memory, nothing outside."""

import json
import math
import os
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from configs import UserError
from configs.gguf_file import LIMIT, read_gguf
from model.interop import to_published
from model.published import is_published, load_published
from tests.model.models import build_random


@pytest.fixture
def folder(tmp_path) -> Path:
    config, tensors = to_published(build_random("grouped", mlp="swiglu"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def refused(path: Path, context_length: int | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_published(path, context_length)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


# Folders


def test_weights_that_are_pickled_are_refused_and_not_opened(folder):
    (folder / "model.safetensors").unlink()
    assert "no model.safetensors" in refused(folder)
    (folder / "pytorch_model.bin").mkdir()  # opening it would be another error
    assert "pickle" in refused(folder)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "..", "a/b.safetensors", "", 7, None]
)
def test_an_index_that_names_a_place_outside_the_folder_is_refused(name, folder):
    (folder / "inner").mkdir()
    (folder / "config.json").rename(folder / "inner" / "config.json")
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "inner" / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder / "inner")


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 10**5])
def test_a_broken_index_is_refused(index, folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refused(folder)


@pytest.mark.parametrize("config", [b"", b"[]", b"\xff", b"{", b"[" * 10**5, b'{"model_type": "bert"}'])
def test_a_broken_configuration_is_refused(config, folder):
    (folder / "config.json").write_bytes(config)
    refused(folder)


@settings(max_examples=20)
@given(share=st.floats(0, 0.999))
def test_a_file_that_ends_early_is_refused(share, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config, tensors = to_published(build_random("grouped", mlp="swiglu", n_layer=1))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: int(share * len(whole))])
    assert "model.safetensors" in refused(folder)


def test_more_context_than_the_model_has_and_less_than_is_possible_are_refused(folder):
    assert "33 asked; the model has 32" in refused(folder, 33)
    assert "context_length" in refused(folder, 9)
    assert load_published(folder, 20).config.context_length == 20


def test_a_folder_of_a_run_is_not_taken_for_one(tmp_path, folder):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    assert [is_published(path) for path in (folder, tmp_path / "run", tmp_path / "none")] == [
        True,
        False,
        False,
    ]


# GGUF


def small(path: Path, tokens: Sequence[str] = (), **metadata: object) -> Path:
    """A Llama of one layer, all ones; `metadata` goes over what it says, and None leaves a key out.

    Of its tokens, if any, the first is BOS and the last merged of two others.
    """
    said = {
        "llama.block_count": 1,
        "llama.context_length": 32,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 12,
        "llama.attention.head_count": 2,
        "llama.rope.dimension_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    } | metadata
    writer = gguf.GGUFWriter(path, str(said.pop("architecture", "llama")))
    for key, value in said.items():
        if value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([3, *[1] * (len(tokens) - 1)])
        writer.add_token_merges([" ".join(tokens[-1])])
        writer.add_bos_token_id(0)
    sizes = {"attn_q": (8, 8), "attn_k": (8, 8), "attn_v": (8, 8), "attn_output": (8, 8), "attn_norm": (8,)}
    sizes |= {"ffn_gate": (12, 8), "ffn_up": (12, 8), "ffn_down": (8, 12), "ffn_norm": (8,)}
    named = {f"blk.0.{name}.weight": size for name, size in sizes.items()}
    for name, size in (
        named | {"token_embd.weight": (len(tokens) or 20, 8), "output_norm.weight": (8,)}
    ).items():
        writer.add_tensor(name, np.ones(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_without_a_head_is_tied_and_its_numbers_are_meant_as_they_were_written(tmp_path):
    model = load_published(small(tmp_path / "a.gguf"))
    assert model.config.tie_embeddings
    assert model.config.norm_eps == 1e-5  # in float32: 9.999999747378752e-06
    assert model.config.n_kv_head == 2
    assert len(model.token_embedding.weight) == 20


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"architecture": "gemma"}, "architecture gemma is not known; gpt2 and llama are"),
        ({"llama.rope.scaling.type": "linear"}, "rope_type linear"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "rope_type yarn"),
        ({"llama.rope.scaling.factor": 4.0}, "rope_type linear"),
        ({"llama.rope.scale_linear": 4.0}, "rope_type linear"),
        ({"llama.rope.dimension_count": 2, "llama.attention.key_length": 4}, "partial_rotary_factor"),
        ({"llama.attention.sliding_window": 9}, "sliding_window 9"),
        ({"llama.expert_count": 8}, "num_local_experts 8"),
        ({"llama.block_count": None}, "num_hidden_layers"),
        ({"llama.block_count": "many"}, "n_layer"),
        ({"llama.block_count": 2**31}, "n_layer"),
        ({"llama.block_count": 2**20}, "layers"),
        ({"llama.embedding_length": 16}, "is [20, 8], not [20, 16]"),
    ],
    ids=str,
)
def test_what_a_file_says_and_we_lack_is_refused_by_name(said, told, tmp_path):
    assert told in refused(small(tmp_path / "a.gguf", **said))


@pytest.mark.parametrize(
    "said",
    [
        {"llama.rope.scaling.type": "none"},
        {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.original_context_length": 32},
        {"llama.expert_count": 0},
        {"llama.attention.sliding_window": 0},
    ],
    ids=str,
)
def test_that_there_is_none_may_be_said(said, tmp_path):
    plain = load_published(small(tmp_path / "b.gguf"))
    assert load_published(small(tmp_path / "a.gguf", **said)).config == plain.config


def test_a_type_of_numbers_that_cannot_be_read_is_named(tmp_path):
    path = small(tmp_path / "a.gguf")
    bad = path.read_bytes().replace(
        struct.pack("<Q", 18) + b"output_norm.weight" + struct.pack("<IQI", 1, 8, 0),
        struct.pack("<Q", 18)
        + b"output_norm.weight"
        + struct.pack("<IQI", 1, 8, gguf.GGMLQuantizationType.I32),
    )
    path.write_bytes(bad)
    assert "output_norm.weight is of type I32" in refused(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    return small(tmp_path_factory.mktemp("gguf") / "a.gguf").read_bytes()


@settings(max_examples=60)
@given(share=st.floats(0, 0.999))
def test_a_gguf_file_that_ends_early_is_refused(share, whole, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    path.write_bytes(whole[: int(share * len(whole))])
    refused(path)


@settings(max_examples=100)
@given(at=st.integers(0, 1200), value=st.integers(0, 255))
def test_a_gguf_file_with_a_wrong_byte_is_read_or_refused(at, value, whole, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
    try:
        load_published(path)
    except UserError:
        refused(path)


def header(tensors: int, keys: int, *rest: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(rest)


KEY = struct.pack("<Q", 1) + b"k"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "empty"),
        (b"GGU", "begin"),
        (b"\x89PNG" + bytes(99), "begin"),
        (header(0, 0, version=1), "version"),
        (header(2**60, 0), "more than 1,048,576"),
        (header(0, 2**60), "more than 1,048,576"),
        (header(0, 1, struct.pack("<Q", 2**60)), "ends"),
        (header(0, 1, KEY, struct.pack("<IQ", 8, 2**60)), "ends"),
        (header(0, 1, KEY, struct.pack("<IIQ", 9, 0, 2**60)), "more than 1,048,576"),
        (header(0, 1, KEY, struct.pack("<IIQ", 9, 0, LIMIT), bytes(2 * LIMIT)), "more than 1,048,576"),
        (header(0, 1, KEY, struct.pack("<IIQ", 9, 9, 1), bytes(99)), "type 9"),
        (header(0, 1, KEY, struct.pack("<I", 77), bytes(99)), "type 77"),
        (header(1, 0, KEY, struct.pack("<I", 2**31), bytes(999)), "axes"),
        (header(1, 0, KEY, struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0), bytes(999)), None),
        (header(1, 0, KEY, struct.pack("<IQQIQ", 2, 2**32, 2**32, 0, 0), bytes(999)), None),
        (header(1, 0, KEY, struct.pack("<IQIQ", 1, 8, 0, 2**63), bytes(999)), None),
        (header(1, 0, KEY, struct.pack("<IQIQ", 1, 8, 99, 0), bytes(999)), None),
        (header(0, 2, 2 * (KEY + struct.pack("<IB", 0, 1))), "Duplicate"),
    ],
    ids=range(18),
)
def test_a_header_without_bounds_is_one_line_and_no_memory(content, told, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=told) as caught:
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 20e6  # the package's modules
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["none.gguf", "none", "empty", "pipe"])
def test_a_path_that_is_no_model_is_refused_with_what_is_possible(place, tmp_path):
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")  # which nobody writes to
    assert "neither a Hugging Face folder, with a config.json, nor a GGUF file" in refused(tmp_path / place)


def test_an_interrupted_download_of_a_gguf_file_names_the_tensor_that_it_ends_in(whole, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(whole)
    last = max(read_gguf(path).tensors, key=lambda tensor: tensor.data_offset)
    for size in (last.data_offset + last.n_bytes - 1, last.data_offset):
        path.write_bytes(whole[:size])
        assert f"it ends before the end of tensor {last.name}" in refused(path)
    path.write_bytes(whole[: last.data_offset + last.n_bytes])
    load_published(path)


# What is written in them, in messages

HOSTILE = "a\nb\x1b[31m\u202e\ud800" + 5000 * "x"


def mild(message: str) -> bool:
    return message.isprintable() and len(message) < 1000


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": HOSTILE},
        {"hidden_act": HOSTILE},
        {"rope_parameters": {HOSTILE: HOSTILE}},
        {"rope_parameters": {f"{HOSTILE}{i}": 1 for i in range(5000)}},
        {"rope_scaling": HOSTILE},
        {"sliding_window": HOSTILE},
        {"vocab_size": HOSTILE},
        {"num_hidden_layers": HOSTILE},
        {"max_position_embeddings": [HOSTILE]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_text_of_a_configuration_cannot_reach_the_terminal_raw(changes, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    assert mild(refused(folder))


@pytest.mark.parametrize("name", ["a\nb\x1b[31m", "\u202ea", "x" * 5000])
def test_names_of_tensors_cannot_reach_the_terminal_raw(name, folder, tmp_path):
    save_file({name: torch.zeros(1)}, folder / "model.safetensors")
    assert mild(refused(folder))
    path = small(tmp_path / "a.gguf", **{f"llama.rope.scal{name}": "yes"})
    assert mild(refused(path))
    path.write_bytes(path.read_bytes().replace(b"llama", b"ll\x1bma"))
    assert "architecture ll\\x1bma is not known" in refused(path)


@pytest.mark.parametrize("name", [HOSTILE, "none.safetensors", "folder", "pipe"])
def test_an_index_that_names_no_regular_file_of_its_folder_is_refused(name, folder):
    (folder / "model.safetensors").unlink()
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refused(folder)
    assert mild(message)
    assert name[:1] in message.split("must name files of its folder")[1]


# Numbers


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_a_number_that_is_not_finite_is_refused_with_its_tensor(name, number, folder):
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[-1] = number
    save_file(tensors, folder / "model.safetensors")
    assert f"{name.removeprefix('model.')} has numbers that are not finite" in refused(folder)
