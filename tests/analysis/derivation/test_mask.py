"""What fills a mask and who finds a NaN: against numpy's softmax, and with attention that is broken."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from analysis.derivation.finding import Finding, Given
from analysis.derivation.mask import S, guards, masks
from model.backends import BACKENDS, naive
from training.guards import first_nonfinite

GIVEN = Given(first_nonfinite)


def holding(finding: Finding) -> dict[str, bool | None]:
    return {check.what: check.holds for check in finding.checks if not check.premise}


def cells(finding: Finding) -> dict[tuple[str, str], str]:
    (table,) = finding.tables
    columns = table.columns[1:]
    return {(way, x): cell for way, *row in table.rows for x, cell in zip(columns, row, strict=True)}


@pytest.fixture(scope="module")
def masked() -> Finding:
    return masks(GIVEN)


def test_the_text_is_right_about_the_fill_and_wrong_about_the_row_with_all_masked(masked):
    assert masked.verdict == "holds in part"
    assert [what for what, holds in holding(masked).items() if not holds] == [
        "fp16: masked_fill takes -1e9 (1) or refuses it (0)",
        "filled with -1e9, all keys hidden, bf16: share of weights that are NaN",
        "filled with -inf, all keys hidden, bf16: share of weights that are NaN",
    ]
    assert all(check.holds for check in masked.checks if check.premise)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("name", ["fp16", "fp32"])
@pytest.mark.parametrize("fill", ["-inf", "-1e9"])
@pytest.mark.parametrize("hidden", ["some", "all"])
def test_weights_on_masked_keys_are_those_of_numpy(masked, name, fill, hidden):
    dtype = {"fp16": np.float16, "fp32": np.float32}[name]
    s_S = np.linspace(-1, 1, S).astype(dtype)
    s_S[0 if hidden == "all" else S // 2 :] += dtype(float(fill))
    e_S = np.exp(s_S - s_S.max())
    weight = (e_S / e_S.sum())[-1]
    forward, _ = cells(masked)[f"{fill}, added", f"{hidden} hidden, {name}"].split("; ")
    assert forward == ("NaN" if np.isnan(weight) else {0: "0", 1 / S: f"1/{S}"}[float(weight)])


def test_what_is_skipped_has_neither_weight_nor_gradient_and_what_is_filled_may_have_both(masked):
    found = cells(masked)
    for (way, column), cell in found.items():
        if way.startswith("skipped"):
            assert cell == "0; 0"
        if column.startswith("some") and cell != "refused":
            assert cell == "0; 0"
    assert {found["-1e9, filled", f"{row} hidden, fp16"] for row in ("some", "all")} == {"refused"}
    assert found["-1e9, filled", "all hidden, fp32"] == f"1/{S}; into v"  # the fill keeps it from the scores
    assert found["-1e9, added", "all hidden, fp32"] == f"1/{S}; into q, k, v"
    assert found["-inf, added", "all hidden, fp32"] == "NaN; NaN in q, k, v"


def lets_through(places: int) -> Callable[..., Tensor]:
    """Scores whose mask is off by so many places."""

    def scores(
        q: Tensor, k: Tensor, scale: float, window: None = None, segment: Tensor | None = None
    ) -> Tensor:
        visible = torch.ones(q.size(2), k.size(2)).tril(k.size(2) - q.size(2) + places).bool()
        if segment is not None:
            own = segment[:, None, k.size(2) - q.size(2) :, None]
            visible = visible & (own == segment[:, None, None]) & (own >= 0)
        return (scale * q @ k.mT).masked_fill(~visible, -math.inf)

    return scores


@pytest.mark.parametrize(
    ("places", "verdict"), [(0, "holds in part"), (1, "does not hold"), (-1, "does not hold")]
)
def test_a_mask_that_is_off_by_one_changes_the_verdict(places, verdict, monkeypatch):
    monkeypatch.setattr(naive, "scores", lets_through(places))
    finding = masks(GIVEN)
    assert finding.verdict == verdict
    wrong = {
        check.what.split(":")[0]: check.measured
        for check in finding.checks
        if "the mask gets wrong" in check.what
    }
    # One more of each row but the last, one less of each.
    pairs = {0: 0, 1: S - 1, -1: S}[places]
    assert wrong == {"naive": pairs, "sdpa": 0, "blocks": pairs}


def test_a_fused_kernel_without_a_mask_changes_the_verdict(monkeypatch):
    def unmasked(q, k, v, *, scale, **options):
        return (scale * q @ k.mT).softmax(-1) @ v, None

    monkeypatch.setitem(BACKENDS, "sdpa", unmasked)
    assert masks(GIVEN).verdict == "does not hold"


def test_rows_that_see_nothing_and_are_not_zero_change_the_verdict(monkeypatch):
    def plain(s: Tensor, sink: None = None) -> tuple[Tensor, Tensor]:
        return s.softmax(-1), s.logsumexp(-1)

    monkeypatch.setattr(naive, "softmax", plain)
    finding = masks(GIVEN)
    assert finding.verdict == "does not hold"
    assert {check.what for check in finding.checks if check.premise and not check.holds} == {
        "ours, all keys hidden: largest weight or gradient",
        "ours, padded text: outputs of layers that are NaN",
    }


def test_gradients_that_reach_what_a_row_of_padding_does_not_see_change_the_verdict(monkeypatch):
    """Its weights are 0 all the same."""
    attend = BACKENDS["blocks"]

    def leaking(q, k, v, **options):
        out, lse = attend(q, k, v, **options)
        return out + (v - v.detach() if options.get("segment") is not None else 0), lse

    monkeypatch.setitem(BACKENDS, "blocks", leaking)
    finding = masks(GIVEN)
    assert finding.verdict == "does not hold"
    (failing,) = [check for check in finding.checks if check.premise and not check.holds]
    assert failing.what.startswith("ours, all keys hidden")


def test_the_assertion_finds_what_comes_by_queries_and_keys_and_the_guard_finds_all():
    finding = guards(GIVEN)
    assert finding.verdict == "holds in part"
    shares = [check.measured for check in finding.checks]
    assert shares == [1, 1, 0, 0, 0, 1, 1, 1]  # W_q and W_k of five; the layer, the tensor and the head
    (axes,) = finding.figures[0].axes
    named = {text.get_position(): text.get_text() for text in axes.texts}
    last = max(layer for layer, _ in named)
    for (layer, tensor), word in named.items():
        later = str(layer + 1) if layer < last else "none"
        assert word == (str(layer) if tensor in (0, 1) else later)


@pytest.mark.parametrize(
    ("guard", "lost"),
    [
        (lambda *asked: first_nonfinite(*asked).rpartition(" head")[0], ["head"]),
        (lambda *asked: first_nonfinite(*asked).replace("attention.", "mlp."), ["tensor"]),
        (lambda *asked: first_nonfinite(*asked).replace("layer", "layer 1"), ["layer"]),
    ],
)
def test_a_guard_that_names_less_is_told(guard, lost):
    finding = guards(Given(guard))
    assert finding.verdict == "does not hold"
    failing = [check.what for check in finding.checks if check.premise and not check.holds]
    assert failing == [f"share of NaN whose {what} our guard names" for what in lost]


def test_a_guard_that_names_nothing_changes_the_verdict():
    assert guards(Given(lambda *asked: "the loss")).verdict == "does not hold"
