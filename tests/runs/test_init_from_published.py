"""Starting from a published model: a folder of Hugging Face's or a GGUF file in the place of an old run."""

import re
import shutil
from pathlib import Path

import pytest
import torch

import train
from configs import UserError
from configs.cli import parse
from data.loading import load_source
from data.published import BYTES
from data.tokenizers import load_tokenizer
from scripts.export import PARSER, main
from tests.model.test_published_files import small
from tests.runs.test_init_from import weights
from tests.runs.test_refusals import refused
from tests.runs.tiny import Killed, assert_same, before_update, contents, go_on, records, request, start
from training.plan import foresee
from training.runs import load_published_run, load_run

LLAMA = {"mlp": "swiglu", "norm": "rmsnorm", "n_kv_head": 1}
GPT2 = {"mlp": "gelu_tanh", "position": "learned", "bias": "true", "tie_embeddings": "true"}


@pytest.fixture(scope="module", params=[LLAMA, GPT2], ids=["llama", "gpt2"])
def made(request, tmp_path_factory) -> tuple[Path, Path, dict]:
    """A run, what was published of it, and the keys of its model."""
    folder = tmp_path_factory.mktemp("made")
    data = {"tokenizer": "bpe", "vocab_size": 270}
    run = start(folder, model=request.param, data=data, train={"steps": 10})
    main(PARSER.parse_args([str(run), "--out", str(folder / "out")]))
    return run, folder / "out", request.param


def argv(folder: Path, published: Path, keys: dict, **sections: dict) -> list[str]:
    model = {**keys, "init_from": published, **sections.pop("model", {})}
    data = {"tokenizer": "hf", **sections.pop("data", {})}
    return request(folder, **{"model": model, "data": data, "train": {"steps": 3}, **sections})


def test_a_run_begins_with_the_numbers_of_the_published_model(made, tmp_path):
    old, published, keys = made
    before = contents(published)
    assert train.main(parse(argv(tmp_path, published, keys))) == 0
    run = tmp_path / "run"
    theirs, ours = weights(old, 10), weights(run, 0)
    assert theirs.keys() | {"head.weight"} >= ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    (end,) = [record for record in records(old, "eval") if record["step"] == 10]
    assert records(run, "eval")[0] == end | {"step": 0}
    assert load_tokenizer(run / "tokenizer.json").kind == "hf"
    telemetry = records(run, "attention")
    assert [record["step"] for record in telemetry] == [0, 3]
    assert telemetry[0]["scores"] != telemetry[1]["scores"]
    assert contents(published) == before


def test_a_run_goes_on_without_the_published_model_bit_for_bit(made, tmp_path, monkeypatch):
    _, published, keys = made
    published = shutil.copytree(published, tmp_path / "published")
    for name in ("whole", "pieces"):
        (tmp_path / name).mkdir()
    assert train.main(parse(argv(tmp_path / "whole", published, keys, checkpoint={"every": 1}))) == 0

    def kill(run):
        raise Killed

    with monkeypatch.context() as patch:
        before_update(patch, 3, kill)
        with pytest.raises(Killed):
            train.main(parse(argv(tmp_path / "pieces", published, keys, checkpoint={"every": 1})))
    shutil.rmtree(published)
    assert go_on(tmp_path / "pieces" / "run") == 0
    assert_same(tmp_path / "pieces" / "run", tmp_path / "whole" / "run")


def test_a_run_that_began_so_can_be_begun_from(made, tmp_path):
    _, published, keys = made
    (tmp_path / "first").mkdir()
    assert train.main(parse(argv(tmp_path / "first", published, keys))) == 0
    assert train.main(parse(argv(tmp_path, tmp_path / "first" / "run", keys))) == 0
    theirs, ours = weights(tmp_path / "first" / "run", 3), weights(tmp_path / "run", 0)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_all_that_differs_is_told_so_that_it_can_be_copied(made, tmp_path, capsys):
    """Twice, for what is null follows other keys: n_kv_head is n_head, and differs once that is copied."""
    _, published, _ = made
    keys = {
        "mlp": "gelu",
        "n_layer": 3,
        "n_head": 1,
        "d_mlp": 40,
        "norm_eps": 0.001,
        "tie_embeddings": "false",
    }
    refusals = 0
    while train.main(parse(argv(tmp_path, published, keys))) == 2:
        refusals += 1
        (ask,) = re.findall(r"ask for (.*) \(asked: ", capsys.readouterr().err)
        keys |= dict(re.findall(r"--model\.(\w+) (\S+)", ask))
        assert refusals <= 2
    assert refusals
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("more", [{}, {"n_layer": 3}])
def test_the_base_of_the_positions_is_the_models_own_and_no_default(more, tmp_path, capsys):
    (tmp_path / "old").mkdir()
    theta, data = {"rope_theta": 100000}, {"tokenizer": "byte"}
    old = start(tmp_path / "old", model=LLAMA | theta, data=data, train={"steps": 1})
    main(PARSER.parse_args([str(old), "--out", str(tmp_path / "out")]))
    message = refused(argv(tmp_path, tmp_path / "out", LLAMA | more), tmp_path, capsys)
    assert "--model.rope_theta 100000.0" in message.split("(asked: ")[0]
    assert "may differ: model.rope_theta" not in message
    assert train.main(parse(argv(tmp_path, tmp_path / "out", LLAMA | theta))) == 0


