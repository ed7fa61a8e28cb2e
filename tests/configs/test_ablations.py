"""Each config of configs/ablations/ changes one thing of another, says which, and can be trained alone."""

import pytest
import torch
import torch.nn.functional as F

from configs.cli import flat
from model.transformer import GPT
from tests.configs.asked import ROOT, config
from training.optimizers import make_optimizers

PATHS = {path.stem: path for path in (ROOT / "configs" / "ablations").glob("*.yaml")}
HARDER = {"model.qk_norm", "model.qk_gain"}  # without a norm there is no gain after it
TURNED = {"model.position", "model.rope_theta"}  # learned positions have no wavelengths
CHANGES = {
    "qk_tied": ("separate", {"model.qk"}),
    "qk_identity": ("separate", {"model.qk"}),
    "learned": ("separate", TURNED),
    "learned_tied": ("learned", {"model.qk"}),
    "value_key": ("separate", {"model.value"}),
    "value_identity": ("separate", {"model.value"}),
    "scale_none": ("separate", {"model.scale"}),
    "scale_linear": ("separate", {"model.scale"}),
    "no_norm": ("separate", HARDER),
    "no_norm_scale_none": ("no_norm", {"model.scale"}),
    "no_norm_scale_linear": ("no_norm", {"model.scale"}),
    "kv_1": ("separate", {"model.n_kv_head"}),
    "sink_zero": ("sink_none", {"model.sink"}),
    "sink_learned": ("sink_none", {"model.sink"}),
    "sink_gate": ("sink_none", {"model.gate"}),
    "sink_zero_fast": ("sink_zero", {"optimizer.muon_lr"}),
    "sink_zero_rotary": ("sink_zero", TURNED),
    "sink_zero_no_bias": ("sink_zero", {"model.bias"}),
}


def values(path) -> dict:
    found = flat(config("--config", str(path)))
    assert found.pop("run.dir") == f"runs/ablations/{path.stem}" or path.parent.name != "ablations"
    return found


def changed(one: dict, other: dict) -> set[str]:
    return {key for key in one if one[key] != other[key]}


def test_these_are_all_and_three_seeds_of_them_are_no_more_than_sixty_trainings():
    assert PATHS.keys() == {*CHANGES, "separate", "sink_none"}
    assert 3 * len(PATHS) <= 60


@pytest.mark.parametrize("name", CHANGES)
def test_an_ablation_changes_what_it_is_about_and_its_first_lines_say_so(name):
    base, keys = CHANGES[name]
    assert changed(values(PATHS[name]), values(PATHS[base])) == keys
    comment = " ".join(line for line in PATHS[name].read_text().splitlines() if line.startswith("#"))
    assert comment.startswith("# Statement ")
    assert f"{base}.yaml" in comment
    assert any(key in comment for key in keys)


def test_the_sinks_begin_as_the_preset_does_but_for_how_often_they_are_looked_at():
    assert changed(values(PATHS["sink_none"]), values(ROOT / "configs" / "sink.yaml")) <= {
        "run.dir",
        "eval.every",
    }


@pytest.mark.parametrize("name", PATHS)
def test_an_ablation_has_all_sections_and_an_update_that_moves_its_weights(name):
    asked = config("--config", str(PATHS[name]))
    model = GPT(asked.model, 11)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tokens_BT = torch.arange(34).view(2, 17) % 11
    optimizers = make_optimizers(model, asked.optimizer)
    for _ in range(3):  # what comes before a zero matrix moves after it
        model.zero_grad()
        F.cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert not [name for name, parameter in model.named_parameters() if torch.equal(before[name], parameter)]
