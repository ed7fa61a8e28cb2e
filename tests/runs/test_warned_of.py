"""A layer that goes beyond what training survives is warned of once, recorded, and mirrored."""

import re

import pytest

import train
from configs.cli import parse
from tests.runs.tiny import PRESETS, assert_same, go_on, interrupted, records, request
from tests.wandb_tools import Told

SECTIONS = {"probe": {"every": 1}, "eval": {"every": 0}, "optimizer": {"lr": 1e-5}}
HOT = {3: 1e6, 6: 1e-6, 10: 1e6}  # at these steps the queries of layer 1 become so many times as large
BEYOND = [3, 4, 5, *range(10, 21)]


@pytest.fixture
def heated(monkeypatch):
    """Layer 1 gets hot, recovers, and gets hot again for good."""
    update = train.update

    def heating(run, step, *rest):
        result = update(run, step, *rest)
        run.model.blocks[1].attention.W_q.weight.data *= HOT.get(step, 1.0)
        return result

    monkeypatch.setattr(train, "update", heating)


def warnings(text: str) -> list[tuple[int, int]]:
    return [(int(s), int(n)) for s, n in re.findall(r"step +(\d+)  warning: layer (\d+)", text)]


def whole(folder, **sections):
    folder.mkdir()
    assert train.main(parse(request(folder, **SECTIONS | sections))) == 0
    return folder / "run"


def test_a_layer_is_warned_of_when_it_gets_hot_and_again_after_it_has_recovered(heated, tmp_path, capsys):
    run = whole(tmp_path / "a", alarm={"entropy": 0, "max_logit": 50})
    assert warnings(capsys.readouterr().out) == [(3, 1), (10, 1)]
    found = records(run, "alarm")
    assert [record["step"] for record in found] == BEYOND
    probes = {record["step"]: record["scores"]["max_logit"] for record in records(run, "attention")}
    for record in found:
        (alarm,) = record["alarms"]
        assert (alarm["score"], alarm["layer"]) == ("max_logit", 1)
        assert alarm["value"] == max(probes[record["step"]][1]) > 50
        assert alarm["since"] == (3 if record["step"] < 10 else 10)


@pytest.mark.parametrize("step", [4, 12])
def test_a_run_in_pieces_has_the_same_alarms_and_does_not_warn_again(
    step, heated, tmp_path, monkeypatch, capsys
):
    alarm = {"alarm": {"entropy": 0, "max_logit": 50}}
    one = whole(tmp_path / "a", **alarm)
    (tmp_path / "b").mkdir()
    capsys.readouterr()
    two = interrupted(tmp_path / "b", monkeypatch, step, **SECTIONS | alarm)
    assert go_on(two) == 0
    assert_same(two, one)
    assert warnings(capsys.readouterr().out) == [(3, 1), (10, 1)]


@pytest.mark.slow
def test_alerts_are_told_once_and_are_all_there_after_a_resume(
    heated, wandb_alone, tmp_path, monkeypatch, capsys
):
    more = {"alarm": {"entropy": 0, "max_logit": 50}, "log": {"wandb": "offline", "image_every": 0}}
    run = interrupted(tmp_path, monkeypatch, 8, **SECTIONS | more)
    for steps in ([3], [3, 10]):
        alerts = Told(run).alerts
        assert [alert["title"] for alert in alerts] == ["max_logit of layer 1"] * len(steps)
        for alert, step in zip(alerts, steps, strict=True):
            assert alert["level"] == "WARN"
            assert alert["text"].startswith(f"step {step}: layer 1, head ")
        if steps == [3]:
            assert go_on(run) == 0


def test_without_probes_or_limits_there_are_no_alarms(heated, tmp_path, capsys):
    off = whole(tmp_path / "a", probe={"every": 0}, alarm={"max_logit": 50})
    silent = whole(tmp_path / "b", alarm={"entropy": 0, "max_logit": 0})
    assert records(off, "alarm") == records(silent, "alarm") == []
    assert warnings(capsys.readouterr().out) == []


def test_a_run_that_is_well_raises_none(reference):
    assert records(reference("adamw"), "alarm") == []


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.name)
def test_presets_keep_the_alarms_on_but_for_the_head_that_is_meant_to_be_sharp(preset):
    alarm = parse(["--config", str(preset)]).config.alarm
    assert alarm.max_logit == 1000
    assert alarm.entropy == (0 if preset.name == "sink.yaml" else 0.05)
