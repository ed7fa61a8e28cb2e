"""Command line and YAML: what is asked is what is set, and what was set can be read back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError
from configs.cli import read_yaml, to_yaml, validate
from configs.schema import Config
from tests.configs.asked import FIELDS, PRESETS, ROOT, config, refused, value, write

COMBINATIONS = (
    [],
    ["--model.mlp", "none", "--model.position", "learned", "--model.qk_norm", "true"],
    ["--optimizer.name", "muon", "--optimizer.schedule", "linear", "--model.n_kv_head", "2"],
    ["--data.source", "text", "--data.path", "a.txt", "--model.d_head", "10", "--model.d_mlp", "7"],
    ["--data.source", "repeats"],
    ["--data.source", "backcopy", "--model.sink", "learned", "--model.gate", "true"],
    [
        "--data.stages",
        '[{"until": 5, "weights": {"repeats": 1}}, {"weights": {"shakespeare": 7, "repeats": 1}}]',
    ],
)


# What is asked is what is set


@given(st.text(min_size=1).filter(lambda text: text != "null"))
def test_any_text_arrives_unchanged(text):
    assert config(f"--run.dir={text}").run.dir == text
    if not text.startswith("-"):
        assert config("--run.dir", text).run.dir == text


@pytest.mark.parametrize("argv", [["--data.path", "a=b=.txt"], ["--data.path=a=b=.txt"]])
def test_equals_signs_stay_in_the_value(argv):
    assert config("--data.source", "text", *argv).data.path == "a=b=.txt"


@pytest.mark.parametrize(
    ("key", "word", "number"),
    [("model.dropout", "0", 0.0), ("optimizer.lr", "1", 1.0), ("train.clip", "3", 3.0)],
)
def test_a_whole_number_serves_as_a_float_from_shell_and_file(key, word, number, tmp_path):
    section, name = key.split(".")
    for argv in ([f"--{key}", word], ["--config", write(tmp_path, f"{section}:\n  {name}: {word}\n")]):
        found = value(config(*argv), key)
        assert found == number
        assert type(found) is float


def test_yaml_takes_exponents_that_yaml_itself_reads_as_text(tmp_path):
    assert config("--config", write(tmp_path, "optimizer: {lr: 1e-3}")).optimizer.lr == 1e-3


def test_command_line_goes_before_file_and_file_before_default(tmp_path):
    path = write(tmp_path, "train: {steps: 9, batch_size: 5}\nmodel: {n_layer: 7}\n")
    found = config("--config", path, "--train.steps", "3")
    assert (found.train.steps, found.train.batch_size, found.model.n_layer) == (3, 5, 7)
    assert found.train.grad_accum == Config().train.grad_accum


def test_null_puts_a_key_back_to_what_it_resolves_to(tmp_path):
    path = write(tmp_path, "model: {d_model: 128, n_head: 4, d_head: 10}")
    assert config("--config", path).model.d_head == 10
    assert config("--config", path, "--model.d_head", "null").model.d_head == 32


@pytest.mark.parametrize("text", ["", "train:\n", "# nothing\n"])
def test_an_empty_file_or_section_means_the_defaults(text, tmp_path):
    assert config("--config", write(tmp_path, text)) == config()


def test_a_section_may_take_over_another_and_change_a_key(tmp_path):
    path = write(
        tmp_path,
        "eval: &often {every: 5}\nprobe: {<<: *often, sequences: 2}\ncheckpoint: {<<: *often, every: 9}\n",
    )
    found = config("--config", path)
    assert (found.eval.every, found.probe.every, found.probe.sequences, found.checkpoint.every) == (
        5,
        5,
        2,
        9,
    )


# The resolved configuration


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_parses_and_its_resolved_form_parses_to_itself(path, tmp_path):
    resolved = config("--config", str(path))
    again = config("--config", write(tmp_path, to_yaml(resolved)))
    assert again == resolved
    assert to_yaml(again) == to_yaml(resolved)


@pytest.mark.parametrize("argv", COMBINATIONS, ids=" ".join)
def test_any_resolved_form_is_complete_and_parses_to_itself(argv, tmp_path):
    resolved = config(*argv)
    path = write(tmp_path, to_yaml(resolved))
    assert config("--config", path) == resolved
    written = read_yaml(Path(path), "")
    assert {f"{name}.{key}" for name, section in written.items() for key in section} == set(FIELDS)


NONE_IS_THE_RULE = {"log.group", "model.window", "model.init_from"}
NONE_IS_THE_RULE |= {f"data.{key}" for key in ("name", "path", "subset", "revision", "take", "new_document")}


@pytest.mark.parametrize(
    "argv", [*COMBINATIONS, *(["--config", str(path)] for path in PRESETS)], ids=" ".join
)
def test_what_is_still_null_once_resolved_could_have_no_effect(argv):
    """A null that stood for some number would take that number."""
    for key in FIELDS:
        if value(config(*argv), key) is None and key not in NONE_IS_THE_RULE:
            assert key.split(".")[1] in refused(*argv, f"--{key}", "0.5" if key != "model.d_mlp" else "5")


# The process: --help, --print_config and errors come without the slow imports

PROBE = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print("\\nexit", end.code, sorted({"torch", "datasets", "wandb", "numpy"} & set(sys.modules)))
"""


def shell(folder: Path, *argv: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PROBE, str(ROOT / "train.py"), *argv],
        cwd=folder,
        env={**os.environ, "COLUMNS": "500", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_tells_type_default_and_meaning_of_every_key(tmp_path):
    done = shell(tmp_path, "--help")
    assert done.stdout.endswith("exit 0 []\n")
    assert not any(tmp_path.iterdir())
    entries = dict(entry.split(" ", 1) for entry in " ".join(done.stdout.split()).split(" --"))
    for key, field in FIELDS.items():
        default = "null" if field.default is None else field.default
        assert field.description in entries[key]
        assert f"(default: {default})" in entries[key]
        if field.annotation in (int, float, bool, str):
            assert entries[key].startswith(field.annotation.__name__)
    assert {"config", "resume", "print_config", "dry_run"} < set(entries)


def test_print_config_shows_what_the_run_would_use_and_does_nothing(tmp_path):
    done = shell(tmp_path, "--config", str(PRESETS[0]), "--train.steps", "7", "--print_config")
    shown, end = done.stdout.rsplit("\nexit ", 1)
    assert end == "0 []\n"
    assert shown == to_yaml(config("--config", str(PRESETS[0]), "--train.steps", "7"))
    assert done.stderr == ""
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "argv", ["--config none.yaml", "--modle.n_layer 3", "--resume .", "--train.steps", "--config"]
)
def test_a_wrong_request_ends_with_code_2_and_one_line(argv, tmp_path):
    done = shell(tmp_path, *argv.split())
    assert done.stdout == "\nexit 2 []\n"
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_validate_reads_no_files():
    assert validate({"train": {"steps": 3}}).train.steps == 3
    with pytest.raises(UserError, match=r"train\.steps"):
        validate({"train": {"steps": "x"}})
