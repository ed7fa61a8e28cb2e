"""What a page shows of a run: the numbers of its records, as many as fit, and gaps."""

import json
from base64 import b64decode
from itertools import pairwise

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from analysis.patterns import attention as attention_of
from analysis.view import KINDS, MOST_CELLS, MOST_HEADS, MOST_POINTS, ROOM, best, smooth, thin, view
from data.bpe import BytePairTokenizer
from data.tokenizers import CharTokenizer
from model.transformer import GPT
from tests.analysis.made_up import SCORES, attention, config, evaluated, heads, published, records, score
from tests.model.models import build_random

TOKENIZER = CharTokenizer("abcdefghij", bos=True)


def shown(*, recorded=None, sections=None, **more):
    """JSON, as the page gets it."""
    found = view("run", config(**(sections or {})), records() if recorded is None else recorded, **more)
    del found["config"]
    return json.loads(json.dumps(found, allow_nan=False))


def reading(L=2, H=2, context=32, tokenizer=TOKENIZER, recorded=None, **more):
    sections = {"model": {"n_layer": L, "n_head": H, "d_model": 2 * H, "context_length": context}}
    model = GPT(config(**sections).model, tokenizer.vocab_size)
    recorded = records(L, H) if recorded is None else recorded
    return shown(recorded=recorded, sections=sections, model=model, tokenizer=tokenizer, **more)


def triangle(encoded):
    """Rows of weights, out of bytes that are 255 times their square root."""
    weights = [(byte / 255) ** 2 for byte in b64decode(encoded)]
    T = int((2 * len(weights)) ** 0.5)
    return [weights[t * (t + 1) // 2 :][: t + 1] for t in range(T)]


def test_every_number_of_every_record_is_there_to_four_digits():
    page = shown()
    assert page["maps"]["step"] == page["probe"]["step"] == [0, 100, 200, 300]
    assert sorted(page["maps"]["scores"]) == sorted(SCORES)
    for name, steps in page["maps"]["scores"].items():
        for step, layers in zip(page["maps"]["step"], steps, strict=True):
            expected = [[score(name, step, i, j) for j in range(2)] for i in range(2)]
            assert layers == [pytest.approx(row, rel=5e-4) for row in expected]
    assert page["probe"]["repeat_loss_2"] == [4.0, 3.0, 2.0, 1.0]
    assert (page["eval"]["step"], page["eval"]["loss"]) == ([0, 300], [4.25, 1.25])
    assert page["train"]["step"] == list(range(1, 301))
    assert page["train"]["loss"] == pytest.approx([4 - step / 100 for step in range(1, 301)])


def test_the_best_head_is_named_at_each_step():
    found = records()
    found[2]["scores"]["sink"] = [[None, 0.4], [0.9, 0.1]]
    assert shown(recorded=found)["probe"]["sink"][2] == [0.9, "1.0"]
    assert shown(recorded=found)["probe"]["sink"][3] == [0.33, "1.1"]
    assert shown(recorded=found)["formed"] == {
        k: None if k in ("induction", "previous") else [0, "1.1"] for k in KINDS
    }


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([[None, None]], None), ([[None, -2.0]], (-2.0, "0.1")), ([[0.0], [None]], (0.0, "0.0"))],
)
def test_heads_without_a_number_are_never_the_best(rows, expected):
    assert best(rows) == expected


@pytest.mark.parametrize("kind", ["attention", "train", "eval"])
def test_one_record_alone_makes_a_view(kind):
    record = next(record for record in records() if record["kind"] == kind)
    page = shown(recorded=[record])
    assert page["step"] == record["step"]
    assert bool(page["heads"]) == (kind == "attention")


def test_numbers_that_were_not_finite_are_gaps():
    empty = {name: [[None, None], [None, None]] for name in SCORES}
    page = shown(
        recorded=[attention(0) | {"model": dict.fromkeys(attention(0)["model"])}, attention(100, **empty)]
    )
    assert page["probe"]["induction"][1] is None
    assert page["maps"]["scores"]["entropy"][1] == [[None, None], [None, None]]
    assert page["probe"]["repeat_loss_2"] == [None, 3.0]


