"""From a captured model to StableHLO: the Program that engines get, traced by jax with every symbol in one scope."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

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
from ..capture.contract_reader import read
from ..capture.export import Captured, capture
from ..compat.lock import in_turn
from ..compat.shape_env import open_sizes
from ..errors import fail
from ..frontend import builder as frontend
from ..frontend.ops import ROWS as OPS
from ..frontend.ops import Unsupported
from ..fx.nodes import Symbols, shape_env_of
from ..fx.propagate import settle
from ..ir.program import NONE, Node, Program, Region, Value, walk
from ..ir.quant import Quantised, dequantise
from ..passes import Lowered
from ..shapes.contract import BLOCKS, Constraint, Contract, Source, Spec, Symbol
from ..shapes.dim import CMPS, Dim
from .data import ROWS_OF_DATA
from .program import Argument, StableHLOProgram
from .refine import Hlo
from .rules import ROWS
from .table import DTYPES, Array, Call, Sizes, iota, number, product, refused, take
from .xla import x64

CHANGES = {"cached_attention": (4, 5)}  # op → the operands that it gives new values, behind its result
RESULT_INFO = re.compile(r" \{jax\.result_info = \"[^\"]*\"\}")  # on every result, and nothing in it
REFUSALS = (TypeError, ValueError, NotImplementedError, jax.errors.InconclusiveDimensionOperation)  # of jax
CLEAN = ("inline", "canonicalize", "cse", "symbol-dce")


@in_turn
def to_stablehlo(
    model: torch.nn.Module | ExportedProgram | Captured,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    bounds: bool = False,
) -> StableHLOProgram:
    """A StableHLO program of a model, for every shape its contract allows.

    Each dynamic dim is `?`, and ranges, equalities and divisibility are shape assertions. With `bounds`, arguments come
    padded to their upper bounds, with their sizes: one compilation serves every size.

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
        lowered = program_of(captured)
    except Unsupported as e:
        fail("stablehlo", type(model).__name__, str(e), cause=e)
    return emit(lowered, _with_positions(lowered.program, captured.signature), bounds)


# ---------------------------------------------------------------- the Program
def program_of(captured: Captured) -> Lowered:
    """The whole model as one Program: as torch.export wrote it, or in core ATen where an op has no row, or also where
    one has a row that does not take it."""
    try:
        return _lower(captured.program, read(captured.program, captured.names)[1])
    except Unsupported:
        pass
    try:
        return _lower(*_decomposed(captured, ROWS_OF_DATA.keys()))
    except Unsupported as e:
        try:
            return _lower(*_decomposed(captured, ROWS_OF_DATA.keys() - OPS.keys()))
        except Unsupported:
            raise e from None


def _lower(ep: ExportedProgram, symbols: Mapping[str, Dim]) -> Lowered:
    for spec in ep.graph_signature.output_specs:
        if spec.kind != OutputKind.USER_OUTPUT:
            raise Unsupported(f"it changes {spec.target!r}, which is no state of an op of keepdim's own")
    lowered = frontend.lower_program(ep, symbols, None, rows=ROWS_OF_DATA)
    return passes.run(*lowered, takes=lambda p: all(n.op in ROWS for n in p.walk()))


def _decomposed(captured: Captured, kept: Collection[Any]) -> tuple[ExportedProgram, Mapping[str, Dim]]:
    """In core ATen, but for these ops; sizes stay what they are."""
    ep = captured.program
    contract, symbols = read(ep, captured.names)
    env = shape_env_of(n.meta.get("val") for n in ep.graph.nodes)
    with open_sizes(env):
        table = torch.export.default_decompositions()  # here, where none of them decides a size
        for target in kept:
            table.pop(target, None)
        ep = ep.run_decompositions(table)
        settle(ep, contract, Symbols(symbols, env))
    return ep, symbols


# ---------------------------------------------------------------- the trace
def evaluate(program: Program, sizes: Sizes, given: Mapping[int, Array]) -> tuple[list[Array], dict[int, Array]]:
    """The results, and the values that were given new ones, by jax."""
    values: dict[int, Any] = {**given, NONE: None}
    _run(program, program.nodes, sizes, values)
    changed = {i: values[i] for i in given if values[i] is not given[i]}
    specs = zip(program.results, program.contract.outputs, strict=True)
    outs = [number(sizes.number(s.dims[0]), DTYPES["i64"]) if r == NONE else values[r] for r, s in specs]
    return [jnp.asarray(y) for y in outs], changed


