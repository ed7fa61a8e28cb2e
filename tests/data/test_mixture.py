"""Mixtures: a step's batch is counted out in proportion, and no source skips or repeats a window."""

import random
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError
from configs.schema import Source, Stage
from data.corpora import shakespeare
from data.mixture import Mixture, sequences_of
from data.sources import IGNORED, Batch
from data.tokenizers import ByteTokenizer
from tests.data.made import T, drawn, ids_of, load, places

TEXT = "".join(random.Random(0).choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=1500))
NAMES = st.sampled_from(["shakespeare", "text", "repeats", "backcopy"])
WEIGHTS = st.dictionaries(NAMES, st.floats(1e-3, 1e3), min_size=1)
STAGES = [
    {"until": 3, "weights": {"repeats": 1}},
    {"until": 7, "weights": {"text": 3, "repeats": 1}},
    {"until": 8, "weights": {"backcopy": 1, "text": 1}},
    {"weights": {"text": 1, "repeats": 2, "backcopy": 1}},
]


class Numbered:
    """A source whose windows hold nothing but their numbers; it remembers which it gave."""

    symbols, bytes_per_token, fingerprint, description = torch.arange(3), 1.0, "numbered", "numbers"

    def __init__(self) -> None:
        self.given: list[int] = []

    def windows(self, first: int, count: int) -> Batch:
        self.given += range(first, first + count)
        numbers = torch.arange(first, first + count).unsqueeze(1)
        return Batch(numbers, numbers)

    def validation(self, batch_size: int, tokens: int = 0) -> Iterator[Batch]:
        raise NotImplementedError

    def probe_text(self, sequences: int, length: int, bos: bool) -> tuple[torch.Tensor, None]:
        raise NotImplementedError


def text(tmp_path, content: str = TEXT) -> dict:
    path = tmp_path / "own.txt"
    path.write_text(content)
    return {"path": str(path), "cache_dir": str(tmp_path / "cache"), "val_fraction": 0.2}


# How many sequences


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 20), min_size=1),
    st.integers(1, 9),
    st.floats(0.01, 99),
)
def test_what_divides_is_divided_exactly_however_the_weights_are_scaled(parts, times, factor):
    """Scaled weights are rounded, so their shares are not quite whole: the counts are."""
    wanted = {name: times * part for name, part in parts.items()}
    assert sequences_of(parts, times * sum(parts.values())) == wanted
    assert sequences_of({name: factor * n for name, n in parts.items()}, sum(wanted.values())) == wanted


