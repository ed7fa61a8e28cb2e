"""What the pages show is run here."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs.cli import KEYS, parse

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_statistic_of_the_page_reaches_the_record_from_a_script_of_ones_own(tmp_path):
    page = (ROOT / "docs" / "statistics.md").read_text()
    script = tmp_path / "my_run.py"
    script.write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1))
    run = tmp_path / "run"
    options = {
        "--run.dir": run,
        "--train.steps": 1,
        "--train.batch_size": 2,
        "--probe.sequences": 2,
        "--eval.every": 0,
        "--log.wandb": "disabled",
    }
    words = [str(word) for pair in options.items() for word in pair]
    command = [sys.executable, str(script), "--config", str(ROOT / "configs" / "induction.yaml"), *words]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = [record["scores"]["first_four"] for record in records if record["kind"] == "attention"]
    assert [(len(layers), len(layers[0])) for layers in scores] == [(2, 4)] * 2
    assert all(0 < score < 1 for layers in scores for heads in layers for score in heads)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_keys_and_commands_that_a_page_names_exist(page):
    text = page.read_text()
    links = re.findall(r"\]\(([\w./-]+)\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    presets = set(re.findall(r"configs/[\w.]+\.yaml", text)) - {"configs/X.yaml"}
    assert [preset for preset in presets if not (ROOT / preset).exists()] == []
    keys = set(re.findall(r"--(\w+\.\w+)", text))
    assert keys <= {*KEYS, "section.key"}
    makefile = (ROOT / "Makefile").read_text()
    assert [t for t in re.findall(r"`make ([\w-]+)", text) if f"\n{t}:" not in makefile] == []


@pytest.mark.parametrize(
    "line", re.findall(r"train\.py (--config .*)", "\n".join(p.read_text() for p in PAGES))
)
def test_commands_of_the_pages_parse(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = line.split("#")[0].replace("`", " ").replace("FILE", "text.txt").split("|")[0].split()
    if "runs/X/config.yaml" not in words and not any(word.startswith("[") for word in words):
        parse(words)


def test_the_pieces_of_the_python_page_run_one_after_another(tmp_path):
    page = (ROOT / "docs" / "python.md").read_text()
    pieces = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(pieces) == 7
    # A small run in its place: two steps make no induction head, so one is named to the page.
    run = tmp_path / "runs" / "quickstart"
    preset = ["--config", str(ROOT / "configs" / "quickstart.yaml"), "--run.dir", str(run)]
    small = "--train.steps 2 --model.d_model 32 --probe.sequences 2 --eval.every 0 --log.wandb disabled"
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = {"check": True, "capture_output": True, "text": True, "cwd": tmp_path, "env": environment}
    subprocess.run([sys.executable, str(ROOT / "train.py"), *preset, *small.split()], **options)
    heads = json.loads((run / "heads.json").read_text())
    heads["summary"]["labels"]["induction"] = [[1, 2]]
    (run / "heads.json").write_text(json.dumps(heads))
    done = subprocess.run([sys.executable, "-c", "".join(pieces)], **options)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 4 ")
    assert len([line for line in lines if " looks at " in line]) == 3
    assert done.stdout.count("KING") == 2  # a text of one window, and one without end


def test_each_fault_of_the_list_is_held_by_tests_that_exist():
    entries = re.split(r"^- ", (ROOT / "docs" / "faults.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) > 40
    for entry in entries:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", entry)
        assert named, entry
        missing = [name for path, name in named if f"\ndef {name}(" not in (ROOT / path).read_text()]
        assert missing == []
