"""The facts about a model's sizes that an audit tracks: symbols, derived sizes, equalities, guards and asserts.

Each item gives its state in any snapshot, and recognises the decision that changed it from one state to the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from ..errors import KeepdimError
from ..fx.symbols import finite, to_constraints, to_dim
from ..shapes.contract import ASSERTED, Constraint, Contract, Spec, Symbol
from ..shapes.dim import Dim, range_text
from .locations import CodeLocation, of_guard
from .result import State
from .snapshot import FileInput, FileSnapshot, OpenRange, ProgramSnapshot, Snapshot, assert_text
from .watch import SizeDecision


class Baseline(NamedTuple):
    """The exported program and its contract, which later stages are compared with."""

    contract: Contract
    symbols: Mapping[str, Dim]  # torch's symbol → Dim
    first: ProgramSnapshot  # the program that was exported
    declared: Mapping[tuple[int, int], OpenRange]  # (input, dim) → what dynamic_shapes declares
    env: ShapeEnv | None = None  # its ShapeEnv

    def text(self, e: sympy.Expr) -> str:
        """An expression with the user's names."""
        try:
            return str(to_dim(e, self.symbols))
        except KeepdimError:
            names = {s: sympy.Symbol(str(self.symbols[str(s)])) for s in e.free_symbols if str(s) in self.symbols}
            return str(e.xreplace(names))


class TrackedItem:
    """One fact about sizes, tracked over all stages."""

    kind = ""
    user: CodeLocation | None = None  # the model's line that it comes from

    def __init__(self, baseline: Baseline, subject: str, where: str = ""):
        self.baseline, self.subject, self.where = baseline, subject, where

    def declared_state(self) -> State | None:
        """Its state as declared by the user, where that is known."""
        return None

    def state_in(self, s: Snapshot, last: ProgramSnapshot) -> State | None:
        """Its state in a snapshot, None where it is not visible; `last` is the last program before a file."""
        raise NotImplementedError

    def caused_by(self, e: SizeDecision, before: State, after: State) -> bool:
        """Whether this decision changed the state from `before` to `after`."""
        return False

    def _state_of(self, value: sympy.Expr, first: sympy.Expr, replaced: Mapping[sympy.Symbol, sympy.Expr]) -> State:
        """The state of an expression; it counts as kept if only its symbols were replaced."""
        if value in (first, first.xreplace(dict(replaced))):
            return State(self.baseline.text(value), "kept")
        if value.is_Integer:
            return State(str(value), "frozen")
        known = {str(s) for s in value.free_symbols} <= self.baseline.symbols.keys()
        return State(self.baseline.text(value), "narrowed" if known else "renamed")


class Slot(NamedTuple):
    """One dim of one input or output."""

    what: str  # input | output
    number: int
    dim: int

    def expr(self, p: ProgramSnapshot) -> sympy.Expr | None:
        found = (p.inputs if self.what == "input" else p.outputs)[self.number : self.number + 1]
        return found[0][self.dim] if found and found[0] is not None and self.dim < len(found[0]) else None

    def fact(self, f: FileSnapshot) -> FileInput | None:
        found = (f.inputs if self.what == "input" else f.outputs)[self.number : self.number + 1]
        return found[0] if found and found[0] is not None and self.dim < len(found[0].sizes) else None

    def spec(self, c: Contract) -> Spec:
        return (c.inputs if self.what == "input" else c.outputs)[self.number]

    def describe(self, c: Contract) -> str:
        one = "" if self.spec(c).dtype == "int" else f" dim {self.dim}"
        return f"{self.what} {self.number} {self.spec(c).name!r}{one}"


