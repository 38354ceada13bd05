"""The table of op cases: one row a case, run by test_ops.py.

`case("silu", F.silu, x="n 64", n=(1, 17, 3, 17))`: the name of a row in keepdim/ops.py, a function of the tensors in
their order, a shape for each tensor, and for each symbol the sizes to run, in order, in one loaded program. The range
declared is min..max of the sizes; the size traced is another one. A shape may start with a dtype and a rule for the
values: "i64: n", "f32 >0: n 4", "i64 <10: n" (indices), "f32 nan: n 8" (NaN and infinities inside), "i64 big: n".
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "u8": torch.uint8,
    "i32": torch.int32,
    "i64": torch.int64,
    "bool": torch.bool,
}
NMSE = 1e-7  # of f32; every other dtype is compared exactly


@dataclass(frozen=True)
class Tensor:
    """One tensor of a case: dtype, rule for its values, a size or expression of symbols per dim."""

    dtype: torch.dtype
    rule: str
    dims: tuple[str, ...]

    def sizes(self, values: dict[str, Any]) -> list[Any]:
        """The dims with the symbols replaced: by numbers, or by torch.export Dims."""
        return [eval(d, {}, dict(values)) for d in self.dims]  # noqa: S307  an expression from this table

    def make(self, values: dict[str, int], seed: int) -> torch.Tensor:
        """Values by the rule, from a seed."""
        g = torch.Generator().manual_seed(seed)
        shape = self.sizes(values)
        if self.rule == "big":
            return torch.randint(2**31, 2**40, shape, generator=g, dtype=self.dtype)
        if self.rule.startswith("<"):
            return torch.randint(0, int(self.rule[1:]), shape, generator=g, dtype=self.dtype)
        if self.dtype == torch.bool:
            return torch.rand(shape, generator=g) > 0.5
        if not self.dtype.is_floating_point:
            return torch.randint(0 if self.dtype == torch.uint8 else -9, 10, shape, generator=g, dtype=self.dtype)
        x = torch.randn(shape, generator=g)
        if self.rule == ">0":
            x = x.abs() + 0.1
        if self.rule == "nan" and x.numel():
            flat = x.view(-1)
            for i, v in enumerate((float("nan"), float("inf"), -float("inf"), -0.0)):
                flat[i * flat.numel() // 4] = v
        return x.to(self.dtype)


@dataclass(eq=False)
class Case:
    """One row: what it computes, at which shapes, over which sizes."""

    op: str
    fn: Callable[..., Any]
    form: str
    tensors: dict[str, Tensor]
    symbols: dict[str, tuple[int, ...]]
    nmse: float = NMSE
    remaining: str = ""  # why some of it stays with ExecuTorch: a part of the report's reason
    family: str = field(default="")

    @property
    def name(self) -> str:
        return f"{self.op}-{self.form}" if self.form else self.op

    def traced(self) -> dict[str, int]:
        """A size of each symbol that is not run, inside the range, different for each symbol, where there is one."""
        out: dict[str, int] = {}
        for s, run in self.symbols.items():
            inner = [n for n in range(max(min(run), 2), max(run) + 1) if n not in out.values()]
            out[s] = next((n for n in inner if n not in run), inner[0])
        return out

    def steps(self) -> list[dict[str, int]]:
        """The sizes of every call, in order."""
        longest = max((len(r) for r in self.symbols.values()), default=1)
        return [{s: r[i % len(r)] for s, r in self.symbols.items()} for i in range(longest)]


CASES: list[Case] = []
_family = ""


def family(name: str) -> None:
    """Rows that follow are lowered together with their neighbours of the same family, to be quick."""
    global _family
    _family = name


def case(
    op: str, fn: Callable[..., Any], form: str = "", nmse: float = NMSE, remaining: str = "", **names: Any
) -> None:
    """Add a row; strings are tensors, tuples of numbers are symbols."""
    tensors, symbols = {}, {}
    for k, v in names.items():
        if isinstance(v, str):
            head, _, dims = v.rpartition(":")
            dtype, _, rule = head.partition(" ")
            tensors[k] = Tensor(DTYPES[dtype or "f32"], rule, tuple(dims.split()))
        else:
            symbols[k] = tuple(v)
    row = Case(op, fn, form, tensors, symbols, nmse, remaining, _family)
    if any(c.name == row.name for c in CASES):
        raise ValueError(f"two cases {row.name}")
    CASES.append(row)


N = (1, 17, 3, 17)  # both ends of 1..17, one between, and back
B = (1, 4, 2, 4)
N0 = (0, 9, 1, 0, 9)  # empty too
aten = torch.ops.aten
torch.manual_seed(0)

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

# ---------------------------------------------------------------- products
family("products")
case("matmul", torch.mm, "mm", x="n 24", y="24 m", n=N, m=B)
case("matmul", torch.mm, "mm over a symbol", x="m n", y="n 8", n=N, m=B)
case("matmul", torch.bmm, "bmm", x="b n 8", y="b 8 m", n=N, b=B, m=(2, 5, 33, 5))
case("matmul", torch.addmm, "addmm", c="5", x="n 8", y="8 5", n=N)
case("matmul", torch.addmm, "addmm matrix", c="n 5", x="n 8", y="8 5", n=N)
case(
    "matmul",
    lambda c, x, y: torch.addmm(c, x, y, alpha=2),
    "addmm alpha",
    c="5",
    x="n 8",
    y="8 5",
    n=N,
    remaining="alpha",
)
case(
    "matmul",
    lambda c, x, y: torch.addmm(c, x, y, beta=0.5),
    "addmm beta",
    c="5",
    x="n 8",
    y="8 5",
    n=N,
    remaining="beta",
)
case("matmul", torch.matmul, x="n 8", y="8 m", n=N, m=B)
case("matmul", torch.matmul, "3 by 2", x="b n 8", y="8 6", n=N, b=B)
case("matmul", torch.matmul, "2 by 3", x="n 8", y="b 8 m", n=N, b=B, m=(2, 5, 9, 5))
case("matmul", torch.matmul, "batch broadcast", x="b 1 n 8", y="3 8 m", n=N, b=B, m=(2, 5, 9, 5))
case("matmul", torch.matmul, "4 by 4", x="b 3 n 8", y="b 3 8 m", n=N, b=B, m=(2, 5, 9, 5))
case("matmul", torch.matmul, "rank 5", x="b 1 2 n 8", y="3 1 8 m", n=N, b=B, m=(2, 5, 9, 5))
case("matmul", lambda x, y: x @ y.transpose(-1, -2), "transposed", x="b 2 n 8", y="b 2 m 8", n=N, b=B, m=(2, 5, 9, 5))
case("matmul", lambda x, y: x.transpose(1, 2) @ y, "left transposed", x="b 8 n", y="b 8 m", n=N, b=B, m=(2, 5, 9, 5))
case("matmul", torch.matmul, "empty", x="n 8", y="8 3", n=N0)
case("matmul", torch.matmul, "empty inside", x="3 n", y="n 5", n=N0)
case("matmul", torch.matmul, "nan", x="f32 nan: n 8", y="8 5", n=N)
case("linear", nn.Linear(64, 24), x="n 64", n=N)
case("linear", nn.Linear(64, 24, bias=False), "no bias", x="b n 64", n=N, b=B)
case("linear", nn.Linear(7, 5), "odd", x="b n 7", n=N, b=B)
case("linear", F.linear, "weights are inputs", x="n 16", w="5 16", c="5", n=N)
case("linear", F.linear, "over a symbol", x="3 n", w="5 n", n=N)
case("linear", nn.Linear(16, 5), "vector", x="16")
case("linear", nn.Linear(16, 5), "rank 5", x="2 1 n 3 16", n=N)
case("linear", nn.Linear(16, 5), "empty", x="n 16", n=N0)
case("linear", lambda x, w: F.linear(x.transpose(0, 1), w), "not contiguous", x="8 n", w="5 8", n=N)
case("linear", nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)), "two", x="n 16", n=(1, 300, 40, 300))

# ---------------------------------------------------------------- over dims
family("reductions")
for _name, _f in (("sum", torch.sum), ("mean", torch.mean), ("amax", torch.amax), ("amin", torch.amin)):
    case(_name, lambda x, f=_f: f(x, 1), x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x, -1, keepdim=True), "keepdim", x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x, (0, -1)), "several", x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x, (-1, 0, 1), keepdim=True), "all dims", x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x.permute(2, 0, 1), (0, 2)), "not contiguous", x="b n 8", n=N, b=B)
    case(_name, lambda x, f=_f: f(x, 0), "nan", x="f32 nan: 4 n", n=N)
family("reductions forms")
case("sum", torch.sum, "whole", x="b n 8", n=N, b=B)
case("mean", torch.mean, "whole", x="b n 8", n=N, b=B)
case("amax", torch.max, "whole", x="b n 8", n=N, b=B)
case("amin", torch.min, "whole", x="b n 8", n=N, b=B)
case("amax", lambda x: torch.amax(x, ()), "no dims", x="b n 8", n=N, b=B)
case("sum", lambda x: x.sum(0), "i64", x="i64 big: n 3", n=N)
case("sum", lambda x: x.sum(), "of bool", x="bool: n 3", n=N)
case("sum", lambda x: x.sum(1, dtype=torch.float32), "dtype", x="i64: n 3", n=N)
case("mean", lambda x: x.mean(1, dtype=torch.float32), "dtype", x="i64: n 3", n=N)
case("amax", lambda x: x.amax(0), "i64", x="i64 big: n 3", n=N)
case("amin", lambda x: x.amin(-1), "i32", x="i32: n 3", n=N)
case("sum", lambda x: x.sum(0), "empty", x="n 4", n=N0)
case("mean", lambda x: x.mean(0), "empty", x="n 4", n=N0)
case("amax", lambda x: x.amax(1), "empty", x="n 4", n=N0)
case("sum", lambda x: x.sum((1, 3)), "rank 5", x="2 n 3 b 2", n=N, b=B)
case("sum", lambda x: x.sum(), "rank 0", x="")
case("sum", lambda x: x.sum(0), "long", x="n", n=(1, 5000, 70, 5000))
family("rows")
for _d in (0, 1, 2, -1):
    case("softmax", lambda x, d=_d: F.softmax(x, d), f"dim {_d}", x="b n 8", n=N, b=B)
case("softmax", lambda x: F.softmax(x, 1), "over a symbol", x="3 n", n=(1, 300, 40, 300))
case("softmax", lambda x: torch.softmax(x, 0), "vector", x="n", n=N)
case("softmax", lambda x: torch.softmax(x, 1, dtype=torch.float32), "of i64", x="i64: n 5", n=N)
case("softmax", lambda x: aten._softmax(x, -1, False), "core form", x="n 5", n=N)
case("softmax", lambda x: F.softmax(x * 1e4, -1), "large", x="n 5", n=N)
case("softmax", lambda x: F.softmax(x, -1), "nan", x="f32 nan: 5 n", n=(4, 17, 5, 17))
case("softmax", lambda x: F.softmax(x, -1), "empty", x="n 5", n=N0)
case("softmax", lambda x: F.softmax(x, 0), "rank 0", x="")
case("softmax", lambda x: F.softmax(x.transpose(0, 1), -1), "not contiguous", x="n b", n=N, b=B)
_norm = nn.LayerNorm(24)
nn.init.normal_(_norm.weight), nn.init.normal_(_norm.bias)
case("layer_norm", _norm, x="b n 24", n=N, b=B)
case("layer_norm", lambda x: F.layer_norm(x, (24,)), "no weight", x="n 24", n=N)
case("layer_norm", lambda x, w: F.layer_norm(x, (24,), w), "no bias", x="n 24", w="24", n=N)
case("layer_norm", lambda x, w, c: F.layer_norm(x, (3, 8), w, c, 1e-3), "two dims", x="n 3 8", w="3 8", c="3 8", n=N)
case("layer_norm", lambda x: F.layer_norm(x, x.shape[1:]), "over a symbol", x="3 n 4", n=N)
case("layer_norm", lambda x: torch.native_layer_norm(x, (24,), None, None, 1e-5)[0], "native", x="n 24", n=N)
case("layer_norm", lambda x: F.layer_norm(x + 1000, (24,)), "far from 0", x="n 24", n=N)
case("layer_norm", lambda x: F.layer_norm(x, (24,)), "empty", x="n 24", n=N0)
case("layer_norm", lambda x: F.layer_norm(x.transpose(0, 1), (4,)), "not contiguous", x="4 n", n=N)
case("rms_norm", nn.RMSNorm(24), x="b n 24", n=N, b=B)
case("rms_norm", lambda x: F.rms_norm(x, (24,)), "no weight", x="n 24", n=N)
case("rms_norm", lambda x, w: F.rms_norm(x, (3, 8), w, 1e-3), "two dims", x="n 3 8", w="3 8", n=N)
case("rms_norm", lambda x, w: F.rms_norm(x, (24,), w, 1e-6), "eps", x="n 24", w="24", n=N)
case("rms_norm", lambda x: F.rms_norm(x, x.shape[1:]), "over a symbol", x="3 n", n=N)

# ---------------------------------------------------------------- shapes
family("shapes")
case("reshape", lambda x: x.view(x.size(0) * x.size(1), 8) + 1, "view", x="b n 8", n=N, b=B)
case("reshape", lambda x: (x * 2).view(-1), "flat", x="b n 8", n=N, b=B)
case("reshape", lambda x: x.reshape(x.size(0), 2, 4) + 1, "split a dim", x="n 8", n=N)
case("reshape", lambda x: x.view(x.size(0) // 2, 2, 8) + 1, "split a symbol", x="2*n 8", n=N)
case("reshape", lambda x: x.unsqueeze(0).unsqueeze(-1) + 1, "unsqueeze", x="n 4", n=N)
case("reshape", lambda x: x[None, :, None] + 1, "index with None", x="n 4", n=N)
case("reshape", lambda x: x.squeeze(1).squeeze(-1) + 1, "squeeze", x="n 1 4 1", n=N)
case("reshape", lambda x: x.squeeze((1, -1)) + 1, "squeeze dims", x="n 1 4 1", n=N)
case("reshape", lambda x: x.squeeze() + 1, "squeeze all", x="n 1 4 1", n=(2, 17, 3, 17))
case("reshape", lambda x: x.squeeze(0) + 1, "squeeze of no 1", x="3 n", n=N)
case("reshape", lambda x: x.flatten(1) + 1, "flatten", x="b n 4", n=N, b=B)
case("reshape", lambda x: x.unflatten(0, (-1, 2)) + 1, "unflatten", x="2*n 4", n=N)
case("reshape", lambda x: x.view(1) + 1, "rank 0 to 1", x="")
case("reshape", lambda x: x.view(()) + 1, "rank 1 to 0", x="1")
case("reshape", lambda x: x.view(-1, 2) * 2, "i64", x="i64 big: n 4", n=N)
case("reshape", lambda x: x.view(-1), "bool", x="bool: n 4", n=N)
case("reshape", lambda x: x.view(x.size(0) * 4) + 1, "empty", x="n 4", n=N0)
case("permute", lambda x: x.permute(2, 0, 1), x="b n 4", n=N, b=B)
case("permute", lambda x: x.permute(0, 2, 1, 3), "rank 4", x="b n 2 4", n=N, b=B)
case("permute", lambda x: x.permute(4, 0, -2, 1, 2), "rank 5", x="b n 2 4 3", n=N, b=B)
case("permute", lambda x: x.transpose(0, 1), "transpose", x="b n", n=N, b=B)
case("permute", lambda x: x.transpose(-1, 1), "negative", x="b n 3 4", n=N, b=B)
case("permute", lambda x: x.t() + 1, "t", x="n 4", n=N)
case("permute", lambda x: x.movedim(0, -1), "i64", x="i64: n 3 4", n=N)
case("permute", lambda x: x.permute(1, 0).permute(1, 0) + 1, "there and back", x="n 4", n=N)
case("expand", lambda x: x.expand(3, -1), x="1 n", n=N)
case("expand", lambda x: x.expand(x.size(0), 5, 4), "a middle dim", x="n 1 4", n=N)
case("expand", lambda x: x.expand(2, 3, -1, -1), "more dims", x="n 4", n=N)
case("expand", lambda x, y: x.expand(y.size(0), 4) * y, "to a symbol", x="1 4", y="n 4", n=N)
case("expand", lambda x, y: x.expand_as(y), "as", x="4", y="n 4", n=N)
case("expand", lambda x: x.expand(3, 2), "rank 0", x="")
case("expand", lambda x: x.expand(3, -1, 2), "bool", x="bool: n 1", n=N)
case("expand", lambda x, y: aten.copy(x, y), "copy", x="n 4", y="4", n=N)
case("expand", lambda x, y: aten.copy(x, y), "copy casts", x="n 4", y="i64: n 4", n=N)
case("expand", lambda x: x.unsqueeze(1).expand(-1, 2, -1).reshape(x.size(0) * 2, 4), "repeat_interleave", x="n 4", n=N)

# ---------------------------------------------------------------- parts
family("parts")
case("cat", lambda x, y: torch.cat([x, y], 0), x="n 4", y="b 4", n=N, b=B)
case("cat", lambda x, y: torch.cat([x, y, x], 1), "dim 1", x="2 n 4", y="2 b 4", n=N, b=B)
case("cat", lambda x, y: torch.cat([x, y], -1), "last", x="n 4", y="n 3", n=N)
case("cat", lambda x, y: torch.cat([x, y]), "i64", x="i64 big: n", y="i64: b", n=N, b=B)
case("cat", lambda x: torch.cat([x, x.transpose(0, 1)]), "not contiguous", x="4 4")
case("cat", lambda x, y: torch.cat([x, y]), "empty", x="n 4", y="b 4", n=N0, b=(0, 4, 0, 0, 4))
case("cat", lambda x: torch.cat([x]) + 1, "one", x="n 4", n=N)
case("cat", lambda x, y: torch.stack([x, y], 1), "stack", x="n 4", y="n 4", n=N)
case("cat", lambda x, y: torch.cat([x, y], 3), "rank 5", x="1 2 n 3 4", y="1 2 n b 4", n=N, b=B)
case("slice", lambda x: x[1:3], x="n 4", n=(3, 17, 5, 17))
case("slice", lambda x: x[:, 1:], "from 1", x="4 n", n=(2, 17, 3, 17))
case("slice", lambda x: x[-2:], "negative start", x="n 4", n=(2, 17, 3, 17))
case("slice", lambda x: x[:100] + 1, "end behind", x="n 4", n=N)
case("slice", lambda x: x[:-1], "negative end", x="n 4", n=N)
case("slice", lambda x: x[1:-1] * 2, "both", x="n 4", n=(2, 17, 3, 17))
case("slice", lambda x: x[: x.size(0) // 2], "half", x="n 4", n=(2, 17, 3, 17))
case("slice", lambda x: x[x.size(0) // 2 :], "other half", x="n 4", n=N)
case("slice", lambda x: torch.cat([x, 2 * x])[x.size(0) :], "symbolic start", x="n 4", n=N)
case("slice", lambda x, y: y[x.size(0) : 2 * x.size(0)], "symbolic both", x="n 4", y="3*n 4", n=N)
case("slice", lambda x: x[::2], "step 2", x="n 4", n=N)
case("slice", lambda x: x[:, 1::3], "step 3", x="4 n", n=N)
case("slice", lambda x: x[:, :, :, 1:, ::2], "rank 5", x="1 2 3 n 4", n=N)
case("slice", lambda x: x[1:] - x[:-1], "difference", x="n 4", n=N)
case("slice", lambda x: x[2:5] + 1, "i64", x="i64 big: n", n=(5, 17, 6, 17))
case("select", lambda x: x[0] + 1, x="n 4", n=N)
case("select", lambda x: x[-1] + 1, "last", x="n 4", n=N)
case("select", lambda x: x[:, -2] + 1, "negative", x="n 4", n=N)
case("select", lambda x: x[x.size(0) - 1] + 1, "symbolic", x="n 4", n=N)
case("select", lambda x: x[x.size(0) // 2] + 1, "middle", x="n 4", n=N)
case("select", lambda x: x[1, 2] + 1, "to rank 0", x="3 n", n=(3, 17, 4, 17))
case("select", lambda x: x.select(2, 1), "i64", x="i64: n 3 4", n=N)
case("slice", lambda x: [t + 1 for t in x.split(3, -1)], "split", x="n 8", n=N)
case("slice", lambda x: [t + 1 for t in x.chunk(2, -1)], "chunk", x="n 8", n=N)
case("slice", lambda x: [t * 2 for t in x.split([1, 3, 4], 1)], "split_with_sizes", x="n 8", n=N)
case("slice", lambda x: x.split([2, x.size(0) - 2])[1] * 2, "split by a symbol", x="n 4", n=(3, 17, 4, 17))
case("slice", lambda x: [t + 1 for t in x.unbind(1)], "unbind", x="n 3", n=N)

# ---------------------------------------------------------------- lookups and sources
family("sources")
case("embedding", nn.Embedding(10, 6), x="i64 <10: n", n=N)
case("embedding", nn.Embedding(10, 6, padding_idx=0), "padding", x="i64 <10: b n", n=N, b=B)
case("embedding", F.embedding, "weight is an input", x="i64 <7: n", w="7 3", n=N)
case("embedding", F.embedding, "i32", x="i32 <7: n", w="7 3", n=N)
case("embedding", lambda x, w: F.embedding(x, w), "of i64", x="i64 <7: n", w="i64 big: 7 3", n=N)
case("embedding", nn.Embedding(10, 6), "rank 0", x="i64 <10: ")
case("embedding", nn.Embedding(10, 6), "empty", x="i64 <10: n", n=N0)
case("embedding", F.embedding, "rows are a symbol", x="i64 <2: n", w="m 3", n=N, m=(2, 9, 3, 9))
case("arange", lambda x: torch.arange(x.size(0)) + 1, x="n 2", n=N)
case("arange", lambda x: torch.arange(x.size(0), dtype=torch.float32) * x, "f32", x="n", n=N)
case("arange", lambda x: torch.arange(x.size(0), 2 * x.size(0)) + 1, "symbolic start", x="n 2", n=N)
case("arange", lambda x: torch.arange(1, x.size(0) + 1, 2) + 1, "step", x="n 2", n=N)
case("arange", lambda x: torch.arange(x.size(0) - 1, -1, -1) + 1, "down", x="n 2", n=N)
case("arange", lambda x: torch.arange(0.5, 4.5, 0.5) * x, "float step", x="n 8", n=N)
case("arange", lambda x: torch.arange(x.size(0), dtype=torch.int32) + 1, "i32", x="n 2", n=N)
case("arange", lambda x: torch.arange(2**33, 2**33 + 4) + x, "above 2**31", x="i64: n 4", n=N)
case("full", lambda x: torch.full((x.size(0), 3), 2.5) + x, x="n 1", n=N)
case("full", lambda x: torch.zeros(x.size(0), 2) + x, "zeros", x="n 1", n=N)
case("full", lambda x: torch.ones(2, x.size(0)) * x, "ones", x="n", n=N)
case("full", lambda x: torch.full((3,), x.size(0)) + 1, "a size", x="n", n=N)
case("full", lambda x: torch.full_like(x, 7) + x, "like", x="n 3", n=N)
case("full", lambda x: torch.zeros_like(x) + 1, "zeros_like", x="i64: n 3", n=N)
case("full", lambda x: torch.ones_like(x, dtype=torch.int64) * 2**35, "ones_like", x="n 3", n=N)
case("full", lambda x: torch.full((x.size(0),), float("inf")), "inf", x="n", n=N)
case("full", lambda x: torch.full((x.size(0),), True), "bool", x="n", n=N)
case("full", lambda x: x.new_zeros(x.size(0), 2) + 1, "new_zeros", x="n 3", n=N)
case("full", lambda x: x.new_ones(2) + x, "new_ones", x="n 2", n=N)
case("full", lambda x: x + torch.scalar_tensor(1.5), "scalar_tensor", x="n 3", n=N)
case("full", lambda x: aten.scalar_tensor(x.size(0), dtype=torch.int64) + 1, "scalar_tensor of a size", x="n 3", n=N)
case("full", lambda x: torch.ones(x.size(0), 2), "empty", x="n 3", n=N0)
case("cast", lambda x: x.to(torch.int64), "f32 to i64", x="n 9", n=N)
case("cast", lambda x: x.to(torch.float32), "i64 to f32", x="i64 big: n", n=N)
case("cast", lambda x: x.to(torch.int32), "i64 to i32", x="i64: n", n=N)
case("cast", lambda x: x.to(torch.bool), "to bool", x="f32 nan: n 8", n=N)
case("cast", lambda x: x.float() * 2, "bool to f32", x="bool: n", n=N)
case("cast", lambda x: x.double(), "to f64", x="f32 nan: n 8", n=N)
case("cast", lambda x: x.half(), "to f16", x="f32 nan: n 8", n=N)
case("cast", lambda x: x.bfloat16(), "to bf16", x="f32 nan: n 8", n=N)
case("cast", lambda x: x.float(), "from f16", x="f16: n 8", n=N)
case("cast", lambda x: x.float(), "from bf16", x="bf16: n 8", n=N)
case("cast", lambda x: x.to(torch.float32), "from u8", x="u8: n 8", n=N)
case("cast", lambda x: x.clone() + x.contiguous(), "clone", x="n 3", n=N)
case("cast", lambda x: x.transpose(0, 1).contiguous() + 1, "contiguous", x="n 3", n=N)
case("cast", lambda x: x.long() + 1, "rank 0", x="")

# ---------------------------------------------------------------- alone
# torch.export, or a decomposition, treats a whole program in another way because of these.
family("a vector")
case("matmul", torch.matmul, "by a vector", x="n 8", y="8", n=N)
family("a copy")
case("reshape", lambda x: x.transpose(0, 1).reshape(x.size(0) * x.size(1)), "not contiguous", x="b n", n=N, b=B)
family("a copy of a part")
case("reshape", lambda x: x.permute(1, 2, 0).reshape(x.size(1) * 4, x.size(0)) * 1.5, "part of it", x="b n 4", n=N, b=B)
family("a symbol in two")
case("slice", lambda x: [t * 2 for t in x.chunk(2)], "chunk a symbol", x="2*n 4", n=N)
