"""Probe sequences are what they say: BOS, distinct tokens, lengths, a function of the seed."""

import string
from pathlib import Path

import pytest
import torch

from analysis.probes import make_probes
from configs import UserError
from configs.schema import Config
from data.loading import load_source
from data.mixture import Mixture as Source

TEXT = "".join(string.ascii_letters[i * i % 52 if i % 3 else i % 52] for i in range(6000))


def text_source(tmp_path: Path, text: str, T: int, bos: bool) -> Source:
    path = tmp_path / "text.txt"
    path.write_text(text)
    data = {"source": "text", "path": str(path), "bos": bos, "cache_dir": str(tmp_path / "cache")}
    return load_source(Config.model_validate({"data": data, "model": {"context_length": T}}))


def repeats_source(T: int, bos: bool = True) -> Source:
    return load_source(
        Config.model_validate({"data": {"source": "repeats", "bos": bos}, "model": {"context_length": T}})
    )


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize(("T", "short", "long"), [(17, 4, 8), (64, 15, 31), (257, 25, 50)])
def test_repeat_probes_are_one_token_and_a_block_of_distinct_tokens_twice(
    T: int, short: int, long: int, bos: bool, tmp_path: Path
) -> None:
    source = text_source(tmp_path, TEXT, T, bos)
    probes = make_probes(source, T, sequences=5, seed=1)
    for name, s in (("repeat_short", short), ("repeat_long", long)):
        assert probes[name].block_length == s
        tokens_BT = probes[name].tokens_BT
        assert tokens_BT.shape == (5, 2 * s + 1)
        assert 2 * s + 1 <= T
        first_B, block_BS, again_BS = tokens_BT[:, 0], tokens_BT[:, 1 : s + 1], tokens_BT[:, s + 1 :]
        assert torch.equal(block_BS, again_BS)
        for first, block in zip(first_B.tolist(), block_BS.tolist(), strict=True):
            assert len({first, *block}) == s + 1
            assert set(block) <= set(source.symbols.tolist())
            assert source.tokenizer.bos not in block
            assert (first == source.tokenizer.bos) == bos
    assert len({tuple(row) for row in probes["repeat_long"].tokens_BT.tolist()}) == 5


@pytest.mark.parametrize("T", [17, 64, 257])
def test_text_probes_are_validation_text_with_bos_once_in_front_or_without(T: int, tmp_path: Path) -> None:
    source = text_source(tmp_path, TEXT, T, bos=True)
    probes = make_probes(source, T, sequences=5, seed=1)
    bos, held_out = source.tokenizer.bos, TEXT[int(0.9 * len(TEXT)) :]
    text, without_bos = probes["text"].tokens_BT, probes["text_without_bos"].tokens_BT
    assert text.shape == (5, T)
    assert (text[:, 0] == bos).all()
    assert ((text == bos).sum(-1) == 1).all()
    assert without_bos.size(1) <= T
    assert (without_bos != bos).all()
    for row in [*text, *without_bos]:
        assert source.tokenizer.decode(row.tolist()) in held_out


def test_without_bos_in_the_data_there_is_one_text_probe_without_it(tmp_path: Path) -> None:
    source = text_source(tmp_path, TEXT, 64, bos=False)
    probes = make_probes(source, 64, sequences=5, seed=1)
    assert set(probes) == {"text", "repeat_short", "repeat_long"}
    text = probes["text"].tokens_BT
    assert text.shape == (5, 64)
    assert all(source.tokenizer.decode(row.tolist()) in TEXT for row in text)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("T", [17, 64, 257])
def test_probes_of_repeats_fit_in_the_context(T: int, bos: bool) -> None:
    probes = make_probes(repeats_source(T, bos), T, sequences=4, seed=1)
    assert ("text_without_bos" in probes) == bos
    for name, probe in probes.items():
        bos_B = torch.full((4,), int(bos and name != "text_without_bos"))
        assert probe.tokens_BT.size(1) <= T
        assert torch.equal((probe.tokens_BT == 64).sum(-1), bos_B)
        assert torch.equal((probe.tokens_BT[:, 0] == 64).long(), bos_B)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("letters", ["abcde", "abcdefghi"])
def test_a_match_is_never_ambiguous_with_few_letters(letters: str, bos: bool, tmp_path: Path) -> None:
    """Each token of a block occurs twice in the sequence, and nowhere else: also not in front."""
    source = text_source(tmp_path, letters * 200, 64, bos)
    probes = make_probes(source, 64, sequences=6, seed=1)
    repeats = [probes["repeat_short"], probes["repeat_long"]]
    assert 2 <= repeats[0].block_length < repeats[1].block_length <= len(letters)
    for repeat in repeats:
        for row in repeat.tokens_BT.tolist():
            assert all(row.count(token) == 2 for token in row[1 : repeat.block_length + 1])


def test_too_few_distinct_tokens_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"4 distinct tokens.* 3.*probe\.every 0") as raised:
        make_probes(text_source(tmp_path, "abc" * 300, 32, bos=True), 32, sequences=2, seed=1)
    assert "\n" not in str(raised.value)


def test_probes_are_a_function_of_the_seed() -> None:
    one, same, other = (make_probes(repeats_source(64), 64, 4, seed) for seed in (1, 1, 2))
    assert all(torch.equal(probe.tokens_BT, same[name].tokens_BT) for name, probe in one.items())
    assert not torch.equal(one["repeat_long"].tokens_BT, other["repeat_long"].tokens_BT)