# ---------------------------------------------------------------- symbols and their ranges
class SymbolItem(TrackedItem):
    """A symbol: whether it is still dynamic, and its range."""

    kind = "symbol"

    def __init__(self, baseline: Baseline, symbol: Symbol, slot: Slot | None, torch_symbol: sympy.Symbol | None):
        dim = symbol.dim if slot is None else slot.spec(baseline.contract).dims[slot.dim]
        # As it is read, e.g. 4*d: the range of that expression is tracked.
        super().__init__(baseline, str(dim), baseline.contract.where(symbol))
        self.name, self.slot, self.symbol = symbol.name, slot, torch_symbol
        found = slot.expr(baseline.first) if slot is not None else None
        self.first = torch_symbol if found is None else found  # its expression in the input that it is read from
        self.declared = None if slot is None else baseline.declared.get((slot.number, slot.dim))
        self.range = self.declared or dim.bounds

    def declared_state(self) -> State | None:
        return None if self.declared is None else State(range_text(*self.declared), "kept")

    def state_in(self, s: Snapshot, last: ProgramSnapshot) -> State | None:
        if isinstance(s, FileSnapshot):
            return self._in_file(s, last)
        if self.symbol is None:
            return None  # an integer that the program passes as a tensor
        now = self._in_delegate(s, last) if s.delegate else self._now(s)
        if now is None:
            return None
        if not now.free_symbols:
            return State(str(now), "frozen")
        found = self._compared(*self._bounds(now, s))
        if now == self.first:
            return found
        known = {str(x) for x in now.free_symbols} <= self.baseline.symbols.keys()
        verdict = "narrowed" if known else "renamed" if found.verdict == "kept" else found.verdict
        return State(f"{found.text} as {self.baseline.text(now)}", verdict)

    def _now(self, p: ProgramSnapshot) -> sympy.Expr | None:
        found = self.slot.expr(p) if self.slot is not None else None
        return p.replaced.get(self.symbol, self.symbol) if found is None else found

    def _in_delegate(self, p: ProgramSnapshot, parent: ProgramSnapshot) -> sympy.Expr | None:
        """The symbol if a node of the delegate has it, or the constant where the parent's node of that name has it."""
        for name, sizes in p.nodes.items():
            for now, was in zip(sizes, parent.nodes.get(name, ()), strict=False):
                if was == self.first and not now.free_symbols and was.free_symbols:
                    return now
        shown = any(self.symbol in e.free_symbols for sizes in p.nodes.values() for e in sizes)
        return self.first if shown else None

    def _in_file(self, s: FileSnapshot, last: ProgramSnapshot) -> State | None:
        if s.contract is not None:
            found = [x for x in s.contract.symbols if x.name == self.name]
            if not found:
                return State("-", "dropped")
            inside = [x for _, c in s.delegates if c is not None for x in c.symbols if x.name == self.name]
            return self._compared(*reduce(_both, map(self._of_symbol, (found[0], *inside))))
        fact = self.slot.fact(s) if self.slot is not None else None
        now = self._now(last)
        if fact is None and self.slot is not None and self.slot.spec(self.baseline.contract).dtype == "int":
            return State("-", "dropped")  # ExecuTorch has no input for an integer there
        if self.slot is None or fact is None or now is None or not now.free_symbols:
            return None  # read from data, or already static
        if not fact.dynamic:
            return State(str(fact.sizes[self.slot.dim]), "frozen")
        name, d = self.slot.spec(self.baseline.contract).name, self.slot.dim
        checks = [i for _, c in s.delegates if c is not None for i in c.inputs if i.name == name and d < len(i.dims)]
        whole: OpenRange = (0, fact.sizes[d])
        return self._compared(*reduce(_both, (i.dims[d].bounds for i in checks), whole))

    def _of_symbol(self, found: Symbol) -> OpenRange:
        return found.dim.bounds if self.slot is None else found.source_dim.bounds

    def _bounds(self, e: sympy.Expr, p: ProgramSnapshot) -> OpenRange:
        """Bounds from the program's ranges, from its ShapeEnv since export, and from the memory plan."""
        lo, hi = p.ranges[e] if e in p.ranges and not e.is_Symbol else bounds_of(e, p, self.baseline.first)
        planned = p.planned.get(self.slot.spec(self.baseline.contract).name) if self.slot is not None else None
        if planned is not None and self.slot is not None:
            hi = int(min(_high(hi), planned[self.slot.dim]))
        return lo, hi

    def _compared(self, lo: int | None, hi: int | None) -> State:
        low, high, low0, high0 = _low(lo), _high(hi), _low(self.range[0]), _high(self.range[1])
        verdict = "narrowed" if low > low0 or high < high0 else "widened" if low < low0 or high > high0 else "kept"
        return State(range_text(lo, hi), verdict)

    def caused_by(self, e: SizeDecision, before: State, after: State) -> bool:
        """The decision that froze it, or that moved an end of its range."""
        symbols = self.first.free_symbols if self.first is not None else ()
        if after.verdict == "frozen":
            return e.kind == "replaced" and e.subject in symbols and bool(e.value.is_Integer)
        was, now = parse_range(before.text), parse_range(after.text)
        if e.kind == "planned" and self.slot is not None:
            same_input = e.subject == self.slot.spec(self.baseline.contract).name and self.slot.dim < len(e.value)
            return same_input and was[1] != now[1] == e.value[self.slot.dim]
        if e.kind == "replaced":
            return e.subject == self.symbol and " as " in after.text
        moved = any(a != b == x for a, b, x in zip(was, now, e.value, strict=True)) if e.kind == "range" else False
        return moved and e.subject in symbols


