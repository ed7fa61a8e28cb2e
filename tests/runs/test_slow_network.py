"""Whole runs towards a server that is not there, says nothing or dies: they are as fast, and wait once."""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.runs.tiny import ROOT, records, request
from tests.training.mirrored import KEY
from tests.wandb_tools import serving

pytestmark = [pytest.mark.usefixtures("wandb_alone"), pytest.mark.slow]
STEPS = 200

TIMED = """
import json, sys, time
import train
from configs.cli import parse

update, began, inside, waited = train.update, [], [], []

def updating(*arguments):
    began.append(time.perf_counter())
    return update(*arguments)

def timed(method):
    def call(*arguments, **keywords):
        inside.append(time.perf_counter())
        try:
            return method(*arguments, **keywords)
        finally:
            since = inside.pop()
            if not inside:
                waited.append(time.perf_counter() - since)
    return call

for name in ("__init__", "write", "flush", "heads", "__exit__"):
    setattr(train.MirroredLog, name, timed(getattr(train.MirroredLog, name)))
train.update = updating
code = train.main(parse(sys.argv[1:]))
print(json.dumps([[after - before for before, after in zip(began, began[1:])], sum(waited)]))
sys.exit(code)
"""


@contextmanager
def no_server():
    yield "http://127.0.0.1:1", lambda run: None


@contextmanager
def silent_server():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", lambda run: None


@contextmanager
def mortal_server():
    def die(run: Path) -> None:
        while not (run / "metrics.jsonl").exists() or len(records(run)) < STEPS // 4:
            time.sleep(0.05)
        assert server.names  # it knows the run
        server.silent.set()
        server.over.set()
        server.shutdown()
        server.server_close()

    with serving() as server:
        yield server.url, die


def trained(folder: Path, mode: str, url: str = "", strike=lambda run: None) -> tuple[float, float, str]:
    """Median seconds from one update to the next, seconds in the log in all, and what was said on stderr."""
    folder.mkdir()
    argv = request(
        folder, log={"wandb": mode}, train={"steps": STEPS}, eval={"every": 50}, probe={"every": 50}
    )
    environment = {**os.environ, "WANDB_API_KEY": KEY, "WANDB_BASE_URL": url}
    del environment["WANDB_ERROR_REPORTING"]
    command = [sys.executable, "-c", TIMED, *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    strike(folder / "run")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    between, logging = json.loads(out.splitlines()[-1])
    return statistics.median(between), logging, err


@pytest.mark.parametrize("weather", [no_server, silent_server, mortal_server])
def test_a_run_is_not_held_up_by_a_server_that_does_not_answer(weather, tmp_path):
    step, logging, _ = trained(tmp_path / "without", "disabled")
    with weather() as (url, strike):
        stormy_step, stormy_logging, told = trained(tmp_path / "with", "online", url, strike)
    print(f"{weather.__name__}, without and with: median step {step:.4f} and {stormy_step:.4f} s,")
    print(f"in the log {logging:.1f} and {stormy_logging:.1f} s in all")
    assert stormy_step < 3 * step  # where other programs run too, equal runs differ by a factor of two
    assert stormy_logging - logging < 20
    assert told.count("warning: ") == 1
    assert "wandb sync" in told
    assert records(tmp_path / "with" / "run") == records(tmp_path / "without" / "run")
