"""From FX nodes to a Program. `build` is the one way; `reason` runs it for a single node to see whether it is taken,
so that what the partitioner promises is what the delegate's `preprocess` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from torch.fx import Node as FxNode

from .. import passes
from ..errors import KeepdimError, fail
from ..fx.nodes import (
    ASSERT,
    COND,
    ITEM,
    Symbols,
    attribute,
    changes,
    constants_of,
    getitem,
    is_size,
    module_path,
    overload,
    shape_env_of,
)
from ..fx.symbols import margin, to_dim, to_size
from ..ir.program import NONE, Node, Part, Program, Region, Shape, Value, verify, walk
from ..ir.quant import Quantised, state_shape
from ..passes import Lowered
from ..shapes.contract import BLOCKS, Constraint, Contract, Place, Spec, Symbol, dtype_name, solve
from ..shapes.dim import Dim, decide
from .ops import ROWS, Args, Row, Unsupported, dim_order_rows

# Op and operand: a weight or state in another dtype than what is computed in.
TAKES_STORED = {("linear", 1), ("embedding", 0), ("cached_attention", 4), ("cached_attention", 5)}


Rows = Mapping[OpOverload, Row | None]


def build(
    nodes: Iterable[FxNode],
    inputs: Sequence[FxNode],
    outputs: Sequence[Any],
    constants: Mapping[FxNode, torch.Tensor],
    symbols: Mapping[str, Dim],
    engine: str | None = None,
    quantised: Mapping[FxNode, Quantised] = {},
    stays: passes.Stays = passes.nothing,
    rows: Rows = ROWS,
    constraints: Sequence[Constraint] = (),
) -> Lowered:
    """The Program of these nodes: operands come from `inputs` and `constants`, results are `outputs`.

    A constant that is `quantised` is stored as such, and its own data is not read. With an engine the passes run;
    without one the Program is what was written. Weights that `stays` names are not changed. The contract has those of
    the method's `constraints` whose symbols these inputs bind.
    """
    b = _Builder(inputs, symbols, rows, constraints)
    nodes = [n for n in nodes if n.op == "call_function"]
    changed = {x for n in nodes for x in changes(n)}
    for node, data in constants.items():
        if node in quantised:
            b.quantised(node, quantised[node])
        else:
            b.state(node, data) if node in changed else b.constant(node, data)
    for node in nodes:
        b.node(node)
    return b.finish(outputs, engine, stays)


def reason(node: FxNode, symbols: Mapping[str, Dim], engine: str) -> str | None:
    """Why this node cannot be delegated; None when it can."""
    from .. import _native

    if is_size(node):
        if overload(node) in ITEM:
            return "reads data on the host"
        try:
            to_dim(node.meta["val"], symbols) if isinstance(node.meta["val"], (int, torch.SymInt)) else None
        except KeepdimError as e:
            return str(e)
        return None
    if node.target is getitem:
        return None
    if overload(node) not in ROWS and node.target is not COND:
        return f"no row for {overload(node) or node.target}"
    try:
        b = _Builder([n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)], symbols)
        b.node(node)
        for k in (u.args[1] for u in node.users if u.target is getitem and u.users):
            if isinstance(made := b.ids[node], list) and made[k] is None:
                return f"its result {k} is read, and is not made here"
        program = b.free([node])
        _native.check(engine, program.to_json())
    except (Unsupported, KeepdimError, _native.Error) as e:
        return str(e)
    return None


def refusal(engine: str, program: Program) -> str | None:
    """Why the engine does not run this program; None when it does."""
    from .. import _native

    try:
        _native.check(engine, program.to_json())
    except _native.Error as e:
        return str(e)
    return None


class _Builder:
    """Collects values and nodes; implements the Sink that rows write to."""

    def __init__(
        self,
        inputs: Sequence[FxNode],
        symbols: Mapping[str, Dim],
        rows: Rows = ROWS,
        constraints: Sequence[Constraint] = (),
    ):
        dim_order_rows()
        self.symbols, self.rows, self.constraints = symbols, rows, list(constraints)
        self.counts: list[int] = []  # values that are sizes of others, by their attribute `symbol`
        self.specs: list[Spec] = []
        self.places: list[Place] = []
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.ids: dict[FxNode, Any] = {}
        self.names: set[str] = set()
        self.stored: set[int] = set()  # weights that only some ops take
        self.made: dict[str, list[str]] = {}  # module of the model → values that were made in it
        for node in inputs:
            self._input(node)

    # -- Sink
    def shape(self, value: int) -> Shape:
        n = len(self.specs)
        v = self.specs[value] if value < n else self.values[value - n]
        return Shape(v.dtype, v.dims)

    def emit(self, op: str, ins: Sequence[int], shape: Shape, /, **attrs: Any) -> int:
        out = self._value(self._name(self.current), shape, "temp")
        self._note(out)
        self.nodes.append(Node(op, tuple(ins), (out,), attrs))
        if "symbol" in attrs:
            self.counts.append(out)
        return out

    # -- values
    current, module, around = "", "", ""  # the node under way, its module, and that of the choice it stands in

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
            self.places += [Place("size", i, d, dim) for d, dim in enumerate(self.specs[-1].dims)]
        else:
            dim = to_dim(val, self.symbols)
            self.specs.append(Spec(name, "int", (dim,)))
            self.places.append(Place("int", i, 0, dim))

    def constant(self, node: FxNode, data: torch.Tensor) -> None:
        """A weight; one number alone becomes a `full`, which passes can fold. A partitioner is not told the number."""
        self.current = node.name
        shape = Shape(dtype_name(data.dtype, node.name), tuple(Dim.const(d) for d in data.shape))
        if data.dim() == 0 and not is_fake(data):
            with unset_fake_temporarily():
                x = data.item()
            self.ids[node] = self.emit("full", [], shape, value=x if isinstance(x, float) else Dim.const(int(x)))
            return
        name = self._name(node.name)  # a branch may have one of the same name
        self.weights[name] = data
        self.ids[node] = self._value(name, shape, "const", name)

    def quantised(self, node: FxNode, q: Quantised) -> None:
        """A weight as the bytes it has."""
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

    def _check_stored(self, made: Sequence[Node], target: OpOverload) -> None:
        """Quantised weights are read by ops alone that take them."""
        for n in made:
            for k, i in enumerate(n.ins):
                if i in self.stored and (n.op, k) not in TAKES_STORED:
                    v = self.values[i - len(self.specs)]
                    fail(
                        "lower",
                        f"weight {v.name!r}",
                        f"is {v.dtype}, which {target} does not take",
                        "Leave it as it is",
                    )

    def state(self, node: FxNode, data: torch.Tensor) -> None:
        """A buffer that the program changes: it lives in the delegate, and nothing of it stands in the file."""
        with unset_fake_temporarily():
            if bool(data.any()):
                fail("lower", f"buffer {node.name!r}", "is changed by the model and does not begin as zeros")
        dtype, dims = state_shape(data)
        shape = Shape(dtype, tuple(map(Dim.const, dims)))
        self.ids[node] = self._value(self._name(node.name), shape, "state", node.name)
        if dtype in BLOCKS:
            self.stored.add(self.ids[node])

    # -- nodes
    def node(self, node: FxNode) -> None:
        """Lower one call; symbolic integers are read from the metadata of their users."""
        self.current, self.module = node.name, module_path(node, self.around)
        if node.target is ASSERT:
            return
        row = self.rows.get(overload(node))
        if is_size(node):
            if row is not None:
                row.lower(self, row.name, self._bind(row.target, node), Shape("int", (self._arg(node),)))
            elif overload(node) in ITEM:
                raise Unsupported("reads data on the host")
            return
        if node.target is getitem:
            self.ids[node] = self.ids[node.args[0]][node.args[1]]
            return
        if node.target is COND:
            self._cond(node)
            return
        if row is None:
            raise Unsupported(f"no row for {overload(node) or node.target}")
        val = node.meta["val"]
        many = isinstance(val, (list, tuple))
        out: Any = [self._out_shape(v) for v in val] if many else self._out_shape(val)
        args, before = self._bind(row.target, node), len(self.nodes)
        self.ids[node] = row.lower(self, row.name, args, out)
        args.finish()
        self._check_stored(self.nodes[before:], row.target)

    def _cond(self, node: FxNode) -> None:
        """A choice by sizes is a node with a region for each branch; what a branch needs it reads from outside. That
        of data has an operand instead."""
        given, *branches, operands = node.args
        truth = given.meta["val"] if isinstance(given, FxNode) else given
        by_data = isinstance(truth, torch.Tensor)
        if by_data and self.rows is ROWS:
            raise Unsupported("data decides which branch is taken")
        ins, attrs = ((self._arg(given),), {}) if by_data else ((), {"when": margin(truth, self.symbols)})
        shapes = [self._out_shape(v) for v in node.meta["val"]]
        where, outer, self.around = self.module, self.around, self.module
        regions = [self._region(branch, operands) for branch in branches]
        self.current, self.module, self.around = node.name, where, outer
        for r in regions:
            if (made := [self.shape(i) for i in r.results]) != shapes:
                raise Unsupported(f"a branch gives {made}, where the graph says {shapes}")
        outs = [self._value(self._name(node.name), shape, "temp") for shape in shapes]
        for out in outs:
            self._note(out)
        self.nodes.append(Node("cond", ins, tuple(outs), attrs, tuple(regions)))
        self.ids[node] = outs

    def _region(self, branch: Any, operands: Any) -> Region:
        body = attribute(branch)
        places = body.graph.find_nodes(op="placeholder")
        self.ids |= {n: self._arg(x) for n, x in zip(places, operands, strict=True) if not is_size(n)}
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

    def _out_shape(self, val: Any) -> Shape:
        if not isinstance(val, torch.Tensor):
            raise Unsupported(f"a result of type {type(val).__name__} is not handled")
        return Shape(dtype_name(val.dtype, self.current), self._dims(val))

    def _bind(self, target: OpOverload, node: FxNode) -> Args:
        bound: dict[str, Any] = {}
        defaults: dict[str, Any] = {}
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

    def _arg(self, x: Any) -> Any:
        """A value id for a tensor, a Dim for an integer, the thing itself for the rest."""
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

    # -- the end
    def free(self, outputs: Sequence[Any]) -> Program:
        """A Program in which every symbol is an integer input: to ask an engine about single nodes."""
        shapes: list[Spec | Value] = [*self.specs, *self.values]
        used = {a for v in shapes for d in v.dims for a in d.syms()}
        used |= {a for n in walk(self.nodes) for v in n.attrs.values() for d in _attr_dims(v) for a in d.syms()}
        base = len(self.specs)
        extra = [Spec(self._name(f"symbol_{s.name}"), "int", (Dim({(s,): 1}),)) for s in sorted(used, key=str)]
        shift = {i: i + len(extra) for i in range(base, base + len(self.values))}
        nodes = [passes.renumber(n, lambda i: shift.get(i, i), outs=True) for n in self.nodes]
        places = [Place("int", base + k, 0, s.dims[0]) for k, s in enumerate(extra)]
        results = self._results(outputs)
        self.specs, self.nodes = self.specs + extra, nodes
        return self._program([(spec, shift.get(i, i)) for spec, i in results], solve(places)[0])

    def finish(self, outputs: Sequence[Any], engine: str | None, stays: passes.Stays) -> Lowered:
        """Bind the symbols to the inputs' places, run the passes for an engine, verify."""
        symbols, rest = solve(self.places)
        if rest:
            self._rename(rest)
            symbols, rest = solve(self.places)
        if rest:
            p = rest[0]
            fail(
                "lower",
                f"delegate input {self.specs[p.input].name!r} dim {p.index}",
                f"its size {p.dim} cannot be solved",
            )
        program = self._program(self._results(outputs), symbols)
        if engine is None:
            return Lowered(verify(passes.drop_dead(program)), self.weights)
        with unset_fake_temporarily():
            lowered = passes.run(program, self.weights, lambda p: refusal(engine, p) is None, stays)
        verify(lowered.program)
        return lowered

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
        """The method's constraints that the inputs of this Program can decide and its ranges do not already prove."""
        bound = {s.name for s in symbols}
        here = [c for c in self.constraints if c.lhs.symbols() | c.rhs.symbols() <= bound]
        return tuple(dict.fromkeys(c for c in here if not decide(c.lhs, c.cmp, c.rhs)))

    def _rename(self, rest: Sequence[Place]) -> None:
        """A size that no single symbol explains (b*s of a tensor made outside) becomes a symbol itself."""
        for p in rest:
            whole = Dim.symbol(f"size_{p.input}_{p.index}", *p.dim.bounds)

            def swap(d: Dim, part: Dim = p.dim, whole: Dim = whole) -> Dim:
                return _replace(d, part, whole)

            self.specs = [Spec(s.name, s.dtype, tuple(map(swap, s.dims))) for s in self.specs]
            self.values = [Value(v.name, v.dtype, tuple(map(swap, v.dims)), v.kind, v.key) for v in self.values]
            self.nodes = [_with_dims(n, swap) for n in self.nodes]
            self.places = [Place(q.kind, q.input, q.index, swap(q.dim)) for q in self.places]
            self.constraints = [replace(c, lhs=swap(c.lhs), rhs=swap(c.rhs)) for c in self.constraints]


