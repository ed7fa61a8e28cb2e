"""From a run to a folder that `transformers` loads, and back: the same logits, the same tokens."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs import UserError
from configs.cli import parse
from data.published import read_tokenizer
from model.interop import to_published
from model.transformer import GPT
from scripts import exits
from scripts.export import PARSER, main
from tests.configs.test_cli import PROBE
from tests.runs.tiny import PRESETS, ROOT, contents, start
from training.runs import load_run

OFF = {"every": 0}
LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "n_kv_head": 1}
GPT2 = {"position": "learned", "bias": True, "tie_embeddings": True, "mlp": "gelu_tanh"}
TEXT = "12 is 0 and 0 is 12.\n"


def make_run(folder: Path, data: dict, model: dict) -> Path:
    return start(folder, data=data, model=model, train={"steps": 3}, eval=OFF, probe=OFF)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Context 17, weights of steps 0 and 3."""
    kinds = {
        "llama": ({"tokenizer": "bpe", "vocab_size": 280}, LLAMA),
        "gpt2": ({"tokenizer": "char"}, GPT2),
        "no bos": ({"tokenizer": "byte", "bos": False}, LLAMA),
        "window": ({"tokenizer": "byte"}, LLAMA | {"window": 5, "qk_norm": True}),
    }
    return {name: make_run(tmp_path_factory.mktemp("run"), *kind) for name, kind in kinds.items()}


def export(run: Path, out: Path, *more: str) -> None:
    main(PARSER.parse_args([str(run), "--out", str(out), *more]))