def bounds_of(e: sympy.Expr, p: ProgramSnapshot, first: ProgramSnapshot) -> OpenRange:
    """Bounds of an expression, from the program's ranges of its symbols and from its ShapeEnv since export."""
    table = {}
    for s in e.free_symbols:
        lo, hi = p.ranges.get(s, p.known.get(s, (None, None)))
        (lo0, hi0), (lo1, hi1) = first.known.get(s, (None, None)), p.known.get(s, (None, None))
        lo = lo1 if lo1 != lo0 and lo1 is not None else lo
        hi = hi1 if hi1 != hi0 and hi1 is not None else hi
        table[s] = ValueRanges(-int_oo if lo is None else lo, int_oo if hi is None else hi)
    found = bound_sympy(e, table)
    return finite(found.lower), finite(found.upper)


def _both(a: OpenRange, b: OpenRange) -> OpenRange:
    """The intersection."""
    low = [x for x in (a[0], b[0]) if x is not None]
    high = [x for x in (a[1], b[1]) if x is not None]
    return max(low, default=None), min(high, default=None)


def _low(x: int | None) -> float:
    return float("-inf") if x is None else x


def _high(x: int | None) -> float:
    return float("inf") if x is None else x


def parse_range(text: str) -> OpenRange:
    """The two ends of a range from its text."""
    lo, hi = re.findall(r"^(-?\d*)(?:\.\.(-?\d*))?", text)[0]
    return tuple(int(x) if x.strip("-") else None for x in (lo, hi))  # type: ignore[return-value]


# ---------------------------------------------------------------- sizes and equalities
class SizeItem(TrackedItem):
    """A size that is derived from others, or a size of an output."""

    kind = "size"

    def __init__(self, baseline: Baseline, slot: Slot):
        super().__init__(baseline, slot.describe(baseline.contract))
        self.slot, self.first = slot, slot.expr(baseline.first)

    def state_in(self, s: Snapshot, last: ProgramSnapshot) -> State | None:
        if isinstance(s, ProgramSnapshot):
            now = None if s.delegate else self.slot.expr(s)
            return None if now is None else self._state_of(now, self.first, s.replaced)
        if s.contract is not None:
            reported = str(self.slot.spec(s.contract).dims[self.slot.dim])
            said = str(self.slot.spec(self.baseline.contract).dims[self.slot.dim])
            return State(reported, "kept" if reported == said else "renamed")
        fact = self.slot.fact(s)
        if self.first is None or fact is None or (fact.dtype is None and self.slot.what == "output"):
            return None  # an integer that is computed at run time
        now = self.first.xreplace(dict(last.replaced))
        if now.is_Integer:
            return State(str(now), "kept")
        n = fact.sizes[self.slot.dim]
        if not fact.dynamic:
            return State(str(n), "frozen")
        top = bounds_of(now, last, self.baseline.first)[1]
        if self.slot.what == "input":
            return State(f"0..{n}", "dropped")
        return (
            State(self.baseline.text(self.first), "kept") if top is None or n >= top else State(f"0..{n}", "narrowed")
        )

    def caused_by(self, e: SizeDecision, before: State, after: State) -> bool:
        return e.kind == "replaced" and self.first is not None and e.subject in self.first.free_symbols


