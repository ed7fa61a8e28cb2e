"""Losses of micro-steps add up to that of the batch; scaling hides an overflow from no optimizer."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from data.sources import IGNORED, Batch
from training.step import micro_losses, unscale

V, T = 11, 6


def batch(size: int, ignored: float = 0.0, segment: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(1)
    rows_BT = torch.randint(V, (size, T + 1), generator=generator)
    targets_BT = rows_BT[:, 1:].clone()
    targets_BT[torch.rand(size, T, generator=generator) < ignored] = IGNORED
    targets_BT[:, 0] = 0  # a window without a target would have no loss
    segment_BT = torch.arange(size * T).view(size, T) if segment else None
    return Batch(rows_BT[:, :-1], targets_BT, segment_BT)


def bigrams(x_BT: torch.Tensor, cache: None) -> torch.Tensor:
    table_VV = torch.randn(V, V, generator=torch.Generator().manual_seed(2))
    return table_VV[x_BT]


@pytest.mark.parametrize("ignored", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_losses_add_up_to_the_mean_over_counted_targets_however_they_fall_into_micro_steps(size, ignored):
    whole = batch(6, ignored)
    expected = F.cross_entropy(bigrams(whole.inputs_BT, None).flatten(0, 1), whole.targets_BT.flatten())
    losses = list(micro_losses(whole, size, 0, 1, 0, bigrams))
    assert len(losses) == 6 // size
    assert sum(losses).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_micro_step_that_is_all_padding_costs_nothing_and_changes_nothing():
    whole = batch(4)
    whole.targets_BT[2:] = IGNORED
    expected = F.cross_entropy(bigrams(whole.inputs_BT, None).flatten(0, 1), whole.targets_BT.flatten())
    loss, nothing = micro_losses(whole, 2, 0, 1, 0, bigrams)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert nothing.item() == 0


def test_each_micro_step_sees_its_own_documents_and_none_is_told_where_all_is_one():
    seen = []

    def forward(x_BT, cache, *segment):
        assert cache is None
        seen.append(segment)
        return bigrams(x_BT, cache)

    whole = batch(4, segment=True)
    list(micro_losses(whole, 2, 0, 1, 0, forward))
    assert torch.equal(torch.cat([segment for (segment,) in seen]), whole.segment_BT)
    seen.clear()
    list(micro_losses(batch(4), 2, 0, 1, 0, forward))
    assert seen == [(), ()]


def test_the_masks_of_dropout_hang_on_the_seed_alone_and_differ_between_micro_steps():
    def masks(seed: int) -> list[torch.Tensor]:
        found = []

        def forward(x_BT, cache):
            found.append(F.dropout(torch.ones(50)))
            return bigrams(x_BT, cache)

        list(micro_losses(batch(4), 2, seed, 1, 0, forward))
        return found

    first, second = masks(1)
    torch.rand(3)
    assert all(map(torch.equal, masks(1), (first, second)))
    assert not torch.equal(first, second)
    assert not torch.equal(first, masks(2)[0])


# Loss scaling


def pair(*gradients: float) -> tuple[list[nn.Parameter], list[torch.optim.Optimizer]]:
    """A parameter and an optimizer for each gradient."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor([gradient, 1.0])
    return parameters, [torch.optim.SGD([parameter], 1.0) for parameter in parameters]


def scaler(enabled: bool = True) -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
    made.scale(torch.ones(()))
    return made


def test_gradients_lose_the_scale_exactly():
    parameters, optimizers = pair(8 / 3, -16.0)
    assert not unscale(made := scaler(), optimizers)
    assert made.get_scale() == 8
    for parameter, gradient in zip(parameters, (torch.tensor(8 / 3) / 8, -2.0), strict=True):
        assert torch.equal(parameter.grad, torch.tensor([gradient, 0.125]))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1])
def test_an_overflow_in_the_gradients_of_either_optimizer_halves_the_scale(place, bad):
    gradients = [1.0, 1.0]
    gradients[place] = bad
    made = scaler()
    assert unscale(made, pair(*gradients)[1])
    assert made.get_scale() == 4


def test_without_scaling_nothing_is_touched_and_nothing_is_skipped():
    parameters, optimizers = pair(math.inf, 0.1)
    assert not unscale(made := scaler(enabled=False), optimizers)
    assert made.get_scale() == 1
    assert [parameter.grad[0].item() for parameter in parameters] == [math.inf, pytest.approx(0.1)]


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_the_losses_of_all_ranks_add_up_to_that_of_the_global_batch_however_targets_fall_on_them(ranks):
    """The first rank has no target at all."""
    whole = batch(6)
    whole.targets_BT[::ranks] = IGNORED
    expected = F.cross_entropy(bigrams(whole.inputs_BT, None).flatten(0, 1), whole.targets_BT.flatten())
    losses = [list(micro_losses(whole, 1, 0, ranks, rank, bigrams)) for rank in range(ranks)]
    assert [len(own) for own in losses] == [6 // ranks] * ranks
    assert sum(losses[0]) == 0
    assert sum(map(sum, losses)).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_rank_takes_every_so_manieth_row_and_has_masks_of_its_own():
    whole, rows, masks = batch(6), [], []

    def forward(x_BT, cache):
        rows.append(x_BT)
        masks.append(F.dropout(torch.ones(50)))
        return bigrams(x_BT, cache)

    for rank in range(2):
        list(micro_losses(whole, 3, 7, 2, rank, forward))
    assert torch.equal(torch.stack(rows, dim=1).flatten(0, 1), whole.inputs_BT)
    assert not torch.equal(*masks)
