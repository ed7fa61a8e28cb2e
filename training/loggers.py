"""Records of a run. `metrics.jsonl` is the truth: one object a line, flushed as it happens."""

import json
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends records; each has `kind` and `step`, and each pair of these stands once in the file."""

    def __init__(self, path: Path, resume_from: int | None = None):
        if resume_from is not None:
            _keep_until(path, resume_from)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, kind: str, step: int, **fields: Any) -> None:
        """One line. Numbers that are not finite would not be JSON and raise ValueError."""
        self._file.write(json.dumps({"kind": kind, "step": step, **fields}, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records; a last line that a kill has torn is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            records.append(json.loads(line))
    return records


def _keep_until(path: Path, step: int) -> None:
    """Drop what a resumed run will write again: records beyond `step`, and the end of a run that is not over."""
    kept = [record for record in read_records(path) if record["step"] <= step and record["kind"] != "end"]
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    temporary.replace(path)
