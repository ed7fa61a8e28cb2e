"""A model on another device than the CPU: everything that reads it takes its tensors there, and back."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from analysis import patterns
from analysis.heads import describe_heads
from analysis.probes import Probe, Probes, measure
from configs.schema import Train
from model.backends import BACKENDS
from model.cache import KVCache
from model.generate import generate
from model.layers import PRECISIONS
from model.transformer import GPT
from tests.model.elsewhere import THERE, Elsewhere, Misplaced, is_there, to_elsewhere
from tests.model.models import KINDS, VOCAB, build_random, tokens

SEGMENT = torch.tensor([[0] * 20, [0] * 13 + [-1] * 7])
CHANGES = {"plain": {}, "window": {"window": 5}, "identities": {"qk": "identity", "value": "identity"}}
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def moves(monkeypatch):
    monkeypatch.setattr(nn.Module, "to", to_elsewhere)


def pair(kind: str, backend: str, **changes: object) -> tuple[GPT, GPT]:
    """The same model here and there."""
    here, there = (build_random(kind, backend=backend, **changes) for _ in range(2))
    return here, there.to(THERE)


def probes() -> Probes:
    block = torch.randperm(VOCAB - 1, generator=torch.Generator().manual_seed(0)).expand(2, -1) + 1
    first = torch.zeros(2, 1, dtype=torch.long)
    repeats = {
        name: Probe(torch.cat([first, block[:, :s], block[:, :s]], dim=1), block_length=s)
        for name, s in (("repeat_short", 4), ("repeat_long", 8))
    }
    return {
        "text": Probe(tokens(2, 20), SEGMENT),
        "text_without_bos": Probe(tokens(2, 20, seed=1), SEGMENT),
        **repeats,
    }


def test_the_pretended_device_refuses_what_a_real_one_would() -> None:
    with Elsewhere():
        x = torch.ones(3).to(THERE)
        assert (x.device, (x + 1).device, x.cpu().device) == (THERE, THERE, torch.device("cpu"))
        assert (x + torch.tensor(1.0)).device == THERE
        for wrong in (
            lambda: x + torch.ones(3),
            lambda: torch.where(x > 0, x, torch.ones(3)),
            lambda: x.double(),
            lambda: torch.arange(3.0, dtype=torch.float64, device=THERE),
            lambda: torch.multinomial(x, 1, generator=torch.Generator()),
            lambda: build_random().to(THERE)(tokens(1, 4)),
        ):
            with pytest.raises(Misplaced):
                wrong()


@every_backend
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_where_the_weights_are_and_the_same(kind: str, backend: str) -> None:
    here, there = pair(kind, backend)
    assert here.device == torch.device("cpu")
    with torch.no_grad(), Elsewhere():
        assert there.device == THERE
        for segment in (None, SEGMENT):
            expected = here(tokens(2, 20), segment_BT=segment)
            segment_there = None if segment is None else segment.to(THERE)
            got = there(tokens(2, 20).to(THERE), segment_BT=segment_there)
            assert is_there(got)
            assert torch.equal(got.cpu(), expected)


@every_backend
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", ["modern", "gpt2"])
def test_records_heads_and_patterns_are_those_of_the_model_here(kind, changes, backend) -> None:
    here, there = pair(kind, backend, **changes)
    with Elsewhere():
        assert_same(*(measure(model, probes(), True) for model in (there, here)))
        assert_same(*(describe_heads(model, probes(), True, 1, {}) for model in (there, here)))
        shown = [patterns.attention(model, [1, 2, 3, 4]) for model in (there, here)]
    torch.testing.assert_close(*shown, atol=2e-6, rtol=0)
    assert not is_there(shown[0])


def assert_same(got: dict, expected: dict) -> None:
    """To the rounding of float32: where the log-sum-exp of fused kernels is not known, blocks compute it."""
    (leaves, shape), (expected_leaves, expected_shape) = (tree_flatten(x) for x in (got, expected))
    assert shape == expected_shape
    for one, other in zip(leaves, expected_leaves, strict=True):
        assert one == (pytest.approx(other, abs=2e-5) if isinstance(other, float) else other)


@every_backend
@pytest.mark.parametrize("cache", ["full", "none", "window:9+2"])
def test_text_is_drawn_on_the_cpu_and_the_same(cache: str, backend: str) -> None:
    texts = []
    for model in pair("gated", backend):
        with Elsewhere():
            generator = torch.Generator().manual_seed(1)
            texts.append(list(generate(model, [1, 2], 60, bos=0, generator=generator, cache=cache)))
    assert texts[0] == texts[1]


@every_backend
def test_a_cache_is_where_the_model_is(backend: str) -> None:
    here, there = pair("modern", backend)
    with torch.no_grad(), Elsewhere():
        cache = KVCache(there.config, 2, there.device)
        got = [there(part.to(THERE), cache).cpu() for part in tokens(2, 20).split(7, dim=1)]
    torch.testing.assert_close(torch.cat(got, dim=1), here(tokens(2, 20)), atol=1e-5, rtol=0)


def test_precisions_are_those_of_the_configuration() -> None:
    assert set(PRECISIONS) == {*Train.model_fields["precision"].annotation.__args__}