def _run(program: Program, nodes: Sequence[Node], sizes: Sizes, values: dict[int, Any]) -> None:
    for node in nodes:
        out = program.value(node.outs[0])
        subject = f"{node.op} {out.name!r}"
        if node.op != "cond" and node.op not in ROWS:
            fail("stablehlo", subject, "has no row")
        call = Call(sizes, node, [values[i] for i in node.ins],
                    [None if i == NONE else program.value(i) for i in node.ins], out)  # fmt: skip
        try:
            made = _cond(program, call, values) if node.op == "cond" else ROWS[node.op](call)
        except REFUSALS as e:
            raise refused(subject, e) from e
        made = made if isinstance(made, tuple) else (made,)
        places = (*node.outs, *(node.ins[k] for k in CHANGES.get(node.op, ())))
        for i, y in zip(places, made, strict=True):
            v = program.value(i)
            promised = [sizes.extent(d) for d in v.dims]
            y = _as_promised(y, promised)
            if list(y.shape) != promised or y.dtype != DTYPES[v.dtype]:
                fail("stablehlo", subject, f"gives {y.dtype}{list(y.shape)}, promised is {v.dtype}{promised}")
            values[i] = y
        if "symbol" in node.attrs:
            sizes.numbers[node.attrs["symbol"]] = made[0]
            if node.op != "item":
                sizes.rooms[node.attrs["symbol"]] = product(call.given[0]).substitute(sizes.rooms)


def _as_promised(y: Array, promised: Sequence[Any]) -> Array:
    """With the sizes as we write them: jax does not see that (n - 70) // 7 + 1 is n // 7 - 9, and asserts it then."""
    for axis, (have, want) in enumerate(zip(y.shape, promised, strict=False)):
        if have != want and not isinstance(have, int) and not isinstance(want, int):
            sizes = [jnp.asarray(have), jnp.asarray(want)]
            shape_assertion(sizes[0] == sizes[1], *sizes, error_message="a size is {0} and not {1}")
            y = take(y, iota([want], 0), axis)
    return y


def _cond(program: Program, call: Call, values: Mapping[int, Any]) -> tuple[Array, ...]:
    """One of two regions: by a size, or by data where there is an operand."""
    for n in walk(call.node.regions[0].nodes + call.node.regions[1].nodes):
        if n.op in CHANGES or "symbol" in n.attrs:
            fail("stablehlo", f"cond {call.out.name!r}", f"has {n.op} in a branch, whose state or size is seen outside")

    def branch(region: Region) -> Callable[[], tuple[Array, ...]]:
        def run() -> tuple[Array, ...]:
            inner = dict(values)
            _run(program, region.nodes, call.sizes, inner)
            return tuple(inner[i] for i in region.results)

        return run

    truth = call.ins[0].reshape(()) if call.ins else jnp.asarray(call.attr("when")) >= 0
    return lax.cond(truth, *map(branch, call.node.regions))


def emit(lowered: Lowered, signature: Signature, bounds: bool) -> StableHLOProgram:
    """Trace the Program, and write it as StableHLO: inputs, sizes where they are bounded, states, weights."""
    program, weights = lowered.program, _plain(lowered)
    contract = _contract(program, signature)
    first = len(program.contract.inputs)
    named = [(i, v) for i, v in enumerate(program.values, first) if v.kind != "temp"]
    named.sort(key=lambda e: e[1].kind == "const")
    used = _used(program)
    data = [n.attrs["symbol"] for n in program.walk() if "symbol" in n.attrs]
    symbols = [s for s in program.contract.symbols if s.name in used or not bounds]
    values: list[Spec | Value] = [*program.contract.inputs, *program.contract.outputs, *program.values]
    wide = any(v.dtype in ("i64", "f64", "int") for v in values)
    arguments = [Argument("input", s.name, s.dtype) for s in program.contract.inputs]
    arguments += [Argument("size", s.name, "i32") for s in symbols if bounds]
    arguments += [Argument(v.kind, v.key, _stored(v)) for _, v in named]
    states = [i for i, v in named if v.kind == "state"]

    def run(*args: Array) -> tuple[Array, ...]:
        left = list(args)
        given = {i: left.pop(0) for i in range(first)}
        sizes = _bound(symbols, [left.pop(0) for _ in symbols]) if bounds else Sizes(shapes, {})
        given |= {i: left.pop(0) for i, _ in named}
        for k in contract.constraints if not bounds else ():
            _assert(k, sizes)
        outs, changed = evaluate(program, sizes, given)
        return (*outs, *(changed.get(i, given[i]) for i in states))

    with x64(wide):
        shapes = {} if bounds else _shapes(program.contract.symbols)
        room = Sizes(shapes, {s.name: None for s in symbols} if bounds else {})
        specs = [([room.extent(d) for d in s.dims], s.dtype) for s in program.contract.inputs]
        specs += [([], "i32") for _ in symbols if bounds]
        specs += [([d.eval({}) for d in v.dims], _stored(v)) for _, v in named]
        structs = [jax.ShapeDtypeStruct(dims, DTYPES[dtype]) for dims, dtype in specs]
        try:
            exported = jax_export.export(jax.jit(run, keep_unused=True), platforms=["cpu"])(*structs)
        except REFUSALS as e:
            raise refused("program", e) from e
        hlo = Hlo.parse(RESULT_INFO.sub("", exported.mlir_module())).run(CLEAN)
    results = [Argument("output", s.name, s.dtype) for s in contract.outputs]
    results += [Argument("count", name, "i64") for name in data]
    results += [Argument("state", program.value(i).key, program.value(i).dtype) for i in states]
    return StableHLOProgram(hlo, signature, contract, arguments, results, weights, bounds)