class EqualityItem(TrackedItem):
    """Two input dimensions that share one symbol."""

    kind = "equality"

    def __init__(self, baseline: Baseline, a: Slot, b: Slot):
        super().__init__(baseline, f"{a.describe(baseline.contract)} = {b.describe(baseline.contract)}")
        self.a, self.b = a, b

    def state_in(self, s: Snapshot, last: ProgramSnapshot) -> State | None:
        kept = State(str(self.a.spec(self.baseline.contract).dims[self.a.dim]), "kept")
        gone = State("-", "dropped")
        if isinstance(s, ProgramSnapshot):
            a, b = (None, None) if s.delegate else (self.a.expr(s), self.b.expr(s))
            if a is None or b is None:
                return None
            return State(self.baseline.text(a), "kept") if a == b else gone
        if s.contract is not None:
            a, b = (p.spec(s.contract).dims[p.dim] for p in (self.a, self.b))
            return kept if a == b else gone
        facts = self.a.fact(s), self.b.fact(s)
        if any(f is None or not f.dynamic for f in facts):
            return None
        names = [p.spec(self.baseline.contract).name for p in (self.a, self.b)]
        for _, c in s.delegates:
            here = {i.name: i.dims for i in c.inputs} if c is not None else {}
            if all(n in here for n in names) and here[names[0]][self.a.dim] == here[names[1]][self.b.dim]:
                return kept
        return gone


# ---------------------------------------------------------------- guards and asserts
class RelationItem(TrackedItem):
    """A guard that torch.export relies on, or an assert."""

    def __init__(self, baseline: Baseline, c: Constraint):
        super().__init__(baseline, str(c))
        self.kind = "assert" if c.sentence == ASSERTED else "guard"
        env = baseline.env
        found = [g for g in env.guards if self._means(env.replace(g.expr))] if env is not None else []
        self.guards = {g.expr for g in found}
        self.asserts = {assert_text(a) for a in baseline.first.asserts if self._means(a)}
        self.user = of_guard(found[0]) if found else None
        self.symbols = {t for t, d in baseline.symbols.items() if d.symbols() & (c.lhs.symbols() | c.rhs.symbols())}

    def _means(self, e: sympy.Expr) -> bool:
        try:
            return self.subject in [str(c) for c in to_constraints(e, self.baseline.symbols, "")]
        except KeepdimError:
            return False

    def state_in(self, s: Snapshot, last: ProgramSnapshot) -> State | None:
        kept, gone = State(self.subject, "kept"), State("-", "dropped")
        if isinstance(s, ProgramSnapshot):
            if s.delegate or not (self.guards or self.asserts):
                return None  # it is carried outside the program
            return kept if self.guards & s.guards or self.asserts & {assert_text(a) for a in s.asserts} else gone
        contracts = [c for c in (s.contract, *(c for _, c in s.delegates)) if c is not None]
        if any(self.subject in map(str, c.constraints) for c in contracts):
            return kept
        frozen = {str(a) for a, b in last.replaced.items() if b.is_Integer}
        return None if self.symbols <= frozen else gone

    def caused_by(self, e: SizeDecision, before: State, after: State) -> bool:
        return e.kind == "assert" and e.subject in self.asserts


