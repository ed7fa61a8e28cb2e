"""What a run brings along is text on its page, wherever it stands: names, corpus, settings, labels, words."""

import json

import pytest

from scripts import report
from tests.analysis.made_up import evaluated, heads
from tests.runs.tiny import TEXT, start

MARK = "<!--<script>window.evil = 1<\\\u2028\"'&amp;<img src=x onerror=window.evil=1>"
END = f"</script>{MARK}</title></style><svg onload=window.evil=1>"


def run_of(folder, name, corpus):
    folder.mkdir()
    (folder / corpus).write_text(TEXT + END, encoding="utf-8")
    places = {"run": {"dir": folder / name}, "data": {"path": folder / corpus}}
    start(folder, **places, train={"steps": 2}, eval={"every": 0}, probe={"every": 2})
    content = evaluated(heads(labels={(0, 1): [f"syntactic:{END}"], (1, 1): ["induction"]}), steps=(0, 2))
    content["summary"]["rules"][END] = END
    content["heads"][0]["scores"][END] = 0.5
    (folder / name / "heads.json").write_text(json.dumps(content))
    return folder / name


@pytest.fixture
def made(tmp_path):
    return [run_of(tmp_path / "one", MARK, f"a{MARK}"), run_of(tmp_path / "two", "plain", "b.txt")]


@pytest.mark.parametrize("compared", [False, True])
def test_a_run_that_is_markup_throughout_is_shown_as_text(made, compared, open_page, tmp_path):
    words = ["--compare", *map(str, made)] if compared else [str(made[0])]
    out = tmp_path / "page.html"
    report.main(report.PARSER.parse_args([*words, "--text", END[:12], "--out", str(out)]))
    page = open_page(out)
    seen = " ".join(page.locator("body").text_content().split())
    for text in (MARK, f"a{MARK}", f"syntactic:{END}", f"“{END[:12]}”"):
        assert " ".join(text.split()) in seen
    assert page.locator("h1").first.text_content() == MARK
    assert page.title().startswith(MARK[:20])
    ticks = page.locator(".matrix").first.locator(".xaxislayer-above text")
    assert ticks.all_text_contents() == ["BOS", *END[:12]]
    assert page.evaluate("window.evil") is None
    assert page.locator("img, svg[onload]").count() == 0
    assert page.evaluate("document.scripts.length") == out.read_text().count("</script>")
