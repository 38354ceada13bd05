"""A model for the C++ runner: `keepdim lower examples/cpp/model.py:make -o model.pte`."""

import torch
from torch import nn
from torch.export import Dim


def make() -> tuple[nn.Module, tuple[torch.Tensor], tuple[dict[int, Dim]]]:
    """The model, example arguments and which of their sizes may change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval()
    sizes = {0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=256)}
    return model, (torch.randn(2, 3, 64),), (sizes,)
