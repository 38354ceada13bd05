"""Dims: integer expressions over symbols, in a normal form, with bounds on every one.

A `Dim` is a sum of terms; a term is a coefficient times a product of atoms; an atom is a symbol or one of
floordiv, mod, max, min over Dims. Sums and products are expanded and sorted, so equal polynomials are equal
objects. Arithmetic is checked int64, as in `runtime/core/dims.cpp`, which evaluates the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from ..errors import KeepdimError, fail
from . import bounds
from .bounds import Bounds, checked

MAX_SIZE, MAX_DEPTH = 2000, 60  # parts of an expression written out, and nesting depth of operations


@dataclass(frozen=True)
class Sym:
    """A named integer with a range. Symbols of equal name are the same symbol."""

    name: str
    lo: int | None = field(compare=False)
    hi: int | None = field(compare=False)

    @property
    def bounds(self) -> Bounds:
        """Its range."""
        return self.lo, self.hi

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Op:
    """An operation other than sums and products."""

    kind: str  # floordiv, mod, max, min
    args: tuple[Dim, ...]

    @property
    def bounds(self) -> Bounds:
        """Its bounds, from those of its operands."""
        return BOUNDS[self.kind](*(a.bounds for a in self.args))

    def __str__(self) -> str:
        if self.kind in ("max", "min"):
            return f"{self.kind}({', '.join(map(str, self.args))})"
        sign = "//" if self.kind == "floordiv" else "%"
        return (
            f" {sign} ".join(a.operand() for a in self.args)
            if sign == "%"
            else sign.join(a.operand() for a in self.args)
        )


Atom = Sym | Op
Factors = tuple[Atom, ...]


class Dim:
    """A normalised integer expression. Compare with ==; `<` and friends decide from bounds or raise.

    >>> s = Dim.symbol("s", 1, 256)
    >>> (2 * s + 1) * s, (4 * s + 6) // 2, (2 * s).bounds
    (Dim('2*s*s + s'), Dim('2*s + 3'), (2, 512))
    >>> s >= 1, (s + s == 2 * s)
    (True, True)
    """

    __slots__ = ("_hash", "bounds", "depth", "size", "terms")
    terms: tuple[tuple[Factors, int], ...]
    bounds: Bounds
    size: int  # number of symbols and constants, written out
    depth: int  # nesting depth of operations

    def __init__(self, terms: Mapping[Factors, int]):
        ops = [a for f in terms for a in f if isinstance(a, Op)]
        self.size = sum(1 + len(f) for f in terms) + sum(d.size for a in ops for d in a.args)
        self.depth = max((d.depth + 1 for a in ops for d in a.args), default=0)
        _check_size(self.size, self.depth)
        kept = [(f, checked(c, "a coefficient")) for f, c in terms.items() if c != 0]
        kept.sort(key=lambda t: (-len(t[0]), [str(a) for a in t[0]]))
        self.terms = tuple(kept)
        self._hash = hash(self.terms if self.value is None else self.value)  # equal to its int
        self.bounds = reduce(bounds.add, (_term_bounds(f, c) for f, c in kept), bounds.ZERO)

    # -- making
    @staticmethod
    def const(value: int) -> Dim:
        """A constant."""
        return Dim({(): value})

    @staticmethod
    def symbol(name: str, lo: int | None, hi: int | None) -> Dim:
        """A named integer in lo..hi, inclusive; None is unbounded."""
        if not name.isidentifier():
            fail("dims", f"symbol {name!r}", "is not an identifier")
        if lo is not None and hi is not None and lo > hi:
            fail("dims", f"symbol {name!r}", f"has an empty range ({lo}..{hi})")
        return Dim({(Sym(name, lo, hi),): 1})

    @staticmethod
    def of(value: Dim | int) -> Dim:
        """An int as a constant; a Dim unchanged."""
        return value if isinstance(value, Dim) else Dim.const(value)

    # -- reading
    @property
    def value(self) -> int | None:
        """The value, if this is a constant."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @property
    def sym(self) -> Sym | None:
        """The symbol, if this is a bare symbol."""
        if len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1:
            atom = self.terms[0][0][0]
            return atom if isinstance(atom, Sym) else None
        return None

    def symbols(self) -> set[str]:
        """Names of all symbols in it."""
        return {s.name for s in self.syms()}

    def syms(self) -> set[Sym]:
        """All symbols in it, with their ranges."""
        out: set[Sym] = set()
        for factors, _ in self.terms:
            for atom in factors:
                out |= {atom} if isinstance(atom, Sym) else set().union(*(a.syms() for a in atom.args))
        return out

    def linear_in(self, name: str) -> tuple[Dim, Dim] | None:
        """(mul, add) with self == mul*name + add and name in neither; None if there is no such form."""
        mul: dict[Factors, int] = {}
        add: dict[Factors, int] = {}
        for factors, c in self.terms:
            here = [i for i, a in enumerate(factors) if isinstance(a, Sym) and a.name == name]
            rest = factors[: here[0]] + factors[here[0] + 1 :] if here else factors
            if name in Dim({rest: 1}).symbols():
                return None
            (mul if here else add)[rest] = c
        return (Dim(mul), Dim(add)) if mul else None

    def substitute(self, values: Mapping[str, Dim]) -> Dim:
        """Replace symbols by Dims."""
        if self.value is not None:
            return self

        def atom(a: Atom) -> Dim:
            if isinstance(a, Sym):
                return values.get(a.name, Dim({(a,): 1}))
            return MAKE[a.kind](*(d.substitute(values) for d in a.args))

        return sum((reduce(lambda x, a: x * atom(a), f, Dim.const(c)) for f, c in self.terms), Dim.const(0))

    def eval(self, values: Mapping[str, int]) -> int:
        """The value for these symbols, in checked int64."""

        def atom(a: Atom) -> int:
            if isinstance(a, Sym):
                if a.name not in values:
                    fail("dims", f"symbol {a.name!r}", f"has no value in {dict(values)}")
                return values[a.name]
            return EVAL[a.kind]([d.eval(values) for d in a.args])

        total = 0
        for factors, c in self.terms:
            term = reduce(lambda x, a: checked(x * atom(a), str(self)), factors, c)
            total = checked(total + term, str(self))
        return total

    def over(self, symbols: Mapping[str, Any], functions: Mapping[str, Callable[[Any, Any], Any]]) -> Any:
        """Evaluate over other integer types, such as jax dims; `functions` are their floordiv, mod, max and min.

        >>> s = Dim.symbol("s", 1, 8)
        >>> dmax(2 * s + 1, 4).over({"s": 3}, {"max": max})
        7
        """
        total: Any = 0
        for factors, term in self.terms:
            for a in factors:
                if isinstance(a, Sym):
                    term = term * symbols[a.name]
                else:
                    term = term * reduce(functions[a.kind], (d.over(symbols, functions) for d in a.args))
            total = total + term
        return total

    # -- arithmetic
    def __add__(self, other: Dim | int) -> Dim:
        terms = dict(self.terms)
        for f, c in Dim.of(other).terms:
            terms[f] = terms.get(f, 0) + c
        return Dim(terms)

    def __mul__(self, other: Dim | int) -> Dim:
        terms: dict[Factors, int] = {}
        other = Dim.of(other)
        _check_size(len(self.terms) * len(other.terms))
        for f, c in self.terms:
            for g, d in other.terms:
                key = tuple(sorted(f + g, key=str))
                terms[key] = terms.get(key, 0) + c * d
        return Dim(terms)

    def __neg__(self) -> Dim:
        return self * -1

    def __sub__(self, other: Dim | int) -> Dim:
        return self + -Dim.of(other)

    def __rsub__(self, other: int) -> Dim:
        return -self + other

    def __floordiv__(self, other: Dim | int) -> Dim:
        return floordiv(self, Dim.of(other))

    def __mod__(self, other: Dim | int) -> Dim:
        return mod(self, Dim.of(other))

    __radd__, __rmul__ = __add__, __mul__

    # -- comparing
    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.value == other
        return isinstance(other, Dim) and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __lt__(self, other: Dim | int) -> bool:
        return proven(self, "lt", other)

    def __le__(self, other: Dim | int) -> bool:
        return proven(self, "le", other)

    def __gt__(self, other: Dim | int) -> bool:
        return proven(self, "gt", other)

    def __ge__(self, other: Dim | int) -> bool:
        return proven(self, "ge", other)

    def __bool__(self) -> bool:
        return not proven(self, "eq", 0)

    # -- writing
    def __str__(self) -> str:
        text = ""
        for factors, c in self.terms:
            sign = ("-" if c < 0 else "") if not text else (" - " if c < 0 else " + ")
            number = [str(abs(c))] if abs(c) != 1 or not factors else []
            alone = len(factors) == 1 and not number and (c > 0 or bool(text))  # -(s//2) is not -s//2
            text += sign + "*".join(number + [str(a) if alone else _factor(a) for a in factors])
        return text or "0"

    def operand(self) -> str:
        """The text as an operand of // and %: in parentheses unless it is an atom or a number."""
        plain = self.sym is not None or (self.value is not None and self.value >= 0) or _call(self)
        return str(self) if plain else f"({self})"

    def __repr__(self) -> str:
        return f"Dim({str(self)!r})"


