"""Windows over documents, against what their definition gives by brute force.

The tokens of the text are 0, 1, 2 ... (tests/data/stored.py): an id says which token it is. BOS is the last.
"""

import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError
from configs.schema import Config
from data.documents import Documents
from data.loading import load_source
from data.sources import IGNORED, Batch
from tests.data.stored import config, source, streams, write

T = 5
MODES = st.fixed_dictionaries(
    {"bos": st.booleans(), "windows": st.sampled_from(["anywhere", "documents"]), "masked": st.booleans()}
)
LENGTHS = st.lists(st.integers(1, 4 * T), min_size=1, max_size=12).filter(lambda n: sum(n) > T)
LENGTHS = LENGTHS.filter(lambda n: max(n) > 1)


def made(train: list[int], val: list[int] | None = None, context: int = T, **values) -> Documents:
    with tempfile.TemporaryDirectory() as folder:  # the tokens stay mapped after it is gone
        return source(Path(folder), train, val or [9], context, **values)


def documents_of(lengths: list[int], first: int = 0) -> list[list[int]]:
    """The text of so long documents, the first of which begins with token `first`."""
    return streams({"before": [first], "part": lengths}, None)["part"]


def batch_of(batches: list[Batch]) -> Batch:
    segments = [batch.segment_BT for batch in batches]
    joined = None if segments[0] is None else torch.cat(segments)
    return Batch(
        torch.cat([b.inputs_BT for b in batches]), torch.cat([b.targets_BT for b in batches]), joined
    )


def epoch(source: Documents, number: int = 0) -> Batch:
    return source.windows(number * source.epochs.count, source.epochs.count)


def counted(batch: Batch, source: Documents) -> Counter:
    """How often each token of the text is a target."""
    targets = batch.targets_BT.flatten().tolist()
    return Counter(target for target in targets if target not in (IGNORED, source.bos))


def expected_targets(documents: list[list[int]], source: Documents, masked: bool) -> Counter:
    """Each token once; without BOS, none that nothing precedes in its document (or, unmasked, at all)."""
    if source.bos is not None:
        return Counter(token for document in documents for token in document)
    if masked:
        return Counter(token for document in documents for token in document[1:])
    return Counter([token for document in documents for token in document][1:])


def check_rows(batch: Batch, documents: list[list[int]], bos: int | None, masked: bool) -> None:
    """Each counted target is what follows its input in the documents, and segments number the documents."""
    after, number = {}, {}
    for i, document in enumerate(documents):
        after |= dict(pairwise(document))
        number |= dict.fromkeys(document, i)
        follows = documents[i + 1][0] if i + 1 < len(documents) else None
        after[document[-1]] = follows if bos is None else bos
    segments = [None] * len(batch.inputs_BT) if batch.segment_BT is None else batch.segment_BT.tolist()
    assert (batch.segment_BT is not None) == masked
    for inputs, targets, segment in zip(
        batch.inputs_BT.tolist(), batch.targets_BT.tolist(), segments, strict=True
    ):
        assert any(target != IGNORED for target in targets)
        seen, label = [], 0
        if bos is not None:
            assert inputs[0] == bos
            assert targets[0] != bos
        for place, (token, target) in enumerate(zip(inputs, targets, strict=True)):
            new = token == bos if bos is not None else token in {document[0] for document in documents}
            label += place > 0 and new
            if target != IGNORED:
                if token != bos:
                    assert target == after[token]
                elif place > 0:
                    assert target == documents[number[seen[-1]] + 1][0]
            if segment is not None and segment[place] >= 0:
                assert segment[place] == label
                assert (target != IGNORED) == (bos is not None or number[after[token]] == number[token])
            elif segment is not None:
                assert segment[place:] == [-1] * (len(inputs) - place)
                assert target == IGNORED
            seen.append(token)


# Each token once


@given(lengths=LENGTHS, mode=MODES, shard=st.integers(3, 40), context=st.integers(2, 9))
def test_validation_counts_every_token_once_and_every_target_follows_its_input(lengths, mode, shard, context):
    if sum(lengths) <= context:
        return
    held_back = made([context + 9], lengths, context, shard=shard, **mode)
    documents = documents_of(lengths, context + 9)
    batch = batch_of(list(held_back.validation(3)))
    check_rows(batch, documents, held_back.bos, mode["masked"])
    assert counted(batch, held_back) == expected_targets(documents, held_back, mode["masked"])


