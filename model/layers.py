"""Linear layers with a compute precision of their own, and the norms of the residual branches."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import Model as ModelConfig

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Linear(nn.Linear):
    """`nn.Linear` with float32 weights that multiplies in `compute_dtype`; `GPT` sets the initial weights."""

    compute_dtype = torch.float32

    def reset_parameters(self) -> None:
        """Leave the memory as it is: drawing numbers here would advance the global generator."""

    def forward(self, x: Tensor) -> Tensor:
        """`x W^T + b` in `compute_dtype`."""
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return F.linear(x.to(self.compute_dtype), self.weight.to(self.compute_dtype), bias)


def make_norm(config: ModelConfig) -> nn.Module:
    """A norm over the width C."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, config.norm_eps, elementwise_affine=config.norm_gain)
    assert config.norm_eps
    return nn.LayerNorm(config.d_model, config.norm_eps, config.norm_gain, config.bias)
