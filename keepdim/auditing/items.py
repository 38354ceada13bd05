"""What a model says about its sizes, as things that can be looked up in every snapshot.

Each has its state at every stage, and knows the decision that led from one to the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import sympy
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from ..errors import KeepdimError
from ..fx.symbols import finite, to_constraints, to_dim
from ..shapes.contract import ASSERTED, Constraint, Contract, Symbol
from ..shapes.dim import Dim, range_text
from .places import Place, of_guard
from .result import State
from .snapshot import File, FileInput, Program, Range, Snapshot, known_as
from .watch import Event


class Subject(NamedTuple):
    """The truth that states are compared with."""

    contract: Contract
    symbols: Mapping[str, Dim]  # of torch's symbols
    first: Program  # the program that was exported
    declared: Mapping[tuple[int, int], Range]  # input and dim → what dynamic_shapes says
    env: Any = None  # its ShapeEnv

    def text(self, e: Any) -> str:
        """An expression in the user's names."""
        try:
            return str(to_dim(e, self.symbols))
        except KeepdimError:
            names = {s: sympy.Symbol(str(self.symbols[str(s)])) for s in e.free_symbols if str(s) in self.symbols}
            return str(e.xreplace(names))


class Tracked:
    """One thing that is followed."""

    kind = ""
    user: Place | None = None  # where the model says it

    def __init__(self, of: Subject, subject: str, where: str = ""):
        self.of, self.subject, self.where = of, subject, where

    def before(self) -> State | None:
        """As it was declared, where that is known."""
        return None

    def at(self, s: Snapshot, last: Program) -> State | None:
        """Its state in a snapshot, None where it does not show; `last` is the last program before a file."""
        raise NotImplementedError

    def done(self, e: Event, before: State, after: State) -> bool:
        """Whether this decision led from one state to the other."""
        return False

    def _is(self, value: Any, first: Any, replaced: Mapping[Any, Any]) -> State:
        """The state of an expression; it is kept where it only follows what its symbols became."""
        if value in (first, first.xreplace(dict(replaced))):
            return State(self.of.text(value), "kept")
        if value.is_Integer:
            return State(str(value), "frozen")
        known = {str(s) for s in value.free_symbols} <= self.of.symbols.keys()
        return State(self.of.text(value), "narrowed" if known else "renamed")


class Slot(NamedTuple):
    """One dim of one input or output."""

    what: str  # input | output
    number: int
    dim: int

    def expr(self, p: Program) -> Any:
        found = (p.inputs if self.what == "input" else p.outputs)[self.number : self.number + 1]
        return found[0][self.dim] if found and found[0] is not None and self.dim < len(found[0]) else None

    def fact(self, f: File) -> FileInput | None:
        found = (f.inputs if self.what == "input" else f.outputs)[self.number : self.number + 1]
        return found[0] if found and found[0] is not None and self.dim < len(found[0].sizes) else None

    def spec(self, c: Contract) -> Any:
        return (c.inputs if self.what == "input" else c.outputs)[self.number]

    def says(self, c: Contract) -> str:
        one = "" if self.spec(c).dtype == "int" else f" dim {self.dim}"
        return f"{self.what} {self.number} {self.spec(c).name!r}{one}"


