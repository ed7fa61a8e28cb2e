"""A long run of a tiny model: is it still what it was after a twentieth? As a command:

    python -m tests.runs.soak [--steps 20000]

trains with probes, evaluation, checkpoints and Weights & Biases offline, looks at the process and at that of
wandb from within /proc, and prints a table.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import train
from configs.cli import parse
from tests.runs.tiny import request

LOOKS = 40  # so many rows in all
RARELY = {"n_layer": 2, "n_head": 2, "d_model": 16, "context_length": 17}
SOAK = {
    "model": {**RARELY, "dropout": 0},
    "eval": {"every": 250},
    "probe": {"every": 250},
    "checkpoint": {"every": 250},
    "log": {"every": 10, "wandb": "offline", "image_every": 1000},
}


class Look(NamedTuple):
    """What a process holds at a step; sizes in MiB, `update` is the median seconds of one since the last."""

    step: int
    memory: float
    files: int
    threads: int
    service: float  # memory of wandb's process
    service_files: int
    service_threads: int
    update: float
    cpu: float  # seconds of this process for a step with all that lies between two, the mean


def held(process: int) -> tuple[float, int, int]:
    """Resident memory in MiB, open files, threads."""
    status = Path(f"/proc/{process}/status").read_text()
    memory, threads = (int(re.search(rf"{key}:\s+(\d+)", status)[1]) for key in ("VmRSS", "Threads"))
    return memory / 1024, len(os.listdir(f"/proc/{process}/fd")), threads


def service() -> int:
    """The process of wandb, which is our only child."""
    (child,) = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return int(child)


def soak(folder: Path, steps: int) -> list[Look]:
    """Train for so many steps below `folder`; the first look is after a twentieth of them."""
    update, looks, seconds, began = train.update, [], [], time.process_time()

    def watching(run: train.Run, step: int, share: float) -> tuple:
        nonlocal began
        started = time.perf_counter()
        found = update(run, step, share)
        seconds.append(time.perf_counter() - started)
        if step % (steps // LOOKS) == 0:
            cpu = (time.process_time() - began) / len(seconds)
            looks.append(Look(step, *held(os.getpid()), *held(service()), median(seconds), cpu))
            seconds.clear()
            began = time.process_time()
        return found

    train.update = watching
    argv = request(folder, **{**SOAK, "train": {"steps": steps, "batch_size": 2, "grad_accum": 1}})
    assert train.main(parse(argv)) == 0
    return looks[LOOKS // 20 - 1 :]


def table(looks: list[Look]) -> str:
    head = "| step | memory | files | threads | wandb: memory | files | threads | update | CPU in all |"
    rows = [
        f"| {x.step:,} | {x.memory:.1f} MiB | {x.files} | {x.threads} "
        f"| {x.service:.1f} MiB | {x.service_files} | {x.service_threads} "
        f"| {1e3 * x.update:.2f} ms | {1e3 * x.cpu:.2f} ms |"
        for x in looks
    ]
    return "\n".join([head, "|--:" * 9 + "|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.runs.soak")
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        looks = soak(Path(name), steps)
    print(table(looks), flush=True)


if __name__ == "__main__":
    sys.exit(main())