@given(WEIGHTS, st.integers(1, 300))
def test_shares_are_rounded_up_where_most_is_left_over_and_fill_the_batch(weights, batch):
    exact = {name: batch * Fraction(w) / sum(map(Fraction, weights.values())) for name, w in weights.items()}
    try:
        counts = sequences_of(weights, batch)
    except UserError:
        assert min(exact.values()) < 1
        return
    assert list(counts) == list(weights)
    assert sum(counts.values()) == batch
    assert min(counts.values()) > 0
    left = {name: exact[name] - exact[name] // 1 for name in exact}
    up = {name for name in exact if counts[name] == exact[name] // 1 + 1}
    assert all(counts[name] == exact[name] // 1 for name in exact if name not in up)
    assert min([left[name] for name in up], default=1) >= max(
        [left[n] for n in exact if n not in up], default=0
    )


@pytest.mark.parametrize(
    ("weights", "batch", "counts"),
    [
        ({"a": 7, "b": 1}, 32, {"a": 28, "b": 4}),
        ({"a": 1, "b": 1, "c": 1}, 4, {"a": 2, "b": 1, "c": 1}),  # equal remainders: the first named
        ({"a": 0.1, "b": 0.2, "c": 0.7}, 10, {"a": 1, "b": 2, "c": 7}),
        ({"a": 1e308, "b": 1e308}, 6, {"a": 3, "b": 3}),  # whose sum is no float
        ({"a": 5e-324, "b": 5e-324}, 6, {"a": 3, "b": 3}),
        ({"a": 0.6, "b": 0.4}, 1 + 1, {"a": 1, "b": 1}),
    ],
    ids=str,
)
def test_sequences_of_some_weights(weights, batch, counts):
    assert sequences_of(weights, batch) == counts


def test_a_weight_that_gives_no_sequence_is_refused_with_the_numbers():
    with pytest.raises(UserError, match=r"weight 1 of 100 gives b no sequence in a batch of 8") as caught:
        sequences_of({"a": 99, "b": 1}, 8)
    assert "train.batch_size" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_stage_that_comes_later_is_checked_before_anything_begins():
    stages = [{"until": 500, "weights": {"repeats": 1}}, {"weights": {"repeats": 99, "backcopy": 1}}]
    with pytest.raises(UserError, match="1 of 100 gives backcopy"):
        load(context=32, source="repeats", stages=stages)


# Which windows


@st.composite
def staged(draw: st.DrawFn) -> tuple[list[Stage], int, int]:
    """Stages over four sources, a batch size, and a number of steps that goes beyond the last border."""
    ends = sorted(draw(st.sets(st.integers(1, 20), max_size=4)))
    batch = draw(st.integers(4, 12))
    weights = st.dictionaries(NAMES, st.sampled_from([1.0, 2.0]), min_size=1)
    stages = [Stage(until=end, weights=draw(weights)) for end in ends] + [Stage(weights=draw(weights))]
    return stages, batch, (ends[-1] if ends else 0) + draw(st.integers(1, 5))


@given(staged())
def test_over_all_steps_each_source_gives_its_windows_in_order_without_gap_or_repeat(case):
    stages, batch, steps = case
    sources = {name: Numbered() for name in get_args(Source)}
    mixture = Mixture(ByteTokenizer(True), sources, stages, batch)
    for step in range(1, steps + 1):
        before = {name: len(source.given) for name, source in sources.items()}
        assert len(mixture.batch(step).inputs_BT) == batch
        stage = next(stage for stage in stages if stage.until is None or step <= stage.until)
        assert {n for n, source in sources.items() if len(source.given) > before[n]} == set(stage.weights)
    assert all(source.given == list(range(len(source.given))) for source in sources.values())
    assert sum(len(source.given) for source in sources.values()) == steps * batch


@pytest.mark.parametrize("order", [[9, 1, 5, 3, 8, 4, 7, 1, 9], [4], [8, 7, 8]], ids=str)
def test_a_batch_is_a_pure_function_of_its_step_also_across_stages(order, tmp_path):
    def make() -> Mixture:
        return load(rows=8, source="repeats", stages=STAGES, **text(tmp_path))

    source = make()
    for step in order:
        inputs_BT, targets_BT, segment_BT = source.batch(step)
        assert inputs_BT.shape == targets_BT.shape == (8, T)
        assert torch.equal(inputs_BT, make().batch(step).inputs_BT)
        assert torch.equal(targets_BT, make().batch(step).targets_BT)
        assert segment_BT is None


def test_no_batch_of_a_mixture_comes_twice(tmp_path):
    source = load(rows=8, source="repeats", stages=STAGES, **text(tmp_path))
    rows = [tuple(row) for step in range(1, 12) for row in source.batch(step).targets_BT.tolist()]
    assert len({*rows}) == len(rows) == 88


class Segmented(Numbered):
    """A source whose windows say of which document they are."""

    def windows(self, first: int, count: int) -> Batch:
        batch = super().windows(first, count)
        return batch._replace(segment_BT=batch.inputs_BT + 100)


def test_beside_rows_of_several_documents_those_of_other_sources_are_one_document_each():
    sources = {"text": Numbered(), "hf": Segmented(), "repeats": Numbered()}
    stages = [Stage(until=2, weights={"text": 1, "hf": 2, "repeats": 1}), Stage(weights={"text": 1})]
    mixture = Mixture(ByteTokenizer(True), sources, stages, 4)
    assert mixture.batch(2).segment_BT.tolist() == [[0], [102], [103], [0]]
    assert mixture.batch(3).segment_BT is None


@pytest.mark.parametrize("name", ["repeats", "backcopy"])
def test_a_source_without_stages_is_one_stage_of_that_source(name):
    alone, staged = (drawn(name, stages=stages) for stages in ([], [{"weights": {name: 0.3}}]))
    for step in (1, 2, 30):
        assert torch.equal(alone.batch(step).inputs_BT, staged.batch(step).inputs_BT)
    assert alone.fingerprint == staged.fingerprint
    assert alone.describe(9) == staged.describe(9)


def test_each_window_of_a_text_is_seen_once_an_epoch_though_stages_begin_within_it():
    """Windows of text are those whose tokens ascend by one: see tests/data/made.py."""
    stages = [
        {"until": 3, "weights": {"text": 3, "repeats": 1}},
        {"until": 7, "weights": {"repeats": 1}},
        {"weights": {"repeats": 1, "text": 1}},
    ]
    source = places(200, rows=8, stages=stages)
    rows = [row for step in range(1, 48) for row in source.batch(step).targets_BT.tolist()]
    starts = [row[0] for row in rows if row == list(range(row[0], row[0] + T))]
    assert len(starts) == 3 * 6 + 40 * 4
    windows = source.sources["text"].epochs.count
    epochs = [sorted(starts[i : i + windows]) for i in range(0, len(starts) - windows, windows)]
    assert len(epochs) > 10
    assert all(b - a == T for epoch in epochs for a, b in pairwise(epoch))


# What is held back, and what all sources share


@pytest.mark.parametrize("name", ["text", "repeats", "backcopy"])
def test_what_is_held_back_is_of_the_first_source_alone_and_stages_do_not_move_it(name, tmp_path):
    """All three see the same text, so that they have the same symbols to draw from."""
    others = [other for other in ("text", "repeats", "backcopy") if other != name]
    plans = (STAGES, [{"until": 1, "weights": dict.fromkeys(others, 1)}, {"weights": {name: 1}}])
    one, other = (load(rows=8, source=name, stages=plan, **text(tmp_path)) for plan in plans)
    for found, expected in zip(one.validation(8), other.validation(8), strict=True):
        assert torch.equal(found.inputs_BT, expected.inputs_BT)
        assert torch.equal(found.targets_BT, expected.targets_BT)
    own = one.sources[name]
    assert torch.equal(next(one.validation(3)).inputs_BT, next(own.validation(3)).inputs_BT)
    for bos in (True, False):
        assert torch.equal(one.probe_text(3, T, bos)[0], other.probe_text(3, T, bos)[0])
        assert torch.equal(one.probe_text(3, T, bos)[0], own.probe_text(3, T, bos)[0])
    assert one.bytes_per_token == own.bytes_per_token
    assert torch.equal(one.symbols, own.symbols)


def test_validation_text_has_nothing_of_the_other_sources(tmp_path):
    source = load(rows=8, source="text", stages=STAGES, **text(tmp_path))
    held_out = TEXT[int(0.8 * len(TEXT)) :]
    for inputs_BT, targets_BT, _ in source.validation(8):
        counted = [row[target != IGNORED] for row, target in zip(inputs_BT, targets_BT, strict=True)]
        assert all(source.tokenizer.decode(row.tolist()) in held_out for row in counted)
    text_BT, _ = source.probe_text(5, T, True)
    assert all(source.tokenizer.decode(row) in held_out for row in text_BT.tolist())


@pytest.mark.parametrize("first", ["shakespeare", "text"])
def test_two_texts_share_a_tokenizer_that_knows_both(first, tmp_path):
    content = "Ünïçødé & 0123456789 " * 40
    stages = [{"weights": {"shakespeare": 1, "text": 1}}]
    source = load(rows=8, source=first, stages=stages, **text(tmp_path, content))
    assert source.tokenizer.decode(source.tokenizer.encode(content)) == content
    plays, own = shakespeare(), source.sources["text"]
    assert source.tokenizer.vocab_size == len({*plays, *content}) + 1
    assert source.tokenizer.decode([*ids_of(own.train), *ids_of(own.val)]) == content
    assert source.tokenizer.decode(ids_of(source.sources["shakespeare"].train)) in plays
    rows = [source.tokenizer.decode(row) for row in source.batch(1).inputs_BT.tolist()]
    assert [row in content for row in rows] == [False] * 4 + [True] * 4
    assert all(row in plays for row in rows[:4])
    one, two = (source.sources[name].fingerprint for name in ("shakespeare", "text"))
    assert one != two
    assert one in source.fingerprint
    assert two in source.fingerprint


@pytest.mark.parametrize("tokenizer", ["char", "byte"])
@pytest.mark.parametrize("name", ["repeats", "backcopy"])
def test_what_is_drawn_beside_a_text_has_only_symbols_of_its_training_part(name, tokenizer, tmp_path):
    """The validation part holds others, which no embedding has learnt."""
    training, validation = "é".join(["bdca"] * 80), "xyzé" * 20
    share = len(validation if tokenizer == "char" else validation.encode()) - 0.5
    share /= len(training + validation if tokenizer == "char" else (training + validation).encode())
    stages = [{"weights": {"text": 1, name: 7}}]
    values = text(tmp_path, training + validation) | {"val_fraction": share, "tokenizer": tokenizer}
    source = load(rows=64, source=name, stages=stages, **values)
    allowed = set(source.tokenizer.encode(training).tolist())
    assert set(source.symbols.tolist()) == allowed
    targets = torch.cat([source.batch(step).targets_BT for step in range(1, 9)]).unique().tolist()
    assert set(targets) == allowed
    assert set(next(source.validation(256)).targets_BT.unique().tolist()) == allowed
    assert len(allowed) == (5 if tokenizer == "char" else 6)


def test_what_a_run_will_do_is_told_with_a_line_for_each_source_and_stage(tmp_path):
    lines = load(rows=8, source="text", stages=STAGES, **text(tmp_path)).describe(8)
    assert [line.split(":")[0] for line in lines[:3]] == ["text", "repeats", "backcopy"]
    assert lines[3:] == [
        "from step 1 on, each step: 8 repeats",
        "from step 4 on, each step: 6 text + 2 repeats",
        "from step 8 on, each step: 4 backcopy + 4 text",
        "from step 9 on, each step: 2 text + 4 repeats + 2 backcopy (never in 8 steps)",
    ]
    assert len(drawn("repeats").describe(9)) == 1
