"""Runs implementations on fake tensors with symbolic sizes: what torch.cond would refuse, in our words, before it does.

Also finds which sizes of the inputs go together, and makes inputs whose sizes are symbols where there are none.
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
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from ..errors import KeepdimError, fail, told
from .axes import Axis, Reader

Candidate = tuple[str, Callable[..., Any]]
Point = dict[sympy.Symbol, sympy.Integer]
TORCH = str(Path(torch.__file__).parent)
_trying = False  # an implementation may have a dispatch inside, which then only has to give shapes
_checked = False  # and which is traced by Dynamo in a branch, where it does not see what was declared


def trying() -> bool:
    """Whether an implementation is being run for its shapes alone."""
    return _trying


def checked() -> bool:
    """Whether the sizes of a dispatch in a branch were checked by the one outside."""
    return _checked


@contextlib.contextmanager
def checking() -> Iterator[None]:
    """While branches are traced that were tried before."""
    global _checked
    outer, _checked = _checked, True
    try:
        yield
    finally:
        _checked = outer


class Stage(NamedTuple):
    """Inputs of which some sizes are symbols of an own ShapeEnv."""

    mode: FakeTensorMode
    env: ShapeEnv
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Ties(NamedTuple):
    """Sizes that go together, as expressions of torch's symbols."""

    sizes: dict[tuple[int, int], Any]  # by (id of tensor, dim)
    axes: list[Any]
    example: Point


