"""Cases of elementwise ops."""

from __future__ import annotations

import functools
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
# Not infinity itself: of that eager's AVX-512 kernel makes NaN, its others infinity.
case("gelu", lambda x: F.gelu(x.clamp_max(1e30)), "nan", x="f32 nan: n 8", n=N)
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
    case(_name, lambda x, f=_f: f(2, x), "left number", x="f32 >0: n 8", n=N)
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
case("clamp", lambda x: x.clamp_min(0.1), "clamp_min", x="n 8", n=N)
case("clamp", lambda x: x.clamp_max(0.1), "clamp_max", x="n 8", n=N)
case("clamp", lambda x: x.clamp(max=x.size(0) - 3), "size", x="n 8", n=(1, 7, 3, 7))
case("clamp", lambda x: x.clamp(0, x.size(0)), "i64", x="i64: n 8", n=N)
case("clamp", lambda x: x.clamp(0.5, 2.5), "i64 to f32", x="i64: n 8", n=N)
case("clamp", lambda x: x.clamp(-1, 1), "nan", x="f32 nan: n 8", n=N)
case("clamp", lambda x: x.clamp(1, -1), "min above max", x="n 8", n=N)
case("clamp", F.relu6, "relu6", x="n 8", n=N)

# ---------------------------------------------------------------- functions
family("functions")
for _f in (torch.erf, torch.erfc, torch.expm1, torch.exp2, torch.tan, torch.atan, torch.sinh, torch.cosh, torch.asinh):
    case(_f.__name__, _f, x="n 64", n=N)
    case(_f.__name__, _f, "nan", x="f32 nan: n 8", n=N)
case("erf", lambda x: torch.erf(x * 1e-6) * 1e6, "near 0", x="n 8", n=N)
case("erfc", torch.erfc, "f64", x="f64: n 64", n=N)
case("erfc", lambda x: torch.erfc(x.clamp(-2, 2) * 4).log(), "far from 0", x="n 64", n=N)
case("erfc", lambda x: torch.erfc(x.clamp(-2, 2) * 4).log(), "far from 0, f64", x="f64: n 64", n=N)
case("erfc", lambda x: torch.erfc(x / 0), "infinite", x="n 8", n=N)
for _f in (torch.ceil, torch.floor, torch.round, torch.trunc, torch.sign, F.hardswish, F.hardsigmoid):
    case(_f.__name__, lambda x, f=_f: f(x * 3), x="n 64", n=N)
    case(_f.__name__, _f, "nan", x="f32 nan: n 8", n=N)
for _f in (torch.log1p, torch.log2, torch.log10, torch.reciprocal):
    case(_f.__name__, _f, x="f32 >0: n 64", n=N)
    case(_f.__name__, _f, "nan", x="f32 nan: n 8", n=N)
family("functions of a part")
for _f in (torch.asin, torch.acos, torch.atanh):
    case(_f.__name__, lambda x, f=_f: f(torch.tanh(x)), x="n 64", n=N)
    case(_f.__name__, _f, "outside", x="f32 nan: n 8", n=N)
case("acosh", lambda x: torch.acosh(x + 1), x="f32 >0: n 64", n=N)
case("round", lambda x: torch.round(x / 2), "halves to even", x="i64: n 64", n=N)
case("round", torch.round, "i64", x="i64 big: n 64", n=N)
case("sign", torch.sign, "i64", x="i64: n 64", n=N)
case("leaky_relu", F.leaky_relu, x="f32 nan: n 8", n=N)
case("elu", lambda x: F.elu(x, 0.7), x="f32 nan: n 8", n=N)
case("elu", F.selu, "selu", x="n 8", n=N)
case("elu", F.elu, "chunks of one sign", x="f32 >0: n 67", n=N)
case("softplus", lambda x: F.softplus(x * 9, 0.8, 15), x="n 64", n=N)
case("softplus", F.softplus, "nan", x="f32 nan: n 8", n=N)
case("maximum", torch.clamp, "clamp by tensors", x="n 8", y="1 8", z="n 1", n=N)
case("atan2", torch.atan2, x="n 8", y="8", n=N)
case("atan2", torch.atan2, "nan", x="f32 nan: n 8", y="f32 nan: n 8", n=N)
case("pow", lambda x: 2**x, "of a number", x="n 8", n=N)
case("pow", lambda x: 3**x, "of a number, i64", x="i64 <9: n 8", n=N)

# ---------------------------------------------------------------- quotients
family("quotients")
for _mode in ("floor", "trunc"):
    _divide = functools.partial(torch.div, rounding_mode=_mode)
    case(f"div_{_mode}", lambda x, y, f=_divide: f(x, y), x="n 64", y="f32 >0: n 64", n=N)
    case(f"div_{_mode}", lambda x, f=_divide: f(x, -3), "i64", x="i64: n 8", n=N)
    case(f"div_{_mode}", lambda x, f=_divide: f(x, 7), "i64 above 2**31", x="i64 big: n 8", n=N)