@pytest.mark.parametrize("name", ["llama", "gpt2", "no bos"])
def test_the_folder_gives_the_logits_and_tokens_of_the_run(name, runs, tmp_path, capsys):
    export(runs[name], tmp_path / "out")
    run, model = load_run(runs[name]), AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens_BT = tokenizer(TEXT[:14], return_tensors="pt").input_ids
    bos = [] if run.tokenizer.bos is None else [run.tokenizer.bos]
    assert tokens_BT[0].tolist() == [*bos, *run.tokenizer.encode(TEXT[:14]).tolist()]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens_BT).logits, run.model(tokens_BT), atol=1e-4, rtol=0)
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 17
    printed = capsys.readouterr().out
    assert all(f"{kind}.from_pretrained('{tmp_path / 'out'}')" in printed for kind in ("LM", "Tokenizer"))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_it_goes_on_from_bos_alone(name, runs, tmp_path):
    export(runs[name], tmp_path / "out")
    run, model = load_run(runs[name]), AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.generation_config.bos_token_id == model.config.eos_token_id == run.tokenizer.bos
    tokens_BT = torch.tensor([[run.tokenizer.bos]])
    drawn_BT = model.generate(
        tokens_BT, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    for _ in range(12):
        with torch.no_grad():
            tokens_BT = torch.cat([tokens_BT, run.model(tokens_BT)[:, -1:].argmax(-1)], dim=1)
    assert drawn_BT.tolist() == tokens_BT.tolist()


def test_a_run_that_trains_an_exported_one_on_goes_out_again(runs, tmp_path):
    export(runs["llama"], tmp_path / "out")
    on = {"tokenizer": "hf"}, LLAMA | {"norm_eps": 2**-23, "init_from": tmp_path / "out"}
    run = make_run(tmp_path, *on)
    export(run, tmp_path / "again")
    first, again = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("out", "again"))
    assert first(TEXT).input_ids == again(TEXT).input_ids
    assert first.bos_token_id == again.bos_token_id
    export(run, tmp_path / "begin", "--checkpoint", "0")
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "begin")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_files_are_those_that_others_expect(runs, tmp_path):
    export(runs["llama"], tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    settings = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names == {*settings, "model.safetensors"}
    assert b'"format":"pt"' in (tmp_path / "out" / "model.safetensors").read_bytes()[:2000].replace(b" ", b"")
    assert read_tokenizer(tmp_path / "out").bos == load_run(runs["llama"]).tokenizer.bos
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_the_checkpoint_is_the_one_asked_for(runs, tmp_path):
    export(runs["llama"], tmp_path / "first", "--checkpoint", "0")
    export(runs["llama"], tmp_path / "last", "--checkpoint", "3")
    export(runs["llama"], tmp_path / "newest")
    first, last, newest = (load_file(tmp_path / n / "model.safetensors") for n in ("first", "last", "newest"))
    name = "model.embed_tokens.weight"
    assert torch.equal(first[name], load_run(runs["llama"], 0).model.token_embedding.weight)
    assert not torch.equal(first[name], last[name])
    assert all(torch.equal(last[name], newest[name]) for name in last)


def test_an_empty_folder_may_be_there_and_its_parents_need_not(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for out in ("empty", "new/of/new"):
        export(runs["gpt2"], Path(out))
        assert (tmp_path / out / "model.safetensors").exists()


def goes_out(*words: str) -> bool:
    config = parse([*words, "--model.n_layer", "1"]).config.model
    try:
        to_published(GPT(config, 65))
    except UserError:
        return False
    return True


def test_the_page_says_which_presets_can_go_out():
    page = (ROOT / "docs" / "published.md").read_text()
    said = {
        *re.findall(r"configs/\w+\.yaml", page[page.index("Of the presets") : page.index("as they\nare")])
    }
    assert said == {f"configs/{path.name}" for path in PRESETS if goes_out("--config", str(path))}
    (line,) = re.findall(r"train.py (--config .* --model\.mlp swiglu)", page)
    assert goes_out(*line.split())


# What it refuses


def command(*argv: str) -> subprocess.CompletedProcess:
    words = [sys.executable, "-c", PROBE, str(ROOT / "scripts" / "export.py"), *argv]
    environment = {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["{run}"], "--out"),
        (["{run}", "--out", "{tmp}/full"], "no empty folder"),
        (["{run}", "--out", "{tmp}/full/file"], "no empty folder"),
        (["{tmp}/full", "--out", "{tmp}/out"], "full"),
        (["{run}", "--out", "{tmp}/out", "--checkpoint", "many"], "--checkpoint"),
    ],
)
def test_a_wrong_request_is_one_line_and_leaves_nothing(argv, said, runs, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("kept")
    before = contents(tmp_path)
    done = command(*(word.format(tmp=tmp_path, run=runs["llama"]) for word in argv))
    assert done.stdout == "\nexit 2 []\n"  # and without the slow imports
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert contents(tmp_path) == before


def test_options_that_no_published_architecture_has_are_named(runs, tmp_path):
    with pytest.raises(UserError, match=r"model\.qk_norm true, model\.window 5") as caught:
        export(runs["window"], tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [*tmp_path.iterdir()] == []


def test_a_step_that_was_not_kept_is_refused(runs, tmp_path):
    with pytest.raises(UserError, match="step"):
        export(runs["llama"], tmp_path / "out", "--checkpoint", "2")
    assert [*tmp_path.iterdir()] == []


def test_an_exported_run_of_an_instruct_model_ends_as_that_does(runs, tmp_path):
    export(runs["llama"], tmp_path / "out")
    made = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    named = made.id_to_token(5)
    made.add_special_tokens([named])  # an EOS of its own, within the model's rows
    made.save(str(tmp_path / "out" / "tokenizer.json"))
    about = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) | {"eos_token": named}
    (tmp_path / "out" / "tokenizer_config.json").write_text(json.dumps(about))
    for bos in (True, False):
        on = {"tokenizer": "hf", "bos": bos}, LLAMA | {"norm_eps": 2**-23, "init_from": tmp_path / "out"}
        (tmp_path / str(bos)).mkdir()
        run, again = make_run(tmp_path / str(bos), *on), tmp_path / f"again {bos}"
        export(run, again)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(again), AutoTokenizer.from_pretrained(again)
        assert {model.config.eos_token_id, model.generation_config.eos_token_id, tokenizer.eos_token_id} == {
            5
        }
        assert tokenizer.bos_token_id == load_run(run).tokenizer.bos


HALF = """
import signal, sys
from pathlib import Path
import safetensors.torch
from scripts import exits
from scripts.export import PARSER, main

def half(tensors, path, metadata):
    Path(path).write_bytes(b"half")
    print("half", flush=True)
    signal.pause()

safetensors.torch.save_file = half
with exits():
    main(PARSER.parse_args(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_process_that_is_told_to_end_leaves_nothing(number, runs, tmp_path):
    words = [sys.executable, "-c", HALF, str(runs["gpt2"]), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"half\n"
        assert [path.name.startswith("tmp-out-") for path in tmp_path.iterdir()] == [True]
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert process.stderr.read() == b""
    assert [*tmp_path.iterdir()] == []


def test_handlers_of_signals_come_back_and_one_that_is_ignored_stays_so():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with exits():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGHUP), before, strict=True):
            signal.signal(number, handler)


def test_a_name_that_is_too_long_is_a_wrong_request(runs, tmp_path):
    done = command(str(runs["gpt2"]), "--out", str(tmp_path / ("x" * 300)))
    assert "\nexit 2 " in done.stdout
    assert done.stderr.count("\n") == 1
    assert "File name too long" in done.stderr
    assert [*tmp_path.iterdir()] == []


class Interrupted(BaseException):
    """Nothing catches it."""


@pytest.mark.parametrize(
    ("error", "raised"), [(OSError(28, "No space left on device"), UserError), (Interrupted(), Interrupted)]
)
def test_what_ends_half_way_leaves_nothing(error, raised, runs, tmp_path, monkeypatch):
    def failing(tensors, path, metadata):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", failing)
    with pytest.raises(raised):
        export(runs["gpt2"], tmp_path / "out")
    assert [*tmp_path.iterdir()] == []


def test_json_is_readable(runs, tmp_path):
    export(runs["gpt2"], tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"]) == ("gpt2", config["bos_token_id"] + 1)
