"""`python -m scripts.report RUN`: the page of a run, finished or not; of several with --compare."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from configs import UserError
from configs.cli import Parser, load_config
from scripts import serve, warn

PARSER = Parser(prog="python -m scripts.report", description=__doc__)
PARSER.add_argument("run", nargs="?", type=Path, metavar="RUN", help="run folder")
PARSER.add_argument("--compare", nargs="+", type=Path, metavar="RUN", help="two or more runs on one page")
PARSER.add_argument("--text", help="show the attention on this text")
PARSER.add_argument(
    "--out", type=Path, metavar="HTML", help="RUN/report.html, or compare.html beside the first"
)
PARSER.add_argument("--png", type=Path, help="also draw the phase change and the heads of one run")


def main(given: Namespace) -> None:
    """Write what was asked for and print where it is."""
    folders = given.compare or [given.run]
    if bool(given.run) == bool(given.compare) or (given.compare and len(folders) == 1):
        raise UserError("give one run folder, or --compare and two or more")
    if given.png and given.compare:
        raise UserError("--png draws one run: leave --compare out")
    from analysis import report

    names = [folder.resolve().name for folder in folders]
    names = names if len({*names}) == len(names) else [str(folder) for folder in folders]
    views = [
        gather(folder, name, given.text, len(names)) for folder, name in zip(folders, names, strict=True)
    ]
    page = given.out or (folders[0].parent / "compare.html" if given.compare else given.run / "report.html")
    try:
        report.write(page, views)
        print(page)
        if given.png:
            from analysis import picture

            picture.draw(given.png, views[0])
            print(given.png)
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from None


def gather(folder: Path, name: str, text: str | None, runs: int) -> dict[str, Any]:
    """The view of a run folder; without a checkpoint it has no attention to show."""
    from analysis.view import view
    from training.checkpoints import steps_in
    from training.loggers import read_records
    from training.runs import load_run

    config, records, heads = (
        load_config(folder),
        read_records(folder / "metrics.jsonl"),
        folder / "heads.json",
    )
    if not records:
        raise UserError(f"{folder} has no records yet: there is nothing to show")
    known = json.loads(heads.read_text(encoding="utf-8")) if heads.exists() else None
    if steps_in(folder / "checkpoints"):
        saved = load_run(folder)
        warn(saved.faults)
        return view(name, config, records, known, saved.model, saved.tokenizer, text, runs)
    warn([f"{folder} has no checkpoint yet, so the page shows no attention"])
    return view(name, config, records, known, runs=runs)


if __name__ == "__main__":
    serve(PARSER, main)
