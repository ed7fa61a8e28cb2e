"""Published models in our words and ours in theirs: GPT-2 where positions are learned, Llama where rotary.

"Theirs" is how the package `transformers` names tensors and writes `config.json`. Names of tensors stand here
without the prefix that some files have and others lack.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from configs import UserError
from configs.cli import validate
from configs.schema import Model as ModelConfig
from configs.screen import foreign, shown
from model.transformer import GPT

# GPT-2 has queries, keys and values in one matrix, and transposes the matrices whose names begin with c_.
MODULES = """
ours                     GPT-2            Llama
token_embedding          wte              embed_tokens
position_embedding       wpe              -
blocks.N.attention_norm  h.N.ln_1         layers.N.input_layernorm
blocks.N.attention.W_q   h.N.attn.c_attn  layers.N.self_attn.q_proj
blocks.N.attention.W_k   h.N.attn.c_attn  layers.N.self_attn.k_proj
blocks.N.attention.W_v   h.N.attn.c_attn  layers.N.self_attn.v_proj
blocks.N.attention.W_o   h.N.attn.c_proj  layers.N.self_attn.o_proj
blocks.N.mlp_norm        h.N.ln_2         layers.N.post_attention_layernorm
blocks.N.mlp.W_gate      -                layers.N.mlp.gate_proj
blocks.N.mlp.W_in        h.N.mlp.c_fc     layers.N.mlp.up_proj
blocks.N.mlp.W_out       h.N.mlp.c_proj   layers.N.mlp.down_proj
final_norm               ln_f             norm
head                     lm_head          lm_head
"""
# With what it means when a key is missing. In GGUF the name of the family stands in front.
KEYS = """
ours            GPT-2                         Llama                        GGUF
n_layer         n_layer                       num_hidden_layers            block_count
n_head          n_head                        num_attention_heads          attention.head_count
n_kv_head       -                             num_key_value_heads=null     attention.head_count_kv
d_model         n_embd                        hidden_size                  embedding_length
d_head          -                             head_dim=null                attention.key_length
d_mlp           n_inner=null                  intermediate_size            feed_forward_length
mlp             activation_function=gelu_new  hidden_act=silu              -
norm_eps        layer_norm_epsilon=1e-5       rms_norm_eps=1e-6            attention.layer_norm_rms_epsilon
rope_theta      -                             rope_theta=10000.0           rope.freq_base
context_length  n_positions                   max_position_embeddings      context_length
tie_embeddings  tie_word_embeddings=true      tie_word_embeddings=false    -
"""


class Family:
    """An architecture of theirs; `modules` and `keys` go from our names to theirs, `gguf` from its."""

    def __init__(self, column: int, architecture: str, prefix: str, norm: str, mlps: dict[str, str]):
        self.architecture, self.prefix, self.norm = architecture, prefix, norm
        self.mlps = mlps  # theirs: ours; of synonyms the first is written
        modules, keys = ([row.split() for row in table.splitlines()[2:]] for table in (MODULES, KEYS))
        self.modules = {row[0]: row[column] for row in modules if row[column] != "-"}
        cells = {row[0]: row[column].split("=") for row in keys if row[column] != "-"}
        self.keys = {ours: cell[0] for ours, cell in cells.items()}
        self.gguf = {row[3]: self.keys[row[0]] for row in keys if row[0] in self.keys and row[3] != "-"}
        self.defaults = {key: None if v == "null" else v for key, *rest in cells.values() for v in rest}


GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "relu2"}
GPT2 = Family(1, "GPT2LMHeadModel", "transformer.", "layernorm", GELUS)
LLAMA = Family(2, "LlamaForCausalLM", "model.", "rmsnorm", {"silu": "swiglu"})
FAMILIES = {"gpt2": GPT2, "llama": LLAMA}  # by their model_type
BIASES = {"attention_bias": ".self_attn.", "mlp_bias": ".mlp."}  # keys of Llama: the tensors that have them
# Options of ours that no family has, and of theirs that we lack, with the values that stand for none.
OURS = ("scale", "qk_norm", "window", "sink", "gate", "logit_softcap", "embed_norm")
THEIRS: dict[str, Any] = {"scale_attn_weights": True, "partial_rotary_factor": 1.0, "rope_type": "default"}
THEIRS |= dict.fromkeys(("scale_attn_by_inverse_layer_idx", "add_cross_attention"), False)
THEIRS |= {"sliding_window": 0, "num_local_experts": 0, "quantization_config": None}
BUFFERS = re.compile(r"h\.\d+\.attn\.(masked_)?bias|(.*\.)?rotary_emb\.inv_freq")  # tensors without weights


def read_config(config: dict[str, Any]) -> tuple[ModelConfig, int]:
    """Our model and its vocabulary size from a `config.json`; biases that only some layers have, all have.

    Raises `UserError` that names what is missing, out of bounds, or not to be had here.
    """
    if (model_type := str(config.get("model_type"))) not in FAMILIES:
        raise UserError(f"model_type {foreign(model_type)} is not known; {' and '.join(FAMILIES)} are")
    family = FAMILIES[model_type]
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UserError(f"rope_parameters must be keys with values; got {foreign(rope)}")
    given = family.defaults | {key: value for key, value in config.items() if value is not None}
    given |= {"rope_type" if key == "type" else key: value for key, value in rope.items()}
    if missing := [key for key in ("vocab_size", *family.keys.values()) if key not in given]:
        raise UserError(f"it has no {', '.join(missing)}")
    odd = {key: given[key] for key, off in THEIRS.items() if given.get(key, off) not in (off, None)}
    odd |= {key: value for key, value in rope.items() if key not in {*THEIRS, "rope_theta", "type"}}
    told = [f"{foreign(key)} {foreign(value)}" for key, value in odd.items()][:5]
    act = family.keys["mlp"]
    if (mlp := family.mlps.get(str(given[act]))) is None:
        told.append(f"{act} {foreign(given[act])} (possible: {', '.join(family.mlps)})")
    if told:
        raise UserError(f"we have no {', '.join(told)}")
    values = {ours: given[theirs] for ours, theirs in family.keys.items()}
    values |= {"mlp": mlp, "norm": family.norm, "position": "learned" if family is GPT2 else "rotary"}
    values |= {"bias": family is GPT2 or any(given.get(key) for key in BIASES)}
    if type(vocab_size := given["vocab_size"]) is not int or not 1 <= vocab_size <= 2**20:
        raise UserError(f"vocab_size must be a number from 1 to {2**20:,}; got {foreign(vocab_size)}")
    try:
        return validate({"model": values}).model, vocab_size
    except UserError as error:
        raise UserError(foreign(" ".join(str(error).split()), 400)) from None


def refuse_other(
    model: ModelConfig, vocab_size: int, config: dict[str, Any], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Raises `UserError` where tensors of these names and shapes are not those of the model in `config`.

    Takes no memory for it: a config may promise what no file holds.
    """
    have = {_bare(name): [*shape] for name, shape in shapes.items()}
    if model.n_layer > len(have):
        raise UserError(f"it should have {model.n_layer:,} layers, and has {len(have)} tensors")
    family = family_of(model)
    lacking = [part for key, part in BIASES.items() if family is LLAMA and not config.get(key)]
    ours, want = imagined(model, vocab_size), dict[str, list[int]]()
    for name, parts in _places(family, ours).items():
        if not (name.endswith(".bias") and any(part in name for part in lacking)):
            want[name] = [*_turned(name, torch.cat([ours[part] for part in parts])).shape]
    wrong = [f"{name} is missing" for name in want if name not in have]
    wrong += [
        f"{name} is {foreign(have[name])}, not {shape}"
        for name, shape in want.items()
        if have.get(name, shape) != shape
    ]
    known = {*want, "lm_head.weight"}  # also beside an embedding that it is tied to
    unknown = [name for name in have if not (name in known or BUFFERS.fullmatch(name))]
    wrong += [f"{foreign(name)} is unknown" for name in unknown]
    if wrong:
        more = f" and {len(wrong) - 5:,} more" if len(wrong) > 5 else ""
        raise UserError(f"its tensors do not fit its configuration: {', '.join(wrong[:5])}{more}")


