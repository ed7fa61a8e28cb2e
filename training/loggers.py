"""Records of a run. `metrics.jsonl` is the truth: one object a line, flushed as it happens."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from configs import UserError
from configs.files import replace_text
from configs.screen import looks


class JsonLines:
    """Appends records; each has `kind` and `step`, and each pair of these stands once in the file."""

    def __init__(self, path: Path, resume_from: int | None = None):
        if resume_from is not None:  # drop what will be written again, and the end of a run that is not over
            kept = [r for r in read_records(path) if r["step"] <= resume_from and r["kind"] != "end"]
            replace_text(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, kind: str, step: int, **fields: Any) -> None:
        """One line. A number that is not finite would not be JSON: ValueError."""
        self._file.write(json.dumps({"kind": kind, "step": step, **fields}, allow_nan=False) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """All that are written."""
        return read_records(Path(self._file.name))

    def flush(self) -> None:
        """Nothing is left to do: each line is in the file."""

    def heads(self, rows: list[dict[str, Any]]) -> None:
        """Nothing: heads.json has them."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records; a last line that a kill has torn is left out, another that is no record: `UserError`."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    try:
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record for record in records if record["kind"] and record["step"] >= 0]
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} has a line that is no record: {error}") from None


@contextmanager
def progress(done: int, steps: int) -> Iterator[tuple[tqdm, Callable[[str], None]]]:
    """A bar over the steps, if any are left (lines where stderr is a file), and what prints beside it."""
    line = "{n_fmt}/{total_fmt} steps, {elapsed} gone, {remaining} to go{postfix}"
    in_file = looks(line)
    with tqdm(total=steps, initial=done, unit="step", disable=done == steps, **in_file) as bar:
        yield bar, partial(print, flush=True) if in_file else bar.write
