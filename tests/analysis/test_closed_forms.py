"""Heads whose numbers are known in closed form: uniform ones, one-hot ones, and the edges of definitions."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from analysis.rows import Rows, rows_of
from analysis.statistics import REGISTRY
from model.backends import BACKENDS
from tests.analysis.definitions import Layer

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def score(name: str, rows: Rows) -> list[float]:
    """One number per head."""
    return REGISTRY[name][1](rows).tolist()


def rows_from(backend: str, q: Tensor, k: Tensor, block_length: int | None = None) -> Rows:
    """Rows of heads with these queries and keys, unscaled."""
    H, D = q.shape[1], q.shape[3]
    return rows_of(Layer(q, k, k, torch.eye(H * D), {"scale": 1.0}).seen(backend), block_length)


def uniform(backend: str, T: int, block_length: int | None = None) -> Rows:
    """Three sequences, one head, zero queries: each query spreads evenly over what it sees."""
    k = torch.randn(3, 1, T, 8, generator=torch.Generator().manual_seed(0))
    return rows_from(backend, torch.zeros_like(k), k, block_length)


def pointing(backend: str, target_T: Tensor, block_length: int | None = None) -> Rows:
    """Query i scores 200 with key `target_T[i]` and 0 with the others, which leaves those no weight."""
    key_TT = torch.eye(len(target_T))
    query_TT = 200.0 * (target_T[:, None] == torch.arange(len(target_T)))
    return rows_from(backend, query_TT[None, None], key_TT[None, None], block_length)


@pytest.mark.parametrize(
    ("name", "first", "rounded"),
    [("sink", 4, 0.0443), ("previous", 2, 0.0523), ("previous2", 3, 0.0477), ("current", 1, 0.0594)],
)
def test_uniform_attention_gives_each_key_one_over_their_number(
    name: str, first: int, rounded: float, backend: str
) -> None:
    expected = sum(1 / (i + 1) for i in range(first, 64)) / (64 - first)
    assert expected == pytest.approx(rounded, abs=5e-5)
    assert score(name, uniform(backend, 64)) == pytest.approx([expected], abs=1e-6)


def test_uniform_attention_has_the_entropy_of_the_number_of_keys(backend: str) -> None:
    rows = uniform(backend, 64)
    assert score("entropy", rows) == pytest.approx([sum(math.log(i) for i in range(2, 65)) / 63], abs=1e-5)
    assert score("entropy_normalized", rows) == pytest.approx([1.0], abs=1e-5)
    assert score("max_logit", rows) == pytest.approx([0.0], abs=1e-5)


@pytest.mark.parametrize("T", [64, 257])
def test_the_mean_behind_sink_rate_takes_the_first_64_rows(T: int, backend: str) -> None:
    rows = uniform(backend, T)
    mean_B1 = rows.mean(rows.weight(0 * rows.i), only=rows.i < 64, axes=2)
    expected = sum(1 / i for i in range(1, 65)) / 64
    assert expected == pytest.approx(0.0741, abs=5e-5)
    assert mean_B1.flatten().tolist() == pytest.approx([expected] * 3, abs=1e-6)
    assert score("sink_rate", rows) == [0.0]


@pytest.mark.parametrize("T", [64, 100])
def test_sink_rate_counts_the_sequences_whose_mean_exceeds_the_threshold(T: int, backend: str) -> None:
    """Key 0 scores log(i share / (1 - share)) and the others 0, which gives it `share` of a row.

    The first row sees key 0 alone, so the mean of 64 rows is (1 + 63 share) / 64: 0.3 for a share of 0.289.
    """
    share_B1 = torch.tensor([[0.1], [0.285], [0.293], [0.6]])
    q, k = torch.zeros(4, 1, T, 8), torch.zeros(4, 1, T, 8)
    q[:, 0, 1:, 0] = torch.log(torch.arange(1.0, T) * share_B1 / (1 - share_B1))
    q[:, 0, 64:, 0] = 0.0  # later rows must not count
    k[:, 0, 0, 0] = 1.0
    rows = rows_from(backend, q, k)
    mean_B1 = rows.mean(rows.weight(0 * rows.i), only=rows.i < 64, axes=2)
    torch.testing.assert_close(mean_B1, (1 + 63 * share_B1.double()) / 64, atol=1e-5, rtol=0)
    assert score("sink_rate", rows) == [0.5]


@pytest.mark.parametrize(
    ("s", "R", "rounded"), [(50, 2, 0.0136), (31, 2, 0.0216), (16, 3, 0.0447), (25, 4, 0.0307)]
)
def test_null_of_induction_and_duplicate(s: int, R: int, rounded: float, backend: str) -> None:
    """A query of block b has b keys on its stripe, each with 1 / (i + 1) under uniform attention."""
    on_stripe = [b / (i + 1) for b in range(1, R) for i in range(b * s + 1, (b + 1) * s + 1)]
    null = sum(on_stripe) / len(on_stripe)
    assert null == pytest.approx(rounded, abs=5e-5)
    rows = uniform(backend, R * s + 1, s)
    assert score("induction", rows) == pytest.approx([null], abs=1e-6)
    assert score("duplicate", rows) == pytest.approx([null], abs=1e-6)


TARGETS = {
    "previous": lambda i, s: i - 1,
    "the one before": lambda i, s: i - 2,
    "itself": lambda i, s: i,
    "first": lambda i, s: 0,
    "first token after BOS": lambda i, s: 1,  # where a stripe that is one cell too long would end
    "first token of the second block": lambda i, s: s + 1,
    "after its last occurrence": lambda i, s: i - s + 1,
    "its last occurrence": lambda i, s: i - s,
    "before its last occurrence": lambda i, s: i - s - 1,
    "after the occurrence before": lambda i, s: i - 2 * s + 1,
    "the occurrence before": lambda i, s: i - 2 * s,
    "last token of the first block": lambda i, s: s,
}


def counted(target: list[int], s: int, R: int) -> dict[str, float]:
    """The scores of a head that gives all its weight to `target[i]`, by looking at the tokens."""
    tokens = [-1, *(range(s)), *(list(range(s)) * (R - 1))]
    T = len(tokens)

    def share(first: int, keys: Callable[[int], list[int]]) -> float:
        return sum(target[i] in keys(i) for i in range(first, T)) / (T - first)

    return {
        "current": share(1, lambda i: [i]),
        "previous": share(2, lambda i: [i - 1]),
        "previous2": share(3, lambda i: [i - 2]),
        "sink": share(4, lambda i: [0]),
        "sink_rate": float(sum(j == 0 for j in target[:64]) / min(T, 64) > 0.3),
        "induction": share(s + 1, lambda i: [j for j in range(1, i + 1) if tokens[j - 1] == tokens[i]]),
        "duplicate": share(s + 1, lambda i: [j for j in range(i) if tokens[j] == tokens[i]]),
        "entropy": 0.0,
        "entropy_normalized": 0.0,
        "max_logit": 200.0,
    }


@pytest.mark.parametrize(("s", "R"), [(31, 2), (16, 3), (5, 4)])
@pytest.mark.parametrize("kind", TARGETS)
def test_a_head_on_one_key_scores_the_share_of_queries_for_which_it_is_the_key(
    kind: str, s: int, R: int, backend: str
) -> None:
    """Where a head would look ahead of its query or before key 0, it takes the nearest key there is.

    So swapping two statistics, a stripe one place off or one cell too long all show.
    """
    T = R * s + 1
    target = [min(max(TARGETS[kind](i, s), 0), i) for i in range(T)]
    rows = pointing(backend, torch.tensor(target), s)
    for name, expected in counted(target, s, R).items():
        bound = 1e-6 * 200 if name in ("entropy", "entropy_normalized", "max_logit") else 1e-6
        assert score(name, rows) == pytest.approx([expected], abs=bound), name


def test_head_norm_is_the_norm_of_what_is_added_over_the_mean_of_the_layer(backend: str) -> None:
    """Heads that pass on a vector of norm 1, through an orthonormal map times 1, 2, 3, 6."""
    v = torch.zeros(2, 4, 20, 5)
    v[..., 2] = 1.0
    generator = torch.Generator().manual_seed(0)
    maps = [torch.linalg.qr(torch.randn(12, 5, generator=generator))[0] * size for size in (1, 2, 3, 6)]
    layer = Layer(torch.zeros_like(v), torch.zeros_like(v), v, torch.cat(maps, dim=1), {"scale": 1.0})
    assert score("head_norm", rows_of(layer.seen(backend))) == pytest.approx([1 / 3, 2 / 3, 1, 2], rel=1e-5)


def test_head_norm_of_a_layer_that_adds_nothing_is_zero(backend: str) -> None:
    q = torch.ones(2, 4, 20, 5)
    layer = Layer(q, q, q, torch.zeros(12, 20), {"scale": 1.0})
    assert score("head_norm", rows_of(layer.seen(backend))) == [0.0] * 4
