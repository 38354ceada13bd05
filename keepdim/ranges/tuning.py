"""Measures which implementation is fastest at which sizes, and makes the simplest table that describes it.

First every implementation is compared with the reference on a coarse grid. Then the grid is timed, and grid lines are
added where the winner changes. One more range has to save more time than the noise. Finally the implementations are
compared on both sides of the thresholds that were found.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import numpy
import torch
import torch.utils._pytree as pytree

from ..artifact.range_table import Measured, RangeRow, RangeTable, machine, versions
from ..cache import folder
from ..errors import KeepdimError, describe_exception, fail
from ..files import write_bytes
from ..progress import Progress
from .axes import Args, Axis, Function
from .boxes import Box, edges, without
from .sizing import AxisSizes, Problem, Sizer

log = logging.getLogger("keepdim")
MAGNITUDE_GAP = 1e3  # values this factor apart, such as those of a mask, have separate rounding errors
GRID = {1: 9, 2: 5}  # initial grid lines per axis, by the number of axes
MIN_RATIO = {1: 1.03, 2: 1.2}  # no grid line is added between two lines with a smaller ratio
RANGE_COST = 0.05  # minimum saving of one more range: sum over measured sizes of log(time / best) above the noise
MIN_NOISE = 0.005  # lower bound of the relative noise of any machine
MAX_NOISE = 0.25  # above it, a measurement is inconclusive
CUTOFF = 4.0  # a candidate this factor slower than the best is not measured further at this size
MIN_STEPS = 16  # grid lines that may be added even after the budget is spent: a border takes about six
MAX_ROUNDS = 200  # per size
MIN_SAMPLE = 20e-6  # seconds: shorter calls are timed in a loop


def tuned(problem: Problem, budget_ms: float, again: bool, through: Function | None,
          progress: Callable[[float], None] | None) -> tuple[tuple[Axis, ...], RangeTable]:  # fmt: skip
    """The axes of the table, and the table; it is read from the cache if this machine measured it before."""
    if not budget_ms > 0:
        fail("tune", problem.name, f"has a budget of {budget_ms} ms")
    sizer = Sizer(problem)
    path = folder() / f"ranges-{_key(problem, sizer, through)}.json"
    first = _points(problem, sizer)
    compare(problem, sizer, first)  # also for a cached table: its key does not cover weights and called functions
    table = None if again else _cached(path, problem)
    new = table is None
    if table is None:
        table = _measure(problem, sizer, budget_ms / 1e3, through, progress or _bar())
    compare(problem, sizer, [p for p in _borders(problem, sizer, table) if p not in first])
    if new:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, table.to_json(), "tune")
        except (OSError, KeepdimError) as e:
            log.warning("the table is not kept: %s", e)
    return _columns(problem, table), table


def _cached(path: Path, problem: Problem) -> RangeTable | None:
    """The table in a file; None if there is none, or if it does not fit these implementations."""
    if not path.exists():
        return None
    try:
        table = RangeTable.from_json(path.read_bytes())
        unknown = {r.implementation for r in table.rows} - {n for n, _ in problem.candidates}
        if unknown or without(tuple(a.range for a in _columns(problem, table)), _tiles(problem, table)):
            fail(
                "tune",
                problem.name,
                f"{path} does not say which implementation runs at which sizes",
                "It is measured again",
            )
    except (KeepdimError, OSError, KeyError) as e:
        log.warning("the kept table is not used: %s", e)
        return None
    return table


def _bar() -> Callable[[float], None]:
    bar = Progress(100, "%")
    return lambda part: bar(max(1, round(100 * part)))


def _key(problem: Problem, sizer: Sizer, through: Function | None) -> str:
    """A hash of everything that a table depends on, except the budget."""
    middle = sizer.at(sizer.nearest(tuple(round(math.sqrt(max(lo, 1) * hi)) for lo, hi in problem.domain)))
    shapes = [f"{list(x.shape)} {x.dtype} {x.device}" if isinstance(x, torch.Tensor) else repr(x)
              for x in pytree.tree_leaves(middle)]  # fmt: skip
    partitioners = [f"{n} {type(p).__module__}.{type(p).__qualname__} {_simple_values(vars(p))}"
           for n, p in problem.partitioners.items()]  # fmt: skip
    parts = [problem.name, str(problem.axes), machine(), str(versions()), _code(through), *shapes, *partitioners,
             *(f"{n} {_code(run)}" for n, run in problem.candidates), _code(problem.reference)]  # fmt: skip
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _code(run: Function | None) -> str:
    """A function as text: its source, and the plain values that it closes over or is configured with."""
    if run is None:
        return "None"
    if isinstance(run, functools.partial):
        return f"{_code(run.func)} {_simple_values(dict(enumerate(run.args)))} {_simple_values(run.keywords)}"
    try:
        if isinstance(run, torch.nn.Module):
            settings = {f"{path}.{k}": v for path, m in run.named_modules() for k, v in vars(m).items()}
            return f"{inspect.getsource(type(run))} {_simple_values(settings)}"
        closed = inspect.getclosurevars(run).nonlocals if inspect.isfunction(run) else {}
        return f"{inspect.getsource(run)} {_compiled(run)} {_simple_values(closed)}"
    except (OSError, TypeError, ValueError):  # builtin, or typed at a prompt
        return _compiled(run) or str(getattr(run, "__name__", run))


def _compiled(run: Function) -> str:
    """The bytecode of a function: two lambdas on one line have the same source."""

    def show(code: CodeType) -> str:
        constants = [show(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
        return f"{code.co_code.hex()} {code.co_names} {constants}"

    code = getattr(run, "__code__", None)
    return show(code) if isinstance(code, CodeType) else ""


def _simple_values(values: Mapping[str, object] | Mapping[int, object]) -> str:
    """Those that are numbers, texts and dtypes, as text."""
    kinds = (bool, int, float, str, torch.dtype)
    return repr({k: v for k, v in values.items() if all(isinstance(x, kinds) for x in pytree.tree_leaves(v))})


def _columns(problem: Problem, table: RangeTable) -> tuple[Axis, ...]:
    names = [a.name for a in problem.axes]
    by_axes = len(names) == 1 or any(n in r.ranges for r in table.rows for n in names)
    return problem.axes if by_axes else (product_axis(problem.axes),)


def _tiles(problem: Problem, table: RangeTable) -> list[Box]:
    return [tuple(r.ranges[a.name] for a in _columns(problem, table)) for r in table.rows]


def product_axis(axes: Sequence[Axis]) -> Axis:
    """Two axes as one: their product."""
    a, b = axes
    name = f"{a.name}*{b.name}"
    return Axis(name, name, a.lo * b.lo, a.hi * b.hi, (), ())


# ---------------------------------------------------------------- equivalence
def _points(problem: Problem, sizer: Sizer) -> list[AxisSizes]:
    """Where implementations are compared before timing: the grid, and the ends and middle of every range."""
    grid = itertools.product(*(_grid(problem, sizer, i) for i in range(len(problem.axes))))
    middle = [tuple(round(math.sqrt(max(lo, 1) * hi)) for lo, hi in box) for box in (*problem.boxes, problem.domain)]
    points = [*edges(problem.axes, [*problem.boxes, problem.domain]), *middle, *grid]
    return list(dict.fromkeys(map(sizer.nearest, points)))


def _borders(problem: Problem, sizer: Sizer, table: RangeTable) -> list[AxisSizes]:
    """Points on both sides of every threshold of a table."""
    tiles = _tiles(problem, table)
    if _columns(problem, table) == problem.axes:
        points = edges(problem.axes, tiles)
    else:  # factor the product, with the first size as large as possible
        a, b = problem.axes
        points = []
        for ((lo, hi),) in tiles:
            for n, add in ((lo, 1), (hi, 0)):  # at or above the lower end, at or below the upper one
                x = max(1, min(a.hi, n // max(b.lo, 1)))
                points.append((x, max(b.lo, min(b.hi, (n + add * (x - 1)) // x))))
    return list(dict.fromkeys(map(sizer.nearest, points)))


def compare(problem: Problem, sizer: Sizer, points: Sequence[AxisSizes]) -> None:
    """Raise if an implementation fails, or differs from the reference if there is one."""
    for sizes in points:
        args = sizer.at(sizes)
        at = ", ".join(f"{a.name} = {n}" for a, n in zip(problem.axes, sizes, strict=True))
        want = None
        if problem.reference is not None:
            where = f"{problem.name}, reference"
            want = _tensors(where, _run(where, problem.reference, args, at))
        for name, run in problem.candidates:
            where = f"{problem.name}, implementation {name!r}"
            got = _run(where, run, args, at)
            if want is not None and (why := _difference(_tensors(where, got), want)) is not None:
                fail("tune", where, f"differs from the reference at {at}: {why}")


def _run(where: str, run: Function, args: Args, at: str) -> object:
    """One call; it is an error if it mutates its arguments."""
    with torch.inference_mode(False), torch.no_grad():  # inference mode does not count versions
        copies = pytree.tree_map_only(torch.Tensor, torch.clone, args)
        inputs = [x for x in pytree.tree_leaves(copies) if isinstance(x, torch.Tensor)]
        before = [x._version for x in inputs]
        try:
            out = run(*copies)
        except KeepdimError:
            raise
        except Exception as e:  # the function or an op inside it may raise anything
            fail("tune", where, f"fails at {at} ({describe_exception(e)})", cause=e)
    if [x._version for x in inputs] != before:
        fail("tune", where, f"changes an input at {at}", "Let it work on a clone")
    return out


def _tensors(where: str, out: object) -> tuple[list[torch.Tensor], pytree.TreeSpec]:
    """The results of a call, and their tree spec."""
    values, spec = pytree.tree_flatten(out)
    if not values or not all(isinstance(v, torch.Tensor) for v in values):
        kinds = ", ".join(type(v).__name__ for v in values) or "nothing"
        fail("tune", where, f"returns {kinds}", "Return tensors")
    return values, spec


def _difference(got: Any, want: Any) -> str | None:
    (values, spec), (others, wanted) = got, want
    if spec != wanted:
        return f"{len(values)} results in another structure"
    for i, (a, b) in enumerate(zip(values, others, strict=True)):
        if a.dtype != b.dtype:
            return f"result {i} is {a.dtype}, not {b.dtype}"
        if a.shape != b.shape:
            return f"result {i} is {list(a.shape)}, not {list(b.shape)}"
        if any(n > 1 and p != q for n, p, q in zip(a.shape, a.stride(), b.stride(), strict=True)):
            return f"result {i} has strides {list(a.stride())}, not {list(b.stride())}"
        wrong = ~_close(a, b)
        if wrong.any():
            first = tuple(wrong.nonzero()[0].tolist())
            return (f"result {i}: {int(wrong.sum())} of {b.numel()} values differ, the first at {list(first)}: "
                    f"{a[first].item():.6g}, not {b[first].item():.6g}")  # fmt: skip
    return None


def _close(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two results are equal within torch's tolerances. The rounding error of a sum depends on its terms, not on
    its result, so the absolute tolerance scales with the largest value within MAGNITUDE_GAP."""
    same = (a == b) | (a.isnan() & b.isnan())
    if not (b.is_floating_point() or b.is_complex()):
        return same
    rtol, atol = torch.testing._comparison.get_tolerances(a, b, rtol=None, atol=None)
    wide = torch.promote_types(b.dtype, torch.float64)
    size, off = b.to(wide).abs(), (a.to(wide) - b.to(wide)).abs()
    allowed = rtol * size + max(10 * atol, rtol) * _scale(size)
    return same | (size.isfinite() & (off <= allowed))


