"""The contract: read from small exports, solved, written and read back; every sentence of a refused call."""

import pytest
import sympy
import torch
import torch.fx.experimental._config as export_config
from torch.export import Dim as D
from torch.export import export
from torch.utils._sympy.functions import FloatTrueDiv, ToFloat, TruncToInt

from keepdim import KeepdimError, _native
from keepdim.capture.contract_reader import read_shapes, to_constraints, to_dim
from keepdim.shapes.contract import Constraint, Contract, DimSource, Source, Spec, Symbol, solve
from keepdim.shapes.dim import CMPS, Dim, dmax


class Function(torch.nn.Module):
    """A model from a function; its inputs are called a_0, a_1, …"""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, *a):
        return self.f(*a)


def contract_of(f, args, shapes, oblivious=False):
    """The contract of an export, its symbols called s, t, … in order."""
    with export_config.patch(backed_size_oblivious=oblivious):
        ep = export(Function(f), args, dynamic_shapes=(shapes,), strict=False)
    shapes_read = read_shapes(ep)
    torch_names = {str(dim): name for name, dim in shapes_read.symbols.items()}
    names = [torch_names[symbol.name] for symbol in shapes_read.contract.symbols]
    return read_shapes(ep, names=dict(zip(names, "stuvw", strict=False))).contract


def check(x):
    torch._check(x.shape[0] * 3 <= 30)
    return x + 1


def two_checks(x, y):
    torch._check(x.shape[0] + y.shape[0] <= 16)
    torch._check(x.shape[0] != y.shape[0])
    return x.sum() + y.sum()


def item(x, p):
    k = p.item()
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    return x[:k]


def items(x, p):
    k = p[1].item()
    torch._check(k >= 0)
    torch._check(k <= 9)
    return x * k


