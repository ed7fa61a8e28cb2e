"""heads.csv, read back: each number of heads.json under its name, and nothing where there is none."""

import csv
import io

import pytest

from analysis.table import csv_of
from tests.analysis.made_up import evaluated, heads

LABELS = {(1, 0): ["induction", "sink"], (0, 1): ["syntactic:obj"]}


def read(document):
    return list(csv.DictReader(io.StringIO(csv_of(document))))


def test_a_row_is_what_heads_json_says_of_a_head():
    """Written out by hand for one head; the numbers are those of `made_up`."""
    row = read(evaluated(heads(2, 3, LABELS)))[3]
    assert row["labels"] == "induction;sink"
    expected = {"layer": 1, "head": 0}
    expected |= {"sink": 0.33001, "ci.sink.low": 0.32001, "ci.sink.high": 0.34001}
    expected |= {"null.sink.uniform": 0.0125, "null.sink.random_init": 0.0375}
    expected |= {"ablation.mean.natural.change": 0.03, "ablation.zero.repeat.change": 0.4}
    expected |= {"ablation.mean.natural.ci.low": 0.025, "crossed.sink": 200}
    assert {name: float(row[name]) for name in expected} == pytest.approx(expected, abs=1e-6)


def test_each_number_of_the_document_is_in_the_table_once():
    document = evaluated(heads(2, 3, LABELS))

    def numbers(value):
        if isinstance(value, dict):
            return [n for part in value.values() for n in numbers(part)]
        if isinstance(value, list):
            return [n for part in value for n in numbers(part)]
        return [value] if isinstance(value, int | float) else []

    for head, row in zip(document["heads"], read(document), strict=True):
        found = [float(text) for name, text in row.items() if name != "labels" and text]
        assert sorted(found) == sorted(map(float, numbers(head)))


def test_what_was_measured_in_no_head_has_no_column_and_what_is_missing_in_one_is_empty():
    assert not [name for name in read(heads())[0] if name.startswith(("ablation", "syntax", "crossed"))]
    document = evaluated(heads(2, 3, LABELS))
    document["heads"][1]["scores"]["sink"] = None
    rows = read(document)
    assert (rows[1]["sink"], rows[1]["null.sink.random_init"]) == ("", "0.0375")
    assert [bool(row["ablation.mean.repeat.change"]) for row in rows] == [
        bool(h["labels"]) for h in document["heads"]
    ]
    assert all(list(row) == list(rows[0]) for row in rows)


def test_a_label_with_commas_and_quotes_stays_one_field():
    evil = 'a,"b"\nc'
    assert read(heads(labels={(0, 0): [evil]}))[0]["labels"] == evil