def _check_size(size: int, depth: int = 0) -> None:
    """Limit the size: sums and products are expanded, so a small file could otherwise exhaust memory."""
    if size > MAX_SIZE or depth > MAX_DEPTH:
        fail("dims", "expression", f"has {size} parts, {depth} deep, more than {MAX_SIZE} or {MAX_DEPTH}",
             "Give the sizes of the model fewer names that depend on each other")  # fmt: skip


def _term_bounds(factors: Factors, c: int) -> Bounds:
    start: Bounds = (c, c)
    return reduce(bounds.mul, (a.bounds for a in factors), start)


def _call(d: Dim) -> bool:
    if len(d.terms) != 1 or d.terms[0][1] != 1 or len(d.terms[0][0]) != 1:
        return False
    atom = d.terms[0][0][0]
    return isinstance(atom, Op) and atom.kind in ("max", "min")


def _factor(atom: Atom) -> str:
    return f"({atom})" if isinstance(atom, Op) and atom.kind in ("floordiv", "mod") else str(atom)


# ---------------------------------------------------------------- the four operations
def never_zero(d: Dim) -> bool:
    """Whether its bounds exclude zero; the same test as the runtime's."""
    lo, hi = d.bounds
    return (lo is not None and lo > 0) or (hi is not None and hi < 0)


