"""A model that loses its batch size in ExecuTorch's own flow. `keepdim audit` shows where (README.md)."""

import torch
from torch import nn
from torch.export import Dim


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, length, 8]
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return (q @ k.transpose(1, 2)).softmax(-1) @ v


def make() -> tuple[nn.Module, tuple[torch.Tensor], tuple[dict[int, Dim]]]:
    """The model, example arguments and which of their sizes may change."""
    torch.manual_seed(0)
    sizes = {0: Dim("batch", min=1, max=32), 1: Dim("length", min=1, max=512)}
    return Attention().eval(), (torch.randn(3, 5, 8),), (sizes,)
