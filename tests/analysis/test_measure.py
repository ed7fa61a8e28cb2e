"""The attention record: complete, the same on every backend, and taken without a trace."""

import json
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import analysis.probes
from analysis.probes import Probes, look, make_probes, measure, summary
from analysis.rows import Rows
from analysis.statistics import REGISTRY, statistic
from configs.ranks import Ranks
from configs.schema import Config
from data.loading import load_source
from model.backends import BACKENDS
from model.transformer import GPT
from tests.model.models import KINDS, build_random

T = 32


def probes_of_repeats(bos: bool = True) -> Probes:
    config = {"data": {"source": "repeats", "bos": bos}, "model": {"context_length": T}}
    return make_probes(load_source(Config.model_validate(config)), T, sequences=3, seed=1)


def model_for_repeats(kind: str = "grouped", **changes: object) -> GPT:
    """Random weights, and a vocabulary for the 64 symbols and BOS."""
    return build_random(kind, std=0.3, vocab_size=65, **changes)


@pytest.fixture
def registered() -> Iterator[Callable]:
    """`statistic`, whose additions are taken back afterwards."""
    before = dict(REGISTRY)
    yield statistic
    REGISTRY.clear()
    REGISTRY.update(before)


@pytest.mark.parametrize("bos", [True, False])
def test_a_record_holds_every_statistic_of_every_head_and_is_valid_json(bos: bool) -> None:
    record = measure(model_for_repeats(n_layer=3), probes_of_repeats(bos), bos_trained=bos)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    repeat = {name for name, (probe, _) in REGISTRY.items() if probe == "repeat"}
    wanted = set(REGISTRY) | {f"{name}_{part}" for name in repeat for part in ("short", "long")}
    assert set(record["scores"]) == (wanted if bos else wanted - {"sink_no_bos"})
    for name, score_LH in record["scores"].items():
        assert [len(row) for row in score_LH] == [4, 4, 4], name
        assert torch.tensor(score_LH).isfinite().all(), name
    assert record["probe"]["bos"] == record["probe"]["bos_trained"] == bos
    assert record["probe"]["block_lengths"] == [7, 15]
    assert record["probe"]["skipped_rows"] == record["probe"]["nonfinite"] == 0
    assert set(record["model"]) == {"repeat_loss_1", "repeat_loss_2", "icl_score"}


def test_the_headline_of_a_repeat_statistic_is_the_smaller_of_both_lengths() -> None:
    scores = measure(model_for_repeats(), probes_of_repeats(), True)["scores"]
    for name in ("induction", "duplicate"):
        headline, short, long = (torch.tensor(scores[key]) for key in (name, f"{name}_short", f"{name}_long"))
        assert torch.equal(headline, short.minimum(long))
        assert (short != long).any()


@pytest.mark.parametrize("kind", KINDS)
def test_backends_give_the_same_record(kind: str) -> None:
    records = {
        name: measure(model_for_repeats(kind, backend=name), probes_of_repeats(), True) for name in BACKENDS
    }
    largest = torch.tensor(records["naive"]["scores"]["max_logit"]).abs().max().item()
    for backend in ("sdpa", "blocks"):
        for name, score_LH in records["naive"]["scores"].items():
            bound = 1e-6 * max(10.0, largest) if name == "max_logit" else 1e-5
            got = torch.tensor(records[backend]["scores"][name])
            torch.testing.assert_close(
                got, torch.tensor(score_LH), atol=bound, rtol=0, msg=lambda m, n=name: n + m
            )
        assert records[backend]["model"] == pytest.approx(records["naive"]["model"], abs=1e-5)
        assert records[backend]["probe"] == records["naive"]["probe"]


def test_losses_are_those_of_the_places_they_are_said_to_be_of() -> None:
    """From one forward pass: repeats without the first token of a block, text at the stated places."""
    model, probes = model_for_repeats(), probes_of_repeats()
    record = measure(model, probes, True)

    def losses(tokens_BT: Tensor) -> Tensor:
        """Loss at place t is that of predicting token t + 1."""
        logprobs = model(tokens_BT[:, :-1]).log_softmax(-1)
        return -logprobs.gather(-1, tokens_BT[:, 1:, None]).squeeze(-1)

    s, repeat, text = 15, losses(probes["repeat_long"].tokens_BT), losses(probes["text"].tokens_BT)
    early, late = (text[:, slice(*places)].mean() for places in record["probe"]["icl_places"])
    # Tokens 2 ... s of the first block stand at places 2 ... s and are predicted one place earlier.
    assert record["model"]["repeat_loss_1"] == pytest.approx(repeat[:, 1:s].mean().item(), rel=1e-5)
    assert record["model"]["repeat_loss_2"] == pytest.approx(repeat[:, s + 1 : 2 * s].mean().item(), rel=1e-5)
    assert record["model"]["icl_score"] == pytest.approx((late - early).item(), abs=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_measuring_twice_gives_the_same_numbers_and_touches_nothing(backend: str) -> None:
    model, probes = model_for_repeats(backend=backend, dropout=0.3), probes_of_repeats()
    model.train()
    model.blocks[1].eval()
    model.attentions()[1].train()
    model(probes["text"].tokens_BT).sum().backward()
    modes = [module.training for module in model.modules()]
    weights = [p.clone() for p in model.parameters()]
    gradients = [p.grad.clone() for p in model.parameters()]
    state = torch.get_rng_state()

    assert measure(model, probes, True) == measure(model, probes, True)

    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert True in modes
    assert False in modes
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), weights, strict=True))
    assert all(torch.equal(p.grad, before) for p, before in zip(model.parameters(), gradients, strict=True))
    assert torch.is_grad_enabled()