def _nonzero(b: Dim) -> None:
    lo, hi = b.bounds
    if not never_zero(b):
        fail("dims", f"divisor {b}", f"can be zero (its bounds are {range_text(lo, hi)})")


def floordiv(a: Dim, b: Dim) -> Dim:
    """a // b as in Python, simplified if it is exact or decided by bounds."""
    _nonzero(b)
    d = b.value
    if d is not None:
        whole = Dim({f: c // d for f, c in a.terms if c % d == 0})
        rest = Dim({f: c for f, c in a.terms if c % d})
        if whole.terms and rest != a:
            return whole + floordiv(rest, b)
        if not rest.terms:
            return whole
    elif a == b:
        return Dim.const(1)
    elif (quotient := _exact(a, b)) is not None:
        return quotient
    lo, hi = bounds.floordiv(a.bounds, b.bounds)
    if lo is not None and lo == hi:
        return Dim.const(lo)
    return Dim({(Op("floordiv", (a, b)),): 1})


def _exact(a: Dim, b: Dim) -> Dim | None:
    """a / b if b is one term that divides every term of a."""
    if len(b.terms) != 1:
        return None
    (bf, bc) = b.terms[0]
    out: dict[Factors, int] = {}
    for f, c in a.terms:
        left = list(f)
        for atom in bf:
            if atom not in left:
                return None
            left.remove(atom)
        if c % bc:
            return None
        out[tuple(left)] = c // bc
    return Dim(out)


def mod(a: Dim, b: Dim) -> Dim:
    """a % b as in Python (the sign of b)."""
    _nonzero(b)
    d = b.value
    if d is not None:
        a = Dim({f: c % d for f, c in a.terms})  # multiples of d drop out, coefficients shrink
    elif _exact(a, b) is not None:
        return Dim.const(0)
    if a.value is not None and d is not None:
        return Dim.const(a.value % d)
    lo, hi = a.bounds
    blo = b.bounds[0]
    if lo is not None and lo >= 0 and hi is not None and blo is not None and hi < blo:
        return a
    return Dim({(Op("mod", (a, b)),): 1})


def _covers(k: Dim, cmp: str, d: Dim) -> bool:
    """Whether k makes d redundant. A constant is dropped only if k's bounds imply it: max(x, 1) may be a divisor."""
    if d.value is None:
        return decide(k, cmp, d) is True
    lo, hi = k.bounds
    return (lo is not None and lo >= d.value) if cmp == "ge" else (hi is not None and hi <= d.value)


def _extreme(kind: str, args: Sequence[Dim | int]) -> Dim:
    flat: list[Dim] = []
    for d in map(Dim.of, args):
        inner = d.terms[0][0][0] if len(d.terms) == 1 and d.terms[0][1] == 1 and len(d.terms[0][0]) == 1 else None
        flat += inner.args if isinstance(inner, Op) and inner.kind == kind else (d,)
    cmp = "ge" if kind == "max" else "le"
    kept: list[Dim] = []
    for d in sorted(set(flat), key=lambda d: (d.value is not None, str(d))):
        if any(_covers(k, cmp, d) for k in kept):
            continue
        kept = [k for k in kept if not decide(d, cmp, k)] + [d]
    return kept[0] if len(kept) == 1 else Dim({(Op(kind, tuple(kept)),): 1})


def dmax(*args: Dim | int) -> Dim:
    """The maximum.

    >>> s = Dim.symbol("s", 1, 8)
    >>> dmax(s, 1), dmax(s, 9), dmax(s, 4)
    (Dim('s'), Dim('9'), Dim('max(s, 4)'))
    """
    return _extreme("max", args)


def dmin(*args: Dim | int) -> Dim:
    """The minimum."""
    return _extreme("min", args)


def _eval_div(kind: str) -> Callable[[list[int]], int]:
    def run(v: list[int]) -> int:
        if v[1] == 0:
            fail("dims", kind, f"divides {v[0]} by zero")
        return checked(v[0] // v[1] if kind == "floordiv" else v[0] % v[1], kind)

    return run


BOUNDS: dict[str, Callable[..., Bounds]] = {
    "floordiv": bounds.floordiv, "mod": bounds.mod, "max": bounds.maximum, "min": bounds.minimum,
}  # fmt: skip
MAKE: dict[str, Callable[..., Dim]] = {"floordiv": floordiv, "mod": mod, "max": dmax, "min": dmin}
EVAL: dict[str, Callable[[list[int]], int]] = {
    "floordiv": _eval_div("floordiv"), "mod": _eval_div("mod"), "max": max, "min": min,
}  # fmt: skip

# ---------------------------------------------------------------- comparing
CMPS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "eq": ("==", lambda a, b: a == b),
    "ne": ("!=", lambda a, b: a != b),
    "lt": ("<", lambda a, b: a < b),
    "le": ("<=", lambda a, b: a <= b),
    "gt": (">", lambda a, b: a > b),
    "ge": (">=", lambda a, b: a >= b),
}


def decide(lhs: Dim | int, cmp: str, rhs: Dim | int) -> bool | None:
    """True or False if the bounds of the difference prove it for every value, else None.

    >>> s = Dim.symbol("s", 2, 8)
    >>> decide(s, "ge", 2), decide(s, "eq", 9), decide(s, "lt", 5)
    (True, False, None)
    """
    if cmp in ("ne", "gt", "ge"):
        inverse = decide(lhs, {"ne": "eq", "gt": "le", "ge": "lt"}[cmp], rhs)
        return None if inverse is None else not inverse
    try:
        d = Dim.of(lhs) - rhs
        less, more = _negative(d), _negative(-d)
        if cmp == "eq":
            return False if less or more else True if _negative(d - 1) and _negative(-d - 1) else None
        if cmp == "lt":
            return True if less else False if _negative(-d - 1) else None
        return True if _negative(d - 1) else False if more else None
    except KeepdimError:  # a bound of the difference overflows: undecided
        return None


def _negative(d: Dim, depth: int = 4) -> bool:
    """Whether d < 0 for every value: by its bounds, or by those of an upper bound of d."""
    hi = d.bounds[1]
    if hi is not None and hi < 0:
        return True
    for factors, c in d.terms if depth else ():
        if len(factors) != 1 or not isinstance(factors[0], Op):
            continue
        op, rest = factors[0], d - Dim({factors: c})
        if op.kind == "floordiv" and (op.args[1].bounds[0] or 0) > 0:  # b*(a//b) is a - r with 0 <= r < b
            a, b = op.args
            return _negative(rest * b + (a if c > 0 else a - b + 1) * c, depth - 1)
        if op.kind in ("max", "min"):
            tries = (_negative(rest + c * x, depth - 1) for x in op.args)
            return any(tries) if (op.kind == "min") == (c > 0) else all(tries)
    return False


def proven(lhs: Dim | int, cmp: str, rhs: Dim | int) -> bool:
    """`decide`, but an undecidable comparison is an error."""
    answer = decide(lhs, cmp, rhs)
    if answer is None:
        fail(
            "dims",
            f"{lhs} {CMPS[cmp][0]} {rhs}",
            f"is true for some sizes only (bounds {Dim.of(lhs).bounds}, {Dim.of(rhs).bounds})",
        )
    return answer


def range_text(lo: int | None, hi: int | None) -> str:
    """`1..256`, `1..` without an upper end, `..5` without a lower one."""
    return f"{'' if lo is None else lo}..{'' if hi is None else hi}"
