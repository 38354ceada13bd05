"""What is to be tuned, and its arguments at other sizes than the example's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch.export import Dim

from ..errors import fail
from .axes import Axis, Reader
from .boxes import Box
from .preflight import Candidate, Ties, tied

Sizes = tuple[int, ...]  # one number an axis


@dataclass(frozen=True)
class Problem:
    """What is to be tuned."""

    name: str
    axes: tuple[Axis, ...]
    read: Reader
    candidates: Sequence[Candidate]
    reference: Callable[..., Any] | None
    examples: Any
    boxes: Sequence[Box]  # declared ranges, whose ends are compared too
    partitioners: Mapping[str, Any] = field(default_factory=dict)  # of candidates that name one, by their names

    @property
    def domain(self) -> Box:
        """The range of every axis."""
        return tuple(a.range for a in self.axes)


class Sizer:
    """Arguments at given sizes of the axes: of examples all sizes that go together are changed."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.make = problem.examples if callable(problem.examples) else None
        self.ties: Ties | None = None
        if self.make is None:
            args = tuple(problem.examples)
            runs = problem.candidates
            if problem.reference is not None:
                runs = [("reference", problem.reference), *runs]
            self.ties = tied(problem.name, problem.axes, problem.read, runs, args, {})
            self._drivers = self._choose(self.ties)

    def _choose(self, ties: Ties) -> list[sympy.Symbol]:
        """The symbol that each axis is changed by; others in its expression stay as in the example."""
        chosen: list[sympy.Symbol] = []
        for axis, e in zip(self.problem.axes, ties.axes, strict=True):
            free = sorted(e.free_symbols - set(chosen), key=str)
            if not free:
                fail("tune", f"{self.problem.name}, axis {axis.name!r}", "cannot be changed apart from the other one",
                     "Give a function of the axes as examples")  # fmt: skip
            chosen.append(free[0])
        return chosen

    def nearest(self, sizes: Sizes) -> Sizes:
        """The sizes at or below those asked for that arguments can have."""
        if self.ties is None:
            return sizes
        point = self._point(sizes)
        return tuple(int(e.xreplace(point)) for e in self.ties.axes)

    def _point(self, sizes: Sizes) -> dict[sympy.Symbol, sympy.Integer]:
        assert self.ties is not None
        point = dict(self.ties.example)
        for axis, e, s, wanted in zip(self.problem.axes, self.ties.axes, self._drivers, sizes, strict=True):
            low, high = (wanted, wanted) if e == s else (1, axis.hi)
            while low < high:  # the largest with a size that is not above
                middle = (low + high + 1) // 2
                above = e.xreplace({**point, s: sympy.Integer(middle)}) > wanted
                low, high = (low, middle - 1) if above else (middle, high)
            point[s] = sympy.Integer(low)
        return point

    def at(self, sizes: Sizes) -> tuple[Any, ...]:
        """The arguments."""
        names = [a.name for a in self.problem.axes]
        if self.make is not None:
            args = self.make(**dict(zip(names, sizes, strict=True)))
            args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
            self.problem.read.tensors(*args)
            found = self.problem.read.sizes(*args)
            if tuple(found) != sizes:
                fail("tune", f"{self.problem.name}, examples", f"has sizes {found} where {sizes} were asked for")
            return args
        assert self.ties is not None
        point, ties = self._point(sizes), self.ties.sizes

        def resized(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            y = x.detach()
            for d in range(x.dim()):
                if (id(x), d) in ties:
                    n = int(ties[id(x), d].xreplace(point))
                    y = y.index_select(d, torch.arange(n, device=x.device) % x.shape[d])
            return y.clone(memory_format=torch.preserve_format) if y.data_ptr() == x.data_ptr() else y

        return pytree.tree_map(resized, tuple(self.problem.examples))

    def dynamic_shapes(self, lowest: Sizes, highest: Sizes) -> tuple[Any, ...]:
        """What torch.export wants to hear: each size of an argument that changes with an axis, by trying."""
        names = [Dim(a.name, min=a.lo, max=a.hi) for a in self.problem.axes]
        first = self.at(lowest)
        specs: list[dict[int, Any]] = [{} for _ in pytree.tree_leaves(first)]
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
                             f"is no size alone: {x.shape[d]} of an argument goes with {lowest[i]}",
                             "Tune without through=")  # fmt: skip
                    spec[d] = names[i]
        return tuple(s or None for s in specs)
