"""`heads.json` as a table: one head a row, for spreadsheets and for Weights & Biases."""

import csv
import io
from collections.abc import Iterator
from typing import Any

SHOWN = ("scores", "null", "ci", "ablation", "copying", "crossed", "syntax")


def rows_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each head, by columns named as the places in `heads.json`, such as `null.sink.uniform`.

    An interval has two, `.low` and `.high`; a score of its own has its name alone. What was not measured in
    any head has no column, what was not in this one is None.
    """
    rows = []
    for head in document["heads"]:
        row = {"layer": head["layer"], "head": head["head"], "labels": ";".join(head["labels"])}
        rows.append(row | {name: value for key in SHOWN for name, value in _leaves(key, head.get(key))})
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def csv_of(document: dict[str, Any]) -> str:
    """The rows as CSV; what is None is empty."""
    rows, text = rows_of(document), io.StringIO()
    writer = csv.DictWriter(text, [*rows[0]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(f"{place}.{name}".removeprefix("scores."), part)
    elif isinstance(value, list):
        yield from zip((f"{place}.low", f"{place}.high"), value, strict=True)
    elif value is not None:
        yield place, value