def test_a_users_own_statistic_appears_also_where_earlier_records_lack_it():
    own = [[0.5, -7.0], [1e-9, None]]
    page = shown(recorded=[attention(0), attention(100, own=own)])
    assert page["maps"]["scores"]["own"] == [None, own]


def test_stages_are_named_at_their_borders():
    stages = [{"until": 100, "weights": {"repeats": 1}}, {"weights": {"shakespeare": 7, "repeats": 1}}]
    assert shown(sections={"data": {"stages": stages}})["stages"] == [
        {"after": 0, "mix": "repeats"},
        {"after": 100, "mix": "7 shakespeare : 1 repeats"},
    ]
    assert shown()["stages"] == []


@pytest.mark.parametrize(("step", "reached"), [(0, 1), (50, 1), (100, 1), (101, 2), (300, 2)])
def test_a_stage_is_named_once_there_is_a_step_of_it(step, reached):
    stages = [{"until": 100, "weights": {"repeats": 1}}, {"weights": {"shakespeare": 1}}]
    page = shown(recorded=[attention(step)], sections={"data": {"stages": stages}})
    assert [stage["after"] for stage in page["stages"]] == [0, 100][:reached]


def test_seconds_are_whole_however_many():
    end = {"kind": "end", "step": 300, "seconds": 12345.6, "telemetry_share": 0.01}
    assert shown(recorded=[end])["seconds"] == 12346


@given(st.floats(-1, 1), st.floats(-5, 5), st.integers(1, 400))
def test_smoothing_leaves_straight_lines_as_they_are(slope, start, n):
    line = [start + slope * i for i in range(n)]
    assert smooth(line, range(n), []) == pytest.approx(line, abs=1e-9)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=300))
def test_smoothing_stays_between_the_extremes_and_keeps_both_ends(values):
    smoothed = smooth(values, range(len(values)), [])
    assert (smoothed[0], smoothed[-1]) == (values[0], values[-1])
    assert min(values) - 1e-9 <= min(smoothed) <= max(smoothed) <= max(values) + 1e-9


def test_smoothing_does_not_blur_the_border_of_a_stage():
    steps = range(1, 401)
    jump = [float(step > 150) for step in steps]
    assert smooth(jump, steps, [0, 150]) == jump
    assert smooth(jump, steps, [0]) != jump


