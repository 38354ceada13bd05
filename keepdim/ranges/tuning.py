"""Measures which implementation is best at which sizes, and makes the simplest table that says so.

First every implementation is compared with the reference on a coarse grid. Then times are taken there, and lines are
added where the winner changes. A table with one more range has to save more than the noise. Both sides of the splits
that were found are compared at last.
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

from ..artifact.range_table import Measured, Row, Table, machine, versions
from ..cache import folder
from ..errors import KeepdimError, fail, told
from ..files import write_bytes
from ..progress import Progress
from .axes import Axis
from .boxes import Box, edges, without
from .sizing import Problem, Sizer, Sizes

log = logging.getLogger("keepdim")
APART = 1e3  # times: values this far from each other, such as those of a mask, are rounded by other sums
GRID = {1: 9, 2: 5}  # lines an axis at first, by the number of axes
CLOSE = {1: 1.03, 2: 1.2}  # two lines this near to each other are not parted further
WORTH = 0.05  # what one more range has to save: the sum, over the sizes measured, of log(time / best) above the noise
QUIET = 0.005  # no machine is quieter
NOISY = 0.25  # nothing can be told above it
HOPELESS = 4.0  # times slower than the best: measured no further at this size
STEPS = 16  # lines that may be added even where the budget is spent: a border costs about six
ROUNDS = 200  # at most, of one size
SAMPLE = 20e-6  # seconds: shorter calls are timed several at once


def tuned(problem: Problem, budget_ms: float, again: bool, through: Callable[..., Any] | None,
          progress: Callable[[float], None] | None) -> tuple[tuple[Axis, ...], Table]:  # fmt: skip
    """The axes that the table is over, and the table: read if it was made on this machine before."""
    if not budget_ms > 0:
        fail("tune", problem.name, f"has a budget of {budget_ms} ms")
    sizer = Sizer(problem)
    path = folder() / f"ranges-{_key(problem, sizer, through)}.json"
    first = _points(problem, sizer)
    compare(problem, sizer, first)  # also where the table is kept: weights and functions called are not in its key
    table = None if again else _kept(path, problem)
    new = table is None
    if table is None:
        table = _measured(problem, sizer, budget_ms / 1e3, through, progress or _bar())
    compare(problem, sizer, [p for p in _borders(problem, sizer, table) if p not in first])
    if new:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, table.to_json(), "tune")
        except (OSError, KeepdimError) as e:
            log.warning("the table is not kept: %s", e)
    return _columns(problem, table), table


def _kept(path: Path, problem: Problem) -> Table | None:
    """The table of a file; None where there is none, or one that does not serve these implementations."""
    if not path.exists():
        return None
    try:
        table = Table.from_json(path.read_bytes())
        unknown = {r.implementation for r in table.rows} - {n for n, _ in problem.candidates}
        if unknown or without(tuple(a.range for a in _columns(problem, table)), _tiles(problem, table)):
            fail("tune", problem.name, f"{path} does not say who serves which sizes", "It is measured anew")
    except (KeepdimError, OSError, KeyError) as e:
        log.warning("the kept table is not used: %s", e)
        return None
    return table


def _bar() -> Callable[[float], None]:
    bar = Progress(100, "%")
    return lambda part: bar(max(1, round(100 * part)))


def _key(problem: Problem, sizer: Sizer, through: Any) -> str:
    """A hash of everything that a table depends on, but for the time that it took."""
    middle = sizer.at(sizer.nearest(tuple(round(math.sqrt(max(lo, 1) * hi)) for lo, hi in problem.domain)))
    shapes = [f"{list(x.shape)} {x.dtype} {x.device}" if isinstance(x, torch.Tensor) else repr(x)
              for x in pytree.tree_leaves(middle)]  # fmt: skip
    who = [f"{n} {type(p).__module__}.{type(p).__qualname__} {_plain(vars(p))}"
           for n, p in problem.partitioners.items()]  # fmt: skip
    parts = [problem.name, str(problem.axes), machine(), str(versions()), _code(through), *shapes, *who,
             *(f"{n} {_code(run)}" for n, run in problem.candidates), _code(problem.reference)]  # fmt: skip
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _code(run: Any) -> str:
    """What a function does, as far as text can say: its source, and the plain values that it is set up with."""
    if isinstance(run, functools.partial):
        return f"{_code(run.func)} {_plain(dict(enumerate(run.args)))} {_plain(run.keywords)}"
    try:
        if isinstance(run, torch.nn.Module):
            settings = {f"{path}.{k}": v for path, m in run.named_modules() for k, v in vars(m).items()}
            return f"{inspect.getsource(type(run))} {_plain(settings)}"
        closed = inspect.getclosurevars(run).nonlocals if inspect.isfunction(run) else {}
        return f"{inspect.getsource(run)} {_compiled(run)} {_plain(closed)}"
    except (OSError, TypeError, ValueError):  # built in, or typed into a prompt
        return _compiled(run) or str(getattr(run, "__name__", run))


def _compiled(run: Any) -> str:
    """The code of a function: of two lambdas in one line the source is the same."""

    def show(code: CodeType) -> str:
        constants = [show(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
        return f"{code.co_code.hex()} {code.co_names} {constants}"

    code = getattr(run, "__code__", None)
    return show(code) if isinstance(code, CodeType) else ""


def _plain(values: Mapping[Any, Any]) -> str:
    kinds = (bool, int, float, str, torch.dtype)
    return repr({k: v for k, v in values.items() if all(isinstance(x, kinds) for x in pytree.tree_leaves(v))})


def _columns(problem: Problem, table: Table) -> tuple[Axis, ...]:
    names = [a.name for a in problem.axes]
    whole = len(names) == 1 or any(n in r.ranges for r in table.rows for n in names)
    return problem.axes if whole else (product_axis(problem.axes),)


def _tiles(problem: Problem, table: Table) -> list[Box]:
    return [tuple(r.ranges[a.name] for a in _columns(problem, table)) for r in table.rows]


def product_axis(axes: Sequence[Axis]) -> Axis:
    """Two axes as one: their product."""
    a, b = axes
    name = f"{a.name}*{b.name}"
    return Axis(name, name, a.lo * b.lo, a.hi * b.hi, (), ())


# ---------------------------------------------------------------- equivalence
def _points(problem: Problem, sizer: Sizer) -> list[Sizes]:
    """Where implementations are compared before any time is taken: the grid, and the ends and middle of every range."""
    grid = itertools.product(*(_grid(problem, sizer, i) for i in range(len(problem.axes))))
    middle = [tuple(round(math.sqrt(max(lo, 1) * hi)) for lo, hi in box) for box in (*problem.boxes, problem.domain)]
    points = [*edges(problem.axes, [*problem.boxes, problem.domain]), *middle, *grid]
    return list(dict.fromkeys(map(sizer.nearest, points)))


def _borders(problem: Problem, sizer: Sizer, table: Table) -> list[Sizes]:
    """Both sides of every split of a table."""
    tiles = _tiles(problem, table)
    if _columns(problem, table) == problem.axes:
        points = edges(problem.axes, tiles)
    else:  # of the two sizes of a product the first is as large as can be
        a, b = problem.axes
        points = []
        for ((lo, hi),) in tiles:
            for n, add in ((lo, 1), (hi, 0)):  # at or above the lower end, at or below the upper one
                x = max(1, min(a.hi, n // max(b.lo, 1)))
                points.append((x, max(b.lo, min(b.hi, (n + add * (x - 1)) // x))))
    return list(dict.fromkeys(map(sizer.nearest, points)))


def compare(problem: Problem, sizer: Sizer, points: Sequence[Sizes]) -> None:
    """Refuse an implementation that is not the reference, if there is one, or that cannot be served."""
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
                fail("tune", where, f"is not the reference at {at}: {why}")


def _run(where: str, run: Callable[..., Any], args: Any, at: str) -> Any:
    """One call, which leaves its arguments as they are."""
    with torch.inference_mode(False), torch.no_grad():  # in inference nobody counts changes
        mine = pytree.tree_map_only(torch.Tensor, torch.clone, args)
        inputs = [x for x in pytree.tree_leaves(mine) if isinstance(x, torch.Tensor)]
        before = [x._version for x in inputs]
        try:
            out = run(*mine)
        except KeepdimError:
            raise
        except Exception as e:  # whatever the function itself or an op inside it raises
            fail("tune", where, f"fails at {at} ({told(e)})", cause=e)
    if [x._version for x in inputs] != before:
        fail("tune", where, f"changes an input at {at}", "Let it work on a clone")
    return out


def _tensors(where: str, out: Any) -> tuple[list[torch.Tensor], Any]:
    """The results of a call, and their form."""
    values, spec = pytree.tree_flatten(out)
    if not values or not all(isinstance(v, torch.Tensor) for v in values):
        kinds = ", ".join(type(v).__name__ for v in values) or "nothing"
        fail("tune", where, f"returns {kinds}", "Return tensors")
    return values, spec


def _difference(got: Any, want: Any) -> str | None:
    (values, spec), (others, wanted) = got, want
    if spec != wanted:
        return f"{len(values)} results in another form"
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
    """Where two results are equal within torch's tolerances. A sum is rounded by its terms and their number, not by its
    result: the absolute part is for the largest value that is not APART."""
    same = (a == b) | (a.isnan() & b.isnan())
    if not (b.is_floating_point() or b.is_complex()):
        return same
    rtol, atol = torch.testing._comparison.get_tolerances(a, b, rtol=None, atol=None)
    wide = torch.promote_types(b.dtype, torch.float64)
    size, off = b.to(wide).abs(), (a.to(wide) - b.to(wide)).abs()
    allowed = rtol * size + max(10 * atol, rtol) * _scale(size)
    return same | (size.isfinite() & (off <= allowed))


def _scale(size: torch.Tensor) -> torch.Tensor:
    """For each value the largest that is not APART from it, with those between; at least 1.

    >>> _scale(torch.tensor([0.0, 2.0, 500.0, 1e9, torch.inf]))
    tensor([5.0000e+02, 5.0000e+02, 5.0000e+02, 1.0000e+09, 1.0000e+09])
    """
    known = size[size.isfinite() & (size > 0)].sort().values
    if not known.numel():
        return torch.ones_like(size)
    tops = torch.cat([known[:-1][known[1:] > APART * known[:-1]], known[-1:]])
    return tops[torch.searchsorted(tops, size).clamp(max=len(tops) - 1)].clamp(min=1)


# ---------------------------------------------------------------- times
@dataclass
class Clock:
    """Times of all candidates, size by size."""

    problem: Problem
    runs: Sequence[Callable[..., Any]]
    sizer: Sizer
    share: float  # seconds for one size
    times: dict[Sizes, list[float]] = field(default_factory=dict)  # seconds
    spread: list[float] = field(default_factory=list)
    spent: float = 0.0

    @property
    def noise(self) -> float:
        """How far apart two measurements of the same thing are, relative."""
        return max(QUIET, statistics.median(self.spread)) if self.spread else QUIET

    def measure(self, points: Sequence[Sizes]) -> Iterator[None]:
        """All the points that are new, and then once more: a noisy moment does not come back to the same one."""
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

    def _visit(self, sizes: Sizes) -> list[float]:
        """Interleaved rounds, and the minimum of each candidate."""
        args, start = self.sizer.at(sizes), time.perf_counter()
        with torch.no_grad():
            for run in self.runs:
                run(*args)
            taken = [[_seconds(run, args, 1)] for run in self.runs]
            loops = [max(1, round(SAMPLE / max(kept[0], 1e-9))) for kept in taken]
            for i in range(ROUNDS):
                limit = HOPELESS * min(map(min, taken))
                for run, k, kept in zip(self.runs, loops, taken, strict=True):
                    if min(kept) <= limit:
                        kept.append(_seconds(run, args, k))
                if i >= 1 and time.perf_counter() - start > self.share / 2:
                    break
        self.spent += time.perf_counter() - start
        return [min(kept) for kept in taken]


def _spread(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """How far the second visit is from the first, each candidate against the best: what slows all of them is no
    noise."""
    best = min(pairs, key=min)
    ratios = [(a / best[0], b / best[1]) for a, b in pairs if (a, b) != best]
    return [abs(math.log(a / b)) for a, b in ratios if min(a, b) <= HOPELESS]


def _seconds(run: Callable[..., Any], args: Any, loops: int) -> float:
    start = time.perf_counter()
    for _ in range(loops):
        run(*args)
    return (time.perf_counter() - start) / loops


def _lowered(problem: Problem, sizer: Sizer, through: Callable[..., Any] | None) -> list[Callable[..., Any]]:
    """The candidates as they will run."""
    if through is None:
        return [run for _, run in problem.candidates]
    lowest = sizer.nearest(tuple(max(lo, 2) for lo, _ in problem.domain))
    highest = sizer.nearest(tuple(hi for _, hi in problem.domain))
    shapes, args = sizer.dynamic_shapes(lowest, highest), sizer.at(lowest)
    named = {n: {"partitioner": [p]} for n, p in problem.partitioners.items()}
    return [through(_Alone(run), args, dynamic_shapes=(shapes,), **named.get(n, {})) for n, run in problem.candidates]


class _Alone(torch.nn.Module):
    def __init__(self, run: Callable[..., Any]):
        super().__init__()
        self.run = run

    def forward(self, *args: Any) -> Any:
        return self.run(*args)


# ---------------------------------------------------------------- from times to a table
def _measured(problem: Problem, sizer: Sizer, budget: float, through: Any,
              progress: Callable[[float], None]) -> Table:  # fmt: skip
    count = len(problem.axes)
    lines = [_grid(problem, sizer, i) for i in range(count)]
    clock = Clock(problem, _lowered(problem, sizer, through), sizer, 0.6 * budget / math.prod(map(len, lines)))

    def fill() -> None:
        for _ in clock.measure(list(itertools.product(*lines))):
            progress(min(0.99, clock.spent / (2 * budget)))

    fill()
    tiles = cover(lines, clock.times, clock.noise)
    for step in itertools.count():
        gaps = _gaps(lines, tiles[1], clock)
        if not gaps or (clock.spent > 2 * budget and step >= STEPS):
            break
        new = [(axis, v) for axis, a, b in gaps if (v := _between(lines, sizer, axis, a, b)) is not None]
        if not new:
            break
        axis, value = new[0]
        lines[axis] = sorted([*lines[axis], value])
        fill()
        tiles = cover(lines, clock.times, clock.noise)
    progress(1.0)
    if clock.noise > NOISY:
        fail("tune", problem.name, f"two measurements of the same thing differ by {clock.noise:.0%} here, which hides "
             "the answer", "Tune on a quiet machine, or for longer (budget_ms; --seconds of keepdim tune)")  # fmt: skip
    return _table(problem, clock, lines, tiles)


def _grid(problem: Problem, sizer: Sizer, i: int) -> list[int]:
    """Lines that are evenly spread by ratio, both ends among them."""
    lo, hi = problem.domain[i]
    count, low = GRID[len(problem.axes)], max(lo, 1)
    wanted = {lo, hi, *(round(low * (hi / low) ** (k / (count - 1))) for k in range(count))}
    rest = [a.lo for a in problem.axes]
    reached = {sizer.nearest((*rest[:i], v, *rest[i + 1 :]))[i] for v in wanted}
    return sorted(v for v in reached if lo <= v <= hi)


Span = tuple[int, int]  # of indices into lines, both ends inside


def cover(lines: Sequence[Sequence[int]], times: Mapping[Sizes, Sequence[float]], noise: float
          ) -> tuple[float, list[tuple[tuple[Span, ...], int]]]:  # fmt: skip
    """The cheapest way to give every point to a candidate in boxes: what is lost, and WORTH for each box.

    >>> times = {(1,): [1.0, 2.0], (2,): [1.0, 1.01], (4,): [3.0, 1.0]}
    >>> cover([[1, 2, 4]], times, 0.02)[1]
    [(((0, 1),), 0), (((2, 2),), 1)]
    """
    sizes = list(itertools.product(*lines))
    logs = numpy.array([[math.log(t / min(times[p])) for t in times[p]] for p in sizes])
    # Below the noise it counts for little: enough to put a border where the times cross.
    lost = (numpy.maximum(0.0, logs - noise) + 0.01 * logs).reshape(*map(len, lines), -1)
    for i in range(len(lines)):  # sums from the first line on, so that the sum over a box is a difference
        lost = numpy.concatenate([numpy.zeros_like(lost.take([0], i)), lost.cumsum(i)], i)

    def over(box: tuple[Span, ...]) -> Any:
        part = lost
        for a, b in box:
            part = part[b + 1] - part[a]
        return part

    @functools.cache
    def best(box: tuple[Span, ...]) -> tuple[float, tuple[tuple[tuple[Span, ...], int], ...]]:
        sums = over(box)
        c = int(sums.argmin())
        found: tuple[float, Any] = (float(sums[c]) + WORTH, ((box, c),))
        if found[0] <= 2 * WORTH:  # two boxes cost more
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


def _gaps(lines: Sequence[Sequence[int]], boxes: Sequence[tuple[tuple[Span, ...], int]], clock: Clock
          ) -> list[tuple[int, int, int]]:  # fmt: skip
    """(axis, a, b) where the winner changes between two lines that are far apart, the widest first."""
    found = set()
    for box, c in boxes:
        for i, (_, end) in enumerate(box):
            if end + 1 == len(lines[i]):
                continue
            a, b = lines[i][end], lines[i][end + 1]
            others = [d for other, d in boxes if other[i][0] == end + 1 and d != c]
            if b - a <= 1 or b / max(a, 1) <= CLOSE[len(lines)] or not others:
                continue
            if len(lines) > 1 or not _alike(clock, (a,), c, others[0]):
                found.add((i, a, b))
    return sorted(found, key=lambda g: -g[2] / max(g[1], 1))


def _between(lines: Sequence[Sequence[int]], sizer: Sizer, axis: int, a: int, b: int) -> int | None:
    """A size between two lines that arguments can have: the middle one by ratio if possible."""
    middle = min(max(round(math.sqrt(max(a, 1) * b)), a + 1), b - 1)
    sizes = [m[0] for m in lines]
    for wanted in (middle, b - 1):
        sizes[axis] = wanted
        if a < (reached := sizer.nearest(tuple(sizes))[axis]) < b:
            return reached
    return None


def _alike(clock: Clock, sizes: Sizes, a: int, b: int) -> bool:
    times = clock.times[sizes]
    return abs(math.log(times[a] / times[b])) <= clock.noise


def _table(problem: Problem, clock: Clock, lines: Sequence[Sequence[int]], tiles: Any) -> Table:
    cost, boxes = tiles
    columns, domain = [a.name for a in problem.axes], problem.domain
    if len(problem.axes) == 2 and len(boxes) > 1 and (flat := _by_product(problem, clock)) is not None:
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
        rows.append(Row(ranges, names[c]))
    measured = [
        Measured(dict(zip((a.name for a in problem.axes), sizes, strict=True)),
                 {n: t * 1e6 for n, t in zip(names, times, strict=True)})
        for sizes, times in sorted(clock.times.items())
    ]  # fmt: skip
    axes, over = {a.name: a.text for a in problem.axes}, {a.name: a.range for a in problem.axes}
    rows.sort(key=lambda r: list(r.ranges.values()))
    return Table(problem.name, axes, over, rows, measured, clock.noise, machine(), versions())


def _by_product(problem: Problem, clock: Clock) -> tuple[float, Any, list[int]] | None:
    """The same over the product of the two axes: sizes of one product are one line."""
    lines = sorted({a * b for a, b in clock.times})
    groups: dict[Sizes, list[float]] = {}
    for n in lines:
        group = [times for (a, b), times in clock.times.items() if a * b == n]
        # The loss of a group is the sum of its losses, which is the log of this product of ratios.
        ratios = [[t / min(times) for t in times] for times in group]
        groups[(n,)] = [math.prod(r[c] for r in ratios) for c in range(len(problem.candidates))]
    cost, boxes = cover([lines], groups, clock.noise)
    return cost, boxes, lines
