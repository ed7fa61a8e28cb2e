"""`report.html` and `results.json` of the derivation: claim, formula, numbers, picture, verdict."""

import base64
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from latex2mathml.converter import convert
from markupsafe import Markup, escape

from analysis.derivation.finding import Check, Experiment, Finding
from configs.files import replace_bytes, replace_text


@dataclass(frozen=True)
class Section:
    """A statement, what was found, and the names of its pictures beside the page."""

    statement: Experiment
    finding: Finding

    @cached_property
    def pictures(self) -> dict[str, bytes]:
        """PNG by file name: `statement-03.png`, then `statement-03b.png`."""
        found = {}
        for letter, figure in zip(("", *"bcdefgh"), self.finding.figures, strict=False):
            drawn = BytesIO()
            figure.savefig(drawn, format="png")
            found[f"statement-{self.statement.number:02}{letter}.png"] = drawn.getvalue()
        return found

    @property
    def result(self) -> dict[str, Any]:
        """As `results.json` has it; a number that JSON cannot hold is a word."""
        checks = self.finding.checks
        return {
            "id": self.statement.number,
            "statement": self.statement.claim,
            "measured": {check.what: _json(check.measured) for check in checks},
            "error": {check.what: _json(check.error) for check in checks},
            "expected": {check.what: check.expected for check in checks},
            "holds": {check.what: check.holds for check in checks},
            "verdict": self.finding.verdict,
            "missing": list(self.finding.missing),
        }


def write(folder: Path, sections: Sequence[Section]) -> list[str]:
    """The page, the results and the pictures, in place of those of another time; their names."""
    pictures = {name: png for section in sections for name, png in section.pictures.items()}
    for old in folder.glob("statement-*.png"):
        if old.name not in pictures:
            old.unlink()
    for name, png in pictures.items():
        replace_bytes(folder / name, png)
    results = [section.result for section in sections]
    replace_text(folder / "results.json", json.dumps(results, indent=1, allow_nan=False))
    replace_text(folder / "report.html", page(sections))
    return ["report.html", "results.json", *pictures]


def page(sections: Sequence[Section]) -> str:
    """The HTML, in one file that needs no network. All but the formulas is text to it, never markup."""
    here = jinja2.FileSystemLoader(Path(__file__).parent)
    pages = jinja2.Environment(loader=here, autoescape=True, trim_blocks=True)
    pages.filters |= {"measured": measured, "mathml": partial(convert, display="block")}
    pages.filters |= {"code": code, "base64": _base64}
    parts = groupby(sections, key=lambda section: section.statement.part)
    return pages.get_template("page.html.j2").render(
        sections=sections, parts=[(part, list(those)) for part, those in parts]
    )


def code(text: str) -> Markup:
    """A sentence with what stands between backticks set as code."""
    return Markup(re.sub("`(.*?)`", r"<code>\1</code>", str(escape(text))))


def number(value: float) -> str:
    """Four digits of it, and thousands apart: 11.31, 0.0004213, 134,217,728."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def measured(check: Check) -> str:
    """The number and its error, to the error's second digit."""
    if not math.isfinite(check.measured) or not math.isfinite(check.error):
        return number(check.measured)
    if check.error < 1e-9 * max(1, abs(check.measured)):  # of rounding at most
        return number(round(check.measured, 9))
    places = max(0, 1 - math.floor(math.log10(check.error)))
    if places > 6:
        return f"{check.measured:.3g} ± {check.error:.1g}"
    return f"{check.measured:,.{places}f} ± {check.error:,.{places}f}"


def _base64(png: bytes) -> str:
    return base64.b64encode(png).decode()


def _json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
