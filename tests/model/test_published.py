"""Published models against the package transformers: its logits are ours, both ways, from any file."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging

from data.published import read_tokenizer
from model.interop import to_published
from model.published import load_published
from model.transformer import GPT
from tests.model.models import build_random
from tests.model.theirs import VOCAB, empty, logits, theirs, write_gguf

logging.disable_progress_bar()
SMOLLM2 = os.environ.get("SMOLLM2_GGUF", "")
MODELS = [
    ("gpt2", {}),
    ("gpt2", {"activation_function": "gelu", "tie_word_embeddings": False, "n_inner": 40}),
    ("gpt2", {"activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-2, "n_head": 1}),
    ("gpt2", {"activation_function": "relu2"}),
    ("llama", {}),
    ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True, "attention_bias": True}),
    ("llama", {"num_key_value_heads": 1, "head_dim": 6, "mlp_bias": True, "rms_norm_eps": 1e-2}),
    ("llama", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
]
EACH = pytest.mark.parametrize(("family", "changes"), MODELS, ids=str)
PLAIN = pytest.mark.parametrize("family", ["gpt2", "llama"])


def tokens(B: int = 2, T: int = 40, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(1))


def assert_equal(one: torch.nn.Module, other: torch.nn.Module, tokens_BT: torch.Tensor) -> None:
    ones, others = logits(one, tokens_BT), logits(other, tokens_BT)
    assert ones.std() > 0.3
    torch.testing.assert_close(ones, others, rtol=0, atol=3e-5)


def saved(folder: Path, model: GPT) -> Path:
    config, tensors = to_published(model)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@EACH
def test_the_logits_are_theirs_and_what_is_written_of_it_gives_them_again(family, changes, tmp_path):
    model = theirs(family, **changes)
    model.save_pretrained(tmp_path)
    ours = load_published(tmp_path)
    assert_equal(model, ours, tokens())
    again = AutoModelForCausalLM.from_pretrained(saved(tmp_path / "again", ours), dtype=torch.float32)
    assert_equal(model, again, tokens())
    assert again.config.tie_word_embeddings == model.config.tie_word_embeddings


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "learned", "mlp": "gelu"},
        {"position": "learned", "mlp": "gelu_tanh", "bias": True, "tie_embeddings": True, "norm_eps": 1e-3},
        {"position": "learned", "mlp": "relu2", "n_kv_head": 2, "bias": True, "d_mlp": 20},
        {"position": "learned", "qk": "tied", "value": "key", "bias": True, "norm_gain": False},
        {"position": "learned", "qk": "identity", "value": "identity"},
        {"position": "learned", "qk": "identity", "value": "key", "bias": True},
        {"mlp": "swiglu", "norm": "rmsnorm"},
        {
            "mlp": "swiglu",
            "norm": "rmsnorm",
            "n_kv_head": 1,
            "value": "key",
            "bias": True,
            "rope_theta": 99.0,
        },
        {"mlp": "swiglu", "norm": "rmsnorm", "d_head": 10, "norm_gain": False, "tie_embeddings": True},
        {"mlp": "swiglu", "norm": "rmsnorm", "qk": "tied", "value": "identity", "dropout": 0.5, "bias": True},
    ],
    ids=str,
)
def test_our_options_that_they_have_in_other_words_are_written_in_those(changes, tmp_path):
    plain = {"norm": "layernorm", "n_kv_head": 4, "rope_theta": None}
    ours = build_random("grouped", **plain | changes)
    read = AutoModelForCausalLM.from_pretrained(saved(tmp_path / "out", ours), dtype=torch.float32)
    assert_equal(ours.eval(), read, tokens(T=32, vocab_size=11))
    assert_equal(ours, load_published(tmp_path / "out"), tokens(T=32, vocab_size=11))


@PLAIN
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_shards_of_half_precision_become_float32(family, dtype, tmp_path):
    theirs(family).to(dtype).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len([*tmp_path.glob("model-*.safetensors")]) > 1
    ours = load_published(tmp_path)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), ours, tokens())


@PLAIN
def test_names_without_the_prefix_and_a_head_beside_the_embedding_it_is_tied_to_are_known(family, tmp_path):
    model = theirs(family, tie_word_embeddings=True)
    model.base_model.save_pretrained(tmp_path / "bare")
    assert_equal(model, load_published(tmp_path / "bare"), tokens())
    model.save_pretrained(tmp_path / "both", state_dict={k: v.clone() for k, v in model.state_dict().items()})
    assert_equal(model, load_published(tmp_path / "both"), tokens())


@PLAIN
def test_a_narrower_context_reads_as_the_first_places_of_the_whole(family, tmp_path):
    model = theirs(family)
    model.save_pretrained(tmp_path)
    ours = load_published(tmp_path, context_length=20)
    assert ours.config.context_length == 20
    assert_equal(model, ours, tokens(T=20))


def test_old_names_of_the_rotary_base_and_its_default_are_read(tmp_path):
    model = theirs("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 500.0, "rope_scaling": None}))
    assert_equal(model, load_published(tmp_path), tokens())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_published(tmp_path).config.rope_theta == 10000.0


# GGUF


def read_by_them(path: Path) -> PreTrainedModel:
    """What `from_pretrained(gguf_file=...)` does, which would want the package accelerate too."""
    config = load_gguf_checkpoint(path)["config"]
    model = empty(config.pop("model_type"), **config)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert {*missing} <= ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    return model


@pytest.mark.parametrize(
    ("family", "changes", "types"),
    [
        ("llama", {}, {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 2}, {"attn": Type.F16}),
        ("llama", {"num_key_value_heads": 1}, {"attn": Type.Q4_1, "token": Type.Q8_0, "ffn": Type.BF16}),
        ("llama", {"head_dim": 32}, {"attn_q": Type.Q5_0, "ffn": Type.Q8_0}),
        ("gpt2", {"n_positions": 1024}, {}),
        ("gpt2", {"n_positions": 1024, "tie_word_embeddings": False}, {"attn": Type.Q8_0, "ffn": Type.Q4_0}),
    ],
    ids=str,
)
def test_a_gguf_file_gives_the_logits_that_they_read_from_it(family, changes, types, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", theirs(family, **changes), **types)
    assert_equal(read_by_them(path), load_published(path), tokens())


@pytest.mark.parametrize("heads", [4, 2])
def test_exact_types_give_the_weights_that_were_written_biases_of_turned_heads_too(heads, tmp_path):
    """transformers has no biases in its GGUF reader: here the folder is the other way to the same number."""
    model = theirs("llama", num_key_value_heads=heads, attention_bias=True)
    ours = load_published(write_gguf(tmp_path / "model.gguf", model))
    assert_equal(model, ours, tokens())


@pytest.mark.slow
@pytest.mark.skipif(not Path(SMOLLM2).is_file(), reason="SMOLLM2_GGUF names no file")
def test_smollm2_reads_a_sentence_as_they_do():
    path, sentence = Path(SMOLLM2), "The trophy does not fit in the suitcase, because it is too small."
    tokenizer = read_tokenizer(path)
    text_BT = torch.tensor([[tokenizer.bos, *tokenizer.encode(sentence).tolist()]])
    theirs, ours = logits(read_by_them(path), text_BT), logits(load_published(path), text_BT)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    likelihood = ours[0, :-1].log_softmax(-1).gather(-1, text_BT[0, 1:, None])
    assert likelihood.mean() > -math.log(49152) / 2
