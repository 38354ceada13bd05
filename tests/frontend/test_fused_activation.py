"""What no ATen op says by itself: a product's activation, and where its packed weights are counted."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
import torch.nn.functional as F

from keepdim import _native
from keepdim.ir.program import Node, Program, Value
from keepdim.ir.text import parse_program
from keepdim.shapes.contract import Contract, Source, Spec, Symbol
from keepdim.shapes.dim import Dim

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
K, N = 40, 37


def program(activation: str, constant: bool) -> Program:
    """y [n, 37] = activation(x [n, 40] @ w.T + b); the weights are constants or inputs."""
    n, k, c = Dim.symbol("n", 1, 512), Dim.const(K), Dim.const(N)
    kind = "const" if constant else "input"
    values = [
        Value("w", "f32", (c, k), kind, "w" if constant else ""),
        Value("b", "f32", (c,), kind, "b" if constant else ""),
    ]
    specs = [Spec("x", "f32", (n, k))] + ([] if constant else [Spec(v.name, "f32", v.dims) for v in values])
    contract = Contract(
        (Symbol("n", 1, 512, Source("size", 0, 0, Dim.const(1), Dim.const(0))),),
        tuple(specs), (), (Spec("y", "f32", (n, c)),),
    )  # fmt: skip
    inner = tuple(values) if constant else ()
    node = Node("linear", (0, 1, 2), (3,), {"activation": activation})
    return Program(contract, (*inner, Value("y", "f32", (n, c), "temp")), (node,), (3,))


@pytest.mark.parametrize("constant", [True, False], ids=["packed", "as it lies"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str, constant: bool) -> None:
    """Applied to the sum with the bias, at few rows and many, for weights of both kinds."""
    torch.manual_seed(0)
    w, b = torch.randn(N, K), torch.randn(N)
    weights = {"w": w.numpy().tobytes(), "b": b.numpy().tobytes()} if constant else {}
    run = _native.Delegate("ggml", program(name, constant).to_json(), weights).run
    for rows in (1, 7, 300, 7):
        x = torch.randn(rows, K)
        args = [x.numpy()] if constant else [x.numpy(), w.numpy(), b.numpy()]
        got = torch.from_numpy(numpy.asarray(run(args)[0]))
        torch.testing.assert_close(got, ACTIVATIONS[name](F.linear(x, w, b)))


def test_an_unknown_activation_is_refused() -> None:
    """With the name in the sentence."""
    run = _native.Delegate("ggml", program("cube", False).to_json(), {}).run
    zeros = [numpy.zeros(s, dtype=numpy.float32) for s in ((2, K), (N, K), (N,))]
    with pytest.raises(_native.Error, match="activation 'cube' is not supported"):
        run(zeros)


def test_long_sums_round_as_little_as_those_of_torch() -> None:
    """A sum over 3,000 is put together from shorter ones."""
    torch.manual_seed(0)
    text = """keepdim program 1
symbol n: 1..512 from x.size(0) = (1) * n + (0)
input x: f32[n, 3000]
const w: f32[48, 3000] @ w
y: f32[n, 48] = linear(x, w)
output y: f32[n, 48] = y
"""
    w, x = torch.randn(48, 3000), torch.randn(100, 3000)
    run = _native.Delegate("ggml", parse_program(text).to_json(), {"w": w.numpy().tobytes()}).run
    exact = x.double() @ w.double().T

    def off(y: torch.Tensor) -> float:
        return (y - exact).pow(2).mean().sqrt().item()

    assert off(torch.from_numpy(numpy.asarray(run([x.numpy()])[0]))) < 1.5 * off(F.linear(x, w))


def test_gelu_is_near_to_f64() -> None:
    """Nearer than torch's from where it is nothing to where it is x, and to the last bits next to 0."""
    text = """keepdim program 1
symbol n: 1..100001 from x.size(0) = (1) * n + (0)
input x: f32[n]
y: f32[n] = gelu(x)
output y: f32[n] = y
"""
    run = _native.Delegate("ggml", parse_program(text).to_json(), {}).run
    wide, narrow = torch.linspace(-15, 15, 100_001), torch.linspace(-1e-3, 1e-3, 1_000)

    def error(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (y - F.gelu(x.double())).abs()

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(numpy.asarray(run([x.numpy()])[0]))

    assert error(wide, gelu(wide)).max() <= error(wide, F.gelu(wide)).max()
    assert (error(narrow, gelu(narrow)) / narrow.abs()).max() <= 2**-23


@pytest.mark.parametrize("k", [1024, 2048])
def test_rows_at_multiples_of_a_page_are_right(k: int) -> None:
    """They are copied before they are multiplied: of a weight, of batches, of one matrix for all of a batch."""
    torch.manual_seed(0)
    text = f"""keepdim program 1
symbol n: 1..512 from x.size(1) = (1) * n + (0)
input x: f32[3, n, {k}]
input z: f32[3, {k}, 40]
const w: f32[40, {k}] @ w
y: f32[3, n, 40] = linear(x, w)
v: f32[3, n, 40] = matmul(x, z)
output y: f32[3, n, 40] = y
output v: f32[3, n, 40] = v
"""
    w, z = torch.randn(40, k), torch.randn(3, k, 40)
    run = _native.Delegate("ggml", parse_program(text).to_json(), {"w": w.numpy().tobytes()}).run
    for n in (1, 4, 5, 13, 200, 512, 13):
        x = torch.randn(3, n, k)
        y, v = (torch.from_numpy(numpy.asarray(a)) for a in run([x.numpy(), z.numpy()]))
        bound = 1e-6 * k  # of sums in another order than torch's
        torch.testing.assert_close(y, F.linear(x, w), rtol=1e-5, atol=bound)
        torch.testing.assert_close(v, x @ z, rtol=1e-5, atol=bound)
