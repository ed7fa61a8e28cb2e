"""AdamW, and Muon for the matrices of the blocks."""

from collections import defaultdict

import torch
from torch import Tensor, nn

from configs.schema import Optimizer as OptimizerConfig
from training.distributed import gathered, part_of


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised: `W -= lr sqrt(max(1, rows / columns)) U V^T`.

    Jordan et al. 2024, kellerjordan.github.io/posts/muon. Matrices of one shape go through the iteration
    together, which is most of the time of an update. A matrix of which every rank has a part goes through it
    whole, on every rank.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of all matrices that have a gradient."""
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for (rows, columns), parameters in by_shape.items():
                gradients = [parameter.grad for parameter in parameters]
                buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in parameters]
                torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
                momenta = torch._foreach_lerp(gradients, buffers, group["momentum"])
                updates = orthogonalise(torch.stack([gathered(one) for one in momenta]))
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                parts = [part_of(one, like) for one, like in zip(updates, parameters, strict=True)]
                torch._foreach_add_(parameters, parts, alpha=-rate)


def orthogonalise(matrices: Tensor) -> Tensor:
    """About `U V^T` of each `U S V^T`, N x rows x columns: five Newton-Schulz steps in bfloat16."""
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT.bfloat16() if tall else matrices.bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return (x.mT if tall else x).to(matrices.dtype)


def make_optimizers(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """The optimizers of all parameters; each group remembers its peak rate as `peak_lr`."""
    named = dict(model.named_parameters())
    matrices = {n: p for n, p in named.items() if n.startswith("blocks.") and p.dim() == 2}
    muon = matrices if config.name == "muon" else {}
    rest = [p for name, p in named.items() if name not in muon]
    groups = [
        {"params": [p for p in rest if p.dim() == 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},  # norms and biases are not decayed
    ]
    betas = (config.beta1, config.beta2)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, config.lr, betas, fused=True)]
    if config.muon_lr is not None and config.muon_momentum is not None:
        optimizers.append(Muon(list(muon.values()), config.muon_lr, config.muon_momentum))
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["peak_lr"] = group["lr"]
    return optimizers
