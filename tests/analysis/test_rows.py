"""Both ways to the weights, and every statistic from them, against their definitions in float64."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from analysis.rows import ExplicitRows, Rows
from analysis.statistics import REGISTRY
from model.backends import BACKENDS
from tests.analysis.definitions import Layer, entropy, scores
from tests.model.definition import Attention

OPTIONS = ["plain", "window", "sink", "segments", "all"]
SIZES = {64: 21, 300: 13}  # T and the length of a repeated block: 3 and 23 blocks behind the first token
every_way = pytest.mark.parametrize("way", [Rows, ExplicitRows])
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def make_layer(T: int = 64, factor: float = 1.0, option: str = "plain", G: int = 2, group: int = 2) -> Layer:
    """Random heads whose scores have standard deviation `factor`."""
    B, H, D, C = 2, G * group, 16, 24
    generator = torch.Generator().manual_seed(T)
    q, k, v, W_o = (
        torch.randn(shape, generator=generator)
        for shape in [(B, H, T, D), (B, G, T, D), (B, G, T, D), (C, H * D)]
    )
    options: dict[str, Any] = {"scale": D**-0.5}
    if option in ("window", "all"):
        options["window"] = 20
    if option in ("sink", "all"):
        options["sink_H"] = torch.tensor([-1.0, 0.0, 2.0, 5.0])[:H]
    if option in ("segments", "all"):  # documents and padding, not the same number of rows in both sequences
        ends = torch.tensor([[T // 4, T // 2, T // 2 + 5], [T // 3, T - 9, T]])
        place = (torch.arange(T)[:, None] >= ends[:, None]).sum(-1)
        options["segment"] = torch.tensor([[3, 7, -1, 9], [9, 3, -1, 7]]).gather(1, place)
    return Layer(factor * q, k, v, W_o, options)


@cache
def case(T: int, factor: float, option: str) -> tuple[Layer, Attention, dict[str, Tensor]]:
    layer = make_layer(T, factor, option)
    return layer, layer.attention(), scores(layer, SIZES[T])


def assert_close(got: Tensor, expected: Tensor, bound: float, name: str = "") -> None:
    torch.testing.assert_close(
        got.double(), expected.double(), atol=bound, rtol=0.0, msg=lambda m: f"{name}: {m}"
    )


@every_way
@every_backend
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("T", "factor"), [(64, 1), (64, 5), (64, 30), (300, 5)])
def test_every_statistic_agrees_with_its_definition(
    T: int, factor: float, option: str, backend: str, way: type[Rows]
) -> None:
    """300 rows are more than two blocks of rows: a mask that goes by the place in a block would leak."""
    layer, a, expected = case(T, factor, option)
    rows = way(layer.seen(backend), SIZES[T])
    assert expected.keys() == REGISTRY.keys(), "a statistic without a definition to test it by"
    for name, (_, function) in REGISTRY.items():
        assert_close(function(rows), expected[name], a.row_bound if name == "max_logit" else 1e-5, name)


@every_way
@every_backend
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("factor", [0, 1, 30])
def test_every_row_agrees_with_its_definition(
    factor: float, option: str, backend: str, way: type[Rows]
) -> None:
    layer, a, _ = case(64, factor, option)
    rows = way(layer.seen(backend))
    sees_BHT = a.seen_BTS.any(-1).unsqueeze(1).expand(a.lse_BHT.shape)
    assert torch.equal(rows.sees_BHT, sees_BHT)
    for name, got, expected in (
        ("entropy", rows.entropy(), entropy(a)),
        ("max_logit", rows.max_logit(), a.s_BHTS.amax(-1)),
        ("first", rows.weight(0 * rows.i), a.A_BHTS[..., 0]),
        ("own", rows.weight(rows.i), a.A_BHTS.diagonal(dim1=-2, dim2=-1)),
        ("any, some of the future", rows.weight(63 - rows.i), a.A_BHTS.flip(-1).diagonal(dim1=-2, dim2=-1)),
    ):
        assert_close(got[sees_BHT], expected[sees_BHT], a.row_bound, name)


@every_way
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("distance", [-1, -64, 64])
def test_a_key_before_the_first_or_after_the_last_has_no_weight(
    distance: int, option: str, way: type[Rows]
) -> None:
    rows = way(make_layer(64, 1.0, option).seen("sdpa"))
    weight_BHT = rows.weight(rows.i - distance)
    assert weight_BHT.shape == rows.lse_BHT.shape
    assert (weight_BHT == 0).all()


@every_way
@every_backend
@pytest.mark.parametrize("option", OPTIONS)
def test_the_weights_of_a_row_and_of_its_sink_sum_to_one(option: str, backend: str, way: type[Rows]) -> None:
    seen = make_layer(33, 5.0, option).seen(backend)
    rows = way(seen)
    total_BHT = sum(rows.weight(torch.full_like(rows.i, j)) for j in range(33))
    if seen.sink_H is not None:
        total_BHT = total_BHT + (seen.sink_H[:, None] - rows.lse_BHT).exp().where(rows.sees_BHT, 0.0)
    assert_close(total_BHT, rows.sees_BHT, 1e-5)


def shifted(layer: Layer, factor: float = 3.0) -> Layer:
    """One vector added to every key: all scores of a query move by the same amount."""
    vector_D = factor * torch.randn(16, generator=torch.Generator().manual_seed(4))
    return replace(layer, k_BGSD=layer.k_BGSD + vector_D)


def permuted(layer: Layer, order: list[int]) -> Layer:
    """The heads in another order; as many key heads as query heads."""
    columns = [16 * h + d for h in order for d in range(16)]
    q, k, v = (x[:, order] for x in (layer.q_BHTD, layer.k_BGSD, layer.v_BGSD))
    options = {name: x[order] if name == "sink_H" else x for name, x in layer.options.items()}
    return Layer(q, k, v, layer.W_o[:, columns], options)


@every_way
@every_backend
@pytest.mark.parametrize("option", ["plain", "window", "segments"])
def test_adding_a_vector_to_every_key_changes_only_the_largest_score(
    option: str, backend: str, way: type[Rows]
) -> None:
    layer = make_layer(64, 1.0, option)
    rows, moved = (way(x.seen(backend), 21) for x in (layer, shifted(layer)))
    for name, (_, function) in REGISTRY.items():
        if name != "max_logit":
            assert_close(function(moved), function(rows), 1e-5, name)
    by_BHT = layer.options["scale"] * (layer.q_BHTD @ (shifted(layer).k_BGSD - layer.k_BGSD)[0, 0, 0])
    sees_BHT = rows.sees_BHT
    assert_close((moved.max_logit() - rows.max_logit())[sees_BHT], by_BHT[sees_BHT], 2e-5)


@every_way
@every_backend
@pytest.mark.parametrize("option", OPTIONS)
def test_permuting_heads_permutes_their_scores(option: str, backend: str, way: type[Rows]) -> None:
    layer, order = make_layer(64, 1.0, option, G=4, group=1), [2, 0, 3, 1]
    rows, moved = (way(x.seen(backend), 21) for x in (layer, permuted(layer, order)))
    for name, (_, function) in REGISTRY.items():
        assert_close(function(moved), function(rows)[order], 1e-6, name)


@every_way
@every_backend
@pytest.mark.parametrize("option", OPTIONS)
def test_grouped_heads_score_as_if_each_had_keys_of_its_own(
    option: str, backend: str, way: type[Rows]
) -> None:
    layer = make_layer(64, 1.0, option, G=2, group=2)
    own = replace(layer, **{x: getattr(layer, x)[:, [0, 0, 1, 1]] for x in ("k_BGSD", "v_BGSD")})
    rows, same = (way(x.seen(backend), 21) for x in (layer, own))
    for name, (_, function) in REGISTRY.items():
        assert_close(function(rows), function(same), 1e-6, name)


@every_way
@every_backend
def test_what_padding_holds_changes_no_statistic(backend: str, way: type[Rows]) -> None:
    """Padding comes first as well, where keys are taken relative to key 0."""
    layer = make_layer(64, 1.0)
    segment = torch.zeros(2, 64, dtype=torch.long)
    segment[:, [0, 1, 2, 30, 62, 63]] = -1
    padding_BGT1 = (segment == -1)[:, None, :, None]
    inputs = (layer.q_BHTD, layer.k_BGSD, layer.v_BGSD)
    garbage = [x.where(~padding_BGT1, 7.0) for x in inputs]
    layers = [Layer(*x, layer.W_o, layer.options | {"segment": segment}) for x in (inputs, garbage)]
    rows, other = (way(x.seen(backend), 21) for x in layers)
    for name, (_, function) in REGISTRY.items():
        assert_close(function(rows), function(other), 1e-5, name)
    assert torch.equal(rows.sees_BHT, (segment != -1)[:, None].expand(-1, 4, -1))


@every_way
@every_backend
def test_a_document_behind_padding_has_the_rows_it_has_alone(backend: str, way: type[Rows]) -> None:
    layer = make_layer(64, 1.0)
    segment = torch.cat([torch.full((2, 24), -1), torch.zeros(2, 40, dtype=torch.long)], dim=1)
    padded = way(replace(layer, options=layer.options | {"segment": segment}).seen(backend))
    cut = {x: getattr(layer, x)[:, :, 24:] for x in ("q_BHTD", "k_BGSD", "v_BGSD")}
    alone = way(replace(layer, **cut).seen(backend))
    assert_close(padded.entropy()[..., 24:], alone.entropy(), 1e-5)
    assert_close(padded.max_logit()[..., 24:], alone.max_logit(), 1e-5)
    assert_close(padded.weight(padded.i - 1)[..., 25:], alone.weight(alone.i - 1)[..., 1:], 1e-5)
    assert_close(padded.log_outcomes()[..., 24:], alone.log_outcomes(), 1e-6)


@every_way
@every_backend
def test_a_query_that_is_not_finite_is_not_left_out_of_a_mean(backend: str, way: type[Rows]) -> None:
    """A row that sees nothing is skipped; one that holds NaN is a fault, and must show as one."""
    layer = make_layer(64, 1.0)
    layer.q_BHTD[1, 2, 40] = torch.nan
    rows = way(layer.seen(backend))
    for name in ("entropy", "previous", "current", "max_logit"):
        score_H = REGISTRY[name][1](rows)
        assert score_H.isnan().tolist() == [False, False, True, False], name


@every_way
def test_a_norm_that_is_not_finite_shows_in_every_head_of_its_layer(way: type[Rows]) -> None:
    """It divides them all; a layer of zeros is another thing."""
    layer = make_layer(17, 1.0)
    seen = layer.seen("sdpa")
    seen.out_BHTD[0, 1, 3] = torch.nan
    assert REGISTRY["head_norm"][1](way(seen)).isnan().all()
