"""Grid, panel and tables in Chromium: each head can be pointed at, chosen, linked, gone back to, sorted."""

import pytest
from playwright.sync_api import expect

from analysis.patterns import attention as attention_of
from analysis.view import KINDS, SYNTACTIC, view
from data.tokenizers import CharTokenizer
from model.transformer import GPT
from tests.analysis.made_up import config, evaluated, heads, published, records, score
from tests.model.models import build_random

TOKENIZER = CharTokenizer("abcdefghij ", bos=True)
LABELS = {(0, 1): ["sink", "induction"], (1, 0): ["induction"], (1, 1): ["syntactic:obj"]}


def run(document=None, name="run", texts=(), recorded=None, **model):
    c = config(model={"n_layer": 2, "n_head": 2, "d_model": 8, **model})
    recorded = records(c.model.n_layer, c.model.n_head) if recorded is None else recorded
    return view(name, c, recorded, document, GPT(c.model, 12), TOKENIZER, texts)


def cell(page, head):
    return page.locator(f".grid a[data-head='{head}']")


def choose(page, head, place=".grid"):
    """Click a head, and wait: the page shows it after the click has ended."""
    page.locator(f"{place} a[data-head='{head}']").click()
    expect(page.locator(".look h3").last).to_have_text(f"Head {head}")


def expect_chosen(page, head):
    """The panel shows the head, the grid marks it, the matrix and the scores are of it."""
    expect(page.locator(".look h3")).to_have_text(f"Head {head}")
    assert {head} == {
        page.locator(".grid a[aria-current='true']").get_attribute("data-head"),
        page.locator(".look figcaption").text_content().split()[1],
        page.locator(".scores h4").text_content().split()[-1],
    }


def rgb(colour):
    return f"rgb({', '.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))})"


def background(page, head):
    return cell(page, head).evaluate("node => getComputedStyle(node).backgroundImage")


def test_a_head_is_coloured_by_all_its_labels_or_pale(show):
    page = show(run(heads(labels=LABELS)))
    assert background(page, "0.0") == "none"
    assert rgb(KINDS["induction"][1]) in background(page, "1.0")
    assert rgb(SYNTACTIC) in background(page, "1.1")
    scale = "node => node.data[0].colorscale.at(-1)[1]"
    assert page.locator(".matrix").evaluate(scale) == rgb(KINDS["induction"][1]).replace(" ", "")
    choose(page, "0.0")
    assert page.locator(".matrix").evaluate(scale) == "rgb(43,58,103)"
    two = background(page, "0.1")
    assert two.index(rgb(KINDS["sink"][1])) < two.index(rgb(KINDS["induction"][1]))
    legend = page.locator(".legend li").all_inner_texts()
    assert [" ".join(line.split()) for line in legend] == [
        "induction (2) 1.0 0.1",
        "sink (1) 0.1",
        "syntactic:obj (1) 1.1",
        "untyped (1 of 4)",
    ]


def test_before_there_are_labels_the_best_of_each_kind_have_its_colour(show):
    page = show(run())
    assert background(page, "0.0") == "none"
    assert rgb(KINDS["sink"][1]) in background(page, "1.1")
    assert page.locator(".legend .label").first.inner_text() == "best sink"
    assert "untyped" not in page.locator(".heads").inner_text()
    assert "Not measured" not in page.locator(".heads").inner_text()


def test_pointing_at_a_head_tells_its_scores_intervals_and_nulls(show):
    page = show(run(heads(labels=LABELS)))
    expect(page.locator("#tip")).to_be_hidden()
    cell(page, "0.1").hover()
    said = " ".join(page.locator("#tip").inner_text().split())
    assert said.startswith("head 0.1 sink, induction")
    assert "sink 0.33 (0.32 to 0.34) null 0.01, 0.04" in said
    page.locator("h1").hover()
    expect(page.locator("#tip")).to_be_hidden()
    cell(page, "0.0").focus()
    expect(page.locator("#tip")).to_contain_text("head 0.0 untyped")


def test_a_click_on_the_grid_a_row_a_map_or_the_legend_opens_the_head(show):
    page = show(run(heads(labels=LABELS)))
    expect_chosen(page, "1.0")  # the best induction head
    choose(page, "0.0")
    expect_chosen(page, "0.0")
    page.locator(".tables tbody tr[data-head='1.1'] td").nth(1).click()
    expect_chosen(page, "1.1")
    expect(page.locator(".look")).to_be_in_viewport()
    plot = page.locator("[data-name='sink']")
    plot.scroll_into_view_if_needed()
    box = plot.locator(".nsewdrag").first.bounding_box()
    page.mouse.click(box["x"] + 0.75 * box["width"], box["y"] + 0.25 * box["height"])
    expect_chosen(page, "0.1")
    expect(page.locator(".look h3")).to_be_in_viewport()
    assert page.url.endswith("#head-0.1")
    choose(page, "1.1", ".legend")
    expect_chosen(page, "1.1")


