"""The mirror shows the numbers of the records, online or offline, each once."""

import json
import os
from pathlib import Path

import pytest

from tests.training.mirrored import KEY, attention, log_of, steps_in_records, write
from tests.wandb_tools import Told, serving
from training import mirror
from training.loggers import read_records
from training.mirror import numbers

pytestmark = pytest.mark.usefixtures("wandb_alone", "patience")


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


def test_an_alarm_is_an_alert_at_the_step_where_it_is_new(tmp_path):
    said = []
    with log_of(tmp_path / "run", image_every=0) as log:
        for step, since in ((4, 4), (8, 4), (12, 12)):
            log.write("attention", step, **attention(step))
            place = {"score": "max_logit", "layer": 1, "value": None}
            log.alarm(step, [place | {"since": since, "text": f"hot at {step}"}], said.append)
            log.alarm(step + 1, [], said.append)
            log.flush()
    told = Told(tmp_path / "run")
    assert [alert["title"] for alert in told.alerts] == ["max_logit of layer 1"] * 2
    assert [alert["text"] for alert in told.alerts] == ["step 4: hot at 4", "step 12: hot at 12"]
    assert said == ["step      4  warning: hot at 4", "step     12  warning: hot at 12"]
    assert told.steps == [4, 8, 12]
    alarmed = [r["step"] for r in read_records(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "alarm"]
    assert alarmed == [4, 8, 12]


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
    rows = [
        {"layer": 0, "head": 0, "labels": "", "sink": 0.5, "mine": None},
        {"layer": 0, "head": 1, "labels": "sink;induction", "sink": 1, "mine": 2.5},
    ]
    with log_of(tmp_path / "run") as log:
        write(log, 0, 4)
        log.heads(rows)
    told = Told(tmp_path / "run")
    table = json.loads((told.folder / "files" / told.summary["heads"]["path"]).read_text())
    assert table["columns"] == ["layer", "head", "labels", "sink", "mine"]
    assert table["data"] == [[0, 0, "", 0.5, None], [0, 1, "sink;induction", 1, 2.5]]
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
