"""What the next token is drawn from, what is drawn, and what the model reads for it."""

import math
from collections import Counter
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from configs import UserError
from model.generate import distribution, generate
from model.transformer import GPT
from tests.model.models import KINDS, VOCAB, build, build_random, tokens

T = 20
BOS = VOCAB - 1


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(model: GPT, prompt: list[int], count: int, seed: int = 1, **options) -> list[int]:
    return list(generate(model, prompt, count, **{"bos": BOS, "generator": seeded(seed), **options}))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Without BOS."""
    return (tokens(1, length, seed)[0] % BOS).tolist()


def small(kind: str = "grouped", **changes) -> GPT:
    return build_random(kind, context_length=T, **changes)


def windows(model: GPT, prompt: list[int], count: int, **options) -> tuple[list[list[int]], list[int]]:
    """What the model was given for each token, and the tokens."""
    given_: list[list[int]] = []
    handle = model.register_forward_pre_hook(lambda module, inputs: given_.append(inputs[0][0].tolist()))
    text = drawn(model, prompt, count, **options)
    handle.remove()
    return given_, text


# The distribution

LOGITS = st.lists(st.integers(-6, 6).map(lambda x: x / 2) | st.floats(-5, 5), min_size=1, max_size=8)
SHARES = st.floats(0.01, 0.999)


def exponentials(logits: list[float], temperature: float) -> list[float]:
    """Probabilities by the definition of the softmax."""
    terms = [math.exp(x / temperature) for x in logits]
    return [term / sum(terms) for term in terms]


@given(LOGITS, st.floats(0.1, 10), st.none() | st.integers(1, 10), st.none() | SHARES)
def test_the_kept_are_the_fewest_of_the_likeliest_and_keep_their_proportions(logits, temperature, k, p):
    found = distribution(torch.tensor(logits, dtype=torch.float64), temperature, k, p).tolist()
    plain = exponentials(logits, temperature)
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept = [i for i in ranked if found[i] > 0]
    assert kept == ranked[: len(kept)]
    assert sum(found) == pytest.approx(1)
    share = sum(plain[i] for i in kept)
    assert [found[i] for i in kept] == pytest.approx([plain[i] / share for i in kept])
    eligible = ranked[:k]
    total = sum(plain[i] for i in eligible)
    assert len(kept) <= len(eligible)
    if p is None:
        assert kept == eligible
    else:
        assert share >= (p - 1e-9) * total
        assert share - plain[kept[-1]] < (p + 1e-9) * total


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_p": 0.49}, [1, 0, 0, 0]),
        ({"top_p": 0.51}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.74}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.76}, [4 / 7, 2 / 7, 1 / 7, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"top_k": 3}, [4 / 7, 2 / 7, 1 / 7, 0]),
        ({"top_k": 2, "top_p": 0.66}, [1, 0, 0, 0]),  # 2/3 of what top_k left; 1/2 of all
        ({"top_k": 2, "top_p": 0.67}, [2 / 3, 1 / 3, 0, 0]),
        ({"temperature": 0.5, "top_p": 0.76}, [16 / 20, 4 / 20, 0, 0]),  # of 16 : 4 : 1 : 1
    ],
)
def test_shares_by_hand(options, expected):
    """1/2, 1/4, 1/8, 1/8: the last two are equally likely."""
    logits = torch.tensor([4.0, 2.0, 1.0, 1.0], dtype=torch.float64).log()
    assert distribution(logits, **options).tolist() == pytest.approx(expected)


def test_of_many_equally_likely_tokens_the_first_go_first_and_an_exact_share_is_enough():
    """Quarters and their sums are exact; PyTorch's plain sort shuffles equal numbers of a long row."""
    assert distribution(torch.zeros(4), top_p=0.5).tolist() == [0.5, 0.5, 0, 0]
    assert distribution(torch.zeros(5000), top_k=4, top_p=0.75).nonzero().flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": 8}, {"top_p": 1.0}, {"top_k": 99, "top_p": 1}])
def test_limits_that_exclude_nothing_change_nothing(options):
    """Also a token of 1e-30, which a sum that reaches 1 before it would lose."""
    logits = torch.tensor([0.0, 0.0, -69.0, 1.0, 3.0, -2.0, 0.5, 0.1])
    assert torch.equal(distribution(logits, **options), distribution(logits))
    assert (distribution(logits, **options) > 0).all()
    torch.testing.assert_close(distribution(logits), logits.double().softmax(0))


@given(
    LOGITS, st.sampled_from([{"temperature": 0}, {"top_k": 1}, {"temperature": 0, "top_k": 3, "top_p": 0.9}])
)
def test_greedy_puts_all_on_the_first_of_the_likeliest(logits, options):
    best = logits.index(max(logits))
    logits = torch.tensor(logits, dtype=torch.float64)
    assert distribution(logits, **options).tolist() == [float(i == best) for i in range(len(logits))]


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (5e-324, [0, 0, 1 / 2, 1 / 2, 0]),
        (1e-3, [0, 0, 1 / 2, 1 / 2, 0]),
        (1e6, [1 / 3, 0, 1 / 3, 1 / 3, 0]),
        (1e308, [1 / 4, 0, 1 / 4, 1 / 4, 1 / 4]),
    ],
)
def test_extreme_temperatures_are_the_limits(temperature, expected):
    found = distribution(torch.tensor([3.0, -torch.inf, 4.0, 4.0, -1e30]), temperature)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


# What is drawn


