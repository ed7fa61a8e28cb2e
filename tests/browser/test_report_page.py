"""The page in Chromium, opened from disk: it draws the run's numbers, answers, and makes no request."""

from itertools import pairwise

import pytest
import tiktoken
from playwright.sync_api import expect

from analysis import report
from analysis.view import KINDS, view
from data.bpe import BytePairTokenizer
from data.tokenizers import CharTokenizer
from model.transformer import GPT
from tests.analysis.made_up import attention, config, heads, records, score

EVIL = "<script>window.evil = 1</script><b>bold</b> &amp; \"quoted\" <img src=x onerror='window.evil = 1'>"
TOKENIZER = CharTokenizer("".join(sorted({*EVIL, "\n"})), bos=True)
LABELS = {(1, 0): ["induction"], (0, 1): ["previous-token"]}
TINY = {"n_layer": 2, "n_head": 2, "d_model": 8}


def made_up(name="run", recorded=None, labels=LABELS, text=None, document=None, **model):
    c = config(model={**TINY, **model})
    L, H = c.model.n_layer, c.model.n_head
    texts = [text] if text else []
    read = {"model": GPT(c.model, TOKENIZER.vocab_size), "tokenizer": TOKENIZER, "texts": texts}
    return view(name, c, recorded or records(L, H), document or heads(L, H, labels), **read)


@pytest.fixture(scope="module")
def plain(open_pages, tmp_path_factory):
    """One run of known numbers, for tests that only look."""
    path = tmp_path_factory.mktemp("plain") / "page.html"
    path.write_text(report.page([made_up()]), encoding="utf-8")
    return open_pages(path)


def drawn(page, name, which=0):
    """The numbers that a head map shows."""
    return page.locator(f"[data-name='{name}']").nth(which).evaluate("node => node.data[0].z")


def slide(page, place):
    page.locator("#step").fill(str(place))


def expected(name, step, L=2, H=2):
    return [pytest.approx([score(name, step, i, j) for j in range(H)], rel=5e-4) for i in range(L)]


