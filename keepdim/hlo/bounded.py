"""Bounded programs: arguments padded to their upper bounds, sizes beside them.

What is compiled takes static arrays and the sizes of inputs that symbols are read from. Its public face has
`#stablehlo.bounds` types: it reads the sizes, takes the padded arrays, and sets the sizes of the results. XLA's CPU
client takes no bounded arguments, so that what it is given is the inner function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..dims import Dim
from ..refine import Hlo
from .xla import upload

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
    for x, t in zip(inputs, program.hlo.inputs, strict=False):
        if tuple(x.shape) != t.dims:
            room = torch.zeros(t.dims, dtype=x.dtype)
            room[tuple(slice(0, n) for n in x.shape)] = x
            x = room
        out.append(x)
    return out + [torch.tensor(inputs[i].shape[d], dtype=torch.int32) for i, d in places(program)]


def padded(program: StableHLOProgram, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """The same, on the device."""
    return [upload(x) for x in pad(program, inputs)]


def _bounded(text: str, dims: Sequence[int], spec: Sequence[Dim]) -> str:
    """A static type as the one with bounds, where the contract says that a size may be smaller."""
    if all(d.value is not None for d in spec):
        return text
    sizes = ["?" if d.value is None else str(n) for n, d in zip(dims, spec, strict=True)]
    most = [str(n) if d.value is None else "?" for n, d in zip(dims, spec, strict=True)]
    element = text.removesuffix(">").rpartition("x")[2]
    return f"tensor<{'x'.join([*sizes, element])}, #stablehlo.bounds<{', '.join(most)}>>"


class _Number:
    """A size that is computed in the text."""

    def __init__(self, value: Callable[[str], str], name: str):
        self.value, self.name = value, name

    def _op(self, op: str, other: _Number | int) -> _Number:
        if not isinstance(other, _Number):
            other = _Number(self.value, self.value(f"stablehlo.constant dense<{other}> : tensor<i32>"))
        return _Number(self.value, self.value(f"stablehlo.{op} {self.name}, {other.name} : tensor<i32>"))

    def __add__(self, other: _Number | int) -> _Number:
        return self if isinstance(other, int) and other == 0 else self._op("add", other)

    def __mul__(self, other: _Number | int) -> _Number:
        return self if isinstance(other, int) and other == 1 else self._op("multiply", other)

    def __floordiv__(self, other: _Number | int) -> _Number:
        return self._op("divide", other)  # sizes are not negative

    __radd__, __rmul__ = __add__, __mul__


FUNCTIONS = {
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a._op("remainder", b),
    "max": lambda a, b: a._op("maximum", b) if isinstance(a, _Number) else b._op("maximum", a),
    "min": lambda a, b: a._op("minimum", b) if isinstance(a, _Number) else b._op("minimum", a),
}


def text(program: StableHLOProgram) -> str:
    """The module with its public face."""
    ins, outs = program.hlo.inputs, program.hlo.results
    lines: list[str] = []
    args, given, count = [], [], 0

    def value(line: str) -> str:
        nonlocal count
        count += 1
        lines.append(f"    %v{count} = {line}")
        return f"%v{count}"

    def resized(x: str, have: str, want: str, axis: int, size: str) -> str:
        return value(f"stablehlo.set_dimension_size {x}, {size}, dim = {axis} : ({have}, tensor<i32>) -> {want}")

    values: dict[str, _Number] = {}
    sizes = iter(places(program))
    for i, (a, t) in enumerate(zip(program.arguments, ins, strict=True)):
        if a.kind == "size":
            k, d = next(sizes)
            have = args[k].partition(": ")[2]
            given.append(value(f"stablehlo.get_dimension_size %arg{k}, dim = {d} : ({have}) -> tensor<i32>"))
            symbol = next(s for s in program.inner.symbols if s.name == a.name)
            mul, add = (Dim.of(d).over(values, FUNCTIONS) for d in (symbol.source.mul, -symbol.source.add))
            place = _Number(value, given[-1]) + add
            values[a.name] = place if mul == 1 else place // mul
            continue
        spec = program.inner.inputs[i].dims if a.kind == "input" else ()
        have = _bounded(t.text, t.dims, spec)
        args.append(f"%arg{len(args)}: {have}")
        x, dims = f"%arg{len(args) - 1}", list(spec)
        for axis, d in enumerate(spec):
            if d.value is None:
                dims[axis] = Dim.const(t.dims[axis])
                most = value(f"stablehlo.constant dense<{t.dims[axis]}> : tensor<i32>")
                x = resized(x, have, have := _bounded(t.text, t.dims, dims), axis, most)
        given.append(x)
    types = ", ".join(t.text for t in ins)
    made = ", ".join(t.text for t in outs)
    many = f":{len(outs)}" if len(outs) > 1 else ""
    lines.append(f"    %made{many} = func.call @{INNER}({', '.join(given)}) : ({types}) -> ({made})")
    specs = iter(program.inner.outputs)
    results, shown = [], []
    for i, (r, t) in enumerate(zip(program.results, outs, strict=True)):
        results.append(f"%made#{i}" if many else "%made")
        shown.append(t.text)
        if r.kind == "count":
            whole = value(f"stablehlo.convert {results[-1]} : (tensor<i64>) -> tensor<i32>")
            values[r.name] = _Number(value, whole)
    for i, (r, t) in enumerate(zip(program.results, outs, strict=True)):
        dims = next(specs).dims if r.kind == "output" else ()
        have = [Dim.const(n) for n in t.dims]
        for axis, d in enumerate(dims if len(dims) == len(t.dims) else ()):
            if d.value is None:
                size, have[axis] = d.over(values, FUNCTIONS), d
                wide = _bounded(t.text, t.dims, have)
                results[i], shown[i] = resized(results[i], shown[i], wide, axis, size.name), wide
    face = [f"  func.func public @main({', '.join(args)}) -> ({', '.join(shown)}) {{", *lines,
            f"    return {', '.join(results)} : {', '.join(shown)}", "  }"]  # fmt: skip
    body = re.sub(r"func\.func public @main\(", f"func.func private @{INNER}(", program.hlo.text, count=1)
    head, _, rest = body.partition("\n")
    return Hlo.parse("\n".join([head, *face, rest])).text


def inner(hlo: Hlo) -> Hlo:
    """Back from the module with its face to what is compiled."""
    for op in hlo.module.body.operations:
        if op.name.value == "main":
            op.operation.erase()
            break
    return Hlo.parse(hlo.text.replace(f"func.func private @{INNER}(", "func.func public @main("))
