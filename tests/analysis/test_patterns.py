"""The attention on a text is the definition's, on every backend; texts become tokens to see."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from analysis import patterns
from analysis.capture import observe
from analysis.probes import Probe, measure
from configs import UserError
from data.bpe import train_bpe
from data.tokenizers import ByteTokenizer, CharTokenizer
from tests.model.definition import attention
from tests.model.models import VOCAB, build_random, tokens

WORDS = train_bpe(["Cassius spoke, and then the Brutus answered", " the the"] * 3, 280, bos=True)
CHARACTERS = CharTokenizer("abcdefgh \n", bos=True)
KINDS = {
    "grouped": {},
    "zero sink": {"sink": "zero"},
    "sink and gate": {"sink": "learned", "gate": True},
    "window": {"window": 5, "scale": "none", "value": "key"},
    "identities": {"qk": "identity", "value": "identity", "n_kv_head": 4},
}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("backend", ["naive", "sdpa", "blocks"])
def test_weights_are_those_of_the_definition_in_float64_on_every_backend(changes, backend):
    model, seen = build_random(backend=backend, **changes), []
    text = tokens(1, 20)
    with torch.no_grad(), observe(model, seen.append):
        model(text)
    A_LHTT = patterns.attention(model, text[0].tolist())
    assert A_LHTT.shape == (2, 4, 20, 20)
    for layer, A_HTT in zip(seen, A_LHTT, strict=True):
        exact = attention(
            layer.q_BHTD, layer.k_BGSD, layer.k_BGSD, scale=layer.scale, window=layer.window, **sink_of(layer)
        )
        torch.testing.assert_close(A_HTT.double(), exact.A_BHTS[0], atol=2e-6, rtol=0)
        missing_HT = exact.a_BHT[0] if layer.sink_H is not None else torch.zeros(4, 20).double()
        torch.testing.assert_close(
            A_HTT.double().sum(-1) + missing_HT, torch.ones(4, 20).double(), atol=2e-6, rtol=0
        )


def sink_of(layer):
    return {} if layer.sink_H is None else {"sink_H": layer.sink_H}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_no_query_sees_a_later_key(changes):
    A_LHTT = patterns.attention(build_random(**changes), tokens(1, 16)[0].tolist())
    assert (A_LHTT.triu(1) == 0).all()
    assert (A_LHTT >= 0).all()


def test_scores_read_off_the_picture_are_those_that_are_logged():
    model, text = build_random(), tokens(1, 20)
    A_LHTT = patterns.attention(model, text[0].tolist()).double()
    block = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:9]
    row = torch.cat([torch.tensor([0]), block[:4], block[:4]]), torch.cat([torch.tensor([0]), block, block])
    probes = {
        "text": Probe(text),
        "repeat_short": Probe(row[0][None], block_length=4),
        "repeat_long": Probe(row[1][None], block_length=9),
    }
    logged = measure(model, probes, bos_trained=False)["scores"]
    previous = A_LHTT.diagonal(-1, 2, 3)[..., 1:].mean(-1)  # A[i, i-1] from i = 2 on
    torch.testing.assert_close(previous, torch.tensor(logged["previous"]).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        A_LHTT[..., 4:, 0].mean(-1), torch.tensor(logged["sink"]).double(), atol=1e-6, rtol=0
    )
    twice = patterns.attention(model, row[1].tolist()).double()
    stripe = twice.diagonal(1 - 9, 2, 3)[..., 2:].mean(-1)  # A[i, i-8], of i = 10 ... 18
    torch.testing.assert_close(stripe, torch.tensor(logged["induction_long"]).double(), atol=1e-6, rtol=0)


def test_looking_leaves_the_model_as_it_was():
    model = build_random(dropout=0.5).train()
    first, again = (patterns.attention(model, [1, 2, 3, 4]) for _ in range(2))
    assert torch.equal(first, again)
    assert model.training
    assert all(not layer.observers for layer in model.attentions())


@given(st.lists(st.integers(0, 9), min_size=1, max_size=90), st.integers(17, 70), st.booleans())
def test_what_is_shown_two_times_is_a_piece_of_the_text_and_fits_the_context(text, context, bos):
    tokenizer = CharTokenizer("abcdefgh \n", bos)
    block = patterns.phrase(text, tokenizer)
    shown = patterns.twice(block, tokenizer, context)
    assert len(shown) <= context
    body = shown[bos:]
    half = body[: len(body) // 2]
    assert (shown[:bos], body) == ([10] * bos, half * 2)
    assert half == block[: len(half)]
    assert 0 < len(half) <= patterns.LONGEST_BLOCK
    assert any(text[i : i + len(block)] == block for i in range(len(text)))


def test_a_phrase_begins_and_ends_with_a_word():
    text = "cd abba dada gaga beef cabbage face"
    assert (
        CHARACTERS.decode(patterns.phrase(CHARACTERS.encode(text).tolist(), CHARACTERS))
        == "abba dada gaga beef cabbage "
    )


@given(st.integers(0, 20))
def test_a_phrase_begins_and_ends_with_a_word_where_spaces_are_part_of_tokens(begin):
    text = "Cassius spoke, and \nthen Brutus answered him with what little patience remained to him that day"
    tokens = WORDS.encode(text).tolist()[begin:]
    block = patterns.phrase(tokens, WORDS)
    assert 15 <= len(block) <= patterns.LONGEST_BLOCK
    before, shown, after = WORDS.decode(tokens).partition(WORDS.decode(block))
    assert not before or before[-1].isspace() or shown[0].isspace()
    assert not after or shown[-1].isspace() or after[0].isspace()
    assert shown.split() == WORDS.decode(tokens).split()[len(before.split()) :][: len(shown.split())]


def test_a_phrase_of_tokens_that_each_begin_with_a_space_is_as_long_as_can_be_shown():
    tokens = WORDS.encode("the" + " and the" * 30).tolist()
    assert WORDS.decode(patterns.phrase(tokens, WORDS)) == " and the" * 15


def test_shuffled_tokens_are_distinct_and_always_the_same():
    assert patterns.shuffled([3, 1, 3, 7, 1]) == patterns.shuffled([7, 3, 1])
    assert sorted(patterns.shuffled(range(40))) == list(range(40))
    assert patterns.shuffled(range(40)) != list(range(40))


def test_whitespace_control_characters_and_broken_bytes_can_be_seen():
    characters = CharTokenizer("a \n\t\x00\u200b<", bos=True)
    assert patterns.visible([7, 0, 1, 2, 3, 4, 5, 6], characters) == [
        "BOS",
        "a",
        "␣",
        "⏎",
        "⇥",
        "\\x00",
        "\\u200b",
        "<",
    ]
    assert patterns.visible([*"é ".encode()], ByteTokenizer(bos=False)) == ["\\xc3", "\\xa9", "␣"]


def test_tokens_that_hold_a_part_of_a_character_show_its_bytes():
    """Also beside whole characters, and where a control character is beside them."""
    assert patterns.visible([WORDS.bos, *WORDS.encode(" the “é\x00")], WORDS) == [
        "BOS",
        "␣the",
        "␣",
        "\\xe2",
        "\\x80",
        "\\x9c",
        "\\xc3",
        "\\xa9",
        "\\x00",
    ]
    mixed = train_bpe(["\0“ \0“ x\0”"] * 9, 262, bos=True)
    assert {"\\x00\\xe2", "\\x00“"} < {*patterns.visible(mixed.symbols, mixed)}


def test_a_text_of_ones_own_is_encoded_as_it_is_behind_bos():
    assert patterns.encode("ab a", CHARACTERS, 17) == ([10, 0, 1, 8, 0], 5)
    assert patterns.encode("ab", CharTokenizer("ab", bos=False), 17) == ([0, 1], 2)


@pytest.mark.parametrize(("context", "shown"), [(17, 17), (401, 128)])
def test_a_text_is_cut_to_what_fits_and_its_whole_length_is_told(context, shown):
    assert patterns.encode("a" * 400, CHARACTERS, context) == ([10, *[0] * (shown - 1)], 401)


@pytest.mark.parametrize(("text", "said"), [("", "empty"), ("xyz", "'x' 'y' 'z'")])
def test_a_text_that_cannot_be_read_is_refused(text, said):
    with pytest.raises(UserError, match=said):
        patterns.encode(text, CHARACTERS, 17)


def test_a_replacement_character_is_a_character_and_half_a_character_a_byte():
    assert patterns.visible([0, 1], CharTokenizer("a\ufffd", bos=True)) == ["a", "\ufffd"]
    assert patterns.visible([0x61, 0xE9], ByteTokenizer(bos=True)) == ["a", "\\xe9"]
