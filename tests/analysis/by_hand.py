"""Models whose heads are set by hand in the weights of a `GPT`, so that what each does is known."""

import math

import torch

from configs.schema import Config
from model.attention import CausalSelfAttention
from model.transformer import GPT

T, V, BOS = 64, 65, 64  # 64 symbols and BOS
CONFIG = Config.model_validate(
    {
        "data": {"source": "repeats"},
        "model": {
            "n_layer": 2,
            "n_head": 2,
            "d_model": 3 * V + T,
            "d_head": V,
            "context_length": T,
            "position": "learned",
            "mlp": "none",
            "norm": "rmsnorm",
            "norm_gain": False,
        },
    }
)
# Parts of the residual stream: the token, its place, the token before it, the prediction; one-hot each.
TOKEN, PLACE, BEFORE, NEXT = (
    slice(start, start + n) for start, n in ((0, V), (V, T), (V + T, V), (2 * V + T, V))
)
SCORE = 40.0  # of a match, against 0: all the weight


def look(layer: CausalSelfAttention, head: int, query: slice, key: slice, back: int, parts: int) -> None:
    """Head `head` finds, from a one-hot part of the stream, the key whose part is the same, `back` before.

    `parts` one-hot parts give every activation the norm sqrt(parts): the norm in front is a known factor.
    """
    n, D = query.stop - query.start, layer.d_head
    dot = layer.W_q.weight.size(1) / parts * D**-0.5  # scaled product of two equal one-hot parts
    rows = slice(head * D, head * D + n)
    # Place i asks for place i - back, a token for itself; keys are as they are.
    layer.W_q.weight[rows, query] = SCORE / dot * torch.eye(n).roll(back, dims=1).triu()
    layer.W_k.weight[rows, key] = torch.eye(n)


def write(layer: CausalSelfAttention, head: int, target: slice, parts: int) -> None:
    """Head `head` copies the token that it looks at into a part of the stream."""
    C, first = layer.W_o.weight.size(0), head * layer.d_head
    layer.W_v.weight[first : first + V, TOKEN] = torch.eye(V)
    layer.W_o.weight[target, first : first + V] = math.sqrt(parts / C) * torch.eye(V)


def empty(backend: str, **changes: int) -> GPT:
    """All weights 0 but for the embeddings, one-hot parts TOKEN and PLACE: all attention is uniform."""
    model = GPT(CONFIG.model.model_copy(update={"backend": backend, **changes}), V, torch.Generator())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.token_embedding.weight[:, TOKEN] = torch.eye(V)
        model.position_embedding.weight[:, PLACE] = torch.eye(T)
    return model


@torch.no_grad()
def induction_circuit(backend: str, distance: int = 1) -> GPT:
    """Head 0 of layer 0 writes the token `distance` before into BEFORE; that of layer 1 looks for its own.

    Head 1 of both layers is silent and uniform.
    """
    model = empty(backend)
    first, second = model.attentions()
    look(first, 0, PLACE, PLACE, back=distance, parts=2)
    write(first, 0, BEFORE, parts=2)
    look(second, 0, TOKEN, BEFORE, back=0, parts=3)
    write(second, 0, NEXT, parts=3)
    model.head.weight[:, NEXT] = 3 * torch.eye(V)
    return model


KINDS = {  # heads of `every_kind` and the labels that they must get
    (0, 0): ["previous-token"],
    (0, 1): ["previous-token"],  # two back
    (0, 2): ["duplicate-token"],
    (0, 3): ["current-token"],
    (0, 4): ["sink"],
    (1, 0): ["induction"],
}


@torch.no_grad()
def every_kind(backend: str) -> GPT:
    """Two layers of six heads: those of `KINDS`, and six that are silent and uniform."""
    model = empty(backend, n_head=6, n_kv_head=6, d_head=V + T)
    first, second = model.attentions()
    look(first, 0, PLACE, PLACE, back=1, parts=2)
    write(first, 0, BEFORE, parts=2)
    look(first, 1, PLACE, PLACE, back=2, parts=2)
    look(first, 2, TOKEN, TOKEN, back=0, parts=2)
    D = first.d_head  # it also shuns its own place, twice as much as it seeks its token
    own, seeks = slice(2 * D + V, 3 * D), SCORE * 2 / (CONFIG.model.d_model * D**-0.5)
    first.W_q.weight[own, PLACE] = -2 * seeks * torch.eye(T)
    first.W_k.weight[own, PLACE] = torch.eye(T)
    look(first, 3, PLACE, PLACE, back=0, parts=2)
    first.W_q.weight[4 * D, TOKEN] = seeks  # whatever the token
    first.W_k.weight[4 * D, BOS] = 1.0
    look(second, 0, TOKEN, BEFORE, back=0, parts=3)
    write(second, 0, NEXT, parts=3)
    model.head.weight[:, NEXT] = 3 * torch.eye(V)
    return model
