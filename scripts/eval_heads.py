"""Which head does what: labels with controls, what removing a head does, and when it appeared.

Of a run, or with --hf of a published model. Writes heads.json, heads.csv, heads.png, heads.svg, report.html.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs import UserError
from configs.cli import Parser, load_config
from configs.files import replace_text
from scripts import serve, warn

if TYPE_CHECKING:
    from analysis.probes import Probes
    from data.treebank import Sentence
    from training.runs import SavedRun


def positive(word: str) -> int:
    """A number of things, for argparse."""
    if int(word) < 1:
        raise ValueError
    return int(word)


def step(word: str) -> int | str:
    """A step, or `all` of them, for argparse."""
    return word if word == "all" else positive(word) if word != "0" else 0


PARSER = Parser(prog="python -m scripts.eval_heads", description=__doc__, allow_abbrev=False)
either = PARSER.add_mutually_exclusive_group(required=True)
either.add_argument("run", nargs="?", type=Path, metavar="RUN", help="run folder")
about = "instead: a folder of Hugging Face's, or a GGUF file"
either.add_argument("--hf", type=Path, metavar="DIR_OR_GGUF", help=about)
add = PARSER.add_argument
about = "weights of this step (default: the newest), or all: also when each head appeared"
add("--checkpoint", type=step, metavar="STEP", help=about)
add("--treebank", type=Path, metavar="CONLLU", help="a treebank: also find syntactic heads on its sentences")
about = "remove each labelled head, every head, or none (default: labelled)"
add("--ablate", choices=("labelled", "all", "none"), default="labelled", help=about)
about = "show the attention on this text; may be given again (default: of the probes)"
add("--text", action="append", default=[], help=about)
add("--corpus", type=Path, metavar="FILE", help="--hf: text of the probes (default: the embedded plays)")
add(
    "--context",
    type=positive,
    metavar="T",
    help="--hf: tokens a sequence (default: 256, or what the model has)",
)
add("--sequences", type=positive, metavar="N", help="sequences of each probe (default: the run's, or 16)")
DEVICES = ("auto", "cpu", "cuda", "mps")
add("--device", choices=DEVICES, default="auto", help="where to compute (default: auto)")
about = "of the linear layers (default: the run's, or fp32)"
add("--precision", choices=("fp32", "bf16", "fp16"), help=about)
about = "also log the table and the picture there (default: disabled)"
add("--wandb", choices=("auto", "online", "offline", "disabled"), default="disabled", help=about)
about = "folder to write to (default: RUN; RUN/heads-STEP for an older step; runs/NAME-heads for --hf)"
add("--out", type=Path, metavar="DIR", help=about)


def main(given: Namespace) -> None:
    """Evaluate, write the files, print what was found and where it is."""
    folder = _checked(given)
    from analysis.ablation import add_ablation
    from analysis.heads import in_words
    from analysis.patterns import encode
    from analysis.probes import make_probes
    from analysis.table import rows_of
    from analysis.view import view
    from data.loading import load_source
    from data.treebank import read_treebank
    from model.layers import PRECISIONS
    from training.devices import choose_device
    from training.loggers import read_records
    from training.mirror import log_evaluation
    from training.runs import load_published_run, load_run

    device = choose_device(given.device)
    sentences = read_treebank(given.treebank) if given.treebank else None
    step = None if given.checkpoint == "all" else given.checkpoint
    run = load_published_run(given.hf, given.corpus, given.context) if given.hf else load_run(given.run, step)
    config, seed, T = run.config, run.config.run.seed, run.config.model.context_length
    for text in given.text:  # what cannot be shown is told before the work
        encode(text, run.tokenizer, T)
    records = read_records(run.folder / "metrics.jsonl") if run.step is not None else []
    given.precision = given.precision or config.train.precision
    run.model.to(device).compute_in(PRECISIONS[given.precision])
    source = load_source(config, run.tokenizer)
    if run.step is not None and source.fingerprint != run.fingerprint:
        warn([f"the data differ from those that {run.folder} was trained on, and so do the probes"])
    probes = make_probes(source, T, given.sequences or config.probe.sequences, seed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        document = evaluate(given, run, probes, sentences)
        warn(run.faults)
        print(in_words(document), flush=True)
        # Removing heads can take long: what is known before is not lost where it is broken off.
        replace_text(folder / "heads.json", json.dumps(document, allow_nan=False))
        if given.ablate != "none":
            add_ablation(document, run.model, probes, given.ablate, seed)
            replace_text(folder / "heads.json", json.dumps(document, allow_nan=False))
        name = _name(given.hf or given.run)
        show(folder, document, view(name, config, records, document, run.model, run.tokenizer, given.text))
    except OSError as error:
        raise UserError(f"cannot write {error.filename or folder}: {error.strerror}") from None
    print(f"{folder}: heads.json, heads.csv, heads.png, heads.svg, report.html")
    if given.wandb != "disabled":
        log_evaluation(folder, config, given.wandb, rows_of(document), folder / "heads.png")


def evaluate(given: Namespace, run: "SavedRun", probes: "Probes", sentences: "list[Sentence] | None") -> Any:
    """All of `heads.json` that needs no removal of heads."""
    from analysis.circuits import add_circuits
    from analysis.heads import describe_heads, untrained
    from analysis.syntax import add_syntax
    from analysis.timeline import add_timeline
    from training.runs import every_checkpoint

    model, seed, bos = run.model, run.config.run.seed, run.config.data.bos
    name = _name(given.hf or given.run)
    about = {"published": name} if given.hf else {"run": name, "step": run.step}
    document = describe_heads(model, probes, bos, seed, about | {"precision": given.precision})
    fresh = untrained(model, seed)
    add_circuits(document, model, fresh)
    if sentences is not None:
        add_syntax(document, model, fresh, run.tokenizer, sentences, given.treebank.name, seed)
    if given.checkpoint == "all":
        add_timeline(document, every_checkpoint(run), probes, bos)
    return document


def show(folder: Path, document: dict[str, Any], view: dict[str, Any]) -> None:
    """The table, the picture and the page."""
    from analysis import picture, report
    from analysis.table import csv_of

    replace_text(folder / "heads.csv", csv_of(document))
    for suffix in ("png", "svg"):
        picture.draw(folder / f"heads.{suffix}", view)
    replace_text(folder / "report.html", report.page([view]))


def _checked(given: Namespace) -> Path:
    """The folder to write to; raises `UserError` for a wrong request, ahead of the slow imports."""
    if given.hf and given.checkpoint is not None:
        raise UserError(f"--checkpoint {given.checkpoint}: a published model has one set of weights")
    if given.run and (given.corpus or given.context):
        raise UserError("--corpus and --context go with --hf; a run has its own data and context")
    older = given.checkpoint not in (None, "all")
    usual = given.run / f"heads-{given.checkpoint}" if older else given.run
    folder = given.out or usual or Path("runs") / f"{_name(given.hf)}-heads"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file: give a folder")
    if given.run:
        load_config(given.run)
    return folder


def _name(path: Path) -> str:
    """Of a folder or a file, whose ending says nothing."""
    path = path.resolve()
    return path.stem if path.is_file() else path.name


if __name__ == "__main__":
    serve(PARSER, main, sys.argv[1:], verbatim="--text")
