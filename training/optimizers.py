"""AdamW, and Muon for the matrices of the blocks."""

from collections import defaultdict

import torch
from torch import Tensor, nn

from configs.schema import Optimizer as OptimizerConfig

# A quintic Newton-Schulz iteration that brings singular values near 1 (Jordan et al. 2024,
# kellerjordan.github.io/posts/muon).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised: `W -= lr sqrt(max(1, rows / columns)) U V^T` (Jordan et al. 2024).

    Matrices of one shape go through the iteration together, which is most of the time of an update.
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
                updates = orthogonalise(
                    torch.stack(torch._foreach_lerp(gradients, buffers, group["momentum"]))
                )
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                torch._foreach_add_(parameters, list(updates.unbind()), alpha=-rate)


def orthogonalise(matrices: Tensor) -> Tensor:
    """About `U V^T` of each `U S V^T` in a stack `N x rows x columns`, computed in bfloat16."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def make_optimizers(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """The optimizers of all parameters; each group remembers its peak rate as `peak_lr`."""
    in_muon = [
        config.name == "muon" and name.startswith("blocks.") and parameter.dim() == 2
        for name, parameter in model.named_parameters()
    ]
    matrices = [p for p, taken in zip(model.parameters(), in_muon, strict=True) if taken]
    rest = [p for p, taken in zip(model.parameters(), in_muon, strict=True) if not taken]
    groups = [
        {"params": [p for p in rest if p.dim() == 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},  # norms and biases are not decayed
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, config.lr, (config.beta1, config.beta2), fused=True)
    ]
    if config.muon_lr is not None and config.muon_momentum is not None:
        optimizers.append(Muon(matrices, config.muon_lr, config.muon_momentum))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers
