"""A Program as passes see it: producers and readers of values, constants; and `rewrite`, which replaces nodes.

A rule visits the nodes in order and returns replacement nodes, an equal earlier value, or None for no change. The last
replacement node produces the same value id, so later operands need no change; dead nodes are dropped afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from ..ir.program import NONE, Node, Part, Program, Region, Shape, Spec, Value, walk
from ..shapes.blocks import BLOCKS
from ..shapes.dim import Dim

FLOATS = ("f16", "bf16", "f32", "f64")
FULL = ("f32", "f64")  # 16-bit floats round and overflow between ops: fusing would change the numbers
COMMUTES = ("add", "mul", "maximum", "minimum", "eq", "ne")

Supports = Callable[[Program], bool]  # whether an engine supports a Program of one node
Made = list[Node] | int | None  # replacement nodes, an equal value, or no change


def supports_all(_: Program) -> bool:
    """An engine that supports every node."""
    return True


class Graph:
    """Producers and readers of a Program's values, updated while its nodes are replaced."""

    def __init__(self, p: Program):
        self.p = p
        self.values = [p.value(i) for i in range(len(p.contract.inputs))] + list(p.values)
        self.names = {v.name for v in self.values}
        self.results = set(p.results)
        self.made: dict[int, Node] = {}
        self.same: dict[int, int] = {}  # value → the equal earlier value that replaces it
        self.hidden: set[int] = set()  # values of regions already visited: not visible outside
        self.reads = Counter(p.results)
        for n in p.walk():
            self.reads.update(n.ins)
            self.reads.update(i for r in n.regions for i in r.results)

    # -- reading
    def dims(self, i: int) -> tuple[Dim, ...]:
        """The sizes of value i."""
        return self.values[i].dims

    def dtype(self, i: int) -> str:
        """The dtype of value i."""
        return self.values[i].dtype

    def shape(self, i: int) -> Shape:
        """Dtype and sizes of value i."""
        return Shape(self.values[i].dtype, self.values[i].dims)

    def by(self, i: int, *ops: str) -> Node | None:
        """The node that produces this value, if it is one of these ops."""
        n = self.made.get(i)
        return n if n is not None and n.op in ops else None

    def only(self, i: int, *ops: str) -> Node | None:
        """As `by`, if the value has a single reader."""
        return self.by(i, *ops) if self.reads[i] == 1 else None

    def within(self, i: int, nodes: Iterable[Node]) -> bool:
        """Whether only these nodes read the value."""
        return self.reads[i] == sum(n.ins.count(i) for n in nodes)

    def number(self, i: int) -> Dim | float | None:
        """The constant that all elements of this value are equal to, if known."""
        n = self.made.get(i)
        if n is None:
            return None
        if n.op == "full":
            return n.attrs["value"]
        exact = n.op in ("reshape", "expand") or (n.op == "cast" and self.dtype(i) in FLOATS)
        return self.number(n.ins[0]) if exact else None

    def with_number(self, n: Node | None, *ops: str) -> tuple[int, float] | None:
        """(operand, number) of a binary node of one of these ops whose result has the operand's shape."""
        if n is None or n.op not in ops:
            return None
        if len(n.ins) == 1:
            x, k = n.ins[0], n.attrs.get("other")
        else:
            (x, y), k = n.ins, self.number(n.ins[1])
            if k is None and n.op in COMMUTES:
                x, k = y, self.number(x)
        real = k if isinstance(k, float) else float(k.value) if isinstance(k, Dim) and k.value is not None else None
        return (x, real) if real is not None and self.shape(x) == self.shape(n.outs[0]) else None

    # -- making
    def temp(self, base: str, shape: Shape) -> int:
        """A new value."""
        name, k = base, 1
        while name in self.names:
            name, k = f"{base}.{k}", k + 1
        self.names.add(name)
        self.values.append(Value(name, shape.dtype, shape.dims, "temp"))
        return len(self.values) - 1

    def put(self, n: Node) -> None:
        """Register the node as the producer of its values."""
        for i in n.outs:
            self.made[i] = n

    def replaceable(self, out: int, i: int) -> bool:
        """Whether `i` may replace `out`. A result must stay a value of its own that a node produces."""
        if self.shape(i) != self.shape(out) or i in self.hidden:
            return False
        return out not in self.results or (self.values[i].kind == "temp" and i not in self.results)

    def single_node(self, n: Node) -> Program:
        """A Program of this node alone, with its operands as inputs: to ask an engine whether it supports the node."""
        c, out = self.p.contract, self.values[n.outs[0]]
        ids: dict[int, int] = {NONE: NONE}
        specs = list(c.inputs)
        quantised = [
            i for i in dict.fromkeys(n.ins) if i != NONE and self.dtype(i) in BLOCKS
        ]  # inputs cannot be quantised
        for i in n.ins:
            if i not in ids and i not in quantised:
                ids[i] = len(specs)
                specs.append(Spec(f"{out.name}.operand{len(specs)}", *self.shape(i)))
        ids |= {i: len(specs) + k for k, i in enumerate(quantised)}
        made = len(specs) + len(quantised)
        contract = replace(c, inputs=tuple(specs), outputs=(Spec(out.name, out.dtype, out.dims),))
        node = replace(n, ins=tuple(ids[i] for i in n.ins), outs=(made,))
        return Program(contract, (*(self.values[i] for i in quantised), out), (node,), (made,))


