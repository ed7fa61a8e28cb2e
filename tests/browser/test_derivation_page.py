"""The page of the derivation: one file, every picture and formula there, all words text."""

from analysis.derivation.drawing import panels
from analysis.derivation.finding import Check, Experiment, Finding, Table
from analysis.derivation.page import Section, page

MARK = "</td></table><script>window.evil = 1</script><img src=x onerror=window.evil=1>"


def measured(given):
    """Water is `wet`.

    Method: it is touched.
    """


def unmeasured(given):
    """Fire is hot."""


def test_the_page_shows_all_sections_with_pictures_and_formulas_and_asks_for_nothing(open_page, tmp_path):
    checks = [
        Check(MARK, 1.5, 1, 2, MARK, 0.1),
        Check("fails", 3, 1, 2, "1 to 2"),
        Check("in between", 2, 1, 2, "1 to 2", 0.5, premise=True),
    ]
    finding = Finding(checks, [MARK], [panels()[0], panels(2)[0]], [Table(MARK, ["a", MARK], [["1", MARK]])])
    missing = Finding(missing=[f"{MARK}: `command --{MARK}`"])
    sections = [
        Section(Experiment(3, "II", r"\frac{a}{b} = \sum_{i=1}^{d} x_i", measured), finding),
        Section(Experiment(11, "IV", r"\sum_j A_{ij} = 1", unmeasured), missing),
    ]
    (tmp_path / "page.html").write_text(page(sections), encoding="utf-8")
    shown = open_page(tmp_path / "page.html")
    assert shown.locator("section").count() == 2
    assert shown.locator("h2").all_text_contents() == ["II", "IV"]
    assert shown.locator("section .verdict").all_text_contents() == ["Does not hold.", "Not measured."]
    assert shown.locator("section").first.locator("tr td:last-child").all_text_contents() == [
        "✓",
        "✗",
        "undecided",
        MARK,
    ]
    assert shown.locator("h3 code").all_text_contents() == ["wet"]
    widths = shown.locator("img").evaluate_all(
        "images => images.map(image => [image.naturalWidth, image.width])"
    )
    assert widths == [[400, 400], [800, 800]]
    boxes = [formula.bounding_box() for formula in shown.locator("math").all()]
    assert all(box["width"] > 20 and box["height"] > 10 for box in boxes)
    assert shown.evaluate("window.evil") is None
    assert "command --</td>" in shown.locator(".missing code").text_content()
    wide = shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert wide
    shown.set_viewport_size({"width": 400, "height": 800})
    assert shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
