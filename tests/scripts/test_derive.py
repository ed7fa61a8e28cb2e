"""`python -m scripts.derive`: statements by number, what is written, and requests that cannot be served."""

import json
import math
from pathlib import Path

import pytest
from latex2mathml.converter import convert

from analysis.derivation import statements
from analysis.derivation.drawing import panels
from analysis.derivation.finding import Check, Experiment, Finding
from analysis.derivation.statements import STATEMENTS
from configs import UserError
from scripts import derive
from tests.runs.tiny import contents, start
from training.sweep import CONFIGS

VERDICTS = {"holds", "holds in part", "does not hold", "not measured"}


def serve(*words):
    derive.main(derive.PARSER.parse_args([str(word) for word in words]))


def results(folder):
    return json.loads((folder / "results.json").read_text())


def test_fourteen_statements_say_what_they_claim_how_it_is_measured_and_what_would_be_expected():
    assert [statement.number for statement in STATEMENTS] == [*range(1, 15)]
    for statement in STATEMENTS:
        assert statement.claim.endswith(".")
        method, expected = statement.about
        assert method.startswith("Method: ")
        assert expected.startswith("Expected: ")
        assert convert(statement.formula).startswith("<math")


def test_every_config_of_the_trainings_is_that_of_a_statement_and_all_take_sixty_runs():
    named = {name for statement in STATEMENTS for name in statement.trainings}
    assert named == {path.stem for path in CONFIGS.glob("*.yaml")}
    assert len(named) * len(derive.SEEDS) <= 60
    assert len({*derive.SEEDS}) == 3


def test_some_statements_come_with_their_numbers_and_pictures_in_place_of_older_ones(tmp_path, capsys):
    (tmp_path / "statement-09.png").write_text("of another time")
    (tmp_path / "notes.txt").write_text("of somebody")
    serve("--only", "6,4", "--out", tmp_path)
    assert [result["id"] for result in results(tmp_path)] == [4, 6]
    for result in results(tmp_path):
        assert {"id", "statement", "measured", "expected", "verdict"} <= {*result}
        assert {*result["measured"]} == {*result["expected"]}
        assert result["verdict"] in VERDICTS - {"not measured"}
    pictures = {"statement-04.png", "statement-06.png"}
    assert {path.name for path in tmp_path.iterdir()} == pictures | {
        "notes.txt",
        "report.html",
        "results.json",
    }
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["4", "6"]
    assert lines[-1] == f"{tmp_path}: report.html, results.json, 2 figures"


def test_the_same_seed_finds_the_same_numbers(tmp_path):
    for name in ("one", "two"):
        serve("--only", "3,9", "--out", tmp_path / name)
    found = [[result["measured"] for result in results(tmp_path / name)] for name in ("one", "two")]
    assert found[0] == found[1]
    serve("--only", "3,9", "--seed", 2, "--out", tmp_path / "other")
    assert [result["measured"] for result in results(tmp_path / "other")] != found[0]


def test_numbers_that_are_not_finite_are_words_in_the_results(tmp_path, monkeypatch):
    def odd(given):
        """Odd."""
        checks = [Check("a", math.nan, 0, 1, "0 to 1"), Check("b", -math.inf, -math.inf, 0, "-inf", math.inf)]
        return Finding(checks, figures=[panels()[0], panels(2)[0]])

    monkeypatch.setattr(statements, "STATEMENTS", [Experiment(3, "I", "x", odd)])
    serve("--out", tmp_path)
    [result] = results(tmp_path)
    assert result["measured"] == {"a": "nan", "b": "-inf"}
    assert result["error"] == {"a": 0, "b": "inf"}
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["statement-03.png", "statement-03b.png"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only", "15"], "1 to 14"),
        (["--only", "3,x"], "'3,x': give numbers of statements"),
        (["--only", ""], "give numbers"),
        (["--only", "3", "--seed", 10**30], "--seed: give a whole number of 63 bits"),
        (["--corpus", "a.txt"], "--corpus goes with --model"),
        (["--treebank", "a.conllu"], "--treebank goes with --run or --model"),
        (["--run", "nowhere"], "nowhere"),
        (["--model", "nowhere.gguf"], "nowhere.gguf"),
    ],
)
def test_a_wrong_request_is_told_in_a_line_and_nothing_is_written(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, SystemExit)) as caught:
        serve(*words)
    assert told in (str(caught.value) + capsys.readouterr().err)
    assert [*tmp_path.iterdir()] == []


def test_results_go_to_a_folder_and_never_to_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        serve("--only", "4", "--out", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(statements, "STATEMENTS", [])  # with which there would be nothing to tell later
    monkeypatch.setattr("analysis.derivation.page.write", lambda *_: pytest.fail("measured"))
    for more in ([], ["--train"]):
        with pytest.raises(UserError, match=r"cannot write .*x: Not a directory"):
            serve("--out", tmp_path / "file" / "x", *more)


def test_the_report_of_a_run_is_not_replaced(tmp_path):
    run = start(tmp_path)
    before = contents(run)
    with pytest.raises(UserError, match=r"--out .* is a run, whose report.html would be replaced"):
        serve("--only", "4", "--run", run, "--out", run)
    assert contents(run) == before


def test_a_trained_model_is_looked_at_and_its_folder_left_as_it_is(tmp_path, capsys):
    run = start(tmp_path)
    before = contents(run)
    serve("--only", "2,10,11", "--run", run, "--out", tmp_path / "out")
    assert contents(run) == before
    told = capsys.readouterr().out
    assert "heads by depth: the" in told  # too few layers
    assert "streaming on run: needs a text of" in told
    assert "run: overlap" in (tmp_path / "out" / "report.html").read_text()


def test_a_run_may_be_named_as_a_formula_that_is_none(tmp_path):
    run = start(tmp_path).rename(tmp_path / r"cost $\frac$ <b>")
    serve("--only", "10", "--run", run, "--out", tmp_path / "out")
    assert r"cost $\frac$ &lt;b&gt;: " in (tmp_path / "out" / "report.html").read_text()


def test_a_treebank_in_which_no_head_can_be_looked_at_is_told_and_the_rest_is_measured(tmp_path, capsys):
    run = start(tmp_path)
    (tmp_path / "bare.conllu").write_text("1\tHi\thi\tINTJ\t_\t_\t0\troot\t_\t_\n\n")
    treebank = tmp_path / "bare.conllu"
    serve("--only", "4,10", "--run", run, "--treebank", treebank, "--out", tmp_path / "out")
    assert [result["id"] for result in results(tmp_path / "out")] == [4, 10]
    assert "not measured: syntactic heads: treebank bare.conllu: nothing to score" in capsys.readouterr().out


@pytest.mark.slow
def test_all_fourteen_are_measured_or_say_what_would_measure_them(tmp_path):
    serve("--out", tmp_path)
    found = results(tmp_path)
    assert [result["id"] for result in found] == [*range(1, 15)]
    for result in found:
        assert result["verdict"] in VERDICTS
        if result["verdict"] == "not measured":
            assert any("`python -m scripts.derive --" in line for line in result["missing"])
    page = (tmp_path / "report.html").read_text()
    assert page.count("<section ") == 14
    assert page.count("<math ") == 14
    measured = {result["id"] for result in found if result["verdict"] != "not measured"}
    assert measured == {1, 3, 4, 5, 6, 7, 8, 9, 12, 13, 14}
    assert Path(tmp_path / "statement-12.png").exists()
