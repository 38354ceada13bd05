"""Cases of elementwise ops."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F

from .table import N0, B, N, case, family

# ---------------------------------------------------------------- one operand
family("unary")
for _f in (torch.neg, torch.abs, torch.exp, torch.sin, torch.cos, torch.tanh, torch.sigmoid, F.silu, F.relu):
    case(_f.__name__, _f, x="n 64", n=N)
for _f in (torch.sqrt, torch.rsqrt, torch.log):
    case(_f.__name__, _f, x="f32 >0: n 64", n=N)
case("gelu", F.gelu, x="n 64", n=N)
case("gelu", lambda x: F.gelu(x, approximate="tanh"), "tanh", x="n 64", n=N)
family("unary forms")
for _f in (
    torch.neg,
    torch.abs,
    torch.exp,
    torch.tanh,
    torch.sigmoid,
    F.silu,
    F.relu,
    torch.sqrt,
    torch.log,
    torch.rsqrt,
):
    case(_f.__name__, _f, "nan", x="f32 nan: n 8", n=N)
case("gelu", F.gelu, "nan", x="f32 nan: n 8", n=N)
case("silu", F.silu, "rank 0", x="")
case("silu", F.silu, "rank 5", x="2 n 1 3 m", n=N, m=B)
case("silu", F.silu, "empty", x="n 4", n=N0)
case("exp", lambda x: torch.exp(x.transpose(0, 2)), "not contiguous", x="n 3 m", n=N, m=B)
case("neg", torch.neg, "i64", x="i64 big: n", n=N)
case("abs", torch.abs, "i64", x="i64: n 3", n=N)
case("relu", F.relu, "i64", x="i64: n 3", n=N)
case("tanh", torch.tanh, "of i64", x="i64: n 3", n=N)
case("exp", torch.exp, "of bool", x="bool: n 3", n=N)
case("sin", torch.sin, "large", x="i64 <100000: n 3", n=N)
case("cos", lambda x: torch.cos(x.float() * 1000), "large", x="i64 <1000: n 3", n=N)

# ---------------------------------------------------------------- two operands
family("arithmetic")
for _name, _f in (("add", operator.add), ("sub", operator.sub), ("mul", operator.mul), ("div", operator.truediv)):
    case(_name, _f, x="n 64", y="n 64", n=N)
    case(_name, lambda x, f=_f: f(x, 1.5), "float", x="n 64", n=N)
    case(_name, lambda x, f=_f: f(x, 3), "int", x="n 64", n=N)
    case(
        _name,
        lambda x, f=_f: f(2, x),
        "left number",
        x="f32 >0: n 8",
        n=N,
        remaining="" if _name != "div" else "reciprocal",
    )
    case(_name, lambda x, f=_f: f(x, x.size(0)), "size", x="n 8", n=N)
    case(_name, _f, "outer", x="n 1", y="1 m", n=N, m=B)
    case(_name, _f, "nan", x="f32 nan: n 8", y="8", n=N)
family("arithmetic forms")
case("add", lambda x, y: torch.add(x, y, alpha=2), "alpha", x="n 8", y="n 8", n=N)
case("add", lambda x, y: torch.add(x, y, alpha=0.5), "alpha float", x="n 8", y="8", n=N)
case("sub", lambda x, y: torch.sub(x, y, alpha=3), "alpha", x="n 8", y="n 8", n=N)
case("add", lambda x: torch.add(x, 3, alpha=2), "alpha of a number", x="n 8", n=N)
case("add", lambda x: torch.rsub(x, 5), "rsub", x="n 8", n=N)
case("add", lambda x: x.size(0) - x, "rsub of a size", x="n 8", n=N)
case("add", lambda x: torch.rsub(x, 1, alpha=2), "rsub alpha", x="n 8", n=N)
case("add", operator.add, "left is smaller", x="8", y="b n 8", n=N, b=B)
case("add", operator.add, "right is smaller", x="b n 8", y="n 1", n=N, b=B)
case("add", operator.add, "with rank 0", x="n 8", y="", n=N)
case("mul", operator.mul, "both rank 0", x="", y="")
case("add", operator.add, "rank 5", x="2 n 1 3 m", y="1 5 1 m", n=N, m=B)
case("add", operator.add, "empty", x="n 4", y="4", n=N0)
case("mul", lambda x: x * x.size(0) * x.size(1) + x.size(0) // 2, "sizes", x="n m", n=N, m=B)
case("add", lambda x: x + x.size(0) / 2, "half a size", x="n 4", n=N)
case("add", operator.add, "i64", x="i64 big: n", y="i64 big: n", n=N)
case("mul", lambda x: x * 3 + 2**33, "i64 above 2**31", x="i64 big: n", n=N)
case("mul", lambda x: x * x.size(0), "i64 size", x="i64 big: n", n=N)
case("sub", operator.sub, "i64", x="i64 big: n 3", y="i64: 3", n=N)
case("add", operator.add, "i32", x="i32: n", y="i32: n", n=N)
case("add", operator.add, "i64 and f32", x="i64: n 3", y="n 3", n=N)
case("mul", operator.mul, "bool and f32", x="bool: n 3", y="n 3", n=N)
case("mul", lambda x: x * 0.5, "i64 and float", x="i64: n 3", n=N)
case("add", lambda x: x + 0.5, "bool and float", x="bool: n 3", n=N)
case("div", operator.truediv, "i64", x="i64: n 3", y="i64 <5: n 3", n=N)
case("div", lambda x: x / 4, "i64 and int", x="i64: n 3", n=N)
case("mul", lambda x: x * torch.tensor(2.5), "constant tensor", x="n 3", n=N)
case("mul", lambda x, y: x * y.transpose(0, 1), "transposed", x="n m", y="m n", n=N, m=B)
family("powers")
for _e in (2, 3, 0.5, -0.5, -1, 2.5, 0, 1):
    case("pow", lambda x, e=_e: torch.pow(x, e), f"{_e}", x="f32 >0: n 8", n=N)
case("pow", torch.pow, "tensors", x="f32 >0: n 8", y="n 8", n=N)
case("pow", torch.pow, "broadcast", x="f32 >0: n 1", y="8", n=N)
case("pow", lambda x: x**2, "negative base", x="n 8", n=N)
case("pow", lambda x: x**3, "i64", x="i64: n 8", n=N)
case("pow", lambda x: x**0.5, "nan", x="f32 nan: n 8", n=N)
case("pow", lambda x: (x / 4) ** x.size(0), "size", x="n 8", n=(1, 6, 3, 6))
case("maximum", torch.maximum, x="n 8", y="n 8", n=N)
case("minimum", torch.minimum, x="n 8", y="n 8", n=N)
case("maximum", torch.maximum, "nan", x="f32 nan: n 8", y="8", n=N)
case("minimum", torch.minimum, "nan", x="f32 nan: n 8", y="8", n=N)
case("maximum", torch.maximum, "i64", x="i64 big: n", y="i64 big: n", n=N)
case("clamp", lambda x: x.clamp(-0.5, 0.5), x="n 8", n=N)
case("clamp", lambda x: x.clamp(min=0.1), "min", x="n 8", n=N)
case("clamp", lambda x: x.clamp(max=0), "max", x="n 8", n=N)
case("clamp", lambda x: x.clamp(max=x.size(0) - 3), "size", x="n 8", n=(1, 7, 3, 7))
case("clamp", lambda x: x.clamp(0, x.size(0)), "i64", x="i64: n 8", n=N)
case("clamp", lambda x: x.clamp(0.5, 2.5), "i64 to f32", x="i64: n 8", n=N)
case("clamp", lambda x: x.clamp(-1, 1), "nan", x="f32 nan: n 8", n=N)
case("clamp", lambda x: x.clamp(1, -1), "min above max", x="n 8", n=N)
case("clamp", F.relu6, "relu6", x="n 8", n=N, remaining="no row for aten.hardtanh.default")
