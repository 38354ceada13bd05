"""Elementwise ops."""

from __future__ import annotations

from typing import Any

from ..dims import Dim
from .table import Args, Lower, Shape, Sink, Unsupported, aten, broadcast, cast, op


def binary(first: str = "self", second: str = "other") -> Lower:
    def lower(b: Sink, name: str, a: Args, out: Shape) -> int:
        x = broadcast(b, a.tensor(first), out)
        y: Any = a.tensor(second) if second in a.tensor_names and not _is_number(a, second) else a.number(second)
        alpha = a.number("alpha") if a.has("alpha") else None
        if isinstance(y, int):
            y = broadcast(b, y, out)
            if alpha is not None and not _one(alpha):
                y = b.emit("mul", [y], b.shape(y), other=alpha)
            return b.emit(name, [x, y], out)
        if alpha is not None and not _one(alpha):
            y = y * alpha
        return b.emit(name, [x], out, other=y)

    return lower


def _is_number(a: Args, name: str) -> bool:
    return isinstance(a._bound.get(name), (Dim, float, bool))


def _one(x: Dim | float) -> bool:
    return x == 1


def _rsub(b: Sink, name: str, a: Args, out: Shape) -> int:
    x, y, alpha = broadcast(b, a.tensor("self"), out), a.number("other"), a.number("alpha")
    if alpha is not None and not _one(alpha):
        raise Unsupported(f"alpha = {alpha} is not handled")
    return b.emit("add", [b.emit("neg", [x], out)], out, other=y)


def _unary(b: Sink, name: str, a: Args, out: Shape) -> int:
    return b.emit(name, [cast(b, a.tensor("self"), out.dtype)], out)


def _clamp(b: Sink, name: str, a: Args, out: Shape) -> int:
    ends = {k: v for k in ("min", "max") if (v := a.number(k)) is not None}
    return b.emit(name, [cast(b, a.tensor("self"), out.dtype)], out, **ends)


for _name in ("abs", "neg", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "tanh", "sigmoid", "silu", "relu"):
    op(_name, getattr(aten, _name).default, lower=_unary)
op("gelu", aten.gelu.default)
op("add", aten.add.Tensor, aten.add.Scalar, lower=binary())
op("sub", aten.sub.Tensor, aten.sub.Scalar, lower=binary())
op("mul", aten.mul.Tensor, aten.mul.Scalar, lower=binary())
op("div", aten.div.Tensor, aten.div.Scalar, lower=binary())
op("pow", aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, lower=binary(second="exponent"))
op("maximum", aten.maximum.default, lower=binary())
op("minimum", aten.minimum.default, lower=binary())
op("add", aten.rsub.Scalar, lower=_rsub)
op("clamp", aten.clamp.default, lower=_clamp)