@torch.no_grad()
def fill(model: GPT, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy tensors that `refuse_other` let pass into a new model, of a table of positions the first rows.

    What they lack stays as it is: biases, a learned sink. Raises `UserError` for what are no finite floats,
    and for a head that is not the embedding it should be tied to.
    """
    parameters, head = dict(model.named_parameters()), None
    places = _places(family_of(model.config), parameters)
    for name, tensor in ((_bare(name), tensor) for name, tensor in tensors):
        if name == "lm_head.weight" and model.config.tie_embeddings:
            head = tensor
        elif name in places:
            if not tensor.is_floating_point():
                raise UserError(f"{name} has numbers of type {tensor.dtype}, and floats are wanted")
            parts = _turned(name, tensor).chunk(len(places[name]))
            for ours, part in zip(places[name], parts, strict=True):
                parameters[ours].copy_(part[: len(parameters[ours])])
                if not parameters[ours].isfinite().all():
                    raise UserError(f"{name} has numbers that are not finite")
    if head is not None and not torch.equal(head.float(), model.head.weight.cpu()):
        raise UserError("lm_head.weight is not the embedding, which tie_word_embeddings true says")


@torch.no_grad()
def to_published(model: GPT) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Their `config.json` and tensors, copies, with which their model gives the same logits.

    The ids of BOS and EOS, which a model does not know, are null. Raises `UserError` that names all options
    which their architecture does not have.
    """
    c, family = model.config, family_of(model.config)
    has: dict[str, tuple[Any, ...]] = {key: (ModelConfig.model_fields[key].default,) for key in OURS}
    has |= {"norm": (family.norm,), "mlp": tuple(family.mlps.values())}
    odd = [key for key, values in has.items() if getattr(c, key) not in values]
    if family is GPT2 and c.n_head * (c.d_head or 0) != c.d_model:
        odd.append("d_head")
    if family is LLAMA and c.d_model % c.n_head:
        odd.append("n_head")  # transformers 5 wants a divisor of the width though head_dim is given
    if odd:
        told = ", ".join(f"model.{key} {shown(getattr(c, key))}" for key in odd)
        raise UserError(f"with position {c.position} it becomes a {family.architecture}, which has no {told}")
    vocab_size = len(model.token_embedding.weight)
    config = {theirs: getattr(c, ours) for ours, theirs in family.keys.items()}
    config[family.keys["mlp"]] = next(theirs for theirs, ours in family.mlps.items() if ours == c.mlp)
    config |= {"architectures": [family.architecture], "dtype": "float32", "vocab_size": vocab_size}
    config |= {"bos_token_id": None, "eos_token_id": None}
    if family is GPT2:
        config |= {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:  # rope_theta by itself was for transformers before 5
        config |= {"rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta}}
        config |= {"model_type": "llama", "attention_dropout": 0.0} | dict.fromkeys(BIASES, c.bias)
    wanted, tensors = imagined(read_config(config)[0], vocab_size), {}
    for name, ours in _places(family, wanted).items():
        whole = torch.cat([_acting(model, one, wanted[one].shape) for one in ours])
        tensors[full(family, name)] = _turned(name, whole).contiguous()
    return config, tensors


def full(family: Family, name: str) -> str:
    """Their name of a tensor or module as they write it."""
    return name if name.startswith("lm_head") else family.prefix + name


def family_of(model: ModelConfig) -> Family:
    """The one whose positions it has."""
    return GPT2 if model.position == "learned" else LLAMA


def _bare(name: str) -> str:
    return name.removeprefix("transformer.").removeprefix("model.")


def _turned(name: str, tensor: Tensor) -> Tensor:
    return tensor.t() if ".c_" in name else tensor  # which leaves vectors alone


def _places(family: Family, names: Iterable[str]) -> dict[str, list[str]]:
    """Tensors of theirs, each with the parameters of ours that it holds, one below another."""
    places = defaultdict(list)
    for name in names:
        module, kind = name.rsplit(".", 1)
        if theirs := family.modules.get(re.sub(r"\d+", "N", module)):  # a sink has no place
            places[re.sub("N", "".join(re.findall(r"\d+", module)), theirs) + f".{kind}"].append(name)
    return places


def imagined(model: ModelConfig, vocab_size: int) -> dict[str, Tensor]:
    """Its parameters without memory; also without rotary tables, which on meta import half of torch."""
    with torch.device("meta"):
        return dict(GPT(model.model_copy(update={"rope_theta": None}), vocab_size).named_parameters())


def refuse_long(model: ModelConfig) -> None:
    """Raises `UserError` where its rotary tables, which no file holds, would take more than 2 GiB."""
    size = 4 * model.n_layer * model.context_length * (model.d_head or 0) * bool(model.rope_theta)
    if size > 2**31:
        raise UserError(f"context_length {model.context_length:,} needs {size:,} bytes of rotary tables")


def _acting(model: GPT, name: str, shape: torch.Size) -> Tensor:
    """The parameter of ours with that name and shape, or what acts in the place of one that is not there."""
    own, c = dict(model.named_parameters()), model.config
    if name in own:
        rows = len(own[name])
        if rows == shape[0]:
            return own[name]
        assert c.d_head
        return own[name].unflatten(0, (-1, c.d_head)).repeat_interleave(shape[0] // rows, 0).flatten(0, 1)
    if ".W_v." in name and c.value == "key":
        return _acting(model, name.replace("W_v", "W_k"), shape)
    if ".W_k." in name:
        return _acting(model, name.replace("W_k", "W_q"), shape)
    if name.endswith("bias"):
        return torch.zeros(shape, device=model.device)
    if len(shape) == 1:
        return torch.ones(shape, device=model.device)
    return torch.eye(*shape, device=model.device)
