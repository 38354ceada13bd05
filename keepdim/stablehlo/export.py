"""From a captured model to StableHLO: the same Program as for engines, traced by jax with all symbols in one scope."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import torch
from jax import export as jax_export
from jax import lax
from jax._src.export.shape_poly import shape_assertion
from msgspec.structs import replace
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from .. import passes
from ..artifact.signature import Signature
from ..capture.export import Captured, capture
from ..compat.lock import one_at_a_time
from ..compat.shape_env import open_sizes
from ..errors import fail, sentence
from ..frontend.lower_graph import lower_program
from ..frontend.ops import RULES as TORCH_RULES
from ..frontend.ops import Unsupported
from ..fx.propagate import propagate_shapes
from ..ir.program import NONE, Node, Program, Region, Value, walk
from ..ir.quant import Quantised, dequantise
from ..passes import Lowered
from ..shapes.blocks import BLOCKS
from ..shapes.contract import Constraint, Contract, Source, Spec, Symbol
from ..shapes.dim import CMPS, Dim
from .data_dependent import RULES_WITH_DATA
from .program import Argument, StableHLOProgram
from .refine import Hlo
from .rules import RULES
from .table import DTYPES, Array, Extent, JaxCall, Sizes, iota, number, product, refused, take
from .xla import x64

MUTATES = {"cached_attention": (4, 5)}  # op → operands that it mutates; their new values follow its result
RESULT_INFO = re.compile(r" \{jax\.result_info = \"[^\"]*\"\}")  # an empty annotation on every result
REFUSALS = (TypeError, ValueError, NotImplementedError, jax.errors.InconclusiveDimensionOperation)  # raised by jax
CLEAN = ("inline", "canonicalize", "cse", "symbol-dce")


@one_at_a_time
def to_stablehlo(
    model: torch.nn.Module | ExportedProgram | Captured,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    dynamic_shapes: object = None,
    bounds: bool = False,
) -> StableHLOProgram:
    """A StableHLO program of a model, for every shape its contract allows.

    Each dynamic dim is `?`, and ranges, equalities and divisibility are shape assertions. With `bounds`, arguments come
    padded to their upper bounds, with their sizes: one compilation works for every size.

    >>> import torch, keepdim
    >>> from torch.export import Dim
    >>> model = torch.nn.Linear(8, 4).eval()
    >>> hlo = keepdim.to_stablehlo(model, (torch.randn(3, 8),), dynamic_shapes=({0: Dim("batch", min=1, max=64)},))
    >>> str(hlo.hlo.inputs[0]), hlo.refine(batch=16).hlo.static
    ('tensor<?x8xf32>', True)
    >>> x = torch.randn(17, 8)
    >>> torch.allclose(hlo(x), model(x), atol=1e-5)
    True
    """
    captured = model if isinstance(model, Captured) else capture(model, args, kwargs, dynamic_shapes)
    try:
        lowered, notes = program_of(captured)
    except Unsupported as e:
        fail("stablehlo", type(model).__name__, str(e), cause=e)
    made = emit(lowered, _with_positions(lowered.program, captured.signature), bounds)
    made.notes = [*captured.notes, *notes]
    return made


# ---------------------------------------------------------------- the Program
def program_of(captured: Captured) -> tuple[Lowered, list[str]]:
    """The whole model as one Program: from torch.export's graph, else with ops that have no lowering rule decomposed,
    else with all ops decomposed to core ATen. Also a note for each graph that was refused."""
    graphs: dict[str, Callable[[], tuple[ExportedProgram, Mapping[str, Dim]]]] = {
        "the exported graph": lambda: (captured.program, captured.shapes.all_symbols),
        "the graph with unsupported ops decomposed": lambda: _decomposed(captured, RULES_WITH_DATA.keys()),
        "the graph in core ATen": lambda: _decomposed(captured, RULES_WITH_DATA.keys() - TORCH_RULES.keys()),
    }
    refusals: dict[str, Unsupported] = {}
    for name, graph in graphs.items():
        try:
            lowered = _lower(*graph())
        except Unsupported as e:
            refusals[name] = e
            continue
        return lowered, [sentence("stablehlo", name, f"is not used ({e})") for name, e in refusals.items()]
    raise refusals["the graph with unsupported ops decomposed"]


def _lower(ep: ExportedProgram, symbols: Mapping[str, Dim]) -> Lowered:
    for spec in ep.graph_signature.output_specs:
        if spec.kind != OutputKind.USER_OUTPUT:
            raise Unsupported(f"it changes {spec.target!r}, which is not a state of one of keepdim's ops")
    lowered = lower_program(ep, symbols, None, rules=RULES_WITH_DATA)
    return passes.run(*lowered, supports=lambda p: all(n.op in RULES for n in p.walk()))


def _decomposed(captured: Captured, kept: Collection[object]) -> tuple[ExportedProgram, Mapping[str, Dim]]:
    """Decompose to core ATen except for these ops; no size is specialised."""
    ep, shapes = captured.program, captured.shapes
    with open_sizes(shapes.env):
        table = torch.export.default_decompositions()  # created here, where no decomposition specialises a size
        for target in kept:
            table.pop(target, None)
        ep = ep.run_decompositions(table)
        propagate_shapes(ep, shapes.contract, shapes.all_symbols)
    return ep, shapes.all_symbols


# ---------------------------------------------------------------- the trace
def trace(program: Program, sizes: Sizes, given: Mapping[int, Array]) -> tuple[list[Array], dict[int, Array]]:
    """Trace the Program in jax: the results, and new values of states."""
    values: dict[int, object] = {**given, NONE: None}
    _run(program, program.nodes, sizes, values)
    changed = {i: values[i] for i in given if values[i] is not given[i]}
    specs = zip(program.results, program.contract.outputs, strict=True)
    outs = [number(sizes.number(s.dims[0]), DTYPES["i64"]) if r == NONE else values[r] for r, s in specs]
    return [jnp.asarray(y) for y in outs], changed


def _run(program: Program, nodes: Sequence[Node], sizes: Sizes, values: dict[int, object]) -> None:
    for node in nodes:
        out = program.value(node.outs[0])
        subject = f"{node.op} {out.name!r}"
        if node.op != "cond" and node.op not in RULES:
            fail("stablehlo", subject, "has no lowering rule")
        call = JaxCall(sizes, node, [values[i] for i in node.ins],
                    [None if i == NONE else program.value(i) for i in node.ins], out)  # fmt: skip
        try:
            made = _cond(program, call, values) if node.op == "cond" else RULES[node.op](call)
        except REFUSALS as e:
            raise refused(subject, e) from e
        made = made if isinstance(made, tuple) else (made,)
        targets = (*node.outs, *(node.ins[k] for k in MUTATES.get(node.op, ())))
        for i, y in zip(targets, made, strict=True):
            v = program.value(i)
            expected = [sizes.extent(d) for d in v.dims]
            y = _with_extents(y, expected)
            if list(y.shape) != expected or y.dtype != DTYPES[v.dtype]:
                fail("stablehlo", subject, f"result is {y.dtype}{list(y.shape)}, declared as {v.dtype}{expected}")
            values[i] = y
        if "symbol" in node.attrs:
            sizes.numbers[node.attrs["symbol"]] = made[0]
            if node.op != "item":
                sizes.capacity[node.attrs["symbol"]] = product(call.given[0]).substitute(sizes.capacity)


def _with_extents(y: Array, expected: Sequence[Extent]) -> Array:
    """Reshape to the expected sizes: jax cannot prove that (n - 70) // 7 + 1 is n // 7 - 9, so assert it."""
    for axis, (have, want) in enumerate(zip(y.shape, expected, strict=False)):
        if have != want and not isinstance(have, int) and not isinstance(want, int):
            sizes = [jnp.asarray(have), jnp.asarray(want)]
            shape_assertion(sizes[0] == sizes[1], *sizes, error_message="a size is {0} and not {1}")
            y = take(y, iota([want], 0), axis)
    return y


