"""Runs implementations on fake tensors with symbolic sizes, to report early and clearly what torch.cond would refuse.

Also finds which input sizes depend on the axes, and makes inputs with symbolic sizes from concrete ones.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CellType
from typing import Any, NamedTuple

import sympy
import torch
import torch.fx.experimental._config as fx_config
import torch.utils._pytree as pytree
from torch._dynamo.source import ConstantSource
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    ShapeGuard,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from ..errors import KeepdimError, describe_exception, fail
from ..fx.symbols import declared_names, with_user_names
from .axes import Args, Axis, AxisReader, Function, Kwargs, Size

Candidate = tuple[str, Function]
SymbolValues = dict[sympy.Symbol, sympy.Integer]
TORCH = str(Path(torch.__file__).parent)
_in_preflight = False  # a dispatch nested in an implementation then only has to compute shapes
_outer_checked = False  # set while Dynamo traces a branch, where a nested dispatch does not see declared ranges


def in_preflight() -> bool:
    """Whether an implementation is being run for its shapes alone."""
    return _in_preflight


def outer_checked() -> bool:
    """Whether the outer dispatch has checked the sizes of one nested in its branch."""
    return _outer_checked


@contextlib.contextmanager
def outer_checks() -> Iterator[None]:
    """Context for tracing branches that passed their preflight."""
    global _outer_checked
    outer, _outer_checked = _outer_checked, True
    try:
        yield
    finally:
        _outer_checked = outer


class SymbolicInputs(NamedTuple):
    """Fake inputs with symbols of a new ShapeEnv for some sizes."""

    mode: FakeTensorMode
    env: ShapeEnv
    args: Args
    kwargs: Kwargs


class LinkedSizes(NamedTuple):
    """Sizes that depend on the axes, as expressions of torch's symbols."""

    sizes: dict[tuple[int, int], sympy.Expr]  # by (id of tensor, dim)
    axes: list[sympy.Expr]
    example: SymbolValues


# ---------------------------------------------------------------- making sizes symbolic
def symbolic_inputs(
    args: Args,
    kwargs: Kwargs,
    dynamic: Callable[[torch.Tensor, int], bool],
    bounds: Mapping[tuple[int, int], tuple[int, int]],
) -> SymbolicInputs:
    """The arguments as fake tensors, with symbols for sizes that `dynamic` selects; bounds by (id of tensor, dim)."""
    env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    made: dict[int, torch.Tensor] = {}

    def fake(x: object) -> object:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in made:
            limits = [bounds.get((id(x), d)) for d in range(x.dim())]
            context: StatelessSymbolicContext = StatelessSymbolicContext(
                dynamic_sizes=[DimDynamic.DYNAMIC if dynamic(x, d) else DimDynamic.STATIC for d in range(x.dim())],
                constraint_sizes=[
                    None if r is None else StrictMinMaxConstraint(vr=ValueRanges(*r), warn_only=False) for r in limits
                ],
            )
            source = ConstantSource(f"input{len(made)}")
            sizes, strides, _ = env.create_symbolic_sizes_strides_storage_offset(
                x, source=source, symbolic_context=context
            )
            with mode:
                made[id(x)] = torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device)
        return made[id(x)]

    with fx_config.patch(backed_size_oblivious=True), _disable_current_modes():
        mine, more = pytree.tree_map(fake, (tuple(args), dict(kwargs)))
    return SymbolicInputs(mode, env, mine, more)


def distinct(leaves: Sequence[Any], others: Sequence[torch.Tensor] = ()) -> list[object]:
    """Clone repeated tensors and those in `others`: a trace merges a tensor that is passed twice into one input."""
    seen = {id(t) for t in others}
    out = []
    for x in leaves:
        repeated = isinstance(x, torch.Tensor) and id(x) in seen
        seen.add(id(x))
        out.append(x.detach().clone() if repeated else x)
    return out