X, Y, V = torch.randn(6, 4), torch.randn(3, 4), torch.randn(8)
HALF = D("h", min=2, max=8)
READ = {
    "range": (lambda x: x + 1, (X,), ({0: D("s", min=2, max=64)},), [
        "s: 2..64 from input 0 'a_0' dim 0", "a_0: f32[s, 4]", "-> add: f32[s, 4]"]),
    "nothing dynamic": (lambda x: x + 1, (X,), (None,), ["a_0: f32[6, 4]", "-> add: f32[6, 4]"]),
    "derived alone": (lambda x: x + 1, (X,), ({0: 2 * HALF},), [
        "s: 2..8 from input 0 'a_0' dim 0, where 2*s is the size", "a_0: f32[2*s, 4]", "-> add: f32[2*s, 4]"]),
    "derived with an offset": (lambda x: x + 1, (torch.randn(7),), ({0: 2 * HALF + 1},), [
        "s: 2..8 from input 0 'a_0' dim 0, where 2*s + 1 is the size", "a_0: f32[2*s + 1]", "-> add: f32[2*s + 1]"]),
    "derived beside its root": (lambda x, y: x.sum() + y, (X, Y), ({0: 2 * HALF}, {0: HALF}), [
        "s: 2..8 from input 1 'a_1' dim 0", "a_0: f32[2*s, 4]", "a_1: f32[s, 4]", "-> add: f32[s, 4]"]),
    "equal sizes of two inputs": (lambda x, y: x + y, (X, X), ({0: D("s", min=2, max=9)}, {0: D("s", min=2, max=9)}), [
        "s: 2..9 from input 0 'a_0' dim 0", "a_0: f32[s, 4]", "a_1: f32[s, 4]", "-> add: f32[s, 4]"]),
    "equality found by export": (lambda x, y: x + y, (X, X), ({0: D.AUTO(max=9)}, {0: D.AUTO(max=9)}), [
        "s: 2..9 from input 0 'a_0' dim 0", "a_0: f32[s, 4]", "a_1: f32[s, 4]", "-> add: f32[s, 4]"]),
    "divisibility": (lambda x: x.reshape(-1, 4), (V,), ({0: D.DYNAMIC(min=8, max=64)},), [
        "s: 8..64 from input 0 'a_0' dim 0", "a_0: f32[s]", "requires s % 4 == 0", "-> reshape: f32[s//4, 4]"]),
    "a check that is a range": (check, (X,), ({0: D.DYNAMIC},), [
        "s: 2..10 from input 0 'a_0' dim 0", "a_0: f32[s, 4]", "-> add: f32[s, 4]"]),
    "checks between inputs": (two_checks, (X, Y), ({0: D.DYNAMIC(max=32)}, {0: D.DYNAMIC(max=32)}), [
        "s: 2..14 from input 0 'a_0' dim 0", "t: 2..14 from input 1 'a_1' dim 0", "a_0: f32[s, 4]", "a_1: f32[t, 4]",
        "requires s + t <= 16", "requires s != t", "-> add_1: f32[]"]),
    "item": (item, (X, torch.tensor(3)), ({0: D("s", min=2, max=64)}, None), [
        "s: 2..64 from input 0 'a_0' dim 0", "t: 0..64 from input 1 'a_1' element 0", "a_0: f32[s, 4]", "a_1: i64[]",
        "requires t <= s", "-> slice_1: f32[t, 4]"]),
    "one item of many": (items, (X, torch.tensor([3, 2])), (None, None), [
        "s: 0..9 from input 1 'a_1' element 1", "a_0: f32[6, 4]", "a_1: i64[2]", "-> mul: f32[6, 4]"]),
    "integer input": (lambda x, n: x * n, (X, 3), (None, D.DYNAMIC(max=7)), [
        "s: 0..7 from input 1 'a_1'", "a_0: f32[6, 4]", "a_1: int[s]", "-> mul: f32[6, 4]"]),
    "constants": (lambda x, n, f: x * n, (X, 3, None), (None, None, None), [
        "a_0: f32[6, 4]", "a_1: int[3]", "a_2: python[]", "-> mul: f32[6, 4]"]),
    "no upper bound is held": (lambda x: x + 1, (X,), ({0: D("s", min=2)},), [
        "s: 2.. from input 0 'a_0' dim 0", "a_0: f32[s, 4]", "-> add: f32[s, 4]"]),
    "integer output": (lambda x: (x + 1, x.shape[0] * 2), (X,), ({0: D("s", min=2, max=64)},), [
        "s: 2..64 from input 0 'a_0' dim 0", "a_0: f32[s, 4]", "-> add: f32[s, 4]", "-> mul: int[2*s]"]),
    "sum of sizes": (lambda x, y: torch.cat([x, y]), (X, Y), ({0: D("s", min=2, max=64)}, {0: D("t", min=2, max=8)}), [
        "s: 2..64 from input 0 'a_0' dim 0", "t: 2..8 from input 1 'a_1' dim 0", "a_0: f32[s, 4]", "a_1: f32[t, 4]",
        "-> cat: f32[s + t, 4]"]),
}  # fmt: skip


@pytest.mark.parametrize("label", READ)
def test_read_from_an_export(label):
    """The text of the contract of a small export; it survives the wire, and C++ takes it."""
    f, args, shapes, lines = READ[label]
    contract = contract_of(f, args, shapes)
    assert str(contract).splitlines() == lines
    data = contract.to_json()
    assert Contract.from_json(data) == contract and Contract.from_json(data).to_json() == data
    assert _native.Contract(data).symbols == [s.name for s in contract.symbols]


@pytest.mark.parametrize("low", [0, 1])
def test_lower_bounds_of_0_and_1(low):
    """The declared lower end is kept where export is size oblivious."""
    contract = contract_of(lambda x: x + 1, (X,), ({0: D("s", min=low, max=64)},), oblivious=True)
    assert (contract.symbols[0].lo, contract.symbols[0].hi) == (low, 64)
    native = _native.Contract(contract.to_json())
    assert native.bind([torch.zeros(low, 4)]) == [low]
    if low:
        with pytest.raises(_native.Error, match=r"s = 0 is out of range 1\.\.64\."):
            native.check([torch.zeros(0, 4)])


