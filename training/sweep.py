"""Small trainings one after another, each a process of its own; what is finished is not trained again."""

import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

from tqdm import tqdm

from configs import UserError
from configs.cli import load_config, parse
from configs.schema import Config
from configs.screen import looks
from training.loggers import read_records

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "ablations"
LAST_LINES = 8  # of a training that failed
Numbers = dict[str, float]


@dataclass(frozen=True)
class Training:
    """A config of `CONFIGS` with a seed; `folder` is that of its run."""

    name: str
    seed: int
    folder: Path

    @property
    def asked(self) -> list[str]:
        """The words that start it."""
        words = ["--config", str(CONFIGS / f"{self.name}.yaml"), "--run.seed", str(self.seed)]
        return [*words, "--run.dir", str(self.folder), "--log.group", "derivation"]

    def begun(self) -> bool:
        """Whether the folder holds this very training, whole or in part."""
        try:
            return _result(load_config(self.folder)) == _result(parse(self.asked).config)
        except UserError:
            return False

    def numbers(self) -> Numbers | None:
        """What the run has come to, None while it has not reached its last step.

        Of the last step `loss` on the validation part, in nats a token; `repeat_loss_2`; of the best head
        `induction`, `previous` and `sink`; the mean over heads of `current` and of `entropy`, normalized.
        `learned_early`: by how much the training loss has fallen half-way, in nats. `seed`, to pair runs by.
        """
        records = read_records(self.folder / "metrics.jsonl") if self.begun() else []
        if not records or records[-1]["kind"] != "end":
            return None
        last = {record["kind"]: record for record in records}
        half = last["end"]["step"] / 2
        first, *losses = [r["loss"] for r in records if r["kind"] == "train" and r["step"] <= half]
        scores = {name: [*chain(*rows)] for name, rows in last["attention"]["scores"].items()}
        return {
            "seed": self.seed,
            "loss": last["eval"]["loss"],
            "repeat_loss_2": last["attention"]["model"]["repeat_loss_2"],
            **{name: max(scores[name]) for name in ("induction", "previous", "sink")},
            "current": mean(scores["current"]),
            "entropy": mean(scores["entropy_normalized"]),
            "learned_early": first - mean(losses[-5:]),
        }


def finished(names: Iterable[str], seeds: Iterable[int], folder: Path) -> dict[str, list[Numbers]]:
    """By name of the config, the numbers of the runs in `folder` that are finished, in order of the seeds."""
    found: dict[str, list[Numbers]] = {}
    for one in _trainings(names, seeds, folder):
        if numbers := one.numbers():
            found.setdefault(one.name, []).append(numbers)
    return found


def sweep(names: Iterable[str], seeds: Iterable[int], folder: Path) -> dict[str, list[Numbers]]:
    """As `finished`, after training what is not: in `folder/runs/NAME-seedN/`, its output beside it.

    A run that was begun goes on; another one in its place, such as of an older config, is started afresh.
    One that fails is told of and left out. Raises `UserError` where a request is wrong.
    """
    all_of_them = _trainings(names, seeds, folder)
    todo = [one for one in all_of_them if one.numbers() is None]
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    total = len(all_of_them)
    in_file = looks("{n_fmt}/{total_fmt} trainings, {elapsed} gone, {remaining} to go{postfix}")
    with tqdm(total=total, initial=total - len(todo), disable=not todo, unit="training", **in_file) as bar:
        for one in todo:
            bar.set_postfix_str(one.folder.name, refresh=sys.stderr.isatty())
            if fault := _train(one):
                tqdm.write(f"warning: {one.folder.name} failed: {fault}", file=sys.stderr)
            bar.update()
    return finished(names, seeds, folder)


def _trainings(names: Iterable[str], seeds: Iterable[int], folder: Path) -> list[Training]:
    """Seed after seed, so that a sweep that was ended has something of everything."""
    return [Training(name, seed, folder / "runs" / f"{name}-seed{seed}") for seed in seeds for name in names]


def _train(one: Training) -> str:
    """Start it or go on with it, and wait for its end; the last that it said if it failed, else nothing."""
    told = one.folder.with_suffix(".log")
    while one.numbers() is None:
        words = ["--resume", str(one.folder)] if one.begun() else [*one.asked, "--run.overwrite", "true"]
        code, said = _run([sys.executable, str(ROOT / "train.py"), *words], told)
        if not code:
            break
        lines = "\n".join(said.splitlines()[-LAST_LINES:])
        if "is training in run.dir" in lines:  # for a sweep that was killed before it: its result is as good
            continue
        if code == 2:
            raise UserError(f"{one.folder.name}: {lines}")
        return lines or f"it ended with {code}"
    return ""


def _run(command: list[str], told: Path) -> tuple[int, str]:
    """Its exit code and what it said.

    In a session of its own: Ctrl-C comes here alone, is passed on once, and the run can save itself. In a new
    file: into one that is there, the training of a sweep that was killed, or of another, may still write.
    """
    told.unlink(missing_ok=True)
    with told.open("w+", errors="replace") as output:
        kept: dict[str, Any] = {"stdout": output, "stderr": output, "start_new_session": True}
        with subprocess.Popen(command, **kept) as child:
            try:
                code = child.wait()
            except BaseException:
                child.send_signal(signal.SIGINT)
                child.wait()
                raise
        output.seek(0)
        return code, output.read()


def _result(config: Config) -> dict[str, Any]:
    """All of a configuration that has an influence on the numbers."""
    return config.model_dump(exclude={"log": True, "run": {"dir", "overwrite"}})