def separate_sizes(axes: Sequence[Axis], read: AxisReader, args: Args, kwargs: Kwargs
                   ) -> tuple[Args, Kwargs]:  # fmt: skip
    """Examples for a trace: distinct tensors, and for an axis that is a size, a size that is unique and not 1."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    args, kwargs = pytree.tree_unflatten(distinct(leaves), spec)
    taken = {n for x in _tensors((args, kwargs)) for n in x.shape if isinstance(n, int)}
    found, sizes = read.tensors(*args, **kwargs), dict[int, list[int]]()
    for axis in axes:
        free = next((n for n in range(max(axis.lo, 2), axis.hi + 1) if n not in taken), 0)
        for tensor, dim in axis.reads if axis.bare and free else ():
            x = found[tensor]
            if isinstance(x.shape[dim], int) and x.shape[dim] < 2:
                sizes.setdefault(id(x), list(x.shape))[dim] = free
        taken.add(free)
    return pytree.tree_map_only(
        torch.Tensor, lambda x: x.new_empty(sizes[id(x)]) if id(x) in sizes else x, (args, kwargs)
    )


def example_sizes(subject: str, axes: Sequence[Axis], read: AxisReader, args: Args, kwargs: Kwargs
                  ) -> dict[tuple[int, int], Axis]:  # fmt: skip
    """(id of tensor, dim) of every size that the axes read. Sizes 0 and 1, which torch specialises, are errors."""
    found = read.tensors(*args, **kwargs)
    read_sizes: dict[tuple[int, int], Axis] = {}
    for axis in axes:
        for tensor, dim in axis.reads:
            x, d = found[tensor], dim % found[tensor].dim()
            size = x.shape[d]
            where = f"{subject}, example {tensor!r}"
            if not isinstance(size, int):
                fail("dispatch", where, f"has the symbolic size {size} already", "Call the dispatch itself")
            if size < 2 and axis.hi >= 2:
                fail("dispatch", where, f"has size {size} at dim {dim}, which torch specialises",
                     "Give an example of at least 2")  # fmt: skip
            read_sizes[id(x), d] = axis
    return read_sizes


@contextlib.contextmanager
def symbols_of(symbolic: SymbolicInputs) -> Iterator[None]:
    """Context in which ops on these inputs only compute symbolic shapes."""
    with _disable_current_modes(), fx_config.patch(backed_size_oblivious=True), symbolic.mode, torch.no_grad():
        yield


def link_sizes(subject: str, axes: Sequence[Axis], read: AxisReader, candidates: Sequence[Candidate], args: Args,
               kwargs: Kwargs) -> LinkedSizes:  # fmt: skip
    """Find which sizes of the arguments depend on the axes.

    Every size above 1 becomes a symbol; running the candidates then reveals the equalities that they need.
    """
    read_sizes = example_sizes(subject, axes, read, args, kwargs)
    symbolic = symbolic_inputs(args, kwargs, lambda x, d: (id(x), d) in read_sizes or x.shape[d] > 1, {})

    def named(why: str) -> str:
        first = [_expr(t[0]) for t in read.terms(*symbolic.args, **symbolic.kwargs)]
        sizes = {str(s): v for s, v in symbolic.env.backed_var_to_val.items()}  # those of the example
        return _with_axes(why, axes, first, sizes)

    with symbols_of(symbolic):
        equate(read.terms(*symbolic.args, **symbolic.kwargs))
        for name, run in candidates:
            _run(subject, name, run, symbolic.args, symbolic.kwargs, named)
        sizes = [_expr(t[0]) for t in read.terms(*symbolic.args, **symbolic.kwargs)]
    free = set().union(*(symbolic.env.replace(e).free_symbols for e in sizes))
    for axis, e in zip(axes, sizes, strict=True):
        if not symbolic.env.replace(e).free_symbols:
            fail(
                "dispatch",
                f"{subject}, axis {axis.name!r}",
                f"is {symbolic.env.replace(e)} for every input that the functions accept",
            )
    out: dict[tuple[int, int], sympy.Expr] = {}
    leaves = zip(pytree.tree_leaves((tuple(args), dict(kwargs))), pytree.tree_leaves((symbolic.args, symbolic.kwargs)),
                 strict=True)  # fmt: skip
    for given, fake in leaves:
        for d in range(given.dim() if isinstance(given, torch.Tensor) else 0):
            e = symbolic.env.replace(_expr(fake.shape[d]))
            if e.free_symbols and e.free_symbols <= free:
                out[id(given), d] = e
    return LinkedSizes(out, [symbolic.env.replace(e) for e in sizes], dict(symbolic.env.backed_var_to_val))


def equate(terms: Sequence[Sequence[Size]]) -> None:
    """Assume that all terms of an axis are equal."""
    for first, *others in terms:
        for other in others:
            torch._check(first == other)


# ---------------------------------------------------------------- running implementations on symbolic sizes
class Result(NamedTuple):
    """The results of one implementation."""

    name: str
    values: list[torch.Tensor]
    spec: pytree.TreeSpec


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Context in which ops are not recorded in the graph of an export."""
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def inspect_all(subject: str, axes: Sequence[Axis], points: Sequence[tuple[int, ...]], candidates: Sequence[Candidate],
                read: AxisReader, args: Args, kwargs: Kwargs) -> list[tuple[bool, ...]]:  # fmt: skip
    """For each candidate, which of its results are fresh and contiguous. Raises for candidates that cannot be branches
    of one cond, or that branch on a size in Python. Uses the ShapeEnv of the arguments."""
    sizes = [_expr(n) for n in read.sizes(*args, **kwargs)]
    env = _env(pytree.tree_leaves((args, kwargs)))
    for axis, e in zip(axes, sizes, strict=True):
        if not env.replace(e).free_symbols <= env.backed_var_to_val.keys():
            fail("dispatch", f"{subject}, axis {axis.name!r}", f"{axis.text} depends on data, not on sizes of inputs",
                 "Call one of the implementations")  # fmt: skip
    results, fresh = [], []

    def named(why: str) -> str:
        return _with_axes(why, axes, sizes, declared_names(env))

    for name, run in candidates:
        before, tried = len(env.guards), _points(env, axes, sizes, points)
        mine, more = pytree.tree_map_only(torch.Tensor, _like, (tuple(args), dict(kwargs)))
        inputs, own = _tensors((mine, more)), _parameters(run)
        known = {"an input": inputs}
        if len(candidates) > 1:  # a single candidate is not in a branch
            known |= {"one of its buffers": own, "a tensor that it captures": _outside(run)}
        versions = {what: [x._version for x in tensors] for what, tensors in known.items()}
        out = _run(subject, name, run, mine, more, named)
        for what, tensors in known.items():
            if versions[what] != [x._version for x in tensors]:
                fail("dispatch", f"{subject}, implementation {name!r}", f"changes {what}", "Let it work on a clone")
        for guard in env.guards[before:]:
            _check_guard(subject, name, axes, sizes, env, guard, tried)
        values, spec = pytree.tree_flatten(out)
        if not values or not all(isinstance(v, torch.Tensor) for v in values):
            kinds = ", ".join(type(v).__name__ for v in values) or "nothing"
            fail("dispatch", f"{subject}, implementation {name!r}", f"returns {kinds}", "Return tensors")
        results.append(Result(name, values, spec))
        fresh.append(_fresh(values, [*inputs, *own]))
    tried = _points(env, axes, sizes, points)
    for other in results[1:]:
        _compare(subject, axes, sizes, env, tried, results[0], other)
    return fresh


