"""Statistics of a model that has learned induction, rather than of random or hand-made heads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from analysis.ablation import add_ablation
from analysis.heads import describe_heads
from analysis.probes import make_probes, measure
from configs.cli import parse
from configs.schema import Config
from data.loading import load_source
from model.backends import BACKENDS
from model.transformer import GPT

PRESET = Path(train.__file__).parent / "configs/induction.yaml"
STEPS = 250
ARGUMENTS = (
    f"--train.steps {STEPS} --train.precision fp32 --optimizer.warmup_steps 10 --optimizer.decay_share 0 "
    "--eval.every 0 --probe.every 0 --checkpoint.every 0 --log.wandb disabled"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """The preset, with a short warm-up, for as long as it takes to form the head: 7 seconds on 2 cores."""
    folder = tmp_path_factory.mktemp("induction") / "run"
    request = parse(["--config", str(PRESET), *ARGUMENTS.split(), "--run.dir", str(folder)])
    assert train.main(request) == 0
    return request.config, folder / f"checkpoints/step-{STEPS:08d}/model.safetensors"


@pytest.fixture(scope="module")
def records(trained: tuple[Config, Path]) -> dict[str, dict]:
    config, weights = trained
    source = load_source(config)
    probes = make_probes(source, config.model.context_length, sequences=16, seed=1)
    records = {}
    for backend in BACKENDS:
        model = GPT(
            config.model.model_copy(update={"backend": backend}),
            source.tokenizer.vocab_size,
            torch.Generator(),
        )
        model.load_state_dict(load_file(weights))
        records[backend] = measure(model, probes, bos_trained=True)
    return records


def test_an_induction_head_has_formed_in_the_second_layer(records: dict[str, dict]) -> None:
    scores = {name: torch.tensor(score_LH) for name, score_LH in records["naive"]["scores"].items()}
    first, second = scores["induction"]
    assert second.max() > 0.4
    assert first.max() < 0.1
    assert scores["duplicate"][1, second.argmax()] < second.max() / 2
    losses = records["naive"]["model"]
    assert losses["repeat_loss_2"] < 0.5 < 3.5 < losses["repeat_loss_1"]


@pytest.mark.parametrize("backend", ["sdpa", "blocks"])
def test_backends_agree_on_every_statistic(backend: str, records: dict[str, dict]) -> None:
    expected, got = records["naive"], records[backend]
    assert got["scores"].keys() == expected["scores"].keys()
    largest = max(max(row) for row in expected["scores"]["max_logit"])
    for name, score_LH in expected["scores"].items():
        value_LH = torch.tensor(got["scores"][name])
        assert value_LH.shape == (2, 4)
        assert value_LH.isfinite().all()
        bound = 1e-6 * max(10.0, largest) if name == "max_logit" else 1e-5
        assert (value_LH - torch.tensor(score_LH)).abs().max() <= bound, name
    assert got["model"] == pytest.approx(expected["model"], abs=1e-4)
    assert got["probe"] == expected["probe"]


def test_the_second_repeat_is_lost_without_the_induction_heads_and_not_without_any_untyped_one(
    trained: tuple[Config, Path],
) -> None:
    config, weights = trained
    source = load_source(config)
    probes = make_probes(source, config.model.context_length, sequences=16, seed=1)
    model = GPT(config.model, source.tokenizer.vocab_size)
    model.load_state_dict(load_file(weights))
    document = describe_heads(model, probes, True, 1, {})
    add_ablation(document, model, probes, "all", seed=1)
    groups = {group["label"]: group for group in document["summary"]["ablation"]["groups"]}
    untyped = [head["ablation"] for head in document["heads"] if not head["labels"]]
    assert 0 < len(untyped) < 8
    for kind in ("mean", "zero"):
        assert groups["induction"][kind]["repeat"]["ci"][0] > 2
        for effect in untyped:
            assert abs(effect[kind]["repeat"]["change"]) < 0.5
    baseline = document["summary"]["ablation"]["baseline"]["repeat"]
    assert baseline == pytest.approx(document["summary"]["repeat_loss_2"], abs=1e-6)