def test_a_head_can_be_linked_and_the_browser_goes_back_and_forth(show):
    page = show(run(heads(labels=LABELS)))
    address = page.url
    choose(page, "0.0")
    choose(page, "1.1")
    expect(page).to_have_url(f"{address}#head-1.1")
    page.go_back()
    expect_chosen(page, "0.0")
    page.go_back()
    expect_chosen(page, "1.0")
    expect(page).to_have_url(address)
    page.go_forward()
    expect_chosen(page, "0.0")
    page.goto("about:blank")
    page.goto(f"{address}#head-0.1")
    expect_chosen(page, "0.1")
    expect(page.locator(".look h3")).to_be_in_viewport()
    for nonsense in ("#head-7.7", "#head-x", "#constructor", "#run-9-head-0.0"):
        page.goto("about:blank")
        page.goto(address + nonsense)
        expect_chosen(page, "1.0")


def test_heads_of_several_runs_have_places_of_their_own(show):
    page = show(run(heads(labels=LABELS), "a"), run(heads(labels=LABELS), "b"))
    choose(page, "0.0", "[data-run='1'] .grid")
    assert page.url.endswith("#run-2-head-0.0")
    assert page.locator(".look h3").all_text_contents() == ["Head 1.0", "Head 0.0"]


def gauges(page, block):
    """Of each row what it says, and where dot, interval and nulls stand, as shares of the scale."""
    found = (
        page.locator(block)
        .locator(".gauge")
        .evaluate_all("""rows => rows.map((row) => {
        const places = ["dot", "ci", "bar", "diamond"].map((kind) => {
            const [mark] = row.querySelectorAll("." + kind);
            return mark ? parseFloat(mark.style.left) / 100 : null;
        });
        return [row.firstChild.textContent, row.lastChild.textContent, ...places];
    })""")
    )
    return {name: (said, *places) for name, said, *places in found}


def test_each_score_stands_on_its_scale_with_its_interval_against_both_nulls(show):
    page = show(run(heads(labels=LABELS)))
    found = gauges(page, ".scores")
    assert found["sink"][0] == "0.33 (0.32 to 0.34)"
    assert found["sink"][1:] == pytest.approx((0.33, 0.32, 0.0125, 0.0375), abs=1e-4)
    assert set(found) == {"induction", "previous", "sink", "duplicate", "current", "entropy"}


def test_the_panel_tells_what_an_evaluation_adds(show):
    page = show(run(evaluated(heads(labels=LABELS))))
    assert page.locator(".look .labels").inner_text().split() == ["induction", "since", "step", "200"]
    found = gauges(page, ".effects")
    assert found["text, mean"][0] == "0.030 (0.025 to 0.035)"
    assert found["repeat, zero"][0] == "0.400 (0.395 to 0.405)"
    low, high = 0, 0.045  # the scale goes from no change to the highest bound of all heads
    assert found["text, zero"][1:4] == pytest.approx((0.04 / high, 0.035 / high, low), abs=1e-3)
    assert found["nsubj"][1:] == pytest.approx((0.25, None, 0.5, 0.2))
    assert found["OV circuit"][4] == pytest.approx(0.505)
    choose(page, "0.0")
    assert "Not measured" in page.locator(".effects").inner_text()
    assert "text, mean" not in gauges(page, ".effects")


def test_marks_show_where_heads_crossed_and_where_the_loss_fell(show):
    page = show(run(evaluated(heads(labels=LABELS))))
    marks = page.locator("#phase").evaluate("""node => node.data.filter((t) => t.mode === "markers")
        .map((t) => [t.name, t.x, t.y, t.text])""")
    by = {name: (x, y, text) for name, x, y, text in marks}
    x, y, text = by["induction"]
    assert x == [200, 200]
    assert y == pytest.approx([score("induction", 200, *at) for at in ((0, 1), (1, 0))], rel=5e-4)
    assert text == ["labelled from here: 0.1, 1.0", ""]
    assert set(by) == {"induction", "sink"}
    fell = page.locator("#phase").evaluate("node => node.layout.shapes.map((shape) => shape.x0)")
    assert fell == [200]
    assert "The dashed line" in page.locator("main").inner_text()


def column(page, n, table=0):
    return page.locator(".tables table").nth(table).locator(f"tbody tr > :nth-child({n})").all_inner_texts()


def test_tables_sort_by_any_column_by_mouse_and_by_keyboard(show):
    document = evaluated(heads(labels=LABELS))
    for head, value in zip(document["heads"], (0.3, 0.09, 0.1, 0.2), strict=True):
        head["scores"]["sink"] = value
        if head["ablation"]:
            head["ablation"]["mean"]["natural"]["change"] = value - 0.15
    page = show(run(document))
    sink = page.locator(".tables th", has_text="sink").first
    assert sink.get_attribute("aria-sort") is None
    sink.locator("button").click()
    assert column(page, 1) == ["0.0", "1.1", "1.0", "0.1"]
    assert sink.get_attribute("aria-sort") == "descending"
    page.keyboard.press("Enter")
    assert column(page, 1) == ["0.1", "1.0", "1.1", "0.0"]
    assert sink.get_attribute("aria-sort") == "ascending"
    head = page.locator(".tables th", has_text="head").first
    head.locator("button").focus()
    page.keyboard.press("Space")
    assert column(page, 1) == ["0.0", "0.1", "1.0", "1.1"]
    assert (head.get_attribute("aria-sort"), sink.get_attribute("aria-sort")) == ("ascending", None)
    removal = page.locator(".tables th", has_text="removal, text").locator("button")
    for order in (["1.1", "1.0", "0.1"], ["0.1", "1.0", "1.1"]):
        removal.click()
        assert column(page, 1) == [*order, "0.0"]  # which was not measured, and comes last either way
    assert column(page, 8)[-1] == "not measured"


