"""Convolution kernels at every width of their tiles, against eager in f64."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import keepdim

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
}


class Layer(nn.Module):
    def __init__(self, conv: nn.Module, activation: str = "none", residual: bool = False):
        super().__init__()
        self.conv, self.activation, self.residual = conv, ACTIVATIONS[activation], residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self.activation(y + x if self.residual else y)


def check(model: nn.Module, channels: int, sizes: list[tuple[int, int, int]], low: int = 1) -> None:
    """A layer lowered once, at sizes [batch, height, width] that were never traced, and back at the first."""
    torch.manual_seed(0)
    model = model.eval().requires_grad_(False)
    dims = {0: Dim("batch", min=1, max=5), 2: Dim("height", min=low, max=40), 3: Dim("width", min=low, max=40)}
    lowered = keepdim.lower(model, (torch.randn(2, channels, low + 3, low + 4),), dynamic_shapes=(dims,))
    assert len(lowered.report.delegates) == 1
    exact = copy.deepcopy(model).double()
    for shape in [*sizes, sizes[0]]:
        x = torch.randn(shape[0], channels, *shape[1:])
        want = exact(x.double())
        torch.testing.assert_close(lowered(x).double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().mean()))


@pytest.mark.parametrize("kernel, stride", [(3, 1), (3, 2), (5, 1), (5, 2), (7, 1), (7, 2)])
def test_depthwise_of_every_width(kernel: int, stride: int) -> None:
    """Widths around those of the tiles (1, 4, 7, 8), smaller than the window too; channels that end inside a vector."""
    conv = nn.Conv2d(37, 37, kernel, stride, kernel // 2, groups=37)
    check(Layer(conv, "hardswish"), 37, [(1, 1 + w % 3, w) for w in range(1, 35)])


def test_depthwise_with_a_residual() -> None:
    conv = nn.Conv2d(32, 32, 5, padding=2, groups=32, bias=False)
    check(Layer(conv, "silu", residual=True), 32, [(3, 7, 7), (1, 14, 14), (2, 1, 40), (5, 3, 5)])


def test_depthwise_without_padding() -> None:
    check(Layer(nn.Conv2d(16, 16, (3, 5), (1, 2), groups=16)), 16, [(1, 5, 5), (2, 9, 40), (1, 6, 17)], low=5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("residual", [False, True])
def test_pointwise(activation: str, residual: bool) -> None:
    """Columns that fill one vector, both, and part of the second; pixels that fill tiles of every height."""
    sizes = [(1, 1, n) for n in range(1, 14)] + [(5, 1, 1), (2, 25, 25), (3, 40, 33)]
    for columns in (16, 24, 32, 40):
        check(Layer(nn.Conv2d(columns, columns, 1), activation, residual), columns, sizes)


@pytest.mark.parametrize("channels, kernel", [(600, 1), (1100, 1), (24, 5), (530, 3), (3, 3), (1, 16), (5, 7)])
def test_sums_in_parts(channels: int, kernel: int) -> None:
    """More products than are summed in registers, by channels and by taps; and few channels, whose taps are merged."""
    conv = nn.Conv2d(channels, 40, kernel, stride=2, padding=kernel // 2)
    check(Layer(conv, "relu"), channels, [(1, 7, 7), (2, 20, 31), (1, 40, 40), (5, 1, 2)])


def test_strided_pointwise_and_single_pixels() -> None:
    check(Layer(nn.Conv2d(20, 50, 1, stride=2)), 20, [(1, 1, 1), (4, 1, 1), (3, 13, 8), (1, 40, 40)])


@pytest.mark.parametrize("dims", [(2, 3), (2,), (3,)])
def test_means_of_images(dims: tuple[int, ...]) -> None:
    """Few channels and many pixels, which are summed in chunks, by every number of threads alike."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 96, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.conv(x)
            return y.mean(dims, keepdim=True), y.amax(dims)

    torch.manual_seed(0)
    model = Mean().eval().requires_grad_(False)
    sizes = {0: Dim("batch", min=1, max=4), 2: Dim("height", min=1, max=200), 3: Dim("width", min=1, max=200)}
    lowered = keepdim.lower(model, (torch.randn(2, 3, 9, 11),), dynamic_shapes=(sizes,))
    exact = copy.deepcopy(model).double()
    for batch, (height, width) in itertools.product((1, 4), ((1, 1), (200, 200), (7, 150), (113, 64), (1, 1))):
        x = torch.randn(batch, 3, height, width) + 3
        got = lowered(x)
        for y, want in zip(got, exact(x.double()), strict=True):
            torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)  # f32 inputs of the mean, f64 ones here
        keepdim.set_options(threads=1)
        try:
            assert all(torch.equal(a, b) for a, b in zip(got, lowered(x), strict=True))
        finally:
            keepdim.set_options(threads=0)
