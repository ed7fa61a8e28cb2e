"""The page as a file: its data, its size, and nothing of a run that could be taken for markup."""

import json
import re
from html.parser import HTMLParser

import pytest

from analysis import picture, report
from analysis.view import view
from configs.schema import Config
from data.tokenizers import CharTokenizer
from model.transformer import GPT
from tests.analysis.made_up import SCORES, attention, config, heads, records

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


def test_the_table_has_each_head_with_interval_and_null():
    page = write(view("run", config(), records(), heads(labels={(1, 0): ["sink", "syntactic:obj"]})))
    row = re.search(r"<tr><th>1\.0</th>.*?</tr>", page, re.DOTALL).group(0)
    text = re.sub(r"\s+", " ", " ".join(Text(row).parts))
    assert "sink syntactic:obj" in text
    assert "0.33 (0.32 to 0.34) null 0.01, 0.04" in text  # sink, of 0.1 x 3 + 0.03 + 0.00001
    assert page.count("untyped</span>") == 3


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
    page = write(view(EVIL, config(), own, labelled, model, EVIL_TOKENS, text="</script><script>"))
    text = Text(page)
    assert len(text.scripts) == 3
    assert "".join(text.parts).count(EVIL) == 3  # title, heading, label
    assert EVIL in json.loads(text.scripts[0])["runs"][0]["maps"]["scores"]


def test_the_page_names_no_address_that_a_browser_would_fetch():
    page = write(view("run", config(), records(), heads()))
    page = page.replace(report.get_plotlyjs(), "")
    assert not re.search(r"https?:", page)
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", page) == ["data:,"]


def test_the_largest_page_has_less_than_8_mb():
    """12 x 12 heads, 60 probes, 17 statistics, a thousand training records, two texts as long as they get."""
    names = [*SCORES, *(f"own_{i}" for i in range(9))]
    scores = {name: [[1 / (3 + i + 12 * j) for i in range(12)] for j in range(12)] for name in names}
    probed = [attention(step, **scores) for step in range(0, 6000, 100)]
    losses = [{"kind": "train", "step": step, "loss": 1 / step} for step in range(1, 6001)]
    c = config(
        model={"n_layer": 12, "n_head": 12, "d_model": 24, "context_length": 128}, train={"steps": 6000}
    )
    tokenizer = CharTokenizer("abcdefghij", bos=True)
    shown = view("run", c, probed + losses, heads(12, 12), GPT(c.model, 11), tokenizer, "abcdefg" * 18)
    assert len(write(shown)) < 8e6
    assert len(shown["maps"]["step"]) == 60


def test_the_picture_is_1600_pixels_wide(tmp_path):
    picture.draw(tmp_path / "run.png", view("run", config(), records()))
    head = (tmp_path / "run.png").read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert int.from_bytes(head[16:20], "big") == 1600


@pytest.mark.parametrize("shape", [(1, 1), (2, 4), (12, 12)])
def test_the_picture_can_be_drawn_of_any_shape_and_of_gaps(tmp_path, shape):
    empty = [[None] * shape[1]] * shape[0]
    found = [
        attention(0, *shape),
        attention(100, *shape, induction=empty)
        | {"model": dict.fromkeys(("repeat_loss_1", "repeat_loss_2"))},
    ]
    picture.draw(tmp_path / "run.png", view("run", config(), found))
    assert (tmp_path / "run.png").exists()


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


def test_a_head_that_looks_two_back_is_labelled_as_that():
    labels = {(0, 0): ["previous-token"], (1, 1): ["previous-token"]}
    known = heads(labels=labels)
    for head in known["heads"]:
        head["scores"] |= (
            {"previous": 0.2, "previous2": 0.6} if head["layer"] else {"previous": 0.6, "previous2": 0.2}
        )
    page = write(view("run", config(), records(), known))
    assert page.count("previous-token, two back</span>") == 1


def test_bits_per_byte_are_of_text():
    drawn = Config.model_validate({"data": {"source": "repeats"}})
    assert "bits per byte" not in write(view("run", drawn, records()))
    assert "bits per byte" in write(view("run", config(), records()))
