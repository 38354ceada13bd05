"""Images that convolutions made channels-last, through every op that keeps the layout, against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import keepdim

SIZES = ((1, 6, 6), (4, 40, 33), (2, 17, 28), (3, 7, 40), (1, 6, 6))  # batch, height, width: ends, between, and back


class Between(nn.Module):
    """An op between two convolutions, the second of which is computed by Winograd."""

    def __init__(self, op: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.first, self.op, self.last = nn.Conv2d(3, 32, 3, padding=1), op, nn.Conv2d(32, 40, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.op(self.first(x))
        return y, self.last(y)


def group_norm(groups: int, affine: bool) -> nn.Module:
    norm = nn.GroupNorm(groups, 32, affine=affine)
    for p in norm.parameters():
        nn.init.normal_(p)
    return norm


OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "group_norm": group_norm(8, True),
    "group_norm of each channel": group_norm(32, False),
    "group_norm of all": group_norm(1, True),
    "silu": F.silu,
    "transposed": lambda x: x.transpose(2, 3).exp().transpose(2, 3),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "nearest to a size": lambda x: F.interpolate(x, size=(9, 5), mode="nearest"),
    "pad": lambda x: F.pad(x, (1, 2, 0, 3), value=0.5),
    "reflect": lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"),
    "pad channels": lambda x: F.pad(x, (0, 0, 1, 0, 3, 5))[:, 2:34],
    "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "avg_pool": lambda x: F.avg_pool2d(x, (2, 1)),
    "one column": lambda x: F.max_pool2d(x[..., :1], (2, 1)),
    "squeeze and excite": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "cat": lambda x: torch.cat([x, x.relu()], 1)[:, 16:48],
    "residual": lambda x: F.hardswish(x) + x,
}


@pytest.mark.parametrize("name", OPS)
def test_between_convolutions(name: str) -> None:
    """The result of the op itself, and of the convolution that reads it."""
    torch.manual_seed(0)
    model = Between(OPS[name]).eval().requires_grad_(False)
    sizes = {0: Dim("batch", min=1, max=4), 2: Dim("height", min=6, max=40), 3: Dim("width", min=6, max=40)}
    lowered = keepdim.lower(model, (torch.randn(2, 3, 9, 11),), dynamic_shapes=(sizes,))
    for batch, height, width in SIZES:
        x = torch.randn(batch, 3, height, width)
        for got, want in zip(lowered(x), model(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # sums of 288 products in another order
    assert len(lowered.report.delegates) == 1
