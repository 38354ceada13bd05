"""Parsers of the text forms of a Dim and of a Program, as `str` writes them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import NoReturn

from ..errors import fail
from ..shapes.contract import VERSION, Constraint, Contract, Source, Spec, Symbol
from ..shapes.dim import CMPS, MAKE, Dim, floordiv, mod
from .program import NONE, Attr, Node, Part, Pass, Program, Region, Value, verify


def parse_program(text: str) -> Program:
    """Parse and verify a Program."""
    return verify(_TextParser(text).program())


def parse(text: str, symbols: Mapping[str, Dim]) -> Dim:
    """Parse the text form of a Dim.

    >>> s = Dim.symbol("s", 1, 8)
    >>> parse("max(2*s - 1, 4) + s % 3", {"s": s})
    Dim('max(2*s - 1, 4) + s % 3')
    """

    def walk(n: ast.AST) -> Dim:
        match n:
            case ast.Constant(value=int(v)):
                return Dim.const(v)
            case ast.Name(id=name) if name in symbols:
                return symbols[name]
            case ast.UnaryOp(op=ast.USub(), operand=x):
                return -walk(x)
            case ast.BinOp(left=a, op=op, right=b):
                if (f := _BINARY.get(type(op))) is not None:
                    return f(walk(a), walk(b))
            case ast.Call(func=ast.Name(id=("max" | "min") as kind), args=args):
                return MAKE[kind](*(walk(a) for a in args))
        fail("dims", f"expression {text!r}", f"cannot be read at {ast.unparse(n)!r}")

    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as e:
        fail("dims", f"expression {text!r}", "is not an expression", cause=e)
    return walk(tree)


_BINARY: dict[type, Callable[[Dim, Dim], Dim]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: floordiv,
    ast.Mod: mod,
}


class _TextParser:
    """A line-by-line parser of `str(program)`."""

    def __init__(self, text: str):
        self.lines = [line for line in text.splitlines() if line.strip()]
        self.at = 0
        self.symbols: list[Symbol] = []
        self.dims: dict[str, Dim] = {}
        self.inputs: list[Spec] = []
        self.values: list[Value] = []
        self.ids: dict[str, int] = {}

    def _bad(self, line: str) -> NoReturn:
        fail("text", f"line {self.at}", f"cannot be read: {line.strip()!r}")

    def _match(self, pattern: str, line: str) -> tuple[str, ...]:
        m = re.fullmatch(pattern, line.strip())
        return m.groups(default="") if m else self._bad(line)

    def _take(self, start: str) -> str | None:
        if self.at < len(self.lines) and self.lines[self.at].strip().startswith(start):
            self.at += 1
            return self.lines[self.at - 1]
        return None

    def _shape(self, text: str) -> tuple[str, tuple[Dim, ...]]:
        dtype, dims = self._match(r"(\w+)\[(.*)\]", text)
        return dtype, tuple(parse(d, self.dims) for d in _split(dims, ","))

    def _dim(self, text: str) -> Dim:
        return parse(text, self.dims)

    def program(self) -> Program:
        (version,) = self._match(r"keepdim program (\d+)", self._take("keepdim") or "")
        if int(version) != VERSION:
            fail("text", "program", f"format version {version} is not {VERSION}")
        passes = []
        while (line := self._take("pass ")) is not None:
            name, before, after = self._match(r"pass (\w+): (\d+) -> (\d+) nodes", line)
            passes.append(Pass(name, int(before), int(after)))
        modules = []
        while (line := self._take("module ")) is not None:
            path, names = self._match(r"module (\S+): (.*)", line)
            modules.append(Part(path, tuple(_split(names, ","))))
        raw_symbols = []
        while (line := self._take("symbol ")) is not None:
            s = self._match(
                r"symbol (\w+): (-?\d*)\.\.(-?\d*) from (\S+)\.(\w+)\((\d+)\) = \((.*)\) \* \w+ \+ \((.*)\)", line
            )
            name, lo, hi = s[0], int(s[1]) if s[1] else None, int(s[2]) if s[2] else None
            self.dims[name] = Dim.symbol(name, lo, hi)
            raw_symbols.append((name, lo, hi, s[3:]))
        while (line := self._take("input ")) is not None:
            name, shape = self._match(r"input (\S+): (.*)", line)
            self.ids[name] = len(self.inputs)
            self.inputs.append(Spec(name, *self._shape(shape)))
        for name, lo, hi, (input_name, kind, index, m, a) in raw_symbols:
            if input_name not in self.ids:
                fail("text", f"symbol {name!r}", f"is read from unknown input {input_name!r}")
            source = Source(kind, self.ids[input_name], int(index), self._dim(m), self._dim(a))
            self.symbols.append(Symbol(name, lo, hi, source))
        constraints = []
        while (line := self._take("require ")) is not None:
            lhs, sign, rhs, why = self._match(r"require (.*?) (==|!=|<=|>=|<|>) (.*?)(?:  # (.*))?", line)
            cmp = next(k for k, (text, _) in CMPS.items() if text == sign)
            constraints.append(Constraint(self._dim(lhs), cmp, self._dim(rhs), why))
        while (line := self._take("const ") or self._take("state ")) is not None:
            kind, name, shape, key = self._match(r"(const|state) (\S+): (.*) @ (\S+)", line)
            self._value(Value(name, *self._shape(shape), kind, key))
        nodes = self._nodes()
        outputs, results = self._outputs()
        contract = Contract(tuple(self.symbols), tuple(self.inputs), tuple(constraints), tuple(outputs))
        return Program(contract, tuple(self.values), nodes, tuple(results), tuple(passes), tuple(modules))

    def _value(self, v: Value) -> int:
        self.ids[v.name] = len(self.inputs) + len(self.values)
        self.values.append(v)
        return self.ids[v.name]

    def _id(self, name: str) -> int:
        if name == "-":
            return NONE
        return self.ids[name] if name in self.ids else self._bad(name)

    def _nodes(self) -> tuple[Node, ...]:
        nodes = []
        while self.at < len(self.lines):
            line = self.lines[self.at].strip()
            if line.startswith(("output ", "yield ")) or line in ("yield", "region"):
                break
            self.at += 1
            outs, op, ins, attrs = self._match(r"(.*?) ?= (\w+)\((.*?)\)(?: \{(.*)\})?", line)
            operands = tuple(self._id(i) for i in _split(ins, ","))
            regions = []
            while self.at < len(self.lines) and self.lines[self.at].strip() == "region":
                self.at += 1
                body = self._nodes()
                (names,) = self._match(r"yield ?(.*)", self._take("yield") or "")
                regions.append(Region(body, tuple(self._id(i) for i in _split(names, ","))))
            made = []
            for out in _split(outs, ";"):
                name, shape = self._match(r"(\S+): (.*)", out)
                made.append(self._value(Value(name, *self._shape(shape), "temp")))
            pairs = dict(a.split("=", 1) for a in _split(attrs, ";"))
            nodes.append(Node(op, operands, tuple(made), {k: self._attr(v) for k, v in pairs.items()}, tuple(regions)))
        return tuple(nodes)

    def _attr(self, text: str) -> Attr:
        if text in ("true", "false"):
            return text == "true"
        if text.startswith('"'):
            return json.loads(text)
        if text.startswith("["):
            return tuple(self._dim(t) for t in _split(text[1:-1], ","))
        if re.fullmatch(r"-?(\d+\.\d*(e[-+]?\d+)?|\d+e[-+]?\d+|inf|nan)", text):
            return float(text)
        return self._dim(text)

    def _outputs(self) -> tuple[list[Spec], list[int]]:
        outputs, results = [], []
        while (line := self._take("output ")) is not None:
            name, shape, source = self._match(r"output (\S+): (\w+\[.*?\])(?: = (\S+))?", line)
            outputs.append(Spec(name, *self._shape(shape)))
            results.append(self._id(source) if source else NONE)
        if self.at != len(self.lines):
            self._bad(self.lines[self.at])
        return outputs, results


def _split(text: str, sep: str) -> list[str]:
    """Split at separators outside brackets and quotes."""
    parts, depth, quoted, escaped, part = [], 0, False, False, ""
    for ch in text:
        quoted ^= ch == '"' and not escaped
        escaped = ch == "\\" and not escaped
        depth += (ch in "([{") - (ch in ")]}") if not quoted else 0
        if ch == sep and depth == 0 and not quoted:
            parts.append(part.strip())
            part = ""
        else:
            part += ch
    return [*parts, part.strip()] if part.strip() else parts