# ---------------------------------------------------------------- making sizes symbolic
def staged(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic: Callable[[torch.Tensor, int], bool],
    bounds: Mapping[tuple[int, int], tuple[int, int]],
) -> Stage:
    """The arguments as fake tensors, with a symbol for each size that `dynamic` says; bounds by (id of tensor, dim)."""
    env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    made: dict[int, torch.Tensor] = {}

    def fake(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in made:
            limits = [bounds.get((id(x), d)) for d in range(x.dim())]
            context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
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
    return Stage(mode, env, mine, more)


def distinct(leaves: Sequence[Any], others: Sequence[torch.Tensor] = ()) -> list[Any]:
    """Each tensor once, and none of the others: a trace takes one that is given twice for a single input."""
    seen = {id(t) for t in others}
    out = []
    for x in leaves:
        repeated = isinstance(x, torch.Tensor) and id(x) in seen
        seen.add(id(x))
        out.append(x.detach().clone() if repeated else x)
    return out


def parted(axes: Sequence[Axis], read: Reader, args: Sequence[Any], kwargs: Mapping[str, Any]
           ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Examples for a trace: each tensor once, and where an axis is a size, a size that is no other's and not 1."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    args, kwargs = pytree.tree_unflatten(distinct(leaves), spec)
    taken = {n for x in _tensors((args, kwargs)) for n in x.shape if isinstance(n, int)}
    found, sizes = read.tensors(*args, **kwargs), dict[int, list[int]]()
    for axis in axes:
        free = next((n for n in range(max(axis.lo, 2), axis.hi + 1) if n not in taken), 0)
        for tensor, dim in axis.places if axis.bare and free else ():
            x = found[tensor]
            if isinstance(x.shape[dim], int) and x.shape[dim] < 2:
                sizes.setdefault(id(x), list(x.shape))[dim] = free
        taken.add(free)
    return pytree.tree_map_only(
        torch.Tensor, lambda x: x.new_empty(sizes[id(x)]) if id(x) in sizes else x, (args, kwargs)
    )


def example_sizes(subject: str, axes: Sequence[Axis], read: Reader, args: Sequence[Any], kwargs: Mapping[str, Any]
                  ) -> dict[tuple[int, int], Axis]:  # fmt: skip
    """(id of tensor, dim) of every size that the axes read. Examples must have sizes that are not special to torch."""
    found = read.tensors(*args, **kwargs)
    places: dict[tuple[int, int], Axis] = {}
    for axis in axes:
        for tensor, dim in axis.places:
            x, d = found[tensor], dim % found[tensor].dim()
            size = x.shape[d]
            where = f"{subject}, example {tensor!r}"
            if not isinstance(size, int):
                fail("dispatch", where, f"has the symbolic size {size} already", "Call the dispatch itself")
            if size < 2 and axis.hi >= 2:
                fail("dispatch", where, f"has size {size} at dim {dim}, which torch treats apart",
                     "Give an example of at least 2")  # fmt: skip
            places[id(x), d] = axis
    return places


@contextlib.contextmanager
def symbols_of(stage: Stage) -> Iterator[None]:
    """Inside it, ops on the stage's tensors compute symbolic shapes and nothing else."""
    with _disable_current_modes(), fx_config.patch(backed_size_oblivious=True), stage.mode, torch.no_grad():
        yield


def tied(subject: str, axes: Sequence[Axis], read: Reader, candidates: Sequence[Candidate], args: Sequence[Any],
         kwargs: Mapping[str, Any]) -> Ties:  # fmt: skip
    """Which sizes of the arguments change with the axes.

    Every size above 1 is made a symbol and the candidates are run; what they need to be equal is then known.
    """
    places = example_sizes(subject, axes, read, args, kwargs)
    stage = staged(args, kwargs, lambda x, d: (id(x), d) in places or x.shape[d] > 1, {})
    with symbols_of(stage):
        equate(read.terms(*stage.args, **stage.kwargs))
        for name, run in candidates:
            _run(subject, name, run, stage.args, stage.kwargs)
        sizes = [_expr(t[0]) for t in read.terms(*stage.args, **stage.kwargs)]
    free = set().union(*(stage.env.replace(e).free_symbols for e in sizes))
    for axis, e in zip(axes, sizes, strict=True):
        if not stage.env.replace(e).free_symbols:
            fail("dispatch", f"{subject}, axis {axis.name!r}", f"is {e} for every input that the functions take")
    out: dict[tuple[int, int], Any] = {}
    leaves = zip(pytree.tree_leaves((tuple(args), dict(kwargs))), pytree.tree_leaves((stage.args, stage.kwargs)),
                 strict=True)  # fmt: skip
    for given, fake in leaves:
        for d in range(given.dim() if isinstance(given, torch.Tensor) else 0):
            e = stage.env.replace(_expr(fake.shape[d]))
            if e.free_symbols and e.free_symbols <= free:
                out[id(given), d] = e
    return Ties(out, [stage.env.replace(e) for e in sizes], dict(stage.env.backed_var_to_val))


def equate(terms: Sequence[Sequence[Any]]) -> None:
    """What an axis says is one size becomes one."""
    for first, *others in terms:
        for other in others:
            torch._check(first == other)


# ---------------------------------------------------------------- trying implementations
class Result(NamedTuple):
    """What one implementation gave."""

    name: str
    values: list[Any]
    spec: pytree.TreeSpec


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Inside an export, ops leave no trace in its graph."""
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def inspect_all(subject: str, axes: Sequence[Axis], points: Sequence[tuple[int, ...]], candidates: Sequence[Candidate],
                read: Reader, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[bool, ...]]:  # fmt: skip
    """For each candidate, which of its results are fresh and contiguous; candidates that cannot stand in one cond,
    or that ask for a size in Python, are refused. Runs where its caller put it, on that ShapeEnv."""
    sizes = [_expr(n) for n in read.sizes(*args, **kwargs)]
    env = _env(pytree.tree_leaves((args, kwargs)))
    for axis, e in zip(axes, sizes, strict=True):
        if not env.replace(e).free_symbols <= env.backed_var_to_val.keys():
            fail("dispatch", f"{subject}, axis {axis.name!r}", f"{axis.text} depends on data, not on sizes of inputs",
                 "Call one of the implementations")  # fmt: skip
    results, fresh = [], []
    for name, run in candidates:
        before, tried = len(env.guards), _points(env, axes, sizes, points)
        mine, more = pytree.tree_map_only(torch.Tensor, _like, (tuple(args), dict(kwargs)))
        inputs, own = _tensors((mine, more)), _parameters(run)
        known = {"an input": inputs}
        if len(candidates) > 1:  # alone, it stands in no branch
            known |= {"a buffer of its own": own, "a tensor that it knows from outside": _outside(run)}
        versions = {what: [x._version for x in tensors] for what, tensors in known.items()}
        out = _run(subject, name, run, mine, more)
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


def _run(subject: str, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    global _trying
    outer, _trying = _trying, True
    with _disable_current_modes():  # tensors from outside have values, which an op may really change
        kept = [(x, x._version, x.detach().clone()) for x in _outside(run) if not isinstance(x, FakeTensor)]
    try:
        return run(*args, **kwargs)
    except KeepdimError:
        raise
    except Exception as e:  # whatever the function itself or an op inside it raises
        why = told(e)
        fail("dispatch", f"{subject}, implementation {name!r}", f"does not run on symbolic sizes ({why})", cause=e)
    finally:
        _trying = outer
        with _disable_current_modes(), torch.no_grad():
            for x, version, before in kept:
                if x._version != version:
                    x.copy_(before)


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)


def any_fake(*tree: Any) -> bool:
    """Whether a tensor among them has no values."""
    return any(isinstance(x, FakeTensor) for x in _tensors(tree))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _parameters(run: Any) -> list[torch.Tensor]:
    owner = run if isinstance(run, torch.nn.Module) else getattr(run, "__self__", None)
    return [*owner.parameters(), *owner.buffers()] if isinstance(owner, torch.nn.Module) else []


def _outside(run: Any) -> list[torch.Tensor]:
    """Tensors that a function closes over or reads by name, also buffers and attributes of modules; no weights."""
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


def _compare(subject: str, axes: Sequence[Axis], sizes: Sequence[Any], env: ShapeEnv, points: Sequence[Point],
             first: Result, other: Result) -> None:  # fmt: skip
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
                fail("dispatch", where, f"lays result {i} out in the order of dims {orders[1]}, but {first.name!r} "
                     f"in {orders[0]}", "Return it contiguous")  # fmt: skip


def _shape_of(spec: pytree.TreeSpec) -> str:
    keys = f" ({', '.join(map(str, spec.context))})" if spec.type is dict else ""  # their order counts
    return "one tensor" if spec.is_leaf() else f"{spec.type.__name__}{keys}"


def _order(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Dims from the outermost in memory to the innermost; those of size 1 lie anywhere."""
    return sorted((d for d, n in enumerate(sizes) if n > 1), key=lambda d: (-strides[d], d))


# ---------------------------------------------------------------- guards
def _check_guard(subject: str, name: str, axes: Sequence[Axis], sizes: Sequence[Any], env: ShapeEnv, guard: Any,
                 points: Sequence[Point]) -> None:  # fmt: skip
    """A guard over the axes has to hold over the whole domain, or the program's range is no longer what it says."""
    free = guard.expr.free_symbols
    mine = set().union(*(e.free_symbols for e in sizes))
    at, by_torch = _asked(guard)
    if not free or not free <= mine or _apart(guard):
        return
    for point in points:
        if all(point[s] > 1 for s in free) and guard.expr.xreplace(point) == sympy.false:
            names = {e: sympy.Symbol(a.name) for a, e in zip(axes, sizes, strict=True) if e.is_Symbol}
            shown = guard.expr.xreplace(names)
            place = f" ({at.filename}:{at.lineno})" if hasattr(at, "filename") and not by_torch else ""
            # An op of that line may have asked as well, where a size is told from 0 or 1.
            verb = "relies on" if by_torch or _from_zero_or_one(guard) else "decides in Python on"
            fail("dispatch", f"{subject}, implementation {name!r}",
                 f"{verb} {shown}{place}, which does not hold at {_sizes_at(axes, sizes, env, point)}",
                 "Make two implementations of it, or use torch.cond")  # fmt: skip


def _asked(guard: Any) -> tuple[Any, bool]:
    """Where a guard was asked for, and whether torch did."""
    at: Any = getattr(guard.sloc, "framework_loc", None)
    return at, hasattr(at, "filename") and at.filename.startswith(TORCH)


def _apart(guard: Any) -> bool:
    """Whether torch only tells a size from 0 or 1, which it treats apart."""
    return _from_zero_or_one(guard) and _asked(guard)[1]


def _from_zero_or_one(guard: Any) -> bool:
    return isinstance(guard.expr, sympy.Ne) and guard.expr.args[1] in (0, 1)


def _points(env: ShapeEnv, axes: Sequence[Axis], sizes: Sequence[Any], points: Sequence[tuple[int, ...]]
            ) -> list[Point]:  # fmt: skip
    """Values of all symbols at points of the axes: the borders of ranges, and some between. Symbols that no axis
    decides have the example's value, as a point among others."""
    base = dict(env.backed_var_to_val)
    out: list[Point] = []

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


def _at(env: ShapeEnv, n: Any, point: Point) -> int:
    return int(env.replace(_expr(n)).xreplace(point))


def _sizes_at(axes: Sequence[Axis], sizes: Sequence[Any], env: ShapeEnv, point: Point) -> str:
    return ", ".join(f"{a.name} = {_at(env, e, point)}" for a, e in zip(axes, sizes, strict=True))


def _expr(n: Any) -> Any:
    return n.node.expr if isinstance(n, torch.SymInt) else sympy.sympify(n)


def _env(leaves: Sequence[Any]) -> ShapeEnv:
    for x in leaves:
        for n in x.shape if isinstance(x, torch.Tensor) else (x,):
            if isinstance(n, torch.SymInt):
                return n.node.shape_env
    raise AssertionError("no symbolic size among the arguments")


class Extent(NamedTuple):
    """The values that a size may have in an export."""

    declared: ValueRanges[Any]  # by the ranges of its symbols
    positive: ValueRanges[Any]  # the same without what lies at sizes of 0, which no symbol of torch is
    seen: ValueRanges[Any]  # by a trace, which leaves out 0, and where it is not oblivious of sizes 1 too


def declared(n: torch.SymInt) -> tuple[int | None, int | None]:
    """The range that an export declares for a size that is one symbol, open where it says nothing."""
    said = _said(n.node.shape_env).get(n.node.shape_env.replace(n.node.expr))
    return (None, None) if said is None else (_whole(said.lower), _whole(said.upper))


def extent(n: torch.SymInt) -> Extent:
    """What an export declares of a size, or of an expression of sizes, and what of it the trace takes into account."""
    env = n.node.shape_env
    expr, said = env.replace(n.node.expr), _said(env)
    known = {s: env.var_to_range[s] for s in expr.free_symbols}
    # A bound above 2 is torch's own only where a check of the model says so.
    ranges = {s: r if s not in said or r.lower > 2 else ValueRanges(said[s].lower, r.upper) for s, r in known.items()}
    declared, positive, seen = (bound_sympy(expr, r) for r in (ranges, _from_one(ranges), _from_one(known)))
    return Extent(declared, positive, seen)


def decides(values: ValueRanges[Any], at: int) -> bool:
    """Whether all of them lie on one side of a cut."""
    return bool(values.lower > at or values.upper <= at)


def _said(env: ShapeEnv) -> dict[sympy.Symbol, ValueRanges[Any]]:
    """The ranges that the user gave to sizes of inputs."""
    out: dict[sympy.Symbol, ValueRanges[Any]] = {}
    for tracked in env.tracked_fakes or ():
        sizes = tracked.fake.shape if isinstance(tracked.fake, torch.Tensor) else ()
        limits = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        for size, limit in zip(sizes, limits, strict=False):
            symbol = env.replace(_expr(size))
            if isinstance(limit, StrictMinMaxConstraint) and symbol.is_Symbol:
                out[symbol] = limit.vr & out.get(symbol, limit.vr)
    return out


def _from_one(ranges: Mapping[sympy.Symbol, ValueRanges[Any]]) -> dict[sympy.Symbol, ValueRanges[Any]]:
    return {s: ValueRanges(max(r.lower, 1), r.upper) if s.is_positive else r for s, r in ranges.items()}


def _whole(v: Any) -> int | None:
    return int(v) if v.is_Integer else None
