"""The mirror shows the numbers of the records, online or offline, and never ends a run or holds one up."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs.cli import validate
from tests.wandb_tools import Told, serving
from training import mirror
from training.loggers import read_records
from training.mirror import MirroredLog, numbers

pytestmark = pytest.mark.usefixtures("wandb_alone")
KEY = "a" * 40
LIMITS = dict(mirror.SETTINGS)
ROOT = Path(mirror.__file__).parents[1]


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A slow machine is no bad weather."""
    monkeypatch.setattr(mirror, "SETTINGS", {**LIMITS, "init_timeout": 100, "finish_timeout": 100})


def attention(step: int) -> dict:
    """The fields of a record of two layers with two heads, one score of which is not finite."""
    return {
        "scores": {"sink": [[0.125, 0.375], [None, step / 8]], "mine": [[None, None], [-2.0, -1.0]]},
        "model": {"repeat_loss_1": 3.5, "repeat_loss_2": 2.5, "icl_score": None},
        "probe": {"bos": True, "block_lengths": [4, 8], "skipped_rows": 5, "nonfinite": 4},
        "seconds": 0.25,
    }


def log_of(folder: Path, resume_from: int = -1, steps: int = 12, **log: object) -> MirroredLog:
    folder.mkdir(exist_ok=True)
    config = validate({"train": {"steps": steps}, "log": {"wandb": "offline", **log}})
    return MirroredLog(folder, resume_from, config, "0123abcd")


def write(log: MirroredLog, first: int, last: int) -> None:
    """What a loop writes: a train record a step, a probe every fourth, and its end."""
    for step in range(first, last + 1):
        if step:
            log.write("train", step, loss=1 / (step + 3), tokens_per_s=1000 + step)
        if step % 4 == 0:
            log.write("attention", step, **attention(step))
        log.flush()
    log.write("end", last, seconds=float(last))


def steps_in_records(folder: Path) -> list[int]:
    return sorted({record["step"] for record in read_records(folder / "metrics.jsonl")})


# Numbers


def test_heads_of_a_layer_become_their_mean_and_their_maximum_and_what_is_missing_is_counted():
    assert numbers({"kind": "attention", "step": 2, **attention(2)}) == {
        "attention/sink/layer00": 0.25,
        "attention/sink/layer00_max": 0.375,
        "attention/sink/layer01": 0.25,
        "attention/sink/layer01_max": 0.25,
        "attention/mine/layer01": -1.5,
        "attention/mine/layer01_max": -1.0,
        "attention/repeat_loss_1": 3.5,
        "attention/repeat_loss_2": 2.5,
        "attention/nonfinite": 4,
        "attention/skipped_rows": 5,
        "attention/seconds": 0.25,
    }


def test_other_records_keep_their_names_and_lose_what_is_no_number():
    record = {"kind": "eval", "step": 3, "loss": 1.5, "loss_sem": None, "bits_per_byte": 2}
    assert numbers(record) == {"eval/loss": 1.5, "eval/bits_per_byte": 2}


# Offline


def test_every_number_of_every_record_is_there_once_in_the_row_of_its_step(tmp_path, capfd):
    with log_of(tmp_path / "run", project="p", group="g") as log:
        write(log, 0, 12)
    told = Told(tmp_path / "run")
    expected = {}
    for record in read_records(tmp_path / "run" / "metrics.jsonl")[:-1]:
        expected.setdefault(record["step"], {}).update(numbers(record))
    assert told.steps == list(range(13))
    assert told.numbers() == expected
    assert told.summary["end/seconds"] == 12
    named = {key: told.run[key] for key in ("run_id", "display_name", "project", "run_group")}
    assert named == {"run_id": "0123abcd", "display_name": "run", "project": "p", "run_group": "g"}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("every", "expected"), [(0, []), (1, [0, 4, 8, 12]), (5, [0, 8, 12]), (8, [0, 8, 12]), (100, [0, 12])]
)
def test_pictures_come_with_the_first_the_last_and_the_next_probe_after_each_multiple(
    every, expected, tmp_path, monkeypatch
):
    drawn, draw = [], mirror.draw
    monkeypatch.setattr(mirror, "draw", lambda title, rows: drawn.append(title) or draw(title, rows))
    with log_of(tmp_path / "run", image_every=every) as log:
        write(log, 0, 12)
    assert drawn == [f"{name}, step {step}" for step in expected for name in ("sink", "mine")]


