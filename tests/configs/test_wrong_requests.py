"""What is wrong is said, all of it at once, and a resumed run keeps what its weights hang on."""

import re
from pathlib import Path

import pytest

from configs import UserError
from configs.cli import parse, parse_or_exit, to_yaml
from tests.configs.asked import FIELDS, PRESETS, config, refused, value, write

# Everything wrong in one message


def test_all_problems_of_file_and_command_line_come_in_one_message(tmp_path):
    path = write(tmp_path, "model: {n_layers: 3, n_head: 0}\ntrain: {steps: many}\nprob: {every: 3}\n")
    message = refused(
        *("--config", path, "--optimizer.lrr", "1", "--log.every=0", "--data.tokenizer", "words"),
        *("--optimizer.muon_lr", "0.1", "--run.seed", "1.5"),
    )
    for words in (
        ("model.n_layers", "nearest: model.n_layer"),
        ("model.n_head", "0"),
        ("train.steps", "'many'"),
        ("prob:", "no such key"),
        ("optimizer.lrr", "nearest: optimizer.lr"),
        ("log.every", "'0'"),
        ("data.tokenizer", "'char', 'byte', 'bpe'", "'words'"),
        ("muon_lr", "optimizer.name muon"),
        ("run.seed", "'1.5'"),
    ):
        (line,) = [line for line in message.split("\n") if words[0] in line]
        assert all(word in line for word in words), line
    assert message.startswith("9 problems")


def test_a_problem_of_several_sections_has_no_empty_place_in_front():
    assert (
        refused("--data.tokenizer", "hf") == "data.tokenizer hf is that of model.init_from, which is not set"
    )


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
        (f"--train.steps {10**12 + 1}", ["train.steps", "less than or equal to 1000000000000"]),
        (f"--train.steps {10**400}", ["train.steps", "less than or equal to 1000000000000"]),
        ("--train.steps 1e3", ["train.steps", "1e3"]),
        ("--train.steps=", ["train.steps", "''"]),
        ("--model.dropout 1", ["model.dropout", "1"]),
        ("--optimizer.lr nan", ["optimizer.lr", "nan"]),
        ("--optimizer.lr inf", ["optimizer.lr", "inf"]),
        ("--model.mlp glu", ["model.mlp", "'gelu', 'gelu_tanh', 'relu2', 'swiglu' or 'none'", "glu"]),
        ("--model.scale 0.5", ["model.scale", "'sqrt', 'none' or 'linear'", "0.5"]),
        ("--model.window 0", ["model.window", "0"]),
        ("--model.window 64", ["window 64", "no narrower", "context_length 64"]),
        ("--model.window 65", ["window 65", "no narrower", "context_length 64"]),
        ("--model.qk tied --model.n_kv_head 2", ["qk tied", "as many key heads", "n_head 4, n_kv_head 2"]),
        ("--model.qk identity --model.n_kv_head 1", ["qk identity", "as many key heads", "n_kv_head 1"]),
        (
            "--model.value identity --model.n_kv_head 2",
            ["value identity", "as many key heads", "n_kv_head 2"],
        ),
        ("--model.qk identity --model.d_head 8", ["qk identity", "n_head d_head = d_model 128", "d_head 8"]),
        ("--model.value identity --model.d_head 64", ["value identity", "= d_model 128", "d_head 64"]),
        ("--model.qk_norm true --model.qk_gain 1e-25", ["model.qk_gain", "0.0001", "1e-25"]),
        ("--model.qk_norm true --model.qk_gain 1001", ["model.qk_gain", "1000", "1001"]),
        ("--model.logit_softcap 1000001", ["model.logit_softcap", "1000000"]),
        ("--run.dir null", ["run.dir", "got null"]),
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


def test_many_problems_end_with_code_2_and_one_message(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_or_exit(["--train.steps", "x", "--model.n_layer", "y"])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: 2 problems")
    assert printed.err.count("\n") == 3


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


@pytest.mark.parametrize("text", ["model: {n_layer: yes}\n", "optimizer: {lr: true}\n", "model: {mlp: no}\n"])
def test_yes_and_no_are_not_numbers_or_names(text, tmp_path):
    assert "true or false" in refused("--config", write(tmp_path, text))


@pytest.mark.parametrize("key", ["mask_documents", "streaming"])
@pytest.mark.parametrize("given", ["yes", "false", "null"])
def test_a_switch_that_may_be_left_open_takes_yes_no_and_null(key, given, tmp_path):
    text = f"data: {{source: hf, path: x.txt, tokenizer: byte, {key}: {given}}}\n"
    default = {"mask_documents": False, "streaming": True}[key]
    found = value(config("--config", write(tmp_path, text)), f"data.{key}")
    assert found is {"yes": True, "false": False, "null": default}[given]


# Resuming

SAVED = ["--model.qk_norm", "true", "--optimizer.schedule", "linear"]
OTHER = {
    "model.init_from": "runs/other",
    "model.n_layer": "5",
    "model.n_head": "8",
    "model.n_kv_head": "2",
    "model.d_model": "64",
    "model.d_head": "16",
    "model.d_mlp": "64",
    "model.mlp": "relu2",
    "model.norm": "rmsnorm",
    "model.norm_gain": "false",
    "model.norm_eps": "0.001",
    "model.position": "learned --model.rope_theta null",
    "model.rope_theta": "500",
    "model.context_length": "32",
    "model.bias": "true",
    "model.tie_embeddings": "true",
    "model.qk_norm": "false --model.qk_gain null",
    "model.qk_gain": "2",
    "model.sink": "learned",
    "model.gate": "true",
    "model.scale": "none",
    "model.qk": "tied",
    "model.value": "key",
    "model.window": "9",
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
