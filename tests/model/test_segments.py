"""Several documents and padding in a row: each token is predicted as if its document were alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.backends import BACKENDS
from model.transformer import GPT
from tests.model.models import KINDS, VOCAB, build_random, tokens

T = 32
ROTARY = [kind for kind in KINDS if KINDS[kind].get("position") != "learned"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
Row = list[tuple[int, list[int]]]  # documents, -1 for padding, and their tokens


def small(kind: str, backend: str, **changes: object) -> GPT:
    return build_random(kind, std=0.2, backend=backend, **changes)


@torch.no_grad()
def logits_of(document: tuple[int, list[int]], model: GPT, before: Row, after: Row) -> Tensor:
    """Of the document's own tokens, in a row with others."""
    row = [*before, document, *after]
    ids = torch.tensor([[token for _, part in row for token in part]])
    segment = torch.tensor([[number for number, part in row for _ in part]])
    first = sum(len(part) for _, part in before)
    return model(ids, segment_BT=segment)[0, first : first + len(document[1])]


def assert_same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-6 * max(1.0, expected.abs().max().item()), rtol=0)


text = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)  # five of these fit in T
beside = st.lists(
    st.tuples(st.integers(-1, 3), text), max_size=2
)  # documents in any order, padding among them


@every_backend
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(data=st.data())
def test_whatever_stands_beside_a_document_changes_none_of_its_logits(kind, backend, data) -> None:
    """In its place: what is beside it may be padding or other documents, and hold anything."""
    model, document = small(kind, backend), (4, data.draw(text))
    before, after, other_after = (data.draw(beside) for _ in range(3))
    padding = [(-1, [0 for _, part in before for _ in part])]
    alone = logits_of(document, model, padding, [])
    assert_same(logits_of(document, model, before, after), alone)
    assert_same(logits_of(document, model, padding, other_after), alone)


@every_backend
@pytest.mark.parametrize("kind", ROTARY)
@settings(max_examples=12)
@given(data=st.data())
def test_with_rotary_positions_it_may_also_move(kind, backend, data) -> None:
    model, document = small(kind, backend), (4, data.draw(text))
    with torch.no_grad():
        alone = model(torch.tensor([document[1]]))[0]
    got = logits_of(document, model, data.draw(beside), data.draw(beside))
    # The angle of a place is rounded, and so is the turn between two of them.
    torch.testing.assert_close(got, alone, atol=1e-5 * max(1.0, alone.abs().max().item()), rtol=0)


@every_backend
@pytest.mark.parametrize("kind", KINDS)
def test_no_document_reaches_into_another(kind: str, backend: str) -> None:
    """Exactly: the gradient of one document's logits by another's embeddings, and by padding's, is 0."""
    model, segment = small(kind, backend), torch.tensor([[0] * 9 + [-1] * 2 + [1] * 12 + [0] * 4 + [-1] * 5])
    leaf: list[Tensor] = []
    model.token_embedding.register_forward_hook(lambda _, inputs, out: leaf.append(out.detach()) or leaf[0])
    leaf_in = model.token_embedding.register_forward_hook(lambda _, inputs, out: out.requires_grad_())
    logits_BTV = model(tokens(1, T), segment_BT=segment)
    leaf_in.remove()
    for t in range(T):
        (gradient,) = torch.autograd.grad(logits_BTV[0, t].sum(), leaf[0], retain_graph=True)
        other = segment[0] != segment[0, t]
        if segment[0, t] == -1:  # padding sees nothing but itself, through the residual stream
            other = torch.arange(T) != t
        assert (gradient[0, other] == 0).all()
        assert (gradient[0, t] != 0).any()


@every_backend
def test_a_row_of_padding_alone_is_finite_and_gives_finite_gradients(backend: str) -> None:
    model = small("gated", backend)
    logits_BTV = model(tokens(2, T), segment_BT=torch.tensor([[-1] * T, [0] * T]))
    logits_BTV.square().sum().backward()
    assert logits_BTV.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        assert_same(logits_BTV[1].detach(), model(tokens(2, T)[1:])[0])


@every_backend
@pytest.mark.parametrize("kind", KINDS)
def test_one_document_in_all_of_a_row_is_no_document_at_all(kind: str, backend: str) -> None:
    model = small(kind, backend)
    with torch.no_grad():
        assert_same(model(tokens(2, T), segment_BT=torch.full((2, T), 7)), model(tokens(2, T)))