def _scale(size: torch.Tensor) -> torch.Tensor:
    """For each value, the largest of its cluster (neighbours within MAGNITUDE_GAP of each other); at least 1.

    >>> _scale(torch.tensor([0.0, 2.0, 500.0, 1e9, torch.inf]))
    tensor([5.0000e+02, 5.0000e+02, 5.0000e+02, 1.0000e+09, 1.0000e+09])
    """
    known = size[size.isfinite() & (size > 0)].sort().values
    if not known.numel():
        return torch.ones_like(size)
    tops = torch.cat([known[:-1][known[1:] > MAGNITUDE_GAP * known[:-1]], known[-1:]])
    return tops[torch.searchsorted(tops, size).clamp(max=len(tops) - 1)].clamp(min=1)


# ---------------------------------------------------------------- times
@dataclass
class Timings:
    """Measured times of all candidates, per size."""

    problem: Problem
    runs: Sequence[Function]
    sizer: Sizer
    share: float  # seconds for one size
    times: dict[AxisSizes, list[float]] = field(default_factory=dict)  # seconds
    spread: list[float] = field(default_factory=list)
    spent: float = 0.0

    @property
    def noise(self) -> float:
        """Relative difference of two measurements of the same thing."""
        return max(MIN_NOISE, statistics.median(self.spread)) if self.spread else MIN_NOISE

    def measure(self, points: Sequence[AxisSizes]) -> Iterator[None]:
        """Measure all new points, then all of them again, so that a noisy moment does not hit the same point twice."""
        new = [p for p in points if p not in self.times]
        first = {}
        for sizes in new:
            first[sizes] = self._visit(sizes)
            yield
        for sizes in new:
            pairs = list(zip(first[sizes], self._visit(sizes), strict=True))
            self.times[sizes] = [min(pair) for pair in pairs]
            self.spread += _spread(pairs)
            yield

    def _visit(self, sizes: AxisSizes) -> list[float]:
        """Interleaved rounds over the candidates; returns the minimum time of each."""
        args, start = self.sizer.at(sizes), time.perf_counter()
        with torch.no_grad():
            for run in self.runs:
                run(*args)
            taken = [[_seconds(run, args, 1)] for run in self.runs]
            loops = [max(1, round(MIN_SAMPLE / max(kept[0], 1e-9))) for kept in taken]
            for i in range(MAX_ROUNDS):
                limit = CUTOFF * min(map(min, taken))
                for run, k, kept in zip(self.runs, loops, taken, strict=True):
                    if min(kept) <= limit:
                        kept.append(_seconds(run, args, k))
                if i >= 1 and time.perf_counter() - start > self.share / 2:
                    break
        self.spent += time.perf_counter() - start
        return [min(kept) for kept in taken]


