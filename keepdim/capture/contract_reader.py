"""Reading the contract of a pristine ExportedProgram: torch's symbols, ranges, guards and asserts as Dims.

`read_shapes` reads a program once, before anything is lowered; `item_symbols` finds, in a program that was traced
again, the symbols of what `.item()` reads. torch's expressions become Dims through `to_dim`, which never asks a
ShapeEnv to decide anything.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest

import sympy
import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, SymIntArgument, TensorArgument
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..errors import KeepdimError, fail
from ..fx.nodes import shape_env_of
from ..fx.symbols import (
    Symbols,
    declared_names,
    expr_of,
    finite,
    is_data,
    to_constraints,
    to_dim,
    to_size,
    with_user_names,
)
from ..shapes.contract import ASSERTED, RELIED, Constraint, Contract, DimSource, Spec, Symbol, dtype_name, solve
from ..shapes.dim import Dim, decide, dmax


@dataclass(frozen=True)
class ProgramShapes:
    """What an exported program says about its sizes: read once, then carried to every later stage."""

    contract: Contract
    symbols: dict[str, Dim]  # torch's symbol names → the contract's Dims
    env: ShapeEnv | None  # None where nothing is symbolic
    unchecked: list[str]  # asserts over data that neither inputs nor outputs show, in the user's names

    @property
    def all_symbols(self) -> Symbols:
        """Also those that only the ShapeEnv knows: data-dependent sizes inside the program."""
        return Symbols(self.symbols, self.env)


def read_shapes(ep: ExportedProgram, names: Mapping[str, str] | None = None) -> ProgramShapes:
    """The contract of a program, and the Dim of each of torch's symbols. `names` maps these to the user's; without it,
    they are those that the program's ShapeEnv has."""
    reader = _ContractReader(ep, names or {})
    return ProgramShapes(reader.contract(), reader.symbols, reader.env, reader.unchecked())


def contract_of(ep: ExportedProgram, names: Mapping[str, str] | None = None) -> Contract:
    """The contract alone.

    >>> import torch
    >>> from torch.export import Dim as D, export
    >>> ep = export(torch.nn.Linear(4, 2), (torch.randn(3, 4),), dynamic_shapes=({0: D("batch", min=2, max=8)},))
    >>> print(contract_of(ep))
    batch: 2..8 from input 0 'input' dim 0
    input: f32[batch, 4]
    -> linear: f32[batch, 2]
    """
    return read_shapes(ep, names).contract


# ---------------------------------------------------------------- reading an ExportedProgram


