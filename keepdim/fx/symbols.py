"""Translation of torch's symbolic sizes (sympy expressions and relations) into Dims, without evaluating a ShapeEnv."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import reduce
from typing import TYPE_CHECKING

import sympy
import torch
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ..errors import fail
from ..shapes.bounds import INT64_MAX, INT64_MIN
from ..shapes.contract import Constraint
from ..shapes.dim import MAKE, Dim, decide, dmax, dmin

if TYPE_CHECKING:
    from sympy.logic.boolalg import Boolean
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

MAX_TRIED, MAX_DENOMINATOR = 2**16, 1000  # sizes that are tried one by one for a float factor; limit of its denominator


TORCH_INFINITY = 2**63 - 2  # torch's upper bound of an unbounded size is sys.maxsize - 1


class Symbols(Mapping[str, Dim]):
    """torch's symbol name → Dim: the contract's if it is known, else with the range of the ShapeEnv."""

    def __init__(self, known: Mapping[str, Dim], env: ShapeEnv | None = None):
        self.known = dict(known)
        self.ranges = {str(k): v for k, v in env.var_to_range.items()} if env is not None else {}

    def __getitem__(self, name: str) -> Dim:
        if name not in self.known:
            vr = self.ranges[name]
            self.known[name] = Dim.symbol(name, finite(vr.lower), finite(vr.upper))
        return self.known[name]

    def __contains__(self, name: object) -> bool:
        return name in self.known or name in self.ranges

    def __iter__(self) -> Iterator[str]:
        return iter({**self.ranges, **self.known})

    def __len__(self) -> int:
        return len({**self.ranges, **self.known})


def to_dim(value: int | torch.SymInt | sympy.Expr, symbols: Mapping[str, Dim]) -> Dim:
    """A Dim from an int, a SymInt or a sympy expression. Never evaluates the ShapeEnv."""
    if isinstance(value, int):
        return Dim.const(value)
    expr = value.node.expr if isinstance(value, torch.SymInt) else sympy.sympify(value)
    return _from_sympy(expr, symbols)


def to_size(value: int | torch.SymInt | sympy.Expr, symbols: Mapping[str, Dim]) -> Dim:
    """The Dim of a tensor's size, which is not negative even if its bounds do not prove it.

    >>> import sympy
    >>> from torch.utils._sympy.functions import FloorDiv
    >>> s = sympy.Symbol("s")
    >>> print(to_size(s - FloorDiv(s, 2), {"s": Dim.symbol("n", 1, 8)}))
    max(n - n//2, 0)
    """
    d = to_dim(value, symbols)
    lo = d.bounds[0]
    return d if lo is not None and lo >= 0 else dmax(d, 0)


def _from_sympy(e: sympy.Expr, symbols: Mapping[str, Dim]) -> Dim:
    def args() -> list[Dim]:
        return [_from_sympy(a, symbols) for a in e.args]

    kind = type(e).__name__
    if e.is_Integer:
        return Dim.const(int(e))
    if e.is_Symbol:
        if str(e) not in symbols:
            fail("contract", f"symbol {e}", "has no known source", "It depends on data that no input shows")
        return symbols[str(e)]
    if kind in _SYMPY:
        return _SYMPY[kind](*args())
    if kind in ("Pow", "PowByNatural") and e.args[1].is_Integer and e.args[1] >= 0:
        return reduce(operator.mul, [_from_sympy(e.args[0], symbols)] * int(e.args[1]), Dim.const(1))
    if (scaled := scaled_size(e, symbols)) is not None:
        size, ratio = scaled
        return _from_sympy(size, symbols) * ratio.numerator // Dim.const(ratio.denominator)
    fail("contract", f"size {with_user_names(e, symbols)}", f"uses {kind}, which a Dim cannot express")


def scaled_size(e: sympy.Expr, symbols: Mapping[str, Dim]) -> tuple[sympy.Expr, Fraction] | None:
    """int(1.5 * float(s)) as s and 3/2; None if float rounding may give another integer."""
    factor, rest = e.args[0].as_coeff_Mul() if type(e).__name__ in ("TruncToInt", "FloorToInt") else (0, e)
    if type(rest).__name__ != "ToFloat":
        return None
    ratio, (lo, hi) = Fraction(float(factor)), _from_sympy(rest.args[0], symbols).bounds
    if lo is None or lo < 0 or hi is None or ratio <= 0:
        return None
    if ratio.numerator * hi >= 2**53:  # e.g. 1.7: try a small ratio that is equal at every size in range
        ratio = ratio.limit_denominator(MAX_DENOMINATOR)
        if hi > MAX_TRIED or any(int(float(factor) * n) != n * ratio // 1 for n in range(lo, hi + 1)):
            return None
    return rest.args[0], ratio


_SYMPY: dict[str, Callable[..., Dim]] = {
    "Add": lambda *a: reduce(operator.add, a),
    "Mul": lambda *a: reduce(operator.mul, a),
    "FloorDiv": MAKE["floordiv"],
    "CleanDiv": MAKE["floordiv"],
    "CeilDiv": lambda a, b: -((-a) // b),
    "Mod": MAKE["mod"],
    "PythonMod": MAKE["mod"],
    "ModularIndexing": lambda a, b, c: (a // b) % c,
    "Max": MAKE["max"],
    "Min": MAKE["min"],
}


_RELATIONS = {
    "Equality": "eq", "Unequality": "ne", "StrictLessThan": "lt", "LessThan": "le",
    "StrictGreaterThan": "gt", "GreaterThan": "ge",
}  # fmt: skip


_NOT = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


def to_constraints(e: Boolean, symbols: Mapping[str, Dim], sentence: str) -> list[Constraint]:
    """A sympy relation as constraints; those that the ranges prove are omitted, one that they refute is an error."""
    if e is sympy.true or e is True:
        return []
    kind = type(e).__name__
    if kind == "And":
        return [c for a in e.args for c in to_constraints(a, symbols, sentence)]
    sides = (margin(e, symbols), "ge", Dim.const(0)) if kind == "Or" else _sides(e, symbols)
    c = Constraint(*sides, sentence)
    answer = decide(c.lhs, c.cmp, c.rhs)
    if answer is False:
        fail("contract", str(c), f"is false for every size in range. {sentence}")
    return [] if answer else [c]


def _sides(e: Boolean, symbols: Mapping[str, Dim]) -> tuple[Dim, str, Dim]:
    """One relation, or its negation."""
    negated = type(e).__name__ == "Not"
    relation = e.args[0] if negated else e
    cmp = _RELATIONS.get(type(relation).__name__)
    if cmp is None:
        fail(
            "contract",
            f"guard {with_user_names(e, symbols)}",
            f"is a {type(e).__name__}, which a constraint cannot express",
        )
    lhs, rhs = relation.args
    if any(abs(n) > INT64_MAX for n in relation.atoms(sympy.Integer)):  # "fits int64", with a size on the other side
        offset, lhs = (lhs - rhs).as_coeff_Add()
        rhs = sympy.Integer(max(INT64_MIN, min(INT64_MAX, -int(offset))))
    return _from_sympy(lhs, symbols), _NOT[cmp] if negated else cmp, _from_sympy(rhs, symbols)


def margin(value: bool | torch.SymBool | Boolean, symbols: Mapping[str, Dim]) -> Dim:
    """A Dim that is >= 0 exactly if a predicate over sizes holds; `or` is a max, `and` a min.

    >>> import sympy
    >>> a, b = sympy.symbols("a b")
    >>> print(margin(sympy.Or(a > 3, b <= 7), {"a": Dim.symbol("a", 0, 9), "b": Dim.symbol("b", 0, 9)}))
    max(-b + 7, a - 4)
    """
    e = value.node.expr if isinstance(value, torch.SymBool) else sympy.sympify(value)
    if e in (sympy.true, sympy.false):
        return Dim.const(0 if e else -1)
    if type(e).__name__ in ("And", "Or"):
        return (dmax if type(e).__name__ == "Or" else dmin)(*(margin(a, symbols) for a in e.args))
    lhs, cmp, rhs = _sides(e, symbols)
    over, under = lhs - rhs, rhs - lhs
    margins = {"ge": over, "gt": over - 1, "le": under, "lt": under - 1, "ne": dmax(over, under) - 1}
    return margins[cmp] if cmp in margins else dmin(over, under)


def is_data(symbol: sympy.Symbol) -> bool:
    """Whether a symbol of torch is unbacked (data-dependent)."""
    return symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))


def with_user_names(text: object, symbols: Mapping[str, object]) -> str:
    """A text or expression of torch with the user's names instead of torch's symbols, where there are any.

    >>> with_user_names("u0 <= s77", {"s77": Dim.symbol("batch", 1, 8)})
    'u0 <= batch'
    """
    return re.sub(r"\b[a-z]+\d+\b", lambda m: str(symbols[m[0]]) if m[0] in symbols else m[0], str(text))


def declared_names(env: ShapeEnv | None) -> dict[str, str]:
    """torch's symbol → the name of the Dim that it was declared with. Empty after torch.export.load.

    A size that is declared as `2*n` names no symbol, but torch has a source called `n` for the symbol of the Dim.
    """
    if env is None:
        return {}
    texts = env.source_name_to_debug_name  # "L['x'].size()[0]" → "batch"
    found = {s: [texts.get(x.name, x.name) for x in sources] for s, sources in env.var_to_sources.items()}
    return {str(s): name for s, names in found.items() for name in names[:1] if name.isidentifier()}


_INPUT_SIZE = r"L\['(\w+)'\]((?:\[[^\]]+\])*)\.size\(\)\[(\d+)\]"  # torch.export's text for a size of an input


def with_input_names(text: str) -> str:
    """A message of torch.export that names a size by its Dim, or else by its input, not as `L['x'].size()[0]`.

    >>> with_input_names("values of n = L['x'].size()[0] satisfy L['x'].size()[0] <= L['y'][1].size()[2]")
    "values of n (input 'x' dim 0) satisfy n <= input 'y[1]' dim 2"
    """
    names = {m[2]: m[1] for m in re.finditer(rf"(\w+) = ({_INPUT_SIZE})", text)}
    text = re.sub(rf"(\w+) = {_INPUT_SIZE}", r"\1 (input '\2\3' dim \4)", text)
    return re.sub(_INPUT_SIZE, lambda m: names.get(m[0], f"input '{m[1]}{m[2]}' dim {m[3]}"), text)


def expr_of(value: int | torch.SymInt) -> sympy.Expr:
    """The sympy expression of a size."""
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)


def finite(bound: sympy.Expr) -> int | None:
    """An end of one of torch's ranges; None if it is infinite."""
    return int(bound) if bound.is_Integer and abs(bound) < TORCH_INFINITY else None