def _with_axes(why: str, axes: Sequence[Axis], sizes: Sequence[sympy.Expr], others: Mapping[str, object]) -> str:
    """A message of torch with the names of axes instead of torch's symbols, and what `others` has for other symbols."""
    names = dict(others)
    for axis, e in zip(axes, sizes, strict=True):
        if e.is_Symbol:
            names[str(e)] = axis.name
        elif e.free_symbols:
            why = why.replace(str(e), axis.name)
    return with_user_names(why, names)


def _run(subject: str, name: str, run: Function, args: Args, kwargs: Kwargs, named: Callable[[str], str]) -> object:
    """The results; `named` puts the names of axes into an error."""
    global _in_preflight
    outer, _in_preflight = _in_preflight, True
    with _disable_current_modes():  # captured tensors are real: an op may mutate them, which is undone below
        kept = [(x, x._version, x.detach().clone()) for x in _outside(run) if not isinstance(x, FakeTensor)]
    try:
        return run(*args, **kwargs)
    except KeepdimError:
        raise
    except Exception as e:  # the function or an op inside it may raise anything
        why = named(describe_exception(e))
        fail("dispatch", f"{subject}, implementation {name!r}", f"does not run on symbolic sizes ({why})", cause=e)
    finally:
        _in_preflight = outer
        with _disable_current_modes(), torch.no_grad():
            for x, version, before in kept:
                if x._version != version:
                    x.copy_(before)


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)


