"""The table of op cases: one row a case, run by frontend/test_op_cases.py.

`case("silu", F.silu, x="n 64", n=(1, 17, 3, 17))`: the name of a row in keepdim/ops, a function of the tensors in
their order, a shape for each tensor, and for each symbol the sizes to run, in order, in one loaded program. The range
declared is min..max of the sizes; the size traced is another one. A shape may start with a dtype and a rule for the
values: "i64: n", "f32 >0: n 4", "i64 <10: n" (indices), "f32 nan: n 8" (NaN and infinities inside), "i64 big: n".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "u8": torch.uint8,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "bool": torch.bool,
}
# How far each element may be from eager's, of its own and the mean magnitude: last places of sums in another order.
# Integers are compared exactly.
NEAR = {torch.float32: 1e-5, torch.float64: 1e-14, torch.float16: 1e-3, torch.bfloat16: 8e-3}


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
    near: float | None = None
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
    op: str, fn: Callable[..., Any], form: str = "", near: float | None = None, remaining: str = "", **names: Any
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
    row = Case(op, fn, form, tensors, symbols, near, remaining, _family)
    if any(c.name == row.name for c in CASES):
        raise ValueError(f"two cases {row.name}")
    CASES.append(row)


N = (1, 17, 3, 17)  # both ends of 1..17, one between, and back
B = (1, 4, 2, 4)
N0 = (0, 9, 1, 0, 9)  # empty too
aten = torch.ops.aten