# ---------------------------------------------------------------- symbols and their ranges
class SymbolItem(Tracked):
    """Is it still a size that may change, and between which ends?"""

    kind = "symbol"

    def __init__(self, of: Subject, symbol: Symbol, place: Slot | None, torch_symbol: Any):
        dim = symbol.dim if place is None else place.spec(of.contract).dims[place.dim]
        super().__init__(of, str(dim), of.contract.where(symbol))  # as it is read, 4*d, whose ends are followed
        self.name, self.place, self.symbol = symbol.name, place, torch_symbol
        found = place.expr(of.first) if place is not None else None
        self.first = torch_symbol if found is None else found  # what stands for it where it is read
        self.declared = None if place is None else of.declared.get((place.number, place.dim))
        self.range = self.declared or dim.bounds

    def before(self) -> State | None:
        return None if self.declared is None else State(range_text(*self.declared), "kept")

    def at(self, s: Snapshot, last: Program) -> State | None:
        if isinstance(s, File):
            return self._in_file(s, last)
        if self.symbol is None:
            return None  # an integer that travels as a tensor: the program has it in another form
        now = self._in_delegate(s, last) if s.delegate else self._now(s)
        if now is None:
            return None
        if not now.free_symbols:
            return State(str(now), "frozen")
        found = self._judged(*self._bounds(now, s))
        if now == self.first:
            return found
        known = {str(x) for x in now.free_symbols} <= self.of.symbols.keys()
        verdict = "narrowed" if known else "renamed" if found.verdict == "kept" else found.verdict
        return State(f"{found.text} as {self.of.text(now)}", verdict)

    def _now(self, p: Program) -> Any:
        found = self.place.expr(p) if self.place is not None else None
        return p.replaced.get(self.symbol, self.symbol) if found is None else found

    def _in_delegate(self, p: Program, parent: Program) -> Any:
        """A delegate shows a symbol in some node, or a number where its parent's node of that name has the symbol."""
        for name, sizes in p.nodes.items():
            for now, was in zip(sizes, parent.nodes.get(name, ()), strict=False):
                if was == self.first and not now.free_symbols and was.free_symbols:
                    return now
        shown = any(self.symbol in e.free_symbols for sizes in p.nodes.values() for e in sizes)
        return self.first if shown else None

    def _in_file(self, s: File, last: Program) -> State | None:
        if s.contract is not None:
            found = [x for x in s.contract.symbols if x.name == self.name]
            if not found:
                return State("-", "dropped")
            inside = [x for _, c in s.delegates if c is not None for x in c.symbols if x.name == self.name]
            return self._judged(*reduce(_both, map(self._of_symbol, (found[0], *inside))))
        fact = self.place.fact(s) if self.place is not None else None
        now = self._now(last)
        if fact is None and self.place is not None and self.place.spec(self.of.contract).dtype == "int":
            return State("-", "dropped")  # ExecuTorch has nothing there that an integer could be given to
        if self.place is None or fact is None or now is None or not now.free_symbols:
            return None  # data, or a number before
        if not fact.dynamic:
            return State(str(fact.sizes[self.place.dim]), "frozen")
        name, d = self.place.spec(self.of.contract).name, self.place.dim
        checks = [i for _, c in s.delegates if c is not None for i in c.inputs if i.name == name and d < len(i.dims)]
        whole: Range = (0, fact.sizes[d])
        return self._judged(*reduce(_both, (i.dims[d].bounds for i in checks), whole))

    def _of_symbol(self, found: Symbol) -> Range:
        return found.dim.bounds if self.place is None else (found.source.mul * found.dim + found.source.add).bounds

    def _bounds(self, e: Any, p: Program) -> Range:
        """By what the program declares, what its ShapeEnv has learnt since export, and what memory is planned for."""
        lo, hi = p.ranges[e] if e in p.ranges and not e.is_Symbol else bounds_of(e, p, self.of.first)
        planned = p.planned.get(self.place.spec(self.of.contract).name) if self.place is not None else None
        if planned is not None and self.place is not None:
            hi = int(min(_high(hi), planned[self.place.dim]))
        return lo, hi

    def _judged(self, lo: int | None, hi: int | None) -> State:
        low, high, low0, high0 = _low(lo), _high(hi), _low(self.range[0]), _high(self.range[1])
        verdict = "narrowed" if low > low0 or high < high0 else "widened" if low < low0 or high > high0 else "kept"
        return State(range_text(lo, hi), verdict)

    def done(self, e: Event, before: State, after: State) -> bool:
        """The decision that froze it, or that moved an end that is moved."""
        if after.verdict == "frozen":
            return e.kind == "replaced" and e.subject in self.first.free_symbols and bool(e.value.is_Integer)
        was, now = ends(before.text), ends(after.text)
        if e.kind == "planned" and self.place is not None:
            mine = e.subject == self.place.spec(self.of.contract).name and self.place.dim < len(e.value)
            return mine and was[1] != now[1] == e.value[self.place.dim]
        if e.kind == "replaced":
            return e.subject == self.symbol and " as " in after.text
        moved = any(a != b == x for a, b, x in zip(was, now, e.value, strict=True)) if e.kind == "range" else False
        return moved and e.subject in self.first.free_symbols


def bounds_of(e: Any, p: Program, first: Program) -> Range:
    """By what a program declares of symbols, and what its ShapeEnv has learnt about them since export."""
    table = {}
    for s in e.free_symbols:
        lo, hi = p.ranges.get(s, p.known.get(s, (None, None)))
        (lo0, hi0), (lo1, hi1) = first.known.get(s, (None, None)), p.known.get(s, (None, None))
        lo = lo1 if lo1 != lo0 and lo1 is not None else lo
        hi = hi1 if hi1 != hi0 and hi1 is not None else hi
        table[s] = ValueRanges(-int_oo if lo is None else lo, int_oo if hi is None else hi)
    found = bound_sympy(e, table)
    return finite(found.lower), finite(found.upper)


