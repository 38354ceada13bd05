"""precision="bf16": operands of products are rounded, sums are not, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import keepdim
from keepdim import _native
from keepdim.errors import KeepdimError
from keepdim.ir import reference
from keepdim.ir.text import parse_program
from keepdim.passes.precision import round_products

SIZES = (1, 64, 17, 3, 1)  # both ends, never traced, and back


class Tied(nn.Module):
    """Linear layers; the last one shares the weight of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # [n] → [n, 50]
        return nn.functional.linear(self.down(self.up(self.embed(tokens)).relu()), self.embed.weight)


def rounded(model: Tied, tokens: torch.Tensor) -> torch.Tensor:
    """What the lowered model has to compute: in f64, but for the operands that are rounded."""

    def bf16(t: torch.Tensor) -> torch.Tensor:
        return t.float().bfloat16().double()

    up = nn.functional.linear(bf16(bf16(model.embed.weight)[tokens]), bf16(model.up.weight), model.up.bias.double())
    x = nn.functional.linear(bf16(up.relu()), bf16(model.down.weight), model.down.bias.double())
    return nn.functional.linear(bf16(x), bf16(model.embed.weight))


def test_operands_are_rounded_and_sums_are_not() -> None:
    """Within bf16's rounding of eager, and within f32's rounding of products whose operands are rounded."""
    torch.manual_seed(0)
    model = Tied().eval().requires_grad_(False)
    shapes = ({0: Dim("n", min=1, max=64)},)
    example = (torch.randint(0, 50, (7,)),)
    exact = keepdim.lower(model, example, dynamic_shapes=shapes)
    fast = keepdim.lower(model, example, dynamic_shapes=shapes, precision="bf16")
    for n in SIZES:
        tokens = torch.randint(0, 50, (n,))
        torch.testing.assert_close(exact(tokens), model(tokens))
        # One bf16 step of the middle result, where it is rounded the other way: 2^-8 of a summand of about 24.
        torch.testing.assert_close(fast(tokens).double(), rounded(model, tokens), rtol=1e-5, atol=2e-3)
        assert not torch.equal(fast(tokens), exact(tokens))
    assert fast.counters()[0]["weight_bytes"] < exact.counters()[0]["weight_bytes"]


def test_a_weight_that_another_op_reads_stays_f32() -> None:
    """The Program says which products are rounded, and which weights are stored with 16 bits."""
    text = """keepdim program 1
symbol n: 1..64 from x.size(0) = (1) * n + (0)
input x: f32[n, 8]
const w: f32[8, 8] @ w
const v: f32[8, 8] @ v
y: f32[n, 8] = linear(x, w, -)
z: f32[n, 8] = linear(y, v, -)
u: f32[8, 8] = relu(v)
t: f32[n, 8] = linear(z, u, -)
output t: f32[n, 8] = t
"""
    weights = {"w": torch.randn(8, 8), "v": torch.randn(8, 8)}
    made, stored = round_products(parse_program(text), weights, "bf16")
    assert [n.attrs.get("precision") for n in made.walk()] == ["bf16", None, None, None]
    assert {k: w.dtype for k, w in stored.items()} == {"w": torch.bfloat16, "v": torch.float32}
    x = torch.randn(5, 8)
    ours = _native.Delegate(
        "ggml", made.to_json(), {k: w.view(torch.uint8).numpy().tobytes() for k, w in stored.items()}
    )
    (want,) = reference.run(made, stored, [x])
    torch.testing.assert_close(torch.from_numpy(ours.run([x.numpy()])[0]), want)


@pytest.mark.parametrize(("given", "error"), [("fp8", r"precision 'fp8': is not known \(known: f32, bf16\)"),
                                              (16, r"precision 16: is not known")])  # fmt: skip
def test_unknown_precisions(given: object, error: str) -> None:
    """A sentence, before anything is exported."""
    with pytest.raises(KeepdimError, match=error):
        keepdim.lower(nn.Linear(4, 4), (torch.randn(2, 4),), precision=given)  # type: ignore[arg-type]


def test_partitioners_have_their_own() -> None:
    """It is an argument of our partitioners, and refused where lower() would ignore it."""
    model, x = nn.Linear(32, 32).eval().requires_grad_(False), torch.randn(5, 32)
    with pytest.raises(KeepdimError, match=r"a given partitioner.*GgmlPartitioner\(precision="):
        keepdim.lower(model, (x,), precision="bf16", partitioner=keepdim.GgmlPartitioner())
    made = keepdim.lower(model, (x,), partitioner=keepdim.GgmlPartitioner(precision="bf16"))
    want = nn.functional.linear(x.bfloat16().float(), model.weight.bfloat16().float(), model.bias)
    torch.testing.assert_close(made(x), want)