def test_syntax_groups_and_circuits_have_their_tables(show):
    page = show(run(evaluated(heads(labels=LABELS))))
    assert column(page, 1, 1) == ["nsubj", "obj"]
    row = page.locator(".tables table").nth(1).locator("tbody tr").first.inner_text().split("\t")
    assert row == ["nsubj", "240", "0.1", "0.70 (0.60 to 0.80)", "0.50 (at -1)", "0.20", "0.20"]
    groups = page.locator(".tables table").nth(2).locator("tbody tr").all_inner_texts()
    assert [" ".join(group.split())[:32] for group in groups[:2]] == [
        "sink 0.1 0.200 (0.195 to 0.205) ",
        "control 0.0 or 0.0 or 0.0, untyp",
    ]
    assert page.locator(".tables table").nth(3).locator("tbody").inner_text().split() == [
        *("0.1", "1.0", "0.63", "0.25", "0.13")
    ]
    page.locator(".tables table").nth(3).locator("a", has_text="1.0").click()
    expect_chosen(page, "1.0")


def test_a_head_that_looks_two_back_is_labelled_as_that(show):
    known = heads(labels={(0, 0): ["previous-token"], (1, 1): ["previous-token"]})
    for head in known["heads"]:
        one, two = (0.2, 0.6) if head["layer"] else (0.6, 0.2)
        head["scores"] |= {"previous": one, "previous2": two}
    page = show(run(known))
    assert page.locator("td .label").all_inner_texts().count("previous-token, two back") == 1
    choose(page, "1.1")
    assert page.locator(".look .labels").inner_text() == "previous-token, two back"


def test_a_published_model_has_heads_and_no_steps(show):
    page = show(run(published(evaluated(heads(labels=LABELS))), "a-model", recorded=[]))
    assert "A published model of 2 layers x 2 heads" in page.locator("header").inner_text()
    assert page.locator("#losses, #phase").count() == 0
    expect(page.locator("#step")).to_be_hidden()
    assert page.locator("[data-name='sink']").evaluate("node => node.data[0].z") == [[0.33] * 2] * 2
    assert "step" not in page.locator(".heads h2").inner_text()
    expect_chosen(page, "1.0")


def test_the_matrix_shows_the_weights_of_the_head_that_was_chosen(show):
    model = build_random(vocab_size=TOKENIZER.vocab_size, n_layer=3)
    c = config(model={"n_layer": 3, "n_head": 4, "d_model": 24})
    page = show(view("run", c, records(3, 4), heads(3, 4), model, TOKENIZER, ["abcadcba"]))
    A_LHTT = attention_of(model, [TOKENIZER.bos, *TOKENIZER.encode("abcadcba").tolist()])
    for layer, head in ((0, 0), (2, 1), (1, 3)):
        choose(page, f"{layer}.{head}")
        expect_chosen(page, f"{layer}.{head}")
        rows = page.locator(".matrix").evaluate("node => node.data[0].z")
        for t, row in enumerate(rows):
            assert row[: t + 1] == pytest.approx(A_LHTT[layer, head, t, : t + 1].tolist(), abs=0.004)
            assert row[t + 1 :] == [None] * (8 - t)


def test_a_text_that_was_cut_says_so(show):
    page = show(run(heads(labels=LABELS), texts=["abc", "abc " * 20], context_length=32))
    page.locator(".texts button").nth(1).click()
    cut = "“abc abc abc abc abc abc abc ab…”, the first 32 of 81 tokens"
    assert page.locator(".look figcaption").text_content() == f"head 1.0 on {cut}"
    assert page.locator(".texts button[aria-pressed='true']").text_content() == cut.split(",")[0]


def test_a_head_whose_attention_has_no_room_says_so(show):
    shown = run(heads(labels=LABELS))
    for text in shown["attention"]:
        text["weights"] = {"1.0": text["weights"]["1.0"]}
    page = show(shown)
    choose(page, "0.0")
    assert "the attention of 1 of 4 heads" in page.locator(".look figcaption").text_content()
    expect(page.locator(".matrix")).to_be_hidden()
    choose(page, "1.0")
    expect(page.locator(".matrix")).to_be_visible()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(30, 9), (32, 32)])
def test_large_models_are_as_wide_as_the_window(show, shape):
    L, H = shape
    labels = {(i, j): ["sink"] for i in range(10, L) for j in range(H)}
    document = published(evaluated(heads(L, H, labels)))
    page = show(run(document, recorded=[], n_layer=L, n_head=H, d_model=2 * H))
    assert page.locator(".grid a").count() == L * H
    for width in (1280, 900, 420):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
