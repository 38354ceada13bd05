"""Clean-up passes: scalar operands, redundant casts, no-op views, dead branches, common subexpressions.

All of them are bit-exact: `x + 0` is kept, because it turns -0 into 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from ..ir.program import Node, Program, Region, Shape
from ..shapes.dim import Dim, decide
from .graph import COMMUTES, FLOATS, Graph, Made, Supports, drop_dead, renumber, rewrite, supports_all

INT_BITS = {"i8": 8, "i16": 16, "i32": 32, "i64": 64}
BINARY = ("add", "mul", "maximum", "minimum", "sub", "div", "pow")
# dtype → dtypes that represent all of its values exactly
HOLDS = {
    "bool": ("u8", "i8", "i16", "i32", "i64", *FLOATS),
    "u8": ("i16", "i32", "i64", *FLOATS),
    "i8": ("i16", "i32", "i64", *FLOATS),
    "i16": ("i32", "i64", "f32", "f64"),
    "i32": ("i64", "f64"),
    "i64": (),
    "f16": ("f32", "f64"),
    "bf16": ("f32", "f64"),
    "f32": ("f64",),
    "f64": (),
}


def fold_scalars(p: Program, supports: Supports = supports_all) -> Program:
    """A rank-0 `full`, possibly cast, becomes the attribute `other` of the binary op that uses it."""

    def number(g: Graph, i: int) -> Dim | float | None:
        n = g.by(i, "full", "cast")
        if n is None or g.dims(i):
            return None
        k = n.attrs["value"] if n.op == "full" else number(g, n.ins[0])
        return k if k is not None and _fits(k, g.dtype(i)) else None

    def rule(g: Graph, n: Node) -> Made:
        if n.op not in BINARY or len(n.ins) != 2:
            return None
        a, b = n.ins
        for x, y in ((a, b), (b, a)) if n.op in COMMUTES else ((a, b),):
            if (k := number(g, y)) is not None:
                return [Node(n.op, (x,), n.outs, {**n.attrs, "other": k})]
        return None

    return rewrite(p, rule, supports)


def _fits(number: Dim | float, dtype: str) -> bool:
    """Whether the dtype represents the number exactly."""
    if dtype in FLOATS:
        return True
    if dtype not in INT_BITS or not isinstance(number, Dim):
        return False
    lo, hi = number.bounds
    return lo is not None and hi is not None and -(2 ** (INT_BITS[dtype] - 1)) <= lo and hi < 2 ** (INT_BITS[dtype] - 1)


def remove_casts(p: Program, supports: Supports = supports_all) -> Program:
    """Remove casts to the same dtype, and the inner cast of two if it is lossless."""

    def rule(g: Graph, n: Node) -> Made:
        if n.op != "cast":
            return None
        x, to = n.ins[0], g.dtype(n.outs[0])
        if g.dtype(x) == to:
            return x
        inner = g.by(x, "cast")
        if inner is None or g.dtype(x) not in HOLDS[g.dtype(inner.ins[0])]:
            return None
        source = g.dtype(inner.ins[0])
        if source == to:
            return inner.ins[0]
        # Out-of-range values convert to an integer differently from floats and from integers.
        if to in ("u8", *INT_BITS) and to not in HOLDS[source] and (g.dtype(x) in FLOATS or source in FLOATS):
            return None
        return [Node("cast", inner.ins, n.outs)]

    return rewrite(p, rule, supports)


def remove_noops(p: Program, supports: Supports = supports_all) -> Program:
    """Remove arithmetic with a neutral number, identity views and identity indexing; merge a view of a view."""

    def rule(g: Graph, n: Node) -> Made:
        if not n.ins or n.regions:
            return None
        x, out = n.ins[0], n.outs[0]
        if (same := _neutral(g, n)) is not None:
            return same
        if n.op == "index" and _indexes_all(g, n):
            return x if g.shape(x) == g.shape(out) else [Node("reshape", (x,), n.outs)]
        if n.op in ("reshape", "expand"):
            inner = g.by(x, n.op)
            source = x if inner is None else inner.ins[0]
            if g.shape(source) == g.shape(out):
                return source
            return [Node(n.op, (source,), n.outs)] if inner is not None else None
        if n.op == "permute":
            inner = g.by(x, "permute")
            order = [d.value for d in n.attrs["dims"]]
            if inner is not None:
                x, order = inner.ins[0], [inner.attrs["dims"][d].value for d in order]
            if order == sorted(order):
                return x
            return [Node("permute", (x,), n.outs, {"dims": tuple(map(Dim.const, order))})] if inner else None
        whole = n.op == "slice" and n.attrs["start"] == 0 and n.attrs["step"] == 1
        return x if (whole or (n.op == "cat" and len(n.ins) == 1)) and g.shape(x) == g.shape(out) else None

    return rewrite(p, rule, supports)


def _neutral(g: Graph, n: Node) -> int | None:
    """The operand x if the op returns it unchanged, including -0, infinities and NaN."""
    found = g.with_number(n, "mul", "div", "pow", "sub", "add")
    if found is None:
        return None
    x, k = found
    if n.op == "add":
        return x if k == 0 and g.dtype(x) in INT_BITS else None
    return x if (k == 0 and math.copysign(1, k) > 0 if n.op == "sub" else k == 1) else None


def _indexes_all(g: Graph, n: Node) -> bool:
    """Whether an index selects all positions of every dim in order, along the result's dims in order."""
    x, *indices = n.ins
    dims, before = g.dims(x), -1
    if [d.value for d in n.attrs["dims"]] != [*range(len(dims))]:
        return False
    for size, i in zip(dims, indices, strict=True):
        along = [d for d, s in enumerate(g.dims(i), len(g.dims(n.outs[0])) - len(g.dims(i))) if s.value != 1]
        while (m := g.by(i, "reshape")) is not None and [s for s in g.dims(m.ins[0]) if s.value != 1] == [size]:
            i = m.ins[0]
        m = g.by(i, "arange")
        if m is None or m.attrs["start"] != 0 or m.attrs["step"] != 1 or g.dims(i) != (size,) or len(along) != 1:
            return False
        if along[0] <= before:
            return False
        before = along[0]
    return True


