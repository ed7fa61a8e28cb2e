"""Muon against PyTorch's own and against the singular value decomposition; who trains which parameter."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from configs.cli import parse
from configs.schema import Model, Optimizer
from model.transformer import GPT
from training.optimizers import Muon, make_optimizers, orthogonalise

PRESETS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
SHAPES = [(16, 16), (24, 8), (8, 24), (1, 9), (9, 1)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def conditioned(rows: int, columns: int, smallest: float, count: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Matrices with singular values from 1 down to `smallest`, as `U`, `V^T` and `U S V^T`."""
    U, _, Vh = torch.linalg.svd(randn(count, rows, columns), full_matrices=False)
    S = torch.linspace(1, smallest, min(rows, columns))
    return U, Vh, (U * S) @ Vh


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_orthogonalising_brings_singular_values_near_1_and_keeps_the_singular_vectors(rows, columns):
    U, Vh, matrices = conditioned(rows, columns, 0.1)
    found = orthogonalise(matrices)
    inner = U.mT @ found @ Vh.mT  # diagonal where the singular vectors are the same
    values = inner.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert (inner - values.diag_embed()).abs().max() < 0.06  # five steps in bfloat16
    assert found.dtype == torch.float32


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1e6])
def test_orthogonalising_does_not_depend_on_the_size_of_the_gradient(scale):
    _, _, matrices = conditioned(12, 20, 0.1)
    expected = orthogonalise(matrices) if scale > 1e-7 else torch.zeros_like(matrices)
    torch.testing.assert_close(orthogonalise(matrices * scale), expected, atol=0.03, rtol=0)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_each_matrix_of_a_stack_is_on_its_own_and_no_gradient_means_no_move(rows, columns):
    _, _, matrices = conditioned(rows, columns, 0.1)
    matrices[1] = 0
    together = orthogonalise(matrices)
    assert not together[1].any()
    for i in range(3):
        torch.testing.assert_close(together[i], orthogonalise(matrices[i : i + 1])[0], atol=0.02, rtol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.95])
def test_muon_moves_as_the_muon_of_pytorch(momentum):
    mine = [nn.Parameter(randn(*shape, seed=i)) for i, shape in enumerate([*SHAPES, *SHAPES])]
    theirs = copy.deepcopy(mine)
    optimizer = Muon(mine, 0.1, momentum)
    reference = torch.optim.Muon(
        theirs, lr=0.1, weight_decay=0.0, momentum=momentum, nesterov=True, adjust_lr_fn="original"
    )
    for step in range(6):
        for i, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            one.grad = randn(*one.shape, seed=100 * step + i)
            other.grad = one.grad.clone()
        before = [parameter.detach().clone() for parameter in mine]
        optimizer.step()
        reference.step()
        for was, one, other in zip(before, mine, theirs, strict=True):
            moved = (one - was).norm()
            assert moved > 0.05
            assert (one - other).norm() < 0.02 * moved  # rounding in bfloat16
            other.data.copy_(one)


def test_muon_leaves_a_parameter_without_gradient_where_it_is():
    still, moving = nn.Parameter(randn(4, 4)), nn.Parameter(randn(4, 4))
    moving.grad = randn(4, 4, seed=1)
    Muon([still, moving], 0.1, 0.9).step()
    assert torch.equal(still, randn(4, 4))
    assert not torch.equal(moving, randn(4, 4))


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"bias": True, "position": "learned", "tie_embeddings": True},
        {"mlp": "none", "norm": "rmsnorm", "norm_gain": False},
        {"n_kv_head": 1, "qk_norm": True},
        {"qk": "tied", "value": "key", "mlp": "swiglu", "sink": "learned", "gate": True},
        {"qk": "identity", "value": "identity", "mlp": "swiglu", "bias": True},
    ],
    ids=str,
)
def test_every_parameter_is_trained_once_and_decay_is_for_matrices_only(name, values):
    model = GPT(Model(n_layer=2, n_head=2, d_model=8, **values), 11)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [
        (optimizer, group)
        for optimizer in make_optimizers(model, Optimizer(name=name, weight_decay=0.3))
        for group in optimizer.param_groups
    ]
    trained = [names[parameter] for _, group in groups for parameter in group["params"]]
    assert sorted(trained) == sorted(names.values())
    for optimizer, group in groups:
        for parameter in group["params"]:
            is_muon = isinstance(optimizer, Muon)
            assert is_muon == (
                name == "muon" and names[parameter].startswith("blocks.") and parameter.dim() == 2
            )
            if not is_muon:
                assert group["weight_decay"] == (0.3 if parameter.dim() == 2 else 0)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_one_update_of_a_preset_moves_every_parameter_that_has_a_gradient(path):
    small = ["--model.d_model", "16", "--model.n_layer", "2", "--model.n_head", "2", "--model.n_kv_head", "2"]
    config = parse(["--config", str(path), *small]).config
    model = GPT(config.model, 11)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tokens_BT = torch.arange(22).view(2, 11) % 11
    nn.functional.cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten()).backward()
    for optimizer in make_optimizers(model, config.optimizer):
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(before[name], parameter) == (not parameter.grad.any()), name


def test_adamw_starts_as_the_sign_of_the_gradient_and_decays_on_its_own():
    """The first step of Adam is lr * sign(g); decay takes lr * decay of a matrix and nothing of a bias."""
    model = GPT(Model(n_layer=1, n_head=2, d_model=8, bias=True), 11)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    (optimizer,) = make_optimizers(model, Optimizer(lr=0.01, weight_decay=0.5))
    optimizer.step()
    for name, parameter in model.named_parameters():
        decayed = before[name] * (1 - 0.01 * 0.5) if parameter.dim() == 2 else before[name]
        torch.testing.assert_close(parameter.detach(), decayed - 0.01)