def test_a_statistic_of_ones_own_appears_in_the_record(registered: Callable) -> None:
    @registered("on_third_key")
    def on_third_key(rows: Rows) -> Tensor:
        return rows.mean(rows.weight(torch.full_like(rows.i, 2)), first=2)

    @registered("on_first_of_repeat", probe="repeat")
    def on_first(rows: Rows) -> Tensor:
        return rows.mean(rows.weight(0 * rows.i))

    scores = measure(model_for_repeats(), probes_of_repeats(), True)["scores"]
    for name in ("on_third_key", "on_first_of_repeat", "on_first_of_repeat_short", "on_first_of_repeat_long"):
        value_LH = torch.tensor(scores[name])
        assert value_LH.shape == (2, 4)
        assert ((value_LH > 0) & (value_LH < 1)).all()


@pytest.mark.parametrize("value", [torch.zeros(()), torch.zeros(3), torch.zeros(4, 1)])
def test_a_statistic_of_another_shape_is_named_and_the_model_left_as_it_was(
    value: Tensor, registered: Callable
) -> None:
    registered("of_another_shape")(lambda rows: value)
    model = model_for_repeats().train()
    with pytest.raises(ValueError, match=r"of_another_shape.*4"):
        measure(model, probes_of_repeats(), True)
    assert all(module.training for module in model.modules())
    assert [len(layer.observers) for layer in model.attentions()] == [0, 0]
    assert torch.is_grad_enabled()


def test_a_name_that_is_taken_is_refused(registered: Callable) -> None:
    with pytest.raises(ValueError, match="'entropy' exists"):
        registered("entropy")(lambda rows: torch.zeros(4))


def test_a_number_that_is_not_finite_becomes_none_and_is_counted(registered: Callable) -> None:
    numbers = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])
    registered("broken")(lambda rows: numbers)
    record = measure(model_for_repeats(), probes_of_repeats(), True)
    assert record["scores"]["broken"] == [[1.0, None, None, None]] * 2
    assert record["probe"]["nonfinite"] == 6
    json.dumps(record, allow_nan=False)


def test_a_loss_that_is_not_finite_becomes_none_and_is_counted() -> None:
    model = model_for_repeats()
    with torch.no_grad():
        model.head.weight.fill_(torch.nan)
    record = measure(model, probes_of_repeats(), True)
    assert record["model"] == {"repeat_loss_1": None, "repeat_loss_2": None, "icl_score": None}
    assert record["probe"]["nonfinite"] == 3
    assert "induction" in summary(record)


def test_a_token_that_is_not_finite_leaves_no_healthy_number_behind_it() -> None:
    """The last token of one text becomes NaN: the queries before it are well, and must not stand for all."""
    model, probes = model_for_repeats(), probes_of_repeats()
    with torch.no_grad():
        model.token_embedding.weight[probes["text"].tokens_BT[0, -1]] = torch.nan
    record = measure(model, probes, True)
    assert record["scores"]["previous"] == [[None] * 4] * 2
    assert record["probe"]["skipped_rows"] == 0


def test_the_summary_names_the_strongest_head() -> None:
    record = {
        "scores": {
            "previous": [[0.1, 0.9], [0.2, None]],
            "induction": [[0, 0], [0, 0.5]],
            "sink": [[None, None]] * 2,
        },
        "model": {"repeat_loss_2": 0.123},
    }
    line = summary(record)
    assert "previous 0.90 (0.1)" in line
    assert "induction 0.50 (1.1)" in line
    assert "0.12" in line


@pytest.mark.parametrize("number", [2, 3, 7])
def test_passes_are_shared_out_and_the_record_of_all_is_that_of_one_process(number, monkeypatch):
    model, probes, made, told = model_for_repeats(), probes_of_repeats(), [], []
    monkeypatch.setattr(
        analysis.probes, "look", lambda m, name, probe: made.append(name) or look(m, name, probe)
    )
    for rank in range(number):
        measure(model, probes, True, Ranks(rank, number, lambda x: told.append(x.clone()) or x))
    assert sorted(made) == sorted(probes)
    assert len(told) == number  # one reduction each
    alone = measure(model, probes, True)
    for rank in range(number):
        assert measure(model, probes, True, Ranks(rank, number, lambda x: sum(told))) == alone