@given(lengths=LENGTHS, bos=st.booleans(), masked=st.booleans(), number=st.integers(0, 3))
def test_windows_at_documents_cover_every_token_once_an_epoch(lengths, bos, masked, number):
    read = made(lengths, bos=bos, masked=masked, windows="documents")
    documents = documents_of(lengths)
    batch = epoch(read, number)
    check_rows(batch, documents, read.bos, masked)
    assert counted(batch, read) == expected_targets(documents, read, masked)


@given(lengths=LENGTHS, bos=st.booleans(), masked=st.booleans(), number=st.integers(0, 9))
def test_windows_anywhere_stand_side_by_side_and_leave_out_no_more_than_a_window(
    lengths, bos, masked, number
):
    read = made(lengths, bos=bos, masked=masked)
    documents = documents_of(lengths)
    batch = epoch(read, number)
    found, expected = counted(batch, read), expected_targets(documents, read, masked)
    assert max(found.values(), default=1) == 1
    between = [token for token in expected if min(found, default=0) <= token <= max(found, default=-1)]
    assert sorted(found) == sorted(between)
    assert sum(len(document) + bos for document in documents) - len(batch.inputs_BT) * T < 2 * T + (not bos)


@given(lengths=LENGTHS, mode=MODES)
def test_over_the_epochs_every_token_becomes_a_target(lengths, mode):
    read = made(lengths, **mode)
    documents = documents_of(lengths)
    found = counted(batch_of([epoch(read, number) for number in range(150)]), read)
    assert set(found) == set(expected_targets(documents, read, mode["masked"]))


# Which windows


def windows_by_hand(documents: list[list[int]], bos: int | None, T: int) -> list[list[int]]:
    """Inputs of the windows that hold whole documents, without padding, one document after the other."""
    windows: list[list[int]] = [[]]
    for document in documents:
        whole = [bos] * (bos is not None) + document
        if len(whole) > T:
            windows += [whole[:T]]
            for i in range(T, len(whole), T):
                windows += [([bos] if bos is not None else whole[i : i + 1]) + whole[i + 1 : i + T]]
            windows += [[]]
        elif len(windows[-1]) + len(whole) > T:
            windows += [whole]
        else:
            windows[-1] += whole
    return [window for window in windows if window]


@given(lengths=LENGTHS, bos=st.booleans(), context=st.integers(2, 9))
def test_windows_hold_as_many_whole_documents_as_fit_and_longer_ones_in_pieces(lengths, bos, context):
    if sum(lengths) <= context:
        return
    read = made([context + 9], lengths, context, bos=bos, windows="documents", masked=True)
    documents = documents_of(lengths, context + 9)
    lasts = {document[-1] for document in documents}
    expected = [  # but those without a target in a document that they have begun
        window
        for window in windows_by_hand(documents, read.bos, context)
        if (len(window) > 1 if bos else not lasts.issuperset(window))
    ]
    batch = batch_of(list(read.validation(4)))
    assert len(batch.inputs_BT) == len(expected)
    for inputs, segment, window in zip(
        batch.inputs_BT.tolist(), batch.segment_BT.tolist(), expected, strict=True
    ):
        assert inputs[: len(window)] == window
        # The very last token has nothing after it: it counts as padding.
        assert segment.count(-1) == context - len(window) + (window[-1] == documents[-1][-1])


def test_the_end_of_a_document_is_predicted_where_there_is_a_bos_and_a_token_left_of_the_window():
    read = made([9], [2, 1, 4, 5, 3, 2], windows="documents", masked=True)
    batch, bos = next(read.validation(9)), read.bos
    assert batch.targets_BT.tolist() == [
        [9, 10, bos, 11, bos],
        [12, 13, 14, 15, bos],
        [16, 17, 18, 19, 20],  # a window of BOS alone would be left, to say that this was the end
        [21, 22, 23, bos, IGNORED],
        [24, 25, IGNORED, IGNORED, IGNORED],
    ]
    assert batch.segment_BT.tolist() == [
        [0, 0, 0, 1, 1],
        *[[0] * 5] * 2,
        [0, 0, 0, 0, -1],
        [0, 0, -1, -1, -1],
    ]


