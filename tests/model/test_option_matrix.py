"""Option x backend x (output, gradients, statistics) of an attention layer, against its definition."""

from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from analysis.rows import rows_of
from analysis.statistics import REGISTRY
from configs.schema import Model
from model.attention import CausalSelfAttention, Observation
from model.backends import BACKENDS
from tests.analysis.definitions import Layer, scores
from tests.model.definition import attention_layer

C, H, T = 24, 4, 140  # more than one block of rows
BLOCK = 21  # of the repeat that induction and duplicate are read as
DOCUMENTS = [  # (document, tokens) of each row: several, padding on each side, in between, and nothing else
    [(0, T)],
    [(0, 40), (1, 3), (5, 80), (-1, 17)],
    [(-1, 30), (2, 70), (0, 40)],
    [(3, 60), (-1, 20), (1, 60)],
    [(-1, T)],
]
SEGMENT = torch.tensor([[document for document, n in row for _ in range(n)] for row in DOCUMENTS])
SCALES, QKS = ["sqrt", "none", "linear"], ["separate", "tied", "identity"]
VALUES = ["project", "key", "identity"]

LEARNED: dict[str, Any] = {"position": "learned"}  # which leaves the layer by itself without positions
EVERYTHING: dict[str, Any] = {
    **{"qk_norm": True, "qk_gain": 1.3, "window": 9, "segment": True},
    **{"sink": "learned", "gate": True, "bias": True},
}
ALONE: list[dict[str, Any]] = [
    {},  # rotary
    LEARNED,
    *({**LEARNED, "window": w} for w in (1, 2, 5, 130)),
    {**LEARNED, "sink": "zero"},
    {**LEARNED, "sink": "learned"},
    {**LEARNED, "gate": True},
    {**LEARNED, "bias": True},
    {**LEARNED, "n_kv_head": 2},
    {**LEARNED, "n_kv_head": 1},
    {**LEARNED, "qk_norm": True},
    {**LEARNED, "segment": True},
]
TOGETHER: list[dict[str, Any]] = [
    {"window": 5, "segment": True},
    {"window": 5, "segment": True, "sink": "learned", "n_kv_head": 2},
    {"segment": True, "sink": "zero", "n_kv_head": 1, "value": "key"},
    {"window": 130, "sink": "learned", "gate": True, "qk": "tied", "value": "key"},
    {"n_kv_head": 2, "qk_norm": True, "qk_gain": 2.0, "scale": "linear", "value": "key", "gate": True},
    {"segment": True, "qk_norm": True, "qk": "identity", "value": "identity", "scale": "none"},
    {"n_kv_head": 1, "window": 7, "segment": True, "sink": "learned", "gate": True, "scale": "none"},
]
CROSSED: list[dict[str, Any]] = [
    {**base, "scale": scale, "qk": qk, "value": value}
    for base, scale, qk, value in product((LEARNED, EVERYTHING), SCALES, QKS, VALUES)
]
MATRIX = [*CROSSED, *ALONE, *TOGETHER]


def name_of(case: int) -> str:
    return (
        ", ".join(str(x) if isinstance(x, str) else f"{key} {x}" for key, x in MATRIX[case].items())
        or "plain"
    )


