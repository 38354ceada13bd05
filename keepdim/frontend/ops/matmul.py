"""Matrix products and linear layers."""

from __future__ import annotations

from ...ir.program import NONE, Shape
from ...shapes.dim import Dim
from .table import Args, Lower, Sink, Unsupported, aten, broadcast, op, reshape

ONE = Dim.const(1)


def _product(b: Sink, x: int, y: int, out: Shape) -> int:
    """x @ y; a vector is a row on the left, a column on the right."""
    p, q, dims = b.shape(x).dims, b.shape(y).dims, out.dims
    if len(q) == 1:
        q, dims = (*q, ONE), (*dims, ONE)
    if len(p) == 1:
        p, dims = (ONE, *p), (*dims[:-1], ONE, dims[-1])
    for operand in (p, q):
        for have, want in zip(reversed(operand[:-2]), reversed(dims[:-2]), strict=False):
            if have != want and have.value != 1:
                raise Unsupported(f"broadcasting {have} to {want} is not decided by the contract")
    made = b.emit("matmul", [reshape(b, x, p), reshape(b, y, q)], Shape(out.dtype, dims))
    return reshape(b, made, out.dims)


def _matmul(x: str, y: str) -> Lower:
    return lambda b, name, a, out: _product(b, a.tensor(x), a.tensor(y), out)


def _scaled(b: Sink, value: int, factor: Dim | float | None) -> int:
    return value if factor is None or factor == 1 else b.emit("mul", [value], b.shape(value), other=factor)


def _add_product(x: str, y: str) -> Lower:
    """beta * self + alpha * (x @ y); with beta = 0, self is not read."""

    def lower(b: Sink, name: str, a: Args, out: Shape) -> int:
        product = _scaled(b, _product(b, a.tensor(x), a.tensor(y), out), a.number("alpha"))
        beta, to = a.number("beta"), broadcast(b, a.tensor("self"), out)
        return product if beta == 0 else b.emit("add", [product, _scaled(b, to, beta)], out)

    return lower


def _bilinear(b: Sink, name: str, a: Args, out: Shape) -> int:
    """y[.., o] = sum over i, j of x[.., i] w[o, i, j] z[.., j], plus a bias."""
    x, z, w, bias = (a.tensor(n) for n in ("input1", "input2", "weight", "bias"))
    (o, i, j), dtype, batch = b.shape(w).dims, out.dtype, out.dims[:-1]
    transposed = b.emit("permute", [w], Shape(dtype, (o, j, i)), dims=tuple(map(Dim.const, (0, 2, 1))))
    rows = b.emit("linear", [x, reshape(b, transposed, (o * j, i))], Shape(dtype, (*batch, o * j)))
    sums = b.emit("matmul", [reshape(b, rows, (*batch, o, j)), reshape(b, z, (*batch, j, ONE))],
                  Shape(dtype, (*batch, o, ONE)))  # fmt: skip
    y = reshape(b, sums, out.dims)
    return y if bias == NONE else b.emit("add", [y, bias], out)


op("linear", aten.linear.default)
op("matmul", aten.bilinear.default, lower=_bilinear)
op("matmul", aten.matmul.default, lower=_matmul("self", "other"))
op("matmul", aten.mm.default, aten.bmm.default, lower=_matmul("self", "mat2"))
op("matmul", aten.mv.default, lower=_matmul("self", "vec"))
op("matmul", aten.dot.default, lower=_matmul("self", "tensor"))
op("matmul", aten.addmm.default, lower=_add_product("mat1", "mat2"))
op("matmul", aten.baddbmm.default, lower=_add_product("batch1", "batch2"))
