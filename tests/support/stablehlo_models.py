"""Models that tests/stablehlo/ takes to StableHLO, each with its contract and the sizes to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

TEXT = """func.func public @main(%arg0: tensor<?xf32>) -> tensor<?xf32> {
  %cst = stablehlo.constant dense<1.0> : tensor<f32>
  %0 = stablehlo.get_dimension_size %arg0, dim = 0 : (tensor<?xf32>) -> tensor<i32>
  %1 = stablehlo.reshape %0 : (tensor<i32>) -> tensor<1xi32>
  %2 = stablehlo.dynamic_broadcast_in_dim %cst, %1, dims = [] : (tensor<f32>, tensor<1xi32>) -> tensor<?xf32>
  %3 = stablehlo.add %arg0, %2 : tensor<?xf32>
  return %3 : tensor<?xf32>
}
"""  # add_one with a dynamic size


class AddOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Views(nn.Module):
    """Linear over a view of batch * seq_len rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq_len = x.size(0), x.size(1)
        return self.linear(x.view(batch * seq_len, 64)).view(batch, seq_len, 64)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up, self.down = (
            nn.LayerNorm(32),
            *(nn.Linear(32, 64) for _ in "ab"),
            nn.Linear(64, 32),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = (t.view(b, n, 4, 8).transpose(1, 2) for t in self.qkv(x).split(32, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, n, d))


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> Any:
        y = F.max_pool2d(self.conv(x), 2)
        return y, F.avg_pool2d(y, 2, ceil_mode=True), F.adaptive_avg_pool2d(y, 1)


class BySize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.shape[0] > 16, lambda x: x.sin(), lambda x: x.cos() * 2, (x,))


class ByData(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos() * 2, (x,))


class Nonzero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x > 0)


class MaskedSelect(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.masked_select(x, x > 0).exp()


class Masked(nn.Module):
    """By a mask, and arithmetic over how many there were."""

    def forward(self, x: torch.Tensor) -> Any:
        y = x[x > 0]
        return y * 2, y.sum() / y.shape[0]


class Unique(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.unique((x * 3).long(), return_inverse=True, return_counts=True)


class Item(nn.Module):
    """A size that is read from a tensor."""

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> Any:
        n = k.item()
        torch._check(n >= 0)
        torch._check(n <= 16)
        return torch.arange(n) * n, x.sum()


@dataclass
class Model:
    make: Callable[[], nn.Module]
    args: Callable[[int], tuple[Any, ...]]
    shapes: Any
    example: int
    sizes: tuple[int, ...]


def dim(name: str, hi: int = 256, lo: int = 1) -> Any:
    return Dim(name, min=lo, max=hi)


r = torch.randn
N = ({0: dim("n")},)
S = (1, 5, 17, 100, 256)
MODELS = {
    "add_one": Model(AddOne, lambda n: (r(n),), N, 7, S),
    "views": Model(Views, lambda n: (r(1, n, 64),), ({1: dim("seq_len")},), 3, S),
    "feed forward": Model(FeedForward, lambda n: (r(1, n, 32),), ({1: dim("seq_len")},), 3, S),
    "attention": Model(Attention, lambda n: (r(1, n, 32),), ({1: dim("seq_len", 64)},), 3, (1, 2, 17, 63, 64)),
    "two symbols": Model(
        Attention,
        lambda n: (r(n % 7 + 1, n, 32),),
        ({0: dim("batch", 8), 1: dim("seq_len", 64)},),
        3,
        (1, 2, 17, 63, 64),
    ),
    "image": Model(Image, lambda n: (r(2, 3, n, 16),), ({2: dim("height", 64, 8)},), 20, (8, 9, 21, 63, 64)),
    "cond on a size": Model(BySize, lambda n: (r(n),), N, 7, (1, 16, 17, 100, 256)),
    "cond on data": Model(ByData, lambda n: (r(n) + 0.3 * (-1) ** n,), N, 7, (1, 16, 17, 100, 256)),
}
BY_DATA = {
    "nonzero": Model(Nonzero, lambda n: (r(n),), N, 7, (1, 5, 100, 256)),
    "masked_select": Model(MaskedSelect, lambda n: (r(n),), N, 7, (1, 5, 100, 256)),
    "mask": Model(Masked, lambda n: (r(n, 4).abs(),), N, 7, (1, 5, 100, 256)),
    "unique": Model(Unique, lambda n: (r(n),), N, 7, (1, 5, 100, 256)),
    "item": Model(Item, lambda n: (r(n), torch.tensor(n % 17)), (N[0], None), 7, (1, 5, 100, 256)),
}