def prune_branches(p: Program, supports: Supports = supports_all) -> Program:
    """Replace a cond that the contract's ranges decide by the branch that is taken."""
    same: dict[int, int] = {}

    def now(i: int) -> int:
        return same.get(i, i)

    def walk(nodes: Iterable[Node]) -> Iterator[Node]:
        for n in nodes:
            n = renumber(n, now)
            taken = decide(n.attrs["when"], "ge", 0) if "when" in n.attrs else None
            if taken is None:
                regions = tuple(Region(tuple(walk(r.nodes)), tuple(map(now, r.results))) for r in n.regions)
                yield replace(n, regions=regions)
                continue
            branch = n.regions[0 if taken else 1]
            yield from walk(branch.nodes)
            same.update(zip(n.outs, map(now, branch.results), strict=True))

    nodes = tuple(walk(p.nodes))
    return drop_dead(replace(p, nodes=nodes, results=tuple(map(now, p.results)))) if same else p


def merge_common(p: Program, supports: Supports = supports_all) -> Program:
    """Common subexpression elimination. Nodes that read a state are kept: it may change between them."""
    seen: dict[object, int] = {}

    def rule(g: Graph, n: Node) -> Made:
        if len(n.outs) != 1 or n.regions or any(g.values[i].kind == "state" for i in n.ins if i >= 0):
            return None
        key = (n.op, n.ins, repr(sorted(n.attrs.items())), g.shape(n.outs[0]))
        first = seen.get(key)
        if first is None or first in g.hidden:
            seen[key] = n.outs[0]
            return None
        return first

    return rewrite(p, rule, supports)


def unflatten(p: Program, supports: Supports = supports_all) -> Program:
    """Remove the reshapes around a product that merge its leading dims before and split them after."""

    def source(g: Graph, i: int, kept: int, lead: tuple[Dim, ...]) -> int | None:
        """The operand of the reshape that makes `i`, if its dims are `lead` and the last `kept` dims of `i`."""
        n = g.by(i, "reshape")
        return n.ins[0] if n and g.dims(n.ins[0]) == (*lead, *g.dims(i)[-kept:]) else None

    def rule(g: Graph, n: Node) -> Made:
        m = g.only(n.ins[0], "matmul", "linear") if n.op == "reshape" else None
        if m is None:
            return None
        kept = 2 if m.op == "matmul" else 1
        inside, out = g.dims(n.ins[0]), g.dims(n.outs[0])
        if len(inside) != kept + 1 or len(out) < kept or out[-kept:] != inside[-kept:]:
            return None
        x = source(g, m.ins[0], kept, out[:-kept])
        y = source(g, m.ins[1], kept, out[:-kept]) if m.op == "matmul" else m.ins[1]
        return [Node(m.op, (x, y, *m.ins[2:]), n.outs, m.attrs)] if x is not None and y is not None else None

    return rewrite(p, rule, supports)


def transposed(shape: Shape) -> Shape:
    """The shape with its last two dims transposed."""
    return Shape(shape.dtype, (*shape.dims[:-2], shape.dims[-1], shape.dims[-2]))
