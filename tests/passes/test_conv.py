"""Convolutions with what follows them: folded and fused, in whatever layout the engine keeps their images."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import keepdim
from keepdim.artifact import pte

SIZES = {0: Dim("batch", min=1, max=4), 2: Dim("height", min=8, max=40), 3: Dim("width", min=8, max=40)}
POINTS = ((1, 8, 8), (2, 17, 33), (4, 40, 40), (1, 8, 8), (3, 9, 40))


def with_statistics(model: nn.Module) -> nn.Module:
    """Batch norms as after training: statistics and weights of their own."""
    torch.manual_seed(1)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            for t in (m.running_mean, m.running_var, m.weight, m.bias):
                t.data.uniform_(0.5, 1.5)
    return model.eval().requires_grad_(False)


def ops_of(module: keepdim.Module) -> Counter[str]:
    """How often each op is in the delegates of a file."""
    return Counter(n.op for d in pte.delegates(module.path) if d.program is not None for n in d.program.walk())


def attrs_of(module: keepdim.Module, name: str) -> list[Any]:
    """An attribute of every convolution."""
    (delegate,) = pte.delegates(module.path)
    assert delegate.program is not None
    return [n.attrs.get(name) for n in delegate.program.walk() if n.op == "conv"]


class Residual(nn.Module):
    """Two convolutions with batch norm, a shortcut, and what follows."""

    def __init__(self, activation: nn.Module):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(24, 40, 3, padding=1, bias=False), nn.BatchNorm2d(40), activation)
        self.second = nn.Sequential(nn.Conv2d(40, 24, 1), nn.BatchNorm2d(24))
        self.last = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x)) + x)


ACTIVATIONS = {
    "relu": nn.ReLU(), "relu6": nn.ReLU6(), "hardswish": nn.Hardswish(), "hardsigmoid": nn.Hardsigmoid(),
    "silu": nn.SiLU(), "gelu": nn.GELU(), "sigmoid": nn.Sigmoid(), "tanh": nn.Tanh(),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_residual_block_is_two_nodes(name: str, engine: str) -> None:
    """Batch norm is in the weights, shortcut and activation are in the convolution; NaN stays NaN."""
    model = with_statistics(Residual(ACTIVATIONS[name]))
    module = keepdim.lower(model, (torch.randn(2, 24, 11, 13),), dynamic_shapes=(SIZES,), engine=engine)
    assert ops_of(module) == {"conv": 2}
    assert attrs_of(module, "activation") == [name, name]
    for batch, height, width in POINTS:
        x = torch.randn(batch, 24, height, width) * 3
        x[0, 0, 0, 0] = torch.nan
        torch.testing.assert_close(module(x), model(x), rtol=1e-5, atol=1e-5, equal_nan=True)


class Layouts(nn.Module):
    """Convolutions with everything between them that has to keep, or give up, their layout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 20, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(20, 20, 3, padding=1, groups=20)
        self.gate = nn.Sequential(nn.Conv2d(20, 8, 1), nn.ReLU(), nn.Conv2d(8, 20, 1), nn.Hardsigmoid())
        self.norm = nn.BatchNorm2d(20)
        self.up = nn.ConvTranspose2d(20, 12, 2, stride=2)
        self.mixed = nn.Conv2d(32, 16, 3, padding=2, dilation=2)
        self.scale = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.stem(x)
        x = self.depthwise(x) * self.gate(x.mean((2, 3), keepdim=True))
        y = F.max_pool2d(self.norm(x), 3, stride=1, padding=1) + F.avg_pool2d(x, 3, stride=1, padding=1)
        y = torch.cat([self.up(F.avg_pool2d(y, 2, ceil_mode=True))[..., : y.shape[2], : y.shape[3]], y], 1)
        y = F.interpolate(self.mixed(y), scale_factor=2.0)
        z = self.scale(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return z, F.adaptive_avg_pool2d(y, 1).flatten(1)


def test_layouts(engine: str) -> None:
    """Whatever layout an image has inside, results are eager's and contiguous."""
    model = with_statistics(Layouts())
    module = keepdim.lower(model, (torch.randn(2, 3, 12, 14),), dynamic_shapes=(SIZES,), engine=engine)
    for batch, height, width in POINTS:
        x = torch.randn(batch, 3, height, width)
        for got, want in zip(module(x), model(x), strict=True):
            assert got.is_contiguous()
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # sums of 288 products in another order


def test_threads_change_no_bit(threads: Any) -> None:
    """Every sum is of the same products in the same order."""
    module = keepdim.lower(with_statistics(Layouts()), (torch.randn(2, 3, 12, 14),), dynamic_shapes=(SIZES,))
    x = torch.randn(3, 3, 40, 37)
    results = []
    for n in (1, 2, 3):
        threads(n)
        results.append(module(x))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_convolution_that_is_read_twice_stays(engine: str) -> None:
    """Its own result is wanted too: nothing may be folded into it."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 20, 3), nn.BatchNorm2d(20)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.conv(x)
            return self.norm(y), y.relu()

    model = with_statistics(Twice())
    module = keepdim.lower(model, (torch.randn(2, 3, 12, 14),), dynamic_shapes=(SIZES,), engine=engine)
    assert attrs_of(module, "activation") == [None]
    for batch, height, width in POINTS:
        x = torch.randn(batch, 3, height, width)
        for got, want in zip(module(x), model(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