def _with_dims(n: Node, f: Callable[[Dim], Dim]) -> Node:
    """The node with another Dim for each of its attributes'."""
    attrs = {
        k: f(v) if isinstance(v, Dim) else tuple(map(f, v)) if isinstance(v, tuple) else v for k, v in n.attrs.items()
    }
    regions = tuple(Region(tuple(_with_dims(m, f) for m in r.nodes), r.results) for r in n.regions)
    return replace(n, attrs=attrs, regions=regions)


def _attr_dims(v: Any) -> list[Dim]:
    return [v] if isinstance(v, Dim) else list(v) if isinstance(v, tuple) else []


def _replace(d: Dim, part: Dim, whole: Dim) -> Dim:
    """d with `part` written as `whole`, in every term that is a multiple of it."""
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


def _quantised(
    ep: Any, weights: Mapping[str, Quantised], constants: Mapping[FxNode, torch.Tensor]
) -> dict[FxNode, Quantised]:
    """Weights by any name of their parameter → by its placeholder; a tied parameter has several names."""
    if missing := sorted(set(weights) - set(ep.state_dict)):
        fail("lower", f"quantised weight {missing[0]!r}", "is no parameter of the model")
    given = {id(ep.state_dict[name]): q for name, q in weights.items()}
    return {node: given[id(data)] for node, data in constants.items() if id(data) in given}


