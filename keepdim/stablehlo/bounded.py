"""Bounded programs: arguments padded to their upper bounds, sizes beside them.

What is compiled takes static arrays and the sizes of inputs that symbols are read from. Its public face has
`#stablehlo.bounds` types: it reads the sizes, takes the padded arrays, and sets the sizes of the results. XLA's CPU
client takes no bounded arguments, so that what it is given is the inner function.
"""

from __future__ import annotations

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


def places(program: StableHLOProgram) -> list[tuple[int, int]]:
    """(input, dim) of each size argument."""
    symbols = {s.name: s.source for s in program.inner.symbols}
    return [(symbols[a.name].input, symbols[a.name].index) for a in program.arguments if a.kind == "size"]


def pad(program: StableHLOProgram, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs in arrays of the bounds; what lies behind their ends does not matter."""
    out = []
    for x, t in zip(inputs, program.types, strict=False):
        if tuple(x.shape) != t.dims:
            room = torch.zeros(t.dims, dtype=x.dtype)
            room[tuple(slice(0, n) for n in x.shape)] = x
            x = room
        out.append(x)
    return out + [torch.tensor(inputs[i].shape[d], dtype=torch.int32) for i, d in places(program)]


class _Number:
    """A size that the face computes."""

    def __init__(self, face: Face, name: str):
        self.face, self.name = face, name

    def op(self, op: str, other: _Number | int) -> _Number:
        other = other if isinstance(other, _Number) else self.face.constant(other)
        return _Number(self.face, self.face.value(f"stablehlo.{op} {self.name}, {other.name} : tensor<i32>"))

    def __add__(self, other: _Number | int) -> _Number:
        return self if isinstance(other, int) and other == 0 else self.op("add", other)

    def __mul__(self, other: _Number | int) -> _Number:
        return self if isinstance(other, int) and other == 1 else self.op("multiply", other)

    __radd__, __rmul__ = __add__, __mul__


def _extreme(op: str) -> Callable[[Any, Any], _Number]:
    return lambda a, b: a.op(op, b) if isinstance(a, _Number) else b.op(op, a)


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "floordiv": lambda a, b: a.op("divide", b),  # sizes are not negative
    "mod": lambda a, b: a.op("remainder", b),
    "max": _extreme("maximum"),
    "min": _extreme("minimum"),
}


class Face:
    """The text of the public function."""

    def __init__(self, program: StableHLOProgram):
        self.program = program
        self.lines: list[str] = []
        self.types: list[str] = []  # of its arguments
        self.sizes: dict[str, Any] = {}  # symbol → the number it is

    def value(self, line: str) -> str:
        """Add a line that makes a value; its name."""
        self.lines.append(f"    %v{len(self.lines)} = {line}")
        return f"%v{len(self.lines) - 1}"

    def constant(self, number: int) -> _Number:
        return _Number(self, self.value(f"stablehlo.constant dense<{number}> : tensor<i32>"))

    def resized(self, x: str, have: str, want: str, axis: int, size: _Number) -> str:
        operands = f"{x}, {size.name}, dim = {axis} : ({have}, tensor<i32>)"
        return self.value(f"stablehlo.set_dimension_size {operands} -> {want}")

    def argument(self, t: Type, dims: Sequence[Dim]) -> str:
        """One more; what it has room for, as the inner function takes it."""
        self.types.append(have := _bounded(t, dims))
        x, left = f"%arg{len(self.types) - 1}", list(dims)
        for axis, d in enumerate(dims):
            if d.value is None:
                left[axis] = Dim.const(t.dims[axis])
                want = _bounded(t, left)
                x, have = self.resized(x, have, want, axis, self.constant(t.dims[axis])), want
        return x

    def size(self, symbol: Symbol) -> str:
        """The size of an argument that a symbol is read from."""
        src = symbol.source
        operands = f"%arg{src.input}, dim = {src.index} : ({self.types[src.input]})"
        place = _Number(self, self.value(f"stablehlo.get_dimension_size {operands} -> tensor<i32>"))
        mul, add = (d.over(self.sizes, FUNCTIONS) for d in (src.mul, -src.add))
        rest = place + add
        self.sizes[symbol.name] = rest if src.mul == 1 else rest.op("divide", mul)
        return place.name

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
    """A static type as the one with bounds, where a size may be smaller."""
    if all(d.value is not None for d in dims):
        return t.text
    sizes = ["?" if d.value is None else str(n) for n, d in zip(t.dims, dims, strict=True)]
    most = [str(n) if d.value is None else "?" for n, d in zip(t.dims, dims, strict=True)]
    return f"tensor<{'x'.join([*sizes, t.element])}, #stablehlo.bounds<{', '.join(most)}>>"


def text(program: StableHLOProgram) -> str:
    """The module with its public face."""
    body = program.hlo.text.replace("func.func public @main(", f"func.func private @{INNER}(", 1)
    head, _, rest = body.partition("\n")
    return Hlo.parse("\n".join([head, Face(program).text(), rest])).text


def inner(hlo: Hlo) -> Hlo:
    """Back from the module with its face to what is compiled."""
    if (found := next((f for f in hlo.entries if f.name.value == "main"), None)) is None:
        fail("load", hlo.stranger or "program", "is bounded and has no function main", "Save the program again")
    found.operation.erase()
    text = hlo.text.replace(f"func.func private @{INNER}(", "func.func public @main(")
    return Hlo.read(text, hlo.stranger) if hlo.stranger else Hlo.parse(text)
