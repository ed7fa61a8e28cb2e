"""What is shown on a terminal, and what in its place in a log file."""

import io
import sys
from typing import Any


def show_anything() -> None:
    """A terminal that cannot show a character gets an escape for it instead of ending the run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def looks(line: str) -> dict[str, Any]:
    """Options of a tqdm bar: none at a terminal; where stderr is a file, `line` every ten seconds or more."""
    return {} if sys.stderr.isatty() else {"bar_format": f"{line}\n", "mininterval": 10}
