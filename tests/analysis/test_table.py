"""heads.csv, read back: each number of heads.json under its name, and nothing where there is none."""

import csv
import io

import pytest

from analysis.table import csv_of
from tests.analysis.made_up import SCORES, evaluated, heads, published

LABELS = {(1, 0): ["induction", "sink"], (0, 1): ["syntactic:obj"]}


def read(document):
    return list(csv.DictReader(io.StringIO(csv_of(document))))


def test_each_number_stands_under_its_name():
    document = evaluated(heads(2, 3, LABELS))
    rows = read(document)
    assert len(rows) == 6
    for head, row in zip(document["heads"], rows, strict=True):
        assert (int(row["layer"]), int(row["head"])) == (head["layer"], head["head"])
        assert [label for label in row["labels"].split(";") if label] == head["labels"]
        for name in SCORES:
            low, high = head["ci"][name]
            null = head["null"][name]
            expected = [head["scores"][name], low, high, null["uniform"], null["random_init"]]
            ends = ("", "_low", "_high", "_uniform", "_random_init")
            assert [float(row[name + end]) for end in ends] == expected
        for how in ("mean", "zero"):
            for probe in ("natural", "repeat"):
                found = [row[f"ablation_{how}_{probe}{end}"] for end in ("", "_low", "_high")]
                effect = head["ablation"] and head["ablation"][how][probe]
                assert found == ([str(x) for x in (effect["change"], *effect["ci"])] if effect else [""] * 3)
        assert float(row["copying"]) == head["copying"]["score"]
        assert float(row["copying_random_init"]) == head["copying"]["random_init"]
        assert float(row["syntax_nsubj"]) == head["syntax"]["nsubj"]
        for label in ("induction", "sink", "current-token"):
            assert row[f"crossed_{label}"] == ("200" if label in head["labels"] else "")


def test_columns_are_the_same_whatever_was_asked_for_but_for_relations():
    bare, full, other = heads(), evaluated(heads()), published(evaluated(heads()))
    columns = [list(read(document)[0]) for document in (bare, full, other)]
    assert columns[1] == columns[2] == [*columns[0], "syntax_nsubj", "syntax_obj"]


@pytest.mark.parametrize("part", ["scores", "ci"])
def test_what_is_not_a_number_is_empty(part):
    document = heads()
    document["heads"][1][part]["sink"] = None
    row = read(document)[1]
    assert row["sink" if part == "scores" else "sink_low"] == ""
    assert row["sink_random_init"] == "0.0375"


def test_a_label_with_commas_and_quotes_stays_one_field():
    evil = 'a,"b"\nc'
    assert read(heads(labels={(0, 0): [evil]}))[0]["labels"] == evil
