"""`python -m scripts.report` on folders as training leaves them, finished or not, moved or damaged."""

import json
import re
import shutil

import pytest

import scripts
from configs import UserError
from scripts import report
from tests.analysis.made_up import heads
from tests.runs.tiny import start


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return start(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def run(finished, tmp_path):
    """A copy that a test may change, without what training made of it at its end."""
    ends = shutil.ignore_patterns("heads.json", "report.html")
    return shutil.copytree(finished, tmp_path / "run", ignore=ends)


def serve(*words):
    report.main(report.PARSER.parse_args([str(word) for word in words]))


def data(page):
    return json.loads(re.search(r'type="application/json">(.*?)</script>', page.read_text()).group(1))["runs"]


def test_the_page_of_a_run_lies_in_its_folder(run, capsys):
    serve(run)
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    (shown,) = data(run / "report.html")
    assert (shown["name"], shown["probe"]["step"]) == ("run", [0, 5, 10, 15, 20])
    assert len(shown["attention"][0]["weights"]) == 4


def test_out_and_png_say_where(run, tmp_path, capsys):
    serve(run, "--out", tmp_path / "a.html", "--png", tmp_path / "a.png")
    assert capsys.readouterr().out == f"{tmp_path / 'a.html'}\n{tmp_path / 'a.png'}\n"
    assert not (run / "report.html").exists()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_heads_json_gives_labels_and_a_phrase(run):
    (run / "heads.json").write_text(json.dumps(heads(labels={(0, 1): ["sink"]})))
    serve(run)
    (shown,) = data(run / "report.html")
    assert shown["best"] == {"sink": "0.1"}
    assert shown["heads"]["0.1"]["scores"]["sink"][0] == 0.33
    assert len(data(run / "report.html")[0]["attention"]) == 2


def test_texts_of_ones_own_are_shown_cut_to_the_context(run):
    serve(run, "--text", "3 is 0.\n", "--text", "1" * 40)
    first, second, _ = data(run / "report.html")[0]["attention"]
    assert first["tokens"] == ["BOS", "3", "␣", "i", "s", "␣", "0", ".", "⏎"]
    assert (first["of"], len(second["tokens"]), second["of"]) == (9, 17, 41)


def test_without_a_checkpoint_there_is_a_page_without_attention(run, capsys):
    shutil.rmtree(run / "checkpoints")
    serve(run)
    assert "no checkpoint" in capsys.readouterr().err
    assert data(run / "report.html")[0]["attention"] == []


@pytest.mark.parametrize("lines", [1, 2, 12])
def test_a_run_that_was_killed_early_has_a_page(run, lines):
    kept = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:lines]
    (run / "metrics.jsonl").write_text("".join([*kept, '{"kind": "att']))
    serve(run)
    assert "of 20 steps so far" in (run / "report.html").read_text()


@pytest.mark.parametrize("off", ["probe", "eval", "checkpoint"])
def test_what_was_switched_off_is_left_out(tmp_path, off):
    folder = start(tmp_path, **{off: {"every": 0}}, train={"steps": 2})
    serve(folder)
    (shown,) = data(folder / "report.html")
    assert bool(shown["maps"]["step"]) == (off != "probe")
    assert bool(shown["eval"]["step"]) == (off != "eval")


def test_runs_are_compared_on_one_page_beside_the_first(run, finished, tmp_path, capsys):
    serve("--compare", run, finished)
    assert capsys.readouterr().out == f"{tmp_path / 'compare-run-run.html'}\n"
    first, second = data(tmp_path / "compare-run-run.html")
    assert (first["name"], second["name"]) == (str(run), str(finished))  # both folders are named `run`
    assert first["maps"] == second["maps"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "one run folder, or --compare and two"),
        (["RUN", "--compare", "RUN", "RUN"], "one run folder, or --compare and two"),
        (["--compare", "RUN"], "one run folder, or --compare and two"),
        (["--compare", "RUN", "RUN", "--png", "x.png"], "--png draws one run"),
        (["NOWHERE"], "no run folder"),
        (["RUN", "--text", "Ω"], "'Ω'"),
        (["RUN", "--text", ""], "the text is empty"),
        (["RUN", "--out", "NOWHERE/page.html"], "cannot write .*page.html"),
    ],
)
def test_wrong_requests_are_one_line_and_write_nothing(run, tmp_path, words, said):
    places = {"RUN": str(run), "NOWHERE": str(tmp_path / "nowhere")}
    words = [places.get(word, word.replace("NOWHERE", places["NOWHERE"])) for word in words]
    with pytest.raises(UserError, match=said) as caught:
        serve(*words)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.html"))


def test_a_run_without_records_has_nothing_to_show(run):
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="no records yet"):
        serve(run)


@pytest.mark.parametrize("content", ["", "{", "\udcff"])
def test_heads_json_that_cannot_be_read_is_named(run, content):
    (run / "heads.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"heads\.json cannot be read") as caught:
        serve(run)
    assert "\n" not in str(caught.value)


def test_a_run_without_probes_has_no_picture_and_nothing_is_written(tmp_path):
    run = start(tmp_path, probe={"every": 0}, train={"steps": 1}, optimizer={"warmup_steps": 0})
    with pytest.raises(UserError, match="not probed"):
        serve(run, "--png", tmp_path / "a.png", "--out", tmp_path / "a.html")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("a.")]


def test_a_picture_is_svg_by_its_suffix_and_else_png(run, tmp_path):
    for name, begins in (("picture.of.it", b"\x89PNG"), ("a.SVG", b"<?xml")):
        serve(run, "--png", tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(begins)


@pytest.mark.parametrize("text", ["-1 is 1", "--", "--out", "1+1=2", ""])
@pytest.mark.parametrize("joined", [True, False])
def test_a_text_may_begin_like_an_option(text, joined):
    words, seen = [f"--text={text}"] if joined else ["--text", text], []
    scripts.serve(report.PARSER, seen.append, ["RUN", *words, "--out", "a.html"], verbatim="--text")
    assert (seen[0].text, str(seen[0].run), str(seen[0].out)) == ([text], "RUN", "a.html")


def test_texts_come_in_the_order_they_were_given_and_each_whole():
    seen, words = [], ["--text", "--text", "--text=b", "RUN", "--text", "-c"]
    scripts.serve(report.PARSER, seen.append, words, verbatim="--text")
    assert seen[0].text == ["--text", "b", "-c"]
    scripts.serve(report.PARSER, seen.append, ["RUN"], verbatim="--text")
    assert seen[1].text == []


def test_a_text_that_was_forgotten_is_asked_for(capsys):
    with pytest.raises(SystemExit, match="2"):
        scripts.serve(report.PARSER, print, ["RUN", "--text"], verbatim="--text")
    assert "--text" in capsys.readouterr().err