def test_a_window_anywhere_that_meets_a_document_begins_with_its_bos():
    read = made([9], [5, 3, 4, 2, 1, 4], masked=True)
    batch, bos = next(read.validation(9)), read.bos
    assert batch.inputs_BT[:4].tolist() == [
        [bos, 9, 10, 11, 12],
        [bos, 14, 15, 16, bos],
        [bos, 17, 18, 19, 20],
        [bos, 21, 22, bos, 23],
    ]
    assert batch.targets_BT.tolist() == [
        [9, 10, 11, 12, 13],
        [14, 15, 16, bos, IGNORED],  # what comes next is a target of the next window
        [17, 18, 19, 20, bos],
        [21, 22, bos, 23, bos],
        [24, 25, 26, 27, IGNORED],  # the end of the last window is filled up
    ]


# Order


@given(mode=MODES, first=st.integers(0, 60), parts=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_how_windows_are_cut_into_batches_does_not_change_their_order(mode, first, parts):
    lengths = [3, 17, 1, 4, 8, 2, 2, 6, 11]
    whole, cut = made(lengths, **mode), made(lengths, **mode)
    firsts = [first + sum(parts[:i]) for i in range(len(parts))]
    pieces = batch_of([cut.windows(*place) for place in zip(firsts, parts, strict=True)])
    for one, other in zip(whole.windows(first, sum(parts)), pieces, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("windows", ["anywhere", "documents"])
def test_epochs_and_seeds_have_orders_of_their_own(windows):
    lengths = [3, 17, 1, 4, 8, 2, 2, 6, 11] * 4
    orders = [epoch(made(lengths, windows=windows), number).targets_BT for number in range(4)]
    orders.append(epoch(made(lengths, windows=windows, seed=2)).targets_BT)
    assert len({tuple(order.flatten().tolist()) for order in orders}) == 5


@given(tokens=st.integers(1, 400), mode=MODES)
def test_a_share_of_validation_is_about_as_large_as_asked_and_evenly_spread(tokens, mode):
    lengths = [3, 17, 1, 4, 8, 2, 2, 6, 11] * 5
    read = made([99], lengths, **mode)
    everything, part = (batch_of(list(read.validation(4, n))) for n in (0, tokens))
    rows = [tuple(row) for row in everything.targets_BT.tolist()]
    places = [rows.index(tuple(row)) for row in part.targets_BT.tolist()]
    assert places == sorted({*places})
    gaps = [b - a for a, b in pairwise(places)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    if tokens < sum(lengths):
        mean = sum(lengths) / len(rows)
        assert len(places) * mean == pytest.approx(tokens, abs=1.5 * mean + 0.2 * tokens)


# What is too short, and what is told


@pytest.mark.parametrize("windows", ["anywhere", "documents"])
@pytest.mark.parametrize("short", ["train", "val"])
@pytest.mark.parametrize("bos", [True, False])
def test_a_part_shorter_than_a_window_is_refused_with_both_sizes(windows, short, bos):
    lengths = {"train": [9, 9], "val": [9, 9]} | {short: [T - 1 if bos else T]}
    with pytest.raises(UserError) as caught:
        made(lengths["train"], lengths["val"], bos=bos, windows=windows)
    wanted = (
        f"model.context_length {T} needs at least {T + 1} tokens; the {short} part of books/*.txt has {T},"
    )
    assert wanted in str(caught.value)
    assert "\n" not in str(caught.value)
    lengths[short] = [T if bos else T + 1]
    made(lengths["train"], lengths["val"], bos=bos, windows=windows)


def test_documents_of_one_token_leave_nothing_to_predict_where_each_stands_alone():
    with pytest.raises(UserError, match="each document is one token"):
        made([1] * 20, [9], bos=False, masked=True, windows="documents")
    assert counted(epoch(made([1] * 20, [9], windows="documents")), made([1] * 20)).total() == 20


def test_what_the_folder_says_is_told_and_bytes_are_those_of_validation():
    read = made([5, 7], [9, 8, 1])
    assert read.description == "14 training tokens in 2 documents and 21 validation tokens in 3 documents"
    assert read.bytes_per_token == 3 * 21 / 20  # the first token is no target
    assert read.symbols.tolist() == list(range(12))
    assert read.fingerprint == "made by hand"


# What probes read


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("length", [5, 6])
def test_masked_probe_text_is_one_document_a_row_from_those_that_are_long_enough(asked, length):
    lengths = [2, 9, 1, 8, 3, 7, 2, 12, 6, 7, 2, 9]  # 7 of them suffice
    read = made([9], lengths, masked=True)
    long = [document for document in documents_of(lengths, 9) if len(document) > 4]
    text_BT, segment_BT = read.probe_text(3, length, asked)
    assert segment_BT.tolist() == [[0] * length] * 3
    expected = [[read.bos, *long[i]] if asked else long[i] for i in (0, 2, 4)]  # evenly spread
    assert text_BT.tolist() == [row[:length] for row in expected]


@pytest.mark.parametrize("bos", [True, False])
def test_where_too_few_documents_are_long_the_longest_are_padded_on_the_right(bos):
    lengths = [2, 9, 1, 4, 3]
    read = made([9], lengths, bos=bos, masked=True)
    documents = documents_of(lengths, 9)
    for asked in {bos, False}:
        text_BT, segment_BT = read.probe_text(4, 6, asked)
        for text, segment, i in zip(text_BT.tolist(), segment_BT.tolist(), (0, 1, 3, 4), strict=True):
            row = ([read.bos] * asked + documents[i])[:6]
            assert text == row + [0] * (6 - len(row))
            assert segment == [0] * len(row) + [-1] * (6 - len(row))
    text_BT, _ = read.probe_text(12, 6, False)  # more than there are: they come again
    assert Counter(text_BT[:, 0].tolist()) == {9: 3, 11: 3, 20: 2, 21: 2, 25: 2}


@pytest.mark.parametrize("asked", [True, False])
def test_unmasked_probe_text_begins_at_documents_and_goes_on_into_the_next(asked):
    lengths = [2, 3, 3, 9, 2, 3, 1]
    read = made([9], lengths)
    stream = [token for document in streams({"": [9], "val": lengths}, read.bos)["val"] for token in document]
    text_BT, segment_BT = read.probe_text(3, 8, asked)
    assert segment_BT is None
    begin = [0, 3, 11] if asked else [1, 4, 12]  # of five that begin early enough
    assert text_BT.tolist() == [stream[i : i + 8] for i in begin]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3).filter(lambda n: sum(n) > T),
    bos=st.booleans(),
    sequences=st.integers(4, 9),
)
def test_unmasked_probe_text_from_few_documents_is_spread_over_all_and_no_bos_is_doubled(
    lengths, bos, sequences
):
    read = made([9], lengths, bos=bos)
    stream = [token for document in streams({"": [9], "val": lengths}, read.bos)["val"] for token in document]
    places = {tuple(stream[i : i + n]): i for n in (T - 1, T) for i in range(len(stream))}
    for asked in {bos, False}:
        text_BT, segment_BT = read.probe_text(sequences, T, asked)
        assert segment_BT is None
        assert text_BT.shape == (sequences, T)
        begins = [places[tuple(row[asked:])] for row in text_BT.tolist()]
        assert begins == sorted(begins)
        assert begins[0] == int(bos)
        if asked:
            assert (text_BT[:, 0] == read.bos).all()
        assert not bos or not (text_BT[:, int(asked)] == read.bos).any()


# As a source of a run


def test_documents_and_what_is_drawn_are_mixed_and_one_tokenizer_serves_both(tmp_path, monkeypatch):
    parts = {
        part: [[256, *np.random.default_rng(i).integers(65, 91, 40).tolist()] for i in range(20)]
        for part in ("train", "val")
    }
    folder = write(tmp_path / "made", parts, 257, 256)
    (folder / "tokenizer.json").write_text('{"kind": "byte", "bos": true}')
    monkeypatch.setattr("data.loading.prepared", lambda data, context_length, tokenizer=None: folder)
    data = config(True, masked=True, stages=[{"weights": {"hf": 7, "repeats": 1}}]).model_dump()
    mixture = load_source(
        Config.model_validate({"data": data, "model": {"context_length": 32}, "train": {"batch_size": 16}})
    )
    assert mixture.tokenizer.vocab_size == 257
    batch = mixture.batch(3)
    assert batch.inputs_BT.shape == batch.targets_BT.shape == batch.segment_BT.shape == (16, 32)
    assert torch.equal(batch.segment_BT[:14], mixture.sources["hf"].windows(28, 14).segment_BT)
    assert (batch.segment_BT[14:] == 0).all()
    assert {*batch.inputs_BT[14:].flatten().tolist()} <= {*range(65, 91), 256}
    assert mixture.symbols.tolist() == sorted(
        {token for document in parts["train"] for token in document[1:]}
    )
    assert mixture.probe_text(3, 32, True)[1].tolist() == [[0] * 32] * 3
    assert mixture.describe(5)[0].startswith("hf: 820 training tokens in 20 documents")