case("div", lambda x: torch.div(x, 3, rounding_mode=None), "no mode", x="i64: n 8", n=N)
case("div_floor", lambda x: x // 2, "operator", x="i64: n 8", n=N)
for _name, _f in (("remainder", torch.remainder), ("fmod", torch.fmod)):
    case(_name, _f, x="n 64", y="f32 >0: n 64", n=N)
    case(_name, lambda x, f=_f: f(x, -3), "i64", x="i64: n 8", n=N)
    case(_name, lambda x, f=_f: f(x * 1e6, 0.7), "large", x="n 64", n=N)
    case(_name, lambda x, f=_f: f(x, x.size(0)), "a size", x="i64 big: n 8", n=N)
    case(_name, lambda x, f=_f: f(x, 2.5), "nan", x="f32 nan: n 8", n=N)
    case(_name, lambda x, y, f=_f: f(x * 3e8, y), "quotients above 2**24", x="n 64", y="f32 nan: n 64", n=N)
    case(_name, lambda x, y, f=_f: f((x * 40).round() / 8, (y * 5).round() / 8), "multiples", x="n 67", y="n 67", n=N)
    case(_name, lambda x, y, f=_f: f(x, y * 2.0**-70), "huge quotients, f64", x="f64: n 9", y="f64: n 9", n=N)
case("div_floor", lambda x, y: x // y, "nan", x="f32 nan: n 8", y="f32 nan: n 8", n=N)
case("div_floor", lambda x, y: (x * 40).round() / 8 // ((y * 5).round() / 8), "multiples", x="n 67", y="n 67", n=N)

# ---------------------------------------------------------------- truths
family("comparisons")
for _f in (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge):
    case(_f.__name__, _f, x="n 8", y="n 8", n=N)
    case(_f.__name__, _f, "broadcast, i64", x="i64: n 8", y="i64: n 1", n=N)
    case(_f.__name__, lambda x, f=_f: f(x, 0.5), "number", x="f32 nan: n 8", n=N)
family("comparisons of dtypes")
case("gt", lambda x: x > 1.5, "i64 by float", x="i64: n 8", n=N)
case("gt", torch.gt, "i64 by f32", x="i64: n 8", y="n 8", n=N)
case("lt", lambda x: torch.arange(x.size(0)) < x.size(0) - 2, "by a size", x="n 2", n=N)
case("eq", torch.eq, "above 2**53", x="i64 big: n", y="i64 big: n", n=N)
case("eq", lambda x: (x + 2**53) == (x + 2**53 + 1), "one apart above 2**53", x="i64: n", n=N)
case("eq", torch.logical_not, "not", x="f32 nan: n 8", n=N)
case("eq", lambda x: ~x, "not bool", x="bool: n 8", n=N)
case("eq", torch.isinf, "isinf", x="f32 nan: n 8", n=N)
case("ne", torch.isnan, "isnan", x="f32 nan: n 8", n=N)
case("bitwise_xor", lambda x: ~x, "not", x="i64 big: n 8", n=N)
case("bitwise_xor", lambda x: ~x, "not u8", x="u8: n 8", n=N)
for _name in ("and", "or", "xor"):
    _f = getattr(torch, f"bitwise_{_name}")
    case(f"bitwise_{_name}", getattr(torch, f"logical_{_name}"), "logical", x="f32 nan: n 8", y="i64: n 8", n=N)
    case(f"bitwise_{_name}", _f, "bool", x="bool: n 8", y="bool: 8", n=N)
    case(f"bitwise_{_name}", _f, x="i64: n 8", y="i64 big: n 8", n=N)
    case(f"bitwise_{_name}", lambda x, f=_f: f(x, 6), "number", x="i32: n 8", n=N)
for _name, _f in (("left", operator.lshift), ("right", operator.rshift)):
    case(f"bitwise_{_name}_shift", _f, x="i64: n 8", y="i64 <70: n 8", n=N)
    case(f"bitwise_{_name}_shift", lambda x, f=_f: f(x, 2), "number", x="i32: n 8", n=N)
case("where", torch.where, x="bool: n 8", y="n 8", z="1 8", n=N)
case("where", lambda c, x: torch.where(c, x, 0.5), "number", x="bool: n 1", y="f32 nan: n 8", n=N)
case("where", lambda c, x: torch.where(c, 7, x), "i64", x="bool: n", y="i64 big: n", n=N)
case("where", torch.where, "promoted", x="bool: n 8", y="i64: n 8", z="n 8", n=N)
case("where", torch.where, "bool", x="bool: n 8", y="bool: 8", z="bool: n 1", n=N)
case("where", lambda x, m: x.masked_fill(m, -torch.inf), "masked_fill", x="n 8", m="bool: n 1", n=N)
case("where", torch.where, "rank 6, empty", x="bool: n 1 2 1 1 3", y="2 1 2 1", z="n 1 1 1 2 3", n=N0)

# ---------------------------------------------------------------- dtypes
case("mul", lambda x: x * 1e-20, "a number that f32 has not", x="f64: n 9", n=N)
for _dtype in ("f64", "f16", "bf16"):
    family(f"of {_dtype}")
    for _f in (torch.exp, torch.tanh, F.silu, F.gelu, torch.sqrt, torch.sin, torch.neg, F.relu, torch.erf, torch.log1p):
        case(_f.__name__, _f, _dtype, x=f"{_dtype} >0: n 24", n=N)
    for _f in (torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.pow, torch.remainder):
        case(_f.__name__, _f, _dtype, x=f"{_dtype} >0: n 24", y=f"{_dtype} >0: n 1", n=N)
    case("add", lambda x, y: x + y, f"{_dtype} and f32", x=f"{_dtype}: n 24", y="n 24", n=N)
    case("add", lambda x, y: x + y, f"{_dtype} and i64", x=f"{_dtype}: n 24", y="i64: 24", n=N)
    case("clamp", lambda x: x.clamp(-0.3, 0.7), _dtype, x=f"{_dtype} nan: n 8", n=N)
    case("lt", lambda x: x < 0.3, _dtype, x=f"{_dtype} nan: n 8", n=N)
    for _f in (torch.neg, torch.abs, torch.sign, F.relu):
        case(_f.__name__, _f, f"{_dtype} nan", x=f"{_dtype} nan: n 13", n=N)
    for _f in (torch.add, torch.mul, torch.maximum, torch.minimum):
        case(_f.__name__, _f, f"{_dtype} nan", x=f"{_dtype} nan: n 13", y=f"{_dtype} nan: n 13", n=N)
    case("where", torch.where, _dtype, x="bool: n 8", y=f"{_dtype} nan: n 8", z=f"{_dtype}: 8", n=N)
for _dtype in ("f16", "bf16"):
    family(f"of {_dtype}")
    for _f in (torch.remainder, torch.fmod, torch.pow, torch.mul, torch.add):
        case(_f.__name__, lambda x, f=_f: f(x, 0.3), f"{_dtype} and a number it has not", x=f"{_dtype} >0: n 24", n=N)
    case("div_floor", lambda x: x // 0.3, f"{_dtype} and a number it has not", x=f"{_dtype}: n 24", n=N)
    case("eq", lambda x: (x * 0 + 0.3) == 0.3, f"{_dtype} and a number it has not", x=f"{_dtype}: n 24", n=N)
for _dtype in ("i32", "i16", "i8", "u8"):
    family(f"of {_dtype}")
    for _f in (torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, torch.eq, torch.lt, torch.bitwise_and):
        case(_f.__name__, _f, f"of {_dtype}", x=f"{_dtype} <100: n 24", y=f"{_dtype} <100: n 1", n=N)
    case("add", lambda x, y: x + y, f"{_dtype} and bool", x=f"{_dtype}: n 24", y="bool: n 24", n=N)
    case("mul", lambda x, y: x * y * y, f"{_dtype} beyond it", x=f"{_dtype} <100: n 37", y=f"{_dtype} <100: n 37", n=N)
    case("add", lambda x: x - 1 + 300 % 128, f"{_dtype} and a number", x=f"{_dtype}: n 37", n=N)
    case("div_floor", lambda x: x // 7, _dtype, x=f"{_dtype}: n 24", n=N)
    case("div", lambda x: x / 7, _dtype, x=f"{_dtype}: n 24", n=N)
    case("sigmoid", torch.sigmoid, _dtype, x=f"{_dtype}: n 24", n=N)
    case("clamp", lambda x: x.clamp(1, 5), _dtype, x=f"{_dtype}: n 24", n=N)
family("of bool")
case("add", torch.add, "bool", x="bool: n 8", y="bool: 8", n=N)
case("mul", torch.mul, "bool", x="bool: n 8", y="bool: 8", n=N)
case("add", lambda x: x + 2, "bool and int", x="bool: n 8", n=N)
case("mul", lambda x: x * 0.5, "bool and float", x="bool: n 8", n=N)
case("maximum", torch.maximum, "bool", x="bool: n 8", y="bool: 8", n=N)
case("eq", torch.eq, "bool", x="bool: n 8", y="bool: 8", n=N)
