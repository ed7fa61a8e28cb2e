"""`python -m scripts.eval_heads` on runs as training leaves them."""

import csv
import json
import re
import shutil

import pytest
import torch

from configs import UserError
from scripts import eval_heads
from tests.runs.tiny import TEXT, contents, records, start
from tests.wandb_tools import Told

FILES = {"heads.json", "heads.csv", "heads.png", "heads.svg", "report.html"}
TREEBANK = "".join(
    f"1\t{n}\t_\tDET\t_\t_\t2\tdet\t_\t_\n2\tis\t_\tNOUN\t_\t_\t0\troot\t_\t_\n3\t{n}\t_\tVERB\t_\t_\t2\tobj\t_\t_\n"
    f"4\tand\t_\tX\t_\t_\t3\tobl\t_\t_\n5\t{n}\t_\tX\t_\t_\t4\tadvmod\t_\t_\n\n"
    for n in (1, 2, 3, 4, 5, 6)
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return start(tmp_path_factory.mktemp("finished"), checkpoint={"keep_last": 9})


@pytest.fixture
def run(finished, tmp_path):
    """A copy that a test may change, without what training made of it at its end."""
    ends = shutil.ignore_patterns("heads.json", "report.html")
    return shutil.copytree(finished, tmp_path / "run", ignore=ends)


def serve(*words):
    eval_heads.main(eval_heads.PARSER.parse_args([str(word) for word in words]))


def document(folder):
    return json.loads((folder / "heads.json").read_text())


def page(folder):
    return json.loads(
        re.search(r'type="application/json">(.*?)</script>', (folder / "report.html").read_text())[1]
    )


def by_head(found):
    return {
        name: torch.tensor([head["scores"][name] for head in found["heads"]])
        for name in found["heads"][0]["scores"]
    }


def test_the_scores_are_those_of_the_last_telemetry_record(run, capsys):
    serve(run)
    last, found = records(run, "attention")[-1], document(run)
    for name, score_N in by_head(found).items():
        assert score_N.tolist() == pytest.approx(
            torch.tensor(last["scores"][name]).flatten().tolist(), abs=1e-6
        ), name
    assert {name: found["summary"][name] for name in last["model"]} == pytest.approx(last["model"], abs=1e-6)
    assert last["probe"].items() <= found["probe"].items()
    assert {path.name for path in run.iterdir()} > FILES
    told = capsys.readouterr().out
    assert "untyped" in told
    assert f"{run}: heads.json" in told


def test_an_older_checkpoint_has_the_scores_of_then_in_a_folder_of_its_own(run):
    before = contents(run)
    serve(run, "--checkpoint", 10, "--ablate", "none")
    then = next(record for record in records(run, "attention") if record["step"] == 10)
    found = document(run / "heads-10")
    assert found["model"]["step"] == 10
    for name, score_N in by_head(found).items():
        assert score_N.tolist() == pytest.approx(
            torch.tensor(then["scores"][name]).flatten().tolist(), abs=1e-6
        ), name
    assert {name: data for name, data in contents(run).items() if not name.startswith("heads-10")} == before


def test_all_checkpoints_make_a_timeline_that_ends_with_the_newest(run, tmp_path):
    serve(run, "--checkpoint", "all", "--out", tmp_path / "out")
    found = document(tmp_path / "out")
    timeline = found["summary"]["timeline"]
    assert timeline["steps"] == [0, 5, 10, 15, 20]
    probed = records(run, "attention")
    for name in ("repeat_loss_1", "repeat_loss_2"):
        assert timeline[name] == pytest.approx([record["model"][name] for record in probed], abs=1e-6)
    assert by_head(found)["sink"].tolist() == torch.tensor(timeline["scores"]["sink"][-1]).flatten().tolist()
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES


def test_a_damaged_checkpoint_is_left_out_of_the_timeline_and_named(run, tmp_path, capsys):
    (run / "checkpoints/step-00000010/model.safetensors").write_bytes(b"no")
    serve(run, "--checkpoint", "all", "--out", tmp_path / "out", "--ablate", "none")
    assert document(tmp_path / "out")["summary"]["timeline"]["steps"] == [0, 5, 15, 20]
    assert "step-00000010" in capsys.readouterr().err


def test_a_text_that_has_changed_since_is_told(run, tmp_path, capsys):
    """The probes are made of it: their scores are not those of the records."""
    serve(run, "--ablate", "none", "--out", tmp_path / "out")
    assert "differ" not in capsys.readouterr().err
    config = (run / "config.yaml").read_text()
    text = tmp_path / "text.txt"
    text.write_text(TEXT.replace("0 is", "1 is"))
    (run / "config.yaml").write_text(re.sub("path: .*text.txt", f"path: {text}", config))
    serve(run, "--ablate", "none", "--out", tmp_path / "out")
    assert "the data differ" in capsys.readouterr().err


def test_records_that_cannot_be_read_are_told_before_the_work(run, tmp_path):
    (run / "metrics.jsonl").write_text('{"kind": 1}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        serve(run, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_head_is_removed_or_none(run, tmp_path):
    serve(run, "--ablate", "all")
    assert all(head["ablation"] for head in document(run)["heads"])
    serve(run, "--ablate", "none", "--out", tmp_path / "none")
    assert not any(head["ablation"] for head in document(tmp_path / "none")["heads"])


def test_the_table_has_the_scores_and_the_page_the_texts_asked_for(run):
    serve(run, "--text", "3 is 0.\n", "--text", "2 and 2")
    rows = list(csv.DictReader((run / "heads.csv").read_text().splitlines()))
    found = by_head(document(run))["sink"].tolist()
    assert [float(row["sink"]) for row in rows] == pytest.approx(found, rel=1e-6)
    shown = [text["tokens"] for text in page(run)["runs"][0]["attention"]]
    assert ["BOS", "2", "␣", "a", "n", "d", "␣", "2"] in shown
    assert ["BOS", "3", "␣", "i", "s", "␣", "0", ".", "⏎"] in shown


def test_a_treebank_gives_relations_beside_their_baselines(run, tmp_path):
    (tmp_path / "tiny.conllu").write_text(TREEBANK)
    serve(run, "--treebank", tmp_path / "tiny.conllu", "--ablate", "none")
    found = document(run)["summary"]["syntax"]
    assert (found["treebank"], found["sentences"]) == ("tiny.conllu", 6)
    assert {"obl", "advmod"} & found["relations"].keys()


def test_precision_and_sequences_are_what_was_asked_for(run, tmp_path):
    serve(run, "--precision", "bf16", "--sequences", 3, "--out", tmp_path / "out", "--ablate", "none")
    found = document(tmp_path / "out")
    assert found["probe"]["sequences"] == 3
    assert found["model"]["precision"] == "bf16"
    serve(run, "--sequences", 3, "--ablate", "none")
    differ = (by_head(found)["entropy"] - by_head(document(run))["entropy"]).abs()
    assert 0 < differ.max() < 0.05


def test_weights_and_biases_gets_the_table_and_the_picture(run, wandb_alone):
    serve(run, "--wandb", "offline", "--ablate", "none", "--out", run / "evaluation")
    told = Told(run / "evaluation")
    table = json.loads((told.folder / "files" / told.summary["heads"]["path"]).read_text())
    assert table["columns"][:3] == ["layer", "head", "labels"]
    assert len(table["data"]) == 4
    assert list((told.folder / "files/media/images").rglob("*.png"))


def test_nothing_that_was_found_is_lost_where_ablation_is_broken_off(run, monkeypatch):
    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("analysis.ablation.add_ablation", broken)
    with pytest.raises(KeyboardInterrupt):
        serve(run)
    assert all(head["scores"] for head in document(run)["heads"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "one of the arguments RUN --hf is required"),
        (["RUN", "--hf", "RUN"], "--hf: not allowed with argument RUN"),
        (["NOWHERE"], "no run folder"),
        (["RUN", "--checkpoint", "last"], "--checkpoint: invalid step value: 'last'"),
        (["RUN", "--checkpoint", "7"], "no checkpoint of step 7 .* 0, 5, 10, 15, 20"),
        (["RUN", "--sequences", "0"], "--sequences: invalid positive value: '0'"),
        (["RUN", "--context", "64"], "go with --hf"),
        (["RUN", "--corpus", "x.txt"], "go with --hf"),
        (["--hf", "RUN", "--checkpoint", "all"], "one set of weights"),
        (["--hf", "NOWHERE"], "nowhere"),
        (["RUN", "--treebank", "NOWHERE"], "nowhere"),
        (["RUN", "--text", "Ω"], "'Ω'"),
        (["RUN", "--text", ""], "the text is empty"),
        (["RUN", "--out", "RUN/config.yaml/heads"], "cannot write"),
        (["RUN", "--out", "RUN/config.yaml"], "config.yaml"),
        (["RUN", "--device", "cuda"], "cuda"),
    ],
)
def test_wrong_requests_are_one_line_and_write_nothing(run, tmp_path, words, said):
    if torch.cuda.is_available() and "cuda" in words:
        pytest.skip("there is one")
    places = {"RUN": str(run), "NOWHERE": str(tmp_path / "nowhere")}
    words = [places.get(word, word.replace("RUN/", f"{run}/")) for word in words]
    before = contents(tmp_path)
    with pytest.raises(UserError, match=said) as caught:
        serve(*words)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path) == before


def test_the_global_generator_is_left_alone(run):
    state = torch.get_rng_state()
    serve(run, "--ablate", "none")
    assert torch.equal(torch.get_rng_state(), state)
