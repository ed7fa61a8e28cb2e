"""The KV cache: a text fed in any pieces gives the logits of the text fed whole."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from analysis.capture import observe
from model.attention import Observation
from model.backends import BACKENDS
from model.cache import KVCache
from model.transformer import GPT
from tests.model.models import KINDS, build_random, tokens
from tests.model.test_precision import ROUNDING

T = 32
EXTRAS = {"sink": {"sink": "learned"}, "zero sink": {"sink": "zero"}, "gate": {"gate": True}}
MODELS = [(kind, {}) for kind in KINDS] + [("grouped", extra) for extra in EXTRAS.values()]
NAMES = [*KINDS, *EXTRAS]


@torch.no_grad()
def in_pieces(model: GPT, tokens_BT: Tensor, cuts: set[int], cache: KVCache | None = None) -> Tensor:
    """Logits of all places, the text cut in front of `cuts`."""
    cache = cache or KVCache(model.config, batch=len(tokens_BT))
    ends = [0, *sorted(cuts), tokens_BT.size(1)]
    return torch.cat([model(tokens_BT[:, a:b], cache) for a, b in pairwise(ends)], dim=1)


@torch.no_grad()
def assert_equal_in_pieces(model: GPT, tokens_BT: Tensor, cuts: set[int]) -> None:
    whole = model(tokens_BT)
    bound = 1e-5 * max(1.0, whole.abs().max().item())
    torch.testing.assert_close(in_pieces(model, tokens_BT, cuts), whole, atol=bound, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "changes"), MODELS, ids=NAMES)
@settings(max_examples=15)
@given(st.sets(st.integers(1, T - 1)))
@example(set())
@example({20})
@example(set(range(1, T)))
def test_pieces_give_the_logits_of_the_whole(kind, changes, backend, cuts):
    assert_equal_in_pieces(build_random(kind, backend=backend, **changes), tokens(2, T), cuts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", [{5, 145}, {129}, {1, 2, 131}])
def test_pieces_longer_than_a_block_of_rows(backend, cuts):
    assert_equal_in_pieces(build_random(backend=backend, context_length=150, std=0.1), tokens(1, 150), cuts)


@pytest.mark.parametrize("kind", KINDS)
def test_with_bf16_layers_pieces_agree_to_the_rounding_of_the_layers(kind):
    """The bound of a bfloat16 model's distance from the float32 one: both ways make those roundings."""
    model, cuts = build_random(kind).compute_in(torch.bfloat16), set(range(1, T))
    with torch.no_grad():
        whole = model(tokens(2, T))
    error = ((in_pieces(model, tokens(2, T), cuts) - whole).norm() / whole.norm()).item()
    assert error < ROUNDING * (3 * (4 * model.config.n_layer + 1)) ** 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [1, 5])
def test_a_full_cache_takes_no_more(kind, step):
    """A slice beyond the end would be empty and broadcast: wrong logits without a word."""
    model = build_random(kind)
    cache = KVCache(model.config)
    in_pieces(model, tokens(1, T - step + 1), {7}, cache)
    with torch.no_grad(), pytest.raises(RuntimeError):
        model(tokens(1, step), cache)


def test_a_cleared_cache_is_a_new_one():
    model = build_random()
    used, new = KVCache(model.config), KVCache(model.config)
    in_pieces(model, tokens(1, 30, seed=1), {3}, used)
    used.clear()
    assert used.length == 0
    results = [in_pieces(model, tokens(1, 20, seed=2), {9, 10}, cache) for cache in (used, new)]
    assert torch.equal(*results)
    assert used.length == new.length == 20


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_memory_is_taken_once_and_grows_with_the_key_heads(groups):
    config = build_random("modern", n_kv_head=groups).config
    layer = KVCache(config, batch=3).layers[0]
    places = [kept.data_ptr() for kept in (layer.k_BGSD, layer.v_BGSD)]
    for length in range(1, T + 1):
        new = [torch.full((3, groups, 1, 6), float(length * sign)) for sign in (1, -1)]
        kept = layer.extend(*new)
        assert [x.data_ptr() for x in kept] == places
        expected_S = torch.arange(1.0, length + 1)
        for x, sign in zip(kept, (1, -1), strict=True):
            assert torch.equal(x, (sign * expected_S)[:, None].expand(3, groups, length, 6))
    assert [x.untyped_storage().nbytes() for x in kept] == [4 * 3 * groups * T * 6] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_observers_see_of_a_single_token_its_row_of_the_whole(kind):
    model = build_random(kind)
    whole: list[Observation] = []
    single: list[Observation] = []
    with torch.no_grad(), observe(model, whole.append):
        model(tokens(1, T))
    cache = KVCache(model.config)
    in_pieces(model, tokens(1, T)[:, :-1], set(), cache)
    with torch.no_grad(), observe(model, single.append):
        model(tokens(1, T)[:, -1:], cache)
    for one, all_ in zip(single, whole, strict=True):
        for x, row in (
            (one.q_BHTD, all_.q_BHTD[:, :, -1:]),
            (one.k_BGSD, all_.k_BGSD),
            (one.lse_BHT, all_.lse_BHT[:, :, -1:]),
            (one.out_BHTD, all_.out_BHTD[:, :, -1:]),
        ):
            bound = 1e-5 * max(1.0, row.abs().max().item())
            torch.testing.assert_close(x, row, atol=bound, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_observed_stays_as_it_was_when_the_cache_is_used_again(kind):
    """Text that is longer than a context clears it, and an observer may keep all it gets until the end."""
    model, seen = build_random(kind), []
    cache = KVCache(model.config)
    with torch.no_grad(), observe(model, seen.append):
        for piece in tokens(1, 6).split(2, dim=1):
            model(piece, cache)
        then = [each.k_BGSD.clone() for each in seen]
        cache.clear()
        model(tokens(1, 20, seed=1), cache)
    assert all(torch.equal(each.k_BGSD, before) for each, before in zip(seen, then, strict=False))


@pytest.mark.parametrize(("kind", "window"), [("grouped", None), ("grouped", 7), ("gpt2", None)])
def test_tokens_without_room_are_refused_before_any_layer_has_them(kind, window):
    """The layers would disagree about how many there are, and those that fit would have no place."""
    model, places = build_random(kind), 11 if window else T
    cache = KVCache(model.config, window=window, n_sink=4)
    with torch.no_grad():
        before = model(tokens(1, places)[:, :5], cache)
        told = f"{places} tokens .* room for {places - 5} of {places}"
        with pytest.raises(RuntimeError, match=told):
            model(tokens(1, places), cache)
        assert [layer.length for layer in cache.layers] == [5, 5]
        rest = model(tokens(1, places)[:, 5:], cache)
    fresh = KVCache(model.config, window=window, n_sink=4)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat([before, rest], dim=1), model(tokens(1, places), fresh))