def test_reading_asks_nothing_of_the_shape_env():
    """No guard and no replacement is added by reading."""
    ep = export(Function(item), (X, torch.tensor(3)), dynamic_shapes=(({0: D("s", min=2, max=64)}, None),))
    env = next(n.meta["val"].fake_mode.shape_env for n in ep.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    before = (len(env.guards), dict(env.replacements), dict(env.var_to_range))
    read_shapes(ep)
    assert (len(env.guards), dict(env.replacements), dict(env.var_to_range)) == before


# ---------------------------------------------------------------- solving
S, T, N = Dim.symbol("s", 1, 8), Dim.symbol("t", 1, 4), Dim.symbol("n", 0, 4)
ONE, ZERO = Dim.const(1), Dim.const(0)


@pytest.mark.parametrize(
    "dims, found, rest",
    [
        ([S], ["s = size 0: (1)*s + 0"], []),
        ([2 * S, S], ["s = size 1: (1)*s + 0"], []),  # the bare symbol wins
        ([2 * S + 1], ["s = size 0: (2)*s + 1"], []),
        ([S * T, 2 * T + 1], ["t = size 1: (2)*t + 1", "s = size 0: (t)*s + 0"], []),  # nonlinear, but linear in turn
        ([S + T, T], ["t = size 1: (1)*t + 0", "s = size 0: (1)*s + t"], []),
        ([S * T + S, T], ["t = size 1: (1)*t + 0", "s = size 0: (t + 1)*s + 0"], []),
        ([S * N, N], ["n = size 1: (1)*n + 0"], ["n*s"]),  # at n = 0 it says nothing about s
        ([S * (T - T // 2), T], ["t = size 1: (1)*t + 0"], ["s*t - s*(t//2)"]),  # positive, but not by its bounds
        ([S * S], [], ["s*s"]),
        ([S // 2], [], ["s//2"]),
        ([dmax(S, 4), S], ["s = size 1: (1)*s + 0"], []),
        ([S + T], [], ["s + t"]),
        ([S * S, S], ["s = size 1: (1)*s + 0"], []),
        ([Dim.const(3)], [], []),
    ],
    ids=str,
)
def test_solve(dims, found, rest):
    """Each symbol's source with its factor and offset, and the sizes that remain unsolved."""
    symbols, left = solve([DimSource("size", 0, i, d) for i, d in enumerate(dims)])
    assert [f"{x.name} = size {x.source.index}: ({x.source.mul})*{x.name} + {x.source.add}" for x in symbols] == found
    assert [str(p.dim) for p in left] == rest


def test_guards_of_one_or_the_other():
    """Such a guard is one relation of the greatest of several sizes."""
    a, b = sympy.symbols("a b", integer=True)
    dims = {"a": Dim.symbol("a", 0, 9), "b": Dim.symbol("b", 0, 9)}
    e = sympy.Or(sympy.And(a > 3, sympy.Ne(b, 2)), sympy.Eq(a, b), b >= 8)
    (constraint,) = to_constraints(e, dims, "")
    for x in range(10):
        for y in range(10):
            sides = (d.eval({"a": x, "b": y}) for d in (constraint.lhs, constraint.rhs))
            assert CMPS[constraint.cmp][1](*sides) == bool(e.subs({a: x, b: y}))
    assert to_constraints(sympy.Or(a > 3, b < 10), dims, "") == []


def test_guards_that_numbers_fit_int64():
    """torch moves sizes to the side of 2**63 - 1, where the number is then larger."""
    s = sympy.Symbol("s", integer=True)
    assert to_constraints(sympy.Le(s - 1, 2**63 - s, evaluate=False), {"s": Dim.symbol("s", 1, 9)}, "") == []


@pytest.mark.parametrize("factor", [1.7, 0.6, 1 / 3, 2.0])
def test_sizes_times_a_float(factor):
    """As Python rounds them, at every size in range; not where no ratio of small numbers gives that."""
    s = sympy.Symbol("s", integer=True)
    scaled = to_dim(TruncToInt(factor * ToFloat(s)), {"s": Dim.symbol("s", 0, 5000)})
    assert all(scaled.eval({"s": n}) == int(factor * n) for n in range(5001))
    with pytest.raises(KeepdimError, match="uses TruncToInt, which a Dim cannot express"):
        to_dim(TruncToInt(1.2345678901 * ToFloat(s)), {"s": Dim.symbol("s", 0, 5000)})


def test_what_cannot_be_solved_is_a_sentence():
    """A sympy function that a Dim does not have, and a symbol that no input shows."""
    q = sympy.Symbol("q", integer=True)
    with pytest.raises(KeepdimError, match=r"\[contract\] size .* uses FloatTrueDiv, which a Dim cannot express"):
        to_dim(FloatTrueDiv(q, sympy.Integer(2)), {"q": S})
    with pytest.raises(KeepdimError, match=r"\[contract\] symbol q: has no known source"):
        to_dim(q, {})


# ---------------------------------------------------------------- equality and text
def full_contract():
    """One of everything: a plain size, a derived one, an integer, an item, a python constant, constraints."""
    s, t, p, k = Dim.symbol("s", 1, 256), Dim.symbol("t", 1, 8), Dim.symbol("p", 0, 15), Dim.symbol("k", 0, None)
    symbols = (
        Symbol("s", 1, 256, Source("size", 0, 1, ONE, ZERO)),
        Symbol("t", 1, 8, Source("size", 1, 0, s + 1, Dim.const(-2))),
        Symbol("p", 0, 15, Source("int", 2, 0, ONE, ZERO)),
        Symbol("k", 0, None, Source("item", 3, 1, ONE, ZERO)),
    )
    inputs = (
        Spec("x", "f32", (ONE, s, Dim.const(64))),
        Spec("mask", "f32", (s * t + t - 2 + 2 * s - 2 * s,)),
        Spec("p", "int", (p,)),
        Spec("pos", "i64", (Dim.const(2),)),
        Spec("flag", "python", ()),
    )
    checks = (Constraint(p + s, "le", Dim.const(300), "the cache is full."), Constraint(s % 2, "eq", ZERO))
    return Contract(symbols, inputs, checks, (Spec("y", "f32", (s, k)), Spec("n", "int", (p + s,))))


def test_full_contract_on_the_wire():
    """Round trip, equality, text, and what makes contracts differ."""
    c = full_contract()
    assert Contract.from_json(c.to_json()) == c == full_contract() and hash(c.inputs[0]) == hash(
        full_contract().inputs[0]
    )
    assert str(c).splitlines() == [
        "s: 1..256 from input 0 'x' dim 1",
        "t: 1..8 from input 1 'mask' dim 0, where s*t + t - 2 is the size",
        "p: 0..15 from input 2 'p'",
        "k: 0.. from input 3 'pos' element 1",
        "x: f32[1, s, 64]",
        "mask: f32[s*t + t - 2]",
        "p: int[p]",
        "pos: i64[2]",
        "flag: python[]",
        "requires p + s <= 300",
        "requires s % 2 == 0",
        "-> y: f32[s, k]",
        "-> n: int[p + s]",
    ]
    assert Contract(c.symbols, c.inputs, c.constraints[:1], c.outputs) != c
    assert Contract((*c.symbols[:1],), c.inputs, c.constraints, c.outputs) != c


# ---------------------------------------------------------------- sentences
def bound(symbols, inputs, checks=()):
    return Contract(tuple(symbols), tuple(inputs), tuple(checks), ()).to_json()


def size(name, lo, hi, place, index, mul=ONE, add=ZERO):
    return Symbol(name, lo, hi, Source("size", place, index, mul, add))


_s, _s2, _t, _p = Dim.symbol("s", 1, 256), Dim.symbol("s", 1, 16), Dim.symbol("t", 1, 8), Dim.symbol("p", 0, 15)
_n = Dim.symbol("n", 1, None)
PLAIN = bound([size("s", 1, 256, 0, 1)], [Spec("x", "f32", (ONE, _s, Dim.const(64))), Spec("mask", "f32", (2 * _s,))])
DERIVED = bound([size("s", 1, 16, 0, 0, Dim.const(2), ONE)], [Spec("x", "f32", (2 * _s2 + 1,))])
TWICE = bound([size("s", 1, 16, 0, 0, Dim.const(2))], [Spec("x", "f32", (2 * _s2,))])
NESTED = bound(
    [size("t", 1, 8, 1, 0), size("s", 1, 16, 0, 0, _t // 2 + 1, 8 - _t)],
    [Spec("x", "f32", ((_t // 2 + 1) * _s2 - _t + 8,)), Spec("y", "f32", (_t,))],
)
QUOTIENT = bound(
    [size("t", 2, 8, 1, 0), size("s", 1, 16, 0, 0, Dim.symbol("t", 2, 8) // 2)],
    [Spec("x", "f32", ((Dim.symbol("t", 2, 8) // 2) * _s2,)), Spec("y", "f32", (Dim.symbol("t", 2, 8),))],
)
INTS = bound(
    [size("s", 1, 256, 0, 0), Symbol("p", 0, 15, Source("int", 1, 0, ONE, ZERO))],
    [Spec("x", "f32", (_s,)), Spec("p", "int", (_p,)), Spec("n", "int", (Dim.const(5),)), Spec("q", "int", (_p + 1,))],
    [Constraint(_p + _s, "le", Dim.const(16), "torch._check(p + s <= 16)"), Constraint(_s, "ne", _p)],
)
ITEM = bound([Symbol("p", 0, 15, Source("item", 0, 1, ONE, ZERO))], [Spec("pt", "i32", (Dim.const(2),))])
OPEN = bound([size("n", 1, None, 0, 0)], [Spec("x", "f32", (_n,))], [Constraint(_n * _n, "ge", Dim.const(9))])
ANY = bound([], [Spec("flag", "python", ()), Spec("x", "bool", ())])


def f32(*sizes):
    return torch.zeros(sizes)


SENTENCES = [
    ("count", PLAIN, [f32(1, 3, 64)] * 3, "[bind] call: expected 2 inputs, got 3."),
    ("dtype", PLAIN, [f32(1, 3, 64).long(), f32(6)], "[bind] input 0 'x': expected dtype f32, got i64."),
    (
        "dtype we lack",
        PLAIN,
        [f32(1, 3, 64).to(torch.complex64), f32(6)],
        "[bind] input 0 'x': expected dtype f32, got torch.complex64.",
    ),
    ("no tensor", PLAIN, [3, f32(6)], "[bind] input 0 'x': expected a torch.Tensor of f32, got int."),
    ("none", PLAIN, [None, f32(6)], "[bind] input 0 'x': expected a torch.Tensor of f32, got NoneType."),
    ("rank", PLAIN, [f32(3, 64), f32(6)], "[bind] input 0 'x': expected 3 dims [1, s, 64], got 2 ([3, 64])."),
    (
        "rank before range",
        PLAIN,
        [f32(1, 0, 64), f32(6, 1)],
        "[bind] input 1 'mask': expected 1 dims [2*s], got 2 ([6, 1]).",
    ),
    ("range above", PLAIN, [f32(1, 257, 64), f32(6)], "[bind] input 0 'x' dim 1: s = 257 is out of range 1..256."),
    ("range below", PLAIN, [f32(1, 0, 64), f32(6)], "[bind] input 0 'x' dim 1: s = 0 is out of range 1..256."),
    ("open range", OPEN, [f32(0)], "[bind] input 0 'x' dim 0: n = 0 is out of range 1..."),
    ("constant size", PLAIN, [f32(1, 3, 4), f32(6)], "[bind] input 0 'x' dim 2: expected 64, got 4."),
    (
        "derived size",
        PLAIN,
        [f32(1, 17, 64), f32(32)],
        "[bind] input 1 'mask' dim 0: expected 2*s = 34 (s = 17 from input 0 'x' dim 1), got 32.",
    ),
    ("not divisible", TWICE, [f32(7)], "[bind] input 0 'x' dim 0: 2*s = 7 has no integer s."),
    ("not divisible with an offset", DERIVED, [f32(8)], "[bind] input 0 'x' dim 0: 2*s + 1 = 8 has no integer s."),
    (
        "range of a derived size",
        DERIVED,
        [f32(35)],
        "[bind] input 0 'x' dim 0: s = 17 is out of range 1..16 (2*s + 1 = 35).",
    ),
    (
        "factor and offset are dims",
        NESTED,
        [f32(3), f32(4)],
        "[bind] input 0 'x' dim 0: (t//2 + 1)*s - t + 8 = 3 has no integer s.",
    ),
    ("factor is a quotient", QUOTIENT, [f32(3), f32(4)], "[bind] input 0 'x' dim 0: (t//2)*s = 3 has no integer s."),
    ("integer out of range", INTS, [f32(4), -3, 5, 1], "[bind] input 1 'p': p = -3 is out of range 0..15."),
    ("constant integer", INTS, [f32(4), 2, 6, 3], "[bind] input 2 'n': expected 5, got 6."),
    (
        "derived integer",
        INTS,
        [f32(4), 2, 5, 4],
        "[bind] input 3 'q': expected p + 1 = 3 (p = 2 from input 1 'p'), got 4.",
    ),
    ("integer is a float", INTS, [f32(4), 2.0, 5, 3], "[bind] input 1 'p': expected dtype int, got float."),
    ("integer is a bool", INTS, [f32(4), True, 5, 3], "[bind] input 1 'p': expected dtype int, got bool."),
    ("integer is huge", INTS, [f32(4), 2**64, 5, 3], "[bind] input 1 'p': the integer does not fit int64."),
    (
        "constraint",
        INTS,
        [f32(4), 14, 5, 15],
        "[check] p + s <= 16: not true for p + s = 18 (p = 14 from input 1 'p', s = 4 from input 0 'x' dim 0). "
        "torch._check(p + s <= 16)",
    ),
    (
        "constraint without a sentence",
        INTS,
        [f32(4), 4, 5, 5],
        "[check] s != p: not true for s = 4, p = 4 (s = 4 from input 0 'x' dim 0, p = 4 from input 1 'p').",
    ),
    (
        "constraint on a product",
        OPEN,
        [f32(2)],
        "[check] n*n >= 9: not true for n*n = 4 (n = 2 from input 0 'x' dim 0).",
    ),
    (
        "item",
        ITEM,
        [torch.tensor([1, 99], dtype=torch.int32)],
        "[bind] input 0 'pt' element 1: p = 99 is out of range 0..15.",
    ),
    (
        "item in too small a tensor",
        ITEM,
        [torch.tensor([1], dtype=torch.int32)],
        "[bind] input 0 'pt' element 1: the tensor has fewer elements.",
    ),
    ("python is not looked at", ANY, ["what", f32()], "[bind] input 1 'x': expected dtype bool, got f32."),
]


@pytest.mark.parametrize("label, contract, args, sentence", SENTENCES, ids=[row[0] for row in SENTENCES])
def test_sentence(label, contract, args, sentence):
    """What a refused call says, exactly; check says the same as bind."""
    native = _native.Contract(contract)
    for call in (native.bind, native.check):
        with pytest.raises(_native.Error) as e:
            call(args)
        assert str(e.value) == sentence


@pytest.mark.parametrize(
    "contract, args, values",
    [
        (PLAIN, [f32(1, 17, 64), f32(34)], [17]),
        (DERIVED, [f32(33)], [16]),
        (NESTED, [f32(13), f32(4)], [4, 3]),
        (INTS, [f32(4), 3, 5, 4], [4, 3]),
        (ITEM, [torch.tensor([99, 7], dtype=torch.int32)], [7]),
        (ITEM, [torch.tensor([99, 0, 7, 0], dtype=torch.int32)[::2]], [7]),  # strided
        (OPEN, [torch.empty(1 << 30, device="meta")], [1 << 30]),
        (ANY, ["what", torch.tensor(True)], []),
    ],
)
def test_good_calls_bind(contract, args, values):
    """The values of the symbols, in order, also right after a refused call."""
    native = _native.Contract(contract)
    with pytest.raises(_native.Error):
        native.bind([*args, 0])
    assert native.bind(args) == values == native.bind(tuple(args))


def test_a_size_that_overflows_is_refused():
    """An unbounded symbol whose square does not fit."""
    with pytest.raises(_native.Error) as e:
        _native.Contract(OPEN).bind([torch.empty(1 << 40, device="meta")])
    assert str(e.value) == "[bind] call: n*n does not fit int64 (n = 1099511627776 from input 0 'x' dim 0)."