def _spread(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Relative difference of the second visit from the first, each candidate compared with the best: a slowdown of all
    candidates is not noise."""
    best = min(pairs, key=min)
    ratios = [(a / best[0], b / best[1]) for a, b in pairs if (a, b) != best]
    return [abs(math.log(a / b)) for a, b in ratios if min(a, b) <= CUTOFF]


def _seconds(run: Function, args: Args, loops: int) -> float:
    start = time.perf_counter()
    for _ in range(loops):
        run(*args)
    return (time.perf_counter() - start) / loops


def _lowered(problem: Problem, sizer: Sizer, through: Function | None) -> list[Function]:
    """The candidates, lowered by `through` if it is given."""
    if through is None:
        return [run for _, run in problem.candidates]
    lowest = sizer.nearest(tuple(max(lo, 2) for lo, _ in problem.domain))
    highest = sizer.nearest(tuple(hi for _, hi in problem.domain))
    shapes, args = sizer.dynamic_shapes(lowest, highest), sizer.at(lowest)
    named = {n: {"partitioner": [p]} for n, p in problem.partitioners.items()}
    return [
        through(_AsModule(run), args, dynamic_shapes=(shapes,), **named.get(n, {})) for n, run in problem.candidates
    ]


class _AsModule(torch.nn.Module):
    def __init__(self, run: Function):
        super().__init__()
        self.run = run

    def forward(self, *args: object) -> object:
        return self.run(*args)


# ---------------------------------------------------------------- from times to a table
def _measure(problem: Problem, sizer: Sizer, budget: float, through: Function | None,
              progress: Callable[[float], None]) -> RangeTable:  # fmt: skip
    count = len(problem.axes)
    lines = [_grid(problem, sizer, i) for i in range(count)]
    timings = Timings(problem, _lowered(problem, sizer, through), sizer, 0.6 * budget / math.prod(map(len, lines)))

    def fill() -> None:
        for _ in timings.measure(list(itertools.product(*lines))):
            progress(min(0.99, timings.spent / (2 * budget)))

    fill()
    tiles = cover(lines, timings.times, timings.noise)
    for step in itertools.count():
        gaps = _gaps(lines, tiles[1], timings)
        if not gaps or (timings.spent > 2 * budget and step >= MIN_STEPS):
            break
        new = [(axis, v) for axis, a, b in gaps if (v := _between(lines, sizer, axis, a, b)) is not None]
        if not new:
            break
        axis, value = new[0]
        lines[axis] = sorted([*lines[axis], value])
        fill()
        tiles = cover(lines, timings.times, timings.noise)
    progress(1.0)
    if timings.noise > MAX_NOISE:
        fact = f"two measurements of the same thing differ by {timings.noise:.0%} here, which hides the difference"
        remedy = "Tune on a quiet machine, or for longer (budget_ms; --seconds of keepdim tune)"
        fail("tune", problem.name, fact, remedy)
    return _table(problem, timings, lines, *tiles)


def _grid(problem: Problem, sizer: Sizer, i: int) -> list[int]:
    """Geometrically spaced grid lines, including both ends."""
    lo, hi = problem.domain[i]
    count, low = GRID[len(problem.axes)], max(lo, 1)
    wanted = {lo, hi, *(round(low * (hi / low) ** (k / (count - 1))) for k in range(count))}
    rest = [a.lo for a in problem.axes]
    reached = {sizer.nearest((*rest[:i], v, *rest[i + 1 :]))[i] for v in wanted}
    return sorted(v for v in reached if lo <= v <= hi)


Span = tuple[int, int]  # inclusive indices into lines
Tile = tuple[tuple[Span, ...], int]  # a box of points, and the candidate that serves it


def _lost_time(
    lines: Sequence[Sequence[int]], times: Mapping[AxisSizes, Sequence[float]], noise: float
) -> numpy.ndarray:
    """The time that each candidate loses to the best one, as prefix sums over the points: the sum over a box is then a
    difference."""
    logs = numpy.array([[math.log(t / min(times[p])) for t in times[p]] for p in itertools.product(*lines)])
    # Differences below the noise get a small weight: enough to place a border where the times cross.
    lost = (numpy.maximum(0.0, logs - noise) + 0.01 * logs).reshape(*map(len, lines), -1)
    for i in range(len(lines)):
        lost = numpy.concatenate([numpy.zeros_like(lost.take([0], i)), lost.cumsum(i)], i)
    return lost


def cover(lines: Sequence[Sequence[int]], times: Mapping[AxisSizes, Sequence[float]], noise: float
          ) -> tuple[float, list[Tile]]:  # fmt: skip
    """The cheapest assignment of boxes of points to candidates: the cost is the time lost plus RANGE_COST per box.

    >>> times = {(1,): [1.0, 2.0], (2,): [1.0, 1.01], (4,): [3.0, 1.0]}
    >>> cover([[1, 2, 4]], times, 0.02)[1]
    [(((0, 1),), 0), (((2, 2),), 1)]
    """
    lost = _lost_time(lines, times, noise)

    @functools.cache
    def best(box: tuple[Span, ...]) -> tuple[float, tuple[Tile, ...]]:
        sums = lost
        for a, b in box:
            sums = sums[b + 1] - sums[a]
        c = int(sums.argmin())
        found: tuple[float, tuple[Tile, ...]] = (float(sums[c]) + RANGE_COST, ((box, c),))
        if found[0] <= 2 * RANGE_COST:  # two boxes cost more
            return found
        for i, (a, b) in enumerate(box):
            for at in range(a, b):
                halves = [best((*box[:i], half, *box[i + 1 :])) for half in ((a, at), (at + 1, b))]
                cost = halves[0][0] + halves[1][0]
                if cost < found[0] - 1e-12:
                    found = (cost, halves[0][1] + halves[1][1])
        return found

    cost, boxes = best(tuple((0, len(m) - 1) for m in lines))
    return cost, list(boxes)


def _gaps(lines: Sequence[Sequence[int]], boxes: Sequence[Tile], timings: Timings
          ) -> list[tuple[int, int, int]]:  # fmt: skip
    """(axis, a, b) where the winner changes between two distant lines, the widest gap first."""
    found = set()
    for box, c in boxes:
        for i, (_, end) in enumerate(box):
            if end + 1 == len(lines[i]):
                continue
            a, b = lines[i][end], lines[i][end + 1]
            others = [d for other, d in boxes if other[i][0] == end + 1 and d != c]
            if b - a <= 1 or b / max(a, 1) <= MIN_RATIO[len(lines)] or not others:
                continue
            if len(lines) > 1 or not _within_noise(timings, (a,), c, others[0]):
                found.add((i, a, b))
    return sorted(found, key=lambda g: -g[2] / max(g[1], 1))


def _between(lines: Sequence[Sequence[int]], sizer: Sizer, axis: int, a: int, b: int) -> int | None:
    """A reachable size between two lines: the geometric mean if possible."""
    middle = min(max(round(math.sqrt(max(a, 1) * b)), a + 1), b - 1)
    sizes = [m[0] for m in lines]
    for wanted in (middle, b - 1):
        sizes[axis] = wanted
        if a < (reached := sizer.nearest(tuple(sizes))[axis]) < b:
            return reached
    return None


def _within_noise(timings: Timings, sizes: AxisSizes, a: int, b: int) -> bool:
    times = timings.times[sizes]
    return abs(math.log(times[a] / times[b])) <= timings.noise


def _table(
    problem: Problem, timings: Timings, lines: Sequence[Sequence[int]], cost: float, boxes: list[Tile]
) -> RangeTable:
    columns, domain = [a.name for a in problem.axes], problem.domain
    if len(problem.axes) == 2 and len(boxes) > 1 and (flat := _by_product(problem, timings)) is not None:
        if flat[0] <= cost:
            (cost, boxes), lines = flat[:2], [flat[2]]
            axis = product_axis(problem.axes)
            columns, domain = [axis.name], (axis.range,)
    names = [n for n, _ in problem.candidates]
    rows = []
    for box, c in boxes:
        ranges = {}
        for column, (lo, hi), m, (a, b) in zip(columns, domain, lines, box, strict=True):
            ranges[column] = (lo if a == 0 else m[a - 1] + 1, hi if b == len(m) - 1 else m[b])
        rows.append(RangeRow(ranges, names[c]))
    measured = [
        Measured(dict(zip((a.name for a in problem.axes), sizes, strict=True)),
                 {n: t * 1e6 for n, t in zip(names, times, strict=True)})
        for sizes, times in sorted(timings.times.items())
    ]  # fmt: skip
    axes, over = {a.name: a.text for a in problem.axes}, {a.name: a.range for a in problem.axes}
    rows.sort(key=lambda r: list(r.ranges.values()))
    return RangeTable(problem.name, axes, over, rows, measured, timings.noise, machine(), versions())


def _by_product(problem: Problem, timings: Timings) -> tuple[float, list[Tile], list[int]] | None:
    """`cover` over the product of the two axes: all sizes with the same product form one grid line."""
    lines = sorted({a * b for a, b in timings.times})
    groups: dict[AxisSizes, list[float]] = {}
    for n in lines:
        group = [times for (a, b), times in timings.times.items() if a * b == n]
        # The loss of a group is the sum of its losses, which is the log of this product of ratios.
        ratios = [[t / min(times) for t in times] for times in group]
        groups[(n,)] = [math.prod(r[c] for r in ratios) for c in range(len(problem.candidates))]
    cost, boxes = cover([lines], groups, timings.noise)
    return cost, boxes, lines