def _both(a: Range, b: Range) -> Range:
    """What lies in both."""
    low = [x for x in (a[0], b[0]) if x is not None]
    high = [x for x in (a[1], b[1]) if x is not None]
    return max(low, default=None), min(high, default=None)


def _low(x: int | None) -> float:
    return float("-inf") if x is None else x


def _high(x: int | None) -> float:
    return float("inf") if x is None else x


def ends(text: str) -> Range:
    """The two ends of a range that was written down."""
    lo, hi = re.findall(r"^(-?\d*)(?:\.\.(-?\d*))?", text)[0]
    return tuple(int(x) if x.strip("-") else None for x in (lo, hi))  # type: ignore[return-value]


# ---------------------------------------------------------------- sizes and equalities
class SizeItem(Tracked):
    """A size that is computed from others, or one of an output."""

    kind = "size"

    def __init__(self, of: Subject, place: Slot):
        super().__init__(of, place.says(of.contract))
        self.place, self.first = place, place.expr(of.first)

    def at(self, s: Snapshot, last: Program) -> State | None:
        if isinstance(s, Program):
            now = None if s.delegate else self.place.expr(s)
            return None if now is None else self._is(now, self.first, s.replaced)
        if s.contract is not None:
            told = str(self.place.spec(s.contract).dims[self.place.dim])
            said = str(self.place.spec(self.of.contract).dims[self.place.dim])
            return State(told, "kept" if told == said else "renamed")
        fact, now = self.place.fact(s), self.first.xreplace(dict(last.replaced))
        if fact is None or (fact.dtype is None and self.place.what == "output"):
            return None  # a number that a run computes
        if now.is_Integer:
            return State(str(now), "kept")
        n = fact.sizes[self.place.dim]
        if not fact.dynamic:
            return State(str(n), "frozen")
        top = bounds_of(now, last, self.of.first)[1]
        if self.place.what == "input":
            return State(f"0..{n}", "dropped")
        return State(self.of.text(self.first), "kept") if top is None or n >= top else State(f"0..{n}", "narrowed")

    def done(self, e: Event, before: State, after: State) -> bool:
        return e.kind == "replaced" and e.subject in self.first.free_symbols


class EqualityItem(Tracked):
    """Two inputs that have one size."""

    kind = "equality"

    def __init__(self, of: Subject, a: Slot, b: Slot):
        super().__init__(of, f"{a.says(of.contract)} = {b.says(of.contract)}")
        self.a, self.b = a, b

    def at(self, s: Snapshot, last: Program) -> State | None:
        kept = State(str(self.a.spec(self.of.contract).dims[self.a.dim]), "kept")
        gone = State("-", "dropped")
        if isinstance(s, Program):
            a, b = (None, None) if s.delegate else (self.a.expr(s), self.b.expr(s))
            if a is None or b is None:
                return None
            return State(self.of.text(a), "kept") if a == b else gone
        if s.contract is not None:
            a, b = (p.spec(s.contract).dims[p.dim] for p in (self.a, self.b))
            return kept if a == b else gone
        facts = self.a.fact(s), self.b.fact(s)
        if any(f is None or not f.dynamic for f in facts):
            return None
        names = [p.spec(self.of.contract).name for p in (self.a, self.b)]
        for _, c in s.delegates:
            here = {i.name: i.dims for i in c.inputs} if c is not None else {}
            if all(n in here for n in names) and here[names[0]][self.a.dim] == here[names[1]][self.b.dim]:
                return kept
        return gone


# ---------------------------------------------------------------- guards and asserts
class RelationItem(Tracked):
    """A guard that torch.export relies on, or an assert."""

    def __init__(self, of: Subject, c: Constraint):
        super().__init__(of, str(c))
        self.kind = "assert" if c.sentence == ASSERTED else "guard"
        every = of.env.guards if of.env is not None else ()
        found = [g for g in every if self._means(of.env.replace(g.expr))]
        self.guards = {g.expr for g in found}
        self.asserts = {known_as(a) for a in of.first.asserts if self._means(a)}
        self.user = of_guard(found[0]) if found else None
        self.symbols = {t for t, d in of.symbols.items() if d.symbols() & (c.lhs.symbols() | c.rhs.symbols())}

    def _means(self, e: Any) -> bool:
        try:
            return self.subject in [str(c) for c in to_constraints(e, self.of.symbols, "")]
        except KeepdimError:
            return False

    def at(self, s: Snapshot, last: Program) -> State | None:
        kept, gone = State(self.subject, "kept"), State("-", "dropped")
        if isinstance(s, Program):
            if s.delegate or not (self.guards or self.asserts):
                return None  # it is carried beside the program
            return kept if self.guards & s.guards or self.asserts & {known_as(a) for a in s.asserts} else gone
        contracts = [c for c in (s.contract, *(c for _, c in s.delegates)) if c is not None]
        if any(self.subject in map(str, c.constraints) for c in contracts):
            return kept
        frozen = {str(a) for a, b in last.replaced.items() if b.is_Integer}
        return None if self.symbols <= frozen else gone

    def done(self, e: Event, before: State, after: State) -> bool:
        return e.kind == "assert" and e.subject in self.asserts