class DecidedItem(TrackedItem):
    """A guard that a later stage added by specialising to the example."""

    kind = "guard"

    def __init__(self, baseline: Baseline, event: SizeDecision, decided: str):
        super().__init__(baseline, decided)
        self.event = event

    def state_in(self, s: Snapshot, last: ProgramSnapshot) -> State | None:
        mine = isinstance(s, ProgramSnapshot) and not s.delegate and self.event.subject in s.guards
        return State(f"only {self.subject}", "narrowed") if mine else None

    def caused_by(self, e: SizeDecision, before: State, after: State) -> bool:
        return e is self.event


class FrozenInput(TrackedItem):
    """A size that was declared dynamic but is static after export."""

    kind = "symbol"

    def __init__(self, baseline: Baseline, slot: Slot, name: str):
        super().__init__(
            baseline, name or slot.describe(baseline.contract), slot.describe(baseline.contract) if name else ""
        )
        self.slot, self.value = slot, slot.expr(baseline.first)

    def declared_state(self) -> State | None:
        return State("dynamic", "kept")

    def state_in(self, s: Snapshot, last: ProgramSnapshot) -> State | None:
        return State(str(self.value), "frozen") if s is self.baseline.first else None

    def caused_by(self, e: SizeDecision, before: State, after: State) -> bool:
        return e.kind == "replaced" and e.value == self.value


# ---------------------------------------------------------------- all items of a model
def tracked_items(baseline: Baseline, events: Sequence[SizeDecision], exported: int) -> Iterator[TrackedItem]:
    """All items of the exported program, and guards that were added after stage `exported`."""
    names = {d.sym.name: t for t, d in baseline.symbols.items() if d.sym is not None}
    every = [Slot("input", i, d) for i, spec in enumerate(baseline.contract.inputs) for d in range(len(spec.dims))]
    own: dict[str, Slot] = {}
    for s in baseline.contract.symbols:
        slot = None if s.source.kind == "item" else Slot("input", s.source.input, s.source.index)
        yield SymbolItem(baseline, s, slot, _torch_symbol(baseline, names.get(s.name)))
        if slot is not None:
            own[s.name] = slot
            if slot.spec(baseline.contract).dims[slot.dim] != s.dim:
                yield SizeItem(baseline, slot)
    for slot in every:
        dim = slot.spec(baseline.contract).dims[slot.dim]
        first = slot.expr(baseline.first)
        if dim.value is not None or first is None:
            continue
        if dim.sym is None and slot not in own.values():
            yield SizeItem(baseline, slot)
        elif dim.sym is not None and own.get(dim.sym.name, slot) != slot:
            yield EqualityItem(baseline, own[dim.sym.name], slot)
    for j, spec in enumerate(baseline.contract.outputs):
        for d, dim in enumerate(spec.dims):
            slot = Slot("output", j, d)
            if dim.value is None and slot.expr(baseline.first) is not None:
                yield SizeItem(baseline, slot)
    for c in baseline.contract.constraints:
        yield RelationItem(baseline, c)
    yield from _decided(baseline, events, exported)


def _torch_symbol(baseline: Baseline, name: str | None) -> sympy.Symbol | None:
    return next((s for s in (*baseline.first.known, *baseline.first.ranges) if str(s) == name), None)


def _decided(baseline: Baseline, events: Sequence[SizeDecision], exported: int) -> Iterator[TrackedItem]:
    """Guards added after export that the contract does not imply. A guard that also moved a range or froze a size is
    reported by that symbol's item."""
    reported = {(e.by.file, e.by.line) for e in events if e.kind in ("replaced", "range") and e.stage > exported}
    seen = {str(c) for c in baseline.contract.constraints}
    for e in events:
        free = {str(s) for s in getattr(e.subject, "free_symbols", ())}
        if (
            e.kind != "guard"
            or e.stage <= exported
            or (e.by.file, e.by.line) in reported
            or not free <= baseline.symbols.keys()
        ):
            continue
        try:
            new = {str(c) for c in to_constraints(e.subject, baseline.symbols, "")} - seen
        except KeepdimError:
            new = {str(e.subject)} - seen
        if new:
            seen |= new
            yield DecidedItem(baseline, e, ", ".join(sorted(new)))