def any_fake(*tree: object) -> bool:
    """Whether any tensor among them is fake."""
    return any(isinstance(x, FakeTensor) for x in _tensors(tree))


def _tensors(tree: object) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _parameters(run: Function) -> list[torch.Tensor]:
    owner = run if isinstance(run, torch.nn.Module) else getattr(run, "__self__", None)
    return [*owner.parameters(), *owner.buffers()] if isinstance(owner, torch.nn.Module) else []


def _outside(run: Function) -> list[torch.Tensor]:
    """Tensors that a function closes over or reads as globals, including buffers and module attributes, not weights."""
    owner = run if isinstance(run, torch.nn.Module) else getattr(run, "__self__", None)
    code = getattr(run, "__func__", run)
    names = getattr(getattr(code, "__code__", None), "co_names", ())
    cells = [c.cell_contents for c in getattr(code, "__closure__", None) or () if c != CellType()]
    found = [owner, *cells, *(code.__globals__[n] for n in names if n in code.__globals__)]
    modules = [m for x in found if isinstance(x, torch.nn.Module) for m in x.modules()]
    tensors = _tensors([*found, *(x for m in modules for x in vars(m).values())])
    return [x for x in tensors if not isinstance(x, torch.nn.Parameter) and not x.is_inference()]


def _fresh(values: list[torch.Tensor], others: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    seen = {x.untyped_storage()._cdata for x in others}
    out = []
    for v in values:
        own = isinstance(v, FakeTensor) and v._base is None and v.untyped_storage()._cdata not in seen
        seen.add(v.untyped_storage()._cdata)
        out.append(own and is_contiguous_or_false(v))
    return tuple(out)


def _compare(subject: str, axes: Sequence[Axis], sizes: Sequence[sympy.Expr], env: ShapeEnv,
             points: Sequence[SymbolValues], first: Result, other: Result) -> None:  # fmt: skip
    where = f"{subject}, implementation {other.name!r}"
    if first.spec != other.spec:
        fail("dispatch", where, f"returns {len(other.values)} results as {_shape_of(other.spec)}, "
             f"{first.name!r} {len(first.values)} as {_shape_of(first.spec)}")  # fmt: skip
    for i, (a, b) in enumerate(zip(first.values, other.values, strict=True)):
        for what, x, y in (("dtype", a.dtype, b.dtype), ("rank", a.dim(), b.dim()), ("device", a.device, b.device)):
            if x != y:
                fail("dispatch", where, f"gives result {i} with {what} {y}, but {first.name!r} with {x}")
        for point in points:
            shapes = [[_at(env, n, point) for n in v.shape] for v in (a, b)]
            if shapes[0] != shapes[1]:
                fail("dispatch", where, f"gives result {i} as {shapes[1]}, but {first.name!r} as {shapes[0]} "
                     f"at {_sizes_at(axes, sizes, env, point)}")  # fmt: skip
            orders = [_order(shapes[0], [_at(env, n, point) for n in v.stride()]) for v in (a, b)]
            if orders[0] != orders[1]:
                fail("dispatch", where, f"returns result {i} with stride order {orders[1]}, but {first.name!r} "
                     f"with {orders[0]}", "Return it contiguous")  # fmt: skip


def _shape_of(spec: pytree.TreeSpec) -> str:
    keys = f" ({', '.join(map(str, spec.context))})" if spec.type is dict else ""  # the order of keys matters
    return "one tensor" if spec.is_leaf() else f"{spec.type.__name__}{keys}"


def _order(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Dims from the outermost in memory to the innermost, without those of size 1."""
    return sorted((d for d, n in enumerate(sizes) if n > 1), key=lambda d: (-strides[d], d))


# ---------------------------------------------------------------- guards
def _check_guard(subject: str, name: str, axes: Sequence[Axis], sizes: Sequence[sympy.Expr], env: ShapeEnv,
                 guard: ShapeGuard, points: Sequence[SymbolValues]) -> None:  # fmt: skip
    """Raise if a guard over the axes does not hold on the whole domain: it would narrow the program's range."""
    free = guard.expr.free_symbols
    axis_symbols = set().union(*(e.free_symbols for e in sizes))
    at, by_torch = _guard_location(guard)
    if not free or not free <= axis_symbols or _specialises_zero_one(guard):
        return
    for point in points:
        if all(point[s] > 1 for s in free) and guard.expr.xreplace(point) == sympy.false:
            names = {e: sympy.Symbol(a.name) for a, e in zip(axes, sizes, strict=True) if e.is_Symbol}
            shown = guard.expr.xreplace(names)
            line = f" ({at.filename}:{at.lineno})" if hasattr(at, "filename") and not by_torch else ""
            # For a comparison with 0 or 1, an op on that line may have added the guard.
            verb = "relies on" if by_torch or _from_zero_or_one(guard) else "decides in Python on"
            fail("dispatch", f"{subject}, implementation {name!r}",
                 f"{verb} {shown}{line}, which does not hold at {_sizes_at(axes, sizes, env, point)}",
                 "Make two implementations of it, or use torch.cond")  # fmt: skip


def _guard_location(guard: ShapeGuard) -> tuple[Any, bool]:
    """Where a guard was added, and whether that is torch's code."""
    at: object = getattr(guard.sloc, "framework_loc", None)
    return at, hasattr(at, "filename") and at.filename.startswith(TORCH)


def _specialises_zero_one(guard: ShapeGuard) -> bool:
    """Whether torch added the guard to exclude size 0 or 1, which it specialises."""
    return _from_zero_or_one(guard) and _guard_location(guard)[1]


def _from_zero_or_one(guard: ShapeGuard) -> bool:
    return isinstance(guard.expr, sympy.Ne) and guard.expr.args[1] in (0, 1)


def _points(env: ShapeEnv, axes: Sequence[Axis], sizes: Sequence[sympy.Expr], points: Sequence[tuple[int, ...]]
            ) -> list[SymbolValues]:  # fmt: skip
    """Values of all symbols at points of the axes: the borders of ranges, and some between. Symbols that do not depend
    on an axis keep the example's value."""
    base = dict(env.backed_var_to_val)
    out: list[SymbolValues] = []

    def add(change: Mapping[sympy.Symbol, int]) -> None:
        values = {**base, **{s: sympy.Integer(v) for s, v in change.items()}}
        whole = {s: env.replace(s).xreplace(values) for s in base}
        out.append({s: whole[s] if whole[s].is_Integer else values[s] for s in base})

    bare = [env.replace(e) for e in sizes]
    if all(e.is_Symbol for e in bare):
        spread = itertools.product(*(_spread(a.lo, a.hi) for a in axes))
        for values in dict.fromkeys((*points, *spread)):
            add(dict(zip(bare, values, strict=True)))
        return out
    for i, (axis, e) in enumerate(zip(axes, bare, strict=True)):
        wanted = {p[i] for p in points}
        for s in sorted(e.free_symbols, key=str)[:1]:
            for v in sorted({*_spread(1, axis.hi), *wanted}):
                size = e.xreplace({**base, s: sympy.Integer(v)})
                if size.is_Integer and axis.lo <= size <= axis.hi:
                    add({s: v})
    return out


def _spread(lo: int, hi: int) -> list[int]:
    """Both ends, powers of two and their neighbours, and some between."""
    powers = [2**k + d for k in range(hi.bit_length()) for d in (-1, 0, 1)]
    even = [lo + (hi - lo) * i // 16 for i in range(17)]
    return sorted({v for v in (*powers, *even) if lo <= v <= hi})


def _at(env: ShapeEnv, n: Size | sympy.Expr, point: SymbolValues) -> int:
    return int(env.replace(_expr(n)).xreplace(point))


def _sizes_at(axes: Sequence[Axis], sizes: Sequence[sympy.Expr], env: ShapeEnv, point: SymbolValues) -> str:
    return ", ".join(f"{a.name} = {_at(env, e, point)}" for a, e in zip(axes, sizes, strict=True))


def _expr(n: Size | sympy.Expr) -> sympy.Expr:
    return n.node.expr if isinstance(n, torch.SymInt) else sympy.sympify(n)


def _env(leaves: Sequence[object]) -> ShapeEnv:
    for x in leaves:
        for n in x.shape if isinstance(x, torch.Tensor) else (x,):
            if isinstance(n, torch.SymInt):
                return n.node.shape_env
    raise AssertionError("no symbolic size among the arguments")


class Extent(NamedTuple):
    """The values that a size may have in an export."""

    declared: ValueRanges[sympy.Expr]  # from the ranges of its symbols
    positive: ValueRanges[sympy.Expr]  # the same without size 0, which torch's symbols exclude
    seen: ValueRanges[sympy.Expr]  # by the trace, which excludes 0, and 1 too unless sizes are oblivious


def declared(n: torch.SymInt) -> tuple[int | None, int | None]:
    """The range that an export declares for a size that is one symbol; None for an open end."""
    said = _user_ranges(n.node.shape_env).get(n.node.shape_env.replace(n.node.expr))
    return (None, None) if said is None else (_int_or_none(said.lower), _int_or_none(said.upper))


def extent(n: torch.SymInt) -> Extent:
    """The values of a size, or of an expression of sizes, by the export's declaration and as the trace sees them."""
    env = n.node.shape_env
    expr, said = env.replace(n.node.expr), _user_ranges(env)
    known = {s: env.var_to_range[s] for s in expr.free_symbols}
    # torch has a lower bound above 2 only if the model checks it.
    ranges = {s: r if s not in said or r.lower > 2 else ValueRanges(said[s].lower, r.upper) for s, r in known.items()}
    declared, positive, seen = (bound_sympy(expr, r) for r in (ranges, _from_one(ranges), _from_one(known)))
    return Extent(declared, positive, seen)


def decides(values: ValueRanges[sympy.Expr], at: int) -> bool:
    """Whether all values are on one side of a cut."""
    return bool(values.lower > at or values.upper <= at)


def _user_ranges(env: ShapeEnv) -> dict[sympy.Symbol, ValueRanges[sympy.Expr]]:
    """The ranges that the user declared for sizes of inputs."""
    out: dict[sympy.Symbol, ValueRanges[sympy.Expr]] = {}
    for tracked in env.tracked_fakes or ():
        sizes = tracked.fake.shape if isinstance(tracked.fake, torch.Tensor) else ()
        limits = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        for size, limit in zip(sizes, limits, strict=False):
            symbol = env.replace(_expr(size))
            if isinstance(limit, StrictMinMaxConstraint) and symbol.is_Symbol:
                out[symbol] = limit.vr & out.get(symbol, limit.vr)
    return out


def _from_one(ranges: Mapping[sympy.Symbol, ValueRanges[sympy.Expr]]) -> dict[sympy.Symbol, ValueRanges[sympy.Expr]]:
    return {s: ValueRanges(max(r.lower, 1), r.upper) if s.is_positive else r for s, r in ranges.items()}


def _int_or_none(v: sympy.Expr) -> int | None:
    return int(v) if v.is_Integer else None
