"""Our words for their models and theirs for ours: what is refused, by name; nothing is lost in between."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import UserError
from configs.schema import Model
from model.interop import fill, read_config, refuse_other, to_published
from model.transformer import GPT
from tests.model.models import VOCAB, build, build_random, tokens

GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 40}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        read_config(config)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


# Their configurations


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({}, "tie_embeddings", True),
        ({"tie_word_embeddings": False}, "tie_embeddings", False),
        ({"n_inner": 50}, "d_mlp", 50),
        ({"n_inner": None}, "d_mlp", 128),
        ({}, "mlp", "gelu_tanh"),
        ({"activation_function": "gelu"}, "mlp", "gelu"),
        ({}, "norm_eps", 1e-5),
        ({}, "bias", True),
        ({}, "position", "learned"),
    ],
)
def test_what_a_gpt2_says_and_what_its_silence_means(changes, key, value):
    model, vocab_size = read_config(GPT2 | changes)
    assert (getattr(model, key), vocab_size) == (value, 64)


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({}, "tie_embeddings", False),
        ({"tie_word_embeddings": True}, "tie_embeddings", True),
        ({}, "n_kv_head", 4),
        ({"num_key_value_heads": 2}, "n_kv_head", 2),
        ({"head_dim": None}, "d_head", 8),
        ({"head_dim": 12}, "d_head", 12),
        ({}, "norm_eps", 1e-6),
        ({}, "rope_theta", 10000.0),
        ({"rope_theta": 500}, "rope_theta", 500.0),
        (
            {"rope_parameters": {"rope_theta": 99, "rope_type": "default"}, "rope_theta": 1},
            "rope_theta",
            99.0,
        ),
        ({"rope_scaling": {"type": "default"}, "rope_theta": 500}, "rope_theta", 500.0),
        ({}, "bias", False),
        ({"mlp_bias": True}, "bias", True),
        ({"attention_bias": True}, "bias", True),
        ({"partial_rotary_factor": 1.0, "sliding_window": None}, "window", None),
    ],
)
def test_what_a_llama_says_and_what_its_silence_means(changes, key, value):
    assert getattr(read_config(LLAMA | changes)[0], key) == value


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx true"]),
        (GPT2 | {"scale_attn_weights": False}, ["scale_attn_weights false"]),
        (GPT2 | {"add_cross_attention": True}, ["add_cross_attention"]),
        (GPT2 | {"activation_function": "tanh"}, ["activation_function tanh", "gelu_new"]),
        (
            LLAMA | {"hidden_act": "gelu", "sliding_window": 9},
            ["hidden_act gelu", "silu", "sliding_window 9"],
        ),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_type linear", "factor 2.0"]),
        (LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, ["rope_type llama3"]),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 9}}}, ["full_attention"]),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor 0.5"]),
        (LLAMA | {"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        (
            LLAMA | {"rope_parameters": {"rope_theta": 9}, "rope_scaling": {"type": "yarn"}},
            ["rope_type yarn"],
        ),
        (LLAMA | {"quantization_config": {"bits": 4}}, ["quantization_config", "bits"]),
        (LLAMA | {"model_type": "mistral"}, ["model_type mistral", "gpt2 and llama"]),
        ({}, ["model_type"]),
        ({"model_type": "gpt2", "n_layer": 2}, ["n_head", "n_embd", "n_positions", "vocab_size"]),
    ],
    ids=str,
)
def test_what_our_model_does_not_have_is_refused_by_name(config, named):
    message = refused(config)
    assert all(part in message for part in named), message


HUGE = [10**30, -1, 0, 2**40, 1.5, "many", [1], {}, True, "x" * 10**6, [[]] * 10**5]


@pytest.mark.parametrize("key", [*LLAMA, "head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", HUGE, ids=lambda value: repr(value)[:9])
def test_a_value_of_the_wrong_kind_or_size_is_one_line(key, value):
    """Or means something: 2^40 is a base of wavelengths, and 0 is no epsilon but 1.5 heads are no heads."""
    try:
        read_config(LLAMA | {key: value})
    except UserError:
        refused(LLAMA | {key: value})
    else:
        assert key == "rope_theta"
        assert value in (10**30, 2**40, 1.5)


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["default", "silu"])
)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from([*LLAMA, *GPT2, "rope_scaling", "hidden_act", "rope_theta"]), JSON))
def test_whatever_stands_in_a_config_gives_a_model_or_one_line(changes):
    for config in (GPT2, LLAMA):
        try:
            model, _ = read_config(config | changes)
        except UserError:
            refused(config | changes)
        else:
            assert isinstance(model, Model)


# Our models in their terms


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sink": "learned", "gate": True}, ["sink learned", "gate true"]),
        ({"window": 9, "logit_softcap": 5.0}, ["window 9", "logit_softcap 5.0"]),
        ({"embed_norm": True, "qk_norm": True}, ["embed_norm true", "qk_norm true"]),
        ({"scale": "linear"}, ["scale linear"]),
        ({"mlp": "none", "d_mlp": None}, ["mlp none"]),
        ({"norm": "layernorm", "mlp": "relu2"}, ["LlamaForCausalLM", "norm layernorm", "mlp relu2"]),
        ({"position": "learned"}, ["GPT2LMHeadModel", "norm rmsnorm", "mlp swiglu"]),
        ({"position": "learned", "norm": "layernorm", "mlp": "gelu", "d_head": 10}, ["d_head 10"]),
        ({"n_head": 5, "n_kv_head": 5, "d_head": 6}, ["n_head 5"]),
    ],
    ids=str,
)
def test_options_that_no_such_architecture_has_are_all_named_in_one_line(changes, named):
    model = build("grouped", **{"mlp": "swiglu", "rope_theta": None, **changes})
    with pytest.raises(UserError) as caught:
        to_published(model)
    message = str(caught.value)
    assert all(part in message for part in named), message
    assert message.count("model.") == len([part for part in named if part[0].islower()])
    assert "\n" not in message


@st.composite
def shapes(draw) -> dict[str, Any]:
    learned = draw(st.booleans())
    n_head = draw(st.sampled_from([1, 2, 4]))
    n_kv_head = draw(st.sampled_from([n for n in (1, 2, 4) if n <= n_head]))
    shape = {
        "position": "learned" if learned else "rotary",
        "norm": "layernorm" if learned else "rmsnorm",
        "mlp": draw(st.sampled_from(["gelu", "gelu_tanh", "relu2"])) if learned else "swiglu",
        "n_layer": draw(st.sampled_from([1, 2, 11])),  # the number of a layer may have two digits
        "n_head": n_head,
        "n_kv_head": n_kv_head,
        "d_model": 8,
        "d_head": None if learned else draw(st.sampled_from([None, 2, 6])),
        "d_mlp": draw(st.integers(1, 20)),
        "qk": draw(
            st.sampled_from(["separate", "tied", "identity"] if n_head == n_kv_head else ["separate"])
        ),
        "value": draw(
            st.sampled_from(["project", "key", "identity"] if n_head == n_kv_head else ["project"])
        ),
        "norm_eps": draw(st.floats(1e-12, 1e-2)),
        "rope_theta": None if learned else draw(st.floats(1.5, 1e7)),
    }
    if shape["d_head"]:
        shape |= {key: "separate" if key == "qk" else "project" for key in ("qk", "value")}
    return shape | {key: draw(st.booleans()) for key in ("bias", "norm_gain", "tie_embeddings")}


def put_back(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> GPT:
    shape, vocab_size = read_config(config)
    refuse_other(shape, vocab_size, config, {name: tensor.shape for name, tensor in tensors.items()})
    model = GPT(shape, vocab_size, torch.Generator().manual_seed(9))
    fill(model, tensors.items())
    return model


@settings(max_examples=15)
@given(shapes(), st.integers(0, 99))
def test_what_is_written_is_read_as_a_model_with_the_same_logits(shape, seed):
    model = build_random("grouped", seed, **shape)
    config, tensors = to_published(model)
    again = put_back(config, tensors)
    read = tokens(2, 32, seed)
    with torch.no_grad():
        torch.testing.assert_close(again(read), model(read), rtol=0, atol=1e-5)
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]
    assert len({*storages}) == len(storages)  # safetensors stores none that share memory


def test_no_drawing_of_a_number_moves_the_global_generator():
    model = build_random("grouped", mlp="swiglu")
    before = torch.random.get_rng_state()
    put_back(*to_published(model))
    assert torch.equal(torch.random.get_rng_state(), before)


def llama() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return to_published(build_random("grouped", mlp="swiglu"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model.norm.weight": None}, "norm.weight is missing"),
        (
            {"model.layers.1.mlp.up_proj.weight": (4, 24)},
            "layers.1.mlp.up_proj.weight is [4, 24], not [20, 24]",
        ),
        ({"model.layers.0.self_attn.q_norm.weight": (6,)}, "layers.0.self_attn.q_norm.weight is unknown"),
        ({"model.layers.0.mlp.up_proj.bias": (20,)}, "layers.0.mlp.up_proj.bias is unknown"),
        (
            {"lm_head.weight": None, "score.weight": (2, 24)},
            "lm_head.weight is missing, score.weight is unknown",
        ),
        ({f"model.layers.{i}.a.weight": (1,) for i in range(2, 9)}, "and 2 more"),
    ],
    ids=str,
)
def test_tensors_that_are_missing_unknown_or_of_another_shape_are_named(change, told):
    config, tensors = llama()
    for name, shape in change.items():
        if shape is None:
            del tensors[name]
        else:
            tensors[name] = torch.zeros(shape)
    with pytest.raises(UserError, match=re.escape(told)) as caught:
        put_back(config, tensors)
    assert "\n" not in str(caught.value)


def test_masks_and_frequencies_that_old_files_hold_are_no_weights():
    config, tensors = llama()
    tensors |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}
    put_back(config, tensors)
    config, tensors = to_published(build("gpt2"))
    tensors |= {
        "h.0.attn.bias": torch.zeros(1, 1, 9, 9),
        "transformer.h.1.attn.masked_bias": torch.tensor(-1e4),
    }
    put_back(config, tensors)


def test_a_head_that_differs_from_the_embedding_it_should_be_tied_to_is_refused():
    model = build_random("gpt2")
    config, tensors = to_published(model)
    put_back(config, tensors | {"lm_head.weight": tensors["transformer.wte.weight"]})
    with pytest.raises(UserError, match="tie_word_embeddings"):
        put_back(config, tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1})


def test_whole_numbers_are_no_weights():
    config, tensors = llama()
    with pytest.raises(UserError, match=r"norm.weight has numbers of type torch.int8"):
        put_back(config, tensors | {"model.norm.weight": torch.ones(24, dtype=torch.int8)})


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"])
def test_a_config_that_promises_more_than_the_file_holds_costs_nothing(key):
    config, tensors = llama()
    if key == "hidden_size":
        config["head_dim"] = 6
    with pytest.raises(UserError, match="tensors"):
        put_back(config | {key: 2**20}, tensors)


def test_biases_of_the_attention_alone_are_biases_of_zero_elsewhere():
    config, tensors = to_published(build_random("grouped", mlp="swiglu", bias=True))
    config |= {"mlp_bias": False}
    kept = {name: tensor for name, tensor in tensors.items() if not re.search(r"mlp.*bias", name)}
    model = put_back(config, kept)
    assert model.config.bias
    assert not any(p.any() for name, p in model.named_parameters() if re.search(r"mlp\..*bias", name))
    assert all(p.any() for name, p in model.named_parameters() if re.search(r"attention\..*bias", name))


def test_a_learned_sink_stays_as_it_starts():
    config, tensors = llama()
    shape = read_config(config)[0].model_copy(update={"sink": "learned"})
    model = GPT(shape, VOCAB)
    fill(model, tensors.items())
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("sink_H"))
    assert torch.equal(model.final_norm.weight, tensors["model.norm.weight"])