@pytest.mark.parametrize(
    ("data", "own", "asked"),
    [
        ({"tokenizer": "char"}, "data.tokenizer hf", "data.tokenizer char"),
        (
            {"tokenizer": "bpe", "vocab_size": 300},
            "data.vocab_size null",
            "data.vocab_size 300",
        ),
    ],
)
def test_another_tokenizer_than_its_own_is_refused(data, own, asked, made, tmp_path, capsys):
    _, published, keys = made
    message = refused(argv(tmp_path, published, keys, data=data), tmp_path, capsys)
    assert all(part in text for text, part in zip(message.split("(asked: "), (own, asked), strict=True))


def test_without_bos_it_is_trained_on_without(made, tmp_path, capsys):
    _, published, keys = made
    assert train.main(parse(argv(tmp_path, published, keys, data={"bos": "false"}))) == 0
    assert load_tokenizer(tmp_path / "run" / "tokenizer.json").bos is None


def test_interventions_are_allowed_and_told(made, tmp_path, capsys):
    _, published, keys = made
    assert train.main(parse(argv(tmp_path, published, keys, model={"window": 5, "sink": "learned"}))) == 0
    told = "model.window was null, is 5, model.sink was none, is learned"
    assert told in capsys.readouterr().err
    assert not weights(tmp_path / "run", 0)["blocks.0.attention.sink_H"].any()


def test_a_table_of_positions_can_be_shortened_but_not_lengthened(tmp_path, capsys):
    (tmp_path / "old").mkdir()
    data = {"tokenizer": "byte"}
    old = start(tmp_path / "old", model={**GPT2, "context_length": 30}, data=data, train={"steps": 1})
    main(PARSER.parse_args([str(old), "--out", str(tmp_path / "out")]))
    message = refused(argv(tmp_path, tmp_path / "out", GPT2 | {"context_length": 31}), tmp_path, capsys)
    assert "--model.context_length 30 " in message.split("(asked: ")[0]
    assert train.main(parse(argv(tmp_path, tmp_path / "out", GPT2 | {"context_length": 20}))) == 0
    theirs, ours = (
        weights(run, step)["position_embedding.weight"] for run, step in ((old, 1), (tmp_path / "run", 0))
    )
    assert torch.equal(theirs[:20], ours)


def test_rotary_positions_go_on_beyond_what_the_model_was_published_with(made, tmp_path, capsys):
    _, published, keys = made
    if keys == LLAMA:
        assert train.main(parse(argv(tmp_path, published, keys | {"context_length": 40}))) == 0
        assert "model.context_length was 17, is 40" in capsys.readouterr().err


def test_a_folder_that_would_be_emptied_is_refused(made, tmp_path, capsys):
    old, published, keys = made
    shutil.copytree(old, tmp_path / "run")
    inside = shutil.copytree(published, tmp_path / "run" / "published")
    message = refused(argv(tmp_path, inside, keys, run={"overwrite": "true"}), tmp_path, capsys)
    assert f"model.init_from {inside} lies in run.dir" in message


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_folder_that_lacks_a_part_is_refused(name, made, tmp_path, capsys):
    _, published, keys = made
    copy = shutil.copytree(published, tmp_path / "copy")
    (copy / name).unlink()
    assert f"model.init_from {copy}: " in refused(argv(tmp_path, copy, keys), tmp_path, capsys)


def test_a_dry_run_foresees_it(made, tmp_path):
    old, published, keys = made
    lines = "\n".join(foresee(parse(argv(tmp_path, published, keys)).config))
    assert f"{load_run(old).model.num_parameters():,} parameters" in lines
    assert "vocabulary 270" in lines
    assert not (tmp_path / "run").exists()


def test_a_published_model_stands_where_a_run_does(made, tmp_path):
    old, published, _ = made
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n" * 99)
    run, theirs = load_published_run(published, tmp_path / "text.txt", None), load_run(old)
    assert run.config.model.context_length == 17
    assert run.tokenizer.bos is not None
    assert (run.step, run.faults, run.config.data.bos, run.model.training) == (None, [], True, False)
    data = run.config.data.model_copy(update={"cache_dir": str(tmp_path / "cache")})
    source = load_source(run.config.model_copy(update={"data": data}), run.tokenizer)
    tokens_BT = source.batch(1).inputs_BT
    with torch.no_grad():
        torch.testing.assert_close(run.model(tokens_BT), theirs.model(tokens_BT), rtol=0, atol=1e-6)
    assert load_published_run(published).config.data.source == "shakespeare"
    with pytest.raises(UserError, match="18 asked; the model has 17"):
        load_published_run(published, None, 18)


def test_a_gguf_file_is_trained_on_too(tmp_path):
    tokens = ["<s>", *BYTES, "th"]
    path = small(tmp_path / "a.gguf", tokens, **{"llama.context_length": 40})
    shape = {"n_layer": 1, "d_model": 8, "d_mlp": 12, "norm_eps": 1e-5, "tie_embeddings": "true"}
    assert train.main(parse(argv(tmp_path, path, {"mlp": "swiglu", "norm": "rmsnorm"} | shape))) == 0
    tokenizer = load_tokenizer(tmp_path / "run" / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    assert len(tokenizer.encode("the")) == 2
    assert weights(tmp_path / "run", 0)["token_embedding.weight"].eq(1).all()  # what `small` writes
    assert not weights(tmp_path / "run", 3)["token_embedding.weight"].eq(1).all()
