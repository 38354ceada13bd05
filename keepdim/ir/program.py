"""The Program: what a delegate computes, with Dims as shapes.

Plain data (msgspec structs, stored as JSON), no torch. Values are numbered: the contract's inputs first, then `values`.
Weights are not inside: a const or state value names them by key. `verify` has the same rules as
`runtime/core/program.cpp`. `str(program)` is a text form that `text.parse_program` reads back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import msgspec

from ..errors import fail
from ..shapes.blocks import BLOCKS
from ..shapes.bounds import INT64_MAX
from ..shapes.contract import DTYPE_BYTES, VERSION, Contract, Dims, Spec, Symbol, convert, decode
from ..shapes.dim import CMPS, Dim, never_zero, range_text

NONE = -1  # a missing optional operand
MAX_DEPTH = 32  # of nested regions, which are read recursively
Attr = bool | Dim | float | str | tuple[Dim, ...]


class Shape(NamedTuple):
    """Dtype and dims of a value."""

    dtype: str
    dims: tuple[Dim, ...]


class Value(msgspec.Struct, frozen=True):
    """A tensor: const and state are named data, temps are produced by nodes."""

    name: str
    dtype: str
    dims: Dims
    kind: str  # const, state, temp; inputs are in the contract
    key: str = ""


class Node(msgspec.Struct, frozen=True):
    """One operation."""

    op: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    attrs: dict[str, Any] = {}
    regions: tuple[Region, ...] = ()


class Region(msgspec.Struct, frozen=True):
    """A body of nodes over the program's values; its results become the owning node's outs."""

    nodes: tuple[Node, ...]
    results: tuple[int, ...]


class Pass(msgspec.Struct, frozen=True):
    """A pass that ran on the program, and the number of nodes before and after."""

    name: str
    before: int
    after: int


class Part(msgspec.Struct, frozen=True):
    """A module of the model, by its path, and the names of the values that it computes."""

    path: str
    values: tuple[str, ...]


class Program(msgspec.Struct, frozen=True):
    """A contract, and the nodes that compute its outputs from its inputs."""

    contract: Contract
    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    results: tuple[int, ...]  # one per output; NONE for an integer output
    passes: tuple[Pass, ...] = ()  # in order; informational, not read by engines
    modules: tuple[Part, ...] = ()  # where in the model values come from; informational

    # -- reading
    def value(self, i: int) -> Value:
        """Value i; an input as a Value of kind 'input'."""
        n = len(self.contract.inputs)
        if i < n:
            spec = self.contract.inputs[i]
            return Value(spec.name, spec.dtype, spec.dims, "input")
        return self.values[i - n]

    def walk(self) -> Iterator[Node]:
        """All nodes; those inside regions after their owner."""
        return walk(self.nodes)

    # -- JSON
    def to_json(self) -> bytes:
        """The JSON that is stored in a file."""
        table = self.contract.table()
        contract = self.contract.to_wire(table)
        body = msgspec.to_builtins(
            {
                "values": self.values,
                "nodes": list(map(_node_to_builtins, self.nodes)),
                "results": self.results,
                "passes": self.passes,
                "modules": self.modules,
            },
            enc_hook=table.id,
        )
        return msgspec.json.encode({"version": VERSION, "contract": contract, **body})

    @staticmethod
    def from_json(data: bytes | str) -> Program:
        """Parse and verify."""
        raw = decode(data)
        contract, dims = Contract.from_wire(raw["contract"])
        if not all(isinstance(raw.get(k), list) for k in ("values", "nodes", "results")):
            fail("verify", "program", "lacks values, nodes or results")
        head = {k: raw.get(k, []) for k in ("values", "results", "passes", "modules")}
        body = convert(head, _Body, dims)
        nodes = tuple(_read_node(n, dims) for n in raw["nodes"])
        program = verify(Program(contract, body.values, nodes, body.results, body.passes, body.modules))
        _verify_rows(raw["contract"], raw["values"], raw["results"])
        return program

    # -- text
    def __str__(self) -> str:
        return "\n".join(_lines(self)) + "\n"


class _Body(msgspec.Struct):
    values: tuple[Value, ...]
    results: tuple[int, ...]
    passes: tuple[Pass, ...] = ()
    modules: tuple[Part, ...] = ()


def walk(nodes: Iterable[Node]) -> Iterator[Node]:
    """These nodes, each followed by those inside its regions."""
    for n in nodes:
        yield n
        for r in n.regions:
            yield from walk(r.nodes)


def _node_to_builtins(n: Node) -> dict[str, object]:
    """A node as builtins; floats that JSON lacks become strings."""
    attrs = {
        k: str(v) if isinstance(v, float) and (v != v or abs(v) == float("inf")) else v for k, v in n.attrs.items()
    }
    regions = [{"nodes": [_node_to_builtins(m) for m in r.nodes], "results": r.results} for r in n.regions]
    return {"op": n.op, "ins": n.ins, "outs": n.outs, "attrs": attrs, "regions": regions}


class _NodeHead(msgspec.Struct):
    op: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    attrs: dict[str, bool | int | float | str | tuple[int, ...]] = {}
    regions: list[dict[str, Any]] = []


def _read_node(raw: object, dims: list[Dim], depth: int = 0) -> Node:
    head = convert(raw, _NodeHead, dims)
    if head.regions and depth == MAX_DEPTH:
        fail("verify", f"node {head.op!r}", f"regions are nested deeper than {MAX_DEPTH}")
    attrs = {k: _read_attr(k, v, dims) for k, v in head.attrs.items()}
    regions = []
    for r in head.regions:
        if not isinstance(r.get("nodes"), list):
            fail("verify", f"node {head.op!r}", "has a region without nodes")
        nodes = tuple(_read_node(n, dims, depth + 1) for n in r["nodes"])
        regions.append(Region(nodes, convert({"values": [], "results": r.get("results")}, _Body, dims).results))
    return Node(head.op, head.ins, head.outs, attrs, tuple(regions))


def _read_attr(name: str, v: Any, dims: list[Dim]) -> Attr:
    def dim(i: int) -> Dim:
        if not 0 <= i < len(dims):
            fail("verify", f"attribute {name!r}", f"names dim {i} of {len(dims)}")
        return dims[i]

    if isinstance(v, bool) or isinstance(v, float):
        return v
    if isinstance(v, int):
        return dim(v)
    if isinstance(v, str):
        return float(v) if v in ("inf", "-inf", "nan") else v
    return tuple(dim(i) for i in v)


def schema() -> dict[str, object]:
    """The JSON Schema of the format; a Dim is the index of a row of the contract's dims table.

    >>> "Contract" in schema()["$defs"]
    True
    """
    return msgspec.json.schema(
        Program, schema_hook=lambda t: {"type": "integer", "description": "a row of contract.dims"}
    )


# ---------------------------------------------------------------- verify
def verify(p: Program) -> Program:
    """Check every rule of the format; returns the program, or raises the first violation."""
    c = p.contract
    verify_contract(c)
    names: set[str] = set()
    for spec in (*c.inputs, *c.outputs):
        if spec.dtype == "python":
            fail("verify", f"value {spec.name!r}", "a program takes and returns tensors and integers only")
    for spec in c.inputs:
        _unique(spec.name, names)
    for v in p.values:
        _unique(v.name, names)
        _verify_value(v)
    defined = set(range(len(c.inputs))) | {len(c.inputs) + i for i, v in enumerate(p.values) if v.kind != "temp"}
    produced: set[int] = set()
    _verify_nodes(p, p.nodes, defined, produced)
    temps = {len(c.inputs) + i for i, v in enumerate(p.values) if v.kind == "temp"}
    if temps - produced:
        fail("verify", f"value {p.value(min(temps - produced)).name!r}", "is made by no node")
    if len(p.results) != len(c.outputs):
        fail("verify", "results", f"are {len(p.results)} for {len(c.outputs)} outputs")
    for r, out in zip(p.results, c.outputs, strict=True):
        _verify_result(p, r, out, defined)
    for s in p.passes:
        if not s.name.isidentifier() or not 0 <= min(s.before, s.after) <= max(s.before, s.after) <= INT64_MAX:
            fail("verify", f"pass {s.name!r}", f"needs a name and two counts ({s.before}, {s.after})")
    for m in p.modules:
        if not m.path or m.path.split() != [m.path] or not names.issuperset(m.values):
            fail("verify", f"module {m.path!r}", "needs a path, and names of values")
    return p


def _unique(name: str, names: set[str]) -> None:
    if not name or name in names:
        fail("verify", f"value {name!r}", "needs a name of its own")
    names.add(name)


def verify_contract(c: Contract) -> None:
    """Check a program's contract; a method's contract, which may have `data`, is checked by the runtime."""
    if c.data or c.ensures:
        fail("verify", "contract", "a program has no sizes that only its outputs show")
    seen: set[str] = set()
    for s in c.symbols:
        if s.name in seen:
            fail("verify", f"symbol {s.name!r}", "is declared twice")
        _verify_source(c, s, seen)
        seen.add(s.name)
    for spec in (*c.inputs, *c.outputs):
        if spec.dtype in BLOCKS:
            fail("verify", f"value {spec.name!r}", f"dtype {spec.dtype} is only for a const or state")
        _verify_dims(spec.name, spec.dtype, spec.dims)
    for k in c.constraints:
        if k.cmp not in CMPS:
            fail("verify", f"constraint {k.lhs} {k.cmp} {k.rhs}", f"{k.cmp!r} is not a comparison")


def _verify_source(c: Contract, s: Symbol, earlier: set[str]) -> None:
    src, subject = s.source, f"symbol {s.name!r}"
    if not 0 <= src.input < len(c.inputs):
        fail("verify", subject, f"is read from input {src.input} of {len(c.inputs)}")
    spec = c.inputs[src.input]
    tensor = spec.dtype not in ("int", "python")
    if src.kind == "size":
        fits = tensor and 0 <= src.index < len(spec.dims)
    elif src.kind == "int":
        fits = spec.dtype == "int" and 0 <= src.index < 2**32
    elif src.kind == "item":
        least = prod(max(d.bounds[0] or 0, 0) for d in spec.dims)
        fits = spec.dtype in ("i8", "u8", "i16", "i32", "i64") and 0 <= src.index < min(least, 2**32)
    else:
        fail("verify", subject, f"has a source of unknown kind {src.kind!r}")
    if not fits:
        fail("verify", subject, f"cannot be read as {src.kind} {src.index} of input {spec.name!r} ({spec})")
    if late := (src.mul.symbols() | src.add.symbols()) - earlier:
        fail("verify", subject, f"its source needs {', '.join(sorted(late))}, which is not bound before it")
    if not never_zero(src.mul):
        fail("verify", subject, f"its source's factor {src.mul} can be zero")


def _verify_dims(name: str, dtype: str, dims: tuple[Dim, ...]) -> None:
    if dtype not in DTYPE_BYTES and dtype not in BLOCKS:
        fail("verify", f"value {name!r}", f"has unknown dtype {dtype!r}")
    if dtype == "int":
        if len(dims) != 1:
            fail("verify", f"value {name!r}", f"is an integer and takes one dim, its value, not {len(dims)}")
        return
    if dtype == "python" and dims:
        fail("verify", f"value {name!r}", "is not a tensor and takes no dims")
    total: int | None = BLOCKS[dtype][1] if dtype in BLOCKS else DTYPE_BYTES[dtype]
    for d in dims:
        lo, hi = d.bounds
        if lo is None or lo < 0:
            fail("verify", f"value {name!r}", f"its size {d} can be negative ({range_text(lo, hi)})")
        total = None if total is None or hi is None else total * hi
    if total is not None and total > INT64_MAX:
        fail("verify", f"value {name!r}", "its bytes overflow int64 at the upper bound")


def _verify_value(v: Value) -> None:
    if v.kind not in ("const", "state", "temp"):
        fail("verify", f"value {v.name!r}", f"has unknown kind {v.kind!r}")
    if v.dtype in ("int", "python"):
        fail("verify", f"value {v.name!r}", f"is a tensor and cannot have dtype {v.dtype!r}")
    _verify_dims(v.name, v.dtype, v.dims)
    if (v.kind == "temp") == bool(v.key):
        fail("verify", f"value {v.name!r}", "a temp has no key" if v.key else f"a {v.kind} needs a key")
    if v.kind != "temp" and any(d.value is None for d in v.dims):
        fail("verify", f"value {v.name!r}", f"a {v.kind} has constant dims")
    if v.dtype in BLOCKS:
        if v.kind == "temp":
            fail("verify", f"value {v.name!r}", f"dtype {v.dtype} is only for a const or state")
        block = BLOCKS[v.dtype][0]
        if not v.dims or v.dims[-1].eval({}) % block:
            fail("verify", f"value {v.name!r}", f"its rows are not a multiple of {block} elements, as {v.dtype} needs")


def _verify_nodes(p: Program, nodes: Iterable[Node], defined: set[int], produced: set[int]) -> None:
    total = len(p.contract.inputs) + len(p.values)
    for n in nodes:
        if not n.op:
            fail("verify", "node", "has no op")
        for i in n.ins:
            if i != NONE and i not in defined:
                fact = f"operand {i} is not defined before it" if 0 <= i < total else f"operand {i} is not a value"
                fail("verify", f"node {n.op!r}", fact)
        for r in n.regions:
            inner = set(defined)
            _verify_nodes(p, r.nodes, inner, produced)
            for i in r.results:
                if i not in inner:
                    fail("verify", f"node {n.op!r}", f"region result {i} is not defined")
        for i in n.outs:
            if not len(p.contract.inputs) <= i < total or p.value(i).kind != "temp":
                fail("verify", f"node {n.op!r}", f"makes value {i}, which is not a temp")
            if i in produced:
                fail("verify", f"node {n.op!r}", f"makes {p.value(i).name!r} a second time")
            produced.add(i)
            defined.add(i)


def _verify_result(p: Program, r: int, out: Spec, defined: set[int]) -> None:
    if (out.dtype == "int") != (r == NONE):
        fail("verify", f"output {out.name!r}", f"has dtype {out.dtype} and result {r}")
    if r == NONE:
        return
    if r not in defined:
        fail("verify", f"output {out.name!r}", f"its value {r} is not defined")
    v = p.value(r)
    if (v.dtype, v.dims) != (out.dtype, out.dims):
        have = Spec(v.name, v.dtype, v.dims)
        fail("verify", f"output {out.name!r}", f"is declared as {out}, but its value is {have}")


def _verify_rows(contract: dict[str, Any], values: list[Any], results: list[int]) -> None:
    """Check rows of the dims table, which the runtime compares: two rows can be equal Dims."""
    specs = contract["inputs"] + values
    for v in values:
        if v["kind"] != "temp" and any(contract["dims"][d][0] != "const" for d in v["dims"]):
            fail("verify", f"value {v['name']!r}", f"a {v['kind']} has constant dims")
    for r, out in zip(results, contract["outputs"], strict=True):
        if r != NONE and specs[r]["dims"] != out["dims"]:
            fail("verify", f"output {out['name']!r}", f"its dims are other rows than those of {specs[r]['name']!r}")


# ---------------------------------------------------------------- text
def _shape(dtype: str, dims: Iterable[Dim]) -> str:
    return f"{dtype}[{', '.join(map(str, dims))}]"


def _attr_text(v: Attr) -> str:
    if isinstance(v, bool):
        return "true" if v else "false"
    if isinstance(v, tuple):
        return f"[{', '.join(map(str, v))}]"
    return json.dumps(v) if isinstance(v, str) else repr(v) if isinstance(v, float) else str(v)


def _lines(p: Program) -> Iterator[str]:
    yield f"keepdim program {VERSION}"
    yield from (f"pass {s.name}: {s.before} -> {s.after} nodes" for s in p.passes)
    yield from (f"module {m.path}: {', '.join(m.values)}" for m in p.modules)
    c = p.contract
    for s in c.symbols:
        src = s.source
        read = f"{c.inputs[src.input].name}.{src.kind}({src.index})"
        yield f"symbol {s.name}: {range_text(s.lo, s.hi)} from {read} = ({src.mul}) * {s.name} + ({src.add})"
    yield from (f"input {spec.name}: {_shape(spec.dtype, spec.dims)}" for spec in c.inputs)
    yield from (f"require {k}" + (f"  # {k.sentence}" if k.sentence else "") for k in c.constraints)
    for v in p.values:
        if v.kind != "temp":
            yield f"{v.kind} {v.name}: {_shape(v.dtype, v.dims)} @ {v.key}"
    yield from _node_lines(p, p.nodes, "")
    for r, out in zip(p.results, c.outputs, strict=True):
        yield f"output {out.name}: {_shape(out.dtype, out.dims)}" + ("" if r == NONE else f" = {p.value(r).name}")


def _node_lines(p: Program, nodes: Iterable[Node], pad: str) -> Iterator[str]:
    for n in nodes:
        outs = "; ".join(f"{v.name}: {_shape(v.dtype, v.dims)}" for v in map(p.value, n.outs))
        ins = ", ".join("-" if i == NONE else p.value(i).name for i in n.ins)
        attrs = "; ".join(f"{k}={_attr_text(v)}" for k, v in sorted(n.attrs.items()))
        yield f"{pad}{outs} = {n.op}({ins})" + (f" {{{attrs}}}" if attrs else "")
        for r in n.regions:
            yield f"{pad}  region"
            yield from _node_lines(p, r.nodes, pad + "    ")
            yield f"{pad}  yield {', '.join(p.value(i).name for i in r.results)}"