@given(st.integers(1, 500), st.integers(2, 50))
def test_thinning_keeps_both_ends_and_even_distances(n, most):
    kept = thin(range(n), most)
    assert (kept[0], kept[-1], len(kept)) == (0, n - 1, min(n, most))
    gaps = {b - a for a, b in pairwise(kept)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_long_runs_are_thinned_and_end_where_they_end():
    many = [attention(step, 8, 8) for step in range(400)] + [
        {"kind": "train", "step": s, "loss": 1.0} for s in range(1, 4001)
    ]
    page = shown(recorded=many)
    cells = sum(len(row) for steps in page["maps"]["scores"].values() for layers in steps for row in layers)
    assert MOST_CELLS * 0.9 < cells <= MOST_CELLS
    assert len(page["train"]["step"]) == MOST_POINTS
    assert (page["maps"]["step"][-1], page["train"]["step"][-1]) == (399, 4000)


def test_labelled_heads_come_first_and_the_best_of_each_label_is_chosen():
    labels = {(0, 1): ["sink", "induction"], (1, 0): ["induction"], (1, 1): ["syntactic:obj"]}
    page = shown(heads=heads(labels=labels))
    assert list(page["heads"]) == ["1.1", "1.0", "0.1", "0.0"]
    assert list(page["best"].items()) == [("induction", "1.0"), ("sink", "0.1")]
    # Score, interval, what uniform attention and an untrained model get.
    assert page["heads"]["0.0"]["scores"]["sink"] == [0.33, 0.32, 0.34, 0.0125, 0.0375]


def test_where_not_all_heads_have_room_the_best_of_each_label_does():
    labels = {(0, 0): ["sink", "induction"], (0, 1): ["sink"], (1, 0): ["sink"], (1, 1): ["sink"]}
    page = shown(heads=heads(labels=labels), runs=MOST_HEADS // 2)
    assert list(page["heads"]) == ["1.1", "1.0", "0.0"]
    assert page["best"] == {"induction": "0.0", "sink": "1.1"}
    assert page["more_heads"] == 1


def test_before_there_are_labels_high_scores_choose():
    page = shown()
    assert (page["typed"], page["heads_step"]) == (False, 300)
    assert page["best"] == dict.fromkeys(["sink", "duplicate", "current"], "1.1")  # made up as 0.3 and more
    assert shown(heads=heads())["best"] == {}


def test_attention_is_a_triangle_on_a_text_and_on_random_tokens():
    phrase, random = reading(heads=heads())["attention"]
    assert phrase["tokens"] == ["BOS", *"abcdefghij" * 2]
    assert sorted(random["tokens"][1:11]) == list("abcdefghij")
    assert random["tokens"][1:11] == random["tokens"][11:]
    for text in (phrase, random):
        assert sorted(text["weights"]) == ["0.0", "0.1", "1.0", "1.1"]
        assert text["of"] == len(text["tokens"])
        for rows in map(triangle, text["weights"].values()):
            assert [len(row) for row in rows] == list(range(1, 22))
            assert all(sum(row) == pytest.approx(1, abs=0.004 * len(row) ** 0.5) for row in rows)


def test_without_heads_json_the_attention_is_on_random_tokens_alone():
    (random,) = reading()["attention"]
    assert len({*random["tokens"]}) == 11


def test_random_tokens_are_text_also_where_bos_and_unused_ids_stand_among_them():
    ranks = {bytes([byte]): 5 + byte for byte in range(256)}
    marks = {"<|endoftext|>": 2, "<|endofprompt|>": 300}
    odd = tiktoken.Encoding("odd", pat_str=".", mergeable_ranks=ranks, special_tokens=marks)
    (random,) = reading(tokenizer=BytePairTokenizer(odd, bos=True))["attention"]
    assert random["tokens"][0] == "BOS"
    assert not {"BOS", ""} & {*random["tokens"][1:]}


def test_texts_of_ones_own_take_the_place_of_the_probes():
    *own, random = reading(heads=heads(), texts=["jig", "a" * 31, "b" * 30])["attention"]
    assert [text["tokens"][1:] for text in own] == [list("jig"), list("a" * 31), list("b" * 30)]
    assert [text["title"] for text in own] == ["“jig”", f"“{'a' * 30}…”", f"“{'b' * 30}”"]
    assert sorted(random["tokens"][1:11]) == list("abcdefghij")


@pytest.mark.parametrize(("context", "shown_of"), [(32, 32), (512, 128)])
def test_a_text_is_cut_to_the_context_and_to_what_can_be_read(context, shown_of):
    text, _ = reading(context=context, texts=["abcd" * 100])["attention"]
    assert (len(text["tokens"]), text["of"]) == (shown_of, 401)
    assert len(triangle(text["weights"]["0.0"])) == shown_of


@pytest.mark.parametrize("runs", [1, 4])
def test_attention_fills_the_room_that_is_left_with_labelled_heads_first(runs):
    long = ["abcdefghij" * 13] * 3
    page = reading(12, 12, 128, heads=heads(12, 12, {(11, 11): ["induction"]}), runs=runs, texts=long)
    used, each = len(json.dumps(page)), len(page["attention"][0]["weights"]["11.11"]) * 4
    assert used < 1.01 * ROOM / runs
    assert used > 0.9 * ROOM / runs - each or len(page["attention"][0]["weights"]) == 144
    for text in page["attention"]:
        assert next(iter(text["weights"])) == "11.11"
        assert len(text["weights"]) == len(page["attention"][0]["weights"]) < 145


def test_the_weights_under_a_name_are_those_of_that_layer_and_head():
    model = build_random(vocab_size=TOKENIZER.vocab_size, n_layer=3)
    sections = {"model": {"n_layer": 3, "n_head": 4, "d_model": 24}}
    text = "abcadcba"
    page = shown(recorded=records(3, 4), sections=sections, model=model, tokenizer=TOKENIZER, texts=[text])
    A_LHTT = attention_of(model, [10, *TOKENIZER.encode(text).tolist()])
    for name, encoded in page["attention"][0]["weights"].items():
        layer, head = map(int, name.split("."))
        for t, row in enumerate(triangle(encoded)):
            assert row == pytest.approx(A_LHTT[layer, head, t, : t + 1].tolist(), abs=0.004)


@pytest.mark.parametrize("steps", [(0, 50, 150), (0, 50, 75, 100, 150, 300)])
def test_checkpoints_are_drawn_where_they_are_more_than_the_probes_and_marked_in_any_case(steps):
    document = evaluated(heads(labels={(1, 0): ["induction"]}), steps=steps)
    marked = steps[-2]
    document["summary"]["timeline"]["scores"]["induction"][-2] = [[0.1, 0.2], [0.3, 0.4]]
    page = shown(heads=document)
    drawn = list(steps) if len(steps) > 4 else [0, 100, 200, 300]  # the steps of the records
    assert page["maps"]["step"] == page["probe"]["step"] == drawn
    assert page["maps"]["scores"]["sink"][1][1][0] == pytest.approx(score("sink", drawn[1], 1, 0), rel=5e-4)
    assert page["probe"]["repeat_loss_2"] == [4.0 - step / 100 for step in drawn]
    assert page["crossed"] == [{"kind": "induction", "head": "1.0", "step": marked, "score": 0.3}]
    assert page["fell"] == document["summary"]["timeline"]["fell"]


def test_a_head_that_looks_two_back_crossed_at_that_score():
    document = evaluated(heads(labels={(1, 0): ["previous-token"]}))
    scores = document["summary"]["timeline"]["scores"]
    scores["previous2"] = [[[0.0, 0.0], [0.6, None]] for _ in scores["previous"]]
    assert shown(heads=document)["crossed"][0]["score"] == 0.6


def test_a_published_model_needs_no_records():
    document = published(evaluated(heads(2, 3, labels={(1, 0): ["induction"]})))
    for n, head in enumerate(document["heads"]):
        head["scores"]["sink"] = n / 10
    page = reading(2, 3, recorded=[], heads=document)
    assert (page["published"], page["step"], page["heads_step"]) == ("made-up-135m", 0, None)
    assert page["maps"]["step"] == [None]
    assert page["maps"]["scores"]["sink"] == [[[0.0, 0.1, 0.2], [0.3, 0.4, 0.5]]]
    assert page["probe"]["repeat_loss_2"] == [0.125]
    assert page["attention"][0]["title"] == "distinct tokens at random, two times"
    assert page["attention"][1]["title"] == "text of the probe, two times"


def test_a_run_that_was_evaluated_and_never_probed_shows_its_heads():
    page = shown(recorded=[record for record in records() if record["kind"] == "train"], heads=heads())
    assert (page["maps"]["step"], page["heads_step"], page["step"]) == ([300], 300, 300)


def test_a_long_run_is_thinned_to_what_a_page_can_hold_and_its_first_heads_are_still_known():
    probed = [attention(step, induction=[[0.1, 0.0], [0.0, 0.0]]) for step in range(5000)]
    probed[1233]["scores"]["induction"] = [
        [0.9, 0.0],
        [0.0, 0.0],
    ]  # for one step, which thinning may leave out
    evaluated = [
        {"kind": "eval", "step": n, "loss": 1.0, "loss_sem": 0.1, "bits_per_byte": 2.0} for n in range(5000)
    ]
    found = shown(recorded=[*probed, *evaluated])
    assert max(len(found[part]["step"]) for part in ("eval", "probe", "maps")) <= MOST_POINTS
    assert {len(column) for column in found["probe"].values()} == {len(found["probe"]["step"])}
    assert found["formed"]["induction"] == [1233, "0.0"]