def _cond(program: Program, call: JaxCall, values: Mapping[int, object]) -> tuple[Array, ...]:
    """One of two regions, chosen by a size, or by data if there is an operand."""
    for n in walk(call.node.regions[0].nodes + call.node.regions[1].nodes):
        if n.op in MUTATES or "symbol" in n.attrs:
            fail("stablehlo", f"cond {call.out.name!r}", f"has {n.op} in a branch, whose state or size is used outside")

    def branch(region: Region) -> Callable[[], tuple[Array, ...]]:
        def run() -> tuple[Array, ...]:
            inner = dict(values)
            _run(program, region.nodes, call.sizes, inner)
            return tuple(inner[i] for i in region.results)

        return run

    truth = call.ins[0].reshape(()) if call.ins else jnp.asarray(call.attr("when")) >= 0
    return lax.cond(truth, *map(branch, call.node.regions))


class _Arguments:
    """The arguments of the exported function, in their order: inputs, sizes if bounded, states, weights."""

    def __init__(self, program: Program, bounds: bool):
        self.inputs, self.bounds = program.contract.inputs, bounds
        used = _used(program)
        self.symbols = [s for s in program.contract.symbols if s.name in used or not bounds]
        stored = [(i, v) for i, v in enumerate(program.values, len(self.inputs)) if v.kind != "temp"]
        self.stored = sorted(stored, key=lambda e: e[1].kind == "const")

    def states(self) -> list[int]:
        return [i for i, v in self.stored if v.kind == "state"]

    def listed(self) -> list[Argument]:
        listed = [Argument("input", s.name, s.dtype) for s in self.inputs]
        listed += [Argument("size", s.name, "i32") for s in self.symbols if self.bounds]
        return listed + [Argument(v.kind, v.key, _stored(v)) for _, v in self.stored]

    def structs(self, shapes: Mapping[str, Extent]) -> list[jax.ShapeDtypeStruct]:
        """Their shapes and dtypes."""
        sizes = Sizes(shapes, {s.name: None for s in self.symbols} if self.bounds else {})
        specs = [([sizes.extent(d) for d in s.dims], s.dtype) for s in self.inputs]
        specs += [([], "i32") for _ in self.symbols if self.bounds]
        specs += [([d.eval({}) for d in v.dims], _stored(v)) for _, v in self.stored]
        return [jax.ShapeDtypeStruct(dims, DTYPES[dtype]) for dims, dtype in specs]

    def split(self, args: Sequence[Array]) -> tuple[dict[int, Array], list[Array]]:
        """Values by their index in the Program, and the sizes."""
        first, count = len(self.inputs), len(self.symbols) if self.bounds else 0
        given = dict(enumerate(args[:first]))
        given |= {i: x for (i, _), x in zip(self.stored, args[first + count :], strict=True)}
        return given, list(args[first : first + count])


