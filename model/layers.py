"""Linear layers with a compute precision of their own, and the two norms."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import Model as ModelConfig


class Linear(nn.Linear):
    """`nn.Linear` with float32 weights that multiplies in `compute_dtype`. Initialised by `GPT`, not here."""

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__(in_features, out_features, bias)
        self.compute_dtype = torch.float32

    def reset_parameters(self) -> None:
        """Leave the memory as it is: drawing numbers here would advance the global generator."""

    def forward(self, x: Tensor) -> Tensor:
        """`x W^T + b` in `compute_dtype`."""
        dtype = self.compute_dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x.to(dtype), self.weight.to(dtype), bias)


def make_norm(config: ModelConfig) -> nn.Module:
    """The norm of a residual branch, over the width C."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, elementwise_affine=config.norm_gain)
    return nn.LayerNorm(config.d_model, elementwise_affine=config.norm_gain, bias=config.bias)
