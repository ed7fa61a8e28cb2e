"""Every label on heads built to deserve it, and none on heads that were built or drawn to do nothing."""

from pathlib import Path

import pytest
import torch
import yaml

from analysis.heads import describe_heads
from analysis.probes import make_probes
from configs.schema import Config
from data.loading import load_source
from model.backends import BACKENDS
from model.transformer import GPT
from tests.analysis.by_hand import CONFIG, KINDS, T, every_kind

PRESETS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_are_labelled_as_they_were_built_and_silent_ones_not_at_all(backend: str) -> None:
    probes = make_probes(load_source(CONFIG), T, sequences=8, seed=1)
    document = describe_heads(every_kind(backend), probes, True, 1, {})
    labels = {(head["layer"], head["head"]): head["labels"] for head in document["heads"]}
    assert {head: names for head, names in labels.items() if names} == KINDS
    assert document["summary"]["untyped"] == len(labels) - len(KINDS) == 6


@pytest.mark.parametrize("position", ["rotary", "learned"])
@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_model_that_has_learned_nothing_has_no_label(preset: Path, position: str) -> None:
    """The presets in small, from three seeds and in three shapes."""
    small = {"n_layer": 3, "n_head": 4, "d_model": 64, "context_length": T, "position": position}
    gone = dict.fromkeys(("n_kv_head", "d_head", "d_mlp", "rope_theta"))
    keys = yaml.safe_load(preset.read_text())["model"] | gone | small
    for seed, shape in enumerate(({}, {"n_layer": 1, "n_head": 8, "d_model": 128}, {"n_layer": 6})):
        config = Config.model_validate({"data": {"source": "repeats"}, "model": keys | shape})
        model = GPT(config.model, 65, torch.Generator().manual_seed(seed))
        probes = make_probes(load_source(config), T, sequences=4, seed=seed)
        for head in describe_heads(model, probes, True, seed, {})["heads"]:
            assert head["labels"] == [], (seed, head["layer"], head["head"], head["scores"])
