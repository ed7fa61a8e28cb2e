"""What is shown on a terminal, and what in its place in a log file."""

import io
import json
import re
import sys
from typing import Any


def show_anything() -> None:
    """A terminal that cannot show a character gets an escape for it instead of ending the run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def shown(value: Any) -> str:
    """A value as it would be asked for."""
    return value if isinstance(value, str) else json.dumps(value)


def foreign(value: Any, most: int = 60) -> str:
    """A value from a file that nobody vouches for, within a line: cut, escapes for what cannot be printed."""
    text = shown(value)
    text = text if len(text) <= most else f"{text[: most - 4]} ..."
    return printable(text)


def printable(text: str) -> str:
    """With escapes for what cannot be printed, ends of lines among it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def out_of_memory(error: BaseException) -> str | None:
    """What an allocator says that had not enough, on the CPU or a device; None of another error."""
    told = str(error).split("\n")[0].rstrip(".")
    short = isinstance(error, MemoryError) or re.search("out of memory|can't allocate memory", told)
    return f"out of memory: {told}" if short else None


def looks(line: str) -> dict[str, Any]:
    """Options of a tqdm bar: none at a terminal; where stderr is a file, `line` every ten seconds or more."""
    return {} if sys.stderr.isatty() else {"bar_format": f"{line}\n", "mininterval": 10}