def emit(lowered: Lowered, signature: Signature, bounds: bool) -> StableHLOProgram:
    """Trace the Program and export StableHLO with arguments: inputs, sizes if bounded, states, weights."""
    program, weights = lowered.program, _dequantised(lowered)
    contract = _contract(program, signature)
    arguments = _Arguments(program, bounds)
    values: list[Spec | Value] = [*program.contract.inputs, *program.contract.outputs, *program.values]
    with x64(any(v.dtype in ("i64", "f64", "int") for v in values)):
        shapes = {} if bounds else _shapes(program.contract.symbols)

        def run(*args: Array) -> tuple[Array, ...]:
            given, numbers = arguments.split(args)
            sizes = _solve_symbols(arguments.symbols, numbers) if bounds else Sizes(shapes, {})
            for k in contract.constraints if not bounds else ():
                _assert(k, sizes)
            outs, changed = trace(program, sizes, given)
            return (*outs, *(changed.get(i, given[i]) for i in arguments.states()))

        try:
            exported = jax_export.export(jax.jit(run, keep_unused=True), platforms=["cpu"])(*arguments.structs(shapes))
        except REFUSALS as e:
            raise refused("program", e) from e
        hlo = Hlo.parse(RESULT_INFO.sub("", exported.mlir_module())).run(CLEAN)
    results = [Argument("output", s.name, s.dtype) for s in contract.outputs]
    results += [Argument("count", n.attrs["symbol"], "i64") for n in program.walk() if "symbol" in n.attrs]
    results += [Argument("state", program.value(i).key, program.value(i).dtype) for i in arguments.states()]
    return StableHLOProgram(hlo, signature, contract, arguments.listed(), results, weights, bounds)


def _with_positions(program: Program, signature: Signature) -> Signature:
    """Add the constraint that writes fit into a cache: its position input becomes a symbol of the contract."""
    contract = signature.contract
    for n in program.walk():
        if n.op != "cached_attention" or n.ins[3] >= len(program.contract.inputs):
            continue
        index, new, context = n.ins[3], program.value(n.ins[1]).dims[-2], program.value(n.ins[4]).dims[-2]
        known, name = {s.name for s in contract.symbols}, contract.inputs[index].name
        if name in known or not new.symbols() <= known:
            continue
        at = Symbol(name, 0, context.value, Source("item", index, 0, Dim.const(1), Dim.const(0)))
        fits = Constraint(at.dim + new, "le", context, "a cache has no more room")
        contract = replace(contract, symbols=(*contract.symbols, at), constraints=(*contract.constraints, fits))
    return signature._replace(contract=contract)