def _with_positions(program: Program, signature: Signature) -> Signature:
    """The signature, and that what is written to a cache fits: an input that says where is a number of the contract."""
    contract = signature.contract
    for n in program.walk():
        if n.op != "cached_attention" or n.ins[3] >= len(program.contract.inputs):
            continue
        place, new, context = n.ins[3], program.value(n.ins[1]).dims[-2], program.value(n.ins[4]).dims[-2]
        known, name = {s.name for s in contract.symbols}, contract.inputs[place].name
        if name in known or not new.symbols() <= known:
            continue
        at = Symbol(name, 0, context.value, Source("item", place, 0, Dim.const(1), Dim.const(0)))
        fits = Constraint(at.dim + new, "le", context, "a cache has no more room")
        contract = replace(contract, symbols=(*contract.symbols, at), constraints=(*contract.constraints, fits))
    return signature._replace(contract=contract)


def _contract(program: Program, signature: Signature) -> Contract:
    """The Program's, without counts among its outputs, and with the method's constraints where they are over its
    symbols: integers that travel as tensors have others."""
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


def _plain(lowered: Lowered) -> dict[str, torch.Tensor]:
    """The weights as tensors; blocks are widened to f32, and a state of blocks is refused."""
    out = dict(lowered.weights)
    for v in lowered.program.values:
        if v.dtype in BLOCKS and v.kind == "state":
            fail("stablehlo", f"state {v.name!r}", f"is {v.dtype}, which StableHLO has not", "Keep it in f32 or f16")
        if v.dtype in BLOCKS and v.kind == "const":
            out[v.key] = dequantise(Quantised(v.dtype, tuple(d.eval({}) for d in v.dims), lowered.weights[v.key]))
    return out


def _used(program: Program) -> set[str]:
    """Symbols that a size or an attribute needs."""
    shapes: list[Spec | Value] = [*program.contract.inputs, *program.contract.outputs, *program.values]
    dims = [d for v in shapes for d in v.dims]
    for n in program.walk():
        for a in n.attrs.values():
            dims += [d for d in (a if isinstance(a, tuple) else (a,)) if isinstance(d, Dim)]
    return set().union(*(d.symbols() for d in dims), set())


def _shapes(symbols: Sequence[Symbol]) -> dict[str, Any]:
    """Each symbol as a dim of jax, all in one scope; jax's own begin at 1, so that one from 0 on is shifted."""
    shift = {s.name: max(0, 1 - (s.lo if s.lo is not None else 0)) for s in symbols}
    names = {s.name: f"{s.name}_plus_{k}" if (k := shift[s.name]) else s.name for s in symbols}
    ranges = [f"{names[s.name]} >= {(s.lo or 0) + shift[s.name]}" for s in symbols if (s.lo or 0) + shift[s.name] > 1]
    ranges += [f"{names[s.name]} <= {s.hi + shift[s.name]}" for s in symbols if s.hi is not None]
    scope = jax_export.SymbolicScope(ranges)
    made = jax_export.symbolic_shape(", ".join(names.values()), scope=scope) if symbols else ()
    return {s.name: d - shift[s.name] for s, d in zip(symbols, made, strict=True)}


def _bound(symbols: Sequence[Symbol], places: Sequence[Array]) -> Sizes:
    """Symbols as numbers, read from the sizes of inputs."""
    sizes = Sizes({}, {})
    for s, place in zip(symbols, places, strict=True):
        rest = place - sizes.number(s.source.add)
        sizes.numbers[s.name] = rest if s.source.mul == 1 else rest // sizes.number(s.source.mul)
    return sizes


def _assert(constraint: Any, sizes: Sizes) -> None:
    lhs, rhs = (jnp.asarray(sizes.number(d)) for d in (constraint.lhs, constraint.rhs))
    message = f"[bind] constraint {constraint}: {{0}} {CMPS[constraint.cmp][0]} {{1}} does not hold"
    shape_assertion(CMPS[constraint.cmp][1](lhs, rhs), lhs, rhs, error_message=message)
