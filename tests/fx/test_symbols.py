"""Dims and constraints from torch's sympy expressions, compared with sympy at sampled values."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch.export import export
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min, Mod, PythonMod, ToFloat, TruncToInt

import keepdim
from keepdim.fx import symbols
from keepdim.fx.nodes import shape_env_of
from keepdim.shapes.dim import CMPS, Dim

N, M = sympy.symbols("n m", integer=True, positive=True)
DIMS = {"n": Dim.symbol("n", 1, 12), "m": Dim.symbol("m", 2, 7)}
EXPRESSIONS: list[sympy.Expr] = [
    sympy.Integer(5),
    N,
    2 * N + 3 * M - 1,
    N * M,
    N**3,
    FloorDiv(N + 5, M),
    CeilDiv(N, 3),
    Mod(N, 4),
    PythonMod(N - 9, M),
    Max(N, M) + Min(N, 3),
    TruncToInt(1.5 * ToFloat(N)),
    TruncToInt(1.7 * ToFloat(N)),
]


@pytest.mark.parametrize("expr", EXPRESSIONS, ids=str)
def test_a_size_has_the_value_of_its_expression(expr: sympy.Expr) -> None:
    """At every value of its symbols."""
    dim = symbols.to_dim(expr, DIMS)
    for n, m in itertools.product(range(1, 13), range(2, 8)):
        assert dim.eval({"n": n, "m": m}) == int(expr.subs({N: n, M: m})), (n, m)


def test_ints_and_symbolic_ints() -> None:
    """An int is a constant; a SymInt is its expression, and its ShapeEnv learns nothing."""
    assert symbols.to_dim(7, {}).value == 7 and symbols.expr_of(7) == sympy.Integer(7)
    ep = export(torch.nn.ReLU(), (torch.randn(3, 4),), dynamic_shapes=({0: torch.export.Dim("n", min=1, max=9)},))
    size = next(n.meta["val"] for n in ep.graph.nodes if n.op == "placeholder").shape[0]
    env = shape_env_of([size])
    guards, name = len(env.guards), str(symbols.expr_of(size))
    assert str(symbols.to_dim(size * 2 + 1, {name: Dim.symbol("n", 1, 9)})) == "2*n + 1"
    assert len(env.guards) == guards


def test_a_size_is_never_negative() -> None:
    """If its bounds do not prove that, it becomes a max with 0."""
    assert str(symbols.to_size(N - 3, DIMS)) == "max(n - 3, 0)"
    assert symbols.to_size(N + 3, DIMS) == symbols.to_dim(N + 3, DIMS)


@pytest.mark.parametrize(
    "expr, sentence",
    [
        (sympy.Symbol("u0"), r"\[contract\] symbol u0: has no known source"),
        (sympy.sin(N), r"\[contract\] size sin\(n\): uses sin, which a Dim cannot express"),
        (N ** sympy.Rational(1, 2), r"uses Pow, which a Dim cannot express"),
        (TruncToInt(-1.5 * ToFloat(N)), r"uses TruncToInt, which a Dim cannot express"),
    ],
    ids=str,
)
def test_what_is_not_a_size(expr: sympy.Expr, sentence: str) -> None:
    """An error that names the expression."""
    with pytest.raises(keepdim.KeepdimError, match=sentence):
        symbols.to_dim(expr, DIMS)


def test_float_factors_that_round_differently_are_not_rational() -> None:
    """A factor that no small ratio equals at every size in range, or an unbounded size, has no exact Dim."""
    assert symbols.scaled_size(TruncToInt(1.5 * ToFloat(N)), DIMS) == (N, sympy.Rational(3, 2))
    assert symbols.scaled_size(N + 1, DIMS) is None
    wide = {"n": Dim.symbol("n", 1, 2**20)}
    assert symbols.scaled_size(TruncToInt(0.123456789 * ToFloat(N)), wide) is None
    assert symbols.scaled_size(TruncToInt(1.5 * ToFloat(N)), {"n": Dim.symbol("n", 1, None)}) is None


RELATIONS: list[Callable[[Any, Any], Any]] = [sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge]


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda r: r.__name__)
@pytest.mark.parametrize("negated", [False, True])
def test_relations(relation: Callable[[Any, Any], Any], negated: bool) -> None:
    """The constraint and the margin hold exactly where the relation does."""
    e = sympy.Not(relation(N, M), evaluate=False) if negated else relation(N, M)
    (constraint,) = symbols.to_constraints(e, DIMS, "why")
    margin = symbols.margin(e, DIMS)
    for n, m in itertools.product(range(1, 13), range(2, 8)):
        want = bool(e.subs({N: n, M: m}).doit()) if not negated else not bool(relation(n, m))
        at = {"n": n, "m": m}
        assert CMPS[constraint.cmp][1](constraint.lhs.eval(at), constraint.rhs.eval(at)) == want
        assert (margin.eval(at) >= 0) == want
    assert constraint.sentence == "why"


def test_and_or_and_what_ranges_prove() -> None:
    """And splits, Or is one constraint on a max; what is always true is left out, what never is an error."""
    both = sympy.And(N > 3, M < 5)
    assert len(symbols.to_constraints(both, DIMS, "")) == 2
    (either,) = symbols.to_constraints(sympy.Or(N > 3, M < 5), DIMS, "")
    for n, m in itertools.product(range(1, 13), range(2, 8)):
        at = {"n": n, "m": m}
        assert (either.lhs.eval(at) >= 0) == (n > 3 or m < 5)
        assert (symbols.margin(both, DIMS).eval(at) >= 0) == (n > 3 and m < 5)
    assert symbols.to_constraints(sympy.true, DIMS, "") == [] == symbols.to_constraints(N < 13, DIMS, "")
    assert symbols.margin(sympy.true, DIMS).value == 0 and symbols.margin(sympy.false, DIMS).value == -1
    with pytest.raises(keepdim.KeepdimError, match=r"is false for every size in range\. The mask needs it\."):
        symbols.to_constraints(N > 12, DIMS, "The mask needs it")
    with pytest.raises(keepdim.KeepdimError, match="is a Symbol, which a constraint cannot express"):
        symbols.to_constraints(sympy.Symbol("b"), DIMS, "")


def test_the_symbols_of_an_export() -> None:
    """Known ones by the contract, others with the range of the ShapeEnv; infinite ends are None."""
    env = ShapeEnv()
    u = env.create_unbacked_symint()
    known = symbols.Symbols({"n": DIMS["n"]}, env)
    name = str(u.node.expr)
    assert "n" in known and name in known and "z" not in known
    assert known["n"] is DIMS["n"] and set(known) == {"n", name} and len(known) == 2
    assert known[name].bounds == (None, None) and symbols.is_data(u.node.expr) and not symbols.is_data(N)
    with pytest.raises(KeyError):
        known["z"]
    assert len(symbols.Symbols({})) == 0
    assert symbols.finite(sympy.Integer(7)) == 7
    assert symbols.finite(sympy.oo) is None and symbols.finite(sympy.Integer(symbols.TORCH_INFINITY)) is None
