"""Elementwise ops."""

from __future__ import annotations

from typing import Any

import torch

from ...ir.program import Shape
from ...shapes.contract import DTYPE_OF
from ...shapes.dim import Dim
from .table import Args, Lower, Sink, Unsupported, aten, broadcast, cast, op, promote

BOOL = "bool"
# With a 16-bit float tensor torch first rounds the number operand of these ops to that dtype (not for mul and div).
ROUNDED = ("add", "sub", "remainder", "fmod", "pow", "eq", "ne", "lt", "le", "gt", "ge")


def operand(a: Args, name: str) -> int | Dim | float:
    """A value id (an int) if the argument is a tensor, else its number."""
    v: Any = a.tensor(name) if name in a.tensor_names and not _is_number(a, name) else a.number(name)
    return v


def _is_number(a: Args, name: str) -> bool:
    return isinstance(a._bound.get(name), (Dim, float, bool))


def _one(x: Dim | float) -> bool:
    return x == 1


def full(b: Sink, value: Dim | float, dtype: str) -> int:
    """A number as a rank-0 value."""
    return b.emit("full", [], Shape(dtype, ()), value=value)


def rounded(x: Dim | float, dtype: str) -> Dim | float:
    """A number rounded to a 16-bit float dtype."""
    known = x.value if isinstance(x, Dim) else x
    if dtype not in ("f16", "bf16") or known is None:
        return x
    number: float = torch.tensor(known, dtype=DTYPE_OF[dtype]).item()
    return x if number == known else number


def binary(first: str = "self", second: str = "other") -> Lower:
    """A binary op with operands in the result's dtype."""

    def lower(b: Sink, name: str, a: Args, out: Shape) -> int:
        x, y = operand(a, first), operand(a, second)
        alpha = a.number("alpha") if a.has("alpha") else None
        if alpha is not None and not _one(alpha):
            whole = y if isinstance(y, int) else full(b, y, out.dtype)
            factor = rounded(alpha, out.dtype)
            y = b.emit("mul", [cast(b, whole, out.dtype)], Shape(out.dtype, b.shape(whole).dims), other=factor)
        return pair(b, name, x, y, out, out.dtype)

    return lower


def pair(b: Sink, name: str, x: int | Dim | float, y: int | Dim | float, out: Shape, dtype: str) -> int:
    """A binary node whose operands are tensors or numbers, computed in a dtype."""
    shape = Shape(dtype, out.dims)
    first = broadcast(b, x, shape) if isinstance(x, int) else full(b, x, dtype)
    if isinstance(y, int):
        return b.emit(name, [first, broadcast(b, y, shape)], out)
    if isinstance(y, float) and dtype[0] != "f" and dtype != "bf16":
        raise Unsupported(f"the number {y} is not a {dtype}")
    return b.emit(name, [first], out, other=rounded(y, dtype) if name in ROUNDED else y)


def _compare(b: Sink, name: str, a: Args, out: Shape) -> int:
    x, y = operand(a, "self"), operand(a, "other")
    return pair(b, name, x, y, out, promote(b, x, y))


def _rounded(b: Sink, name: str, a: Args, out: Shape) -> int:
    mode, x, y = a.plain("rounding_mode"), operand(a, "self"), operand(a, "other")
    if mode == "floor":
        return pair(b, "div_floor", x, y, out, out.dtype)
    if mode == "trunc":
        return pair(b, "div_trunc", x, y, out, out.dtype)
    return pair(b, "div", x, y, out, out.dtype)


def _logical(b: Sink, name: str, a: Args, out: Shape) -> int:
    x, y = (cast(b, a.tensor(n), BOOL) for n in ("self", "other"))
    return pair(b, name, x, y, out, BOOL)


def _is_zero(b: Sink, name: str, a: Args, out: Shape) -> int:
    return b.emit("eq", [a.tensor("self")], out, other=Dim.const(0))


def _bitwise_not(b: Sink, name: str, a: Args, out: Shape) -> int:
    if out.dtype == BOOL:
        return _is_zero(b, name, a, out)
    return b.emit("bitwise_xor", [a.tensor("self")], out, other=Dim.const(-1 if out.dtype != "u8" else 255))


def _isnan(b: Sink, name: str, a: Args, out: Shape) -> int:
    return b.emit("ne", [a.tensor("self")] * 2, out)


