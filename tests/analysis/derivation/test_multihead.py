"""Hulls against points whose distance is known, attention that leaves them, heads at depths made up."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from analysis.derivation import multihead
from analysis.derivation.finding import Finding, Subject
from analysis.derivation.multihead import depths, distance, hulls
from configs.schema import Model
from data.treebank import Sentence, Word
from model.backends import BACKENDS, naive
from model.transformer import GPT
from tests.analysis.derivation.planting import GIVEN
from tests.analysis.derivation.test_mask import lets_through


@pytest.mark.parametrize(
    ("y", "expected"),
    [((0, 0), 0), ((1, 0), 0), ((0.25, 0.25), 0), ((2, 0), 1), ((-3, -1), 3), ((1, 1), 0.5)],
)
def test_distances_to_a_triangle(y, expected):
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert distance(torch.tensor(y), corners) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(2, 30), st.integers(1, 6))
def test_a_mean_is_in_the_hull_and_a_step_beyond_the_farthest_point_is_as_far_from_it(seed, N, C):
    generator = torch.Generator().manual_seed(seed)
    u_NC = torch.randn(N, C, generator=generator, dtype=torch.float64)
    weight_N = torch.rand(N, generator=generator, dtype=torch.float64)
    assert distance(weight_N @ u_NC / weight_N.sum(), u_NC) < 1e-7
    beyond_C = u_NC[u_NC[:, 0].argmax()].clone()
    beyond_C[0] += 0.5
    assert distance(beyond_C, u_NC) == pytest.approx(0.5)


def failing(finding: Finding) -> list[str]:
    return [check.what.partition(":")[0] for check in finding.checks if not check.holds]


def test_one_head_stays_in_the_hull_and_several_do_not():
    finding = hulls(GIVEN)
    assert finding.verdict == "holds"
    assert finding.checks[0].measured == 1
    assert "[16, 8, 4, 2]" in finding.says[1]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """At the one deviation that the checks are about."""
    monkeypatch.setattr(multihead, "SHARPNESS", (1,))


def plant(monkeypatch, attend) -> Finding:
    monkeypatch.setitem(BACKENDS, "sdpa", attend)
    return hulls(GIVEN)


def test_weights_that_do_not_sum_to_1_leave_the_hull(monkeypatch):
    finding = plant(monkeypatch, lambda q, k, v, **rest: (1.3 * naive.attend(q, k, v, **rest)[0], None))
    assert (finding.verdict, failing(finding)) == ("holds in part", ["1 head"])


def test_a_mask_that_is_off_by_one_leaves_the_hull_of_what_is_seen(monkeypatch):
    monkeypatch.setattr(naive, "scores", lets_through(8))
    finding = plant(monkeypatch, naive.attend)
    assert (finding.verdict, failing(finding)) == ("holds in part", ["1 head"])


def test_heads_that_all_look_alike_stay_in_the_hull(monkeypatch):
    def alike(q: Tensor, k: Tensor, v: Tensor, **rest: object) -> tuple[Tensor, None]:
        return naive.attend(q[:, :1].expand_as(q), k[:, :1].expand_as(k), v, **rest)[0], None

    finding = plant(monkeypatch, alike)
    assert (finding.verdict, failing(finding)) == ("holds in part", ["2 heads", "4 heads", "8 heads"])


def subject(L: int = 9, sentences: list[Sentence] | None = None, bos: int | None = 0) -> Subject:
    gpt = GPT(Model(n_layer=L, n_head=2, d_model=8, context_length=17), 11)
    trained = {"bos": bos, "bos_trained": True, "seed": 1}
    return Subject("deep", "--run runs/deep", gpt, {}, torch.zeros(1), **trained, sentences=sentences)


@pytest.fixture
def look(monkeypatch):
    """The finding of a model whose heads have labels at these layers."""

    def found(labels: dict[str, list[int]], **options) -> Finding:
        heads = [{"layer": layer, "labels": [label]} for label, layers in labels.items() for layer in layers]
        monkeypatch.setattr(multihead, "describe_heads", lambda *given: {"heads": heads})
        monkeypatch.setattr(multihead, "add_syntax", lambda *given: None)
        return depths(replace(GIVEN, subjects=[subject(**options)]))

    return found


AS_TOLD = {
    "previous-token": [0, 1, 1, 2, 2, 2],
    "syntactic:nsubj": [3, 4, 4, 4],
    "syntactic:obj": [5, 5],
    "induction": [3, 4, 5, 6, 7, 7, 8, 8, 8, 8],
    "sink": [*range(9)],
}


def test_heads_where_the_text_has_them_hold(look):
    finding = look(AS_TOLD)
    assert finding.verdict == "holds"
    (table,) = finding.tables
    assert {kind: row for kind, *row in table.rows} == {
        "previous-token": ["6", "0", "0"],
        "syntactic": ["0", "6", "0"],
        "induction": ["0", "3", "7"],
        "sink": ["3", "3", "3"],
    }
    assert [column.rpartition(" ")[2] for column in table.columns[1:]] == ["6", "6", "6"]  # 3 layers of 2


@pytest.mark.parametrize(
    ("kind", "layers", "holds"),
    [
        ("previous-token", [8] * 9, False),
        ("previous-token", [0, 0], True),  # as few as these are enough against a third
        ("previous-token", [0], None),
        ("previous-token", [0, 1, 4, 5, 8, 8], None),  # a third of them, as of all heads
        ("syntactic:nsubj", [0] * 9, False),
        ("induction", [0] * 6, False),
        ("induction", [4, 8], None),  # two of two, against two thirds
        ("sink", [*range(1, 9)], False),
    ],
)
def test_heads_elsewhere_do_not_and_few_heads_tell_nothing(kind, layers, holds, look):
    finding = look(AS_TOLD | {"syntactic:obj": []} | {kind: layers})
    word = kind.partition(":")[0]
    (check,) = [check for check in finding.checks if word in check.what]
    assert check.holds is holds
    if holds is False:
        assert finding.verdict == "holds in part"


def test_a_model_of_four_layers_has_no_thirds(look):
    finding = look({"previous-token": [0, 0], "induction": [2], "sink": [0]}, L=4)
    assert finding.verdict == "not measured"
    assert "4 layers of deep" in finding.missing[0]
    assert "no sink in layers [1, 2, 3]" in finding.says[0]
    assert [row for kind, *row in finding.tables[0].rows if kind == "previous-token"] == [["2", "0", "0"]]


def test_without_bos_nothing_is_said_of_sinks(look):
    finding = look(AS_TOLD | {"sink": []}, bos=None)
    assert finding.verdict == "holds"
    assert "no BOS" in finding.says[0]


def test_what_would_measure_it_is_told_without_a_model_and_without_a_treebank(look):
    assert depths(GIVEN).verdict == "not measured"
    assert "--model FILE.gguf" in depths(GIVEN).missing[0]
    assert look(AS_TOLD).missing == [
        "syntactic heads: `python -m scripts.derive --run runs/deep --treebank FILE.conllu`"
    ]


def phrase(objects_first: int, objects_last: int) -> Sentence:
    """Pairs of a preposition and its object, in that order or the other (as in Hindi)."""
    words: list[Word] = []
    for first in [True] * objects_first + [False] * objects_last:
        here = len(words)
        pair = [(None, "obl"), (here, "case")] if first else [(here + 1, "case"), (None, "obl")]
        words += [Word(0, 0, head, relation, 1) for head, relation in pair]
    return Sentence("", words)


@pytest.mark.parametrize(("first", "last", "holds"), [(1, 99, False), (99, 1, True), (50, 50, None)])
def test_a_preposition_sees_an_object_that_comes_before_it(first, last, holds, look):
    finding = look(AS_TOLD, sentences=[phrase(first, 0), phrase(0, last)])
    (check,) = [check for check in finding.checks if "prepositions" in check.what]
    assert (check.measured, check.holds) == (first / 100, holds)
    assert not finding.missing