def lower_program(
    ep: Any,
    known: Mapping[str, Dim],
    engine: str | None,
    weights: Mapping[str, Quantised] = {},
    stays: passes.Stays = passes.nothing,
    rows: Rows = ROWS,
    constraints: Sequence[Constraint] = (),
) -> Lowered:
    """The Program of all nodes of an ExportedProgram, for an engine; Unsupported where a node has no lowering rule.

    `weights` are quantised, by the names of the parameters that they stand for; their tensors are not read. Those that
    `stays` names stay where they are. `rows` may have more than the engines' own, None for what computes nothing; a
    value with an attribute `symbol` is that size, and an output of its own after the others. `constraints` are the
    method's, in the names of `known`.
    """
    constants = constants_of(ep)
    nodes = [n for n in ep.graph.nodes if n.op == "call_function" and rows.get(overload(n), n) is not None]
    inputs = [n for n in ep.graph.nodes if n.op == "placeholder" and n not in constants]
    env = shape_env_of(n.meta.get("val") for n in ep.graph.nodes)
    outputs = list(ep.graph.output_node().args[0])
    quantised = _quantised(ep, weights, constants)
    symbols = Symbols(known, env)
    return _by_content(build(nodes, inputs, outputs, constants, symbols, engine, quantised, stays, rows, constraints))


def _by_content(lowered: Lowered) -> Lowered:
    """Weights by the hash of what they are, so that delegates and methods of one file share equal ones."""
    keys: dict[str, str] = {}
    weights: dict[str, torch.Tensor] = {}
    with unset_fake_temporarily():
        for name, data in lowered.weights.items():
            data = data.detach().contiguous()
            raw = data.reshape(-1).view(torch.uint8).numpy()
            kind = f"{data.dtype}{list(data.shape)}"  # zeros of two kinds have the same bytes
            digest = hashlib.sha256(kind.encode())
            digest.update(raw)
            keys[name] = digest.hexdigest()[:32]
            weights[keys[name]] = data
    p = lowered.program
    values = tuple(Value(v.name, v.dtype, v.dims, v.kind, keys.get(v.key, v.key)) for v in p.values)
    return Lowered(replace(p, values=values), weights)
