"""Records of a run. `metrics.jsonl` is the truth: one object a line, flushed as it happens."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, create_model
from tqdm import tqdm

from configs import UserError
from configs.files import LARGE, refuse_large, replace_text, write_all
from configs.screen import foreign, looks
from training import Stopped


def _form(**fields: Any) -> type[BaseModel]:
    return create_model("form", __config__=ConfigDict(strict=True, allow_inf_nan=False), **fields)


NUMBER: Any = float | None
PLAIN: dict[str, Any] = {"kind": str, "step": Annotated[int, Field(ge=0, le=10**12)]}
LOSSES = _form(repeat_loss_1=NUMBER, repeat_loss_2=NUMBER)
FORMS = {  # what records must have to be drawn
    "train": _form(**PLAIN, loss=float),
    "eval": _form(**PLAIN, loss=float, loss_sem=NUMBER, bits_per_byte=float),
    "attention": _form(**PLAIN, scores=dict[str, list[list[NUMBER]]], model=LOSSES),
    "end": _form(**PLAIN, seconds=float),
}
OTHER = _form(**PLAIN)


class JsonLines:
    """Appends records; each has `kind` and `step`, and each pair of these stands once in the file."""

    def __init__(self, path: Path, resume_from: int | None = None):
        if resume_from is not None:  # drop what will be written again, and the end of a run that is not over
            kept = [r for r in read_records(path) if r["step"] <= resume_from and r["kind"] != "end"]
            replace_text(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._path, self._file = path, path.open("ab", buffering=0)

    def write(self, kind: str, step: int, **fields: Any) -> None:
        """One line. A number that is not finite would not be JSON: ValueError; a full disk: `Stopped`."""
        line = json.dumps({"kind": kind, "step": step, **fields}, allow_nan=False).encode() + b"\n"
        try:
            write_all(self._file, line)
        except OSError as error:
            raise Stopped(f"cannot write to {self._path}: {error.strerror}") from error

    def flush(self, durable: bool = False) -> None:
        """Raises `Stopped` where the file has gone; `durable`: also waits until all is on the disk."""
        try:
            there = os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            there = False
        if not there:
            gone = f"{self._path.parent} was moved or removed while it was written to"
            raise Stopped(f"{gone}: a run that was moved goes on with --resume from its new place")
        if durable and self._path.is_file():  # other ranks write to the null device
            os.fsync(self._file.fileno())

    def alarm(self, step: int, alarms: list[dict[str, Any]], say: Callable[[str], None]) -> None:
        """A record of what a probe has found beyond limits, if anything; what is new is said."""
        if alarms:
            self.write("alarm", step, alarms=alarms)
        for alarm in alarms:
            if alarm["since"] == step:
                say(f"step {step:>6}  warning: {alarm['text']}")

    def records(self) -> list[dict[str, Any]]:
        """All that are written."""
        return read_records(Path(self._file.name))

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
    if not path.exists():
        return []
    records: list[dict[str, Any]] = []
    try:
        refuse_large(path, None)
        with path.open("rb") as file:
            for line in iter(partial(file.readline, LARGE), b""):
                if line.endswith(b"\n") or len(line) == LARGE:
                    record = json.loads(line)
                    FORMS.get(record["kind"], OTHER).model_validate(record)
                    records.append(record)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} has a line that is no record: {foreign(reason, 200)}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    return records


@contextmanager
def progress(done: int, steps: int) -> Iterator[tuple[tqdm, Callable[[str], None]]]:
    """A bar over the steps, if any are left (lines where stderr is a file), and what prints beside it."""
    line = "{n_fmt}/{total_fmt} steps, {elapsed} gone, {remaining} to go{postfix}"
    in_file = looks(line)
    with tqdm(total=steps, initial=done, unit="step", disable=done == steps, **in_file) as bar:
        yield bar, partial(print, flush=True) if in_file else bar.write