class _ContractReader:
    """Reads one ExportedProgram; the order of methods is the order of reading."""

    def __init__(self, ep: ExportedProgram, names: Mapping[str, str]):
        self.ep = ep
        self.nodes = {n.name: n for n in ep.graph.nodes}
        self.env = shape_env_of(n.meta.get("val") for n in ep.graph.nodes)
        self.user_inputs = [s for s in ep.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
        self.names = dict(names) or declared_names(self.env)
        self.exprs = [self._exprs_of(s.arg) for s in self.user_inputs]  # sympy, per input
        self.results = [s.arg for s in ep.graph_signature.output_specs if s.kind == OutputKind.USER_OUTPUT]
        self.data: set[str] = set()  # torch's symbols that only the outputs show
        self.symbols = self._symbols()

    def _exprs_of(self, arg: object) -> list[sympy.Expr]:
        if isinstance(arg, TensorArgument):
            return [expr_of(d) for d in self.nodes[arg.name].meta["val"].shape]
        if isinstance(arg, SymIntArgument):
            return [expr_of(self.nodes[arg.name].meta["val"])]
        if isinstance(arg, ConstantArgument) and isinstance(arg.value, int) and not isinstance(arg.value, bool):
            return [sympy.Integer(arg.value)]
        return []

    def _symbols(self) -> dict[str, Dim]:
        """torch's symbol name → Dim with the user's name and the declared range."""
        free: set[sympy.Symbol] = set().union(*(e.free_symbols for es in self.exprs for e in es), set())
        bare = {e for es in self.exprs for e in es if e.is_Symbol}
        unbacked = {e for node in self._items() for e in expr_of(node.meta["val"]).free_symbols}
        made = self._shown_by_outputs() - free - unbacked
        self.data = {str(s) for s in made}
        self._refuse_undecided()
        out: dict[str, Dim] = {}
        taken: set[str] = set()
        for sym in sorted(free | unbacked, key=str) + sorted(made, key=str):
            lo, hi = self._range(sym, derived_only=sym not in bare | unbacked | made)
            if sym in made:
                hi = _least(hi, *(d.bounds[1] for d in data_size_limits(self.ep, out).get(str(sym), ())))
            name = self.names.get(str(sym), str(sym))
            name = str(sym) if name in taken else name
            taken.add(name)
            out[str(sym)] = Dim.symbol(name, lo, hi)
        return out

    def _shown_by_outputs(self) -> set[sympy.Symbol]:
        vals = [self.nodes[a.name].meta["val"] for a in self.results if a.name in self.nodes]
        sizes = [d for v in vals for d in (v.shape if isinstance(v, torch.Tensor) else [v])]
        return set().union(*(d.node.expr.free_symbols for d in sizes if isinstance(d, torch.SymInt)), set())

    def _refuse_undecided(self) -> None:
        """Fail for a slice whose end torch cannot decide: it gives it an unbacked size, as if it depended on data."""
        for n in self.ep.graph.nodes:
            made = self.data & {str(s) for s in n.meta.get("unbacked_bindings") or {}}
            if made and n.target == torch.ops.aten.slice.Tensor and not any(map(_by_data, n.all_input_nodes)):
                dim = n.args[1] if len(n.args) > 1 else 0
                fail(
                    "contract",
                    f"dim {dim} of '{n.name}'",
                    "torch.export left its size open, though no data decides it",
                )

    def _range(self, sym: sympy.Symbol, derived_only: bool) -> tuple[int | None, int | None]:
        """The declared range. Where a symbol shows only inside `a*s + b`, torch's own entry for it is its
        default for the root of a derived Dim, and the declared range is the one of the derived expression."""
        ranges = self.ep.range_constraints
        vr = ranges.get(sym)
        lo, hi = (finite(vr.lower), finite(vr.upper)) if vr is not None else (None, None)
        if not derived_only:
            return lo, hi
        for e, r in ranges.items():
            if e.is_Symbol or e.free_symbols != {sym}:
                continue
            poly = sympy.Poly(e, sym)
            if poly.degree() != 1:
                continue
            lo, hi = Symbol.solve_range(finite(r.lower), finite(r.upper), *(int(c) for c in poly.all_coeffs()))
        return lo, hi

    def _items(self) -> list[torch.fx.Node]:
        """`.item()` calls whose tensor is an input: their symbols are read from that input."""
        return [n for n in self.ep.graph.nodes if _item_place(n, self._input_index()) is not None]

    def _input_index(self) -> dict[str, int]:
        return {s.arg.name: i for i, s in enumerate(self.user_inputs) if isinstance(s.arg, TensorArgument)}

    def _places(self) -> list[DimSource]:
        places = []
        for i, (spec, exprs) in enumerate(zip(self.user_inputs, self.exprs, strict=True)):
            kind = "size" if isinstance(spec.arg, TensorArgument) else "int"
            places += [DimSource(kind, i, d, to_dim(e, self.symbols)) for d, e in enumerate(exprs)]
        for n in self._items():
            place = _item_place(n, self._input_index())
            assert place is not None
            places.append(DimSource("item", *place, to_dim(n.meta["val"], self.symbols)))
        return places

    def _inputs(self) -> list[Spec]:
        out = []
        for spec, exprs in zip(self.user_inputs, self.exprs, strict=True):
            arg = spec.arg
            dims = tuple(to_dim(e, self.symbols) for e in exprs)
            if isinstance(arg, TensorArgument):
                out.append(Spec(arg.name, dtype_name(self.nodes[arg.name].meta["val"].dtype, arg.name), dims))
            else:
                out.append(Spec(arg.name, "int" if dims else "python", dims))
        return out

    def _outputs(self) -> list[Spec]:
        out = []
        for i, arg in enumerate(self.results):
            val = self.nodes[arg.name].meta["val"] if arg.name in self.nodes else getattr(arg, "value", None)
            name = arg.name or f"output_{i}"
            if isinstance(val, torch.Tensor):
                dims = tuple(to_size(d, self.symbols) for d in val.shape)
                out.append(Spec(name, dtype_name(val.dtype, name), dims))
            elif isinstance(val, (int, torch.SymInt)) and not isinstance(val, bool):
                out.append(Spec(name, "int", (to_dim(val, self.symbols),)))
            else:
                out.append(Spec(name, "python", ()))
        return out

    def _relations(self) -> list[tuple[sympy.Basic, str]]:
        """Guards of the ShapeEnv and asserts of the graph, each with its reason."""
        relations: list[tuple[sympy.Basic, str]] = []
        if self.env is not None:
            relations += [(self.env.replace(g.expr), RELIED) for g in self.env.guards]
        for n in self.ep.graph.nodes:
            if n.op == "call_function" and "_assert_scalar" in str(n.target) and isinstance(n.args[0], torch.fx.Node):
                val = n.args[0].meta.get("val")
                if isinstance(val, torch.SymBool):
                    relations.append((val.node.expr, ASSERTED))
        return relations

    def _constraints(self) -> list[Constraint]:
        """The relations without duplicates, except those over data that neither inputs nor outputs show; and the upper
        bounds of data-dependent sizes."""
        out: list[Constraint] = []
        for e, why in self._relations():
            if {str(s) for s in e.free_symbols} <= self.symbols.keys():
                out += [c for c in to_constraints(e, self.symbols, why) if c not in out]
        for name, most in data_size_limits(self.ep, self.symbols).items():
            if name in self.data:
                limits = [Constraint(self.symbols[name], "le", d, OF_ELEMENTS) for d in most]
                out += [c for c in limits if not decide(c.lhs, c.cmp, c.rhs) and c not in out]
        return out

    def unchecked(self) -> list[str]:
        """Relations of sizes to data that neither inputs nor outputs show. (Ranges of data are checked where it is
        used.)"""
        free = [(e, {str(s) for s in e.free_symbols}) for e, _ in self._relations()]
        return [
            with_user_names(e, self.symbols) for e, names in free if len(names) > 1 and not names <= self.symbols.keys()
        ]

    def contract(self) -> Contract:
        symbols, rest = solve(self._places())
        inputs = self._inputs()
        if rest:
            p = rest[0]
            fail("contract", f"input {p.input} {inputs[p.input].name!r} dim {p.index}",
                 f"its size {p.dim} cannot be solved for {', '.join(sorted(p.dim.symbols()))}",
                 "Let some dim of an input be each symbol itself, or linear in it")  # fmt: skip
        names = {s.name for s in symbols}
        outputs, data = _solve_outputs(self._outputs(), names)
        before, after = [], []
        for c in self._constraints():
            used = c.lhs.symbols() | c.rhs.symbols()
            if used <= names:
                before.append(c)
            elif used <= names | {s.name for s in data}:
                after.append(c)
        return Contract(tuple(symbols), tuple(inputs), tuple(before), outputs, data, tuple(after))


def _solve_outputs(outputs: list[Spec], known: set[str]) -> tuple[tuple[Spec, ...], tuple[Symbol, ...]]:
    """The data-dependent symbols, and the outputs that show them; a size that determines none of them, like u//2,
    becomes a symbol itself."""

    def places() -> list[DimSource]:
        kinds = ["int" if o.dtype == "int" else "size" for o in outputs]
        return [
            DimSource(k, i, d, dim)
            for i, (k, o) in enumerate(zip(kinds, outputs, strict=True))
            for d, dim in enumerate(o.dims)
        ]

    for p in solve(places(), known)[1]:
        whole = Dim.symbol(f"size_{p.input}_{p.index}", *p.dim.bounds)
        outputs = [Spec(o.name, o.dtype, tuple(whole if d == p.dim else d for d in o.dims)) for o in outputs]
    return tuple(outputs), tuple(solve(places(), known)[0])


# ---------------------------------------------------------------- data-dependent sizes
OF_ELEMENTS = "the op that makes it cannot return more"


def data_size_limits(ep: ExportedProgram, symbols: Mapping[str, Dim]) -> dict[str, list[Dim]]:
    """torch's symbol of a data-dependent size → its upper bounds, from the op that makes it."""
    out: dict[str, list[Dim]] = {}
    for n in ep.graph.nodes:
        made = [str(s) for s in n.meta.get("unbacked_bindings") or {}]
        if len(made) != 1:
            continue
        try:
            shapes = [[to_dim(d, symbols) for d in x.shape] for x in _counted(n)]
        except KeepdimError:  # one of them depends on data without a bound
            continue
        if n.target == torch.ops.aten.masked_select.default:  # the two are broadcast together
            a, b = (reversed(s) for s in shapes)
            shapes = [[dmax(x, y) for x, y in zip_longest(a, b, fillvalue=Dim.const(1))]]
        out[made[0]] = [reduce(operator.mul, shape, Dim.const(1)) for shape in shapes]
    return out


_COUNT_ELEMENTS = {
    f"aten.{name}"
    for name in (
        *("nonzero.default", "nonzero_numpy.default", "argwhere.default", "where.default"),
        *("_unique2.default", "unique_consecutive.default", "unique_dim.default"),
    )
}


def _counted(n: torch.fx.Node) -> list[torch.Tensor]:
    """The tensors whose elements an op counts: the masks, or what is searched."""
    if n.target == torch.ops.aten.masked_select.default:
        return [a.meta["val"] for a in n.args[:2]]
    if n.target == torch.ops.aten.index.Tensor:
        indices = [i.meta["val"] for i in n.args[1] if isinstance(i, torch.fx.Node)]
        return [m for m in indices if m.dtype in (torch.bool, torch.uint8)]
    return [n.args[0].meta["val"]] if str(n.target) in _COUNT_ELEMENTS else []


def _least(*bounds: int | None) -> int | None:
    return min((b for b in bounds if b is not None), default=None)


def _by_data(n: torch.fx.Node) -> bool:
    """Whether a value is, or has, a data-dependent size."""
    val = n.meta.get("val")
    sizes = val.shape if isinstance(val, torch.Tensor) else [val]
    return any(is_data(s) for d in sizes if isinstance(d, torch.SymInt) for s in d.node.expr.free_symbols)


ITEMS = ("aten.item.default", "aten._local_scalar_dense.default")
SELECTS = ("aten.select.int", "aten.select_copy.int")


def _op_name(node: torch.fx.Node) -> str:
    """The name of the ATen op of a node, in ATen or Edge dialect."""
    inner = getattr(node.target, "_op", None)
    return str(inner if isinstance(inner, OpOverload) else node.target)


def _item_place(node: torch.fx.Node, inputs: Mapping[str, int]) -> tuple[int, int] | None:
    """(input, flat element) for `x.item()` and `x[i].item()` on an integer input of static shape."""
    if node.op != "call_function" or _op_name(node) not in ITEMS:
        return None
    tensor, index = node.args[0], 0
    while isinstance(tensor, torch.fx.Node) and _op_name(tensor) in SELECTS:
        base = tensor.args[0]
        if not isinstance(base, torch.fx.Node) or base.meta["val"].dim() != 1 or not isinstance(tensor.args[2], int):
            return None
        index = tensor.args[2]
        if index < 0:
            return None
        tensor = base
    if not isinstance(tensor, torch.fx.Node) or tensor.name not in inputs:
        return None
    val = node.meta.get("val")
    if not isinstance(val, torch.SymInt) or tensor.meta["val"].dtype.is_floating_point:
        return None
    return inputs[tensor.name], index


def item_symbols(ep: ExportedProgram) -> dict[tuple[int, int, int], str]:
    """(input, flat element, how many times it was read before) → torch's symbol of what `.item()` reads there.

    A program that is traced again has other symbols for the same elements.
    """
    user = [s.arg for s in ep.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    index = {arg.name: i for i, arg in enumerate(user) if isinstance(arg, TensorArgument)}
    out: dict[tuple[int, int, int], str] = {}
    for n in ep.graph.nodes:
        if (place := _item_place(n, index)) is not None and n.meta["val"].node.expr.is_Symbol:
            out[(*place, sum(key[:2] == place for key in out))] = str(n.meta["val"].node.expr)
    return out