def hovered(page, plot, x, y):
    """What a plot says about the point at these shares of its width and height."""
    plot.scroll_into_view_if_needed()
    page.mouse.move(0, 0)
    plot.locator(".hoverlayer text").first.wait_for(state="detached")
    box = plot.locator(".nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
    plot.locator(".hoverlayer text").first.wait_for()
    return " ".join(plot.locator(".hoverlayer text").all_text_contents())


def test_one_slider_moves_all_maps_to_the_numbers_of_its_step(plain):
    page = plain
    for place, step in ((3, 300), (0, 0), (2, 200)):
        slide(page, place)
        assert page.locator("#at").text_content() == f"step {step}"
        for name in ("induction", "sink", "entropy"):
            assert drawn(page, name) == expected(name, step)


def test_variants_are_drawn_when_they_are_asked_for_at_the_step_of_the_slider(show):
    page = show(made_up())
    slide(page, 1)
    assert page.locator("[data-name='induction_short']").count() == 0
    page.locator("#more summary").click()
    page.locator("[data-name='induction_short']").wait_for()
    assert drawn(page, "induction_short") == expected("induction_short", 100)


@pytest.mark.slow
def test_play_goes_through_the_steps_and_stops_at_the_last(show):
    page = show(made_up())
    page.evaluate("""() => {
        window.steps = [];
        const note = () => window.steps.push(document.getElementById("at").textContent);
        new MutationObserver(note).observe(document.getElementById("at"), { childList: true });
    }""")
    page.locator("#play").click()
    expect(page.locator("#play")).to_have_text("Play")
    assert page.evaluate("window.steps") == ["step 0", "step 100", "step 200", "step 300"]
    assert drawn(page, "sink") == expected("sink", 300)


def test_colour_ranges_hold_for_all_steps(plain):
    page = plain
    for name, limits in (("sink", [0, 1]), ("entropy", [0.6, 0.630011])):
        ranges = []
        for place in (0, 3):
            slide(page, place)
            found = "node => [node.data[0].zmin, node.data[0].zmax]"
            ranges.append(page.locator(f"[data-name='{name}']").evaluate(found))
        assert ranges == [pytest.approx(limits, rel=1e-3)] * 2


def test_hovering_a_map_tells_statistic_head_step_number_and_null(plain):
    page = plain
    slide(page, 1)
    said = hovered(page, page.locator("[data-name='sink']"), 0.75, 0.25)
    assert all(part in said for part in ("sink", "head 0.1", "step 100", "0.310", "0.013", "0.037"))


def test_hovering_the_phase_change_tells_score_and_head(plain):
    page = plain
    said = hovered(page, page.locator("#phase"), 0.99, 0.5)
    assert "step 300" in said
    assert "best induction : 0.130, head 1.1" in said
    assert "second time : 1.000" in said


def test_hovering_the_losses_tells_both(plain):
    page = plain
    said = hovered(page, page.locator("#losses"), 0.985, 0.5)
    assert "validation on shakespeare : 1.250 ± 0.010" in said
    assert "training : 1.0" in said


def test_numbers_that_are_missing_are_gaps_and_said_so(show):
    found = [attention(0), attention(300, sink=[[None, 0.5], [0.5, 0.5]])]
    page = show(made_up(recorded=found))
    assert drawn(page, "sink")[0] == [None, 0.5]
    assert "no number" in hovered(page, page.locator("[data-name='sink']"), 0.25, 0.25)


def test_attention_shows_tokens_and_weights_of_the_head_that_is_chosen(show):
    page = show(made_up(text="a b\nc"))
    ticks = page.locator(".matrix .xaxislayer-above text")
    assert ticks.all_text_contents() == ["BOS", "a", "␣", "b", "⏎", "c"]
    said = hovered(page, page.locator(".matrix"), 1.5 / 6, 2.5 / 6)
    assert all(part in said for part in ("query 2: ␣", "key 1: a", "weight 0.3"))
    assert page.locator(".look figcaption").text_content() == "head 1.0 on “a b c”"
    before = page.locator(".matrix").evaluate("node => node.data[0].z")
    page.locator(".grid a[data-head='0.0']").click()
    expect(page.locator(".look figcaption")).to_have_text("head 0.0 on “a b c”")
    after = page.locator(".matrix").evaluate("node => node.data[0].z")
    assert after != before
    assert all(weight is None for i, row in enumerate(after) for weight in row[i + 1 :])
    page.locator(".texts button").last.click()
    assert ticks.count() > 6


def labels_of(page):
    """The boxes of the labels of both axes, of their titles and of the whole picture."""
    return page.locator(".matrix").evaluate("""node => {
        const boxes = (found) => [...node.querySelectorAll(found)].map((one) => {
            const { left, right, top, bottom } = one.getBoundingClientRect();
            return { left, right, top, bottom, text: one.textContent };
        });
        const [keys, queries] = [".xaxislayer-above text", ".yaxislayer-above text"].map(boxes);
        return { keys, queries, titles: boxes(".xtitle, .ytitle"), picture: boxes(".main-svg")[0] };
    }""")


def overlap(one, other, slack=0.5):
    apart = one["right"] < other["left"] + slack or other["right"] < one["left"] + slack
    return not apart and one["bottom"] > other["top"] + slack and other["bottom"] > one["top"] + slack


def assert_readable(page, slack=0.5):
    found = labels_of(page)
    picture, titles = found["picture"], found["titles"]
    assert len(titles) == 2
    for labels in (found["keys"], found["queries"]):
        assert labels
        assert not [pair for pair in pairwise(labels) if overlap(*pair, slack)]
        assert not [(label, title) for label in labels for title in titles if overlap(label, title)]
    for box in [*found["keys"], *found["queries"], *titles]:
        assert all(picture[side] <= box[side] + slack for side in ("left", "top")), box
        assert all(box[side] <= picture[side] + slack for side in ("right", "bottom")), box


WORDS = ["international", "isation", " a", "\n", "日本", " expression", "mmmmmmmmmmmm"]


def words_of(n):
    """A run that reads `n` tokens of which some are long."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {word.encode(): 256 + i for i, word in enumerate(WORDS)}
    pattern = "|".join(WORDS)
    tokenizer = BytePairTokenizer(
        tiktoken.Encoding(
            "words",
            pat_str=pattern,
            mergeable_ranks=ranks,
            special_tokens={"<|endoftext|>": 256 + len(WORDS)},
        ),
        bos=True,
    )
    c = config(model={**TINY, "context_length": 128})
    read = {"model": GPT(c.model, tokenizer.vocab_size), "tokenizer": tokenizer}
    text = "".join(WORDS[i % len(WORDS)] for i in range(n - 1))
    return view("run", c, records(), heads(), **read, texts=[text])


@pytest.mark.slow
@pytest.mark.parametrize("n", [6, 61, 128])
def test_labels_of_long_tokens_are_apart_and_whole_at_any_width(show, n):
    page = show(words_of(n))
    for width in (1280, 420, 1280, 760):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
        page.wait_for_function("""() => {
            const node = document.querySelector(".matrix"), drawn = node.querySelector(".main-svg");
            return Math.abs(drawn.getBoundingClientRect().width - node.clientWidth) < 1;
        }""")
        assert_readable(page)


def test_long_tokens_are_shortened_on_the_axes_and_whole_on_hovering(show):
    page = show(words_of(6))
    ticks = [box["text"] for box in labels_of(page)["keys"]]
    assert ticks == ["BOS", "internation…", "isation", "␣a", "⏎", "日本"]
    assert "key 1: international" in hovered(page, page.locator(".matrix"), 1.5 / 6, 1.5 / 6)


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 60, 127])
def test_labels_of_single_characters_stay_upright_and_apart(show, n):
    page = show(made_up(text=(EVIL * 2)[:n], context_length=128))
    assert_readable(page, slack=2)  # boxes are higher than their letters
    assert not [pair for pair in pairwise(labels_of(page)["keys"]) if overlap(*pair)]
    assert labels_of(page)["keys"][0]["text"] == "BOS"
    turns = (
        "node => [...node.querySelectorAll('.xaxislayer-above text')].map(t => t.getAttribute('transform'))"
    )
    assert not [turn for turn in page.locator(".matrix").evaluate(turns) if "-90" in turn]


def test_markup_in_names_labels_statistics_and_text_is_shown_as_text(show):
    own = [attention(step, **{EVIL: [[0.5, 0.5], [0.5, 0.5]]}) for step in (0, 300)]
    evil = made_up(EVIL, own, {(0, 0): [EVIL, "sink"]}, text="<b>&lt;")
    for views in ([evil], [evil, made_up("other")]):
        page = show(*views)
        assert page.locator("h1").first.text_content() == EVIL
        for place in (".legend .label", ".look .labels .label", "td .label"):
            assert EVIL in " ".join(page.locator(place).all_text_contents())
        page.locator(".grid a").first.focus()
        assert EVIL in page.locator("#tip").text_content()
        assert page.locator(".texts button").first.text_content() == "“<b>&lt;”"
        assert page.locator(".maps figcaption b").last.text_content() == EVIL
        ticks = page.locator(".matrix").first.locator(".xaxislayer-above text")
        assert ticks.all_text_contents() == ["BOS", *"<b>&lt;"]
        assert "query 4: &" in hovered(page, page.locator(".matrix").first, 0.3, 4.5 / 8)
        own_map = page.locator(".maps figure").last.locator(".js-plotly-plot").first
        assert EVIL in hovered(page, own_map, 0.25, 0.25)
        assert page.evaluate("window.evil") is None
        assert page.locator("img").count() == 0
    assert EVIL in page.locator("#phase .legend").text_content()


def test_runs_of_other_shapes_and_statistics_stand_side_by_side(show):
    small = [attention(step, 1, 1, own=[[0.25]]) for step in (0, 50, 150)]
    runs = [made_up("first"), made_up("second", small, {}, n_layer=1, n_head=1)]
    page = show(*runs)
    assert page.locator("h1").all_text_contents() == ["first", "second"]
    assert page.locator("#step").get_attribute("max") == "5"  # 0, 50, 100, 150, 200, 300
    slide(page, 3)
    assert drawn(page, "sink", 0) == expected("sink", 100)
    assert drawn(page, "sink", 1) == expected("sink", 150, 1, 1)
    assert page.locator("[data-name='own']").count() == 1
    assert page.locator("main table").count() == page.locator(".matrix .main-svg").count() / 3 == 2
    assert page.locator(".grid a").count() == 5
    assert "model.n_layer" in page.locator("header table").inner_text()
    slide(page, 5)
    last = page.locator("[data-name='sink']").nth(1).locator("xpath=../h4").inner_text()
    assert last == "second, its last step 150"


def test_each_run_has_one_colour_and_one_run_a_colour_per_kind(show, plain):
    lines = "node => node.data.filter(t => t.yaxis !== 'y4').map(t => t.line.color)"
    compared = show(made_up("a"), made_up("b")).locator("#phase").evaluate(lines)
    assert compared == [report.RUN_COLOURS[0]] * 3 + [report.RUN_COLOURS[1]] * 3
    alone = plain.locator("#phase").evaluate(lines)
    assert alone[:3] == [KINDS[kind][1] for kind in ("induction", "previous", "sink")]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 12])
def test_nothing_is_wider_than_the_window_also_after_resizing(show, size):
    page = show(made_up(n_layer=size, n_head=size, d_model=8 * size))
    for width in (1280, 900, 1280, 700, 420):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("kinds", [["train"], ["eval"], ["attention"], ["train", "eval"]])
def test_a_page_of_little_is_a_page(show, kinds):
    few = [next(record for record in records() if record["kind"] == kind) for kind in kinds]
    page = show(view("little", config(), few))
    assert page.locator("h1").text_content() == "little"
    assert page.locator("#losses .main-svg").count() > 0 or kinds == ["attention"]
    assert ("was not probed" in page.locator("main").text_content()) == ("attention" not in kinds)
