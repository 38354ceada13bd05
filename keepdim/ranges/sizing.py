"""A tuning problem, and its arguments resized to other sizes than the example's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sympy
import torch
import torch.utils._pytree as pytree
from torch.export import Dim

from ..errors import fail
from .axes import Args, Axis, AxisReader, Examples, Function
from .boxes import Box
from .preflight import Candidate, LinkedSizes, link_sizes

AxisSizes = tuple[int, ...]  # one per axis


@dataclass(frozen=True)
class Problem:
    """A dispatch to tune."""

    name: str
    axes: tuple[Axis, ...]
    read: AxisReader
    candidates: Sequence[Candidate]
    reference: Function | None
    examples: Examples
    boxes: Sequence[Box]  # declared ranges; implementations are compared at their ends too
    partitioners: Mapping[str, object] = field(default_factory=dict)  # candidate's name → its partitioner

    @property
    def domain(self) -> Box:
        """The range of every axis."""
        return tuple(a.range for a in self.axes)


class Sizer:
    """Makes arguments for given sizes of the axes: all sizes that depend on an axis are changed together."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.make = problem.examples if callable(problem.examples) else None
        self.example: Args = () if callable(problem.examples) else tuple(problem.examples)
        self.links: LinkedSizes | None = None
        if self.make is None:
            args = self.example
            runs = problem.candidates
            if problem.reference is not None:
                runs = [("reference", problem.reference), *runs]
            self.links = link_sizes(problem.name, problem.axes, problem.read, runs, args, {})
            self._drivers = self._choose(self.links)

    def _choose(self, links: LinkedSizes) -> list[sympy.Symbol]:
        """The symbol that is varied for each axis; others in its expression keep the example's value."""
        chosen: list[sympy.Symbol] = []
        for axis, e in zip(self.problem.axes, links.axes, strict=True):
            free = sorted(e.free_symbols - set(chosen), key=str)
            if not free:
                fail("tune", f"{self.problem.name}, axis {axis.name!r}", "cannot be changed without the other one",
                     "Give a function of the axes as examples")  # fmt: skip
            chosen.append(free[0])
        return chosen

    def nearest(self, sizes: AxisSizes) -> AxisSizes:
        """The largest reachable sizes at or below those requested."""
        if self.links is None:
            return sizes
        point = self._point(sizes)
        return tuple(int(e.xreplace(point)) for e in self.links.axes)

    def _point(self, sizes: AxisSizes) -> dict[sympy.Symbol, sympy.Integer]:
        assert self.links is not None
        point = dict(self.links.example)
        for axis, e, s, wanted in zip(self.problem.axes, self.links.axes, self._drivers, sizes, strict=True):
            low, high = (wanted, wanted) if e == s else (1, axis.hi)
            while low < high:  # bisect for the largest value that does not exceed `wanted`
                middle = (low + high + 1) // 2
                above = e.xreplace({**point, s: sympy.Integer(middle)}) > wanted
                low, high = (low, middle - 1) if above else (middle, high)
            point[s] = sympy.Integer(low)
        return point

    def at(self, sizes: AxisSizes) -> Args:
        """The arguments at these sizes."""
        names = [a.name for a in self.problem.axes]
        if self.make is not None:
            args = self.make(**dict(zip(names, sizes, strict=True)))
            args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
            self.problem.read.tensors(*args)
            found = self.problem.read.sizes(*args)
            if tuple(found) != sizes:
                fail("tune", f"{self.problem.name}, examples", f"has sizes {found} where {sizes} were asked for")
            return args
        assert self.links is not None
        point, links = self._point(sizes), self.links.sizes

        def resized(x: object) -> object:
            if not isinstance(x, torch.Tensor):
                return x
            y = x.detach()
            for d in range(x.dim()):
                if (id(x), d) in links:
                    n = int(links[id(x), d].xreplace(point))
                    y = y.index_select(d, torch.arange(n, device=x.device) % x.shape[d])
            return y.clone(memory_format=torch.preserve_format) if y.data_ptr() == x.data_ptr() else y

        return pytree.tree_map(resized, self.example)

    def dynamic_shapes(self, lowest: AxisSizes, highest: AxisSizes) -> Args:
        """dynamic_shapes for torch.export, found by comparing arguments at two sizes of each axis."""
        names = [Dim(a.name, min=a.lo, max=a.hi) for a in self.problem.axes]
        first = self.at(lowest)
        specs: list[dict[int, object]] = [{} for _ in pytree.tree_leaves(first)]
        for i, axis in enumerate(self.problem.axes):
            moved = self.at(self.nearest((*lowest[:i], highest[i], *lowest[i + 1 :])))
            step = self.problem.read.sizes(*moved)[i] - lowest[i]
            pairs = zip(pytree.tree_leaves(first), pytree.tree_leaves(moved), strict=True)
            for spec, (x, y) in zip(specs, pairs, strict=True):
                for d in range(x.dim() if isinstance(x, torch.Tensor) else 0):
                    if x.shape[d] == y.shape[d]:
                        continue
                    if (y.shape[d] - x.shape[d], x.shape[d]) != (step, lowest[i]):
                        fail("tune", f"{self.problem.name}, axis {axis.name!r}",
                             f"a size of an argument changes with it, but is not equal: {x.shape[d]} at {lowest[i]}",
                             "Tune without through=")  # fmt: skip
                    spec[d] = names[i]
        return tuple(s or None for s in specs)
