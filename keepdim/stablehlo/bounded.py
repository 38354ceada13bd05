"""Bounded programs: arguments padded to their upper bounds, and their sizes as further arguments.

The compiled function takes static arrays and the input sizes that symbols are read from. The public function has
`#stablehlo.bounds` types: it reads the sizes, passes the padded arrays on, and sets the sizes of the results. XLA's CPU
client does not accept bounded arguments, so it compiles the inner function.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import fail
from ..shapes.contract import Symbol
from ..shapes.dim import Dim
from .mlir import Type
from .refine import Hlo

if TYPE_CHECKING:
    from .program import StableHLOProgram

INNER = "padded"


def size_arguments(program: StableHLOProgram) -> list[tuple[int, int]]:
    """(input, dim) of each size argument."""
    symbols = {s.name: s.source for s in program.inner.symbols}
    return [(symbols[a.name].input, symbols[a.name].index) for a in program.arguments if a.kind == "size"]


def pad(program: StableHLOProgram, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs padded to the bounds; the padding is arbitrary."""
    out = []
    for x, t in zip(inputs, program.types, strict=False):
        if tuple(x.shape) != t.dims:
            padded = torch.zeros(t.dims, dtype=x.dtype)
            padded[tuple(slice(0, n) for n in x.shape)] = x
            x = padded
        out.append(x)
    return out + [torch.tensor(inputs[i].shape[d], dtype=torch.int32) for i, d in size_arguments(program)]


class _Number:
    """A size that the public function computes."""

    def __init__(self, function: PublicFunction, name: str):
        self.function, self.name = function, name

    def op(self, op: str, other: _Number | int) -> _Number:
        other = other if isinstance(other, _Number) else self.function.constant(other)
        return _Number(self.function, self.function.value(f"stablehlo.{op} {self.name}, {other.name} : tensor<i32>"))

    def __add__(self, other: _Number | int) -> _Number:
        return self if isinstance(other, int) and other == 0 else self.op("add", other)

    def __mul__(self, other: _Number | int) -> _Number:
        return self if isinstance(other, int) and other == 1 else self.op("multiply", other)

    def __sub__(self, other: _Number | int) -> _Number:
        return self + -other if isinstance(other, int) else self.op("subtract", other)

    def __floordiv__(self, other: _Number | int) -> _Number:
        return self.op("divide", other)  # sizes are not negative

    __radd__, __rmul__ = __add__, __mul__


def _extreme(op: str) -> Callable[[Any, Any], _Number]:
    return lambda a, b: a.op(op, b) if isinstance(a, _Number) else b.op(op, a)


FUNCTIONS: dict[str, Callable[[Any, Any], _Number]] = {
    "floordiv": operator.floordiv,
    "mod": lambda a, b: a.op("remainder", b),
    "max": _extreme("maximum"),
    "min": _extreme("minimum"),
}


