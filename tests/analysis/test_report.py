"""The page as a file: its data, its size, and nothing of a run that could be taken for markup."""

import json
import re
from html.parser import HTMLParser

import pytest

from analysis import report
from analysis.view import view
from configs.schema import Config
from data.tokenizers import CharTokenizer
from model.transformer import GPT
from tests.analysis.made_up import SCORES, attention, config, evaluated, heads, published, records

EVIL = "</script><script>window.evil = 1</script><b onmouseover='evil = 1'>\"&amp;"
EVIL_TOKENS = CharTokenizer("".join(sorted({*"<script>/&;'\"= \n"})), bos=True)


class Text(HTMLParser):
    """The visible text of a page, and its script elements."""

    def __init__(self, page):
        super().__init__()
        self.parts, self.scripts, self.inside = [], [], None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.inside = tag
        self.scripts += [""] if tag == "script" else []

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.parts.append(data)


def write(*views):
    return report.page(views)


def test_the_data_of_the_page_are_those_of_the_view():
    shown = view("run", config(), records(), heads())
    data = json.loads(Text(write(shown)).scripts[0])
    assert data["runs"][0]["maps"] == shown["maps"]
    assert data["runs"][0]["heads"] == shown["heads"]


def words(page):
    return " ".join(" ".join(Text(page).parts).split())


def test_the_head_of_the_page_says_in_words_what_came_out():
    page = words(write(view("run", config(), records())))
    assert "A GPT of 4 layers x 4 heads, width 128, context 32." in page
    assert "Trained on shakespeare: 300 steps of 1,024 tokens each, in 12 seconds." in page
    assert "validation loss 1.25 ± 0.010 nats per token; 2.50 bits per byte" in page
    assert "best induction 0.13 head 1.1; none reached 0.3" in page
    assert "best sink 0.33 head 1.1; first at 0.3: head 1.1, step 0" in page
    assert "loss on a repeat 1.00 nats per token; 4.50 the first time" in page


HUB = {"source": "hf", "name": "tinystories", "tokenizer": "bpe", "vocab_size": 1024}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (HUB, "roneneldan/TinyStories (tokenizer bpe, 1,024 tokens)"),
        ({"source": "hf", "path": "far/away/a.parquet", "tokenizer": "gpt2"}, "a.parquet (tokenizer gpt2)"),
        ({"source": "text", "path": "/far/away/novel.txt"}, "novel.txt"),
        ({"source": "text", "path": "books/*.txt"}, "books/*.txt"),
        ({"stages": [{"weights": {"shakespeare": 1, "repeats": 1}}]}, "shakespeare and repeats"),
    ],
)
def test_the_head_of_the_page_names_the_data_and_a_tokenizer_that_is_not_char(data, said):
    assert f"Trained on {said}: 300 steps of" in words(write(view("run", config(data=data), records())))


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        ({"window": 16, "sink": "zero", "gate": True}, {}, "window 16, sink zero, gate"),
        ({"qk": "tied", "value": "key", "scale": "none"}, {}, "qk tied, value key, scale none"),
        ({"n_kv_head": 2, "init_from": "runs/a"}, {}, "n_kv_head 2, init_from runs/a"),
        ({}, HUB | {"mask_documents": True}, "mask_documents"),
    ],
)
def test_the_head_of_the_page_says_what_sets_attention_apart(model, data, said):
    c = config(model=model, data=data)
    assert f"Unlike an ordinary GPT: {said}." in words(write(view("run", c, records())))


@pytest.mark.parametrize("model", [{}, {"n_head": 8, "n_kv_head": 8, "d_model": 64}])
def test_an_ordinary_gpt_is_not_said_to_be_unlike_one(model):
    assert "Unlike" not in words(write(view("run", config(model=model), records())))


def test_an_unfinished_run_says_how_far_it_is():
    early = [record for record in records() if record["kind"] == "train" and record["step"] <= 100]
    page = words(write(view("run", config(), early)))
    assert "100 of 300 steps so far, of 1,024 tokens each." in page
    assert "training loss 3.00 nats per token" in page


def test_scores_that_were_never_finite_are_none():
    empty = {name: [[None, None], [None, None]] for name in SCORES}
    assert "best sink none head none; none reached 0.3" in words(
        write(view("run", config(), [attention(0, **empty)]))
    )