def _isinf(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = a.tensor("self")
    if b.shape(x).dtype not in ("f16", "bf16", "f32", "f64"):
        return b.emit("full", [], out, value=Dim.const(0))
    return b.emit("eq", [b.emit("abs", [x], b.shape(x))], out, other=float("inf"))


def _rsub(b: Sink, name: str, a: Args, out: Shape) -> int:
    x, alpha = broadcast(b, a.tensor("self"), out), a.number("alpha")
    y = operand(a, "other")
    if alpha is not None and not _one(alpha):
        raise Unsupported(f"alpha = {alpha} is not handled")
    return b.emit("add", [b.emit("neg", [x], out)], out, other=rounded(y, out.dtype))


def _unary(b: Sink, name: str, a: Args, out: Shape) -> int:
    return b.emit(name, [cast(b, a.tensor("self"), out.dtype)], out)


def _round(b: Sink, name: str, a: Args, out: Shape) -> int:
    """A no-op for integers."""
    x = a.tensor("self")
    return b.emit(name, [x], out) if out.dtype in ("f16", "bf16", "f32", "f64") else x


def _numbers(*names: str) -> Lower:
    """One operand, and number arguments as attributes."""

    def lower(b: Sink, name: str, a: Args, out: Shape) -> int:
        attrs: dict[str, Any] = {n: a.number(n) for n in names}
        return b.emit(name, [a.tensor("self")], out, **attrs)

    return lower


def _elu(b: Sink, name: str, a: Args, out: Shape) -> int:
    alpha, scale, inner = (a.number(n) for n in ("alpha", "scale", "input_scale"))
    if inner is not None and not _one(inner):
        raise Unsupported(f"input_scale = {inner} is not handled")
    y = b.emit(name, [a.tensor("self")], out, alpha=alpha)
    return y if scale is None or _one(scale) else b.emit("mul", [y], out, other=scale)


def _clamp(low: str, high: str) -> Lower:
    def lower(b: Sink, name: str, a: Args, out: Shape) -> int:
        x = cast(b, a.tensor("self"), out.dtype)
        ends = {k: v for k, n in (("min", low), ("max", high)) if n and (v := a.number(n)) is not None}
        return b.emit(name, [x], out, **ends)

    return lower


def _clamp_tensors(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = broadcast(b, a.tensor("self"), out)
    for end, choice in (("min", "maximum"), ("max", "minimum")):
        if a.has(end):
            x = b.emit(choice, [x, broadcast(b, a.tensor(end), out)], out)
    return x


def _where(b: Sink, name: str, a: Args, out: Shape) -> int:
    condition = broadcast(b, a.tensor("condition"), Shape(BOOL, out.dims))
    return b.emit(name, [condition, *(broadcast(b, a.tensor(n), out) for n in ("self", "other"))], out)


def _masked_fill(b: Sink, name: str, a: Args, out: Shape) -> int:
    mask = broadcast(b, a.tensor("mask"), Shape(BOOL, out.dims))
    value = operand(a, "value")
    filler = broadcast(b, value, out) if isinstance(value, int) else full(b, value, out.dtype)
    return b.emit(name, [mask, filler, broadcast(b, a.tensor("self"), out)], out)


for _name in (
    *("abs", "neg", "sign", "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "tanh", "erf", "erfc"),
    *("sigmoid", "silu", "relu", "hardswish", "hardsigmoid"),
):
    op(_name, getattr(aten, _name).default, lower=_unary)
for _name in ("ceil", "floor", "round", "trunc"):
    op(_name, getattr(aten, _name).default, lower=_round)
op("gelu", aten.gelu.default)
op("leaky_relu", aten.leaky_relu.default, lower=_numbers("negative_slope"))
op("softplus", aten.softplus.default, lower=_numbers("beta", "threshold"))
op("elu", aten.elu.default, lower=_elu)
op("clamp", aten.clamp.default, lower=_clamp("min", "max"))
op("clamp", aten.hardtanh.default, lower=_clamp("min_val", "max_val"))
op("clamp", aten.clamp_min.default, lower=_clamp("min", ""))
op("clamp", aten.clamp_max.default, lower=_clamp("", "max"))
op("maximum", aten.clamp.Tensor, lower=_clamp_tensors)
op("add", aten.add.Tensor, aten.add.Scalar, lower=binary())
op("sub", aten.sub.Tensor, aten.sub.Scalar, lower=binary())
op("mul", aten.mul.Tensor, aten.mul.Scalar, lower=binary())
op("div", aten.div.Tensor, aten.div.Scalar, lower=binary())
op("div", aten.div.Tensor_mode, lower=_rounded)
op("div_floor", aten.floor_divide.default, lower=binary())
op("remainder", aten.remainder.Tensor, aten.remainder.Scalar, lower=binary())
op("fmod", aten.fmod.Tensor, aten.fmod.Scalar, lower=binary())
op("pow", aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar, lower=binary(second="exponent"))
op("atan2", aten.atan2.default, lower=binary())
op("maximum", aten.maximum.default, lower=binary())
op("minimum", aten.minimum.default, lower=binary())
op("add", aten.rsub.Scalar, lower=_rsub)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    op(_name, getattr(aten, _name).Tensor, getattr(aten, _name).Scalar, lower=_compare)
for _name in ("and", "or", "xor"):
    op(f"bitwise_{_name}", getattr(aten, f"logical_{_name}").default, lower=_logical)
    _packet = getattr(aten, f"bitwise_{_name}")
    op(f"bitwise_{_name}", _packet.Tensor, _packet.Scalar, lower=binary())
for _name, _short in (("left", aten.__lshift__), ("right", aten.__rshift__)):
    _packet = getattr(aten, f"bitwise_{_name}_shift")
    op(f"bitwise_{_name}_shift", _packet.Tensor, _short.Scalar, _short.Tensor, lower=binary())
op("eq", aten.logical_not.default, lower=_is_zero)
op("bitwise_xor", aten.bitwise_not.default, lower=_bitwise_not)
op("ne", aten.isnan.default, lower=_isnan)
op("eq", aten.isinf.default, lower=_isinf)
op("where", aten.where.self, lower=_where)
op("where", aten.masked_fill.Scalar, aten.masked_fill.Tensor, lower=_masked_fill)
