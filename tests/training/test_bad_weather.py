"""Whatever Weights & Biases lacks or does, it never ends a run or holds one up; one warning says so."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.mirrored import KEY, LIMITS, ROOT, log_of, steps_in_records, write
from tests.wandb_tools import Told, serving
from training import mirror

pytestmark = pytest.mark.usefixtures("wandb_alone", "patience")


def one_warning(capfd) -> str:
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: Weights & Biases: ")
    return line


def kept_offline(folder: Path, capfd) -> str:
    """All the steps are in the folder that the one warning names."""
    line, told = one_warning(capfd), Told(folder)
    assert line.endswith(f"wandb sync {told.folder}")
    assert told.steps == steps_in_records(folder) == list(range(13))
    return line


def write_all(folder: Path, **log: object) -> None:
    with log_of(folder, **log) as mirrored:
        write(mirrored, 0, 12)


def test_without_a_key_an_online_run_is_kept_offline(tmp_path, capfd):
    write_all(tmp_path / "run", wandb="online")
    assert "WANDB_API_KEY" in kept_offline(tmp_path / "run", capfd)


def test_with_a_key_that_is_none_an_online_run_is_kept_offline(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_API_KEY", "short")
    write_all(tmp_path / "run", wandb="auto")
    kept_offline(tmp_path / "run", capfd)


@pytest.mark.parametrize(
    "limits", [pytest.param(None, marks=pytest.mark.slow, id="as they are"), pytest.param(1, id="1 s")]
)
@pytest.mark.parametrize("answering", [False, True], ids=["closed port", "port without answer"])
def test_without_a_network_an_online_run_is_kept_offline_and_the_wait_is_bounded(
    answering, limits, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setitem(mirror.SETTINGS, "init_timeout", limits or LIMITS["init_timeout"])
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        if answering:
            monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listening.getsockname()[1]}")
        write_all(tmp_path / "run", wandb="online")
    assert time.monotonic() - began < 20
    kept_offline(tmp_path / "run", capfd)


@pytest.mark.parametrize(
    "limit", [pytest.param(None, marks=pytest.mark.slow, id="as it is"), pytest.param(1, id="1 s")]
)
def test_a_server_that_falls_silent_holds_the_end_up_no_longer_than_the_limit(
    limit, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setitem(mirror.SETTINGS, "finish_timeout", limit or LIMITS["finish_timeout"])
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        with log_of(tmp_path / "run", wandb="online") as log:
            write(log, 0, 6)
            server.silent.set()
            write(log, 7, 12)
            began = time.monotonic()
        assert time.monotonic() - began < 13
    line, told = one_warning(capfd), Told(tmp_path / "run")
    assert line.endswith(f"wandb sync {told.folder}")
    assert told.steps == list(range(13))


def test_without_the_package_the_records_are_written(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "wandb", None)
    write_all(tmp_path / "run", wandb="auto")
    assert "wandb" in one_warning(capfd)
    assert steps_in_records(tmp_path / "run") == list(range(13))


def test_disabled_needs_no_package_and_leaves_no_folder(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "wandb", None)
    write_all(tmp_path / "run", wandb="disabled")
    assert capfd.readouterr() == ("", "")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder / "wandb")


def no_room_for_pictures(folder: Path) -> None:
    (media,) = folder.glob("wandb/*/files/media")
    shutil.rmtree(media)
    media.touch()


@pytest.mark.parametrize(("strike", "warnings"), [(no_folder, 0), (no_room_for_pictures, 1)])
def test_whatever_breaks_on_the_way_the_records_go_on_after_at_most_one_warning(
    strike, warnings, tmp_path, capfd
):
    with log_of(tmp_path / "run") as log:
        write(log, 0, 4)
        strike(tmp_path / "run")
        write(log, 5, 12)
    assert len(capfd.readouterr().err.splitlines()) == warnings
    assert sys.modules["wandb"].run is None  # the next run of this process would take it for its own
    assert steps_in_records(tmp_path / "run") == list(range(13))


WITHOUT_NETWORK = """
import sys
from pathlib import Path
from tests.training.test_mirror import log_of, write
with log_of(Path(sys.argv[1]), wandb="online") as log:
    write(log, 0, 12)
"""


@pytest.mark.slow
def test_without_a_network_the_process_has_ended_after_20_seconds_too(tmp_path):
    """What wandb does at the exit of the interpreter would take longer than that."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        environment = {**os.environ, "WANDB_API_KEY": KEY, "WANDB_BASE_URL": url}
        del environment["WANDB_ERROR_REPORTING"]
        command = [sys.executable, "-c", WITHOUT_NETWORK, str(tmp_path / "run")]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1


WITHOUT_SERVICE = """
import os, signal, sys
from pathlib import Path
from tests.training.test_mirror import log_of, write
with log_of(Path(sys.argv[1])) as log:
    write(log, 0, 4)
    (service,) = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    os.kill(int(service), signal.SIGKILL)
    write(log, 5, 12)
"""


def test_when_the_service_of_wandb_dies_the_records_go_on_after_one_warning(tmp_path):
    command = [sys.executable, "-c", WITHOUT_SERVICE, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("warning: Weights & Biases: ")
    assert done.stderr.count("\n") == 1
    assert steps_in_records(tmp_path / "run") == list(range(13))


FROZEN = """
import os, signal, sys, time
from pathlib import Path
from tests.training.test_mirror import log_of, write
from training import mirror
records = int(sys.argv[3])
with log_of(Path(sys.argv[1]), steps=10**6) as log:
    write(log, 0, 4)
    (service,) = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    os.kill(int(service), signal.SIGSTOP)
    mirror.SETTINGS |= {"init_timeout": 1, "finish_timeout": 1} if sys.argv[2] == "1 s" else {}
    for step in range(5, 5 + records):
        began = time.monotonic()
        log.write("train", step, text="x" * 1_000, loss=1 / step)
        log.flush()
        if time.monotonic() - began > 1:
            print(f"waited in step {step}")
print(len(Path(sys.argv[1], "metrics.jsonl").read_text().splitlines()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the service is found in /proc")
@pytest.mark.parametrize("records", [8, 20_000], ids=["at the end", "while it is told"])
@pytest.mark.parametrize("limits", ["1 s", pytest.param("as they are", marks=pytest.mark.slow)])
def test_a_service_that_stands_still_holds_a_run_up_once_and_no_longer_than_20_seconds(
    records, limits, tmp_path
):
    """It is stopped. The end waits for it; so does a record once what lies between them is full."""
    command = [sys.executable, "-c", FROZEN, str(tmp_path / "run"), limits, str(records)]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert time.monotonic() - began < 30
    assert done.returncode == 0
    *waits, lines = done.stdout.splitlines()
    assert len(waits) == (records == 20_000)
    assert int(lines) == 4 + 2 + 1 + records
    assert done.stderr.startswith("warning: Weights & Biases: ")
    assert done.stderr.count("\n") == 1
    assert "wandb sync" in done.stderr


def test_an_error_of_the_loop_passes_through_and_leaves_a_complete_row_for_each_step(tmp_path):
    log = log_of(tmp_path / "run")

    def loop():
        with log:
            write(log, 0, 4)
            log.write("train", 5, loss=1.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert Told(tmp_path / "run").steps == list(range(6))