every_case = pytest.mark.parametrize("case", range(len(MATRIX)), ids=name_of)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def make(backend: str, segment: bool = False, **options: Any) -> CausalSelfAttention:
    """A layer with every parameter N(0, 0.3), the sink logits too."""
    config = Model(n_head=H, d_model=C, context_length=T, backend=backend, **options)
    made = CausalSelfAttention(config, layer=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return made


def stream() -> Tensor:
    return torch.randn(len(SEGMENT), T, C, generator=torch.Generator().manual_seed(1))


class Expected(NamedTuple):
    out_BTC: Tensor
    gradients: dict[str, Tensor]  # of the input, `x`, and of every parameter
    scores: dict[str, Tensor]
    row_bound: float


@cache
def expected(case: int) -> Expected:
    options = MATRIX[case]
    made, x_BTC = make("naive", **options), stream().double().requires_grad_()
    config = Model(
        n_head=H, d_model=C, context_length=T, **{k: v for k, v in options.items() if k != "segment"}
    )
    weights = {name: p.detach().double().requires_grad_() for name, p in made.named_parameters()}
    whole = attention_layer(config, weights, x_BTC, SEGMENT if options.get("segment") else None)
    leaves = {"x": x_BTC, **weights}
    gradients = torch.autograd.grad((whole.out_BTC * cotangent()).sum(), list(leaves.values()))
    with torch.no_grad():
        kernel = {name: x.detach() if isinstance(x, Tensor) else x for name, x in whole.options.items()}
        tensors = (x.detach() for x in (whole.q_BHTD, whole.k_BGSD, whole.v_BGSD, weights["W_o.weight"]))
        gate_BHT = None if whole.gate_BHT is None else whole.gate_BHT.detach()
        layer = Layer(*tensors, kernel, gate_BHT)
        found = scores(layer, BLOCK)
    named = dict(zip(leaves, gradients, strict=True))
    return Expected(whole.out_BTC.detach(), named, found, layer.attention().row_bound)


def cotangent() -> Tensor:
    return torch.randn(len(SEGMENT), T, C, generator=torch.Generator().manual_seed(2))


def assert_close(got: Tensor, wanted: Tensor, bound: float, name: str) -> None:
    torch.testing.assert_close(
        got.double(), wanted.double(), atol=bound, rtol=0, equal_nan=True, msg=lambda m: f"{name}: {m}"
    )


@every_backend
@every_case
def test_output_and_all_gradients_are_those_of_the_definition(case: int, backend: str) -> None:
    made, x_BTC, wanted = make(backend, **MATRIX[case]), stream().requires_grad_(), expected(case)
    out_BTC = made(x_BTC, segment_BT=SEGMENT if MATRIX[case].get("segment") else None)
    names = [name for name, _ in made.named_parameters()]
    got = torch.autograd.grad((out_BTC * cotangent()).sum(), [x_BTC, *made.parameters()])
    assert_close(out_BTC, wanted.out_BTC, wanted.row_bound * wanted.out_BTC.abs().max().item(), "output")
    for name, gradient in zip(["x", *names], got, strict=True):
        # That of a bias of keys is a sum that cancels: as near as that of their weights.
        of_part = [g for other, g in wanted.gradients.items() if other.split(".")[0] == name.split(".")[0]]
        size = max(g.abs().max().item() for g in of_part)
        assert_close(gradient, wanted.gradients[name], wanted.row_bound * max(1.0, size), name)


@every_backend
@every_case
def test_every_statistic_is_that_of_the_definition(case: int, backend: str) -> None:
    made, wanted, seen = make(backend, **MATRIX[case]), expected(case), list[Observation]()
    segment = SEGMENT if MATRIX[case].get("segment") else None
    made.observers.append(seen.append)
    with torch.no_grad():
        made(stream(), segment_BT=segment)
    rows = rows_of(seen[0], BLOCK)
    assert (seen[0].window, seen[0].segment is segment) == (MATRIX[case].get("window"), True)
    blind_BHT = (
        torch.zeros_like(rows.sees_BHT) if segment is None else (segment < 0)[:, None].expand(-1, H, -1)
    )
    assert torch.equal(~rows.sees_BHT, blind_BHT)
    for name, (_, function) in REGISTRY.items():
        bound = wanted.row_bound if name == "max_logit" else 1e-5
        assert_close(function(rows), wanted.scores[name], bound, name)


@pytest.mark.parametrize(("qk", "value"), list(product(QKS, VALUES)))
@pytest.mark.parametrize("bias", [False, True])
def test_a_projection_that_is_not_used_is_not_there(qk: str, value: str, bias: bool) -> None:
    names = {name for name, _ in make("naive", qk=qk, value=value, bias=bias).named_parameters()}
    used = ["W_o"] + ["W_q"] * (qk != "identity") + ["W_k"] * (qk == "separate")
    used += ["W_v"] * (value == "project")
    kinds = ["weight", "bias"] if bias else ["weight"]
    assert names == {f"{W}.{kind}" for W in used for kind in kinds}


def test_with_identical_queries_and_keys_values_that_are_keys_are_the_identity() -> None:
    """The one pair of settings that means one thing: there are no projected keys then."""
    outs = [make("naive", qk="identity", value=value)(stream()) for value in ("key", "identity")]
    assert torch.equal(*outs)


@pytest.mark.parametrize("position", ["rotary", "learned"])
@pytest.mark.parametrize("qk", QKS)
def test_scores_are_symmetric_where_queries_are_keys(qk: str, position: str) -> None:
    """`s[i,j] = s[j,i]`: how much a token looks for another is how much it is looked for."""
    seen = list[Observation]()
    made = make("naive", qk=qk, position=position)
    made.observers.append(seen.append)
    made(stream())
    score_BHTT = seen[0].q_BHTD @ seen[0].k_BGSD.mT
    off = (score_BHTT - score_BHTT.mT).abs().max().item()
    assert off < 1e-4 if qk != "separate" else off > 1
