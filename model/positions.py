"""Rotary positions (Su et al. 2021, 2104.09864): queries and keys turn with their place."""

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Turns `(x[i], x[i + D/2])` at place t by the angle `t theta^(-2i/D)`: scores see only distances."""

    def __init__(self, d_head: int, length: int, theta: float):
        super().__init__()
        frequency = theta ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
        angle_TF = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
        self.register_buffer("cos_TF", angle_TF.cos().float(), persistent=False)
        self.register_buffer("sin_TF", angle_TF.sin().float(), persistent=False)
        self.cos_TF: Tensor
        self.sin_TF: Tensor

    def forward(self, x_BHTD: Tensor, first: int = 0) -> Tensor:
        """`x_BHTD`, which stands at the places from `first` on, turned: same shape, the tables' precision."""
        last = first + x_BHTD.size(2)
        cos, sin = self.cos_TF[first:last], self.sin_TF[first:last]
        left, right = x_BHTD.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
