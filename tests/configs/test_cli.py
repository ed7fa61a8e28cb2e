"""Command line and YAML: what is asked is what is set; what is wrong is said, all of it at once."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError
from configs.cli import parse, parse_or_exit, read_yaml, to_yaml, validate
from configs.schema import Config

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))
FIELDS = {
    f"{name}.{key}": field
    for name, section in Config.model_fields.items()
    for key, field in section.annotation.model_fields.items()
}
COMBINATIONS = (
    [],
    ["--model.mlp", "none", "--model.position", "learned", "--model.qk_norm", "true"],
    ["--optimizer.name", "muon", "--optimizer.schedule", "linear", "--model.n_kv_head", "2"],
    ["--data.source", "text", "--data.path", "a.txt", "--model.d_head", "10", "--model.d_mlp", "7"],
    ["--data.source", "repeats"],
)


def config(*argv: str) -> Config:
    return parse(list(argv)).config


def refused(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(list(argv))
    return str(caught.value)


def value(config: Config, key: str):
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def write(folder: Path, text: str | bytes) -> str:
    path = folder / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


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


@pytest.mark.parametrize(
    "argv", [*COMBINATIONS, *(["--config", str(path)] for path in PRESETS)], ids=" ".join
)
def test_what_is_still_null_once_resolved_could_have_no_effect(argv):
    """A null that stood for some number would take that number."""
    for key in FIELDS:
        if value(config(*argv), key) is None:
            assert key.split(".")[1] in refused(*argv, f"--{key}", "0.5" if key != "model.d_mlp" else "5")


@pytest.mark.parametrize(
    ("key", "without", "with_", "word"),
    [
        ("data.path", "--data.source shakespeare", "--data.source text", "a.txt"),
        ("data.val_fraction", "--data.source repeats", "--data.source shakespeare", "0.2"),
        ("model.rope_theta", "--model.position learned", "--model.position rotary", "500"),
        ("model.d_mlp", "--model.mlp none", "--model.mlp relu2", "64"),
        ("model.qk_gain", "--model.qk_norm false", "--model.qk_norm true", "2"),
        ("optimizer.muon_lr", "--optimizer.name adamw", "--optimizer.name muon", "0.1"),
        ("optimizer.muon_momentum", "--optimizer.name adamw", "--optimizer.name muon", "0.9"),
        ("optimizer.final_lr", "--optimizer.schedule linear", "--optimizer.schedule cosine", "0.5"),
        ("optimizer.decay_share", "--optimizer.schedule cosine", "--optimizer.schedule linear", "0.5"),
    ],
)
def test_a_key_that_would_have_no_effect_is_refused(key, without, with_, word):
    assert key.split(".")[1] in refused(*without.split(), f"--{key}", word)
    assert str(value(config(*with_.split(), f"--{key}", word), key)).startswith(word)


# Everything wrong in one message


def test_all_problems_of_file_and_command_line_come_in_one_message(tmp_path):
    path = write(tmp_path, "model: {n_layers: 3, n_head: 0}\ntrain: {steps: many}\nprob: {every: 3}\n")
    message = refused(
        *("--config", path, "--optimizer.lrr", "1", "--log.every=0", "--data.tokenizer", "bpe"),
        *("--optimizer.muon_lr", "0.1", "--run.seed", "1.5"),
    )
    for words in (
        ("model.n_layers", "nearest: model.n_layer"),
        ("model.n_head", "0"),
        ("train.steps", "'many'"),
        ("prob:", "no such key"),
        ("optimizer.lrr", "nearest: optimizer.lr"),
        ("log.every", "'0'"),
        ("data.tokenizer", "'char' or 'byte'", "'bpe'"),
        ("muon_lr", "optimizer.name muon"),
        ("run.seed", "'1.5'"),
    ):
        (line,) = [line for line in message.split("\n") if words[0] in line]
        assert all(word in line for word in words), line
    assert message.startswith("9 problems")


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("steps", "train.steps"),  # the section forgotten
        ("optim.lr", "optimizer.lr"),  # the section misspelt
        ("model.n_layers", "model.n_layer"),
        ("train.batchsize", "train.batch_size"),
        ("resum", "resume"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_one(wrong, nearest):
    assert re.search(rf"{wrong}: no such key; nearest: {nearest}$", refused(f"--{wrong}", "1"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--train.steps 0", ["train.steps", "0"]),
        ("--train.steps 1e3", ["train.steps", "1e3"]),
        ("--train.steps=", ["train.steps", "''"]),
        ("--model.dropout 1", ["model.dropout", "1"]),
        ("--optimizer.lr nan", ["optimizer.lr", "nan"]),
        ("--optimizer.lr inf", ["optimizer.lr", "inf"]),
        ("--model.mlp swiglu", ["model.mlp", "'gelu', 'relu2' or 'none'", "swiglu"]),
        ("--model.bias perhaps", ["model.bias", "perhaps"]),
        ("--model.context_length 16", ["model.context_length", "17", "16"]),
        ("--model.n_head 3", ["d_model 128", "n_head 3", "d_head"]),
        ("--model.n_kv_head 3", ["n_head 4", "n_kv_head 3"]),
        ("--model.d_head 5", ["rotary", "even", "5"]),
        ("--model.init zero_residual --model.tie_embeddings true", ["zero_residual", "tie_embeddings"]),
        ("--data.source text", ["data.path"]),
        ("--run.dir null", ["run.dir"]),
        ("stray", ["stray"]),
        ("-x", ["-x"]),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_that_names_key_and_value(argv, words):
    message = refused(*argv.split())
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "argv", [["--config", ""], ["--resume", ""], ["--run"], ["--train", "5"]], ids=" ".join
)
def test_nothing_on_the_command_line_is_accepted_and_then_ignored(argv, capsys):
    with pytest.raises((UserError, SystemExit)) as caught:
        parse(argv)
    assert getattr(caught.value, "code", 2) == 2


# Files


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- train\n- model\n", ["sections"]),
        ("5\n", ["sections"]),
        ("train: 5\n", ["sections"]),
        ("train: [1, 2]\n", ["sections"]),
        ("train: {steps: 3\n", ["not YAML", "line 2"]),
        ("train:\n\tsteps: 3\n", ["not YAML", "line 2"]),
        ("run: !!python/object/apply:os.system ['true']\n", ["not YAML"]),
        (b"\x00\x01\x02\x03", ["not YAML"]),
        (b"train: \xff\xfe\n", ["utf-8", "position 7"]),
        ("1: {2: 3}\n", ["1: keys should be strings"]),
        ("trian: {steps: 3}\n", ["trian", "no such key"]),
        ("train: {steps: 3}\nmodel: {}\ntrain: {batch_size: 3}\n", ["train"]),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_line(text, words, tmp_path):
    message = refused("--config", write(tmp_path, text))
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_missing_file_is_answered_with_the_presets(tmp_path):
    message = refused("--config", str(tmp_path / "none.yaml"))
    assert "\n" not in message
    assert all(preset.name in message for preset in PRESETS)


def test_a_folder_is_no_configuration(tmp_path):
    message = refused("--config", str(tmp_path))
    assert "\n" not in message
    assert str(tmp_path) in message


# Resuming

SAVED = ["--model.qk_norm", "true", "--optimizer.schedule", "linear"]
OTHER = {
    "model.n_layer": "5",
    "model.n_head": "8",
    "model.n_kv_head": "2",
    "model.d_model": "64",
    "model.d_head": "16",
    "model.d_mlp": "64",
    "model.mlp": "relu2",
    "model.norm": "rmsnorm",
    "model.norm_gain": "false",
    "model.position": "learned --model.rope_theta null",
    "model.rope_theta": "500",
    "model.context_length": "32",
    "model.bias": "true",
    "model.tie_embeddings": "true",
    "model.qk_norm": "false --model.qk_gain null",
    "model.qk_gain": "2",
    "model.logit_softcap": "15",
    "model.embed_norm": "true",
    "model.init": "zero_residual",
    "run.seed": "2",
    "data.source": "repeats --data.val_fraction null",
    "data.tokenizer": "byte",
    "data.bos": "false",
    "data.val_fraction": "0.2",
    "optimizer.name": "muon",
}
FREE = {
    "train.steps": "2000",
    "optimizer.lr": "0.1",
    "model.dropout": "0.5",
    "model.backend": "naive",
    "eval.every": "7",
    "probe.every": "0",
    "checkpoint.keep_last": "9",
    "log.every": "3",
    "data.cache_dir": "elsewhere",
}


@pytest.fixture
def run(tmp_path) -> str:
    (tmp_path / "config.yaml").write_text(to_yaml(config(*SAVED)))
    return str(tmp_path)


@pytest.mark.parametrize("key", OTHER)
def test_a_resumed_run_keeps_what_its_weights_hang_on(key, run):
    message = refused("--resume", run, f"--{key}", *OTHER[key].split())
    assert re.search(rf"\b{key} \(was .*, asked {OTHER[key].split()[0]}", message, re.IGNORECASE), message
    assert "\n" not in message


@pytest.mark.parametrize("key", FREE)
def test_a_resumed_run_may_change_the_rest(key, run):
    request = parse(["--resume", run, f"--{key}", FREE[key]])
    assert str(value(request.config, key)) == FREE[key]
    assert request.resume == Path(run)


def test_every_key_of_the_model_is_one_or_the_other():
    """A new key must not slip past the check."""
    assert {key for key in FIELDS if key.startswith("model.")} == {
        key for key in (*OTHER, *FREE) if key.startswith("model.")
    }


def test_a_resumed_run_lives_where_it_is_now(run):
    assert parse(["--resume", run]).config.run.dir == run


def test_a_resumed_run_cannot_be_sent_to_another_folder(run):
    assert "run.dir" in refused("--resume", run, "--run.dir", run + "/elsewhere")


def test_config_and_resume_exclude_each_other(run):
    message = refused("--resume", run, "--config", str(PRESETS[0]))
    assert "--config" in message
    assert "--resume" in message


@pytest.mark.parametrize("name", ["", "nowhere", "weights.safetensors"])
def test_what_is_no_run_cannot_be_resumed(name, tmp_path):
    (tmp_path / "weights.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    message = refused("--resume", str(tmp_path / name))
    assert "run folder" in message
    assert "config.yaml" in message
    assert "\n" not in message


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
    assert {"config", "resume", "print_config"} < set(entries)


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


def test_many_problems_end_with_code_2_and_one_message(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_or_exit(["--train.steps", "x", "--model.n_layer", "y"])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: 2 problems")
    assert printed.err.count("\n") == 3


def test_validate_reads_no_files():
    assert validate({"train": {"steps": 3}}).train.steps == 3
    with pytest.raises(UserError, match=r"train\.steps"):
        validate({"train": {"steps": "x"}})


@pytest.mark.parametrize("text", ["model: {n_layer: yes}\n", "optimizer: {lr: true}\n", "model: {mlp: no}\n"])
def test_yes_and_no_are_not_numbers_or_names(text, tmp_path):
    assert "true or false" in refused("--config", write(tmp_path, text))
