"""The cache that rolls: a text token by token is one masked forward pass, in the same memory without end."""

import gc

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from configs import UserError
from model.backends import BACKENDS
from model.cache import KVCache, open_cache
from model.generate import generate
from model.transformer import GPT
from tests.model.definition import attention, attention_layer
from tests.model.models import KINDS, VOCAB, build_random, tokens

T = 45  # a context and a half
BOS = VOCAB - 1
ROTARY = {name: keys for name, keys in KINDS.items() if keys.get("position") != "learned"}
KEPT = [(7, 4), (5, 1), (6, 0), (1, 3), (1, 0), (28, 4), (32, 0)]  # window, n_sink


def rotary(kind: str = "grouped", **changes) -> GPT:
    return build_random(kind, **{"window": None, "std": 0.2, **changes})


def at(x_BHTD: Tensor, places: list[int], theta: float) -> Tensor:
    """Each vector turned by its own place."""
    real, imaginary = x_BHTD.chunk(2, dim=-1)
    D = x_BHTD.size(-1)
    frequency_F = theta ** (-torch.arange(0, D, 2).double() / D)
    z = torch.complex(real, imaginary) * torch.exp(1j * torch.tensor(places)[:, None] * frequency_F)
    return torch.cat([z.real, z.imag], dim=-1)


class Masked(nn.Module):
    """An attention layer by its definition, on a whole text: query i has keys of its own, at their places."""

    def __init__(self, model: GPT, layer: int, window: int, n_sink: int):
        super().__init__()
        self.config, self.window, self.n_sink = model.config, window, n_sink
        self.weights = {n: x.double() for n, x in model.attentions()[layer].named_parameters()}

    def forward(self, x_BTC: Tensor, cache: None, segment_BT: None) -> Tensor:
        unturned = self.config.model_copy(update={"position": "learned"})
        whole = attention_layer(unturned, self.weights, x_BTC.double())
        outs = []
        for i in range(x_BTC.size(1)):
            kept = [j for j in range(i + 1) if j < self.n_sink or j > i - self.window]
            place = min(i, self.n_sink + self.window - 1)
            q = at(whole.q_BHTD[:, :, i : i + 1], [place], self.config.rope_theta)
            k = at(whole.k_BGSD[:, :, kept], list(range(len(kept))), self.config.rope_theta)
            outs.append(attention(q, k, whole.v_BGSD[:, :, kept], **whole.options).out_BHTD)
        out_BHTD = torch.cat(outs, dim=2)
        if whole.gate_BHT is not None:
            out_BHTD = whole.gate_BHT[..., None] * out_BHTD
        out_BTC = torch.cat(list(out_BHTD.unbind(1)), dim=-1) @ self.weights["W_o.weight"].T
        return (out_BTC + self.weights.get("W_o.bias", 0.0)).float()


def masked(model: GPT, window: int, n_sink: int) -> GPT:
    """The same model, with such layers."""
    other = GPT(model.config, VOCAB)
    other.load_state_dict(model.state_dict())
    for layer, block in enumerate(other.blocks):
        block.attention = Masked(model, layer, window, n_sink)
    return other


@torch.no_grad()
def stepped(model: GPT, tokens_BT: Tensor, window: int, n_sink: int) -> Tensor:
    cache = KVCache(model.config, len(tokens_BT), window=window, n_sink=n_sink)
    return torch.cat([model(token, cache) for token in tokens_BT.split(1, dim=1)], dim=1)


@torch.no_grad()
def assert_near(logits: Tensor, expected: Tensor) -> None:
    """A hundredth of what is asked for, 1e-3."""
    bound = 1e-5 * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(logits, expected, atol=bound, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("window", "n_sink"), KEPT[:4])
@pytest.mark.parametrize("kind", ROTARY)
def test_a_text_token_by_token_is_one_masked_forward_pass(kind, window, n_sink, backend):
    model = rotary(kind, backend=backend)
    with torch.no_grad():
        expected = masked(model, window, n_sink)(tokens(2, T))
    assert_near(stepped(model, tokens(2, T), window, n_sink), expected)


@pytest.mark.parametrize(("window", "n_sink"), KEPT)
def test_whatever_is_kept(window, n_sink):
    model = rotary("gated")
    with torch.no_grad():
        expected = masked(model, window, n_sink)(tokens(2, T))
    assert_near(stepped(model, tokens(2, T), window, n_sink), expected)


def test_with_biases_too():
    model = rotary("grouped", bias=True)
    with torch.no_grad():
        expected = masked(model, 7, 4)(tokens(2, T))
    assert_near(stepped(model, tokens(2, T), 7, 4), expected)


@settings(max_examples=15)
@given(st.sampled_from(KEPT), st.integers(1, T))
@example((7, 4), 11)
@example((7, 4), T)
def test_what_there_is_room_for_may_be_read_at_once(kept, length):
    window, n_sink = kept
    model, cache = rotary(), KVCache(rotary().config, 2, window=window, n_sink=n_sink)
    pieces = cache.pieces(tokens(2, length))
    assert torch.equal(torch.cat(list(pieces), dim=1), tokens(2, length))
    assert [piece.size(1) for piece in pieces] == [min(length, window + n_sink)] + [1] * (len(pieces) - 1)
    with torch.no_grad():
        found = torch.cat([model(piece, cache) for piece in pieces], dim=1)
    assert_near(found, stepped(model, tokens(2, length), window, n_sink))
    more = cache.pieces(tokens(2, 3))
    assert sum(piece.size(1) for piece in more) == 3
    assert more[0].size(1) == max(1, min(3, window + n_sink - length))


