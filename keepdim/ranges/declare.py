"""Several implementations of one function, each for a range of some size, in one program that keeps its branches.

`dispatch` declares them; a Dispatch is called like the function that it implements. For concrete sizes it looks the
implementation up; for symbolic sizes (torch.export, torch.compile) it becomes nested `torch.cond`s on them. `tuning`
measures which implementation is fastest at which sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import has_static_value, statically_known_true

from ..artifact.range_table import RangeRow, RangeTable
from ..compat.tracing import forget_conds
from ..errors import fail
from ..fx.nodes import DISPATCH, IMPLEMENTATION
from . import boxes, preflight
from .axes import (
    Args,
    Axis,
    AxisReader,
    Examples,
    Function,
    Kwargs,
    Range,
    Size,
    checked_range,
    parse,
    required,
    signature_of,
)
from .boxes import Box, Tree
from .branches import bare_cond, note, unalias

if TYPE_CHECKING:
    from executorch.exir.backend.partitioner import Partitioner

Fresh = dict[int, tuple[bool, ...]]  # implementation → which of its results are fresh and contiguous
Cond = Callable[[torch.SymBool, Function, Function, Args, Kwargs], object]  # `bare_cond`


@dataclass(eq=False)
class Implementation:
    """One of a dispatch's implementations."""

    name: str
    run: Function
    partitioner: Partitioner | None = None  # lowers its branch, if not the program's partitioner

    def __deepcopy__(self, memo: dict[int, object]) -> Implementation:
        # Partitioners cannot be copied.
        return Implementation(self.name, copy.deepcopy(self.run, memo), self.partitioner)


def dispatch(
    axes: Mapping[str, str],
    domain: Mapping[str, Range],
    reference: Function | None = None,
    examples: Examples | None = None,
    name: str | None = None,
) -> Dispatch:
    """Declare a function with several implementations, chosen by the sizes of its arguments.

    `axes` names one or two sizes, or expressions of sizes; `domain` gives their inclusive ranges.
    `reference` is compared with the implementations when they are tuned; `examples` are arguments.

    >>> def double(x): return x + x
    >>> f = dispatch(axes={"n": "x.shape[0]"}, domain={"n": (1, 100)}, name="f")
    >>> f = f.impl(torch.sin, upto=10).impl(double)
    >>> f(torch.ones(11)).sum()
    tensor(22.)
    >>> print(f.table)
    f: n = x.shape[0] in 1..100
    n in 1..10 -> sin
    n in 11..100 -> double
    """
    return Dispatch(axes, domain, reference, examples, name)


