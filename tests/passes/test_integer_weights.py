"""Weight-only quantisation: 8-bit weights that are cast in the graph become constant weights of `linear`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import keepdim
from keepdim.artifact import pte

SIZES = (1, 64, 17, 3, 1)  # both ends, never traced, and back


class Int8Linear(nn.Module):
    """A weight of integers with a scale per column, as torchao's weight-only quantisation has it."""

    def __init__(self, ins: int, outs: int, dtype: torch.dtype, linear: bool):
        super().__init__()
        low = 0 if dtype == torch.uint8 else -128
        self.register_buffer("weight", torch.randint(low, low + 256, (outs, ins)).to(dtype))
        self.register_buffer("scale", torch.rand(outs) / 64)
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [n, ins] → [n, outs]
        w = self.weight.to(x.dtype)
        return (nn.functional.linear(x, w) if self.linear else x @ w.t()) * self.scale


def ops_of(prog: keepdim.Module) -> list[str]:
    return [n.op for d in pte.delegates(prog.path) if d.program is not None for n in d.program.walk()]


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "matmul"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=["i8", "u8"])
def test_integer_weights_are_constant_operands(dtype, linear, engine):
    """No weight is cast in a call, and the numbers are eager's: f16 holds 8-bit integers exactly."""
    torch.manual_seed(0)
    model = nn.Sequential(Int8Linear(24, 40, dtype, linear), nn.ReLU(), Int8Linear(40, 24, dtype, linear)).eval()
    shapes = ({0: Dim("n", min=1, max=64)},)
    prog = keepdim.lower(model, (torch.randn(3, 24),), dynamic_shapes=shapes, engine=engine)
    ops = ops_of(prog)
    assert "cast" not in ops and ops.count("linear") == 2
    for n in SIZES:
        x = torch.randn(n, 24)
        torch.testing.assert_close(prog(x), model(x), rtol=1e-5, atol=1e-4)  # of values up to 1e3


def test_a_weight_that_is_also_a_result_stays():
    """Its cast is then needed."""

    class Both(Int8Linear):
        def forward(self, x):
            w = self.weight.to(x.dtype)
            return x @ w.t(), w

    torch.manual_seed(0)
    model = Both(8, 4, torch.int8, False).eval()
    prog = keepdim.lower(model, (torch.randn(3, 8),), dynamic_shapes=({0: Dim("n", min=1, max=64)},))
    for n in SIZES:
        x = torch.randn(n, 8)
        torch.testing.assert_close(prog(x), model(x), rtol=1e-5, atol=1e-4)  # of values up to 1e3


@pytest.mark.parametrize("rows", SIZES[:3])
def test_torchao_weight_only(rows):
    """As torchao's tensor subclass decomposes."""
    torchao = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).eval()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    prog = keepdim.lower(model, (torch.randn(3, 32),), dynamic_shapes=({0: Dim("n", min=1, max=64)},))
    assert "cast" not in ops_of(prog)
    x = torch.randn(rows, 32)
    torch.testing.assert_close(prog(x), model(x), rtol=1e-5, atol=1e-6)