def constant(logits: list[float]) -> GPT:
    """A model that says the same whatever it reads: tokens and places look alike."""
    model = build("attention only", vocab_size=len(logits), n_layer=1, n_head=1, context_length=17, d_model=8)
    with torch.no_grad():
        for parameter in (model.position_embedding.weight, model.attentions()[0].W_o.weight):
            parameter.zero_()
        model.token_embedding.weight.copy_(torch.tensor([-1.0, 1.0]).repeat(4))  # its own layernorm
        model.head.weight.copy_(torch.tensor([[-x, x] for x in logits]).repeat(1, 4) / 8)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 4},
        {"top_p": 0.8},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.7},
    ],
)
def test_frequencies_are_those_of_the_distribution(options):
    """Hoeffding: a share of N draws is off by more than e with probability below 2 exp(-2 N e^2)."""
    logits, N = [0.3, -1.0, 1.1, 0.8, -0.2, 0.0, 5.0], 2000
    bos = len(logits) - 1
    counts = Counter(drawn(constant(logits), [0], N, bos=bos, **options))
    expected = distribution(torch.tensor([*logits[:bos], -torch.inf]), **options).tolist()
    bound = math.sqrt(math.log(2 * len(logits) / 1e-6) / (2 * N))
    assert [counts[i] / N for i in range(len(logits))] == pytest.approx(expected, abs=bound)
    assert set(counts) <= {i for i, p in enumerate(expected) if p > 0}
    assert bos not in counts  # the likeliest by far, were it text


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 1}, {"top_p": 1e-9}])
def test_greedy_takes_the_argmax_of_the_whole_text_at_every_step(options):
    model, text = small(), prompt_of(3)
    found = drawn(model, text, T - 4, **options)
    for token in found:
        logits_V = model(torch.tensor([[BOS, *text]]))[0, -1]
        assert token == logits_V[:BOS].argmax()
        text.append(token)


def test_a_seed_decides_the_text_and_the_global_generator_has_no_part():
    model = small()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = drawn(model, [1, 2], 60)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert drawn(model, [1, 2], 60) == first
    assert drawn(model, [1, 2], 60, seed=2) != first


@pytest.mark.parametrize("bos", [BOS, None])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_changes_no_token_also_when_windows_run_full(kind, bos):
    model = small(kind)
    for prompt in ([3], prompt_of(T - 1), prompt_of(3 * T)):
        with_cache, without = (
            drawn(model, prompt, 3 * T, cache=cache, bos=bos) for cache in ("full", "none")
        )
        assert with_cache == without


# What the model reads


@pytest.mark.parametrize("bos", [BOS, None])
@pytest.mark.parametrize("context_length", [17, 20])
@pytest.mark.parametrize("length", [1, 16, 17, 19, 20, 21, 60])
def test_a_window_is_all_of_the_text_or_grows_from_its_last_half(length, context_length, bos):
    head, half = [] if bos is None else [bos], context_length // 2
    prompt = prompt_of(length)
    read, found = windows(build_random(context_length=context_length), prompt, 70, cache="none", bos=bos)
    size = None
    for i, window in enumerate(read):
        text = prompt + found[:i]
        before = len(head + text) if size is None else size + 1
        size = before if before <= context_length else len(head) + half
        assert window == head + text[len(text) - (size - len(head)) :]
    assert len(read) == len(found) == 70


def test_the_cache_reads_a_token_at_a_time_and_half_a_window_when_one_is_full():
    """So a token costs two positions on average, however long the text."""
    count, half = 200, T // 2
    read, _ = windows(small(), [1], count)
    lengths = Counter(map(len, read[1:]))
    assert set(lengths) == {1, 1 + half}
    assert lengths[1 + half] <= count / half
    whole, _ = windows(small(), [1], count, cache="none")
    assert sum(map(len, whole)) > half * count


@pytest.mark.parametrize("cache", ["full", "none"])
def test_what_stands_before_the_last_half_of_a_long_prompt_does_not_matter(cache):
    prompt = prompt_of(50)
    assert drawn(small(), prompt, 40, cache=cache) == drawn(small(), prompt[-T // 2 :], 40, cache=cache)


def test_an_empty_prompt_starts_from_bos_or_is_refused():
    assert windows(small(), [], 1)[0] == [[BOS]]
    with pytest.raises(UserError, match=r"data\.bos"):
        next(generate(small(), [], 1, bos=None, generator=seeded()))


# The model is left as it was


def test_tokens_come_as_they_are_drawn_and_the_model_is_free_between_them():
    model = small(dropout=0.4).train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    stream = generate(model, [1], 10**12, bos=BOS, generator=seeded())
    found = []
    for token in islice(stream, 50):
        found.append(token)
        assert [module.training for module in model.modules()] == modes
        assert torch.is_grad_enabled()
    stream.close()
    assert [module.training for module in model.modules()] == modes
    assert found == drawn(model.eval(), [1], 50)


def test_two_texts_can_be_drawn_by_turns():
    model = small()
    streams = [generate(model, [i], 60, bos=BOS, generator=seeded(i)) for i in (1, 2)]
    by_turns = zip(*streams, strict=True)
    assert [*map(list, zip(*by_turns, strict=True))] == [drawn(model, [i], 60, seed=i) for i in (1, 2)]


def test_an_error_on_the_way_leaves_the_model_as_it_was():
    model = small().train()

    def fail(module: object, inputs: object, output: Tensor) -> None:
        raise ZeroDivisionError

    model.blocks[1].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        drawn(model, [1], 1)
    assert model.training
    assert torch.is_grad_enabled()