class Dispatch(torch.nn.Module):
    """See `dispatch`. Implementations that are modules are submodules; functions stay as they are."""

    def __init__(self, axes: Mapping[str, str], domain: Mapping[str, Range], reference: Function | None,
                 examples: Examples | None, name: str | None):  # fmt: skip
        super().__init__()
        self.name = name or (_name_of(reference) if reference is not None else "dispatch")
        self.axes = parse(self.name, axes, domain)
        self.examples = examples
        self.implementations: list[Implementation] = []
        self.parts = torch.nn.ModuleList()  # implementations that are modules
        self._reference = (reference,)  # in a tuple, so that its parameters are not registered
        self._columns: tuple[Axis, ...] = self.axes  # the axes of the boxes: `axes`, or their product
        self._product = False
        self._cut: list[int] = []  # indices of the axes that the tree reads
        self._tiles: list[tuple[Box, int]] = []
        self._tree: Tree | None = None
        self._measured: RangeTable | None = None
        self._read: AxisReader | None = None
        if reference is not None:
            self._set_reader(reference, f"the reference {_name_of(reference)!r}")

    @property
    def reference(self) -> Function | None:
        """What the implementations are compared with."""
        return self._reference[0]

    @property
    def signature_function(self) -> Function | None:
        """The function that defines the parameter names; None if none is declared yet."""
        return self.reference or (self.implementations[0].run if self.implementations else None)

    @property
    def domain(self) -> Box:
        """The range of every axis."""
        return tuple(a.range for a in self.axes)

    # ------------------------------------------------------------ declaring
    def impl(self, run: Function, *, upto: int | None = None, name: str | None = None,
             partitioner: Partitioner | None = None, **ranges: Range) -> Dispatch:  # fmt: skip
        """Add an implementation: up to a size, for a range of each axis, or for the rest of the domain.

        If no implementation has a range, all of them are candidates for `tune`.
        """
        label = name or _name_of(run)
        where = f"{self.name}, implementation {label!r}"
        if not callable(run):
            fail("dispatch", where, f"is a {type(run).__name__}, which cannot be called")
        if isinstance(run, torch.nn.Module) and any(m is self for m in run.modules()):
            fail("dispatch", where, "contains this dispatch, which would recurse forever")
        if any(i.name == label for i in self.implementations):
            fail("dispatch", where, "is there already", "Give another name=")
        if self._measured is not None:
            fail("dispatch", where, "comes after tune()", "Add it before")
        self._check_signature(run, label)
        mine = self._boxes(where, upto, ranges)
        for box in mine:
            for taken, i in self._tiles:
                if (both := boxes.common(box, taken)) is not None:
                    fail(
                        "dispatch", where, f"overlaps {self.implementations[i].name!r} ({boxes.show(self.axes, both)})"
                    )
        if isinstance(run, torch.nn.Module):
            self.parts.append(run)
        self.implementations.append(Implementation(label, run, partitioner))
        self._set_tiles(self.axes, [*self._tiles, *((box, len(self.implementations) - 1) for box in mine)])
        return self

    def _set_reader(self, run: Function, who: str) -> None:
        """Take the parameter names from a function, and check that the examples have the tensors of the axes."""
        self._read = AxisReader(self.name, self.axes, run, who)
        if isinstance(self.examples, (tuple, list)):
            self._read.tensors(*self.examples)

    def _check_signature(self, run: Function, label: str) -> None:
        """The first function defines the parameter names; all others take as many arguments."""
        if self._read is None:
            self._set_reader(run, f"the implementation {label!r}")
        first = self.signature_function or run
        counts = [None if (s := signature_of(f)) is None else required(s) for f in (first, run)]
        if None not in counts and counts[0] != counts[1]:
            fail("dispatch", f"{self.name}, implementation {label!r}",
                 f"needs {counts[1]} arguments, but {_name_of(first)!r} {counts[0]}")  # fmt: skip

    def _boxes(self, where: str, upto: int | None, ranges: Mapping[str, Range]) -> list[Box]:
        """The boxes that an implementation is declared for; empty for a candidate."""
        names = [a.name for a in self.axes]
        for name in ranges:
            if name not in names:
                fail("dispatch", where, f"names {name!r}, which is not an axis ({', '.join(names)})")
        bare = upto is None and not ranges
        if self.implementations and not self._tiles:
            if not bare:
                fail("dispatch", where, f"has a range, but {self.implementations[0].name!r} has none",
                     "Give ranges in increasing order, the one without last, or none and tune()")  # fmt: skip
            return []
        left = boxes.without(self.domain, [box for box, _ in self._tiles])
        if bare:
            if not left:
                fail("dispatch", where, "has no sizes left: the others cover the domain")
            return left if self._tiles else []
        if upto is not None:
            return [self._up_to(where, upto, ranges, left)]
        box = tuple(
            checked_range(f"{where}, axis {a.name!r}", ranges[a.name]) if a.name in ranges else a.range
            for a in self.axes
        )
        for axis, (lo, hi) in zip(self.axes, box, strict=True):
            if lo < axis.lo or hi > axis.hi:
                fail("dispatch", where, f"{axis.name} in {lo}..{hi} is not inside the domain {axis.lo}..{axis.hi}")
        if len(self.axes) == 1 and left and left[0][0][0] < box[0][0]:
            gap = ((left[0][0][0], box[0][0] - 1),)
            fail("dispatch", where, f"leaves a gap: no implementation for {boxes.show(self.axes, gap)}")
        return [box]

    def _up_to(self, where: str, upto: int, ranges: Mapping[str, Range], left: Sequence[Box]) -> Box:
        if len(self.axes) != 1 or ranges:
            fail("dispatch", where, "has upto=, which is for one axis and no other range", "Give a range an axis")
        (axis,) = self.axes
        if not isinstance(upto, int) or isinstance(upto, bool):
            fail("dispatch", where, f"has upto={upto!r}, not an integer")
        start = left[0][0][0] if left else axis.hi + 1
        if self._tiles and upto < start:
            fail("dispatch", where, f"has upto={upto}, but {axis.name} up to {start - 1} has an implementation already",
                 "Splits have to increase")  # fmt: skip
        if not axis.lo <= upto <= axis.hi:
            fail("dispatch", where, f"has upto={upto}, which is not inside the domain {axis.lo}..{axis.hi}")
        return ((start, upto),)

    def _set_tiles(self, columns: tuple[Axis, ...], tiles: list[tuple[Box, int]]) -> None:
        """Set the table; the decision tree exists only if the boxes tile the domain."""
        self._columns, self._tiles, self._measured = columns, tiles, None
        self._product = columns != self.axes
        whole = tuple(a.range for a in columns)
        if not tiles:
            self._tree = 0 if len(self.implementations) == 1 else None
        else:
            self._tree = None if boxes.without(whole, [box for box, _ in tiles]) else boxes.tree(whole, tiles)
        cut = sorted({i for i, _ in boxes.cuts(self._tree or 0)})
        self._cut = [0, 1] if self._product and cut else cut

    def check(self, *examples: object, **kwargs: object) -> Dispatch:
        """Raise if the declaration is incomplete; with example arguments, also if the implementations cannot be
        branches of one program."""
        if not self.implementations:
            fail("dispatch", self.name, "has no implementation", "Add some with impl()")
        if self._tree is None and not self._tiles:
            names = ", ".join(i.name for i in self.implementations)
            fail("dispatch", self.name, f"has candidates without ranges ({names})", "Call tune(), or give each a range")
        if self._tree is None:
            gap = boxes.without(self.domain, [box for box, _ in self._tiles])[0]
            fail("dispatch", self.name, f"has a gap: no implementation for {boxes.show(self.axes, gap)}")
        if examples or kwargs or self.examples is not None:
            self._symbolic_inputs(*self._example_args(examples, kwargs))
        return self

    @property
    def table(self) -> RangeTable:
        """Which implementation runs at which sizes, with the times if they were measured."""
        if self._measured is not None:
            return self._measured
        if self._tree is None:
            self.check()
        tiles = self._tiles or [(self.domain, 0)]
        names = [a.name for a in self._columns]
        rows = [RangeRow(dict(zip(names, box, strict=True)), self.implementations[i].name) for box, i in tiles]
        axes, domain = {a.name: a.text for a in self.axes}, {a.name: a.range for a in self.axes}
        return RangeTable(self.name, axes, domain, sorted(rows, key=lambda r: list(r.ranges.values())))

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return self.name if self._tree is None else str(self.table).replace("\n", "; ")

    # ------------------------------------------------------------ calling
    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the implementation for these sizes."""
        if kwargs and self._read is not None:
            args, kwargs = self._read.to_positional(args, kwargs)
        if not _traced(args, kwargs) and (chosen := self._chosen(args, kwargs)) is not None:
            return chosen.run(*args, **kwargs)
        if self._tree is None:
            self.check()
        if torch.compiler.is_dynamo_compiling():
            return self._in_dynamo(args, kwargs)
        sizes = self._sizes(args, kwargs)
        if any(isinstance(n, torch.SymInt) for n in sizes):
            return self._for_shapes(args, kwargs) if preflight.in_preflight() else self._in_export(sizes, args, kwargs)
        self._check_domain(sizes)
        self._refuse_static_sizes(sizes)  # an export: raises unless a single implementation is left
        return self.implementations[self._lookup(sizes)].run(*args, **kwargs)

    def _chosen(self, args: Args, kwargs: Kwargs) -> Implementation | None:
        """Fast path for concrete sizes inside the domain, about a microsecond; None if the slow path has to decide."""
        if self._tree is None or self._read is None:
            return None
        try:
            sizes = self._read.numbers(*args, **kwargs)
        except (AttributeError, IndexError, ZeroDivisionError):
            return None
        if not sizes:
            return None
        for axis, n in zip(self.axes, sizes):  # noqa: B905  same length, and strict costs time
            if not axis.lo <= n <= axis.hi:
                return None
        return self.implementations[self._lookup(sizes)]

    def _lookup(self, sizes: Sequence[int]) -> int:
        node = self._tree
        assert node is not None
        values = self._values(sizes)
        while not isinstance(node, int):
            node = node[2] if values[node[0]] <= node[1] else node[3]
        return node

    def _sizes(self, args: Args, kwargs: Kwargs) -> tuple[Size, ...]:
        """The size on every axis; equality is checked for ints only, so that no symbol is guarded on."""
        assert self._read is not None
        try:
            terms = self._read.terms(*args, **kwargs)
        except (AttributeError, IndexError):
            self._read.tensors(*args, **kwargs)  # raises with the tensor and the reason
            raise
        except ZeroDivisionError as e:
            shapes = ", ".join(f"{k} {list(x.shape)}" for k, x in self._read.tensors(*args, **kwargs).items())
            fail("dispatch", self.name, f"an axis divides by 0 at these sizes ({shapes})", cause=e)
        for axis, (n, *others) in zip(self.axes, terms, strict=True):
            for other in others:
                if isinstance(n, int) and isinstance(other, int) and n != other:
                    fail("dispatch", f"{self.name}, axis {axis.name!r}", f"{axis.text} does not hold ({n} and {other})")
        return tuple(t[0] for t in terms)

    def _check_domain(self, sizes: Sequence[int]) -> None:
        for axis, n in zip(self.axes, sizes, strict=True):
            if not axis.lo <= n <= axis.hi:
                fail("dispatch", f"{self.name}, axis {axis.name!r}",
                     f"{axis.text} = {n} is out of the domain {axis.lo}..{axis.hi}")  # fmt: skip

    def _values(self, sizes: Sequence[Size]) -> Sequence[Size]:
        return (sizes[0] * sizes[1],) if self._product else sizes

    def _refuse_static_sizes(self, sizes: Sequence[Size]) -> None:
        """With a static size the cond would vanish, and the program would be wrong at every other size."""
        for i, (axis, n) in enumerate(zip(self.axes, sizes, strict=True)):
            if i in self._cut and not isinstance(n, torch.SymInt):
                tensor, dim = axis.reads[0]
                fail("dispatch", f"{self.name}, axis {axis.name!r}",
                     f"{axis.text} is the number {n} in this export, so only one implementation would be left",
                     f"Make it dynamic: dynamic_shapes={{{tensor!r}: {{{dim}: Dim({axis.name!r}, min={axis.lo}, "
                     f"max={axis.hi})}}}}")  # fmt: skip

    # ------------------------------------------------------------ graphs
    def _in_dynamo(self, args: Args, kwargs: Kwargs) -> object:
        """Traced by Dynamo: concrete sizes choose now (and are guarded), symbolic sizes become conds."""
        assert self._read is not None and self._tree is not None
        sizes = self._read.sizes(*args, **kwargs)
        if not torch.compiler.is_exporting():
            for axis, n in zip(self.axes, sizes, strict=True):
                if n < axis.lo or n > axis.hi:  # adds a guard: another size is retraced, and refused here
                    fail("dispatch", self.name, f"{axis.text} is out of the domain {axis.lo}..{axis.hi}")
            args, kwargs = unalias(args, kwargs)
            return self._branch(self._tree, args, kwargs, None, inside=False)
        for i, (axis, n) in enumerate(zip(self.axes, sizes, strict=True)):
            if i in self._cut and has_static_value(n):
                fail("dispatch", self.name, f"{axis.text} is a number in this export", "Make it dynamic")
        for i, at in [] if preflight.outer_checked() else self._cuts():
            n = self._values(sizes)[i]  # decided by a declared range, or by torch's, which excludes 0 and 1
            if statically_known_true(n > at) or statically_known_true(n <= at):
                fail("dispatch", self.name, f"a strict export does not tell whether {at} can be reached",
                     "Export with strict=False")  # fmt: skip
        self._assume(args, kwargs)
        args, kwargs = unalias(args, kwargs)
        return self._branch(self._tree, args, kwargs, None, inside=False)

    def _in_export(self, sizes: Sequence[Size], args: Args, kwargs: Kwargs) -> object:
        """Called by torch.export, or by any tracing with symbolic sizes, outside Dynamo."""
        assert self._tree is not None
        self._refuse_static_sizes(sizes)
        self._check_ranges(sizes)
        self._assume(args, kwargs)
        node = self._pruned(self._tree, self._values(sizes))
        with preflight.unrecorded():
            fresh = self._inspect(node, args, kwargs)
        note(self)
        forget_conds()
        args, kwargs = unalias(args, kwargs)
        with preflight.outer_checks(), fx_traceback.preserve_node_meta(), fx_traceback.annotate({DISPATCH: self.name}):
            return self._branch(node, args, kwargs, fresh, inside=False)

    def _pruned(self, node: Tree, values: Sequence[Size]) -> Tree:
        """The tree without nodes that the symbols' ranges decide. (Dynamo does not see the ranges inside a cond.)"""
        if isinstance(node, int):
            return node
        i, at, low, high = node
        if statically_known_true(values[i] <= at):
            return self._pruned(low, values)
        if statically_known_true(values[i] > at):
            return self._pruned(high, values)
        return i, at, self._pruned(low, values), self._pruned(high, values)

    def _check_ranges(self, sizes: Sequence[Size], inside: bool = False) -> None:
        """The declared ranges of an export must be inside the domain (unless `inside` a branch that ensures it), and
        torch must not decide a cut by excluding sizes."""
        for axis, n in () if inside else zip(self.axes, sizes, strict=True):
            lo, hi = preflight.declared(n) if isinstance(n, torch.SymInt) else (None, None)
            if (lo is not None and lo < axis.lo) or (hi is not None and hi > axis.hi):
                shown = f"{'' if lo is None else lo}..{'' if hi is None else hi}"
                fail("dispatch", f"{self.name}, axis {axis.name!r}",
                     f"{axis.text} may be {shown} in this export, but the domain is {axis.lo}..{axis.hi}",
                     "Widen the domain: other branches do not narrow it" if preflight.in_preflight() else
                     f"Give its Dim min={axis.lo}, max={axis.hi}, or widen the domain")  # fmt: skip
            if isinstance(n, torch.SymInt):
                self._check_not_excluded(axis, n, axis.lo - 1, f"the end {axis.lo} of the domain", zero=False)
                self._check_not_excluded(axis, n, axis.hi, f"the end {axis.hi} of the domain", zero=False)
        values = self._values(sizes)
        for i, at in boxes.cuts(self._tree or 0):
            if isinstance(values[i], torch.SymInt):
                self._check_not_excluded(self._columns[i], values[i], at, f"the split at {at}", zero=True)

    def _check_not_excluded(self, axis: Axis, n: torch.SymInt, at: int, what: str, zero: bool) -> None:
        """Raise if torch decides a cut at `at` only by excluding declared sizes; `zero`: 0 counts as declared."""
        declared, positive, seen = preflight.extent(n)
        if not preflight.decides(seen, at) or preflight.decides(declared if zero else positive, at):
            return
        where = f"{self.name}, axis {axis.name!r}"
        if preflight.decides(positive, at):
            fail("dispatch", where, f"torch takes no dynamic size for 0, so that {what} would vanish",
                 "Use one implementation on both sides of it")  # fmt: skip
        end = f"least {seen.lower}" if seen.lower > at else f"most {seen.upper}"
        fail("dispatch", where, f"torch.export traces as if {axis.text} were at {end}, so that {what} would vanish",
             "Use keepdim.lower, or export inside torch.fx.experimental._config.patch(backed_size_oblivious=True)"
             )  # fmt: skip

    def _assume(self, args: Args, kwargs: Kwargs) -> None:
        """Add the domain and the equalities of the axes to the program's contract."""
        assert self._read is not None
        terms = self._read.terms(*args, **kwargs)
        for axis, (n, *_) in zip(self.axes, terms, strict=True):
            torch._check(n >= axis.lo)
            torch._check(n <= axis.hi)
        preflight.equate(terms)

    def _branch(
        self, node: Tree, args: Args, kwargs: Kwargs, fresh: Fresh | None, inside: bool, cond: Cond | None = None
    ) -> object:
        """The conds of a subtree; a node that the range of a symbol decides adds no cond."""
        if isinstance(node, int):
            return self._leaf(node, args, kwargs, fresh, inside, cond)
        i, at, low, high = node
        n = self._values(self._read.sizes(*args, **kwargs))[i]  # type: ignore[union-attr]
        if statically_known_true(n <= at):
            return self._branch(low, args, kwargs, fresh, inside, cond)
        if statically_known_true(n > at):
            return self._branch(high, args, kwargs, fresh, inside, cond)
        if cond is not None:
            return cond(n <= at, lambda a, k: self._branch(low, a, k, fresh, True, cond),
                        lambda a, k: self._branch(high, a, k, fresh, True, cond), args, kwargs)  # fmt: skip
        return torch.cond(n <= at, lambda: self._branch(low, args, kwargs, fresh, True),
                          lambda: self._branch(high, args, kwargs, fresh, True), ())  # fmt: skip

    def _leaf(self, i: int, args: Args, kwargs: Kwargs, fresh: Fresh | None, inside: bool, cond: Cond | None) -> object:
        """Run one implementation. Inside a cond its results are made contiguous and unaliased."""
        chosen = self.implementations[i]
        with fx_traceback.annotate({IMPLEMENTATION: chosen.name}):
            if inside and self._nested(i):
                separate = unalias(args, kwargs)
                out = chosen.run._branch(chosen.run._tree, *separate, None, True, cond)  # type: ignore[attr-defined]
            else:
                out = chosen.run(*args, **kwargs)
            if not inside or (fresh is not None and all(fresh[i])):
                return out
            values, spec = pytree.tree_flatten(out)
            values = [
                v if fresh is not None and fresh[i][k] else v.clone(memory_format=torch.contiguous_format)
                for k, v in enumerate(values)
            ]
            return pytree.tree_unflatten(values, spec)

    def _nested(self, i: int) -> bool:
        """Whether an implementation is a dispatch over the same sizes whose domain includes all its boxes here: then
        the branch has already checked its domain."""
        run = self.implementations[i].run
        if not isinstance(run, Dispatch) or self._product or self._read is None or run._read is None:
            return False
        same = [a.terms for a in run.axes] == [a.terms for a in self.axes] and self._read.same_arguments(run._read)
        served = [box for box, j in self._tiles if j == i] or [self.domain]
        return same and run._tree is not None and all(boxes.common(box, run.domain) == box for box in served)

    def _cuts(self) -> list[tuple[int, int]]:
        """(axis, at) of every cut, including those of nested dispatches that this one has checked."""
        inner = [self.implementations[i].run for i in range(len(self.implementations)) if self._nested(i)]
        return [*boxes.cuts(self._tree or 0), *(c for d in inner for c in d._cuts())]  # type: ignore[attr-defined]

    def _for_shapes(self, args: Args, kwargs: Kwargs, inside: bool = False) -> object:
        """Called inside an implementation of another dispatch during its preflight run."""
        self._check_ranges(self._sizes(args, kwargs), inside)
        assert self._tree is not None
        self._inspect(self._tree, args, kwargs)
        return self.implementations[0].run(*args, **kwargs)

    def _shapes_inside(self, *args: object, **kwargs: object) -> object:
        return self._for_shapes(args, kwargs, inside=True)

    def _inspect(self, node: Tree, args: Args, kwargs: Kwargs) -> Fresh:
        """Which results of the implementations below a node are fresh; see preflight.inspect_all."""
        assert self._read is not None
        tiles = [] if self._product else [box for box, _ in self._tiles]
        points, used = boxes.edges(self.axes, [*tiles, self.domain]), boxes.leaves(node)
        candidates = [(self.implementations[i].name, self._preflight_function(i, len(used) > 1)) for i in used]
        found = preflight.inspect_all(self.name, self.axes, points, candidates, self._read, args, kwargs)
        return dict(zip(used, found, strict=True))

    def _preflight_function(self, i: int, inside: bool) -> Function:
        run = self.implementations[i].run
        return run._shapes_inside if inside and isinstance(run, Dispatch) and self._nested(i) else run

    def _example_args(self, examples: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if examples or kwargs:
            return examples, kwargs
        if self.examples is None:
            fail("dispatch", self.name, "has no example arguments", "Give some, here or to dispatch(examples=)")
        if callable(self.examples):
            middle = {a.name: max(2, round((max(a.lo, 1) * a.hi) ** 0.5)) for a in self.axes}
            return tuple(self.examples(**middle)), {}
        return tuple(self.examples), {}

    def _symbolic_inputs(self, args: Args, kwargs: Kwargs
               ) -> tuple[preflight.SymbolicInputs, dict[int, tuple[bool, ...]]]:  # fmt: skip
        """The arguments with symbols for all sizes that depend on the axes, and the implementations' preflight."""
        assert self._read is not None
        sizes = self._sizes(args, kwargs)
        if all(isinstance(n, int) for n in sizes):
            self._check_domain(sizes)
        args, kwargs = preflight.separate_sizes(self.axes, self._read, args, kwargs)
        candidates = [(i.name, i.run) for i in self.implementations]
        moved = preflight.link_sizes(self.name, self.axes, self._read, candidates, args, kwargs).sizes
        read_sizes = preflight.example_sizes(self.name, self.axes, self._read, args, kwargs)
        alone = {p: a.range for p, a in read_sizes.items() if a.bare}
        inputs = preflight.symbolic_inputs(args, kwargs, lambda x, d: (id(x), d) in moved, alone)
        with preflight.symbols_of(inputs):
            preflight.equate(self._read.terms(*inputs.args, **inputs.kwargs))
            assert self._tree is not None
            return inputs, self._inspect(self._tree, inputs.args, inputs.kwargs)

    def graph(self, *examples: object) -> GraphModule:
        """The nested conds as a GraphModule, from example arguments with concrete sizes.

        For callers such as Inductor's lowering of a custom op, where every size is concrete and a cond on it would
        vanish: the sizes of the axes, and those that depend on them, become symbols of a new ShapeEnv.
        """
        if self._tree is None:
            self.check()
        args, _ = self._example_args(examples, {})
        inputs, fresh = self._symbolic_inputs(args, {})

        def run(*args: object) -> object:
            assert self._tree is not None
            return self._branch(self._tree, args, {}, fresh, False, bare_cond)

        with preflight.symbols_of(inputs):
            with fx_traceback.preserve_node_meta(), fx_traceback.annotate({DISPATCH: self.name}):
                return make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs.args)

    # ------------------------------------------------------------ tuning
    def tune(self, budget_ms: float = 500, *, examples: Examples | None = None, again: bool = False,
             through: Function | None = None,
             progress: Callable[[float], None] | None = None) -> RangeTable:  # fmt: skip
        """Measure which implementation is fastest at which sizes, and dispatch by that table from now on.

        First every implementation is compared with the reference. `examples` are arguments, whose sizes are changed
        with the axes, or a function of the axes that makes arguments. `through` lowers each implementation, such as
        `keepdim.lower`; by default they run in eager mode. The table is cached per machine and read again the next
        time, unless `again`.
        """
        from .sizing import Problem
        from .tuning import tuned

        if not self.implementations:
            fail("tune", self.name, "has no implementation", "Add some with impl()")
        assert self._read is not None
        given = examples if examples is not None else self.examples
        if given is None:
            fail("tune", self.name, "has no example arguments", "Give some, here or to dispatch(examples=)")
        candidates = [(i.name, i.run) for i in self.implementations]
        partitioners = {i.name: i.partitioner for i in self.implementations if i.partitioner is not None}
        problem = Problem(self.name, self.axes, self._read, candidates, self.reference, given,
                          [] if self._product else [box for box, _ in self._tiles], partitioners)  # fmt: skip
        columns, table = tuned(problem, budget_ms, again, through, progress)
        names = [n for n, _ in candidates]
        tiles = [(tuple(r.ranges[a.name] for a in columns), names.index(r.implementation)) for r in table.rows]
        self._set_tiles(columns, tiles)
        self._measured = table
        return table


def _traced(args: Args, kwargs: Kwargs) -> bool:
    """Whether this call is being traced. torch's flag alone does not tell: it may be set by another thread."""
    if not torch.compiler.is_compiling():
        return False
    return torch.compiler.is_dynamo_compiling() or preflight.any_fake(args, kwargs)


def _name_of(run: Function) -> str:
    if isinstance(run, Dispatch):
        return run.name
    return getattr(run, "__name__", None) or type(run).__name__
