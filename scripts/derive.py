"""Every statement of the derivation of self-attention as an experiment: a number, a picture, a verdict.

Writes report.html, results.json and the pictures. Alone it needs no data and takes about half a minute; a
trained model (--run, --model) and short trainings (--train) measure the rest.
"""

import os
import sys
import textwrap
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from configs import UserError
from configs.cli import Parser, load_config
from scripts import exits, warn

if TYPE_CHECKING:
    from analysis.derivation.finding import Subject
    from data.treebank import Sentence
    from training.runs import SavedRun

LAST = 14
TEXT = 2**20  # characters of a corpus that are read
LONG, PROBED = 4096, 256  # tokens of a published model's context, and of its probes
SEEDS = (4, 5, 6)  # of the trainings; what they share was tried out with 1 to 3


def statements(words: str) -> list[int]:
    """Numbers apart by commas, for argparse."""
    numbers = [int(word) if word.strip().isdecimal() else 0 for word in words.split(",")]
    if not all(1 <= number <= LAST for number in numbers):
        raise ArgumentTypeError(f"{words!r}: give numbers of statements, 1 to {LAST}, such as 3,7")
    return numbers


def seed(word: str) -> int:
    """What PyTorch takes for one, for argparse."""
    if not -(2**63) <= (number := int(word)) < 2**63:
        raise ArgumentTypeError("give a whole number of 63 bits")
    return number


PARSER = Parser(prog="python -m scripts.derive", description=__doc__, allow_abbrev=False)
add = PARSER.add_argument
add("--only", type=statements, metavar="N,N", help=f"some of the statements 1 to {LAST} (default: all)")
add("--run", type=Path, help="run folder: also look at this model")
about = "also look at this one: a folder of Hugging Face's, or a GGUF file"
add("--model", type=Path, metavar="DIR_OR_GGUF", help=about)
add("--corpus", type=Path, metavar="FILE", help="--model: text it reads (default: the embedded plays)")
about = "--run, --model: a treebank, for syntactic heads"
add("--treebank", type=Path, metavar="CONLLU", help=about)
about = "the short trainings that are not there yet, a quarter of an hour; goes on where it was stopped"
add("--train", action="store_true", help=about)
add("--seed", type=seed, default=1, metavar="S", help="of what is drawn at random (default: 1)")
about = "folder to write to, trainings too (default: runs/derivation)"
add("--out", type=Path, default=Path("runs/derivation"), metavar="DIR", help=about)


def main(given: Namespace) -> None:
    """Measure, write, and print a line a statement and what would measure the rest."""
    if given.model is None and given.corpus:
        raise UserError("--corpus goes with --model; a run has its own text")
    if given.treebank and not (given.run or given.model):
        raise UserError("--treebank goes with --run or --model: there are no heads to look at")
    if given.out.exists() and not given.out.is_dir():
        raise UserError(f"--out {given.out} is a file: give a folder")
    if (given.out / "config.yaml").exists():
        raise UserError(f"--out {given.out} is a run, whose report.html would be replaced: give another")
    if given.run:
        load_config(given.run)  # refuses a folder that is no run ahead of the slow imports

    from tqdm import tqdm

    from analysis.derivation.finding import Given
    from analysis.derivation.page import Section, write
    from analysis.derivation.statements import STATEMENTS
    from training.guards import first_nonfinite
    from training.sweep import finished, sweep

    asked = [statement for statement in STATEMENTS if given.only is None or statement.number in given.only]
    subjects = _subjects(given)
    _make(given.out)  # ahead of what takes minutes
    names = dict.fromkeys(name for statement in asked for name in statement.trainings)
    trained = (sweep if given.train else finished)(names, SEEDS, given.out)
    known, sections = Given(first_nonfinite, given.seed, subjects, trained), []
    with tqdm(asked, unit="statement", leave=False, disable=not sys.stderr.isatty()) as bar:
        for statement in bar:
            finding = statement.function(known)
            sections.append(Section(statement, finding))
            claim = textwrap.shorten(statement.claim, 90, placeholder=" ...")
            tqdm.write(f"{statement.number:>2}  {finding.verdict:<13}  {claim}")
    try:
        files = write(given.out, sections)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or given.out}: {error.strerror}") from None
    for missing in dict.fromkeys(line for section in sections for line in section.finding.missing):
        print(f"not measured: {missing}")
    print(f"{given.out}: {', '.join(files[:2])}, {len(files) - 2} figures")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {folder}: it may not be written to")


def _subjects(given: Namespace) -> "list[Subject]":
    from data.treebank import read_treebank
    from model.published import open_published
    from training.runs import load_published_run, load_run

    sentences, name = (read_treebank(given.treebank), given.treebank.name) if given.treebank else (None, "")
    found = []
    if given.run:
        run = load_run(given.run)
        warn(run.faults)
        found.append(_subject(run, f"--run {given.run}", sentences, name))
    if given.model:
        try:
            context_length = min(LONG, open_published(given.model).config.context_length)
        except UserError as error:
            raise UserError(f"{given.model}: {error}") from None
        run = load_published_run(given.model, given.corpus, context_length)
        found.append(_subject(run, f"--model {given.model}", sentences, name))
    return found


def _subject(run: "SavedRun", command: str, sentences: "list[Sentence] | None", treebank: str) -> "Subject":
    import torch

    from analysis.derivation.finding import Subject
    from analysis.probes import make_probes
    from data.corpora import load_text
    from data.loading import load_source

    tokenizer, config = run.tokenizer, run.config
    T = config.model.context_length if run.step is not None else min(PROBED, config.model.context_length)
    config = config.model_copy(update={"model": config.model.model_copy(update={"context_length": T})})
    source = load_source(config, tokenizer)
    if run.step is None:  # as far as we know it was trained on none of it
        text = load_text(config.data.source, config.data.path)[:TEXT]
        text_N = torch.from_numpy(tokenizer.encode(text)).long()
    else:
        targets = torch.cat([batch.targets_BT.flatten() for batch in source.validation(64)])
        text_N = targets[targets >= 0]
    return Subject(
        name=run.folder.resolve().stem if run.folder.is_file() else run.folder.resolve().name,
        command=command,
        model=run.model,
        probes=make_probes(source, T, config.probe.sequences, config.run.seed),
        text_N=text_N,
        bos=tokenizer.bos,
        bos_trained=config.data.bos,
        seed=config.run.seed,
        tokenizer=tokenizer,
        sentences=sentences,
        treebank=treebank,
    )


if __name__ == "__main__":
    with exits():
        main(PARSER.parse_args(sys.argv[1:]))