def test_a_run_that_goes_on_has_one_complete_folder_with_every_step_once(tmp_path):
    with log_of(tmp_path / "run", image_every=4) as log:
        write(log, 0, 10)
    first = Told(tmp_path / "run")
    with log_of(tmp_path / "run", 6, image_every=4) as log:
        write(log, 7, 12)
    told = Told(tmp_path / "run")
    assert told.folder != first.folder
    assert told.run["run_id"] == first.run["run_id"]
    assert told.steps == steps_in_records(tmp_path / "run") == list(range(13))
    assert list(told.pictures()) == [0, 4, 8, 12]
    assert {step: values for step, values in told.numbers().items() if step < 10} == {
        step: values for step, values in first.numbers().items() if step < 10
    }
    assert told.summary["end/seconds"] == 12


def test_the_folder_of_before_stays_until_the_new_one_has_caught_up(tmp_path, monkeypatch):
    with log_of(tmp_path / "run") as log:
        write(log, 0, 10)
    (before,) = (tmp_path / "run" / "wandb").iterdir()

    def fail(*arguments):
        raise OSError("no room")

    monkeypatch.setattr(mirror, "draw", fail)
    with log_of(tmp_path / "run", 6) as log:
        write(log, 7, 12)
    assert before.is_dir()
    assert steps_in_records(tmp_path / "run") == list(range(13))


def test_heads_are_a_table_inside_the_run_folder(tmp_path, wandb_alone):
    document = {
        "heads": [
            {"layer": 0, "head": 0, "scores": {"sink": 0.5, "mine": None}, "null": {}, "labels": []},
            {"layer": 0, "head": 1, "scores": {"sink": 1, "mine": 2.5}, "labels": ["sink", "induction"]},
        ]
    }
    with log_of(tmp_path / "run") as log:
        write(log, 0, 4)
        log.heads(document)
    told = Told(tmp_path / "run")
    table = json.loads((told.folder / "files" / told.summary["heads"]["path"]).read_text())
    assert table["columns"] == ["layer", "head", "labels", "sink", "mine"]
    assert table["data"] == [[0, 0, "", 0.5, None], [0, 1, "sink, induction", 1, 2.5]]
    assert not (wandb_alone / "WANDB_DATA_DIR").exists()


# Which setting wins


@pytest.mark.parametrize(
    ("config", "variables", "expected"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": KEY}, "online"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}, None),
        ("online", {"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}, "online"),
        ("offline", {"WANDB_API_KEY": KEY, "WANDB_MODE": "online"}, "offline"),
        ("offline", {"WANDB_MODE": "disabled", "WANDB_PROJECT": "other", "WANDB_DIR": "/"}, "offline"),
        ("disabled", {"WANDB_API_KEY": KEY, "WANDB_MODE": "online"}, None),
    ],
    ids=str,
)
def test_the_config_wins_and_auto_asks_the_environment(
    config, variables, expected, tmp_path, monkeypatch, capfd
):
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with log_of(tmp_path / "run", wandb=config, project="mine") as log:
            write(log, 0, 3)
        assert len(server.rows) == (4 if expected == "online" else 0)
    names = [path.name for path in tmp_path.glob("run/wandb/*") if path.is_dir()]
    kinds = {"online": ["run"], "offline": ["offline-run"], None: []}[expected]
    assert [name.rsplit("-", 2)[0] for name in names] == kinds
    out, err = capfd.readouterr()
    assert err == ""
    assert out == (f"  wandb  {server.url}/someone/mine/runs/0123abcd\n" if expected == "online" else "")


def test_a_key_in_netrc_counts(tmp_path, monkeypatch):
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        Path(os.environ["NETRC"]).write_text(
            f"machine 127.0.0.1:{server.server_port} login user password {KEY}"
        )
        with log_of(tmp_path / "run", wandb="auto") as log:
            write(log, 0, 1)
        assert len(server.rows) == 2


# Online


def test_online_a_run_goes_on_under_its_id_and_every_step_stands_there_once(tmp_path, monkeypatch):
    drawn, draw = [], mirror.draw
    monkeypatch.setattr(mirror, "draw", lambda title, rows: drawn.append(title) or draw(title, rows))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        with log_of(tmp_path / "run", wandb="online") as log:
            write(log, 0, 10)
        with log_of(tmp_path / "run", 6, wandb="online") as log:  # the server is ahead of the checkpoint
            write(log, 7, 12)
    assert [row["_step"] for row in server.rows] == list(range(13))
    assert server.names == {"0123abcd"}
    assert len(drawn) == len({*drawn}) == 8  # what the server has is not sent again
    assert [row["train/loss"] for row in server.rows[1:]] == [1 / (step + 3) for step in range(1, 13)]


def test_what_was_kept_offline_reaches_the_server_when_it_is_back(tmp_path, monkeypatch):
    with log_of(tmp_path / "run") as log:
        write(log, 0, 6)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        with log_of(tmp_path / "run", 6, wandb="auto") as log:
            write(log, 7, 8)
    assert [row["_step"] for row in server.rows] == list(range(9))
    assert not list((tmp_path / "run" / "wandb").glob("offline-run-*"))


# Bad weather


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