def _contract(program: Program, signature: Signature) -> Contract:
    """The Program's contract, without counts among its outputs, and with the method's constraints over its symbols
    (integers that are passed as tensors have other symbols)."""
    known = {s.name for s in program.contract.symbols}
    held = [c for c in signature.contract.constraints if c.lhs.symbols() | c.rhs.symbols() <= known]
    counts = [n.attrs["symbol"] for n in program.walk() if "symbol" in n.attrs]
    shown = len(program.contract.outputs) - len(counts)
    outputs = program.contract.outputs[:shown]
    made = {a.name: a for o in outputs for d in o.dims for a in d.syms()}
    data = [
        Symbol(name, made[name].lo, made[name].hi, Source("item", shown + k, 0, Dim.const(1), Dim.const(0)))
        for k, name in enumerate(counts)
        if name in made
    ]
    return replace(program.contract, constraints=tuple(held), outputs=outputs, data=tuple(data))


def _stored(v: Value) -> str:
    return "f32" if v.dtype in BLOCKS else v.dtype


def _dequantised(lowered: Lowered) -> dict[str, torch.Tensor]:
    """The weights as tensors; quantised ones are dequantised to f32, a quantised state is an error."""
    out = dict(lowered.weights)
    for v in lowered.program.values:
        if v.dtype in BLOCKS and v.kind == "state":
            fail(
                "stablehlo",
                f"state {v.name!r}",
                f"is {v.dtype}, which StableHLO does not have",
                "Keep it in f32 or f16",
            )
        if v.dtype in BLOCKS and v.kind == "const":
            out[v.key] = dequantise(Quantised(v.dtype, tuple(d.eval({}) for d in v.dims), lowered.weights[v.key]))
    return out


def _used(program: Program) -> set[str]:
    """Symbols that occur in a size or an attribute."""
    shapes: list[Spec | Value] = [*program.contract.inputs, *program.contract.outputs, *program.values]
    dims = [d for v in shapes for d in v.dims]
    for n in program.walk():
        for a in n.attrs.values():
            dims += [d for d in (a if isinstance(a, tuple) else (a,)) if isinstance(d, Dim)]
    return set().union(*(d.symbols() for d in dims), set())


def _shapes(symbols: Sequence[Symbol]) -> dict[str, Extent]:
    """Each symbol as a jax dim, all in one scope; jax's dims start at 1, so a symbol that starts at 0 is shifted."""
    shift = {s.name: max(0, 1 - (s.lo if s.lo is not None else 0)) for s in symbols}
    names = {s.name: f"{s.name}_plus_{k}" if (k := shift[s.name]) else s.name for s in symbols}
    ranges = [f"{names[s.name]} >= {(s.lo or 0) + shift[s.name]}" for s in symbols if (s.lo or 0) + shift[s.name] > 1]
    ranges += [f"{names[s.name]} <= {s.hi + shift[s.name]}" for s in symbols if s.hi is not None]
    scope = jax_export.SymbolicScope(ranges)
    made = jax_export.symbolic_shape(", ".join(names.values()), scope=scope) if symbols else ()
    return {s.name: d - shift[s.name] for s, d in zip(symbols, made, strict=True)}


def _solve_symbols(symbols: Sequence[Symbol], input_sizes: Sequence[Array]) -> Sizes:
    """Solve symbols from the sizes of inputs, as traced scalars."""
    sizes = Sizes({}, {})
    for s, size in zip(symbols, input_sizes, strict=True):
        sizes.numbers[s.name] = s.solve(size, sizes.number)
    return sizes


def _assert(constraint: Constraint, sizes: Sizes) -> None:
    lhs, rhs = (jnp.asarray(sizes.number(d)) for d in (constraint.lhs, constraint.rhs))
    message = f"[bind] constraint {constraint}: {{0}} {CMPS[constraint.cmp][0]} {{1}} does not hold"
    shape_assertion(CMPS[constraint.cmp][1](lhs, rhs), lhs, rhs, error_message=message)