def rewrite(p: Program, rule: Callable[[Graph, Node], Made], supports: Supports = supports_all) -> Program:
    """Apply a rule to every node in order, also inside regions; replace only if the engine supports all new nodes."""
    g = Graph(p)

    def now(i: int) -> int:
        return g.same.get(i, i)

    def replaced(n: Node) -> list[Node]:
        made = rule(g, n)
        new = [n]
        if isinstance(made, int) and g.replaceable(n.outs[0], made):
            g.same[n.outs[0]] = made
            g.reads[made] += g.reads[n.outs[0]]
            new = []
        elif isinstance(made, list) and all(supports(g.single_node(m)) for m in made):
            new = made
        if new != [n]:
            g.reads.subtract(n.ins)
            g.reads.update(i for m in new for i in m.ins)
        return new

    def inside(r: Region) -> Region:
        outside = set(g.made)
        body = Region(all_of(r.nodes), tuple(map(now, r.results)))
        g.hidden |= g.made.keys() - outside
        return body

    def all_of(nodes: Iterable[Node]) -> tuple[Node, ...]:
        out: list[Node] = []
        for n in nodes:
            n = renumber(n, now) if g.same else n
            new = [replace(n, regions=tuple(map(inside, n.regions)))] if n.regions else replaced(n)
            for m in new:
                g.put(m)
            out += new
        return tuple(out)

    nodes = all_of(p.nodes)
    values = tuple(g.values[len(p.contract.inputs) :])
    return drop_dead(replace(p, values=values, nodes=nodes, results=tuple(map(now, p.results))))


def drop_dead(p: Program, supports: Supports = supports_all) -> Program:
    """Dead code elimination. Nodes that read a state are kept, since they may change it."""
    first = len(p.contract.inputs)
    needed = set(p.results) - {NONE}
    states = {i for i, v in enumerate(p.values, first) if v.kind == "state"}

    def live(nodes: Sequence[Node]) -> tuple[Node, ...]:
        out: list[Node] = []
        for n in reversed(nodes):
            if needed & set(n.outs) or any(states & set(m.ins) for m in walk([n])):
                needed.update(n.ins, n.outs, *(r.results for r in n.regions))
                regions = tuple(Region(live(r.nodes), r.results) for r in n.regions)
                out.append(replace(n, regions=regions) if regions else n)
        return tuple(reversed(out))

    nodes = live(p.nodes)
    if nodes == p.nodes and all(i in needed for i in range(first, first + len(p.values))):
        return p
    new: dict[int, int] = {i: i for i in range(first)} | {NONE: NONE}
    values: list[Value] = []
    for i, v in enumerate(p.values, first):
        if i in needed:
            new[i] = first + len(values)
            values.append(v)
    renumbered = tuple(renumber(n, new.__getitem__, outs=True) for n in nodes)
    names = {v.name for v in p.contract.inputs} | {v.name for v in values}
    kept = ((m.path, tuple(n for n in m.values if n in names)) for m in p.modules)
    modules = tuple(Part(path, left) for path, left in kept if left)
    results = tuple(new[r] for r in p.results)
    return replace(p, values=tuple(values), nodes=renumbered, results=results, modules=modules)


def renumber(n: Node, new: Callable[[int], int], outs: bool = False) -> Node:
    """The node with new value ids: its operands, and with `outs` also its results."""
    regions = tuple(
        Region(tuple(renumber(m, new, outs) for m in r.nodes), tuple(map(new, r.results))) for r in n.regions
    )
    return Node(n.op, tuple(map(new, n.ins)), tuple(map(new, n.outs)) if outs else n.outs, n.attrs, regions)
