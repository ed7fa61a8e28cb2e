"""`python -m scripts.report RUN`: the page of a run, finished or not; of several with --compare."""

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from configs import UserError
from configs.cli import Parser, load_config
from configs.files import LARGE, read_json, replace_text
from configs.screen import foreign
from scripts import serve, warn

PARSER = Parser(prog="python -m scripts.report", description=__doc__, allow_abbrev=False)
PARSER.add_argument("run", nargs="?", type=Path, metavar="RUN", help="run folder")
PARSER.add_argument("--compare", nargs="+", type=Path, metavar="RUN", help="two or more runs on one page")
about = "show the attention on this text; may be given several times"
PARSER.add_argument("--text", action="append", default=[], help=about)
where = "where to write it (default: RUN/report.html, or compare-RUN-RUN.html beside the first run)"
PARSER.add_argument("--out", type=Path, metavar="HTML", help=where)
about = "also draw the phase change and the heads of one run; .svg too"
PARSER.add_argument("--png", type=Path, metavar="FILE", help=about)


def main(given: Namespace) -> None:
    """Write what was asked for and print where it is."""
    folders = given.compare or [given.run]
    if bool(given.run) == bool(given.compare) or (given.compare and len(folders) == 1):
        raise UserError("give one run folder, or --compare and two or more")
    if given.png and given.compare:
        raise UserError("--png draws one run: leave --compare out")
    from analysis import picture, report

    names = [folder.resolve().name for folder in folders]
    compared = folders[0].parent / f"compare-{'-'.join(names)[:100]}.html"
    page = given.out or (compared if given.compare else given.run / "report.html")
    names = names if len({*names}) == len(names) else [str(folder) for folder in folders]
    try:
        views = [gather(*one, given.text, len(names)) for one in zip(folders, names, strict=True)]
        html = report.page(views)
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # what lacks, or is another kind
        evaluated = [str(path) for folder in folders if (path := folder / "heads.json").exists()]
        if not evaluated:
            raise
        reason = foreign(f"{type(error).__name__}: {error}", 200)
        told = "cannot be read; resuming the finished run makes it anew"
        raise UserError(f"{' or '.join(evaluated)} {told} ({reason})") from None
    if given.png and not views[0]["probe"]["step"]:
        raise UserError(f"{given.run} was not probed (probe.every 0): --png has no heads to draw")
    try:
        replace_text(page, html)
        print(page)
        if given.png:
            picture.draw(given.png, views[0])
            print(given.png)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or page}: {error.strerror}") from None


def gather(folder: Path, name: str, texts: list[str], runs: int) -> dict[str, Any]:
    """The view of a run folder; without a checkpoint it has no attention to show."""
    from analysis.view import view
    from training.checkpoints import steps_in
    from training.loggers import read_records
    from training.runs import load_run

    config, records = load_config(folder), read_records(folder / "metrics.jsonl")
    if not records:
        raise UserError(f"{folder} has no records yet: there is nothing to show")
    shape = [config.model.n_head] * config.model.n_layer
    scores = [rows for r in records if r["kind"] == "attention" for rows in r["scores"].values()]
    if any([*map(len, rows)] != shape for rows in scores):
        raise UserError(f"{folder}/metrics.jsonl has scores of other layers and heads than the model has")
    path, known = folder / "heads.json", None
    try:
        known = read_json(path, LARGE) if path.exists() else None
        L, H = range(config.model.n_layer), range(config.model.n_head)
        if known and any(head["layer"] not in L or head["head"] not in H for head in known["heads"]):
            raise ValueError("it has heads that the model has not")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}; resuming the finished run makes it anew") from None
    if not steps_in(folder / "checkpoints"):
        warn([f"{folder} has no checkpoint yet, so the page shows no attention"])
        return view(name, config, records, known, runs=runs)
    saved = load_run(folder)
    warn(saved.faults)
    return view(name, config, records, known, saved.model, saved.tokenizer, texts, runs)


if __name__ == "__main__":
    serve(PARSER, main, sys.argv[1:], verbatim="--text")