@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize("window", [1, 6, 31])
def test_with_none_of_the_first_it_is_a_model_with_a_window(kind, window):
    """Scores see distances alone, so it does not matter that places move up."""
    whole = rotary(kind, context_length=T, window=window)
    with torch.no_grad():
        expected = whole(tokens(2, T))
    assert_near(stepped(rotary(kind), tokens(2, T), window, 0), expected)


def test_until_it_is_full_it_is_the_full_cache():
    model, cache = rotary(), KVCache(rotary().config, window=28, n_sink=4)
    with torch.no_grad():
        assert_near(model(tokens(1, 32), cache), model(tokens(1, 32)))
    assert cache.length == 32


def test_several_tokens_at_once_are_refused_where_it_would_have_to_roll():
    """Each of them would see other entries at other places."""
    model, cache = rotary(), KVCache(rotary().config, window=7, n_sink=4)
    with torch.no_grad(), pytest.raises(RuntimeError):
        model(tokens(1, 12), cache)


def test_a_cleared_cache_is_a_new_one():
    model, caches = rotary(), [KVCache(rotary().config, window=7, n_sink=4) for _ in range(2)]
    with torch.no_grad():
        for piece in caches[0].pieces(tokens(1, T, seed=1)):
            model(piece, caches[0])
        caches[0].clear()
        both = [[model(piece, cache) for piece in cache.pieces(tokens(1, T))] for cache in caches]
    assert torch.equal(*(torch.cat(logits, dim=1) for logits in both))


@pytest.mark.parametrize(
    ("asked", "changes", "told"),
    [
        ("window:8+2", {"kind": "gpt2"}, "model.position rotary"),
        ("window:29+4", {}, "model.context_length 32"),
        ("window:33", {}, "model.context_length 32"),
        ("window:4+2", {"window": 9}, "model.window 9"),
        ("window:99999999999", {}, "model.context_length 32"),
        ("window:0+4", {}, "last 0 .* 1 or more"),
        ("windows:4", {}, "window:256\\+4"),
        ("window:4+-1", {}, "window:256\\+4"),
        ("window:٤", {}, "window:256\\+4"),
        ("", {}, "full, none"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_in_a_line_before_a_token_is_asked_for(asked, changes, told):
    with pytest.raises(UserError, match=told) as caught:
        generate(build_random(**changes), [1], 5, bos=None, generator=torch.Generator(), cache=asked)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("window", "n_sink"), [(0, 0), (0, 4), (-1, 5), (3, -1), (5, -9)])
def test_a_window_without_the_token_itself_and_less_than_none_of_the_first_are_refused(window, n_sink):
    """Window 0 would let go of one of the first at every token, without a word."""
    with pytest.raises(UserError, match=f"last {window} and the first {n_sink} tokens: .* 1 or more"):
        KVCache(rotary().config, window=window, n_sink=n_sink)


# Text from it


@pytest.mark.parametrize("prompt", [1, 9, 40])
@pytest.mark.parametrize("bos", [BOS, None])
def test_greedy_text_is_the_argmax_of_a_masked_forward_pass_over_all_of_it(prompt, bos):
    model, text = rotary(), tokens(1, prompt)[0].tolist()
    options = {"bos": bos, "generator": torch.Generator(), "temperature": 0, "cache": "window:6+3"}
    found = list(generate(model, text, 30, **options))
    start = [] if bos is None else [bos]
    with torch.no_grad():
        logits_TV = masked(model, 6, 3)(torch.tensor([[*start, *text, *found]]))[0, -31:-1]
    assert logits_TV[:, :bos].argmax(-1).tolist() == found


@pytest.mark.parametrize("kind", ROTARY)
def test_a_cache_of_a_whole_context_gives_the_text_of_the_full_one_while_that_has_room(kind):
    options = {"bos": BOS, "temperature": 0}
    drawn = [
        list(generate(rotary(kind), [1], 30, generator=torch.Generator(), cache=cache, **options))
        for cache in ("full", "window:28+4", "window:32")
    ]
    assert drawn[0] == drawn[1] == drawn[2]


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def held(stream) -> tuple[int, int]:
    """Bytes of all tensors that are alive, and length of all lists of a generator."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    lists = [x for x in gc.get_referents(stream) if isinstance(x, list)]  # f_locals would keep them alive
    return sum(storages.values()), sum(map(len, lists))


@pytest.mark.parametrize("count", [1500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_memory_stays_the_same_however_long_the_text(count):
    model = rotary(n_layer=1)
    options = {"bos": BOS, "generator": torch.Generator(), "cache": "window:20+4"}
    stream = generate(model, tokens(1, 50)[0].tolist(), count, **options)
    seen = []
    for n, _ in enumerate(stream, start=1):
        if n in (count // 10, count - 1):
            seen.append((held(stream), resident()))
    ((early, early_lists), early_rss), ((late, late_lists), late_rss) = seen
    assert late <= early  # what others left behind may go
    assert late_lists == early_lists == 51 + 1  # the prompt and the last token
    assert late_rss - early_rss < 2 * 2**20


def test_memory_is_taken_once_for_what_is_kept():
    cache = open_cache("window:7+4", rotary().config)
    kept = [x for layer in cache.layers for x in (layer.k_BGSD, layer.v_BGSD)]
    places = [x.data_ptr() for x in kept]
    with torch.no_grad():
        for piece in cache.pieces(tokens(1, T)):
            rotary()(piece, cache)
    now = [x for layer in cache.layers for x in (layer.k_BGSD, layer.v_BGSD)]
    assert [x.data_ptr() for x in now] == places
    assert [x.untyped_storage().nbytes() for x in now] == [4 * 2 * 11 * 6] * 4