class DecidedItem(Tracked):
    """A question about sizes that somebody answered for the example."""

    kind = "guard"

    def __init__(self, of: Subject, event: Event, decided: str):
        super().__init__(of, decided)
        self.event = event

    def at(self, s: Snapshot, last: Program) -> State | None:
        mine = isinstance(s, Program) and not s.delegate and self.event.subject in s.guards
        return State(f"only {self.subject}", "narrowed") if mine else None

    def done(self, e: Event, before: State, after: State) -> bool:
        return e is self.event


class FrozenInput(Tracked):
    """A size that was declared dynamic, and is a number as soon as it is exported."""

    kind = "symbol"

    def __init__(self, of: Subject, place: Slot, name: str):
        super().__init__(of, name or place.says(of.contract), place.says(of.contract) if name else "")
        self.place, self.value = place, place.expr(of.first)

    def before(self) -> State | None:
        return State("dynamic", "kept")

    def at(self, s: Snapshot, last: Program) -> State | None:
        return State(str(self.value), "frozen") if s is self.of.first else None

    def done(self, e: Event, before: State, after: State) -> bool:
        return e.kind == "replaced" and e.value == self.value


# ---------------------------------------------------------------- all of them
def tracked(of: Subject, events: Sequence[Event], exported: int) -> Iterator[Tracked]:
    """Everything that a model says, and what was decided beyond it after stage `exported`."""
    names = {d.sym.name: t for t, d in of.symbols.items() if d.sym is not None}
    every = [Slot("input", i, d) for i, spec in enumerate(of.contract.inputs) for d in range(len(spec.dims))]
    own: dict[str, Slot] = {}
    for s in of.contract.symbols:
        place = None if s.source.kind == "item" else Slot("input", s.source.input, s.source.index)
        yield SymbolItem(of, s, place, _torch_symbol(of, names.get(s.name)))
        if place is not None:
            own[s.name] = place
            if place.spec(of.contract).dims[place.dim] != s.dim:
                yield SizeItem(of, place)
    for place in every:
        dim = place.spec(of.contract).dims[place.dim]
        first = place.expr(of.first)
        if dim.value is not None or first is None:
            continue
        if dim.sym is None and place not in own.values():
            yield SizeItem(of, place)
        elif dim.sym is not None and own.get(dim.sym.name, place) != place:
            yield EqualityItem(of, own[dim.sym.name], place)
    for j, spec in enumerate(of.contract.outputs):
        for d, dim in enumerate(spec.dims):
            place = Slot("output", j, d)
            if dim.value is None and place.expr(of.first) is not None:
                yield SizeItem(of, place)
    for c in of.contract.constraints:
        yield RelationItem(of, c)
    yield from _decided(of, events, exported)


def _torch_symbol(of: Subject, name: str | None) -> Any:
    return next((s for s in (*of.first.known, *of.first.ranges) if str(s) == name), None)


def _decided(of: Subject, events: Sequence[Event], exported: int) -> Iterator[Tracked]:
    """Guards that came later and that the contract does not imply; those that moved a range or froze a size are told
    by it."""
    told = {(e.by.file, e.by.line) for e in events if e.kind in ("replaced", "range") and e.stage > exported}
    seen = {str(c) for c in of.contract.constraints}
    for e in events:
        free = {str(s) for s in getattr(e.subject, "free_symbols", ())}
        if e.kind != "guard" or e.stage <= exported or (e.by.file, e.by.line) in told or not free <= of.symbols.keys():
            continue
        try:
            new = {str(c) for c in to_constraints(e.subject, of.symbols, "")} - seen
        except KeepdimError:
            new = {str(e.subject)} - seen
        if new:
            seen |= new
            yield DecidedItem(of, e, ", ".join(sorted(new)))