def test_names_labels_and_statistics_are_text_to_the_page():
    own = [attention(step, **{EVIL: [[0.5, 0.5], [0.5, 0.5]]}) for step in (0, 300)]
    model = GPT(config(model={"n_layer": 2, "n_head": 2, "d_model": 4}).model, EVIL_TOKENS.vocab_size)
    labelled = heads(labels={(0, 0): [EVIL]})
    page = write(view(EVIL, config(), own, labelled, model, EVIL_TOKENS, ["</script><script>"]))
    text = Text(page)
    assert len(text.scripts) == 3
    assert "".join(text.parts).count(EVIL) == 2  # title, heading
    (shown,) = json.loads(text.scripts[0])["runs"]
    assert EVIL in shown["maps"]["scores"]
    assert shown["heads"]["0.0"]["labels"] == [EVIL]


def test_the_page_names_no_address_that_a_browser_would_fetch():
    page = write(view("run", config(), records(), heads()))
    page = page.replace(report.get_plotlyjs(), "")
    assert not re.search(r"https?:", page)
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", page) == ["data:,"]


def test_the_largest_page_has_less_than_8_mb():
    """12 x 12 heads, 60 probes, 17 statistics, a thousand training records, texts as long as they get."""
    names = [*SCORES, *(f"own_{i}" for i in range(9))]
    scores = {name: [[1 / (3 + i + 12 * j) for i in range(12)] for j in range(12)] for name in names}
    probed = [attention(step, **scores) for step in range(0, 6000, 100)]
    losses = [{"kind": "train", "step": step, "loss": 1 / step} for step in range(1, 6001)]
    c = config(
        model={"n_layer": 12, "n_head": 12, "d_model": 24, "context_length": 128}, train={"steps": 6000}
    )
    tokenizer = CharTokenizer("abcdefghij", bos=True)
    texts = ["abcdefg" * 19] * 3
    shown = view("run", c, probed + losses, heads(12, 12), GPT(c.model, 11), tokenizer, texts)
    assert len(write(shown)) < 8e6
    assert len(shown["maps"]["step"]) == 60


def test_a_published_model_of_270_heads_has_room_for_all_of_them_on_three_short_texts():
    c = config(model={"n_layer": 30, "n_head": 9, "d_model": 18})
    labels = {(i, j): ["sink"] for i in range(10, 30) for j in range(9)}
    document = published(evaluated(heads(30, 9, labels)))
    texts = ["abcdefghij" * 3] * 3
    shown = view("big", c, (), document, GPT(c.model, 11), CharTokenizer("abcdefghij", bos=True), texts)
    assert [len(text["weights"]) for text in shown["attention"]] == [270] * 4
    page = write(shown)
    assert len(page) < 8e6
    assert "A published model of 30 layers x 9 heads" in words(page)
    assert "Trained on" not in words(page)
    assert "When the heads form" not in words(page)
    assert "best sink 0.33 head" in words(page)
    assert "none reached" not in words(page)
    assert "syntactic:<relation> : as made up." in words(page)


def test_the_loss_of_a_single_window_stands_without_its_error():
    one = [record | {"loss_sem": None} if record["kind"] == "eval" else record for record in records()]
    assert "validation loss 1.25 nats per token; 2.50 bits per byte" in words(
        write(view("run", config(), one))
    )


def test_settings_that_differ_between_runs_are_told_and_places_are_not():
    def run(**changes):
        made = Config.model_validate({"run": {"dir": f"runs/{changes}"}, "model": changes})
        return view("run", made, records())

    found = report.differing([run(sink="zero"), run(sink="none"), run(sink="none", gate=True)])
    assert found == {"model.sink": ["zero", "none", "none"], "model.gate": [False, False, True]}
    page = words(write(run(sink="zero"), run(sink="none")))
    assert "What differs run run model.sink zero none" in page
    assert "What differs" not in words(write(run()))


def test_bits_per_byte_are_of_text():
    drawn = Config.model_validate({"data": {"source": "repeats"}})
    assert "bits per byte" not in write(view("run", drawn, records()))
    assert "bits per byte" in write(view("run", config(), records()))