class PublicFunction:
    """Writes the text of the public function."""

    def __init__(self, program: StableHLOProgram):
        self.program = program
        self.lines: list[str] = []
        self.types: list[str] = []  # of its arguments
        self.sizes: dict[str, _Number] = {}  # symbol → its value

    def value(self, line: str) -> str:
        """Add an operation; returns the name of its value."""
        self.lines.append(f"    %v{len(self.lines)} = {line}")
        return f"%v{len(self.lines) - 1}"

    def constant(self, number: int) -> _Number:
        return _Number(self, self.value(f"stablehlo.constant dense<{number}> : tensor<i32>"))

    def resized(self, x: str, have: str, want: str, axis: int, size: _Number) -> str:
        operands = f"{x}, {size.name}, dim = {axis} : ({have}, tensor<i32>)"
        return self.value(f"stablehlo.set_dimension_size {operands} -> {want}")

    def argument(self, t: Type, dims: Sequence[Dim]) -> str:
        """Add an argument; returns it as a static array for the inner function."""
        self.types.append(have := _bounded(t, dims))
        x, left = f"%arg{len(self.types) - 1}", list(dims)
        for axis, d in enumerate(dims):
            if d.value is None:
                left[axis] = Dim.const(t.dims[axis])
                want = _bounded(t, left)
                x, have = self.resized(x, have, want, axis, self.constant(t.dims[axis])), want
        return x

    def size(self, symbol: Symbol) -> str:
        """The size of an argument that a symbol is read from; defines the symbol."""
        src = symbol.source
        operands = f"%arg{src.input}, dim = {src.index} : ({self.types[src.input]})"
        size = _Number(self, self.value(f"stablehlo.get_dimension_size {operands} -> tensor<i32>"))
        self.sizes[symbol.name] = symbol.solve(size, lambda d: d.over(self.sizes, FUNCTIONS))
        return size.name

    def result(self, x: str, t: Type, dims: Sequence[Dim]) -> tuple[str, str]:
        """A result with its sizes, and its type."""
        have, text = [Dim.const(n) for n in t.dims], t.text
        for axis, d in enumerate(dims):
            if d.value is None:
                have[axis] = d
                want = _bounded(t, have)
                x, text = self.resized(x, text, want, axis, d.over(self.sizes, FUNCTIONS)), want
        return x, text

    def text(self) -> str:
        program, ins, outs = self.program, self.program.hlo.inputs, self.program.hlo.results
        symbols = {s.name: s for s in program.inner.symbols}
        shapes = [s.dims for s in program.inner.inputs]
        given = [
            self.size(symbols[a.name]) if a.kind == "size" else self.argument(t, shapes[i] if a.kind == "input" else ())
            for i, (a, t) in enumerate(zip(program.arguments, ins, strict=True))
        ]
        types = ", ".join(t.text for t in ins), ", ".join(t.text for t in outs)
        many = f":{len(outs)}" if len(outs) > 1 else ""
        self.lines.append(f"    %made{many} = func.call @{INNER}({', '.join(given)}) : ({types[0]}) -> ({types[1]})")
        made = [f"%made#{i}" if many else "%made" for i in range(len(outs))]
        for r, x in zip(program.results, made, strict=True):
            if r.kind == "count":
                self.sizes[r.name] = _Number(self, self.value(f"stablehlo.convert {x} : (tensor<i64>) -> tensor<i32>"))
        promised = [s.dims if s.dtype != "int" else () for s in program.inner.outputs]
        promised += [()] * (len(outs) - len(promised))
        shown = [self.result(x, t, dims) for x, t, dims in zip(made, outs, promised, strict=True)]
        args = ", ".join(f"%arg{i}: {t}" for i, t in enumerate(self.types))
        names, kinds = (", ".join(part) for part in zip(*shown, strict=True))
        head = f"  func.func public @main({args}) -> ({kinds}) {{"
        return "\n".join([head, *self.lines, f"    return {names} : {kinds}", "  }"])


def _bounded(t: Type, dims: Sequence[Dim]) -> str:
    """A static type with dynamic dims and bounds where a size may be smaller."""
    if all(d.value is not None for d in dims):
        return t.text
    sizes = ["?" if d.value is None else str(n) for n, d in zip(t.dims, dims, strict=True)]
    most = [str(n) if d.value is None else "?" for n, d in zip(t.dims, dims, strict=True)]
    return f"tensor<{'x'.join([*sizes, t.element])}, #stablehlo.bounds<{', '.join(most)}>>"


def text(program: StableHLOProgram) -> str:
    """The module with its public function."""
    body = program.hlo.text.replace("func.func public @main(", f"func.func private @{INNER}(", 1)
    head, _, rest = body.partition("\n")
    return Hlo.parse("\n".join([head, PublicFunction(program).text(), rest])).text


def inner(hlo: Hlo) -> Hlo:
    """The module of the compiled function, without the public one."""
    if (found := next((f for f in hlo.entries if f.name.value == "main"), None)) is None:
        fail("load", hlo.untrusted or "program", "is bounded and has no function main", "Save the program again")
    found.operation.erase()
    text = hlo.text.replace(f"func.func private @{INNER}(", "func.func public @main(")
    return Hlo.read(text, hlo.untrusted) if hlo.untrusted else Hlo.parse(text)
