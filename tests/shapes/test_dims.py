"""Dims: the normal form, what is simplified and decided, and that Python and C++ read the same table alike."""

from itertools import product

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from keepdim import KeepdimError, _native
from keepdim.ir.text import parse
from keepdim.shapes.bounds import INT64_MAX, INT64_MIN
from keepdim.shapes.contract import Contract, DimTable, Source, Spec, Symbol
from keepdim.shapes.dim import CMPS, Dim, decide, dmax, dmin, proven

RANGES = {"s": (1, 8), "t": (0, 5), "u": (-4, 3)}
S, T, U = (Dim.symbol(name, *RANGES[name]) for name in RANGES)
N = Dim.symbol("n", 1, None)  # no upper end
SYMBOLS = {"s": S, "t": T, "u": U, "n": N}
POINTS = [dict(zip(RANGES, p, strict=True)) for p in product(*(range(lo, hi + 1) for lo, hi in RANGES.values()))]


# ---------------------------------------------------------------- the normal form
@pytest.mark.parametrize(
    "dim, text, lo, hi",
    [
        (Dim.const(0), "0", 0, 0),
        (Dim.const(-5), "-5", -5, -5),
        (S, "s", 1, 8),
        (-S, "-s", -8, -1),
        (S + S, "2*s", 2, 16),
        (S - S, "0", 0, 0),
        (3 - S, "-s + 3", -5, 2),
        (S - 3, "s - 3", -2, 5),
        (T + S, "s + t", 1, 13),
        (S - T, "s - t", -4, 8),
        (T * S * 2, "2*s*t", 0, 80),
        (2 * S * S + S + 1, "2*s*s + s + 1", 4, 137),
        ((S + 1) * (S - 1), "s*s - 1", 0, 63),
        (N + 1, "n + 1", 2, None),
        (-N, "-n", None, -1),
        (N * U, "n*u", None, None),
        (S // 2, "s//2", 0, 4),
        (-(S // 2), "-(s//2)", -4, 0),
        ((-S) // 2, "(-s)//2", -4, -1),
        (T - S // 2, "-(s//2) + t", -4, 5),
        (S - T // 2, "s - t//2", -1, 8),
        (2 * (S // 2), "2*(s//2)", 0, 8),
        ((S + 1) // 2, "(s + 1)//2", 1, 4),
        ((4 * S + 6) // 2, "2*s + 3", 5, 19),
        ((4 * S + 3) // 2, "2*s + 1", 3, 17),
        ((2 * S + T) // 2, "s + t//2", 1, 10),
        ((S * T) // S, "t", 0, 5),
        ((2 * N * S) // (2 * N), "s", 1, 8),
        (S // 9, "0", 0, 0),
        ((S // 2) // 3, "(s//2)//3", 0, 1),
        (S // (T + 1), "s//(t + 1)", 0, 8),
        (S // -2, "s//(-2)", -4, -1),
        (N // S, "n//s", 0, None),
        (S % 3, "s % 3", 0, 2),
        (S % 9, "s", 1, 8),
        ((4 * S + 5) % 4, "1", 1, 1),
        ((5 * S) % 4, "s % 4", 0, 3),
        ((S * T) % S, "0", 0, 0),
        (S % -3, "(-2*s) % (-3)", -2, 0),
        (2 * (S % 3) + 1, "2*(s % 3) + 1", 1, 5),
        (dmax(S, T), "max(s, t)", 1, 8),
        (dmax(S, T, 3), "max(s, t, 3)", 3, 8),
        (dmax(S, 1), "s", 1, 8),
        (dmax(S, 9), "9", 9, 9),
        (dmax(dmax(S, T), 3, S), "max(s, t, 3)", 3, 8),
        (dmax(S, S + 1), "s + 1", 2, 9),
        (dmin(S, T), "min(s, t)", 0, 5),
        (dmin(N, 4), "min(n, 4)", 1, 4),
        (dmin(S, 0), "0", 0, 0),
        (3 * dmax(S, T) - 2, "3*max(s, t) - 2", 1, 22),
        (dmax(S // 2, T % 3), "max(s//2, t % 3)", 0, 4),
        (dmax(S, T) // 2, "max(s, t)//2", 0, 4),
        (
            T // dmax(S // dmax(S - T, 1), 1),
            "t//max(s//max(s - t, 1), 1)",
            0,
            5,
        ),  # the max that makes it a divisor stays
    ],
    ids=str,
)
def test_text_and_bounds(dim, text, lo, hi):
    """Expression, printed form, lower and upper bound."""
    assert (str(dim), dim.bounds) == (text, (lo, hi))


@pytest.mark.parametrize(
    "a, b",
    [
        ((S + T) * (S - T), S * S - T * T),
        ((S + 1) * (S + 1), S * S + 2 * S + 1),
        (2 * (S + T) - S, T + S + T),
        (dmax(S, T), dmax(T, S, S)),
        (S * T * U, U * S * T),
        ((S + T) // 2, (T + S) // 2),
        (S - S, Dim.const(0)),
    ],
    ids=str,
)
def test_equal_polynomials_are_equal_objects(a, b):
    """Equality is structural, and equal Dims hash alike."""
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1


def test_equality_with_numbers_and_strangers():
    """A constant equals its number, hash included; a symbol equals no number and no text."""
    assert Dim.const(3) == 3 and hash(Dim.const(3)) == hash(3) and 3 in {Dim.const(3)}
    assert S != 3 and S != "s" and S != T
    assert Dim.symbol("s", 1, 8) == Dim.symbol("s", 2, 4)  # one name is one symbol


def test_reading_parts():
    """value, sym, symbols."""
    assert (Dim.const(7).value, S.value, Dim.const(0).value) == (7, None, 0)
    assert S.sym is not None and S.sym.name == "s" and (2 * S).sym is None and (S // 2).sym is None
    assert (S * T + dmax(U, N) // S).symbols() == {"s", "t", "u", "n"}


# ---------------------------------------------------------------- sampled algebra
@st.composite
def expressions(draw, depth=4):
    """(Dim, function of a point) built side by side; the function is plain Python arithmetic."""
    kind = draw(st.sampled_from(["const", *RANGES])) if depth == 0 or draw(st.integers(0, 4)) == 0 else ""
    if kind == "const":
        value = draw(st.integers(-6, 9))
        return Dim.const(value), lambda p: value
    if kind:
        return SYMBOLS[kind], lambda p: p[kind]
    a, fa = draw(expressions(depth=depth - 1))
    b, fb = draw(expressions(depth=depth - 1))
    op = draw(st.sampled_from(["add", "sub", "mul", "max", "min", "floordiv", "mod"]))
    if op in ("floordiv", "mod") and b.bounds[0] <= 0 <= b.bounds[1]:
        b, fb = dmax(b, 1), lambda p, f=fb: max(f(p), 1)
    make = {"add": Dim.__add__, "sub": Dim.__sub__, "mul": Dim.__mul__, "max": dmax, "min": dmin,
            "floordiv": Dim.__floordiv__, "mod": Dim.__mod__}[op]  # fmt: skip
    plain = {"add": int.__add__, "sub": int.__sub__, "mul": int.__mul__, "max": max, "min": min,
             "floordiv": int.__floordiv__, "mod": int.__mod__}[op]  # fmt: skip
    assume(max(map(abs, (*a.bounds, *b.bounds))) < 2**30)
    return make(a, b), lambda p: plain(fa(p), fb(p))


@settings(max_examples=150)
@given(expressions(), st.lists(st.sampled_from(POINTS), min_size=12, max_size=12))
def test_simplified_dims_evaluate_as_python_does(expression, points):
    """Every simplification is right at sampled values, and every value lies in the bounds."""
    dim, plain = expression
    lo, hi = dim.bounds
    for p in points:
        assert dim.eval(p) == plain(p)
        assert lo <= plain(p) <= hi


@settings(max_examples=150)
@given(expressions(depth=3), expressions(depth=3), st.sampled_from(sorted(CMPS)))
def test_decide_is_never_wrong(a, b, cmp):
    """What decide says holds at every point; what it cannot say raises when compared."""
    answer = decide(a[0], cmp, b[0])
    if answer is None:
        with pytest.raises(KeepdimError, match=r"\[dims\] .* is true for some sizes only"):
            proven(a[0], cmp, b[0])
        return
    assert proven(a[0], cmp, b[0]) is answer
    assert all(CMPS[cmp][1](a[1](p), b[1](p)) is answer for p in POINTS[::7])


@settings(max_examples=150)
@given(expressions())
def test_text_and_table_read_back(expression):
    """parse(str(d)) and the rows of the table give the same Dim."""
    dim = expression[0]
    assert parse(str(dim), SYMBOLS) == dim
    table = DimTable(RANGES)
    row = table.id(dim)
    read = DimTable.read(table.rows, [S, T, U])
    assert read[row] == dim and read[row].bounds == dim.bounds
    assert table.id(dim) == row  # each row once


@settings(max_examples=80)
@given(expressions(depth=3), expressions(depth=2), st.sampled_from(POINTS))
def test_substitute(outer, inner, point):
    """Substituting a Dim for a symbol evaluates like substituting its value, where the result is legal at all."""
    dim, plain = outer
    try:
        replaced = dim.substitute({"t": inner[0]})
    except KeepdimError as e:
        assert "can be zero" in str(e) or "overflows" in str(e)  # t's range proved a divisor that inner's does not
        return
    if T.bounds[0] <= inner[1](point) <= T.bounds[1]:  # outside its range, t's simplifications do not hold
        assert replaced.eval(point) == plain({**point, "t": inner[1](point)})


# ---------------------------------------------------------------- comparing
@pytest.mark.parametrize(
    "a, cmp, b, answer",
    [
        (S, "ge", 1, True),
        (S, "gt", 0, True),
        (S, "lt", 9, True),
        (S, "le", 0, False),
        (S, "eq", 9, False),
        (S, "ne", 9, True),
        (S, "eq", S, True),
        (S, "eq", 4, None),
        (S, "lt", T, None),
        (S + T, "ge", S, True),
        (S + 1, "gt", S, True),
        (N, "ge", 1, True),
        (N, "lt", 100, None),
        (2 * (S // 2), "le", S, True),  # b*(a//b) <= a
        (S // 2, "le", S, True),
        (2 * (S // 2) + 1, "ge", S, True),
        (dmax(S, T), "ge", T, True),
        (dmin(S, T), "le", S, True),
        (dmin(S, T), "lt", S + 1, True),
        (dmax(S, T), "eq", S, None),
    ],
    ids=str,
)
def test_decide(a, cmp, b, answer):
    """True, False, or not known."""
    assert decide(a, cmp, b) is answer


def test_operators_decide_or_raise():
    """<, <=, >, >= and bool answer from the bounds, and never guess."""
    assert S >= 1 and S < 9 and not S > 8 and N >= 1 and bool(S)
    undecidable = (lambda: S < T, lambda: S <= 4, lambda: S > T, lambda: S >= 2, lambda: bool(T), lambda: N > 5)
    for compare in undecidable:
        with pytest.raises(KeepdimError, match="is true for some sizes only"):
            compare()


@pytest.mark.parametrize(
    "dim, now, best",
    [
        (S * S - S, (-7, 63), (0, 56)),  # intervals forget that both are the same s
        (S - S // 2, (-3, 8), (1, 4)),
        (S - dmin(S, T), (-4, 8), (0, 8)),
        (S % 3 - S, (-8, 1), (-6, 0)),  # no s has both s = 8 and s % 3 = 0
        ((S + T) % 16, (1, 13), (1, 13)),  # exact: below the divisor
        ((-S) % 4, (0, 3), (0, 3)),
        (U * U, (-12, 16), (0, 16)),  # a square is taken as a product of two
        ((S * S + S) // (S + 1), (0, 36), (1, 8)),  # only a divisor of one term is cancelled
        ((S + 1) % (S + 1), (0, 8), (0, 0)),
    ],
    ids=str,
)
def test_known_imprecision(dim, now, best):
    """Bounds as they are and as they could be: sound, not always tight. A change for the better belongs here."""
    assert dim.bounds == now
    values = [dim.eval(p) for p in POINTS]
    assert (min(values), max(values)) == best
    assert now[0] <= best[0] and best[1] <= now[1]


def test_imprecision_of_decide():
    """What holds at every point and is not proven today."""
    for a, cmp, b in [(S * S, "ge", S), (U * U, "ge", 0), ((S + 1) % 2, "ne", S % 2)]:
        assert all(CMPS[cmp][1](Dim.of(a).eval(p), Dim.of(b).eval(p)) for p in POINTS)
        assert decide(a, cmp, b) is None


# ---------------------------------------------------------------- solving forms
@pytest.mark.parametrize(
    "dim, name, form",
    [
        (S, "s", ("1", "0")),
        (2 * S + 3, "s", ("2", "3")),
        (S * T + T, "s", ("t", "t")),
        (S * T + T, "t", ("s + 1", "0")),
        (-S, "s", ("-1", "0")),
        (S * S, "s", None),
        (S // 2, "s", None),
        (S + S // 2, "s", None),
        (S * (S // 2), "s", None),
        (T + 1, "s", None),
        (S + T // 2, "s", ("1", "t//2")),
    ],
    ids=str,
)
def test_linear_in(dim, name, form):
    """mul and add with dim == mul*name + add, or None."""
    found = dim.linear_in(name)
    assert (found and tuple(map(str, found))) == form
    if found:
        assert found[0] * SYMBOLS[name] + found[1] == dim


# ---------------------------------------------------------------- errors
BIG = Dim.symbol("big", 0, INT64_MAX)


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: Dim.const(2**63), "a coefficient: overflows int64 (9223372036854775808)"),
        (lambda: Dim.const(INT64_MIN) * -1, "overflows int64"),
        (lambda: BIG + 1, "a bound: overflows int64"),
        (lambda: BIG * 2, "a bound: overflows int64"),
        (lambda: BIG * S, "a bound: overflows int64"),
        (lambda: Dim.const(INT64_MIN) // -1, "overflows int64"),
        (lambda: S // T, "divisor t: can be zero (its bounds are 0..5)"),
        (lambda: S % (T - 2), "divisor t - 2: can be zero (its bounds are -2..3)"),
        (lambda: S // 0, "divisor 0: can be zero (its bounds are 0..0)"),
        (lambda: S // (N - 1), "divisor n - 1: can be zero (its bounds are 0..)"),
        (lambda: (N * S).eval({"n": 2**62, "s": 8}), "n*s: overflows int64"),
        (lambda: (N - S).eval({"n": INT64_MIN, "s": 8}), "overflows int64"),
        (lambda: S.eval({"t": 1}), "symbol 's': has no value in {'t': 1}"),
        (lambda: Dim.symbol("a b", 0, 1), "symbol 'a b': is not an identifier"),
        (lambda: Dim.symbol("s", 3, 1), "symbol 's': has an empty range (3..1)"),
        (lambda: parse("s +", SYMBOLS), "expression 's +': is not an expression"),
        (lambda: parse("s ** 2", SYMBOLS), "expression 's ** 2': cannot be read"),
        (lambda: parse("q + 1", SYMBOLS), "cannot be read at 'q'"),
        (lambda: parse("s / 2", SYMBOLS), "cannot be read"),
        (lambda: DimTable(["t"]).id(S), "symbol 's': is not bound (known: t)"),
    ],
)
def test_errors(make, sentence):
    """Overflow, a possible division by zero and unreadable text are errors with a sentence."""
    with pytest.raises(KeepdimError) as e:
        make()
    assert str(e.value).startswith("[dims] ") and sentence in str(e.value)


# ---------------------------------------------------------------- Python and C++
def contract_of(dims, symbols):
    """A bare contract with each Dim as the value of an integer output."""
    one, zero = Dim.const(1), Dim.const(0)
    found = tuple(Symbol(d.sym.name, *d.bounds, Source("int", i, 0, one, zero)) for i, d in enumerate(symbols))
    inputs = tuple(Spec(d.sym.name, "int", (d,)) for d in symbols)
    return Contract(found, inputs, (), tuple(Spec(f"o{i}", "int", (d,)) for i, d in enumerate(dims)))


def rows_of(contract, dims):
    """The row of each Dim in the contract's own table."""
    table = contract.table()
    contract.to_wire(table)
    size = len(table.rows)
    rows = [table.id(d) for d in dims]
    assert len(table.rows) == size  # nothing new: they were all written
    return rows


@settings(max_examples=100)
@given(st.lists(expressions(), min_size=1, max_size=3), st.lists(st.sampled_from(POINTS), min_size=4, max_size=4))
def test_python_and_cpp_agree(drawn, points):
    """Values, bounds and texts of random expressions are the same on both sides."""
    dims = [d for d, _ in drawn]
    contract = contract_of(dims, [S, T, U])
    rows, data = rows_of(contract, dims), contract.to_json()
    bounds, texts = _native.dim_bounds(data), _native.dim_texts(data)
    assert [bounds[r] for r in rows] == [d.bounds for d in dims]
    assert [texts[r] for r in rows] == [
        str(d) if len(str(d)) < 1000 else texts[r] for d, r in zip(dims, rows, strict=True)
    ]
    for p in points:
        values = _native.eval_dims(data, [p["s"], p["t"], p["u"]])
        assert [values[r] for r in rows] == [d.eval(p) for d in dims]


@pytest.mark.parametrize("n", [1, 7, INT64_MAX // 2, INT64_MAX // 2 + 1, INT64_MAX])
@pytest.mark.parametrize("make", [lambda: 2 * N, lambda: N + N // 2, lambda: N * N, lambda: -N * 3, lambda: N % 7 + N])
def test_overflow_at_run_time_is_an_error_on_both_sides(make, n):
    """Unbounded symbols make no static overflow; the call that overflows is refused, and no other."""
    dim = make()
    contract = contract_of([dim], [N])
    try:
        expected = dim.eval({"n": n})
    except KeepdimError:
        with pytest.raises(_native.Error, match="does not fit int64"):
            _native.eval_dims(contract.to_json(), [n])
    else:
        assert _native.eval_dims(contract.to_json(), [n])[rows_of(contract, [dim])[0]] == expected


@pytest.mark.parametrize(
    "rows, sentence",
    [
        ([["sym", 0], ["const", 0], ["floordiv", [0, 1]]], "can be zero"),
        ([["sym", 0], ["mod", [0, 0]]], "can be zero"),
        ([["const", INT64_MAX], ["const", 1], ["add", [0, 1]]], "overflow"),
        ([["const", INT64_MIN], ["const", -1], ["mul", [0, 1]]], "overflow"),
        ([["const", INT64_MIN], ["const", -1], ["floordiv", [0, 1]]], "overflow"),
        ([["const", 2**63]], "overflow"),
    ],
)
def test_bad_tables_are_refused_on_both_sides(rows, sentence):
    """A zero divisor and an overflow in the table itself."""
    body = Contract((), (), (), ()).to_wire(DimTable())
    source = {"kind": "int", "input": 0, "index": 0, "mul": len(rows), "add": len(rows) + 1}
    body |= {
        "dims": [*rows, ["const", 1], ["const", 0], ["sym", 0]],
        "symbols": [{"name": "s", "lo": 0, "hi": 4, "source": source}],
        "inputs": [{"name": "s", "dtype": "int", "dims": [len(rows) + 2]}],
    }
    data = msgspec.json.encode({"version": 1, "contract": body})
    with pytest.raises(KeepdimError, match=rf"\[verify\] dim .*{sentence}"):
        Contract.from_json(data)
    with pytest.raises(_native.Error, match=rf"\[verify\] dim .*{sentence}"):
        _native.Contract(data)
