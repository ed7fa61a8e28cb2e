"""Kills runs at random moments, or at each thing they do to a file, and lets them go on. As a command:

    python -m tests.runs.killing --kills 200 [--saves] [--seed 1]

The parent has imported everything and forks a child for each attempt, so that one takes part of a second.
"""

import argparse
import contextlib
import faulthandler
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

import train
from configs.cli import parse
from tests.runs.tiny import assert_same, request, start
from training import checkpoints
from training.loggers import JsonLines

# Three of four moments of such a run are inside a save; a few megabytes each.
SAVES = {
    "model": {"d_model": 128, "d_head": 64},
    "train": {"steps": 8},
    **{"eval": {"every": 0}, "probe": {"every": 0}, "checkpoint": {"every": 1, "keep_last": 1}},
}


def forked(act: Callable[[], int], told: Path) -> int:
    """The process id of a child that does it, exits with its code, and writes to the file `told`."""
    if pid := os.fork():
        return pid
    code = 99
    try:
        tqdm.set_lock(threading.RLock())  # its own is shared with the parent: who is killed never returns it
        descriptor = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        faulthandler.dump_traceback_later(120, exit=True)
        code = act()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid: int, after: float | None = None) -> int:
    """Its exit code, negative for a signal; `after` seconds it is killed, if it still runs."""
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def done(act: Callable[[], int], told: Path) -> int:
    return ended(forked(act, told))


def attempt(argv: list[str], run: Path) -> Callable[[], int]:
    """Going on with what there is of the run, or else its start, as anyone would."""
    words = ["--resume", str(run)] if (run / "config.yaml").exists() else argv
    return lambda: train.main(parse(words))


def assert_ends_as(reference: Path, argv: list[str], run: Path) -> None:
    told = run.parent / "told.txt"
    assert done(attempt(argv, run), told) == 0, told.read_text()
    assert "damaged" not in told.read_text()  # what a kill leaves is complete or invisible
    assert_same(run, reference)
    for name in ("heads.json", "tokenizer.json"):
        assert (run / name).exists() == (reference / name).exists()
        assert not (run / name).exists() or (run / name).read_bytes() == (reference / name).read_bytes()
    assert (run / "report.html").exists()


def kill(folder: Path, kills: int, seed: int, **sections: dict) -> Iterator[tuple[float, int, bool]]:
    """Runs, each killed until it happens to end, which it must as the undisturbed one does.

    Yields for each of `kills` when it came, as a share of the time of a whole run; the newest checkpoint
    there was, or -1; and whether something half written lay beside it.
    """
    (folder / "reference").mkdir()
    reference, moments = start(folder / "reference", **sections), random.Random(seed)
    argv, count = request(folder, **sections), 0
    began = time.perf_counter()
    assert_ends_as(reference, argv, folder / "run")
    whole = time.perf_counter() - began
    while count < kills:
        shutil.rmtree(folder / "run")
        while count < kills:
            after = moments.uniform(0, whole)
            pid = forked(attempt(argv, folder / "run"), folder / "told.txt")
            if (code := ended(pid, after)) == 0:
                break
            assert code == -signal.SIGKILL, (folder / "told.txt").read_text()
            count += 1
            left = folder / "run" / "checkpoints"
            yield after / whole, max([-1, *checkpoints.steps_in(left)]), any(left.glob("tmp-*"))
        assert_ends_as(reference, argv, folder / "run")


def changes(event: str, arguments: tuple, folder: Path) -> bool:
    """Whether this event, as `sys.addaudithook` has it, is about to change something below the folder."""
    inside = bool(arguments) and str(arguments[0]).startswith(str(folder))
    if event == "open":  # path, mode, flags
        return inside and isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
    # path ... descriptor of a folder: beside one stands a mere name, as shutil.rmtree has it
    return event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir") and (inside or arguments[-1] != -1)


def dying(act: Callable[[], int], folder: Path, place: int) -> Callable[[], int]:
    """The same, but killed at its `place`-th change to a file below `folder`, from 0: before it is made, or
    half-way through where it writes. Where there are fewer, it ends with 50. For a child that is forked.
    """
    left = itertools.count(place, -1)
    fsync, save_file, write = os.fsync, checkpoints.save_file, JsonLines.write

    def arrive(on_the_way: Callable[[], None] = lambda: None) -> None:
        if next(left) == 0:
            on_the_way()
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, arguments: tuple) -> None:
        if changes(event, arguments, folder):
            arrive()

    def syncing(descriptor: int) -> None:
        arrive()
        fsync(descriptor)

    def saving(tensors: dict, path: Path) -> None:
        save_file(tensors, path)
        arrive(lambda: os.truncate(path, path.stat().st_size // 2))

    def writing(log: JsonLines, kind: str, step: int, **fields: object) -> None:
        write(log, kind, step, **fields)
        path = folder / "metrics.jsonl"
        arrive(lambda: os.truncate(path, path.stat().st_size - 9))

    def acting() -> int:
        os.fsync, checkpoints.save_file, JsonLines.write = syncing, saving, writing
        sys.addaudithook(watch)
        return act() or 50

    return acting


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.runs.killing")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--saves", action="store_true", help="a run that saves nearly all the time")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(sys.stderr):
        found = list(kill(Path(name), asked.kills, asked.seed, **(SAVES if asked.saves else {})))
    halves = sum(half for _, _, half in found)
    early = sum(step < 0 for _, step, _ in found)
    print(f"{len(found)} kills, {halves} inside a save or removal, {early} before the first checkpoint:")
    print("each run ended bit for bit as the one that nothing disturbed")


if __name__ == "__main__":
    main()
