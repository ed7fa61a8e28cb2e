"""Every backend against the float64 definition: outputs, log-sum-exp and all gradients."""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.backends import BACKENDS, sdpa
from tests.model.definition import Attention, attention

SHAPES = [(1, 1), (2, 2), (33, 33), (64, 64), (257, 257), (1, 33), (7, 33), (130, 257)]  # T, S
OPTIONS = ["plain", "window", "sink", "segments", "all"]


class Case(NamedTuple):
    inputs: list[Tensor]  # q, k, v and, where there is one, the sink logit
    options: dict[str, Any]
    cotangent_BHTD: Tensor
    expected: Attention
    gradients: tuple[Tensor, ...]


def make_case(
    T: int,
    S: int,
    factor: float,
    *,
    B: int = 2,
    G: int = 2,
    group: int = 2,
    D: int = 16,
    seed: int = 0,
    sink: bool = False,
    **options: Any,
) -> Case:
    """Scores of standard deviation `factor`, and what the definition makes of them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, G * group, T, D), (B, G, S, D), (B, G, S, D), (B, G * group, T, D)]
    q, k, v, cotangent = (torch.randn(shape, generator=generator) for shape in shapes)
    inputs = [factor * q, k, v] + ([2 * torch.randn(G * group, generator=generator)] if sink else [])
    options["scale"] = D**-0.5
    leaves = [x.double().requires_grad_() for x in inputs]
    expected = attention(*leaves[:3], sink_H=leaves[3] if sink else None, **options)
    gradients = torch.autograd.grad((expected.out_BHTD * cotangent).sum(), leaves)
    detached = Attention(*(x.detach() for x in expected))
    return Case(inputs, options, cotangent, detached, gradients)


@cache
def standard_case(T: int, S: int, factor: float, option: str) -> Case:
    chosen: dict[str, Any] = {"sink": option in ("sink", "all")}
    if option in ("window", "all"):
        chosen["window"] = 5
    if option in ("segments", "all"):
        # One sequence with its documents at the front and padding behind, one the other way round.
        place = torch.arange(S)
        chosen["segment"] = torch.stack([place * 4 // S, (place * 4).flip(0) // S])
        chosen["segment"][chosen["segment"] == 3] = -1
    return make_case(T, S, factor, **chosen)


def run(backend: str, case: Case) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    leaves = [x.clone().requires_grad_() for x in case.inputs]
    sink_H = leaves[3] if len(leaves) == 4 else None
    out, lse = BACKENDS[backend](*leaves[:3], sink_H=sink_H, **case.options, return_lse=True)
    return out.detach(), lse.detach(), torch.autograd.grad((out * case.cotangent_BHTD).sum(), leaves)


def assert_agrees(backend: str, case: Case) -> None:
    out, lse, gradients = run(backend, case)
    expected, bound = case.expected, case.expected.row_bound
    assert_close(lse, expected.lse_BHT, bound)
    # An error in a score is a relative error of its weight, and grows with what the weight multiplies.
    v_max = case.inputs[2].abs().max().item()
    assert_close(out, expected.out_BHTD, bound * max(1.0, v_max))
    for got, gradient in zip(gradients, case.gradients, strict=True):
        assert_close(got, gradient, bound * max(1.0, gradient.abs().max().item()))


def assert_close(got: Tensor, expected: Tensor, bound: float) -> None:
    torch.testing.assert_close(got.double(), expected, atol=bound, rtol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("factor", [0, 1, 30])
@pytest.mark.parametrize(("T", "S"), SHAPES)
def test_agrees_with_the_definition(T: int, S: int, factor: float, option: str, backend: str) -> None:
    assert_agrees(backend, standard_case(T, S, factor, option))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    S = draw(st.integers(1, 40))
    T = draw(st.sampled_from([1, S]) | st.integers(1, S))
    B = draw(st.integers(1, 2))
    options: dict[str, Any] = {"window": draw(st.none() | st.integers(1, S + 2)), "sink": draw(st.booleans())}
    if draw(st.booleans()):  # documents in any order, padding anywhere
        row = st.lists(st.integers(-1, 2), min_size=S, max_size=S)
        options["segment"] = torch.tensor(draw(st.lists(row, min_size=B, max_size=B)))
    sizes = {"G": draw(st.integers(1, 2)), "group": draw(st.integers(1, 3)), "D": draw(st.integers(1, 17))}
    return make_case(T, S, draw(st.sampled_from([0, 1, 30])), B=B, **sizes, seed=S, **options)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(case=cases())
def test_backends_agree_with_the_definition_for_any_shape_and_option(case: Case) -> None:
    for backend in BACKENDS:
        assert_agrees(backend, case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink", [False, True])
def test_a_row_that_sees_nothing_gives_zero_and_passes_no_gradient(backend: str, sink: bool) -> None:
    segment = torch.tensor([[-1, 0, 0, -1, 0, -1], [-1] * 6])
    case = make_case(6, 6, 1.0, sink=sink, segment=segment)
    padding_BT = segment == -1
    out, lse, (dq, dk, dv, *d_sink) = run(backend, case)
    for x in (out, dq, dk, dv):
        assert x.isfinite().all()
        assert (x.transpose(1, 2)[padding_BT] == 0).all()
    assert (lse.transpose(1, 2)[padding_BT] == -torch.inf).all()
    assert lse.transpose(1, 2)[~padding_BT].isfinite().all()
    assert all(x.isfinite().all() for x in d_sink)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cut", [1, 5])
def test_queries_stand_at_the_end_of_the_keys(backend: str, cut: int) -> None:
    """The last rows alone, against all keys, are the last rows of the whole."""
    q, k, v = make_case(40, 40, 1.0).inputs
    whole, whole_lse = BACKENDS[backend](q, k, v, scale=0.25, return_lse=True)
    last, last_lse = BACKENDS[backend](q[:, :, -cut:], k, v, scale=0.25, return_lse=True)
    torch.testing.assert_close(last, whole[:, :, -cut:], atol=1e-5, rtol=0)
    torch.testing.assert_close(last_lse, whole_lse[..., -cut:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [12, 200])
def test_what_padding_holds_never_changes_other_rows(backend: str, T: int) -> None:
    padding_T = torch.arange(T) % 5 == 0
    segment = torch.where(padding_T, -1, 0).expand(2, T)
    inputs = make_case(T, T, 1.0).inputs
    garbage = [x.where(~padding_T[:, None], 1e4) for x in inputs]
    options = {"scale": 0.25, "segment": segment, "return_lse": True}
    (out, lse), (out_garbage, lse_garbage) = (BACKENDS[backend](*x, **options) for x in (inputs, garbage))
    assert torch.equal(out, out_garbage)
    assert torch.equal(lse, lse_garbage)


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_in_one_row_attend_as_if_each_were_alone(backend: str) -> None:
    q, k, v = make_case(50, 50, 1.0).inputs
    segment = torch.tensor([0] * 20 + [1] * 30).expand(2, 50)
    packed, packed_lse = BACKENDS[backend](q, k, v, scale=0.25, segment=segment, return_lse=True)
    for document in (slice(0, 20), slice(20, 50)):
        alone, lse = BACKENDS[backend](*(x[:, :, document] for x in (q, k, v)), scale=0.25, return_lse=True)
        torch.testing.assert_close(packed[:, :, document], alone, atol=1e-5, rtol=0)
        torch.testing.assert_close(packed_lse[..., document], lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_scores_average_the_visible_values(backend: str) -> None:
    _, k, v = make_case(64, 64, 1.0).inputs
    out, lse = BACKENDS[backend](torch.zeros(2, 4, 64, 16), k, v, scale=0.25, return_lse=True)
    count_T = torch.arange(1.0, 65.0)
    mean = (v.cumsum(2) / count_T[:, None]).repeat_interleave(2, dim=1)
    torch.testing.assert_close(out, mean, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse, count_T.log().expand(2, 4, 64), atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_hot_rows_copy_a_value_and_their_gradients_are_finite(backend: str) -> None:
    """Each query scores 10^4 with the key before it and 0 with the others."""
    T = 140
    k = v = torch.eye(T)[None, None].requires_grad_()
    q = (1e4 * torch.eye(T).roll(-1, dims=1))[None, None].requires_grad_()
    out, _ = BACKENDS[backend](q, k, v, scale=1.0)
    assert torch.equal(out[0, 0, 1:], v[0, 0, :-1])
    gradients = torch.autograd.grad((out * torch.arange(T)).sum(), [q, k])
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lse_is_returned_only_on_request(backend: str) -> None:
    q, k, v = make_case(9, 9, 1.0).inputs
    out, lse = BACKENDS[backend](q, k, v, scale=0.25)
    assert lse is None
    same, _ = BACKENDS[backend](q, k, v, scale=0.25, return_lse=True)
    torch.testing.assert_close(out, same, atol=1e-6, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2), (0, 3, 2, 1)])
def test_the_order_of_the_numbers_in_memory_makes_no_difference(backend: str, axes: tuple[int, ...]) -> None:
    """Rotary queries of two features lie apart; freed memory is NaN here, so that reading it shows."""
    case, back = standard_case(64, 64, 1, "plain"), torch.tensor(axes).argsort().tolist()
    q, k, v = (x.permute(axes).contiguous().permute(back) for x in case.inputs)
    assert torch.equal(q, case.inputs[0])
    for _ in range(20):
        freed = [torch.full((2**power,), torch.nan) for power in range(4, 18) for _ in range(4)]
        del freed
        out, lse = BACKENDS[backend](q, k, v, return_lse=True, **case.options)
        torch.testing.assert_close(out.double(), case.expected.out_BHTD, atol=1e-5, rtol=0)
        torch.testing.assert_close(lse.double(), case.expected.lse_BHT, atol=1e-5, rtol=0)


def test_on_another_device_the_operator_of_cpus_is_not_even_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sdpa, "_with_lse")
    q_BHTD = torch.zeros(2, 3, 5, 8, device="meta")
    out_BHTD, lse_BHT = sdpa.attend(q_BHTD, q_BHTD, q_BHTD, scale=1.0, return_lse=True)
    assert out_BHTD.device == lse_BHT.device == q_BHTD.device
    assert lse_BHT.shape == (2, 3, 5)
