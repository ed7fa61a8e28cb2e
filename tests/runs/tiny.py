"""Tiny runs on a text that wraps epochs, and how to look at what they leave."""

import hashlib
import json
import os
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import train
from configs.cli import parse
from training.loggers import read_records

ROOT = Path(train.__file__).parent
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))
TEXT = "".join(f"{i} is {i % 3} and {i % 3} is {i}.\n" for i in range(60))
SMALL = {
    "data.source": "text",
    "model.n_layer": 2,
    "model.n_head": 2,
    "model.d_model": 16,
    "model.context_length": 17,
    "model.dropout": 0.1,
    "optimizer.lr": 0.01,
    "optimizer.warmup_steps": 4,
    "train.steps": 20,
    "train.batch_size": 4,
    "train.grad_accum": 2,
    "eval.every": 5,
    "probe.every": 5,
    "probe.sequences": 2,
    "checkpoint.every": 5,
    "log.every": 1,
    "log.wandb": "disabled",
}
TIMES = {"seconds", "tokens_per_s", "mfu", "telemetry_share"}  # what may differ between equal runs


def words(values: dict) -> list[str]:
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def request(folder: Path, **sections: dict) -> list[str]:
    """The command line of a small run in `folder`; `model={"n_layer": 3}` changes model.n_layer."""
    (folder / "text.txt").write_text(TEXT)
    places = {"run.dir": folder / "run", "data.path": folder / "text.txt", "data.cache_dir": folder / "cache"}
    changes = {f"{name}.{key}": value for name, keys in sections.items() for key, value in keys.items()}
    return words({**SMALL, **places, **changes})


def start(folder: Path, **sections: dict) -> Path:
    assert train.main(parse(request(folder, **sections))) == 0
    return folder / "run"


def go_on(run: Path, *more: str) -> int:
    return train.main(parse(["--resume", str(run), *more]))


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def records(run: Path, *kinds: str) -> list[dict]:
    found = [record for record in read_records(run / "metrics.jsonl") if not kinds or record["kind"] in kinds]
    return [{key: value for key, value in record.items() if key not in TIMES} for record in found]


def last(run: Path) -> dict[str, str]:
    """Fingerprints of weights and moments in the last checkpoint, and its step."""
    step = run / "checkpoints" / f"step-{steps(run)[-1]:08d}"
    names = ("model.safetensors", "optimizer.safetensors")
    return {
        "step": step.name,
        **{name: hashlib.sha256((step / name).read_bytes()).hexdigest() for name in names},
    }


def assert_same(run: Path, other: Path) -> None:
    assert last(run) == last(other)
    assert records(run) == records(other)
    assert set(Counter((record["kind"], record["step"]) for record in records(run)).values()) == {1}


BOTH = pytest.mark.parametrize("optimizer", ["adamw", "muon"])


class Killed(BaseException):
    """Nothing in the code catches it, as nothing does SIGKILL."""


def before_update(monkeypatch, step: int, act) -> None:
    """Call `act(run)` when the loop is about to make the update of `step`."""
    update = train.update

    def acting(run, number, *rest):
        if number == step:
            act(run)
        return update(run, number, *rest)

    monkeypatch.setattr(train, "update", acting)


def interrupted(
    folder: Path, monkeypatch, step: int = 8, number: int = signal.SIGINT, **sections: dict
) -> Path:
    """A run that got a signal when `step` began, so that it ended after it."""
    with monkeypatch.context() as patch:
        before_update(patch, step, lambda run: os.kill(os.getpid(), number))
        assert train.main(parse(request(folder, **sections))) == 130
    return folder / "run"


def assert_plain_json(path: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """As if the disk had no room for more than so many bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
