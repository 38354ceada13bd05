"""From FX nodes to a Program, by their lowering rules.

`lower_graph.py` calls `build` for a whole graph, `support.py` builds single nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from torch.fx import Node as FxNode

from .. import passes
from ..errors import fail
from ..fx.nodes import (
    ASSERT,
    COND,
    ITEM,
    attribute,
    getitem,
    is_size,
    module_path,
    mutated_args,
    overload,
)
from ..fx.symbols import margin, to_dim, to_size
from ..ir.program import NONE, Attr, Node, Part, Program, Region, Shape, Value, walk
from ..ir.quant import Quantised, state_shape
from ..passes import Lowered
from ..shapes.blocks import BLOCKS
from ..shapes.contract import Constraint, Contract, DimSource, Spec, Symbol, dtype_name, solve
from ..shapes.dim import Dim, decide
from .ops import RULES, Args, Rule, Unsupported, register_dim_order_rules

# (op, operand) that may be a weight or state in another dtype than the computation.
SUPPORTS_STORED = {("linear", 1), ("embedding", 0), ("cached_attention", 4), ("cached_attention", 5)}


Rules = Mapping[OpOverload, Rule | None]


def build(
    nodes: Iterable[FxNode],
    inputs: Sequence[FxNode],
    outputs: Sequence[object],
    constants: Mapping[FxNode, torch.Tensor],
    symbols: Mapping[str, Dim],
    quantised: Mapping[FxNode, Quantised] = {},
    rules: Rules = RULES,
    constraints: Sequence[Constraint] = (),
) -> Lowered:
    """Build the Program of these nodes: operands come from `inputs` and `constants`, results are `outputs`.

    A constant in `quantised` is stored in that form, and its own data is not read. The contract keeps those of the
    method's `constraints` whose symbols these inputs bind.
    """
    b = Builder(inputs, symbols, rules, constraints)
    nodes = [n for n in nodes if n.op == "call_function"]
    changed = {x for n in nodes for x in mutated_args(n)}
    for node, data in constants.items():
        if node in quantised:
            b.quantised(node, quantised[node])
        else:
            b.state(node, data) if node in changed else b.constant(node, data)
    for node in nodes:
        b.node(node)
    return b.finish(outputs)


class Values:
    """The values of a Program in the making: inputs, weights, states and results of nodes. Implements the Sink that
    lowering rules write to."""

    current, module, enclosing = "", "", ""  # the current node, its module, and the module of the enclosing cond

    def __init__(self, inputs: Sequence[FxNode], symbols: Mapping[str, Dim]):
        self.symbols = symbols
        self.counts: list[int] = []  # values that define a size, by their attribute `symbol`
        self.specs: list[Spec] = []
        self.sources: list[DimSource] = []
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.ids: dict[FxNode, Any] = {}
        self.names: set[str] = set()
        self.stored: set[int] = set()  # weights that only some ops support
        self.made: dict[str, list[str]] = {}  # module of the model → values computed in it
        for node in inputs:
            self._input(node)

    # -- Sink
    def shape(self, value: int) -> Shape:
        n = len(self.specs)
        v = self.specs[value] if value < n else self.values[value - n]
        return Shape(v.dtype, v.dims)

    def emit(self, op: str, ins: Sequence[int], shape: Shape, /, **attrs: Attr | None) -> int:
        out = self._value(self._name(self.current), shape, "temp")
        self._note(out)
        self.nodes.append(Node(op, tuple(ins), (out,), attrs))
        if "symbol" in attrs:
            self.counts.append(out)
        return out

    # -- values
    def _note(self, value: int) -> None:
        if self.module:
            self.made.setdefault(self.module, []).append(self.values[value - len(self.specs)].name)

    def _name(self, base: str) -> str:
        name, k = base, 1
        while name in self.names:
            name, k = f"{base}.{k}", k + 1
        self.names.add(name)
        return name

    def _value(self, name: str, shape: Shape, kind: str, key: str = "") -> int:
        self.values.append(Value(name, shape.dtype, shape.dims, kind, key))
        return len(self.specs) + len(self.values) - 1

    def _dims(self, val: torch.Tensor) -> tuple[Dim, ...]:
        return tuple(to_size(d, self.symbols) for d in val.shape)

    def _input(self, node: FxNode) -> None:
        val, i = node.meta["val"], len(self.specs)
        self.ids[node] = i
        name = self._name(node.name)
        if isinstance(val, torch.Tensor):
            self.specs.append(Spec(name, dtype_name(val.dtype, node.name), self._dims(val)))
            self.sources += [DimSource("size", i, d, dim) for d, dim in enumerate(self.specs[-1].dims)]
        else:
            dim = to_dim(val, self.symbols)
            self.specs.append(Spec(name, "int", (dim,)))
            self.sources.append(DimSource("int", i, 0, dim))

    def constant(self, node: FxNode, data: torch.Tensor) -> None:
        """A weight. A scalar becomes a `full`, which passes can fold; a partitioner has no data for it."""
        self.current = node.name
        shape = Shape(dtype_name(data.dtype, node.name), tuple(Dim.const(d) for d in data.shape))
        if data.dim() == 0 and not is_fake(data):
            with unset_fake_temporarily():
                x = data.item()
            self.ids[node] = self.emit("full", [], shape, value=x if isinstance(x, float) else Dim.const(int(x)))
            return
        name = self._name(node.name)  # a branch may have a constant of the same name
        self.weights[name] = data
        self.ids[node] = self._value(name, shape, "const", name)

    def quantised(self, node: FxNode, q: Quantised) -> None:
        """A weight that is stored quantised."""
        dims = self._dims(node.meta["val"])
        q.check(f"weight {node.name!r}")
        if dims != tuple(map(Dim.const, q.dims)):
            fail(
                "lower",
                f"weight {node.name!r}",
                f"is quantised as {list(q.dims)}, but the model has {node.meta['val'].shape}",
            )
        self.weights[node.name] = q.stored()
        self.ids[node] = self._value(self._name(node.name), Shape(q.dtype, dims), "const", node.name)
        self.stored.add(self.ids[node])

    def check_stored(self, made: Sequence[Node], target: OpOverload) -> None:
        """Raise if an op reads a quantised weight that it does not support."""
        for n in made:
            for k, i in enumerate(n.ins):
                if i in self.stored and (n.op, k) not in SUPPORTS_STORED:
                    v = self.values[i - len(self.specs)]
                    fail(
                        "lower",
                        f"weight {v.name!r}",
                        f"is {v.dtype}, which {target} does not take",
                        "Leave it as it is",
                    )

    def state(self, node: FxNode, data: torch.Tensor) -> None:
        """A buffer that the program mutates: it is state of the delegate, and not stored in the file."""
        with unset_fake_temporarily():
            if bool(data.any()):
                fail("lower", f"buffer {node.name!r}", "is changed by the model and does not begin as zeros")
        dtype, dims = state_shape(data)
        shape = Shape(dtype, tuple(map(Dim.const, dims)))
        self.ids[node] = self._value(self._name(node.name), shape, "state", node.name)
        if dtype in BLOCKS:
            self.stored.add(self.ids[node])


class NodeLowering(Values):
    """Lowers calls of a graph into nodes, by their lowering rules."""

    def __init__(self, inputs: Sequence[FxNode], symbols: Mapping[str, Dim], rules: Rules = RULES):
        register_dim_order_rules()
        super().__init__(inputs, symbols)
        self.rules = rules

    def node(self, node: FxNode) -> None:
        """Lower one call; symbolic integers are read from the metadata of their users."""
        self.current, self.module = node.name, module_path(node, self.enclosing)
        if node.target is ASSERT:
            return
        rule = self.rules.get(overload(node))
        if is_size(node):
            if rule is not None:
                rule.lower(self, rule.name, self._bind(rule.target, node), Shape("int", (self._arg(node),)))
            elif overload(node) in ITEM:
                raise Unsupported("reads data on the host")
            return
        if node.target is getitem:
            self.ids[node] = self.ids[node.args[0]][node.args[1]]
            return
        if node.target is COND:
            self._cond(node)
            return
        if rule is None:
            raise Unsupported(f"no lowering rule for {overload(node) or node.target}")
        val = node.meta["val"]
        many = isinstance(val, (list, tuple))
        out: Shape | list[Shape] = [self._out_shape(v) for v in val] if many else self._out_shape(val)
        args, before = self._bind(rule.target, node), len(self.nodes)
        self.ids[node] = rule.lower(self, rule.name, args, out)
        args.finish()
        self.check_stored(self.nodes[before:], rule.target)

    def _cond(self, node: FxNode) -> None:
        """A cond becomes a node with a region per branch, which reads outer values directly. The predicate is the
        attribute `when` over sizes, or an operand if it depends on data."""
        given, *branches, operands = node.args
        predicate = given.meta["val"] if isinstance(given, FxNode) else given
        by_data = isinstance(predicate, torch.Tensor)
        if by_data and self.rules is RULES:
            raise Unsupported("data decides which branch is taken")
        ins, attrs = ((self._arg(given),), {}) if by_data else ((), {"when": margin(predicate, self.symbols)})
        shapes = [self._out_shape(v) for v in node.meta["val"]]
        where, outer, self.enclosing = self.module, self.enclosing, self.module
        regions = [self._region(branch, operands) for branch in branches]
        self.current, self.module, self.enclosing = node.name, where, outer
        for r in regions:
            if (made := [self.shape(i) for i in r.results]) != shapes:
                raise Unsupported(f"a branch gives {made}, where the graph says {shapes}")
        outs = [self._value(self._name(node.name), shape, "temp") for shape in shapes]
        for out in outs:
            self._note(out)
        self.nodes.append(Node("cond", ins, tuple(outs), attrs, tuple(regions)))
        self.ids[node] = outs

    def _region(self, branch: FxNode, operands: Sequence[FxNode]) -> Region:
        body = attribute(branch)
        placeholders = body.graph.find_nodes(op="placeholder")
        self.ids |= {n: self._arg(x) for n, x in zip(placeholders, operands, strict=True) if not is_size(n)}
        outside, self.nodes = self.nodes, []
        try:
            for n in body.graph.nodes:
                if n.op == "call_function":
                    self.node(n)
                elif n.op == "get_attr" and isinstance(data := attribute(n), torch.Tensor):
                    self.constant(n, data)
            results = tuple(self._arg(x) for x in body.graph.output_node().args[0])
            return Region(tuple(self.nodes), results)
        finally:
            self.nodes = outside

    def _out_shape(self, val: object) -> Shape:
        if not isinstance(val, torch.Tensor):
            raise Unsupported(f"a result of type {type(val).__name__} is not handled")
        return Shape(dtype_name(val.dtype, self.current), self._dims(val))

    def _bind(self, target: OpOverload, node: FxNode) -> Args:
        bound: dict[str, object] = {}
        defaults: dict[str, object] = {}
        tensors: list[str] = []
        for i, arg in enumerate(target._schema.arguments):
            if arg.has_default_value():
                defaults[arg.name] = arg.default_value
            if "Tensor" in str(arg.type) and "List" not in str(arg.type):
                tensors.append(arg.name)
            if i < len(node.args):
                bound[arg.name] = self._arg(node.args[i])
            elif arg.name in node.kwargs:
                bound[arg.name] = self._arg(node.kwargs[arg.name])
        defaults = {k: Dim.const(v) if type(v) is int else v for k, v in defaults.items()}
        return Args(bound, defaults, tensors)

    def _arg(self, x: object) -> Any:
        """A value id for a tensor, a Dim for an integer, anything else unchanged."""
        if isinstance(x, FxNode):
            if is_size(x):
                return to_dim(x.meta["val"], self.symbols)
            if x not in self.ids or self.ids[x] is None:
                raise Unsupported(f"operand {x.name} is not available")
            return self.ids[x]
        if isinstance(x, (list, tuple)):
            return [self._arg(i) for i in x]
        if isinstance(x, torch.SymInt) or type(x) is int:
            return to_dim(x, self.symbols)
        return x


class Builder(NodeLowering):
    """Makes the Program of lowered nodes, with its contract: its symbols, and the method's constraints over them."""

    def __init__(
        self,
        inputs: Sequence[FxNode],
        symbols: Mapping[str, Dim],
        rules: Rules = RULES,
        constraints: Sequence[Constraint] = (),
    ):
        super().__init__(inputs, symbols, rules)
        self.constraints = list(constraints)

    def free(self, outputs: Sequence[object]) -> Program:
        """A Program in which every symbol is an integer input, to ask an engine about single nodes."""
        shapes: list[Spec | Value] = [*self.specs, *self.values]
        used = {a for v in shapes for d in v.dims for a in d.syms()}
        used |= {a for n in walk(self.nodes) for v in n.attrs.values() for d in _attr_dims(v) for a in d.syms()}
        base = len(self.specs)
        extra = [Spec(self._name(f"symbol_{s.name}"), "int", (Dim({(s,): 1}),)) for s in sorted(used, key=str)]
        shift = {i: i + len(extra) for i in range(base, base + len(self.values))}
        nodes = [passes.renumber(n, lambda i: shift.get(i, i), outs=True) for n in self.nodes]
        sources = [DimSource("int", base + k, 0, s.dims[0]) for k, s in enumerate(extra)]
        results = self._results(outputs)
        self.specs, self.nodes = self.specs + extra, nodes
        return self._program([(spec, shift.get(i, i)) for spec, i in results], solve(sources)[0])

    def finish(self, outputs: Sequence[object]) -> Lowered:
        """The Program with its symbols bound to the sizes of the inputs."""
        symbols, rest = solve(self.sources)
        if rest:
            self._rename(rest)
            symbols, rest = solve(self.sources)
        if rest:
            p = rest[0]
            fail(
                "lower",
                f"delegate input {self.specs[p.input].name!r} dim {p.index}",
                f"its size {p.dim} cannot be solved",
            )
        return Lowered(self._program(self._results(outputs), symbols), self.weights)

    def _results(self, outputs: Sequence[Any]) -> list[tuple[Spec, int]]:
        out: list[tuple[Spec, int]] = []
        for o in outputs:
            val = o.meta["val"] if isinstance(o, FxNode) else o
            if isinstance(val, (list, tuple)):
                out += [(Spec(f"{o.name}_{k}", *self.shape(i)), i) for k, i in enumerate(self.ids[o]) if i is not None]
            elif isinstance(val, torch.Tensor):
                if self.ids[o] is None:
                    raise Unsupported(f"{o.name} is a result that is not made here")
                out.append((Spec(o.name, *self.shape(self.ids[o])), self.ids[o]))
            else:
                name = o.name if isinstance(o, FxNode) else f"value_{len(out)}"
                out.append((Spec(name, "int", (to_dim(val, self.symbols),)), NONE))
        shift = len(self.specs)
        return out + [(Spec(self.values[i - shift].name, *self.shape(i)), i) for i in self.counts]

    def _program(self, results: list[tuple[Spec, int]], symbols: Sequence[Symbol]) -> Program:
        outputs = tuple(spec for spec, _ in results)
        contract = Contract(tuple(symbols), tuple(self.specs), self._requires(symbols), outputs)
        modules = tuple(Part(path, tuple(names)) for path, names in self.made.items())
        ids = tuple(i for _, i in results)
        return Program(contract, tuple(self.values), tuple(self.nodes), ids, modules=modules)

    def _requires(self, symbols: Sequence[Symbol]) -> tuple[Constraint, ...]:
        """The method's constraints over symbols of this Program that its ranges do not already prove."""
        bound = {s.name for s in symbols}
        here = [c for c in self.constraints if c.lhs.symbols() | c.rhs.symbols() <= bound]
        return tuple(dict.fromkeys(c for c in here if not decide(c.lhs, c.cmp, c.rhs)))

    def _rename(self, rest: Sequence[DimSource]) -> None:
        """A size that cannot be solved for one symbol (b*s of a tensor computed outside) becomes a symbol itself."""
        for p in rest:
            whole = Dim.symbol(f"size_{p.input}_{p.index}", *p.dim.bounds)

            def swap(d: Dim, part: Dim = p.dim, whole: Dim = whole) -> Dim:
                return _replace(d, part, whole)

            self.specs = [Spec(s.name, s.dtype, tuple(map(swap, s.dims))) for s in self.specs]
            self.values = [Value(v.name, v.dtype, tuple(map(swap, v.dims)), v.kind, v.key) for v in self.values]
            self.nodes = [_with_dims(n, swap) for n in self.nodes]
            self.sources = [DimSource(q.kind, q.input, q.index, swap(q.dim)) for q in self.sources]
            self.constraints = [replace(c, lhs=swap(c.lhs), rhs=swap(c.rhs)) for c in self.constraints]


def _with_dims(n: Node, f: Callable[[Dim], Dim]) -> Node:
    """The node with `f` applied to every Dim in its attributes."""
    attrs = {
        k: f(v) if isinstance(v, Dim) else tuple(map(f, v)) if isinstance(v, tuple) else v for k, v in n.attrs.items()
    }
    regions = tuple(Region(tuple(_with_dims(m, f) for m in r.nodes), r.results) for r in n.regions)
    return replace(n, attrs=attrs, regions=regions)


def _attr_dims(v: Attr) -> list[Dim]:
    return [v] if isinstance(v, Dim) else list(v) if isinstance(v, tuple) else []


def _replace(d: Dim, part: Dim, whole: Dim) -> Dim:
    """d with `part` replaced by `whole` in every term that is a multiple of it."""
    if d == part:
        return whole
    if len(part.terms) != 1 or part.terms[0][1] != 1:
        return d
    total = Dim.const(0)
    for factors, c in d.terms:
        left = list(factors)
        for a in part.terms[0][0]:
            if a not in left:
                total = total + Dim({factors: c})
                break
            left.remove(a)
        else:
            total = total + Dim({tuple(left): c}) * whole
    return total
